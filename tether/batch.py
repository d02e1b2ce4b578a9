"""What the engine eats (`Example`) and in which order (`DataOrder`). Plain lists: tensors are made in `packing.py`."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

from tether.files import Source


@dataclass(frozen=True)
class Example:
    """One prompt and the answers that share it.

    `trained[i][t]` says whether token t of answer i is in the loss. SFT has one answer, a pair two (`[chosen, rejected]`),
    a group G.
    """

    prompt: list[int]
    answers: list[list[int]]
    trained: list[list[bool]]
    source: Source | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        """Tokens the engine computes for this example: the prompt once, each answer once."""
        return len(self.prompt) + sum(len(a) for a in self.answers)

    @property
    def n_trained(self) -> int:
        return sum(sum(t) for t in self.trained)


class DataOrder:
    """Which rows make up optimiser step s: a pure function of (seed, s), so a resumed run sees the rows it would have seen.

    Each epoch is its own shuffle; its last batch may be short, and no row is skipped or repeated within an epoch.

    >>> order = DataOrder(n_rows=5, batch_size=2, seed=0, shuffle=False)
    >>> [order.batch(s) for s in range(4)]
    [[0, 1], [2, 3], [4], [0, 1]]
    """

    def __init__(self, n_rows: int, batch_size: int, seed: int, shuffle: bool = True) -> None:
        if n_rows < 1 or batch_size < 1:
            raise ValueError(f"need at least one row and a batch of at least one, got {n_rows} rows, batch {batch_size}")
        self.n_rows, self.batch_size, self.seed, self.shuffle = n_rows, batch_size, seed, shuffle
        self._epoch_cached, self._permutation = -1, list(range(n_rows))

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.n_rows / self.batch_size)

    def epoch(self, step: int) -> float:
        """Epochs completed after `step` steps, as a fraction."""
        whole, within = divmod(step, self.steps_per_epoch)
        return whole + min(1.0, within * self.batch_size / self.n_rows)

    def batch(self, step: int) -> list[int]:
        epoch, within = divmod(step, self.steps_per_epoch)
        if self.shuffle and epoch != self._epoch_cached:
            self._permutation = list(range(self.n_rows))
            # A generator of its own: building an order never moves the global random state.
            random.Random(f"{self.seed}/{epoch}").shuffle(self._permutation)
            self._epoch_cached = epoch
        start = within * self.batch_size
        return self._permutation[start : start + self.batch_size]


def split_by_prompt(examples: list[Example], fraction: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Hold out about `fraction` of the rows, whole prompts at a time, so that no prompt is on both sides.

    Returns (training, held out), each in file order. Rows without a prompt go by their first answer.
    """
    if fraction <= 0:
        return examples, []
    keys = [tuple(e.prompt) or tuple(e.answers[0]) for e in examples]
    order = sorted(set(keys))
    random.Random(f"{seed}/split").shuffle(order)
    wanted, held = round(fraction * len(examples)), set[tuple[int, ...]]()
    count = {key: 0 for key in order}
    for key in keys:
        count[key] += 1
    taken = 0
    for key in order:
        if taken >= wanted:
            break
        held.add(key)
        taken += count[key]
    train = [e for e, key in zip(examples, keys, strict=True) if key not in held]
    return train, [e for e, key in zip(examples, keys, strict=True) if key in held]
