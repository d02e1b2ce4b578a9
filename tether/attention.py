"""Attention over a packed stream: every segment attends to its prompt and causally to itself.

Registered with transformers under the name `IMPLEMENTATION`, so that every architecture which goes through that library's
attention interface works unchanged. The stream's segments travel in a context variable, not through the model's
arguments: not every architecture hands unknown arguments down to its attention.

Forward and backward are written out (Dao et al. 2022, FlashAttention, appendix B.2: probabilities are recomputed from the
log-sum-exp): masked SDPA of torch is slow backwards on CPU, and it would need keys repeated per query head.
Exponentials are of base 2: on CPU torch's exp2 is four times as fast as its exp.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from tether.packing import Segment
from tether.tiles import Plan, Tile

IMPLEMENTATION = "tether_segments"
_LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Rules:
    """How one layer scores: q.k * scaling, soft cap c * tanh(s / c), only the last `window` keys."""

    scaling: float
    softcap: float | None = None
    window: int | None = None

    @property
    def query_factor(self) -> float:
        """What queries are multiplied by beforehand, so that q.k needs no pass of its own: bits, or the argument of tanh."""
        return self.scaling / self.softcap if self.softcap else self.scaling * _LOG2E


_plan: ContextVar[Plan | None] = ContextVar("tether_plan", default=None)
_windows_seen: ContextVar[list[int | None] | None] = ContextVar("tether_windows_seen", default=None)


@contextlib.contextmanager
def attending(plan: Plan) -> Iterator[None]:
    """Within, attention modules set to `IMPLEMENTATION` read their one row as this packed stream."""
    token = _plan.set(plan)
    try:
        yield
    finally:
        _plan.reset(token)


@contextlib.contextmanager
def recording_windows() -> Iterator[list[int | None]]:
    """Collects the sliding window of each layer as it runs: a window that only the mask knew would be lost here."""
    windows: list[int | None] = []
    token = _windows_seen.set(windows)
    try:
        yield windows
    finally:
        _windows_seen.reset(token)


def current_plan(window: int | None) -> Plan:
    plan = _plan.get()
    if plan is None:
        raise RuntimeError(f"attention {IMPLEMENTATION!r} was called outside a packed forward pass")
    seen = _windows_seen.get()
    if seen is not None:
        seen.append(window)
    return plan


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
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise RuntimeError(f"a packed stream is one row without a cache, got queries {tuple(query.shape)}, keys {tuple(key.shape)}")
    rules = Rules(scaling if scaling is not None else query.shape[-1] ** -0.5, softcap or None, sliding_window or None)
    plan = current_plan(rules.window)
    # Under autocast rotary tables leave queries and keys wider than values.
    device = query.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    k, v = key[0].to(compute), value[0].to(compute)
    q = query[0].unflatten(0, (len(k), -1)).transpose(1, 2)  # (key heads, N, group, D)
    if dropout:
        q = q.to(compute)
        return _with_dropout(q, k, v, s_aux, plan, rules, dropout)[None], None
    return SegmentAttention.apply(q, k, v, s_aux, plan, rules)[None], None


def no_mask(*_: Any, **__: Any) -> None:
    """transformers' mask function: segments need no mask tensor."""
    return None


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, no_mask)


def _joined(x: Tensor, segment: Segment) -> Tensor:
    """(heads, N, D) -> (heads, prompt + own, D)."""
    own = x[:, segment.start : segment.end]
    if segment.prompt_start == segment.prompt_end:
        return own
    return torch.cat([x[:, segment.prompt_start : segment.prompt_end], own], 1)


class _Scratch:
    """Buffers by name that a loop over tiles uses again and again: fresh ones would be paged in anew for every tile."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def __call__(self, name: str, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape)
        flat = self._flat.get((name, dtype))
        if flat is None or flat.numel() < size:
            flat = self._flat[name, dtype] = like.new_empty(size, dtype=dtype)
        return flat[:size].view(shape)

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a, b, out=self(name, a, (a.shape[0], a.shape[1], b.shape[2]), a.dtype))

    def cast(self, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x if x.dtype == dtype else self(name, x, tuple(x.shape), dtype).copy_(x)


def _bits(queries: Tensor, keys: Tensor, tile: Tile, rules: Rules, scratch: _Scratch) -> tuple[Tensor, Tensor | None]:
    """Scores over ln 2 as (key heads, queries, group, keys), at least float32; and the soft cap's slope 1 - tanh^2."""
    key_heads, n, group, dim = queries.shape
    z = scratch.product("scores", queries.reshape(key_heads, n * group, dim), keys.transpose(1, 2))
    z = scratch.cast("bits", z, torch.promote_types(z.dtype, torch.float32)).view(key_heads, n, group, -1)
    slope = None
    if rules.softcap:
        bent = z.tanh_()
        slope = 1 - bent * bent
        z = bent.mul_(rules.softcap * _LOG2E)
    if tile.bias is not None:
        z[..., z.shape[-1] - tile.bias.shape[-1] :] += tile.bias
    return z, slope


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: Plan, rules: Rules) -> tuple[Tensor, Tensor]:
    """q (key heads, N, group, D), k and v (key heads, N, D) -> out (N, heads, D), log2-sum-exp (key heads, N, group).

    `q` comes multiplied by `rules.query_factor`, before it was rounded to the type of `k`.
    """
    key_heads, n, group, _ = q.shape
    out = q.new_empty(n, key_heads, group, v.shape[-1])
    lse = q.new_empty(key_heads, n, group, dtype=torch.promote_types(q.dtype, torch.float32))

    scratch = _Scratch()
    for segment, tiles in plan.tiles(rules.window, q.device):
        keys, values = _joined(k, segment), _joined(v, segment)
        for tile in tiles:
            z, _ = _bits(q[:, tile.start : tile.end], keys[:, tile.first : tile.last], tile, rules, scratch)
            top = z.amax(-1)
            p = z.sub_(top[..., None]).exp2_()
            total = p.sum(-1)
            if sinks is not None:  # a score that every query has besides its keys, and that carries no value
                total += torch.exp2(sinks.to(lse.dtype).view(key_heads, 1, group) * _LOG2E - top)
            narrow = scratch.cast("narrow", p, q.dtype).view(key_heads, -1, p.shape[-1])
            mixed = scratch.product("mixed", narrow, values[:, tile.first : tile.last])
            mixed = mixed.view(key_heads, tile.end - tile.start, group, -1)
            out[tile.start : tile.end] = mixed.div_(total[..., None]).transpose(0, 1)
            lse[:, tile.start : tile.end] = top + torch.log2(total)
    return out.view(n, key_heads * group, -1), lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, plan: Plan, rules: Rules
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of `attend` by the plain (not multiplied) queries, k, v and sinks; shaped as these are, at least float32."""
    key_heads, n, group, dim = q.shape
    wide = lse.dtype
    # delta_i = sum_j p_ij dp_ij = grad_i . out_i
    delta = (grad.to(wide) * out).sum(-1).view(n, key_heads, group).transpose(0, 1)
    grads = grad.view(n, key_heads, group, -1).transpose(0, 1)
    dq = torch.empty_like(q, dtype=wide, memory_format=torch.contiguous_format)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    scratch = _Scratch()
    for segment, tiles in plan.tiles(rules.window, q.device):
        keys, values = _joined(k, segment), _joined(v, segment)
        prompt = segment.prompt_end - segment.prompt_start
        for tile in tiles:
            rows = slice(tile.start, tile.end)
            near, far = keys[:, tile.first : tile.last], values[:, tile.first : tile.last]
            z, slope = _bits(q[:, rows], near, tile, rules, scratch)
            p = z.sub_(lse[:, rows, :, None]).exp2_()
            g = grads[:, rows].reshape(key_heads, -1, grads.shape[-1])
            flat = (key_heads, -1, p.shape[-1])
            dfar = torch.bmm(scratch.cast("narrow", p, q.dtype).view(flat).transpose(1, 2), g)
            ds = scratch.cast("ds", scratch.product("gradient", g, far.transpose(1, 2)), wide).view(p.shape)
            ds = ds.sub_(delta[:, rows, :, None]).mul_(p)
            if slope is not None:
                ds.mul_(slope)
            narrow = scratch.cast("narrow", ds, q.dtype).view(flat)
            dq[:, rows] = torch.bmm(narrow, near).view(key_heads, -1, group, dim)
            dnear = torch.bmm(narrow.transpose(1, 2), q[:, rows].reshape(key_heads, -1, dim))
            # Joined keys are two ranges of the stream: the prompt from `first` on, and the segment's own.
            cut = max(0, prompt - tile.first)
            begin = segment.start + max(0, tile.first - prompt)
            for total, part in ((dk, dnear), (dv, dfar)):
                if cut:
                    total[:, segment.prompt_start + tile.first : segment.prompt_end] += part[:, :cut]
                total[:, begin : tile.end] += part[:, cut:]
    # ds is the gradient by the scores: scaling q.k, of whose q only query_factor * q is at hand.
    dq.mul_(rules.scaling)
    dk.mul_(rules.scaling / rules.query_factor)
    dsinks = None
    if sinks is not None:
        share = torch.exp2(sinks.to(wide).view(key_heads, 1, group) * _LOG2E - lse)
        dsinks = -(share * delta).sum(1).flatten().to(sinks.dtype)
    return dq, dk, dv, dsinks


class SegmentAttention(torch.autograd.Function):
    """`attend` with its backward, for models that bring their own projections and rotations."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: Plan, rules: Rules) -> Tensor:
        query_dtype = q.dtype
        q = (q * rules.query_factor).to(k.dtype).contiguous()
        out, lse = attend(q, k, v, sinks, plan, rules)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.plan, ctx.rules, ctx.query_dtype = plan, rules, query_dtype
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        dq, dk, dv, dsinks = attend_backward(grad, q, k, v, sinks, out, lse, ctx.plan, ctx.rules)
        return dq.to(ctx.query_dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None


def _with_dropout(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: Plan, rules: Rules, dropout: float) -> Tensor:
    """The same by plain autograd, for the rare run that wants attention dropout while training."""
    key_heads, _, group, dim = q.shape
    parts: list[Tensor] = []
    for segment, tiles in plan.tiles(rules.window, q.device):
        keys, values = _joined(k, segment), _joined(v, segment)
        for tile in tiles:
            flat = q[:, tile.start : tile.end].reshape(key_heads, -1, dim)
            z = torch.bmm(flat, keys[:, tile.first : tile.last].transpose(1, 2)).float() * rules.scaling
            if rules.softcap:
                z = torch.tanh(z / rules.softcap) * rules.softcap
            z = z.view(key_heads, tile.end - tile.start, group, -1)
            if tile.bias is not None:
                z = z + nn.functional.pad(tile.bias, (z.shape[-1] - tile.bias.shape[-1], 0))
            if sinks is not None:
                extra = sinks.to(z.dtype).view(key_heads, 1, group, 1).expand(-1, z.shape[1], -1, 1)
                z = torch.cat([z, extra], -1)
            p = torch.softmax(z, -1)[..., : tile.last - tile.first]
            p = nn.functional.dropout(p, dropout).to(v.dtype).view(key_heads, -1, tile.last - tile.first)
            mixed = torch.bmm(p, values[:, tile.first : tile.last])
            parts.append(mixed.view(key_heads, tile.end - tile.start, group, -1).transpose(0, 1).flatten(1, 2))
    return torch.cat(parts)  # segments lie in the order of the stream
