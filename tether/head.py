"""Log-probabilities of given tokens without a table of scores: vocabulary projection in chunks, recomputed backwards.

Memory is chunk x V, never M x V. Scores, log-softmax and its gradient are float32 (or wider), whatever the matmuls run in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 64 * 2**20  # float32 scores of one chunk


@dataclass(frozen=True)
class Scores:
    """From projection to scores: z -> cap * tanh(scale * z / cap) / temperature."""

    scale: float = 1.0  # Cohere multiplies, Granite divides
    softcap: float | None = None  # Gemma 2
    temperature: float = 1.0

    def __call__(self, z: Tensor) -> Tensor:
        """(m, V) projection, changed in place where it is wide enough, to scores of at least float32."""
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        if self.softcap:
            return torch.tanh(z * (self.scale / self.softcap)) * (self.softcap / self.temperature)
        factor = self.scale / self.temperature
        return z if factor == 1.0 else z * factor

    def chain(self, grad: Tensor, scores: Tensor) -> Tensor:
        """Gradient by the scores to gradient by the projection, in place."""
        if self.softcap:
            bent = scores * (self.temperature / self.softcap)
            grad.mul_(bent.square_().neg_().add_(1.0))
        factor = self.scale / self.temperature
        return grad if factor == 1.0 else grad.mul_(factor)


@dataclass
class TokenLogprobs:
    logprobs: Tensor  # (M,) float32
    entropy: Tensor | None = None  # (M,) nats, without gradient
    correct: Tensor | None = None  # (M,) bool: the target has the highest score


def token_logprobs(
    hidden: Tensor, lm_head: nn.Module, targets: Tensor, scores: Scores, *, compute: torch.dtype, stats: bool = False
) -> TokenLogprobs:
    """log pi(targets | hidden) for hidden (M, H) and targets (M,).

    A plain linear head has its own backward; any other module (an adapter on the head) is called chunk by chunk under
    checkpointing. `compute` is the type of the matmuls.
    """
    result = TokenLogprobs(hidden.new_zeros(0, dtype=torch.float32))
    if stats:
        result.entropy = hidden.new_empty(len(targets), dtype=torch.float32)
        result.correct = targets.new_empty(len(targets), dtype=torch.bool)
    if type(lm_head) is nn.Linear and not lm_head._forward_hooks and not lm_head._forward_pre_hooks:
        result.logprobs = _LinearHead.apply(hidden, lm_head.weight, lm_head.bias, targets, scores, compute, result)
    else:
        result.logprobs = _module_head(hidden, lm_head, targets, scores, result)
    return result


def chunks(rows: int, vocabulary: int) -> list[slice]:
    """Slices of `rows` whose float32 scores take about `CHUNK_BYTES`."""
    size = max(16, CHUNK_BYTES // (4 * vocabulary))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _measure(z: Tensor, lse: Tensor, targets: Tensor, rows: slice, result: TokenLogprobs) -> None:
    if result.entropy is not None and result.correct is not None:
        with torch.no_grad():
            expected = (torch.exp(z - lse[:, None]) * z).sum(-1)
            result.entropy[rows] = lse - expected
            result.correct[rows] = z.argmax(-1) == targets


class _LinearHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scores: Scores,
        compute: torch.dtype,
        result: TokenLogprobs,
    ) -> Tensor:
        h, w = hidden.to(compute), weight.to(compute)
        b = None if bias is None else bias.to(compute)
        wide = torch.promote_types(compute, torch.float32)
        logp = hidden.new_empty(len(targets), dtype=wide)
        lse = hidden.new_empty(len(targets), dtype=wide)
        for rows in chunks(len(targets), len(weight)):
            z = scores(nn.functional.linear(h[rows], w, b))
            lse[rows] = torch.logsumexp(z, -1)
            logp[rows] = z.gather(1, targets[rows, None])[:, 0] - lse[rows]
            _measure(z, lse[rows], targets[rows], rows, result)
        ctx.save_for_backward(hidden, weight, bias, targets, lse)
        ctx.scores, ctx.compute = scores, compute
        return logp

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse = ctx.saved_tensors
        scores, compute = ctx.scores, ctx.compute
        h, w = hidden.to(compute), weight.to(compute)
        b = None if bias is None else bias.to(compute)
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        dh = torch.zeros_like(hidden) if need_hidden else None
        dw = torch.zeros_like(weight) if need_weight else None
        db = torch.zeros_like(bias) if need_bias else None
        for rows in chunks(len(targets), len(weight)):
            z = scores(nn.functional.linear(h[rows], w, b))
            # d logp / dz = onehot - softmax
            g = grad[rows, None].to(z.dtype)
            d = torch.exp(z - lse[rows, None]).mul_(-g)
            d.scatter_add_(1, targets[rows, None], g)
            d = scores.chain(d, z)
            if db is not None:
                db += d.sum(0)
            d = d.to(compute)
            if dh is not None:
                dh[rows] = d @ w
            if dw is not None:
                dw += d.t() @ h[rows]
        return dh, dw, db, None, None, None, None


def _module_head(hidden: Tensor, lm_head: nn.Module, targets: Tensor, scores: Scores, result: TokenLogprobs) -> Tensor:
    def one(h: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = scores(lm_head(h))
        lse = torch.logsumexp(z, -1)
        return z.gather(1, t[:, None])[:, 0] - lse, z, lse

    def without_table(h: Tensor, t: Tensor) -> Tensor:
        return one(h, t)[0]

    call: Callable[[Tensor, Tensor], Tensor] = without_table
    parts = []
    for rows in chunks(len(targets), getattr(lm_head, "out_features", 65536)):
        if result.entropy is not None:
            with torch.no_grad():
                _, z, lse = one(hidden[rows], targets[rows])
                _measure(z, lse, targets[rows], rows, result)
        if torch.is_grad_enabled():
            parts.append(checkpoint(call, hidden[rows], targets[rows], use_reentrant=False))
        else:
            parts.append(call(hidden[rows], targets[rows]))
    return torch.cat(parts) if parts else hidden.sum() * 0.0 + hidden.new_zeros(0)
