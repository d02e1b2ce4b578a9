"""Pairwise preference losses: DPO and its family, with and without a reference.

Every variant is one row of `PREFERENCE_LOSSES`, three independent choices:

    score   what one answer is worth before beta       log-ratio or log-probability, summed or per token
    curve   what the gap of the two scores costs       logistic, robust, hinge, square, ...
    nll     whether the chosen answer's likelihood is added    not, per answer, or per token of the step

Formulas and papers stand in `losses/sheet.py`. Ours: every mean divides by the totals of the whole optimiser step.
Only completion tokens count; a setting that the loss has no place for is an error, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tether.losses.sheet import LOSS_ALIASES as LOSS_ALIASES
from tether.losses.sheet import NEEDS_REFERENCE as NEEDS_REFERENCE
from tether.losses.sheet import SHEET, resolve_loss, unused_settings, users_of
from tether.masked import full_precision

LARGEST_AVERAGE = -1e-6  # ORPO: an average log-prob of 0 has infinite odds


@dataclass(frozen=True)
class PairLogps:
    """Log-probabilities of B pairs, summed over the trained tokens of each answer; all fields (B,)."""

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor | None
    ref_rejected: Tensor | None
    n_chosen: Tensor
    n_rejected: Tensor

    def __post_init__(self) -> None:
        shapes = {f.name: tuple(x.shape) for f in fields(self) if (x := getattr(self, f.name)) is not None}
        if len(set(shapes.values())) != 1 or self.chosen.dim() != 1:
            raise ValueError(f"all fields of a PairLogps are (B,), got {shapes}")
        if (self.ref_chosen is None) != (self.ref_rejected is None):
            raise ValueError("give both reference scores or neither")
        for side, counts in (("chosen", self.n_chosen), ("rejected", self.n_rejected)):
            if bool((counts < 1).any()):
                raise ValueError(f"pair {int((counts < 1).nonzero()[0])} has no trained token in its {side} answer; drop it before")
        # One dtype throughout: a division by a count in a narrower one would cost digits.
        dtype = full_precision(self.chosen).dtype
        for f in fields(self):
            if (x := getattr(self, f.name)) is not None:
                object.__setattr__(self, f.name, x.to(dtype))


@dataclass(frozen=True)
class Settings:
    """The numbers of the formulas, as the sheet names them."""

    beta: float
    label_smoothing: float
    gamma: float
    delta: float
    nll_coef: float
    lambda_dpop: float
    lambda_or: float


# --- scores: (chosen, rejected), each (B,) -----------------------------------------------------------------------------

Scores = tuple[Tensor, Tensor]


def log_ratio(p: PairLogps) -> Scores:
    assert p.ref_chosen is not None
    assert p.ref_rejected is not None
    return p.chosen - p.ref_chosen, p.rejected - p.ref_rejected


def log_ratio_per_token(p: PairLogps) -> Scores:
    chosen, rejected = log_ratio(p)
    return chosen / p.n_chosen, rejected / p.n_rejected


def logp(p: PairLogps) -> Scores:
    return p.chosen, p.rejected


def logp_per_token(p: PairLogps) -> Scores:
    return p.chosen / p.n_chosen, p.rejected / p.n_rejected


# --- curves: cost (B,) of the scores -----------------------------------------------------------------------------------


def smoothed(z: Tensor, e: float) -> Tensor:
    """-(1-e) log s(z) - e log s(-z): the label is believed with probability 1-e. e = 0 is the plain logistic loss."""
    return -F.logsigmoid(z) if e == 0 else -(1 - e) * F.logsigmoid(z) - e * F.logsigmoid(-z)


def logistic(w: Tensor, l: Tensor, s: Settings, p: PairLogps) -> Tensor:
    return smoothed(s.beta * (w - l), s.label_smoothing)


def logistic_beyond_gamma(w: Tensor, l: Tensor, s: Settings, p: PairLogps) -> Tensor:
    return smoothed(s.beta * (w - l) - s.gamma, s.label_smoothing)  # gamma is not multiplied by beta


def robust(w: Tensor, l: Tensor, s: Settings, p: PairLogps) -> Tensor:
    e, z = s.label_smoothing, s.beta * (w - l)
    return (-(1 - e) * F.logsigmoid(z) + e * F.logsigmoid(-z)) / (1 - 2 * e)


def hinge(w: Tensor, l: Tensor, s: Settings, p: PairLogps) -> Tensor:
    return F.relu(1 - s.beta * (w - l))


def hinge_at_delta(w: Tensor, l: Tensor, s: Settings, p: PairLogps) -> Tensor:
    return F.relu(s.delta - (w - l))


def square(w: Tensor, l: Tensor, s: Settings, p: PairLogps) -> Tensor:
    return (w - l - 1 / (2 * s.beta)) ** 2


def logistic_with_penalty(w: Tensor, l: Tensor, s: Settings, p: PairLogps) -> Tensor:
    # The penalty stands inside the sigmoid; adding it to the loss would be another method.
    return smoothed(s.beta * (w - l - s.lambda_dpop * F.relu(-w)), s.label_smoothing)


def log1mexp(a: Tensor) -> Tensor:
    """log(1 - e^a) for a < 0 without cancellation at either end (Maechler 2012)."""
    return torch.where(a > -math.log(2), torch.log(-torch.expm1(a)), torch.log1p(-torch.exp(a)))


def log_odds_gap(w: Tensor, l: Tensor) -> Tensor:
    """log odds of exp(w) minus log odds of exp(l), both averages clamped below 0."""
    w, l = w.clamp(max=LARGEST_AVERAGE), l.clamp(max=LARGEST_AVERAGE)
    return (w - l) - (log1mexp(w) - log1mexp(l))


def odds_ratio(w: Tensor, l: Tensor, s: Settings, p: PairLogps) -> Tensor:
    return -s.lambda_or * F.logsigmoid(log_odds_gap(w, l))


# --- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PreferenceLoss:
    """One variant. `unit` names the setting that turns a score into the reported reward (None: the score itself)."""

    score: Callable[[PairLogps], Scores]
    curve: Callable[[Tensor, Tensor, Settings, PairLogps], Tensor]
    nll: Literal["none", "answer", "token"] = "none"
    unit: Literal["beta", "lambda_or"] | None = "beta"


PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {
    "dpo": PreferenceLoss(log_ratio, logistic),
    "dpo_reference_free": PreferenceLoss(logp, logistic),
    "cdpo": PreferenceLoss(log_ratio, logistic),  # dpo with label_smoothing is the same loss
    "robust_dpo": PreferenceLoss(log_ratio, robust),
    "hinge": PreferenceLoss(log_ratio, hinge),
    "slic": PreferenceLoss(logp, hinge_at_delta, nll="answer", unit=None),
    "ipo_sum": PreferenceLoss(log_ratio, square),
    "ipo_avg": PreferenceLoss(log_ratio_per_token, square),
    "dpo_norm": PreferenceLoss(log_ratio_per_token, logistic),
    "dpop": PreferenceLoss(log_ratio, logistic_with_penalty),
    "dpo_nll_seq": PreferenceLoss(log_ratio, logistic, nll="answer"),
    "dpo_nll_token": PreferenceLoss(log_ratio, logistic, nll="token"),
    "simpo": PreferenceLoss(logp_per_token, logistic_beyond_gamma),
    "cpo": PreferenceLoss(logp, logistic, nll="token"),
    "orpo": PreferenceLoss(logp_per_token, odds_ratio, nll="token", unit="lambda_or"),
}


def preference_loss(
    pairs: PairLogps,
    loss_type: str,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    gamma: float = 0.0,
    delta: float = 1.0,
    nll_coef: float = 0.0,
    lambda_dpop: float = 0.0,
    lambda_or: float = 0.0,
    total_pairs: float | None = None,
    total_chosen_tokens: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of the step's loss, and its metrics, each (B,) and without gradient.

    `total_pairs` and `total_chosen_tokens` count the whole optimiser step; left out, these B pairs are the step.
    Metrics: `loss/per_pair` (its mean over the step is the loss), `rewards/*` in the variant's own implicit reward,
    `logps/*`, `displacement/*` = policy minus reference where there is one, `nll_loss` where the loss has a likelihood term,
    for orpo `log_odds_ratio` (log s), `log_odds_chosen` (the gap) and `clamped` (averages raised to a finite odds, 0 to 2).

    >>> one = PairLogps(*(torch.tensor([x]) for x in (-10.0, -12.0, -11.0, -11.0, 4.0, 5.0)))
    >>> loss, metrics = preference_loss(one, "dpo", beta=0.1)
    >>> round(loss.item(), 6), round(metrics["rewards/margins"].item(), 6)
    (0.598139, 0.2)
    """
    name = resolve_loss(loss_type)
    row = PREFERENCE_LOSSES[name]
    s = Settings(beta, label_smoothing, gamma, delta, nll_coef, lambda_dpop, lambda_or)
    _check(name, s, pairs)
    step_pairs = len(pairs.chosen) if total_pairs is None else total_pairs

    chosen, rejected = row.score(pairs)
    cost = row.curve(chosen, rejected, s, pairs)
    metrics: dict[str, Tensor] = {}
    if row.nll != "none":
        nll = _nll(row, pairs, step_pairs, total_pairs, total_chosen_tokens)
        cost = cost + (1.0 if name == "orpo" else s.nll_coef) * nll
        metrics["nll_loss"] = nll
    loss = cost.sum() / max(step_pairs, 1)

    unit = 1.0 if row.unit is None else getattr(s, row.unit)
    metrics |= {
        "loss/per_pair": cost,
        "rewards/chosen": unit * chosen,
        "rewards/rejected": unit * rejected,
        "rewards/margins": unit * (chosen - rejected),
        "rewards/accuracies": (chosen > rejected).to(chosen.dtype),  # strict: a tie counts as wrong
        "logps/chosen": pairs.chosen,
        "logps/rejected": pairs.rejected,
    }
    if pairs.ref_chosen is not None and pairs.ref_rejected is not None:
        moved = pairs.chosen - pairs.ref_chosen
        metrics |= {
            "displacement/chosen": moved,
            "displacement/rejected": pairs.rejected - pairs.ref_rejected,
            "displacement/frac_chosen_down": (moved < 0).to(moved.dtype),
        }
    if name == "orpo":
        gap = log_odds_gap(chosen, rejected)
        metrics |= {"log_odds_ratio": F.logsigmoid(gap), "log_odds_chosen": gap}
        metrics["clamped"] = sum((a > LARGEST_AVERAGE).to(a.dtype) for a in (chosen, rejected))  # type: ignore[assignment]
    return loss, {key: value.detach() for key, value in metrics.items()}


def _nll(row: PreferenceLoss, p: PairLogps, step_pairs: float, total_pairs: float | None, total_chosen_tokens: float | None) -> Tensor:
    """Negative log-likelihood of the chosen answer, scaled so that its mean over the step's pairs is the term of the loss."""
    if row.nll == "answer":
        return -p.chosen / p.n_chosen
    if (total_pairs is None) != (total_chosen_tokens is None):
        raise ValueError("this loss averages over the step's chosen tokens: give total_pairs and total_chosen_tokens, or neither")
    tokens = p.n_chosen.sum() if total_chosen_tokens is None else total_chosen_tokens
    return -p.chosen * (step_pairs / tokens)


def _check(name: str, s: Settings, p: PairLogps) -> None:
    """Settings that mean nothing, or would be ignored, are errors."""
    unused = unused_settings(name, vars(s))
    if unused:
        setting = unused[0]
        raise ValueError(f"{name} has no place for {setting}={getattr(s, setting):g}; it is used by {', '.join(users_of(setting))}")
    if "beta" in SHEET[name].uses and not s.beta > 0:
        raise ValueError(f"beta must be above 0, got {s.beta}")
    if not 0 <= s.label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must lie in [0, 0.5), got {s.label_smoothing}: at 0.5 the labels say nothing")
    if name in NEEDS_REFERENCE and p.ref_chosen is None:
        raise ValueError(f"{name} compares with a reference: ref_chosen and ref_rejected are needed")
