"""`TokenBatch`: the attempts of one step as aligned matrices (R, T), R attempts of at most T tokens, and how to cut them up.

An attempt that takes no part in the loss (cut off and masked, or without a score) keeps its row with an empty mask; the model
does not compute it. Parts of the step name their rows, so every matrix is indexed alike. Over several ranks each holds all attempts
and whole matrices, and computes its own parts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tether import ranks
from tether.batch import Example
from tether.packing import Packed, own_parts, pack
from tether.rollout import Rollout, group_example
from tether.token_rows import to_rows

Device = torch.device | str


@dataclass(frozen=True)
class TokenBatch:
    rollouts: list[Rollout]  # R, group by group
    examples: list[Example]  # one for each group with an active attempt, those attempts as answers
    rows: list[list[int]]  # of each example: the rows of its answers
    sizes: list[int]  # of each example: attempts of its group, inactive ones included
    mask: Tensor  # (R, T) bool
    sampled_logp: Tensor  # (R, T) as kept while sampling, under the training distribution
    rewards: Tensor  # (R,) totals; NaN where unscored
    groups: Tensor  # (R,) which group

    @property
    def width(self) -> int:
        return self.mask.shape[1]

    @property
    def active(self) -> Tensor:
        """(R,) whether the row has an active token."""
        return self.mask.any(1)

    @property
    def tokens(self) -> int:
        return sum(e.n_tokens for e in self.examples)


@dataclass(frozen=True)
class Part:
    """What is computed at once: its packed stream and, for every answer of it, the row in the step's matrices."""

    packed: Packed
    rows: Tensor  # (A,)


@dataclass(frozen=True)
class MiniBatch:
    """What one optimiser step sees, by example. The totals are what its loss divides by, whatever parts it is cut into."""

    examples: list[int]
    total_tokens: int
    active_rows: int  # rows with an active token
    all_rows: int


def token_batch(groups: Sequence[Sequence[Rollout]], *, mask_truncated: bool = False, device: Device = "cpu", least: int = 2) -> TokenBatch:
    """Matrices of the groups. A row is active when it is scored and (with `mask_truncated`) was ended by the model.

    A group with fewer than `least` scored rows has nothing to compare and is inactive as a whole.
    """
    rollouts = [r for group in groups for r in group]
    width = max((len(r.tokens) for r in rollouts), default=1)
    mask, logps = torch.zeros(len(rollouts), width, dtype=torch.bool), torch.zeros(len(rollouts), width)
    examples, rows, sizes = [], [], []
    start = 0
    for group in groups:
        scored = sum(r.total is not None for r in group)
        active = [
            start + i
            for i, r in enumerate(group)
            if r.total is not None and scored >= least and r.n_trained and (r.finished or not mask_truncated)
        ]
        for row in active:
            n = rollouts[row].n_trained
            mask[row, :n] = True
            logps[row, :n] = torch.tensor([x for x, t in zip(rollouts[row].logps, rollouts[row].trained, strict=True) if t])
        if active:
            answers = [rollouts[row] for row in active]
            examples.append(group_example(answers))
            rows.append(active)
            sizes.append(len(group))
        start += len(group)
    numbers = torch.tensor([float("nan") if r.total is None else r.total for r in rollouts], dtype=torch.float64)
    ids = torch.tensor([r.group for r in rollouts], dtype=torch.long)
    return TokenBatch(rollouts, examples, rows, sizes, mask.to(device), logps.to(device), numbers, ids)


def parts(batch: TokenBatch, examples: Sequence[int], tokens_per_micro_batch: int, device: Device = "cpu") -> Iterator[Part]:
    """This rank's share of the examples, cut by token budget; as many parts on every rank, some perhaps without a row."""
    for chosen in own_parts([batch.examples[i] for i in examples], tokens_per_micro_batch):
        indices = [examples[j] for j in chosen]
        rows = torch.tensor([row for i in indices for row in batch.rows[i]], dtype=torch.long, device=device)
        yield Part(pack([batch.examples[i] for i in indices], device=device), rows)


@torch.no_grad()
def over_all(batch: TokenBatch, values: Callable[[Packed], Tensor], tokens_per_micro_batch: int, device: Device = "cpu") -> Tensor:
    """`values` of each trained token, without gradient, as a matrix (R, T) with zeros at inactive places."""
    out = torch.zeros(batch.mask.shape, device=device)
    for part in parts(batch, range(len(batch.examples)), tokens_per_micro_batch, device):
        out[part.rows] = to_rows(part.packed, values(part.packed), batch.width).to(out.dtype)
    return ranks.summed(out)  # a row is 0 on all ranks but the one that computed it


def mini_batches(batch: TokenBatch, n: int, seed: str) -> list[MiniBatch]:
    """The step's examples in `n` shares (fewer when there are not as many groups), shuffled by `seed` unless n is 1."""
    order = list(range(len(batch.examples)))
    if n > 1:
        random.Random(seed).shuffle(order)
    n = min(n, len(order))
    shares = [order[i * len(order) // n : (i + 1) * len(order) // n] for i in range(n)]
    # Groups without any active row belong to no share; the rows of all of them together make up the step's rows.
    scale = len(batch.rollouts) / max(1, sum(batch.sizes))
    out = []
    for share in shares:
        rows = [row for i in share for row in batch.rows[i]]
        size = sum(batch.sizes[i] for i in share)
        out.append(MiniBatch(sorted(share), int(batch.mask[rows].sum()), len(rows), round(size * scale)))
    return out
