"""The losses once more, as the papers print them: scalar arithmetic in Python's floats, one row after another.

Nothing here is shared with `tether.losses`: no tensor, no helper, no table. What both say by different roads is right. Letters as in
docs/losses.md: c, r = log-probs of the chosen and the rejected answer, c0, r0 under the reference, n_c, n_r trained tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > -30 else x


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def slopes(loss: Callable[[list[float]], float], at: Sequence[float], step: float = 1e-5) -> list[float]:
    """Derivatives of a scalar function by central differences; its kinks must be further away than `step`."""
    out = []
    for i in range(len(at)):
        up, down = list(at), list(at)
        up[i] += step
        down[i] -= step
        out.append((loss(up) - loss(down)) / (2 * step))
    return out


def sft(logps: Sequence[float]) -> float:
    """-(1/D) sum of log pi over the D trained tokens of the step."""
    return -sum(logps) / len(logps)


# -- pairs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    c: float
    r: float
    c0: float
    r0: float
    n_c: int
    n_r: int

    @property
    def d(self) -> float:
        return (self.c - self.c0) - (self.r - self.r0)

    @property
    def dn(self) -> float:
        return (self.c - self.c0) / self.n_c - (self.r - self.r0) / self.n_r


def _log_odds(a: float) -> float:
    a = min(a, -1e-6)
    return a - math.log(1 - math.exp(a))


def preference(loss_type: str, pairs: Sequence[Pair], s: Mapping[str, float]) -> float:
    """The mean over the step's pairs. `s`: the settings of the loss."""
    beta, e = s.get("beta", 1.0), s.get("label_smoothing", 0.0)
    per_answer = [-p.c / p.n_c for p in pairs]
    per_token = -sum(p.c for p in pairs) / sum(p.n_c for p in pairs)

    def believed(x: float) -> float:
        return -(1 - e) * log_sigmoid(x) - e * log_sigmoid(-x)

    costs: dict[str, Callable[[Pair, float], float]] = {
        "dpo": lambda p, own: believed(beta * p.d),
        "cdpo": lambda p, own: believed(beta * p.d),
        "dpo_reference_free": lambda p, own: believed(beta * (p.c - p.r)),
        "robust_dpo": lambda p, own: (-(1 - e) * log_sigmoid(beta * p.d) + e * log_sigmoid(-beta * p.d)) / (1 - 2 * e),
        "hinge": lambda p, own: max(0.0, 1 - beta * p.d),
        "slic": lambda p, own: max(0.0, s["delta"] - (p.c - p.r)) + s["nll_coef"] * own,
        "ipo_sum": lambda p, own: (p.d - 1 / (2 * beta)) ** 2,
        "ipo_avg": lambda p, own: (p.dn - 1 / (2 * beta)) ** 2,
        "dpo_norm": lambda p, own: believed(beta * p.dn),
        "dpop": lambda p, own: believed(beta * (p.d - s["lambda_dpop"] * max(0.0, p.c0 - p.c))),
        "dpo_nll_seq": lambda p, own: believed(beta * p.d) + s["nll_coef"] * own,
        "dpo_nll_token": lambda p, own: believed(beta * p.d) + s["nll_coef"] * per_token,
        "simpo": lambda p, own: believed(beta * (p.c / p.n_c - p.r / p.n_r) - s["gamma"]),
        "cpo": lambda p, own: believed(beta * (p.c - p.r)) + s["nll_coef"] * per_token,
        "orpo": lambda p, own: per_token - s["lambda_or"] * log_sigmoid(_log_odds(p.c / p.n_c) - _log_odds(p.r / p.n_r)),
    }
    return sum(costs[loss_type](p, own) for p, own in zip(pairs, per_answer, strict=True)) / len(pairs)


# -- single answers, scores --------------------------------------------------------------------------------------------


def kto(
    policy: Sequence[float], ref: Sequence[float], good: Sequence[bool], z0: float, *, beta: float, desirable: float, undesirable: float
) -> float:
    """Ethayarajh et al. 2024, eq. 8: w_d (1 - s(beta (h - z0))) for good answers, w_u (1 - s(beta (z0 - h))) for bad ones."""
    total = 0.0
    for a, b, is_good in zip(policy, ref, good, strict=True):
        h = a - b
        total += desirable * (1 - sigmoid(beta * (h - z0))) if is_good else undesirable * (1 - sigmoid(beta * (z0 - h)))
    return total / len(policy)


def kto_point(gaps: Sequence[float]) -> float:
    """z0 = max(0, mean of log pi(y'|x) - log ref(y'|x)): the mean first, the clamp after."""
    return max(0.0, sum(gaps) / len(gaps))


@dataclass(frozen=True)
class Duel:
    """One comparison of two answers to a prompt; scores by head."""

    winner: Sequence[float]
    loser: Sequence[float]
    margin: float
    share: float  # 1 / comparisons of its prompt


def reward_model(duels: Sequence[Duel], prompts: int, center: float) -> float:
    """-log s(r_w - r_l - m) + eta (r_w + r_l)^2, a mean over heads, comparisons of a prompt, and prompts."""
    total = 0.0
    for duel in duels:
        per_head = [-log_sigmoid(w - l - duel.margin) + center * (w + l) ** 2 for w, l in zip(duel.winner, duel.loser, strict=True)]
        total += duel.share * sum(per_head) / len(per_head)
    return total / prompts


def linear_reward(weights: Sequence[float], pairs: Sequence[tuple[Sequence[float], Sequence[float], float]], l2: float) -> float:
    """-log s(w.(f_w - f_l) - m), a mean over the pairs, plus l2/2 |w|^2."""
    total = 0.0
    for chosen, rejected, margin in pairs:
        total -= log_sigmoid(sum(w * (a - b) for w, a, b in zip(weights, chosen, rejected, strict=True)) - margin)
    return total / len(pairs) + l2 / 2 * sum(w * w for w in weights)
