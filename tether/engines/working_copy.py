"""The model as sampling runs it: the same modules with their own config, in evaluation mode, with matmul weights cast once.

In float32 every parameter is shared with the model, so the copy follows training by itself. In bfloat16 the weights of linear
layers are cast (on CPU into the layout of the matmul kernel, 1.3 times as fast for 64 rows) and the rest is shared: residual
stream, norms and embeddings stay float32, as in training. LoRA is merged into the cast weights, never into the model.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tether.errors import UserError

Kind = Literal["shared", "packed", "cast", "whole"]
PACK_ROWS = 64  # rows the packed layout is chosen for; any number works


def working_copy(model: nn.Module, kind: Kind, implementation: str) -> Any:
    """A copy of the causal model inside `model` (a PEFT wrapper is looked through) that uses attention `implementation`.

    "shared" has the model's own parameters. "packed" and "cast" have bfloat16 linear layers; "cast" keeps their `weight`
    attribute, for architectures that read it. "whole" has every parameter in bfloat16, for architectures that cannot mix types.
    """
    memo: dict[int, Any] = {}
    for p in model.parameters():
        cast = kind == "whole" and p.is_floating_point()
        memo[id(p)] = nn.Parameter(p.detach().to(torch.bfloat16), requires_grad=False) if cast else p
    if kind in ("packed", "cast"):
        for module in _through_adapters(model).modules():
            replacement = _cast(module, packed=kind == "packed")
            if replacement is not None:
                memo[id(module)] = replacement
    copied: Any = copy.deepcopy(_through_adapters(model), memo)
    for module in copied.modules():
        module.training = False
        config = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = implementation
    return copied


def _through_adapters(model: Any) -> Any:
    if not hasattr(model, "peft_config"):
        return model
    if any(getattr(c, "is_prompt_learning", False) for c in model.peft_config.values()):
        raise UserError("an adapter made of prompt vectors cannot be sampled from", remedy="Use LoRA, or merge the adapter first.")
    return model.get_base_model()


class CastLinear(nn.Module):
    """y = x W^T + b in bfloat16, whatever the type of x."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight.to(torch.bfloat16), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.to(torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.to(torch.bfloat16), self.weight, self.bias)


class PackedLinear(nn.Module):
    """The same with the weight in oneDNN's own layout, so that it is not reordered at every call."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # A plain attribute: an opaque tensor cannot be cast, moved or saved, and nobody should.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(torch.bfloat16), PACK_ROWS)
        self.bias = None if bias is None else nn.Parameter(bias.to(torch.bfloat16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x.to(torch.bfloat16), self.packed, self.bias, "none", [], "")


def _cast(module: nn.Module, packed: bool) -> nn.Module | None:
    """What takes the place of a linear layer, or None for every other module."""
    found = _linear_weight(module)
    if found is None:
        return None
    weight, bias = found
    with torch.no_grad():
        return (PackedLinear if packed and can_pack(weight.device) else CastLinear)(weight, bias)


def can_pack(device: torch.device) -> bool:
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _linear_weight(module: Any) -> tuple[Tensor, Tensor | None] | None:
    """(out, in) weight and bias, the active LoRA adapters added."""
    if type(module) is nn.Linear:
        return module.weight.detach(), module.bias
    if type(module) is Conv1D:
        return module.weight.detach().t().contiguous(), module.bias
    base = getattr(module, "base_layer", None)
    if type(base) is not nn.Linear or not hasattr(module, "get_delta_weight") or getattr(module, "lora_magnitude_vector", None):
        return None
    weight = base.weight.detach()
    if not module.disable_adapters and not module.merged:
        for name in module.active_adapters:
            if name in module.lora_A:
                weight = weight + module.get_delta_weight(name).detach()
    return weight, base.bias
