"""Intervals, correlations and curves, so that no figure stands without its uncertainty. Free of torch.

Randomness is passed: a bootstrap takes its own seed and never touches the global random state.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

Numbers = Sequence[float] | np.ndarray


class Interval(NamedTuple):
    """An estimate with its interval, and how many independent values it rests on."""

    value: float
    low: float
    high: float
    n: int


def normal_quantile(p: float) -> float:
    return NormalDist().inv_cdf(p)


def t_quantile(p: float, df: float) -> float:
    """Quantile of Student's t, by bisection of its distribution function.

    >>> round(t_quantile(0.975, 1), 4), round(t_quantile(0.975, 10), 4)
    (12.7062, 2.2281)
    """
    if not (0 < p < 1 and df > 0):
        raise ValueError(f"need 0 < p < 1 and df > 0, got p={p}, df={df}")
    if p < 0.5:
        return -t_quantile(1 - p, df)
    low, high = 0.0, 1.0
    while _t_cdf(high, df) < p:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if _t_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def _t_cdf(t: float, df: float) -> float:
    return 1 - 0.5 * _incomplete_beta(df / 2, 0.5, df / (df + t * t))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function, by Lentz's continued fraction (Numerical Recipes, section 6.4)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    tiny = 1e-300
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), tiny)
    h = d
    for m in range(1, 1000):
        before = h
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (_away_from_zero(1 + numerator * d, tiny))
            c = _away_from_zero(1 + numerator / c, tiny)
            h *= c * d
        if abs(h / before - 1) < 1e-15:
            break
    return front * h / a


def _away_from_zero(x: float, tiny: float) -> float:
    return tiny if abs(x) < tiny else x


def mean_interval(values: Numbers, confidence: float = 0.95, kind: str = "t") -> Interval:
    """Mean with a t (default) or normal interval. One value has no interval: it is unbounded, not a point.

    >>> mean_interval([1.0, 2.0, 3.0]).value
    2.0
    """
    x = _array(values)
    mean = float(x.mean())
    if len(x) < 2:
        return Interval(mean, -math.inf, math.inf, len(x))
    quantile = {"t": lambda p: t_quantile(p, len(x) - 1), "normal": normal_quantile}[kind](0.5 + confidence / 2)
    half = quantile * float(x.std(ddof=1)) / math.sqrt(len(x))
    return Interval(mean, mean - half, mean + half, len(x))


def paired_difference(
    a: Numbers, b: Numbers, *, seed: int = 0, resamples: int = 2000, confidence: float = 0.95, prompts: Sequence[Hashable] | None = None
) -> Interval:
    """Mean of a - b over the same items, with a bootstrap interval over items (percentile; Efron 1979).

    `prompts` names what is independent: values of one prompt are averaged first, so that many samples of one prompt do not
    pass for many prompts.
    """
    first, second = _array(a), _array(b)
    if len(first) != len(second):
        raise ValueError(f"paired values come in equal numbers, got {len(first)} and {len(second)}")
    return bootstrap_mean(first - second, seed=seed, resamples=resamples, confidence=confidence, prompts=prompts)


def bootstrap_mean(
    values: Numbers, *, seed: int = 0, resamples: int = 2000, confidence: float = 0.95, prompts: Sequence[Hashable] | None = None
) -> Interval:
    """Mean with a percentile bootstrap interval, from a generator of its own."""
    x = _per_prompt(_array(values), prompts)
    if len(x) < 2:
        return Interval(float(x.mean()), -math.inf, math.inf, len(x))
    rng = np.random.default_rng(seed)
    # Counts of each item in a resample are multinomial: one matrix product in place of resamples x n indices.
    counts = rng.multinomial(len(x), np.full(len(x), 1 / len(x)), size=resamples)
    low, high = np.quantile(counts @ x / len(x), [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Interval(float(x.mean()), float(low), float(high), len(x))


def wilson(successes: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Interval (low, high) of a proportion (Wilson 1927): stays in [0, 1] and is not a point at 0 or n successes.

    >>> tuple(round(x, 4) for x in wilson(10, 10))
    (0.7225, 1.0)
    """
    if n == 0:
        return 0.0, 1.0
    if not 0 <= successes <= n:
        raise ValueError(f"successes must lie in 0..{n}, got {successes}")
    z = normal_quantile(0.5 + confidence / 2)
    p, z2 = successes / n, z * z
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # The ends meet 0 and 1 exactly in theory; rounding must not push them past the estimate.
    return max(0.0, min(middle - half, p)), min(1.0, max(middle + half, p))


def win_rate(outcomes: Numbers, *, prompts: Sequence[Hashable] | None = None, confidence: float = 0.95) -> Interval:
    """Win rate of one side in paired comparisons: 1 won, 0.5 tied, 0 lost, with a Wilson interval over prompts.

    Comparisons of one prompt (both orders of presentation, several judges) are averaged first. Averages between 0 and 1
    vary less than a coin of the same mean, so the interval is never too narrow for them.

    >>> win_rate([1, 0, 1, 1], prompts=["a", "a", "b", "b"]).value
    0.75
    """
    x = _per_prompt(_array(outcomes), prompts)
    if x.min() < 0 or x.max() > 1:
        raise ValueError("outcomes are 1 (won), 0.5 (tied) or 0 (lost)")
    low, high = wilson(float(x.sum()), len(x), confidence)
    return Interval(float(x.mean()), low, high, len(x))


def share_interval(values: Numbers, *, prompts: Sequence[Hashable] | None = None, confidence: float = 0.95) -> Interval:
    """Mean of values in 0..1 with an interval by Agresti & Coull (1998), the variance taken from the values themselves.

    Half of z^2 prompts are added at 0 and as many at 1; for values of 0 and 1 alone that is their interval. Averages over
    samples of a prompt (pass rates) vary less than coins, and here the interval says so; where all are 0 or all 1 it is no point.

    >>> [round(x, 4) for x in share_interval([1.0] * 10)[:3]]
    [1.0, 0.6791, 1.0]
    """
    x = _per_prompt(_array(values), prompts)
    if x.min() < 0 or x.max() > 1:
        raise ValueError("shares lie between 0 and 1")
    z = normal_quantile(0.5 + confidence / 2)
    n, mean = len(x) + z * z, float(x.mean())
    middle = (float(x.sum()) + z * z / 2) / n
    variance = (float(((x - middle) ** 2).sum()) + z * z / 2 * (middle**2 + (1 - middle) ** 2)) / n
    half = z * math.sqrt(variance / n)
    return Interval(mean, max(0.0, min(middle - half, mean)), min(1.0, max(middle + half, mean)), len(x))


def pearson(a: Numbers, b: Numbers) -> float | None:
    """Linear correlation; None with fewer than two values or when either side does not vary."""
    x, y = _array(a, least=0), _array(b, least=0)
    if len(x) != len(y):
        raise ValueError(f"correlated values come in equal numbers, got {len(x)} and {len(y)}")
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip((x @ y) / math.sqrt(float(x @ x) * float(y @ y)), -1, 1))


def calibration_bins(
    predicted: Numbers, happened: Sequence[bool] | Numbers, *, bins: int = 10, low: float = 0.0, high: float = 1.0
) -> list[dict[str, Any]]:
    """Predicted probability against frequency, in equal bins of [low, high]; bins without values are left out.

    Each bin is {"low", "high", "n", "predicted" (mean), "frequency", "frequency_low", "frequency_high" (Wilson)}.
    """
    p, y = _array(predicted, least=0), _array(happened, least=0)
    if len(p) != len(y):
        raise ValueError(f"every prediction has an outcome, got {len(p)} and {len(y)}")
    if len(p) and (p.min() < low or p.max() > high):
        raise ValueError(f"predicted probabilities must lie in [{low}, {high}], got {p.min()} to {p.max()}")
    edges = np.linspace(low, high, bins + 1)
    place = np.clip(np.searchsorted(edges, p, side="right") - 1, 0, bins - 1)
    out = []
    for i in range(bins):
        here = place == i
        n = int(here.sum())
        if n:
            ends = wilson(float(y[here].sum()), n)
            out.append(
                {
                    "low": float(edges[i]),
                    "high": float(edges[i + 1]),
                    "n": n,
                    "predicted": float(p[here].mean()),
                    "frequency": float(y[here].mean()),
                    "frequency_low": ends[0],
                    "frequency_high": ends[1],
                }
            )
    return out


def calibration_error(bins: Sequence[dict[str, Any]]) -> float | None:
    """Expected calibration error of `calibration_bins`: mean |predicted - frequency|, weighted by the bins' counts."""
    n = sum(b["n"] for b in bins)
    return sum(b["n"] * abs(b["predicted"] - b["frequency"]) for b in bins) / n if n else None


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples is right) from n samples (Chen et al. 2021, arXiv:2107.03374, eq. 1).

    >>> pass_at_k(8, 3, 1)
    0.375
    """
    if not (0 <= correct <= n and 1 <= k <= n):
        raise ValueError(f"need 0 <= correct <= n and 1 <= k <= n, got n={n}, correct={correct}, k={k}")
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def best_of_n(rewards: Numbers, n: int) -> float:
    """Unbiased estimate of E[max of n samples] from N >= n samples: sum of r_(i) C(i-1, n-1)/C(N, n) over sorted rewards.

    >>> best_of_n([0.0, 1.0, 2.0], 3)
    2.0
    """
    x = np.sort(_array(rewards))
    if not 1 <= n <= len(x):
        raise ValueError(f"need 1 <= n <= {len(x)} samples, got {n}")
    return float(sum(r * (math.comb(i, n - 1) / math.comb(len(x), n)) for i, r in enumerate(x)))


def _array(values: Numbers, least: int = 1) -> np.ndarray:
    x = np.asarray(values, dtype=float)
    if x.ndim != 1 or len(x) < least:
        raise ValueError(f"need a list of at least {least} numbers, got shape {x.shape}")
    if not np.isfinite(x).all():
        raise ValueError(f"value {int(np.flatnonzero(~np.isfinite(x))[0])} is not finite; leave it out and count it")
    return x


def _per_prompt(x: np.ndarray, prompts: Sequence[Hashable] | None) -> np.ndarray:
    if prompts is None:
        return x
    if len(prompts) != len(x):
        raise ValueError(f"every value has a prompt, got {len(x)} values and {len(prompts)} prompts")
    place: dict[Hashable, int] = {}
    index = np.array([place.setdefault(p, len(place)) for p in prompts])
    return np.bincount(index, weights=x) / np.bincount(index)
