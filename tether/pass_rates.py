"""How good samples are, in numbers: pass@k, votes, greedy accuracy, lengths, each with its interval. Free of torch.

The prompts are what is independent: samples of one prompt are turned into one number before any interval is made. Unscored
samples are left out of every rate and counted; they are never zeros.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tether import stats
from tether.votes import majority_at_k

SHARE = "Agresti-Coull, clustered by prompt"
BOOTSTRAP = "bootstrap over prompts"


@dataclass(frozen=True)
class Tried:
    """One prompt's attempts. Rewards are those of scored samples; the rest is over all samples.

    `votes[i]` scored samples gave answer i, `right[i]` says whether it is right, `silent` gave none; None where answers cannot be
    told apart. `greedy` is None without a greedy answer or a reward for it.
    """

    rewards: Sequence[float] = ()
    lengths: Sequence[int] = ()  # tokens of each sample
    cut: Sequence[bool] = ()  # which samples ran into the length limit
    votes: Sequence[int] | None = None
    right: Sequence[bool] = ()
    silent: int = 0
    greedy: float | None = None
    greedy_length: int | None = None
    greedy_cut: bool | None = None
    category: str | None = None


@dataclass(frozen=True)
class Measure:
    """A figure over prompts with a 95 % interval and how that was made. `left_out`: prompts with too few scored samples for it."""

    name: str
    value: stats.Interval
    interval: str
    left_out: int = 0
    more: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        low, high = (None if abs(v) == float("inf") else v for v in (self.value.low, self.value.high))
        out = {"value": self.value.value, "low": low, "high": high, "prompts": self.value.n, "interval": self.interval}
        return out | {"left_out": self.left_out} | self.more


def is_pass_or_fail(tried: Sequence[Tried]) -> bool:
    """Whether every reward is 0 or 1, so that passing needs no threshold."""
    return all(r in (0.0, 1.0) for t in tried for r in (*t.rewards, *([] if t.greedy is None else [t.greedy])))


def measure(tried: Sequence[Tried], ks: Sequence[int], *, threshold: float | None = None, seed: int = 0) -> list[Measure]:
    """All figures that these attempts allow. A sample passes with a reward of at least `threshold`.

    Without a threshold rewards of 0 and 1 are fails and passes; of other rewards the mean and the mean of the best of k are told
    instead of pass@k. A figure that no prompt allows is left out.
    """
    counts_passes = threshold is not None or is_pass_or_fail(tried)
    bar = 1.0 if threshold is None else threshold
    found: list[Measure | None] = []
    for k in ks:
        enough = [t for t in tried if len(t.rewards) >= k]
        left_out = len(tried) - len(enough)
        if counts_passes:
            rates = [stats.pass_at_k(len(t.rewards), sum(r >= bar for r in t.rewards), k) for t in enough]
            found.append(_share(f"pass@{k}", rates, left_out))
        else:
            found.append(_bootstrap("reward" if k == 1 else f"best@{k}", [stats.best_of_n(t.rewards, k) for t in enough], seed, left_out))
    for k in ks:
        voting = [t for t in tried if t.votes is not None and len(t.rewards) >= k]
        if k > 1 and voting:
            votes = [majority_at_k(t.votes or (), t.right, k, silent=t.silent) for t in voting]
            more = {"tied": sum(v.tied for v in votes) / len(votes), "no_votes": sum(v.empty for v in votes) / len(votes)}
            found.append(_share(f"maj@{k}", [v.right for v in votes], len(tried) - len(voting), more))
    greedy = [t.greedy for t in tried if t.greedy is not None]
    if counts_passes:
        found.append(_share("greedy", [float(r >= bar) for r in greedy], len(tried) - len(greedy)))
    else:
        found.append(_bootstrap("greedy reward", greedy, seed, len(tried) - len(greedy)))
    found.append(_share("cut", [sum(t.cut) / len(t.cut) for t in tried if t.cut]))
    found.append(_share("greedy cut", [float(t.greedy_cut) for t in tried if t.greedy_cut is not None]))
    found.append(_bootstrap("length", [sum(t.lengths) / len(t.lengths) for t in tried if t.lengths], seed))
    found.append(_bootstrap("greedy length", [float(t.greedy_length) for t in tried if t.greedy_length is not None], seed))
    return [m for m in found if m is not None]


def _share(name: str, values: Sequence[float], left_out: int = 0, more: dict[str, float] | None = None) -> Measure | None:
    return Measure(name, stats.share_interval(values), SHARE, left_out, more or {}) if len(values) else None


def _bootstrap(name: str, values: Sequence[float], seed: int, left_out: int = 0) -> Measure | None:
    return Measure(name, stats.bootstrap_mean(values, seed=seed), BOOTSTRAP, left_out) if len(values) else None


def by_category(tried: Sequence[Tried]) -> dict[str, list[Tried]]:
    """The prompts of each category, numbers in their order, then names in theirs."""
    out: defaultdict[str, list[Tried]] = defaultdict(list)
    for t in tried:
        out[t.category or "(none)"].append(t)
    return dict(sorted(out.items(), key=lambda item: (_leading(item[0]), item[0])))


def _leading(name: str) -> float:
    """The number that a category begins with ("3 to 7"), or infinity."""
    try:
        return float(name.split(" ")[0])
    except ValueError:
        return float("inf")


def spread(tried: Sequence[Tried], threshold: float = 1.0) -> dict[str, int]:
    """How many prompts were never, sometimes and always passed; the middle ones are those that a group of samples can learn from."""
    shares = [sum(r >= threshold for r in t.rewards) / len(t.rewards) for t in tried if t.rewards]
    return {"never": sum(s == 0 for s in shares), "sometimes": sum(0 < s < 1 for s in shares), "always": sum(s == 1 for s in shares)}


def binned(values: Sequence[float], bins: int) -> list[str]:
    """Names of bins of about equally many values, as "low to high" of what lies in them; equal values share a bin.

    >>> binned([1, 2, 3, 40], 2)
    ['1 to 2', '1 to 2', '3 to 40', '3 to 40']
    """
    x = np.asarray(values, dtype=float)
    edges = np.quantile(x, np.linspace(0, 1, bins + 1)[1:-1], method="lower") if len(x) else []
    place = np.searchsorted(np.unique(edges), x, side="left")
    names = {int(b): f"{x[place == b].min():g} to {x[place == b].max():g}" for b in np.unique(place)}
    return [names[int(b)] for b in place]
