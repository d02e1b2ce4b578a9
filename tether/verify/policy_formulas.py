"""Advantages and losses of methods that sample, as the papers print them: scalar arithmetic in Python's floats.

As `formulas`: nothing is shared with `tether.losses` or `tether.advantage`. A `Try` is one attempt; what is said of its tokens is
a list with one entry for each.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tether.recipe import GRPORecipe, PPORecipe

SCALED_BY = {"sample": 1, "population": 0}
SMALL = 1e-6  # beside a spread that something is divided by


@dataclass(frozen=True)
class Try:
    """One attempt, its tokens in the loss (none where it takes no part)."""

    group: int
    total: float | None  # None: could not be scored
    parts: tuple[float | None, ...] = ()
    finished: bool = True
    old: list[float] = field(default_factory=list)
    ref: list[float] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)
    old_values: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.old)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def spread(values: Sequence[float], kind: str) -> float:
    middle = mean(values)
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (len(values) - SCALED_BY[kind]))


def alike(values: Sequence[float]) -> bool:
    return not values or max(values) - min(values) <= 1e-6 * max(1.0, max(abs(v) for v in values))


def _by_group(tries: Sequence[Try], values: Sequence[float | None]) -> dict[int, list[float]]:
    out: dict[int, list[float]] = defaultdict(list)
    for t, value in zip(tries, values, strict=True):
        if value is not None:
            out[t.group].append(value)
    return out


def _normalised(tries: Sequence[Try], values: Sequence[float | None], kind: str) -> list[float]:
    """(R - mean of the group)/(spread of the group); 0 where the group agrees."""
    groups = _by_group(tries, values)
    out = []
    for t, value in zip(tries, values, strict=True):
        members = groups[t.group]
        if value is None or alike(members):
            out.append(0.0)
        else:
            out.append((value - mean(members)) / (spread(members, kind) + SMALL))
    return out


def advantages(recipe: GRPORecipe, tries: Sequence[Try], weights: Sequence[float]) -> list[list[float]]:
    """Per token. `weights`: of the parts of the reward, for reward_mixture normalize_then_sum."""
    tied = recipe.kl_in == "reward" and recipe.beta > 0
    if recipe.advantage == "reinforce_pp":
        return _reinforce_pp(recipe, tries, tied)
    rewards: list[float | None] = []
    for t in tries:
        cost = recipe.beta * sum(a - b for a, b in zip(t.old, t.ref, strict=True)) if tied else 0.0
        rewards.append(None if t.total is None else t.total - cost)
    known = [r for r in rewards if r is not None]
    groups = _by_group(tries, rewards)
    kind = recipe.std
    if recipe.reward_mixture == "normalize_then_sum":
        columns = [_normalised(tries, [t.parts[k] for t in tries], kind) for k in range(len(weights))]
        sums = [sum(w * column[i] for w, column in zip(weights, columns, strict=True)) for i in range(len(tries))]
        scored = [s for s, t in zip(sums, tries, strict=True) if any(p is not None for p in t.parts)]
        per_row = [(s - mean(scored)) / (spread(scored, kind) + SMALL) if any(p is not None for p in t.parts) else 0.0
                   for s, t in zip(sums, tries, strict=True)]  # fmt: skip
    else:
        centred = [None if r is None else r - mean(groups[t.group]) for r, t in zip(rewards, tries, strict=True)]
        whole = [x for x in centred if x is not None]

        def compared(t: Try, r: float, own: float) -> float:
            members = groups[t.group]
            if recipe.advantage == "batch_mean":
                return r - mean(known)
            if recipe.advantage == "group_mean":
                return own
            if recipe.advantage == "rloo":
                others = len(members) - 1
                return r - (sum(members) - r) / others if others else 0.0
            if alike(members):
                return 0.0
            if recipe.advantage == "group_norm":
                return own / (spread(members, kind) + SMALL)
            if recipe.advantage == "batch_std":
                return own / (spread(known, kind) + SMALL)
            return (own - mean(whole)) / (spread(whole, kind) + SMALL)  # reinforce_pp_baseline

        per_row = [0.0 if r is None or c is None else compared(t, r, c) for t, r, c in zip(tries, rewards, centred, strict=True)]
    return [[a] * t.tokens for a, t in zip(per_row, tries, strict=True)]


def _reinforce_pp(recipe: GRPORecipe, tries: Sequence[Try], tied: bool) -> list[list[float]]:
    """Reward to go of (k1 at every token, the score at the last), whitened over all tokens of the step."""
    to_go = []
    for t in tries:
        costs = [recipe.beta * (a - b) if tied else 0.0 for a, b in zip(t.old, t.ref, strict=True)]
        to_go.append([(t.total or 0.0) - sum(costs[i:]) for i in range(t.tokens)])
    return _whitened(to_go, recipe.std)


def _whitened(rows: Sequence[Sequence[float]], kind: str) -> list[list[float]]:
    flat = [x for row in rows for x in row]
    if len(flat) < 2 or alike(flat):
        return [[0.0 for _ in row] for row in rows]
    middle, scale = mean(flat), math.sqrt(spread(flat, kind) ** 2 + 1e-8)
    return [[(x - middle) / scale for x in row] for row in rows]


# -- the loss ----------------------------------------------------------------------------------------------------------

KL: dict[str, Callable[[float], float]] = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}


def mismatch(recipe: GRPORecipe | PPORecipe, t: Try) -> list[float]:
    """Weights of an attempt's tokens where another distribution sampled than trains."""
    low, high = recipe.importance_min, recipe.importance_max
    logs = [a - b for a, b in zip(t.old, t.sampled, strict=True)]
    ratios = [math.exp(x) for x in logs]
    if recipe.importance == "none" or not logs:
        return [1.0] * t.tokens
    if recipe.importance == "token_truncate":
        return [min(max(w, low), high) for w in ratios]
    if recipe.importance == "token_mask":
        return [w if low <= w <= high else 0.0 for w in ratios]
    whole = math.exp(sum(logs))
    if recipe.importance == "sequence_truncate":
        return [min(max(whole, low), high)] * t.tokens
    if recipe.importance == "sequence_mask":
        return [whole if low <= whole <= high else 0.0] * t.tokens
    typical = math.exp(mean(logs))
    return [w if low <= typical <= high else 0.0 for w in ratios]


def clipped(ratio: float, a: float, low: float, high: float, dual: float | None) -> float:
    """Schulman et al. 2017, eq. 7; with dual clip Ye et al. 2020: a bad answer costs at most c A."""
    bounded = min(max(ratio, 1 - low), 1 + high)
    objective = min(ratio * a, bounded * a)
    return max(objective, dual * a) if dual is not None and a < 0 else objective


def policy(
    recipe: GRPORecipe | PPORecipe,
    tries: Sequence[Try],
    logps: Sequence[Sequence[float]],
    per_token: Sequence[Sequence[float]],
    held: Sequence[Sequence[float]] | None = None,
) -> float:
    """The loss of the step at log-probs `logps` with advantages `per_token`.

    `held`: log-probs at which constants of the gradient (the weights of cispo and of gspo_token) are taken; `logps` by default.
    """
    grpo = recipe if isinstance(recipe, GRPORecipe) else None
    surrogate = grpo.surrogate if grpo else "ppo"
    mode = grpo.aggregation if grpo else "token-mean"
    in_loss = recipe.beta if grpo is not None and grpo.kl_in == "loss" else 0.0
    held = logps if held is None else held
    rows: list[list[float]] = []
    for t, row, a_row, held_row in zip(tries, logps, per_token, held, strict=True):
        if not t.tokens:
            rows.append([])
            continue
        gaps = [x - o for x, o in zip(row, t.old, strict=True)]
        held_gaps = [x - o for x, o in zip(held_row, t.old, strict=True)]
        weights, costs = mismatch(recipe, t), []
        for i, (x, a) in enumerate(zip(row, a_row, strict=True)):
            ratio = math.exp(gaps[i])
            if surrogate == "reinforce":
                objective = a * x
            elif surrogate == "cispo":
                objective = min(math.exp(held_gaps[i]), 1 + recipe.eps_high) * a * x
            else:
                rho = {
                    "ppo": ratio,
                    "seq_ratio": math.exp(sum(gaps)),
                    "gspo": math.exp(mean(gaps)),
                    "gspo_token": math.exp(mean(held_gaps) + x - held_row[i]),
                }[surrogate]
                objective = clipped(rho, a, recipe.eps_low, recipe.eps_high, recipe.dual_clip)
            cost = -weights[i] * objective
            if grpo is not None and in_loss:
                cost += in_loss * KL[grpo.kl_kind](x - t.ref[i]) * (ratio if grpo.kl_unbiased else 1.0)
            costs.append(cost)
        rows.append(costs)
    filled = [row for row in rows if row]
    if mode == "token-mean":
        return sum(map(sum, filled)) / sum(map(len, filled))
    if mode == "seq-mean-token-mean":
        return mean([mean(row) for row in filled])
    if mode == "seq-mean-token-sum":
        return mean([sum(row) for row in filled])
    return sum(map(sum, filled)) / (len(rows) * recipe.max_completion_length)


# -- PPO ---------------------------------------------------------------------------------------------------------------


def scores(recipe: PPORecipe, tries: Sequence[Try]) -> list[float]:
    """Of the first step of a run: divided by the spread of all scores, clipped, less the price of a missing end."""
    known = [t.total for t in tries if t.total is not None]
    scale = spread(known, "sample") if recipe.score_scaling == "running" and len(known) > 1 else 1.0
    bound = math.inf if recipe.score_clip is None else recipe.score_clip
    out = []
    for t in tries:
        score = min(max((t.total or 0.0) / scale, -bound), bound)
        out.append(score - (0.0 if t.finished else recipe.missing_end_penalty) if t.tokens else 0.0)
    return out


def gae(recipe: PPORecipe, tries: Sequence[Try]) -> tuple[list[list[float]], list[list[float]]]:
    """Advantages and returns (Schulman et al. 2015, eq. 16, as the sum it is): A_t = sum over l of (gamma lam)^l delta_{t+l}."""
    rewards = []
    for t, score in zip(tries, scores(recipe, tries), strict=True):
        row = [-recipe.beta * (a - b) for a, b in zip(t.old, t.ref, strict=True)]
        if row:
            row[-1] += score
        rewards.append(row)
    if recipe.whiten_rewards:
        flat = [x for row in rewards for x in row]
        scale = math.sqrt(spread(flat, recipe.std) ** 2 + 1e-8)
        rewards = [[x / scale for x in row] for row in rewards]
    raw, returns = [], []
    for t, row in zip(tries, rewards, strict=True):
        values = [*t.old_values, 0.0]
        deltas = [r + recipe.gamma * values[i + 1] - values[i] for i, r in enumerate(row)]
        own = [sum((recipe.gamma * recipe.lam) ** (j - i) * deltas[j] for j in range(i, len(row))) for i in range(len(row))]
        raw.append(own)
        returns.append([a + v for a, v in zip(own, t.old_values, strict=True)])
    return (_whitened(raw, recipe.std) if recipe.whiten_advantages else raw), returns


def value(recipe: PPORecipe, tries: Sequence[Try], values: Sequence[Sequence[float]], returns: Sequence[Sequence[float]]) -> float:
    """0.5 mean of max((V - ret)^2, (clip(V, V_old - c, V_old + c) - ret)^2) over all tokens."""
    costs = []
    for t, row, wanted in zip(tries, values, returns, strict=True):
        for v, old, target in zip(row, t.old_values, wanted, strict=True):
            bound = math.inf if recipe.value_clip is None else recipe.value_clip
            held = min(max(v, old - bound), old + bound)
            costs.append(max((v - target) ** 2, (held - target) ** 2))
    return 0.5 * mean(costs)
