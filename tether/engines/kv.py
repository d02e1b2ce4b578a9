"""Keys and values of many sequences in preallocated slots, and attention over them.

A sequence's token t lies at index t of its slot: no padding, so positions are indices. Live sequences occupy slots 0..n-1
without gaps. One forward pass takes a stream of tokens, (1, N): first one token for each live sequence, then whole prompts,
each prefilled once for all the slots that share it.

Keys are stored transposed, (slots, heads, D, capacity): on CPU scores are then a plain row-times-matrix product, about twice
as fast as masked SDPA for single queries (see docs/generate.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

IMPLEMENTATION = "tether_slots"
ROUND = 32  # lengths are rounded up to this: matmul kernels are built once per shape, and lengths change at every step
ROWS_PER_BLOCK = 16  # sequences that read keys up to a common length
QUERIES_PER_TILE = 128

_step: ContextVar[Step | None] = ContextVar("tether_slots", default=None)


class Unsupported(Exception):
    """The model asks its attention for something that slots do not have."""


@dataclass(frozen=True)
class Prompt:
    """A prompt in the stream and the slots that get its keys and values: slots `first..first + count`."""

    start: int
    end: int
    first: int
    count: int
    keep: bool = False  # also keep a copy, for members of the group that enter later


@dataclass(frozen=True)
class Block:
    """Sequences `first..last` attend to keys up to index `end`."""

    first: int
    last: int
    end: int


class Slots:
    """The store for `rows` sequences, for every attention module of a model. `capacity` follows the longest of them:
    a matrix read to its full length is read in place, while of a slice the kernels make a copy first."""

    def __init__(self, rows: int, dtype: torch.dtype | None = None) -> None:
        self.rows, self.capacity, self.dtype = rows, 0, dtype
        self.layers: dict[nn.Module, tuple[Tensor, Tensor]] = {}  # keys (rows, KH, D, capacity), values (rows, KH, capacity, D)

    def layer(self, module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers of one module, made at its first use. key, value: (1, KH, N, D)."""
        if module not in self.layers:
            # Zeros: places that were never written are masked, and a mask does not cover NaN.
            keys = torch.zeros(self.rows, key.shape[1], key.shape[3], self.capacity, dtype=self.dtype or key.dtype, device=key.device)
            values = torch.zeros(self.rows, value.shape[1], self.capacity, value.shape[3], dtype=keys.dtype, device=key.device)
            self.layers[module] = keys, values
        return self.layers[module]

    def bytes_per_token(self) -> int:
        """Of one token of one sequence, over all layers."""
        return sum((k.shape[1] * k.shape[2] + v.shape[1] * v.shape[3]) * k.element_size() for k, v in self.layers.values())

    def reserve(self, length: int, live: int) -> None:
        """Room for sequences of `length` tokens; also gives room back once the longest is less than half of it."""
        wanted = round_up(length)
        if wanted > self.capacity or 2 * wanted < self.capacity:
            self._resize(self.rows, round_up(length + length // 8), live)

    def widen(self, rows: int, live: int) -> None:
        self._resize(rows, self.capacity, live)

    def move(self, source: int, target: int, length: int) -> None:
        """Sequence of slot `source`, of `length` tokens, to slot `target`."""
        for keys, values in self.layers.values():
            keys[target, :, :, :length] = keys[source, :, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def insert(self, kept: dict[nn.Module, tuple[Tensor, Tensor]], first: int, count: int) -> None:
        """A kept prompt into slots `first..first + count`."""
        for module, (k, v) in kept.items():
            keys, values = self.layers[module]
            keys[first : first + count, :, :, : k.shape[2]] = k
            values[first : first + count, :, : v.shape[1]] = v

    def _resize(self, rows: int, capacity: int, live: int) -> None:
        """New buffers with the first `live` slots carried over; one layer at a time, so that memory holds one layer twice."""
        length = min(self.capacity, capacity)
        self.rows, self.capacity = rows, capacity
        for module, (keys, values) in self.layers.items():
            new_keys = keys.new_zeros(rows, *keys.shape[1:3], capacity)
            new_values = values.new_zeros(rows, values.shape[1], capacity, values.shape[3])
            new_keys[:live, :, :, :length] = keys[:live, :, :, :length]
            new_values[:live, :, :length] = values[:live, :, :length]
            self.layers[module] = new_keys, new_values


class Step:
    """One forward pass: `lengths[i]` tokens are stored for live sequence i before it; token i of the stream is its next."""

    def __init__(self, slots: Slots, lengths: Sequence[int], prompts: Sequence[Prompt], device: torch.device) -> None:
        slots.reserve(max([n + 1 for n in lengths] + [p.end - p.start for p in prompts]), len(lengths))
        self.slots, self.n, self.prompts = slots, len(lengths), prompts
        self.kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self.rows = torch.arange(self.n, device=device)
        self.lengths = torch.tensor(list(lengths), dtype=torch.long, device=device)
        self.blocks = _blocks(lengths, slots.capacity)
        self._shortest = [min(lengths[b.first : b.last]) for b in self.blocks]
        self._masks: dict[tuple[int, int | None], tuple[int, Tensor]] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
        """query (1, H, N, D), key and value (1, KH, N, D or Dv) -> (1, N, H, Dv)."""
        keys, values = self.slots.layer(module, key, value)
        q, k, v = query[0].to(keys.dtype), key[0].to(keys.dtype), value[0].to(keys.dtype)
        out = torch.empty(q.shape[1], q.shape[0], v.shape[2], dtype=v.dtype, device=v.device)  # (N, H, Dv)
        if self.n:
            self._one_token_each(q[:, : self.n], k[:, : self.n], v[:, : self.n], keys, values, rules, out[: self.n])
        for prompt in self.prompts:
            span = slice(prompt.start, prompt.end)
            kt, vp = k[:, span].transpose(1, 2), v[:, span]  # (KH, D, P), (KH, P, Dv)
            length, group = prompt.end - prompt.start, slice(prompt.first, prompt.first + prompt.count)
            keys[group, :, :, :length] = kt
            values[group, :, :length] = vp
            if prompt.keep:
                self.kept[module] = kt.clone(), vp.clone()
            _causal(q[:, span], kt, vp, rules, out[span])
        return out[None].to(value.dtype)

    def _one_token_each(self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rules: Rules, out: Tensor) -> None:
        """q (H, n, D), k (KH, n, D), v (KH, n, Dv), out (n, H, Dv)."""
        heads, n, _ = q.shape
        key_heads = k.shape[0]
        keys[self.rows, :, :, self.lengths] = k.transpose(0, 1)
        values[self.rows, :, self.lengths] = v.transpose(0, 1)
        grouped = q.transpose(0, 1).reshape(n, key_heads, heads // key_heads, -1)
        out = out.view(n, key_heads, heads // key_heads, -1)
        for i, block in enumerate(self.blocks):
            rows = slice(block.first, block.last)
            start, mask = self._mask(i, rules.window)
            z = torch.matmul(grouped[rows], keys[rows, :, :, start : block.end]).to(torch.float32)  # (b, KH, G, L)
            p = torch.softmax(rules.bend(z).add_(mask), -1).to(values.dtype)
            out[rows] = torch.matmul(p, values[rows, :, start : block.end])

    def _mask(self, i: int, window: int | None) -> tuple[int, Tensor]:
        """First key that some sequence of block i may see, and what is added to its scores, (b, 1, 1, L)."""
        if (i, window) not in self._masks:
            block = self.blocks[i]
            at = self.lengths[block.first : block.last, None]  # (b, 1) index of the query
            start = 0 if window is None else max(0, self._shortest[i] - window + 1) // ROUND * ROUND
            keys = torch.arange(start, block.end, device=at.device)
            hidden = keys > at
            if window is not None:
                hidden |= keys <= at - window
            mask = torch.zeros(hidden.shape, device=at.device).masked_fill_(hidden, float("-inf"))
            self._masks[i, window] = start, mask[:, None, None]
        return self._masks[i, window]


@dataclass(frozen=True)
class Rules:
    """What an architecture asks of its attention."""

    scaling: float
    window: int | None  # a query sees the last `window` keys, its own included
    softcap: float | None

    def bend(self, z: Tensor) -> Tensor:
        """Products of queries and keys, changed in place, to scores."""
        z = z.mul_(self.scaling)
        return z.div_(self.softcap).tanh_().mul_(self.softcap) if self.softcap else z


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls; the step of the moment says what is what in the stream."""
    step = current_step()
    if not getattr(module, "is_causal", True) or attention_mask is not None:
        raise Unsupported("its attention is not causal" if attention_mask is None else "it brings an attention mask of its own")
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise Unsupported("its attention has sinks or a position bias")
    rules = Rules(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    return step.attend(module, query, key, value, rules), None


def current_step() -> Step:
    step = _step.get()
    if step is None:
        raise RuntimeError("attention over slots was called outside a sampling step")
    return step


@contextlib.contextmanager
def running(step: Step) -> Iterator[None]:
    AttentionInterface.register(IMPLEMENTATION, attention)
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def round_up(length: int) -> int:
    return -(-length // ROUND) * ROUND


def _blocks(lengths: Sequence[int], capacity: int) -> list[Block]:
    """Neighbouring sequences that read up to a common length, so that one long sequence does not set it for all.

    Only a block of at most half the capacity is worth reading in part, as a part is copied before it is read.
    """
    blocks: list[Block] = []
    for first in range(0, len(lengths), ROWS_PER_BLOCK):
        last = min(first + ROWS_PER_BLOCK, len(lengths))
        needed = round_up(max(lengths[first:last]) + 1)
        end = needed if 2 * needed <= capacity else capacity
        if blocks and blocks[-1].end == end:
            blocks[-1] = Block(blocks[-1].first, last, end)
        else:
            blocks.append(Block(first, last, end))
    return blocks


def _causal(q: Tensor, keys: Tensor, values: Tensor, rules: Rules, out: Tensor) -> None:
    """A prompt on itself. q (H, P, D), keys (KH, D, P), values (KH, P, Dv), out (P, H, Dv)."""
    heads, length, dim = q.shape
    key_heads = keys.shape[0]
    grouped = q.reshape(key_heads, heads // key_heads, length, dim)
    places = torch.arange(length, device=q.device)
    for start in range(0, length, QUERIES_PER_TILE):
        end = min(start + QUERIES_PER_TILE, length)
        first = 0 if rules.window is None else max(0, start - rules.window + 1)
        at, seen = places[start:end, None], places[first:end]
        hidden = seen > at
        if rules.window is not None:
            hidden |= seen <= at - rules.window
        flat = grouped[:, :, start:end].reshape(key_heads, -1, dim)
        z = torch.matmul(flat, keys[:, :, first:end]).to(torch.float32).view(key_heads, heads // key_heads, end - start, -1)
        p = torch.softmax(rules.bend(z).masked_fill_(hidden, float("-inf")), -1).to(values.dtype)
        part = torch.matmul(p.view(key_heads, -1, end - first), values[:, first:end])  # (KH, G * tile, Dv)
        out[start:end] = part.view(heads, end - start, -1).transpose(0, 1)
