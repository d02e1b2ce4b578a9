"""One forward pass of sampling: all live sequences by one token, and whole prompts that enter.

`SlotRunner` is the fast way, for models that go through transformers' attention interface. `PlainRunner` serves every other
model (recurrent layers, position biases): each sequence alone with transformers' own cache, the same numbers more slowly.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tether.engines.kv import Prompt, Slots, Step, running


@dataclass(frozen=True)
class Entering:
    """A prompt to prefill for slots `first..first + count`; `keep` it for completions that enter later (the last prompt only)."""

    tokens: Sequence[int]
    first: int
    count: int
    keep: bool


class Runner(Protocol):
    """State per slot. Live sequences occupy slots 0..n-1."""

    device: torch.device

    def open(self, rows: int) -> None: ...
    def widen(self, rows: int, live: int) -> None: ...
    def step(self, last: Sequence[int], lengths: Sequence[int], entering: Sequence[Entering]) -> tuple[Tensor, Any]:
        """Scores (n + g, V) after the last token of each live sequence and of each prompt; what was kept of the last prompt."""
        ...

    def insert(self, kept: Any, first: int, count: int) -> None: ...
    def move(self, source: int, target: int, length: int) -> None: ...
    def close(self) -> None: ...


class SlotRunner:
    """Live tokens and entering prompts as one stream over `Slots`."""

    def __init__(self, model: Any, dtype: torch.dtype | None = None) -> None:
        self.model, self.dtype = model, dtype
        self.takes = frozenset(inspect.signature(model.forward).parameters)
        self.device = next(model.parameters()).device
        self.slots = Slots(0)

    def open(self, rows: int) -> None:
        self.slots = Slots(rows, self.dtype)

    def close(self) -> None:
        self.slots = Slots(0)

    def widen(self, rows: int, live: int) -> None:
        self.slots.widen(rows, live)

    def step(self, last: Sequence[int], lengths: Sequence[int], entering: Sequence[Entering]) -> tuple[Tensor, Any]:
        tokens, positions, ends, prompts = list(last), list(lengths), list(range(len(last))), []
        for e in entering:
            start = len(tokens)
            tokens.extend(e.tokens)
            positions.extend(range(len(e.tokens)))
            ends.append(len(tokens) - 1)
            prompts.append(Prompt(start, len(tokens), e.first, e.count, e.keep))
        step = Step(self.slots, lengths, prompts, self.device)
        stream = torch.tensor([tokens, positions], device=self.device)
        inputs: dict[str, Any] = {"input_ids": stream[:1], "position_ids": stream[1:], "use_cache": False}
        whole = len(ends) == len(tokens)
        if not whole and "logits_to_keep" in self.takes:
            inputs["logits_to_keep"] = torch.tensor(ends, device=self.device)
        with running(step):
            logits = self.model(**inputs).logits[0]
        if not whole and "logits_to_keep" not in self.takes:
            logits = logits[ends]
        return logits, step.kept or None

    def insert(self, kept: Any, first: int, count: int) -> None:
        self.slots.insert(kept, first, count)

    def move(self, source: int, target: int, length: int) -> None:
        self.slots.move(source, target, length)


class PlainRunner:
    """Each sequence alone, with the cache that the model makes for itself."""

    def __init__(self, model: Any) -> None:
        self.model = model
        names = inspect.signature(model.forward).parameters
        self.cache_name = next((n for n in ("cache", "past_key_values", "cache_params") if n in names), None)
        self.device = next(model.parameters()).device
        self.states: dict[int, Any] = {}

    def open(self, rows: int) -> None:
        self.states = {}

    def close(self) -> None:
        self.states = {}

    def widen(self, rows: int, live: int) -> None:
        pass  # every sequence has a cache of its own

    def step(self, last: Sequence[int], lengths: Sequence[int], entering: Sequence[Entering]) -> tuple[Tensor, Any]:
        rows: list[Tensor] = []
        kept: Any = None
        for slot, token in enumerate(last):
            logits, self.states[slot] = self._forward([token], self.states[slot])
            rows.append(logits)
        for e in entering:
            logits, state = self._forward(list(e.tokens), None)
            rows.append(logits)
            self.insert(state, e.first, e.count)
            kept = state if e.keep else None
        return torch.stack(rows), kept

    def insert(self, kept: Any, first: int, count: int) -> None:
        for slot in range(first, first + count):
            self.states[slot] = copy.deepcopy(kept)

    def move(self, source: int, target: int, length: int) -> None:
        self.states[target] = self.states.pop(source)

    def _forward(self, tokens: list[int], state: Any) -> tuple[Tensor, Any]:
        """Scores (V,) after the tokens, and the state that includes them. Without any cache the state is the tokens so far."""
        if self.cache_name is None:
            tokens = (state or []) + tokens
            return self.model(input_ids=torch.tensor([tokens], device=self.device)).logits[0, -1], tokens
        inputs: dict[str, Any] = {"input_ids": torch.tensor([tokens], device=self.device), "use_cache": True}
        if state is not None:
            inputs[self.cache_name] = state
        out = self.model(**inputs)
        state = getattr(out, self.cache_name, None)
        if state is None:  # a model that names its cache otherwise in its output
            state = next(v for k, v in out.items() if k in ("cache", "past_key_values", "cache_params"))
        return out.logits[0, -1], state
