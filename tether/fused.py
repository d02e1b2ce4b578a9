"""The pieces of a pre-norm transformer block with their backward passes written out.

Each piece does in one autograd node what a block does in several: fewer passes over memory, fewer saved tensors (products that are
cheap to make again are made again), the residual stream kept in float32 while matmuls run in the type of the weight copies
they are given. `block.py` puts the pieces together; every formula here is checked against the original layer when an engine is made.

Letters: N tokens, H width, I inner width of the MLP, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tether.attention import Plan, Rules, attend, attend_backward

ROWS = 1024  # elementwise work goes in blocks of so many rows: their temporaries stay in cache and are reused


def _blocks(n: int) -> list[slice]:
    return [slice(i, min(i + ROWS, n)) for i in range(0, n, ROWS)]


class ResidualNorm(torch.autograd.Function):
    """x (N, H) -> (x, RMSNorm(x) in `compute`). The stream passes through, so its two gradients meet here in one pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, compute: torch.dtype) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        h = torch.empty(x.shape, dtype=compute, device=x.device)
        inverse = torch.empty(len(x), 1, dtype=wide, device=x.device)
        for rows in _blocks(len(x)):
            block = x[rows].to(wide)
            square = torch.linalg.vector_norm(block, dim=-1, keepdim=True).square_()
            inverse[rows] = square.div_(x.shape[-1]).add_(eps).rsqrt_()
            h[rows] = (block * inverse[rows]).mul_(weight)
        ctx.save_for_backward(x, weight, inverse)
        ctx.set_materialize_grads(False)
        return x, h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        if dh is None:
            return dx, None, None, None
        total = torch.empty_like(x)
        dweight = torch.zeros_like(weight, dtype=inverse.dtype) if ctx.needs_input_grad[1] else None
        for rows in _blocks(len(x)):
            r = inverse[rows]
            unit = x[rows] * r
            g = dh[rows].to(r.dtype)
            along = g * unit
            if dweight is not None:
                dweight += along.sum(0)
            along = torch.mv(along, weight.to(r.dtype))[:, None].mul_(r).div_(-x.shape[-1])
            g = g.mul_(weight).mul_(r).addcmul_(unit, along)
            if dx is not None:
                g += dx[rows]
            total[rows] = g
        return total, None if dweight is None else dweight.to(weight.dtype), None, None


class JoinedLinear(torch.autograd.Function):
    """h (N, H) through several linear layers at once -> (N, sum of their widths); `narrow` is their weights' joined copy."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, narrow: Tensor, count: int, *weights_then_biases: Tensor) -> Tensor:
        y = torch.mm(h, narrow.t())
        biases = weights_then_biases[count:]
        if biases:
            y += torch.cat(biases)
        ctx.save_for_backward(h, narrow, *weights_then_biases)
        ctx.count = count
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        h, narrow, *params = ctx.saved_tensors
        needs = ctx.needs_input_grad[3:]
        weights, biases = params[: ctx.count], params[ctx.count :]
        sizes = [len(w) for w in weights]
        dh = torch.mm(dy, narrow) if ctx.needs_input_grad[0] else None
        dw = torch.mm(dy.t(), h).split(sizes) if any(needs[: ctx.count]) else [None] * len(weights)
        db = _column_sums(dy).split(sizes) if any(needs[ctx.count :]) else [None] * len(biases)
        grads = [None if g is None or not need else g.to(p.dtype) for g, p, need in zip([*dw, *db], params, needs, strict=True)]
        return dh, None, None, *grads


class RotaryAttention(torch.autograd.Function):
    """Joined projections (N, (heads + 2 key heads) D), rotated by position, through segment attention -> (N, heads D)."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, key_heads: int, plan: Plan, rules: Rules) -> Tensor:
        n, dim = len(qkv), cos.shape[-1]
        joined = qkv.view(n, heads + 2 * key_heads, dim)
        q = qkv.new_empty(key_heads, n, heads // key_heads, dim)
        k = qkv.new_empty(key_heads, n, dim)
        for rows in _blocks(n):
            turned = _rotated(joined[rows, : heads + key_heads], cos[rows], sin[rows], forth=True)
            q[:, rows] = turned[:, :heads].mul_(rules.query_factor).unflatten(1, (key_heads, -1)).transpose(0, 1)
            k[:, rows] = turned[:, heads:].transpose(0, 1)
        v = joined[:, heads + key_heads :].transpose(0, 1).contiguous()
        out, lse = attend(q, k, v, None, plan, rules)
        ctx.save_for_backward(q, k, v, cos, sin, out, lse)
        ctx.plan, ctx.rules = plan, rules
        return out.view(n, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, cos, sin, out, lse = ctx.saved_tensors
        key_heads, n, group, dim = q.shape
        heads = key_heads * group
        dq, dk, dv, _ = attend_backward(dout.view(n, heads, dim), q, k, v, None, out, lse, ctx.plan, ctx.rules)
        dqkv = q.new_empty(n, heads + 2 * key_heads, dim)
        for rows in _blocks(n):
            dqkv[rows, :heads] = _rotated(dq[:, rows].transpose(0, 1).flatten(1, 2), cos[rows], sin[rows], forth=False)
            dqkv[rows, heads : heads + key_heads] = _rotated(dk[:, rows].transpose(0, 1), cos[rows], sin[rows], forth=False)
        dqkv[:, heads + key_heads :] = dv.transpose(0, 1)
        return dqkv.view(n, -1), None, None, None, None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, forth: bool) -> Tensor:
    """(n, heads, D) by the rotary tables (n, D), in their type; `forth=False` is the transpose, which turns a gradient back.

    Forth: y1 = x1 cos1 - x2 sin1, y2 = x2 cos2 + x1 sin2 for the two halves of D.
    """
    half = x.shape[-1] // 2
    x = x.to(cos.dtype)
    y = x * cos[:, None]
    sin1, sin2 = sin[:, None, :half], sin[:, None, half:]
    if forth:
        y[..., :half].addcmul_(x[..., half:], sin1, value=-1.0)
        y[..., half:].addcmul_(x[..., :half], sin2)
    else:
        y[..., :half].addcmul_(x[..., half:], sin2)
        y[..., half:].addcmul_(x[..., :half], sin1, value=-1.0)
    return y


class ResidualLinear(torch.autograd.Function):
    """x (N, H) float32 + linear(h) -> (N, H) float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, narrow: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.mm(h, narrow.t())
        if bias is not None:
            y += bias
        ctx.save_for_backward(h, narrow, weight, bias)
        return x + y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        h, narrow, weight, bias = ctx.saved_tensors
        g = dy.to(h.dtype)
        dh = torch.mm(g, narrow) if ctx.needs_input_grad[1] else None
        dweight = torch.mm(g.t(), h).to(weight.dtype) if ctx.needs_input_grad[3] else None
        dbias = _column_sums(dy).to(bias.dtype) if ctx.needs_input_grad[4] else None
        return dy, dh, None, dweight, dbias


class ResidualSwiGLU(torch.autograd.Function):
    """x (N, H) float32 + down(silu(gate(h)) * up(h)) -> (N, H) float32. Saves gate and up, makes their product again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, h: Tensor, gate: Tensor, up: Tensor, down: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor
    ) -> Tensor:
        a, b = torch.mm(h, gate.t()), torch.mm(h, up.t())  # (N, I)
        y = torch.mm(torch.nn.functional.silu(a).mul_(b), down.t())
        ctx.save_for_backward(h, a, b, gate, up, down, w_gate, w_up, w_down)
        return x + y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        h, a, b, gate, up, down, w_gate, w_up, w_down = ctx.saved_tensors
        need_gate, need_up, need_down = ctx.needs_input_grad[5:]
        g = dy.to(h.dtype)
        inner = torch.mm(g, down)  # gradient by silu(a) * b
        product = torch.empty_like(a) if need_down else None
        da, db = torch.empty_like(a), torch.empty_like(b)
        for rows in _blocks(len(a)):
            s = torch.nn.functional.silu(a[rows])
            if product is not None:
                torch.mul(s, b[rows], out=product[rows])
            torch.mul(inner[rows], s, out=db[rows])
            da[rows] = torch.ops.aten.silu_backward(inner[rows] * b[rows], a[rows])
        dw_down = None if product is None else torch.mm(g.t(), product).to(w_down.dtype)
        del inner, product
        dh = torch.addmm(torch.mm(da, gate), db, up) if ctx.needs_input_grad[1] else None
        dw_gate = torch.mm(da.t(), h).to(w_gate.dtype) if need_gate else None
        dw_up = torch.mm(db.t(), h).to(w_up.dtype) if need_up else None
        return dy, dh, None, None, None, dw_gate, dw_up, dw_down


def _column_sums(x: Tensor) -> Tensor:
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))
