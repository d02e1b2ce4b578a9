"""The model as sampling runs it: the same modules with their own config, in evaluation mode, with matmul weights cast once.

In float32 every parameter is shared with the model, so the copy follows training by itself. In bfloat16 the weights of linear
layers are cast (on CPU into the layout of the matmul kernel, 1.3 times as fast for 64 rows) and the rest is shared: residual
stream, norms and embeddings stay float32, as in training. LoRA is merged into the cast weights, never into the model.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import nn

from tether.engines.joined import JoinedLayer, joinable
from tether.engines.linear import cast
from tether.errors import UserError

Kind = Literal["shared", "one_joined", "joined", "packed", "cast", "whole"]


def working_copy(model: nn.Module, kind: Kind, implementation: str) -> Any:
    """A copy of the causal model inside `model` (a PEFT wrapper is looked through) that uses attention `implementation`.

    "shared" has the model's own parameters. "packed" and "cast" have bfloat16 linear layers; "cast" keeps their `weight`
    attribute, for architectures that read it. "joined" is "packed" with whole layers of the Llama pattern replaced by `JoinedLayer`,
    "one_joined" is "shared" with the first such layer replaced, in its own type: what a probe compares. "whole" has every parameter in
    bfloat16, for architectures that cannot mix types.
    """
    memo: dict[int, Any] = {}
    for p in model.parameters():
        narrow = kind == "whole" and p.is_floating_point()
        memo[id(p)] = nn.Parameter(p.detach().to(torch.bfloat16), requires_grad=False) if narrow else p
    layers = [m for m in _through_adapters(model).modules() if joinable(m)] if kind in ("one_joined", "joined") else []
    for layer in layers[:1] if kind == "one_joined" else layers:
        memo[id(layer)] = JoinedLayer(layer, narrow=kind == "joined")
    if kind in ("joined", "packed", "cast"):
        within = {id(m) for layer in layers for m in layer.modules()}
        for module in _through_adapters(model).modules():
            replacement = None if id(module) in within else cast(module, packed=kind != "cast")
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
