"""Sums and means over the tokens that count, each divided by a stated total.

Two rules hold here and everywhere above:

1. **Select, then compute.** Multiplying by a mask does not remove NaN or inf (`0 * inf = nan`), so masked places are replaced
   (`torch.where`) before anything is computed from them. Whatever stands there, value and gradient are bit-equal.
2. **Divide by the total of the whole optimiser step.** A micro-batch that divides by its own token count changes the gradient:
   (a/n1 + b/n2)/2 is not (a + b)/(n1 + n2). State `total_tokens` / `total_rows` and the micro-batches add up to the step.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

StdKind = Literal["sample", "population"]

# Each mode with what it does to the signal; the first is the default of SFT and RL.
MODES: dict[str, str] = {
    "token-mean": "every token of the step counts the same: long rows dominate",
    "seq-mean-token-mean": "every row counts the same: a token of a long row counts less (the original GRPO)",
    "seq-mean-token-sum": "the true sequence policy gradient: variance and step size grow with length",
    "seq-mean-token-sum-norm": "as the previous, divided by a fixed length instead of nothing (Dr. GRPO)",
}

# A spread below this share of the largest value is rounding noise; dividing by its standard deviation would make it a signal.
EQUAL_TOLERANCE = 1e-6


def full_precision(x: Tensor) -> Tensor:
    """At least float32: losses, ratios and statistics are never computed in half precision."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def select(x: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """`x` where the mask is on, `fill` elsewhere; the gradient at masked places is exactly 0, whatever stood there."""
    return torch.where(mask.bool(), full_precision(x), fill)


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum over active places: of everything, or along `dim`."""
    kept = select(x, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None, *, total: float | None = None) -> Tensor:
    """Mean over active places; `total` states the divisor when this is one part of a step. No active place gives 0.

    >>> masked_mean(torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([1, 1, 0])).item()
    2.0
    """
    if total is not None:
        return masked_sum(x, mask, dim) / _positive("total", total)
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return masked_sum(x, mask, dim) / count.clamp(min=1)


def masked_std(x: Tensor, mask: Tensor, *, std_kind: StdKind = "sample") -> Tensor:
    """Standard deviation over active places, as a number: `sample` divides by n - 1, `population` by n."""
    count = int(mask.bool().sum())
    if count < 2:
        raise ValueError(f"a spread needs at least 2 active values, got {count}")
    centred = x - masked_mean(x, mask)
    return (masked_sum(centred**2, mask) / (count - 1 if std_kind == "sample" else count)).sqrt()


def masked_whiten(x: Tensor, mask: Tensor, *, std_kind: StdKind = "sample", eps: float = 1e-8, shift_mean: bool = True) -> Tensor:
    """`(x - mean) / sqrt(var + eps)` over the active places of the whole step; 0 at masked places.

    `shift_mean=False` divides only (used for rewards: a shifted mean would pay for length). Values that are all equal up to
    rounding give exact zeros. Fewer than 2 active places raise: there is no spread to divide by.
    """
    kept = select(x, mask)
    std = masked_std(kept, mask, std_kind=std_kind)
    scale = (std**2 + eps).rsqrt()
    if not shift_mean:
        return kept * scale
    if all_equal(kept[mask.bool()]):
        return torch.zeros_like(kept)
    return select((kept - masked_mean(kept, mask)) * scale, mask)


def all_equal(values: Tensor) -> bool:
    """Whether the values agree up to rounding: max - min <= 1e-6 * max(1, max|value|)."""
    if values.numel() == 0:
        return True
    return bool(values.max() - values.min() <= EQUAL_TOLERANCE * max(1.0, float(values.abs().max())))


def reduce(
    x: Tensor,
    mask: Tensor,
    mode: str = "token-mean",
    *,
    total_tokens: float | None = None,
    total_rows: float | None = None,
    norm_constant: float | None = None,
) -> Tensor:
    """Per-token values (B, T) to one number, in one of the four `MODES`.

    `total_tokens` is the number of active tokens of the whole optimiser step. `total_rows` is its number of rows: those with an
    active token for `seq-mean-token-mean` and `seq-mean-token-sum`, all of them for `seq-mean-token-sum-norm`. Left out, they are
    counted here, which is right only when this batch is the whole step. A step without any active token gives exactly 0.

    >>> x, mask = torch.tensor([[1.0, 3.0], [5.0, 9.0]]), torch.tensor([[1, 1], [1, 0]])
    >>> [reduce(x, mask, m, norm_constant=2).item() for m in MODES]
    [3.0, 3.5, 4.5, 2.25]
    """
    active = mask.bool()
    return reduce_rows(
        masked_sum(x, active, -1),
        active.sum(-1),
        mode,
        total_tokens=total_tokens,
        total_rows=total_rows,
        norm_constant=norm_constant,
    )


def reduce_rows(
    sums: Tensor,
    counts: Tensor,
    mode: str = "token-mean",
    *,
    total_tokens: float | None = None,
    total_rows: float | None = None,
    norm_constant: float | None = None,
) -> Tensor:
    """`reduce` for rows that are summed already: `sums` (B,) over active tokens, `counts` (B,) active tokens (packed streams)."""
    if mode not in MODES:
        raise ValueError(f"unknown aggregation {mode!r}; choose one of {', '.join(MODES)}")
    sums = full_precision(sums)
    if mode == "token-mean":
        total = counts.sum().clamp(min=1) if total_tokens is None else _positive("total_tokens", total_tokens)
        return sums.sum() / total
    if mode == "seq-mean-token-sum-norm":
        if norm_constant is None:
            raise ValueError("seq-mean-token-sum-norm needs norm_constant: the fixed length to divide by, not the padded width")
        rows = max(sums.numel(), 1) if total_rows is None else _positive("total_rows", total_rows)
        return sums.sum() / (rows * _positive("norm_constant", norm_constant))
    filled = (counts > 0).sum().clamp(min=1) if total_rows is None else _positive("total_rows", total_rows)
    per_row = sums / counts.clamp(min=1) if mode == "seq-mean-token-mean" else sums
    return per_row.sum() / filled


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} must be above 0, got {value}; a step without active tokens is skipped before this")
    return value
