"""A policy that can be written out whole: a tiny transformer over four tokens, answers of at most three, forty strings in all.

The prompt is `PROMPT`, two different words. After a prompt of one word "a" the prefixes "", "a" and "a a" would be runs of one token
alone: whatever attention mixes of equal values is that value, so the model would give the same next token after all three, and no
method could bring it to its fixed point. The end token would not do either: it is the padding token, whose embedding is fixed at 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tether.batch import Example
from tether.models import save_model
from tether.packing import pack
from tether.policy import Policy
from tether.token_rows import to_rows
from tether.verify.small import llama_config, random_model

WORDS = ["a", "b", "c", "</s>"]
END, LENGTH = 3, 3
PROMPT, PROMPT_IDS = "b a", [1, 0]


def strings(prefix: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Every answer: ended by the end token, or cut at three tokens."""
    for token in range(4):
        if token == END or len(prefix) == LENGTH - 1:
            yield (*prefix, token)
        else:
            yield from strings((*prefix, token))


STRINGS = list(strings())
INDEX = {s: i for i, s in enumerate(STRINGS)}
MASK = torch.tensor([[t < len(s) for t in range(LENGTH)] for s in STRINGS])  # (40, 3)
LENGTHS = MASK.sum(1)  # (40,)
# What each string earns: fixed numbers between 0 and 1, a few of them equal.
REWARDS = torch.rand(len(STRINGS), generator=torch.Generator().manual_seed(7), dtype=torch.float64).mul(10).round().div(10)


def reward(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float]:
    """`REWARDS` as a reward function."""
    return [float(REWARDS[INDEX[tuple(ids)]]) for ids in completion_ids]


def save(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A model folder: the tokenizer of `WORDS` and random weights."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token=WORDS[1]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="</s>")
    ids = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": END}
    size = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "tie_word_embeddings": False}
    return save_model(random_model(llama_config(4, **{**size, **ids, **changes}), seed), tokenizer, folder)


def table(policy: Policy) -> Tensor:
    """Log-probs (40, 3) of every string after `PROMPT`, with gradient."""
    answers = [list(s) for s in STRINGS]
    packed = pack([Example(list(PROMPT_IDS), answers, [[True] * len(a) for a in answers])])
    return to_rows(packed, policy.logprobs(packed), LENGTH)


def distribution(policy: Policy) -> Tensor:
    """(40,) float64; it sums to 1."""
    with torch.no_grad():
        return table(policy).double().sum(1).exp()


def total_variation(p: Tensor, q: Tensor) -> float:
    return 0.5 * float((p - q).abs().sum())


@dataclass(frozen=True)
class Tree:
    """The same strings as free logits per prefix (13, 4): what a policy without shared weights could do."""

    states: dict[tuple[int, ...], int]
    rows: Tensor  # (40, 3) state of each token
    tokens: Tensor  # (40, 3)

    @classmethod
    def made(cls) -> Tree:
        states = {p: i for i, p in enumerate(sorted({s[:t] for s in STRINGS for t in range(len(s))}))}
        rows, tokens = torch.zeros(40, LENGTH, dtype=torch.long), torch.zeros(40, LENGTH, dtype=torch.long)
        for i, s in enumerate(STRINGS):
            for t, token in enumerate(s):
                rows[i, t], tokens[i, t] = states[s[:t]], token
        return cls(states, rows, tokens)

    def logps(self, logits: Tensor) -> Tensor:
        """(13, 4) -> (40, 3), 0 behind a string's end."""
        return logits.log_softmax(-1)[self.rows, self.tokens] * MASK
