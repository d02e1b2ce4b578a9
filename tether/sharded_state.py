"""The optimiser's state in parts: each rank writes its own as safetensors, and any number of ranks reads them back.

torch.distributed.checkpoint cuts and joins; its safetensors format is used because its own holds pickles.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor

from tether import ranks
from tether.sharding import as_sharded, part_of
from tether.step import Update

STEP = "step"  # of one entry: kept as a vector of one number, because the reader cuts every tensor along its first dimension


def write(update: Update, tensors: dict[str, Tensor], folder: Path) -> None:
    """What `Update.state_dict` gives as `tensors`, into a new folder. A meeting of all ranks."""
    import torch.distributed.checkpoint as dcp

    whole = {
        name: value.reshape(1) if _entry(name) == STEP else as_sharded(value, update.parameters[_parameter(name)])
        for name, value in tensors.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(whole, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True))


def read(update: Update, folder: Path) -> dict[str, Tensor]:
    """This rank's part of what lies there, whoever wrote it; all of it belongs to parameters of `update`."""
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(folder))
    names = reader.read_metadata().state_dict_metadata
    parts = {name: torch.empty(1) if _entry(name) == STEP else torch.empty_like(update.masters[_parameter(name)]) for name in names}
    whole = {name: as_sharded(part, update.parameters[_parameter(name)]) if _entry(name) != STEP else part for name, part in parts.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(whole, storage_reader=reader, no_dist=ranks.size() == 1)
    return {name: part.reshape(()) if _entry(name) == STEP else part.detach() for name, part in parts.items()}


def parts_of(update: Update, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of tensors that were written in one piece."""
    return {
        name: value if _entry(name) == STEP else part_of(value, update.parameters.get(_parameter(name), value))
        for name, value in tensors.items()
    }


def _parameter(name: str) -> str:
    return name.rpartition("|")[0]


def _entry(name: str) -> str:
    return name.rpartition("|")[2]
