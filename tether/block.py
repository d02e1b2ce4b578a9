"""Decoder layers that the engine runs from the pieces in `fused.py` instead of their own forward.

Which layers: those of the Llama pattern (RMSNorm, rotary attention with or without norms per head, SwiGLU, no scaling of the
branches). A projection that is not a plain linear layer, as one that an adapter has wrapped, is called as the module it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tether.attention import Rules, current_plan
from tether.casts import Casts
from tether.fused import JoinedLinear, ResidualLinear, ResidualNorm, ResidualSwiGLU, RotaryAttention

# Layer class -> where its sliding window is written; `None` for a class that has none.
_WINDOW = {
    "LlamaDecoderLayer": lambda attention: None,
    "MistralDecoderLayer": lambda attention: getattr(attention.config, "sliding_window", None),
    "Qwen2DecoderLayer": lambda attention: attention.sliding_window,
    "Qwen3DecoderLayer": lambda attention: attention.sliding_window,
}


class Block:
    """One layer's forward: (1, N, H) -> (1, N, H), called as transformers calls the layer, inside `attending(plan)`."""

    def __init__(self, layer: Any, casts: Casts) -> None:
        self.layer, self.casts = layer, casts
        self.window = window_of(layer)  # asked now: a sharded layer is of a class of its own

    def __call__(self, hidden_states: Tensor, *_: Any, position_embeddings: tuple[Tensor, Tensor], **__: Any) -> Tensor:
        layer, attention = self.layer, self.layer.self_attn
        x = hidden_states[0]
        device = x.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        rules = Rules(attention.scaling, window=self.window or None)
        plan = current_plan(rules.window)

        x, h = _norm(x, layer.input_layernorm, compute)
        qkv, heads, key_heads = self._projected(h, attention, compute)
        cos, sin = (table[0] for table in position_embeddings)
        mixed = RotaryAttention.apply(qkv, cos, sin, heads, key_heads, plan, rules)
        if _plain(attention.o_proj):
            out = attention.o_proj
            x = ResidualLinear.apply(x, mixed, self.casts([out.weight], compute), out.weight, out.bias)
        else:
            x = x + attention.o_proj(mixed)

        x, h = _norm(x, layer.post_attention_layernorm, compute)
        mlp = layer.mlp
        parts = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if all(_plain(part) and part.bias is None for part in parts):
            weights = [part.weight for part in parts]
            x = ResidualSwiGLU.apply(x, h, *(self.casts([w], compute) for w in weights), *weights)
        else:
            x = x + mlp(h)
        return x[None]

    def _projected(self, h: Tensor, attention: Any, compute: torch.dtype) -> tuple[Tensor, int, int]:
        """Queries, keys and values side by side (N, (heads + 2 key heads) D), normed per head where the layer does so."""
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        dim = attention.head_dim
        if all(_plain(part) for part in parts):
            weights = [part.weight for part in parts]
            biases = [part.bias for part in parts if part.bias is not None]
            qkv = JoinedLinear.apply(h, self.casts(weights, compute), len(weights), *weights, *biases)
            widths = [len(w) for w in weights]
        else:
            separate = [part(h).to(compute) for part in parts]
            qkv = torch.cat(separate, -1)
            widths = [y.shape[-1] for y in separate]
        if hasattr(attention, "q_norm"):
            q, k, v = qkv.split(widths, -1)
            q = _norm(q.reshape(-1, dim), attention.q_norm, compute)[1].view(q.shape)
            k = _norm(k.reshape(-1, dim), attention.k_norm, compute)[1].view(k.shape)
            qkv = torch.cat([q, k, v], -1)
        return qkv, widths[0] // dim, widths[1] // dim


def blocks_for(decoder: nn.Module, casts: Casts) -> dict[nn.Module, Block]:
    """A block for each layer that is recognised; which numbers they give is for the caller to check."""
    return {layer: Block(layer, casts) for layer in decoder.modules() if recognised(layer)}


def window_of(layer: Any) -> int | None:
    """How many keys a query of a recognised layer sees, where it does not see all."""
    return _WINDOW[type(layer).__name__](layer.self_attn)


def recognised(layer: Any) -> bool:
    """Whether the layer is of the pattern."""
    if type(layer).__name__ not in _WINDOW or type(layer).__module__.split(".")[0] != "transformers":
        return False
    attention, mlp = layer.self_attn, layer.mlp
    inner = [attention, mlp, layer.input_layernorm, layer.post_attention_layernorm]
    biases = [getattr(part, "bias", None) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
    return (
        type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
        and not any(_hooked(module) for module in inner)
        and (all(b is None for b in biases) or all(b is not None for b in biases))
    )


def _plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear and not _hooked(module)


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _norm(x: Tensor, norm: Any, compute: torch.dtype) -> tuple[Tensor, Tensor]:
    return ResidualNorm.apply(x, norm.weight, norm.variance_epsilon, compute)
