"""A decoder layer as sampling runs it: few, wide matmuls and few small operations around them.

For 64 sequences a step is one token each, and the time between matmuls counts as much as the matmuls: queries, keys and values come of
one product, the MLP's two branches of another. Which layers: those that training fuses too (`tether.block`). Whether the numbers are the
layer's own is checked by the probe in `fitting.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tether.block import recognised, window_of
from tether.engines.kv import Rules, current_step
from tether.engines.linear import CastLinear, PackedLinear, can_pack, linear_weight


class JoinedLayer(nn.Module):
    """(1, N, H) -> (1, N, H), called as transformers calls the layer, inside `kv.running(step)`. The residual stream keeps its type."""

    def __init__(self, layer: Any, *, narrow: bool) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.input_norm, self.post_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.qkv = joined([attention.q_proj, attention.k_proj, attention.v_proj], narrow)
        self.out = joined([attention.o_proj], narrow)
        self.gate_up = joined([mlp.gate_proj, mlp.up_proj], narrow)
        self.down = joined([mlp.down_proj], narrow)
        self.dim = attention.head_dim
        self.heads, self.key_heads = (attention.config.num_attention_heads, attention.config.num_key_value_heads)
        self.rules = Rules(attention.scaling, window_of(layer) or None, None)

    def forward(self, hidden_states: Tensor, *_: Any, position_embeddings: tuple[Tensor, Tensor], **__: Any) -> Tensor:
        x = hidden_states[0]  # (N, H)
        n = len(x)
        qkv = self.qkv(_norm(x, self.input_norm)).view(n, self.heads + 2 * self.key_heads, self.dim)
        qk, v = qkv.split([self.heads + self.key_heads, self.key_heads], 1)
        if self.q_norm is not None:
            q, k = qk.split([self.heads, self.key_heads], 1)
            qk = torch.cat([_norm(q, self.q_norm), _norm(k, self.k_norm)], 1)
        q, k = _rotated(qk, *position_embeddings).to(qkv.dtype).split([self.heads, self.key_heads], 1)
        # Heads first, as attention over slots reads them; the order in memory stays.
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        mixed = current_step().attend(self, q, k, v, self.rules)
        x = x + self.out(mixed.reshape(n, -1))
        gate, up = self.gate_up(_norm(x, self.post_norm)).chunk(2, -1)
        return x.add_(self.down(nn.functional.silu(gate).mul_(up)))[None]


def joined(parts: Sequence[nn.Module], narrow: bool) -> nn.Module:
    """Linear layers over the same input as one, side by side; in bfloat16 (on CPU packed for its kernel) or in their own type."""
    found = [f for part in parts if (f := linear_weight(part)) is not None]
    weight = torch.cat([w for w, _ in found]) if len(found) > 1 else found[0][0]
    biases = [b.detach() for _, b in found if b is not None]
    bias = torch.cat(biases) if biases else None
    if not narrow:
        return _Whole(weight, bias)
    return (PackedLinear if can_pack(weight.device) else CastLinear)(weight, bias)


def joinable(layer: Any) -> bool:
    """Whether a layer is of the pattern, and all its products are linear layers (adapters that can be merged included)."""
    if not recognised(layer):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    parts = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return all(linear_weight(part) is not None for part in parts) and mlp.gate_proj.bias is None and mlp.up_proj.bias is None


class _Whole(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight, requires_grad=False), bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.to(self.weight.dtype), self.weight, self.bias)


def _norm(x: Tensor, norm: Any) -> Tensor:
    """RMSNorm over the last dimension in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    return (wide * square.add_(norm.variance_epsilon).rsqrt_()).mul_(norm.weight)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (N, heads, D) turned by cos, sin (1, N, D) in their type."""
    cos, sin = cos[0, :, None], sin[0, :, None]
    a, b = x.chunk(2, -1)
    return (x * cos).add_(torch.cat([-b, a], -1) * sin)
