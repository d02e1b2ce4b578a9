"""The chapter's three listings, operation by operation: this file exists to reproduce print, and nothing trains with it.

The listings are C programs in float32. Each number here is a numpy float32, every operation rounds once, in the order of the source, and exp
and log are those of float64 rounded once, as the C library's are. Constants are wrapped, because a Python float would widen the arithmetic.
What the listings do otherwise than the objectives they state is said by the experiments that show them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tether.lab.glibc_rand import GlibcRand

F = np.float32
Row = Sequence[float]
ZERO, ONE, TINY = F(0), F(1), F(1e-8)

# Listing 161: helpfulness, accuracy, conciseness and safety of the chosen and of the rejected answer.
FEATURES = ("helpfulness", "accuracy", "conciseness", "safety")
PAIRS: tuple[tuple[Row, Row], ...] = (
    ((0.9, 0.8, 0.7, 1.0), (0.3, 0.2, 0.5, 0.8)),
    ((0.7, 0.9, 0.6, 1.0), (0.8, 0.1, 0.9, 0.3)),
    ((0.8, 0.7, 0.8, 0.9), (0.2, 0.6, 0.3, 1.0)),
    ((0.6, 0.8, 0.5, 1.0), (0.9, 0.7, 0.8, 0.1)),
    ((0.8, 0.9, 0.7, 0.9), (0.4, 0.3, 0.6, 0.7)),
)
# Listings 162 and 163: the rewards of four actions; where the policy of listing 162 starts (that of 163 starts uniform).
REWARDS = (2.0, 5.0, 1.0, 3.0)
PPO_START = (0.5, 0.3, -0.2, 0.1)


def exp(x: np.float32) -> np.float32:
    with np.errstate(over="ignore"):  # infinite, as in C
        return F(np.exp(np.float64(x)))


def log(x: np.float32) -> np.float32:
    return F(np.log(np.float64(x)))


def softmax(logits: Sequence[np.float32]) -> list[np.float32]:
    largest = max(logits)
    powers = [exp(x - largest) for x in logits]
    total = ZERO
    for power in powers:
        total = total + power
    return [power / total for power in powers]


# Listing 161: a reward model ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RewardEpoch:
    """`loss` is the mean over the pairs, each before the update it caused; the rest is after the epoch."""

    loss: np.float32
    correct: int
    weights: tuple[np.float32, ...]  # of FEATURES
    bias: np.float32


def reward_model(pairs: Sequence[tuple[Row, Row]] = PAIRS, *, epochs: int = 200, bias: float = 0.0) -> list[RewardEpoch]:
    """One pair at a time at rate 0.1. The bias has no update; it may start elsewhere than at 0."""
    rows = [([F(x) for x in chosen], [F(x) for x in rejected]) for chosen, rejected in pairs]
    rate, start = F(0.1), F(bias)
    weights = [ZERO] * len(rows[0][0])
    history = []
    for _ in range(epochs):
        total = ZERO
        for chosen, rejected in rows:
            p = sigmoid(score(weights, start, chosen) - score(weights, start, rejected))
            total = total + pair_loss(p)
            slope = p - ONE
            weights = [w - rate * slope * (c - r) for w, c, r in zip(weights, chosen, rejected, strict=True)]
        correct = sum(bool(score(weights, start, c) > score(weights, start, r)) for c, r in rows)
        history.append(RewardEpoch(total / F(len(rows)), correct, tuple(weights), start))
    return history


def score(weights: Sequence[np.float32], bias: np.float32, features: Sequence[np.float32]) -> np.float32:
    total = bias
    for w, f in zip(weights, features, strict=True):
        total = total + w * f
    return total


def sigmoid(z: np.float32) -> np.float32:
    return ONE / (ONE + exp(-z))


def pair_loss(p: np.float32) -> np.float32:
    """-log p, bounded: 1e-8 is added before the logarithm."""
    return -log(p + TINY)


# Listing 162: PPO ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PpoStep:
    """One outer step: the policy after it, and its checks of the ratio, one for each action at each inner step."""

    probs: tuple[np.float32, ...]
    smallest_ratio: np.float32
    largest_ratio: np.float32
    below: int  # checks below 0.8
    above: int  # above 1.2
    binding: int  # checks at which the minimum takes the clipped value


@dataclass(frozen=True)
class PpoRun:
    steps: list[PpoStep]
    logits: tuple[np.float32, ...]


def ppo(*, inner: int = 4, outer: int = 10) -> PpoRun:
    """Each action once at each inner step, with the value of its surrogate as the push on its own logit."""
    rewards, logits = [F(r) for r in REWARDS], [F(z) for z in PPO_START]
    low, high, rate = ONE - F(0.2), ONE + F(0.2), F(0.1)
    steps = []
    for _ in range(outer):
        old = softmax(logits)
        baseline = ZERO
        for p, r in zip(old, rewards, strict=True):
            baseline = baseline + p * r
        ratios, binding = [], 0
        for _ in range(inner):
            new = softmax(logits)
            for i, reward in enumerate(rewards):
                ratio = new[i] / (old[i] + TINY)
                advantage = reward - baseline
                clipped = min(max(ratio, low), high) * advantage
                surrogate = min(ratio * advantage, clipped)
                ratios.append(ratio)
                binding += bool(clipped < ratio * advantage)
                logits[i] = logits[i] + rate * surrogate * (ONE - new[i])
        below, above = sum(bool(r < low) for r in ratios), sum(bool(r > high) for r in ratios)
        steps.append(PpoStep(tuple(softmax(logits)), min(ratios), max(ratios), below, above, binding))
    return PpoRun(steps, tuple(logits))


# Listing 163: GRPO --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GrpoStep:
    """One step: the policy that its group was drawn from, what that policy earns on average, and what the group earned."""

    probs: tuple[np.float32, ...]
    expected: np.float32
    group: np.float32


@dataclass(frozen=True)
class GrpoRun:
    steps: list[GrpoStep]
    logits: tuple[np.float32, ...]


def grpo(*, group_size: int = 6, steps: int = 20, beta: float = 0.1, divide: bool = True) -> GrpoRun:
    """Draws from srand(42). `divide` by the group's deviation, or do not (the chapter's exercise 6)."""
    rand = GlibcRand(42)
    low, high, rate, weight = ONE - F(0.2), ONE + F(0.2), F(0.3), F(beta)
    logits = [ZERO] * len(REWARDS)
    ref = softmax(logits)
    history = []
    for _ in range(steps):
        probs = softmax(logits)
        actions, rewards = [], []
        for _ in range(group_size):
            actions.append(draw(rand, probs))
            rewards.append(noisy_reward(rand, actions[-1]))
        mean, deviation = _mean_and_deviation(rewards)
        for action, reward in zip(actions, rewards, strict=True):
            advantage = (reward - mean) / deviation if divide else reward - mean
            ratio = probs[action] / (ref[action] + TINY)
            objective = min(ratio * advantage, min(max(ratio, low), high) * advantage)
            logits[action] = logits[action] + rate * (objective - weight * penalty(probs[action], ref[action])) / F(group_size)
        expected = ZERO
        for p, r in zip(probs, REWARDS, strict=True):
            expected = expected + p * F(r)
        history.append(GrpoStep(tuple(probs), expected, mean))
    return GrpoRun(history, tuple(logits))


def draw(rand: GlibcRand, probs: Sequence[Any]) -> int:
    """The action at which the running sum of `probs` passes a uniform number; the last one if none does."""
    u, passed = rand.uniform(), probs[0] * 0
    for i, p in enumerate(probs):
        passed = passed + p
        if u < passed:
            return i
    return len(probs) - 1


def noisy_reward(rand: GlibcRand, action: int) -> np.float32:
    return F(REWARDS[action]) + (rand.uniform() - F(0.5))


def penalty(p: np.float32, ref: np.float32) -> np.float32:
    """ref/p - log(ref/p) - 1, never negative."""
    quotient = ref / (p + TINY)
    return quotient - log(quotient) - ONE


def _mean_and_deviation(rewards: Sequence[np.float32]) -> tuple[np.float32, np.float32]:
    """The population's deviation, with 1e-8 inside the root."""
    size, mean, squares = F(len(rewards)), ZERO, ZERO
    for reward in rewards:
        mean = mean + reward
    mean = mean / size
    for reward in rewards:
        squares = squares + (reward - mean) * (reward - mean)
    return mean, np.sqrt(squares / size + TINY)
