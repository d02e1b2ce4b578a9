"""A model in parts: every rank keeps its share of each parameter, and all meet where a layer is computed (torch's FSDP2).

Parameters become DTensors. Decoder layers are gathered one by one for the forward and again for the backward pass; embedding, last norm
and head form the outermost group, which stays whole from forward to backward. Gradients arrive summed, not averaged: losses divide
by totals of all ranks already. `Twin` is the way back: the same model in one piece, for sampling, saving and other programs.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tether import ranks


class Root(nn.Module):
    """What FSDP takes for the model. Whatever reads weights happens within one call of it."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, compute: Callable[..., Any], *args: Any) -> Any:
        return compute(*args)


def shard(modules: Sequence[nn.Module], layers: Sequence[nn.Module]) -> Root:
    """Leave each rank its part of every parameter of `modules`; `layers`, parts of them, are gathered one at a time."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    # A fused layer returns a view, and nothing writes into it.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (ranks.size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    root = Root(modules)
    fully_shard(root, mesh=mesh, reshard_after_forward=False)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # a scaled sum is NCCL's alone
    return root


def release(root: Root) -> None:
    """After a pass that has no backward pass: give the outermost group back, or the next pass would find it as it was."""
    for module in root.modules():
        reshard: Any = getattr(module, "reshard", None)
        if reshard is not None:
            reshard()


def sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor. (Importing that class takes a second, which a run of one process has no use for.)"""
    return hasattr(tensor, "to_local")


def whole(tensor: Tensor) -> Tensor:
    """All of a parameter on every rank, without gradient: a meeting of all ranks where it is sharded."""
    out: Any = tensor.detach()
    return out.full_tensor() if sharded(out) else out


def own(tensor: Tensor) -> Tensor:
    """This rank's part of a parameter, sharing its memory; all of it where it is not sharded."""
    out: Any = tensor.detach()
    return out.to_local() if sharded(out) else out


def part_of(tensor: Tensor, like: Any) -> Tensor:
    """Of a whole tensor that every rank holds, the part that belongs to this rank if it is sharded as `like` is."""
    if not sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None).to_local()


def as_sharded(part: Tensor, like: Any) -> Tensor:
    """This rank's part of something shaped as `like`, seen as the sharded whole; shares memory."""
    if not sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


class InParts:
    """What holds a model that may be sharded: `model`, and once every rank has only its part of it, its twin."""

    model: Any
    _twin: Twin | None = None

    @contextlib.contextmanager
    def whole(self, *, everywhere: bool = True, in_memory: bool = False) -> Iterator[Any]:
        """The model in one piece with its weights as they are: itself, or where it is sharded a copy that lasts as long as the block.

        A meeting of all ranks. Without `everywhere` only the first rank's copy has weights, in main memory; with `in_memory` all have them
        there.
        """
        if self._twin is None:
            yield self.model
        else:
            with self._twin.filled(everywhere=everywhere, in_memory=in_memory) as model:
                yield model

    def on_first(self, write: Callable[[Any], object]) -> None:
        """`write(model)` of the model in one piece, on the first rank alone. A meeting of all ranks."""
        with self.whole(everywhere=False) as model:
            if ranks.first():
                write(model)

    def restored(self, read: Callable[[Any], object]) -> None:
        """`read(model)` puts other weights into the model in one piece; every rank takes over its part. A meeting of all ranks."""
        with self.whole(in_memory=True) as model:
            read(model)
            if self._twin is not None:
                self._twin.put_back()


class Twin:
    """The model in one piece: its modules copied before they are sharded, without weights until `filled`."""

    def __init__(self, model: nn.Module) -> None:
        memo: dict[int, Any] = {}
        for parameter in model.parameters():
            empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        self._sharded = model
        self.model: Any = copy.deepcopy(model, memo)

    @contextlib.contextmanager
    def filled(self, *, everywhere: bool = True, in_memory: bool = False) -> Iterator[Any]:
        """Within, the twin has the weights as they are: on all ranks, or on the first alone. A meeting of all ranks.

        They lie on the device, to be computed with; with `in_memory`, and on the first alone, in main memory.
        """
        copies = dict(self.model.named_parameters())
        try:
            for name, parameter in self._sharded.named_parameters():
                tensor = whole(parameter)
                if everywhere or ranks.first():
                    copies[name].data = tensor.cpu() if in_memory or not everywhere else tensor
            yield self.model
        finally:
            for parameter in copies.values():
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)

    @torch.no_grad()
    def put_back(self) -> None:
        """Within `filled`: the sharded model takes over what the twin's weights have become."""
        copies = dict(self.model.named_parameters())
        for name, parameter in self._sharded.named_parameters():
            own(parameter).copy_(part_of(copies[name].detach(), parameter))
