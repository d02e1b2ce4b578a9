"""Linear layers as sampling runs them: weights in bfloat16, cast once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

PACK_ROWS = 64  # rows the packed layout is chosen for; any number works


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


def cast(module: nn.Module, packed: bool) -> nn.Module | None:
    """What takes the place of a linear layer, or None for every other module."""
    found = linear_weight(module)
    if found is None:
        return None
    weight, bias = found
    with torch.no_grad():
        return (PackedLinear if packed and can_pack(weight.device) else CastLinear)(weight, bias)


def can_pack(device: torch.device) -> bool:
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def linear_weight(module: Any) -> tuple[Tensor, Tensor | None] | None:
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
