"""What is trained and tied in a run that samples: the policy, perhaps a critic, and what the policy is tied to.

`Learner` is what the loop updates and a checkpoint keeps; `Anchor` is the reference, which may move on request.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tether import ranks
from tether.policy import Policy, Reference
from tether.sharding import as_sharded, own, part_of, whole

HELD = "reference.safetensors"


class Anchor:
    """The policy as it was at the start, or with `every` at the last step that is a multiple of it."""

    def __init__(self, policy: Policy, every: int | None = None) -> None:
        self.policy, self.every = policy, every
        self._held: dict[str, Tensor] | None = None  # trained parameters of a reference that has moved; this rank's part

    def refresh(self, step: int) -> bool:
        """Call before a step, with the steps done so far. Says whether the reference has become the policy as it is now."""
        if not self.every or step == 0 or step % self.every:
            return False
        self._held = self._current()
        self.policy.drop_reference()
        return True

    @contextlib.contextmanager
    def reference(self) -> Iterator[Reference]:
        """As `Policy.reference`, for as long as the block lasts."""
        if self._held is None:
            with self.policy.reference() as reference:
                yield reference
            return
        with torch.no_grad():
            current = self._current()
            self._put(self._held)
            try:
                yield Reference(self.policy.engine)
            finally:
                self._put(current)

    def _current(self) -> dict[str, Tensor]:
        return {name: own(p).clone() for name, p in self.policy.parameters().items()}

    def _put(self, tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.policy.parameters().items():
                own(parameter).copy_(tensors[name])

    def write(self, folder: Path) -> None:
        """The whole reference, by the first rank; a meeting of all."""
        if self._held is None:
            return
        tensors = {}
        for name, parameter in self.policy.parameters().items():
            tensor = whole(as_sharded(self._held[name], parameter))
            if ranks.first():
                tensors[name] = tensor.cpu().contiguous()
        if ranks.first():
            save_file(tensors, folder / HELD)

    def read(self, folder: Path) -> None:
        if (folder / HELD).exists():
            found, device = load_file(folder / HELD), self.policy.device
            self._held = {name: part_of(found[name], p).to(device) for name, p in self.policy.parameters().items()}


class CriticPart(Protocol):
    """What the learner needs of a critic."""

    def parameters(self) -> dict[str, nn.Parameter]: ...

    def write_weights(self, folder: Path) -> None: ...

    def read_weights(self, folder: Path) -> None: ...


class Learner:
    """Everything that a checkpoint holds. Names of the critic's parameters begin with `critic.`."""

    def __init__(self, policy: Policy, anchor: Anchor | None = None, critic: CriticPart | None = None) -> None:
        self.policy, self.anchor, self.critic = policy, anchor, critic

    def parameters(self) -> dict[str, nn.Parameter]:
        out = dict(self.policy.parameters())
        if self.critic is not None:
            out |= {f"critic.{name}": p for name, p in self.critic.parameters().items()}
        return out

    def write_weights(self, folder: Path) -> None:
        self.policy.write_weights(folder)
        if self.anchor is not None:
            self.anchor.write(folder)
        if self.critic is not None:
            self.critic.write_weights(folder)

    def read_weights(self, folder: Path) -> None:
        self.policy.read_weights(folder)
        if self.anchor is not None:
            self.anchor.read(folder)
        if self.critic is not None:
            self.critic.read_weights(folder)
