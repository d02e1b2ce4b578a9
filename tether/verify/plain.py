"""The same numbers without the engine: each row alone through transformers' own forward pass, then log_softmax over the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tether.adapters import is_adapted
from tether.batch import Example


def logprobs(model: Any, examples: Sequence[Example], temperature: float = 1.0) -> Tensor:
    """log pi of every trained token, in order of examples, answers and tokens, (M,)."""
    found = []
    device = next(model.parameters()).device
    for example in examples:
        for answer, trained in zip(example.answers, example.trained, strict=True):
            row = torch.tensor([example.prompt + answer], device=device)
            places = _trained_places(example.prompt, trained)
            scores = model(input_ids=row, use_cache=False).logits[0, [p - 1 for p in places]]  # (m, V)
            logps = torch.log_softmax(scores.to(torch.promote_types(scores.dtype, torch.float32)) / temperature, -1)
            found.append(logps[range(len(places)), row[0, places]])
    return torch.cat(found)


def _trained_places(prompt: Sequence[int], trained: Sequence[bool]) -> list[int]:
    """Places of the trained tokens in the row of prompt and answer; the row's first token is predicted by nothing."""
    return [place for place, wanted in enumerate(trained, len(prompt)) if wanted and place]


def scores(model: Any, examples: Sequence[Example]) -> Tensor:
    """What a reward model says of every answer, (A, heads): its head on the hidden state of the row's last token."""
    base = model.get_base_model() if is_adapted(model) else model
    trunk = getattr(base, base.base_model_prefix)
    found = []
    for example in examples:
        for answer in example.answers:
            row = torch.tensor([example.prompt + answer], device=next(model.parameters()).device)
            found.append(base.score(trunk(input_ids=row, use_cache=False).last_hidden_state[0, -1]))
    return torch.stack(found)


def values(model: Any, head: Any, examples: Sequence[Example]) -> Tensor:
    """What a critic's head says ahead of every trained token, (M,); `model` is the one whose hidden states it reads."""
    found = []
    for example in examples:
        for answer, trained in zip(example.answers, example.trained, strict=True):
            row = torch.tensor([example.prompt + answer], device=next(model.parameters()).device)
            hidden = model(input_ids=row, use_cache=False, output_hidden_states=True).hidden_states[-1][0]  # (T, H)
            found.append(head(hidden[[p - 1 for p in _trained_places(example.prompt, trained)]].float())[:, 0])
    return torch.cat(found)


def values_of_scalar(model: Any, examples: Sequence[Example]) -> Tensor:
    """As `values`, for a critic that is a model of its own."""
    base = model.get_base_model() if is_adapted(model) else model
    trunk = getattr(base, base.base_model_prefix)
    found = []
    for example in examples:
        for answer, trained in zip(example.answers, example.trained, strict=True):
            row = torch.tensor([example.prompt + answer], device=next(model.parameters()).device)
            hidden = trunk(input_ids=row, use_cache=False).last_hidden_state[0]
            found.append(base.score(hidden[[p - 1 for p in _trained_places(example.prompt, trained)]])[:, 0])
    return torch.cat(found)


def by_answer(values_: Tensor, examples: Sequence[Example]) -> list[Tensor]:
    """(M,) cut into answers."""
    counts = [sum(t) for example in examples for t in example.trained]
    return list(values_.split(counts))
