"""The processes that make one run together: under torchrun each is a rank, alone it is a group of one.

Every rank goes through the same lines; what is split is named where it is split (`own`). Alone, every function here is the identity,
so that nothing else asks how many there are. Values travel over gloo, tensors of the model over the device's own backend.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tether.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from tether.peers import Peers

T = TypeVar("T")
Number = TypeVar("Number", int, float)
TIMEOUT = datetime.timedelta(hours=6)  # rank 0 may score rewards for long; a rank that died is noticed by its processes, not by this

_values: Any = None  # the group over which python values travel; None: alone
peers: Peers | None = None  # the other processes, also after they have parted


def size() -> int:
    """How many ranks there are; 1 alone."""
    if _values is None:
        return 1
    import torch.distributed as dist

    return int(dist.get_world_size())


def rank() -> int:
    """Which one this is; 0 alone."""
    if _values is None:
        return 0
    import torch.distributed as dist

    return int(dist.get_rank())


def first() -> bool:
    """Whether this rank is the one that writes and speaks."""
    return rank() == 0


def wanted() -> int:
    """How many ranks the environment (torchrun, Slurm by way of torchrun) asks for."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Within, this process is one of the ranks that torchrun has started. Does nothing when there is one, or when they are joined already."""
    global _values, peers
    if wanted() == 1 or _values is not None:
        yield
        return
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(_device(torch.cuda.device_count()))
    from tether.peers import Peers

    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
    _values = dist.new_group(backend="gloo", timeout=TIMEOUT) if cuda else dist.group.WORLD
    peers = Peers(rank(), gather((rank(), socket.gethostname(), os.getpid())), dist.distributed_c10d._get_default_store())
    try:
        with peers.watched():
            yield
            dist.barrier(_values)  # nobody closes a connection that another still reads from
            peers.leave()
    finally:
        _values = None
        dist.destroy_process_group()


def may_speak() -> bool:
    """Whether what went wrong here is this rank's to tell. Alone, and until the ranks have joined, always."""
    return peers is None or peers.claim()


def last_word(text: str, code: int) -> int:
    """What ended the command, said by one rank where there are several, which leaves the exit code for whoever started them. Returns it."""
    if may_speak():
        print(text, file=sys.stderr)
        if wanted() > 1:
            from tether.peers import EXIT, leave_word

            leave_word(EXIT, str(code))
    return code


def again(run: Path) -> str:
    """The command that continues a run as it is run here."""
    if peers is None:
        return f"tether resume {run}"
    from tether.peers import again

    return again(str(run), peers.size, peers.one_machine)


def _device(n: int) -> int:
    """Which of this machine's `n` CUDA devices is this rank's."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= n:
        what = f"rank {os.environ.get('RANK', 0)} has no CUDA device of its own: this machine has {n}"
        raise UserError(what, remedy=f"Start {n} ranks on it.")
    return local


# -- values ------------------------------------------------------------------------------------------------------------


def gather(value: T) -> list[T]:
    """Every rank's value, in the order of the ranks, on all of them."""
    if _values is None:
        return [value]
    import torch.distributed as dist

    out: list[Any] = [None] * size()
    dist.all_gather_object(out, value, group=_values)
    return out


def share(value: T) -> T:
    """Rank 0's value on all ranks; what the others pass is not looked at."""
    if _values is None:
        return value
    import torch.distributed as dist

    held = [value]
    dist.broadcast_object_list(held, src=0, group=_values)
    return held[0]


def once(count: Number) -> Number:
    """What all ranks know and are about to sum counts on one of them."""
    return count if first() else type(count)(0)


def total(numbers: Mapping[str, float]) -> dict[str, float]:
    """Sums over the ranks by name, equal to the last bit on all of them."""
    out: dict[str, float] = {}
    for part in gather(dict(numbers)):
        for name, number in part.items():
            out[name] = out.get(name, 0.0) + number
    return out


def union(names: Iterable[str]) -> list[str]:
    """Every name that any rank has, once."""
    return list(dict.fromkeys(name for part in gather(list(names)) for name in part))


def summed(tensor: Tensor) -> Tensor:
    """The sum over the ranks, as a new tensor."""
    if _values is None:
        return tensor
    import torch.distributed as dist

    out = tensor.detach().clone()
    dist.all_reduce(out)
    return out


# -- shares ------------------------------------------------------------------------------------------------------------


def own(costs: Sequence[int]) -> list[list[int]]:
    """Indices for each rank, their costs balanced: the dearest first, each to the rank that has least. The same on all ranks."""
    shares: list[list[int]] = [[] for _ in range(size())]
    loads = [0] * size()
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = loads.index(min(loads))
        shares[least].append(index)
        loads[least] += costs[index]
    return [sorted(share) for share in shares]
