"""Tiny models and tokenizers made from a config, for tests: two layers, a hundred words, nothing downloaded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import LlamaConfig, PreTrainedTokenizerFast

from tether.batch import Example
from tether.models import save_model
from tether.verify.small import llama_config, random_model

TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} </s> {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"


def tiny_config(vocab: int = 100, **changes: Any) -> LlamaConfig:
    return llama_config(vocab, **changes)


def tiny_model(config: Any = None, seed: int = 0) -> Any:
    return random_model(config or tiny_config(), seed)


def tiny_tokenizer(vocab: int = 100, template: str | None = TEMPLATE, pad: str | None = "</s>") -> Any:
    """Words w6 ... and the roles; pad is the end mark, as many real tokenizers have it."""
    words = ["<unk>", "<s>", "</s>", "user", "assistant", "system"]
    words += [f"w{i}" for i in range(len(words), vocab)]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.decoder = tokenizers.decoders.WordPiece(prefix="##")
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    if pad is not None:
        names["pad_token"] = pad
    return PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template, **names)


def save_tiny(folder: Path, config: Any = None, seed: int = 0, tokenizer: Any = None) -> Path:
    model = tiny_model(config, seed)
    return save_model(model, tokenizer or tiny_tokenizer(model.config.vocab_size), folder)


def some_examples(n: int = 4, answers: int = 2, vocab: int = 100, seed: int = 0) -> list[Example]:
    """Prompts of 3 to 9 tokens with answers of 2 to 12, each ending in the end mark."""
    draw = random.Random(seed)

    def words(low: int, high: int) -> list[int]:
        return [draw.randrange(6, vocab) for _ in range(draw.randint(low, high))]

    out = []
    for _ in range(n):
        texts = [[*words(1, 11), 2] for _ in range(answers)]
        out.append(Example(words(3, 9), texts, [[True] * len(t) for t in texts]))
    return out


def move(parameters: dict[str, Any], size: float = 0.1, seed: int = 1) -> None:
    """Stand-in for training: every parameter moves by a random amount."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
