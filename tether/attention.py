"""Attention over a packed stream: every segment attends to its prompt and causally to itself.

Registered with transformers under the name `IMPLEMENTATION`, so that every architecture which goes through that library's
attention interface works unchanged. The stream's segments travel in a context variable, not through the model's
arguments: not every architecture hands unknown arguments down to its attention.

Forward and backward are written out (Dao et al. 2022, FlashAttention, eq. 1-4 of appendix B.2: probabilities are recomputed
from the log-sum-exp): masked SDPA of torch is slow backwards on CPU, and it would need keys repeated per query head.
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
from transformers.masking_utils import AttentionMaskInterface

from tether.packing import Segment

IMPLEMENTATION = "tether_segments"
QUERIES_PER_TILE = 128  # a tile's scores stay in cache, and at most half a tile is computed above the diagonal

_segments: ContextVar[Sequence[Segment] | None] = ContextVar("tether_segments", default=None)
_windows_seen: ContextVar[set[int] | None] = ContextVar("tether_windows_seen", default=None)


@contextlib.contextmanager
def attending(segments: Sequence[Segment]) -> Iterator[None]:
    """Within, attention modules set to `IMPLEMENTATION` read their one row as this packed stream."""
    token = _segments.set(segments)
    try:
        yield
    finally:
        _segments.reset(token)


@contextlib.contextmanager
def recording_windows() -> Iterator[set[int]]:
    """Collects the sliding windows that the model's layers ask for: a window that only its mask knew would be lost here."""
    windows: set[int] = set()
    token = _windows_seen.set(windows)
    try:
        yield windows
    finally:
        _windows_seen.reset(token)


@dataclass(frozen=True)
class Rules:
    """How one layer scores: q.k * scaling, soft cap c * tanh(s / c), only the last `window` keys."""

    scaling: float
    softcap: float | None = None
    window: int | None = None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query (1, heads, N, D), key and value (1, key heads, N, D) -> (1, N, heads, D)."""
    segments = _segments.get()
    if segments is None:
        raise RuntimeError(f"attention {IMPLEMENTATION!r} was called outside a packed forward pass")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise RuntimeError(f"a packed stream is one row without a cache, got queries {tuple(query.shape)}, keys {tuple(key.shape)}")
    seen = _windows_seen.get()
    if seen is not None and sliding_window:
        seen.add(sliding_window)
    rules = Rules(scaling if scaling is not None else query.shape[-1] ** -0.5, softcap or None, sliding_window or None)
    # Under autocast rotary tables leave queries and keys wider than values.
    device = query.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    q, k, v = query[0].to(compute), key[0].to(compute), value[0].to(compute)
    if dropout:
        return _with_dropout(q, k, v, s_aux, segments, rules, dropout)[None], None
    return SegmentAttention.apply(q, k, v, s_aux, segments, rules)[None], None


def no_mask(*_: Any, **__: Any) -> None:
    """transformers' mask function: segments need no mask tensor."""
    return None


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, no_mask)


@dataclass(frozen=True)
class _Tile:
    """Queries `start..end` of the stream against the last part of [prompt keys, own keys]."""

    start: int
    end: int
    first: int  # index in the joined keys of the first key any of the queries may see
    last: int  # one past the last
    mask: Tensor | None  # (queries, keys) True where a query must not look, None where it may look at all


def _tiles(segment: Segment, window: int | None, device: torch.device) -> Iterator[_Tile]:
    prompt = segment.prompt_end - segment.prompt_start
    for start in range(segment.start, segment.end, QUERIES_PER_TILE):
        end = min(start + QUERIES_PER_TILE, segment.end)
        # Positions run on from the prompt, so an index in the joined keys is also the distance measure of a window.
        low, high = prompt + start - segment.start, prompt + end - segment.start
        first = max(0, low - window + 1) if window else 0
        queries = torch.arange(low, high, device=device)[:, None]
        keys = torch.arange(first, high, device=device)[None]
        hidden = keys > queries
        if window:
            hidden |= keys <= queries - window
        yield _Tile(start, end, first, high, hidden if hidden.any() else None)


def _joined(x: Tensor, segment: Segment) -> Tensor:
    """(heads, N, D) -> (heads, prompt + own, D)."""
    own = x[:, segment.start : segment.end]
    if segment.prompt_start == segment.prompt_end:
        return own
    return torch.cat([x[:, segment.prompt_start : segment.prompt_end], own], 1)


def _scores(q: Tensor, keys: Tensor, tile: _Tile, rules: Rules) -> tuple[Tensor, Tensor | None]:
    """Scores (key heads, group, queries, keys) at least float32, and d score / d (q.k) / scaling where a soft cap bends it."""
    key_heads, group, queries, dim = q.shape
    z = torch.bmm(q.reshape(key_heads, group * queries, dim), keys.transpose(1, 2))
    z = z.to(torch.promote_types(z.dtype, torch.float32)).mul_(rules.scaling).view(key_heads, group, queries, -1)
    slope = None
    if rules.softcap:
        bent = torch.tanh(z.div_(rules.softcap))
        slope = 1 - bent * bent
        z = bent.mul_(rules.softcap)
    if tile.mask is not None:
        z.masked_fill_(tile.mask, float("-inf"))
    return z, slope


class SegmentAttention(torch.autograd.Function):
    """q (heads, N, D), k and v (key heads, N, D), sinks (heads,) or None -> (N, heads, D)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, segments: Sequence[Segment], rules: Rules) -> Tensor:
        heads, n, dim = q.shape
        grouped = q.view(k.shape[0], heads // k.shape[0], n, dim)
        out = q.new_empty(n, heads, v.shape[-1])
        lse = q.new_empty(heads, n, dtype=torch.promote_types(q.dtype, torch.float32))
        for segment in segments:
            keys, values = _joined(k, segment), _joined(v, segment)
            for tile in _tiles(segment, rules.window, q.device):
                queries = grouped[:, :, tile.start : tile.end]
                z, _ = _scores(queries, keys[:, tile.first : tile.last], tile, rules)
                total = torch.logsumexp(z, -1)
                if sinks is not None:
                    total = torch.logaddexp(total, sinks.to(total.dtype).view(*total.shape[:2], 1))
                p = z.sub_(total[..., None]).exp_().to(q.dtype)
                mixed = torch.bmm(p.view(k.shape[0], -1, p.shape[-1]), values[:, tile.first : tile.last])
                out[tile.start : tile.end] = mixed.view(heads, tile.end - tile.start, -1).transpose(0, 1)
                lse[:, tile.start : tile.end] = total.view(heads, -1)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.segments, ctx.rules = segments, rules
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        rules: Rules = ctx.rules
        heads, n, dim = q.shape
        key_heads = k.shape[0]
        group = heads // key_heads
        wide = lse.dtype
        grouped = q.view(key_heads, group, n, dim)
        grads = grad.transpose(0, 1).reshape(key_heads, group, n, -1)
        lse = lse.view(key_heads, group, n)
        # delta_i = sum_j p_ij dp_ij = grad_i . out_i
        delta = (grad.to(wide) * out.to(wide)).sum(-1).t().reshape(key_heads, group, n)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format).view(key_heads, group, n, dim)
        dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for segment in ctx.segments:
            keys, values = _joined(k, segment), _joined(v, segment)
            prompt = segment.prompt_end - segment.prompt_start
            dkeys, dvalues = torch.zeros_like(keys, dtype=wide), torch.zeros_like(values, dtype=wide)
            for tile in _tiles(segment, rules.window, q.device):
                span, rows = slice(tile.first, tile.last), slice(tile.start, tile.end)
                z, slope = _scores(grouped[:, :, rows], keys[:, span], tile, rules)
                p = z.sub_(lse[:, :, rows, None]).exp_()
                flat = (key_heads, -1, p.shape[-1])
                g = grads[:, :, rows].reshape(key_heads, -1, grads.shape[-1])
                dvalues[:, span] += torch.bmm(p.to(q.dtype).view(flat).transpose(1, 2), g)
                ds = torch.bmm(g, values[:, span].transpose(1, 2)).to(wide).view(p.shape)
                ds = ds.sub_(delta[:, :, rows, None]).mul_(p)
                if slope is not None:
                    ds.mul_(slope)
                ds = ds.mul_(rules.scaling).to(q.dtype).view(flat)
                dq[:, :, rows] = torch.bmm(ds, keys[:, span]).view(key_heads, group, -1, dim)
                dkeys[:, span] += torch.bmm(ds.transpose(1, 2), grouped[:, :, rows].reshape(key_heads, -1, dim))
            for total, part in ((dk, dkeys), (dv, dvalues)):
                total[:, segment.prompt_start : segment.prompt_end] += part[:, :prompt]
                total[:, segment.start : segment.end] += part[:, prompt:]
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            share = torch.exp(sinks.to(wide).view(key_heads, group, 1) - lse)
            dsinks = -(share * delta).sum(-1).view(heads).to(sinks.dtype)
        return dq.view(heads, n, dim), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None


def _with_dropout(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, segments: Sequence[Segment], rules: Rules, dropout: float
) -> Tensor:
    """The same by plain autograd, for the rare run that wants attention dropout while training."""
    heads, n, dim = q.shape
    grouped = q.view(k.shape[0], -1, n, dim)
    parts: list[Tensor] = []
    for segment in segments:
        keys, values = _joined(k, segment), _joined(v, segment)
        for tile in _tiles(segment, rules.window, q.device):
            flat = grouped[:, :, tile.start : tile.end].reshape(k.shape[0], -1, dim)
            z = torch.bmm(flat, keys[:, tile.first : tile.last].transpose(1, 2)).float() * rules.scaling
            z = z.view(heads, tile.end - tile.start, -1)
            if rules.softcap:
                z = torch.tanh(z / rules.softcap) * rules.softcap
            if tile.mask is not None:
                z = z.masked_fill(tile.mask, float("-inf"))
            if sinks is not None:
                z = torch.cat([z, sinks.to(z.dtype).view(heads, 1, 1).expand(-1, z.shape[1], 1)], -1)
            p = torch.softmax(z, -1)[..., : tile.last - tile.first]
            p = nn.functional.dropout(p, dropout).to(v.dtype).view(k.shape[0], -1, tile.last - tile.first)
            parts.append(torch.bmm(p, values[:, tile.first : tile.last]).view(heads, tile.end - tile.start, -1).transpose(0, 1))
    return torch.cat(parts)  # segments lie in the order of the stream
