"""Weights on their way to servers: a folder for each version, an adapter or a whole model, as safetensors."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from tether.adapters import is_adapted, write_adapter
from tether.errors import UserError
from tether.models import load_model, save_model, write_model
from tether.policy import Policy


class Weights:
    """Writes the policy's weights under `root`, which the servers see under the same path.

    A name holds the version and a mark of this process: a server that outlives a run never takes one run's weights for another's.
    """

    def __init__(self, policy: Policy, root: Path) -> None:
        self.policy, self.root = policy, root.resolve()
        self.adapted = is_adapted(policy.model)
        self.mark = secrets.token_hex(4)

    def write(self, version: int) -> tuple[str, Path]:
        """Name and folder of the weights as they are now. A meeting of all ranks; the first one writes."""
        name = f"{'adapter' if self.adapted else 'weights'}-{self.mark}-{version:06d}"
        folder = self.root / name

        def put(model: Any) -> None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if self.adapted:
                    write_adapter(model, None, folder)
                else:
                    write_model(model, None, folder, dtype=served_dtype(self.policy))
            except OSError as error:
                raise UserError(
                    f"the weights cannot be written there for the servers: {error.strerror}",
                    where=str(self.root),
                    remedy="See engine.weights.",
                ) from error

        self.policy.on_first(put)
        return name, folder

    def forget(self, keep: Collection[str]) -> None:
        """Delete the versions that no server needs any more."""
        for folder in self.root.glob(f"*-{self.mark}-*"):
            if folder.name not in keep:
                shutil.rmtree(folder, ignore_errors=True)


def served_dtype(policy: Policy) -> torch.dtype:
    """What a server computes in: as training does."""
    return torch.bfloat16 if policy.precision == "bf16" else torch.float32


def base_model(policy: Policy, root: Path) -> str:
    """Where a server that is started finds the model: where it was loaded from, or a copy if that is no folder that servers read."""
    model: Any = policy.model.get_base_model() if is_adapted(policy.model) else policy.model
    source = str(model.tether_source)
    path = Path(source)
    if path.is_dir() and (path / "tokenizer_config.json").exists():
        return source
    if not path.exists():  # a name on the hub, in the cache by now
        return source
    folder = root / "base"
    if not (folder / "config.json").exists():
        loaded, _ = load_model(source, trust_remote_code=policy.trust_remote_code)
        save_model(loaded, policy.tokenizer, folder, dtype=served_dtype(policy))
    return str(folder.resolve())
