"""Log-probabilities of given tokens without a table of scores: the vocabulary projection in tiles, recomputed backwards.

A tile is all M trained tokens (at most `ROWS` at a time) by a slice of the vocabulary, so memory is one tile, never M x V.
Scores, log-softmax and its gradient are float32 (or wider), whatever the matmuls run in; the trained token's own score
is a float32 dot product, so its log-probability does not carry the rounding of a bfloat16 score.
Exponentials are of base 2: on CPU torch's exp2 is four times as fast as its exp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tether.casts import Casts

TILE_BYTES = 8 * 2**20  # float32 scores of one tile: several fit into a last-level cache
ROWS = 8192
_LN2 = math.log(2.0)


@dataclass(frozen=True)
class Scores:
    """From projection to scores: z -> cap * tanh(scale * z / cap) / temperature."""

    scale: float = 1.0  # Cohere multiplies, Granite divides
    softcap: float | None = None  # Gemma 2
    temperature: float = 1.0

    @property
    def hidden_factor(self) -> float:
        """What hidden states are multiplied by beforehand, so that scores need no pass of their own: bits, or tanh's argument."""
        return self.scale / self.softcap if self.softcap else self.scale / self.temperature / _LN2

    def bits(self, z: Tensor) -> Tensor:
        """(m, V) projection of multiplied hidden states to scores over ln 2, at least float32; `z` may be overwritten."""
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        return z.tanh_().mul_(self.softcap / self.temperature / _LN2) if self.softcap else z

    def chain(self, grad: Tensor, bits: Tensor) -> Tensor:
        """Gradient by the (natural) scores, times temperature / scale, to that by the projection; both may be overwritten."""
        if self.softcap:
            bent = bits.mul_(self.temperature * _LN2 / self.softcap)
            grad.mul_(bent.square_().neg_().add_(1.0))
        return grad


@dataclass
class TokenLogprobs:
    logprobs: Tensor  # (M,) float32
    entropy: Tensor | None = None  # (M,) nats, without gradient
    correct: Tensor | None = None  # (M,) bool: no token scores higher than the target


def token_logprobs(
    hidden: Tensor,
    lm_head: nn.Module,
    targets: Tensor,
    scores: Scores,
    *,
    compute: torch.dtype,
    stats: bool = False,
    casts: Casts | None = None,
) -> TokenLogprobs:
    """log pi(targets | hidden) for hidden (M, H) and targets (M,).

    A plain linear head has its own backward; any other module (an adapter on the head) is called chunk by chunk under
    checkpointing. `compute` is the type of the matmuls, `casts` keeps the head's weight in that type between calls.
    """
    result = TokenLogprobs(hidden.new_zeros(0, dtype=torch.float32))
    if stats:
        result.entropy = hidden.new_empty(len(targets), dtype=torch.float32)
        result.correct = targets.new_empty(len(targets), dtype=torch.bool)
    if type(lm_head) is nn.Linear and not lm_head._forward_hooks and not lm_head._forward_pre_hooks:
        narrow = (casts or Casts())([lm_head.weight], compute)
        result.logprobs = _LinearHead.apply(hidden, lm_head.weight, lm_head.bias, targets, scores, narrow, result)
    else:
        result.logprobs = _module_head(hidden, lm_head, targets, scores, result)
    return result


class _Tiles:
    """Scores of all (rows, slice of the vocabulary) tiles, in bits, with the targets' own scores put in exactly."""

    def __init__(self, hidden: Tensor, w: Tensor, bias: Tensor | None, targets: Tensor, scores: Scores) -> None:
        self.w, self.scores = w, scores
        self.wide = torch.promote_types(w.dtype, torch.float32)
        self.h = h = (hidden.to(self.wide) * scores.hidden_factor).to(w.dtype)
        self.bias = None if bias is None else bias.to(self.wide) * scores.hidden_factor
        own = torch.empty(len(targets), dtype=self.wide, device=w.device)
        for rows in self.rows():
            own[rows] = (h[rows].to(self.wide) * w[targets[rows]].to(self.wide)).sum(-1)
        if self.bias is not None:
            own += self.bias[targets]
        self.own = scores.bits(own)  # (M,)
        # Targets in ascending order, so that those of a tile are one slice.
        self.columns, self.order = torch.sort(targets)
        size = max(128, TILE_BYTES // 4 // max(1, min(len(targets), ROWS)) // 64 * 64)
        self.slices = [(v, min(v + size, len(w))) for v in range(0, len(w), size)]
        edges = torch.tensor([v for v, _ in self.slices] + [len(w)], device=targets.device)
        self.edges: list[int] = torch.searchsorted(self.columns, edges).tolist()

    def rows(self) -> Iterator[slice]:
        for start in range(0, len(self.h), ROWS):
            yield slice(start, min(start + ROWS, len(self.h)))

    def members(self, tile: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Rows and columns, counted inside the tile, at which the targets lie."""
        row = self.order[self.edges[tile] : self.edges[tile + 1]]
        column = self.columns[self.edges[tile] : self.edges[tile + 1]] - self.slices[tile][0]
        if rows.start == 0 and rows.stop == len(self.h):
            return row, column
        inside = (row >= rows.start) & (row < rows.stop)
        return row[inside] - rows.start, column[inside]

    def bits(self, tile: int, rows: slice) -> Tensor:
        first, last = self.slices[tile]
        z = torch.mm(self.h[rows], self.w[first:last].t())
        if self.bias is not None:
            z = z.to(self.wide).add_(self.bias[first:last])
        bits = self.scores.bits(z)
        row, column = self.members(tile, rows)
        bits[row, column] = self.own[rows][row]
        return bits


class _LinearHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scores: Scores,
        narrow: Tensor,
        result: TokenLogprobs,
    ) -> Tensor:
        tiles = _Tiles(hidden, narrow, bias, targets, scores)
        top = tiles.own.new_full(tiles.own.shape, float("-inf"))  # highest score so far
        total = torch.zeros_like(top)  # sum of 2^(score - top)
        weighted = torch.zeros_like(top)  # sum of 2^(score - top) * score
        for tile in range(len(tiles.slices)):
            for rows in tiles.rows():
                z = tiles.bits(tile, rows)
                new = torch.maximum(top[rows], z.amax(-1))
                old = torch.exp2(top[rows] - new)
                if result.entropy is not None:
                    p = torch.exp2(z - new[:, None])
                    weighted[rows] = weighted[rows] * old + torch.linalg.vecdot(p, z)
                else:
                    p = z.sub_(new[:, None]).exp2_()
                total[rows] = total[rows] * old + p.sum(-1)
                top[rows] = new
        lse = top + torch.log2(total)
        if result.entropy is not None and result.correct is not None:
            result.entropy.copy_((lse - weighted / total) * _LN2)
            result.correct.copy_(tiles.own >= top)
        ctx.save_for_backward(hidden, weight, bias, targets, narrow, lse)
        ctx.scores = scores
        return (tiles.own - lse) * _LN2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, narrow, lse = ctx.saved_tensors
        tiles = _Tiles(hidden, narrow, bias, targets, ctx.scores)
        factor = ctx.scores.scale / ctx.scores.temperature
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        dh = torch.zeros_like(hidden, dtype=tiles.wide) if need_hidden else None
        dw = torch.empty_like(weight) if need_weight else None
        db = torch.zeros_like(bias) if need_bias else None
        for tile, (first, last) in enumerate(tiles.slices):
            for rows in tiles.rows():
                z = tiles.bits(tile, rows)
                # d logp / d score = onehot - softmax
                d = torch.exp2(z - lse[rows, None]) if ctx.scores.softcap else z.sub_(lse[rows, None]).exp2_()
                d.mul_(grad[rows, None].neg())
                row, column = tiles.members(tile, rows)
                d[row, column] += grad[rows][row]
                d = ctx.scores.chain(d, z)
                if db is not None:
                    db[first:last] += d.sum(0)
                d = d.to(narrow.dtype)
                if dh is not None:
                    dh[rows] += d @ narrow[first:last]
                if dw is not None:
                    part = (d.t() @ tiles.h[rows]).to(dw.dtype)
                    if rows.start == 0:
                        torch.mul(part, factor / ctx.scores.hidden_factor, out=dw[first:last])
                    else:
                        dw[first:last].add_(part, alpha=factor / ctx.scores.hidden_factor)
        if dw is not None and not len(targets):
            dw.zero_()
        if db is not None:
            db.mul_(factor)
        return None if dh is None else dh.mul_(factor).to(hidden.dtype), dw, db, None, None, None, None


def _module_head(hidden: Tensor, lm_head: nn.Module, targets: Tensor, scores: Scores, result: TokenLogprobs) -> Tensor:
    """The same through the module's own forward, rows at a time."""

    def logprobs(h: Tensor, t: Tensor, rows: slice | None) -> Tensor:
        z = lm_head(h)
        z = z.to(torch.promote_types(z.dtype, torch.float32)) * scores.scale
        if scores.softcap:
            z = torch.tanh(z / scores.softcap) * scores.softcap
        logp = torch.log_softmax(z / scores.temperature, -1)
        own = logp.gather(1, t[:, None])[:, 0]
        if rows is not None and result.entropy is not None and result.correct is not None:
            result.entropy[rows] = -(logp.exp() * logp).sum(-1).detach()
            result.correct[rows] = own.detach() >= logp.detach().amax(-1)
        return own

    size = max(16, 8 * TILE_BYTES // 4 // getattr(lm_head, "out_features", 65536))
    parts = []
    for start in range(0, len(targets), size):
        rows = slice(start, start + size)
        if torch.is_grad_enabled():
            parts.append(checkpoint(logprobs, hidden[rows], targets[rows], rows, use_reentrant=False))
        else:
            parts.append(logprobs(hidden[rows], targets[rows], rows))
    return torch.cat(parts) if parts else hidden.sum() * 0.0 + hidden.new_zeros(0)
