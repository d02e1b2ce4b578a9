"""One optimiser step: look at the gradient, clip it, apply it, move the schedule; or refuse to.

AdamW (Loshchilov and Hutter 2019): decay is decoupled from the gradient, and matrices decay while vectors (norms, biases, the
scalar head's bias) do not. A step whose loss or gradient is not finite is not applied: one such step ruins the weights, while
the loss curve may look smooth ever after.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tether import ranks
from tether.errors import UserError
from tether.sharding import own, sharded

OTHER_SETTINGS = "The checkpoint belongs to other settings; resume with the recipe it was made with."
PATIENCE = 5  # steps in a row that may be refused before the run stops


class UpdateRecipe(Protocol):
    """The settings that an update reads (`TrainRecipe` has them)."""

    learning_rate: float
    lr_scheduler: Any  # "linear", "cosine" or "constant"
    warmup_steps: int
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    max_grad_norm: float


class Diverged(UserError):
    """Loss or gradient was not finite several steps in a row."""


class Update:
    """Optimiser, schedule and guard over named trainable parameters.

    Half-precision parameters are updated through a float32 copy, with a warning: what the model computes with still moves in
    steps of its own precision. Keep trained weights in float32.
    """

    def __init__(
        self,
        named_parameters: Mapping[str, nn.Parameter],
        recipe: UpdateRecipe,
        total_steps: int,
        rates: Mapping[str, float] | None = None,
    ) -> None:
        """`rates` gives the peak learning rate of parameters whose names begin so, such as {"critic.": 9e-6}."""
        if not named_parameters:
            raise ValueError("there is no trainable parameter")
        self.parameters = dict(named_parameters)
        self.recipe, self.total_steps = recipe, total_steps
        self.applied = 0  # steps that were: the place in the schedule
        self.refused_in_row = 0
        half = [n for n, p in self.parameters.items() if p.dtype in (torch.float16, torch.bfloat16)]
        if half:
            warnings.warn(
                f"{len(half)} of {len(self.parameters)} trained parameters are in half precision ({half[0]}): a small learning rate moves "
                "few of their values, or none. Load the model in float32.",
                stacklevel=2,
            )
        # What the optimiser moves: the parameter itself, the float32 copy of a half-precision one, or this rank's part of either.
        self.masters = {n: _master(p) for n, p in self.parameters.items()}
        kinds: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, p in self.masters.items():
            rate = next((r for start, r in (rates or {}).items() if name.startswith(start)), recipe.learning_rate)
            kinds.setdefault((recipe.weight_decay if p.ndim >= 2 else 0.0, rate / recipe.learning_rate), []).append(p)
        groups = [{"params": params, "weight_decay": decay, "scale": scale} for (decay, scale), params in kinds.items()]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=recipe.learning_rate,
            betas=(recipe.adam_beta1, recipe.adam_beta2),
            eps=recipe.adam_epsilon,
            fused=all(p.device.type in ("cpu", "cuda") for p in self.masters.values()),
        )

    def learning_rate(self, step: int) -> float:
        """Learning rate of the applied step `step` (0-based): rises over `warmup_steps`, then falls to 0 just after the last.

        The first step is never 0: warm-up over W steps uses 1/W, 2/W, ..., 1.
        """
        peak, warmup = self.recipe.learning_rate, self.recipe.warmup_steps
        if step < warmup:
            return peak * (step + 1) / warmup
        through = min(1.0, (step - warmup) / max(1, self.total_steps - warmup))
        shapes = {"linear": 1 - through, "cosine": 0.5 * (1 + math.cos(math.pi * through)), "constant": 1.0}
        return peak * shapes[self.recipe.lr_scheduler]

    def apply(self, loss: float | Tensor | None = None) -> dict[str, Any]:
        """Apply the gradients that have gathered, and clear them.

        Returns `grad_norm` (before clipping), `learning_rate`, and `skipped`: 0, or 1 with a `skip_reason` when the step was not
        applied: `loss` or the gradient is not finite, or no parameter has a gradient (a step without a trained token). A step
        that was not applied does not move the schedule. Raises Diverged when that is so, by non-finite numbers, 5 times in a row.
        """
        rate = self.learning_rate(self.applied)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = total_norm(gradients) if gradients else 0.0
        broken = None
        if loss is not None and not math.isfinite(float(loss)):
            broken = f"the loss is {float(loss)}"
        elif not math.isfinite(norm):
            broken = f"the gradient is not finite ({self._culprit()})"
        reason = broken if broken or gradients else "no token is trained in this step"
        if reason is None:
            self._step(norm, rate)
            self.applied += 1
            self.refused_in_row = 0
        self._clear()
        self.refused_in_row += broken is not None
        if self.refused_in_row >= PATIENCE:
            raise Diverged(
                f"{PATIENCE} steps in a row were not applied, the last because {broken or reason}",
                remedy="The weights are finite and the last checkpoint is kept. Lower learning_rate, look at the rows of these steps, "
                "or set precision: fp32.",
            )
        out: dict[str, Any] = {"grad_norm": norm, "learning_rate": rate, "skipped": int(reason is not None)}
        return out if reason is None else {**out, "skip_reason": reason}

    def _step(self, norm: float, rate: float) -> None:
        limit = self.recipe.max_grad_norm
        scale = limit / norm if limit and norm > limit else 1.0
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            master = self.masters[name]
            if master is not parameter:
                master.grad = own(parameter.grad).float()
            if scale != 1.0 and master.grad is not None:
                master.grad.mul_(scale)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        self.optimizer.step()
        # The fused optimiser leaves the version counters alone, and copies of weights in another type are kept by them.
        torch.autograd.graph.increment_version([m for m in self.masters.values() if m.grad is not None])
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if self._copied(name):
                    own(parameter).copy_(self.masters[name])

    def _copied(self, name: str) -> bool:
        """Whether the optimiser moves a copy, which is of another type."""
        return self.masters[name].dtype != self.parameters[name].dtype

    def _clear(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = self.masters[name].grad = None

    def _culprit(self) -> str:
        bad = [n for n, p in self.parameters.items() if p.grad is not None and not all_finite(p.grad)]
        bad = ranks.union(bad)
        return f"{bad[0]} and {len(bad) - 1} more" if len(bad) > 1 else bad[0] if bad else "its norm overflows"

    # -- to and from disk ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """`tensors` by name (for safetensors) and `scalars` (for JSON): everything that the next step depends on."""
        tensors = {}
        for name, master in self.masters.items():
            for key, value in self.optimizer.state.get(master, {}).items():
                tensors[f"{name}|{key}"] = value
            if self._copied(name):
                tensors[f"{name}|master"] = master.detach()
        scalars = {"applied": self.applied, "refused_in_row": self.refused_in_row, "parameters": sorted(self.parameters)}
        return {"tensors": tensors, "scalars": scalars}

    def check_names(self, scalars: Mapping[str, Any], *, where: str | None = None) -> None:
        """UserError unless the `scalars` of a state are those of the parameters that are trained here."""
        theirs, ours = set(scalars["parameters"]), set(self.parameters)
        if theirs != ours:
            name = min(theirs ^ ours)
            what = f"the checkpoint trained {name}, which is not trained here" if name in theirs else f"{name} was not trained then"
            raise UserError(what, where=where, remedy=OTHER_SETTINGS)

    def load_state_dict(self, state: Mapping[str, Any], *, where: str | None = None) -> None:
        """Put back what `state_dict` gave. Names and shapes must be those of this update's parameters, or UserError."""
        self.check_names(state["scalars"], where=where)
        ours = set(self.parameters)
        found: dict[str, dict[str, Tensor]] = {}
        for full_name, tensor in state["tensors"].items():
            name, _, key = full_name.rpartition("|")
            if name not in ours:
                raise UserError(f"the optimiser state names {name!r}, which is not trained here", where=where, remedy=OTHER_SETTINGS)
            if key != "step" and tensor.shape != self.masters[name].shape:
                shapes = f"{list(tensor.shape)}, here it is {list(self.masters[name].shape)}"
                raise UserError(f"the optimiser state of {name} is {shapes}", where=where, remedy=OTHER_SETTINGS)
            found.setdefault(name, {})[key] = tensor
        for name, entries in found.items():
            master = self.masters[name]
            entries = {k: v.to(master.device) if k != "step" else v for k, v in entries.items()}
            if "master" in entries:
                with torch.no_grad():
                    master.copy_(entries.pop("master"))
            if entries:
                self.optimizer.state[master] = {k: v.clone() for k, v in entries.items()}
        self.applied = int(state["scalars"]["applied"])
        self.refused_in_row = int(state["scalars"]["refused_in_row"])


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype in (torch.float16, torch.bfloat16):
        return nn.Parameter(own(parameter).float())
    return nn.Parameter(own(parameter)) if sharded(parameter) else parameter


def total_norm(gradients: Sequence[Tensor]) -> float:
    """The Euclidean norm of all gradients together. Over several ranks first sums those that each rank has for itself.

    A sharded gradient was summed in the backward pass, and every rank has its part of it; any other, such as that of a value
    head, is whole on each rank and holds what that rank's examples say.
    """
    if ranks.size() == 1:
        return float(torch.nn.utils.get_total_norm(gradients))
    parts = [own(g) for g in gradients if sharded(g)]
    whole = [g for g in gradients if not sharded(g)]
    for gradient in whole:
        gradient.copy_(ranks.summed(gradient))
    mine = sum(float(g.double().square().sum()) for g in parts)
    every = sum(float(g.double().square().sum()) for g in whole)
    return math.sqrt(ranks.total({"mine": mine})["mine"] + every)


def all_finite(tensor: Tensor) -> bool:
    """Of a sharded tensor: whether this rank's part is."""
    return bool(torch.isfinite(own(tensor)).all())
