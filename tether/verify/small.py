"""Models small enough to train in a second: the architecture of a given config with narrow layers, or else a tiny Llama."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tether.errors import UserError
from tether.hub import quiet
from tether.models import save_model

TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|pad|>", "<|start|>", "<|end|>")
SPREAD = 0.2  # of fresh weights: scores far enough apart to tell right from wrong
# Width by the names that configs use for it; what a config does not have is left alone.
NARROW: dict[str, Any] = {
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "n_inner": 48,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "word_embed_proj_dim": 32,
    "query_pre_attn_scalar": 8,
    "max_window_layers": 1,
}


def llama_config(vocabulary: int, **changes: Any) -> Any:
    """Two layers of width 32."""
    from transformers import LlamaConfig

    size = {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "initializer_range": SPREAD,
    }
    return LlamaConfig(**{**size, **changes})


def random_model(config: Any, seed: int = 0) -> Any:
    """A causal language model with fresh float32 weights; the global random state is left alone."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def narrowed(config: Any) -> Any:
    """The same architecture, two layers of width 32. The vocabulary stays, because the tokenizer does."""
    made = copy.deepcopy(config)
    text = made.get_text_config()
    for name, value in NARROW.items():
        old = getattr(text, name, None)
        if isinstance(old, int) and not isinstance(old, bool):
            setattr(text, name, value)
    # One head of keys and values for each head of queries stays so; a few shared ones become two.
    if getattr(config.get_text_config(), "num_key_value_heads", None) == getattr(config.get_text_config(), "num_attention_heads", None):
        text.num_key_value_heads = getattr(text, "num_attention_heads", None)
    if getattr(text, "layer_types", None):
        kinds = list(dict.fromkeys(text.layer_types))
        text.layer_types = (kinds * 2)[:2]
    if hasattr(text, "initializer_range"):
        text.initializer_range = SPREAD
    if hasattr(made, "quantization_config"):
        del made.quantization_config
    return made


def save_small(config: Any, tokenizer: Any, folder: Path, seed: int = 0) -> Path | None:
    """A narrow model of the architecture with the same tokenizer, as a model folder; None where the architecture cannot be narrowed.

    What goes wrong there has as many names as there are architectures, and a tiny Llama takes the place.
    """
    from tether.engine import Engine

    try:
        model = random_model(narrowed(config), seed)
        Engine(model, precision="fp32")  # it can be run
    except (UserError, ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError):
        return None
    return save_model(stirred(model, seed), tokenizer, folder)


def save_llama(tokenizer: Any, folder: Path, seed: int = 0) -> Path:
    """A tiny Llama with this tokenizer, as a model folder."""
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return save_model(stirred(random_model(llama_config(len(tokenizer), **ends), seed), seed), tokenizer, folder)


def stirred(model: Any, seed: int, size: float = 0.05) -> Any:
    """Norms and biases start as ones and zeros, where some mistakes do not show."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
    return model


def move(parameters: Iterable[nn.Parameter], size: float = 0.02, seed: int = 5) -> None:
    """Stand-in for training: every parameter moves by a random amount."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_((torch.randn(parameter.shape, generator=generator) * size).to(parameter))


def byte_tokenizer() -> Any:
    """One token for each byte, so that it knows every text, with a chat template of start and end marks."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate([*SPECIAL, *letters])}, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIAL))
    pad, start, end = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, chat_template=TEMPLATE, pad_token=pad, eos_token=end, additional_special_tokens=[start]
    )
