"""Where each method comes to rest on the strings of `enumerable`, worked out without the package's losses, advantages or estimators.

All of them move along a field of one form. With d = log pi(a | s) - log ref(a | s) on the token a after the prefix s,

    E_pi [ sum_t w(y) (A(y) - beta g(d_t)) grad log pi(y_t | y_<t) ]

w is 1 or 1/length, A the reward, centred or divided by its spread under pi, and g the slope of the tie: 1 - exp(-d) for k3, d for
k2 and for k3 times the ratio. A tie in the reward puts k1 of the whole string into A and has g = 0.
Where every prefix has free logits the field is 0 exactly when, at each prefix, all tokens have the same

    U(a) - beta v(a) g(d_a),     U(a) = E[w A | s, a],  v(a) = E[w | s, a]

U and v look ahead only, so the prefixes are solved from the longest to the empty one. Mean and spread of the reward under the
solution enter A; they are the root of two equations, found by repeating.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tether.verify.enumerable import END, INDEX, LENGTH, LENGTHS, REWARDS, STRINGS, WORDS

Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """What sets a method's field apart. `scale`: the reward is divided by its spread. `per_length`: w = 1/length."""

    pull: Literal["reward", "k2", "k3"]
    scale: bool = False
    per_length: bool = False


def fixed_point(rule: Rule, ref: Tensor, beta: float) -> Tensor:
    """Probabilities (40,) float64 at which the method's expected update is 0. `ref` (40, 3): log-probs of the reference."""
    ref = ref.double()
    if rule.pull == "reward":
        return optimum(ref.sum(1).exp(), beta)
    p = ref.sum(1).exp()
    mean, spread = moments(p)
    for _ in range(500):
        p = settled(rule, ref, beta, mean, spread)
        new_mean, new_spread = moments(p)
        if abs(new_mean - mean) + abs(new_spread - spread) < 1e-13:
            return p
        mean, spread = (mean + new_mean) / 2, (spread + new_spread) / 2
    raise ArithmeticError(f"no fixed point found for {rule}")


def optimum(ref: Tensor, beta: float) -> Tensor:
    """Of E[R] - beta KL over whole strings: p*(y) proportional to ref(y) exp(R(y)/beta)."""
    q = ref * torch.exp(REWARDS / beta)
    return q / q.sum()


def optimum_of_scaled(ref: Tensor, beta: float) -> Tensor:
    """Of rewards divided by their own spread: p* at the tie beta s, where s is the spread under that p* itself.

    ArithmeticError where the tie is too weak for that: each smaller spread then brings an even smaller one, down to one answer.
    """
    spread = moments(ref)[1]
    for _ in range(5000):
        p = optimum(ref, beta * spread)
        before, spread = spread, moments(p)[1]
        if abs(spread - before) < 1e-13:
            return p
        if spread < 1e-2:
            break
    raise ArithmeticError(f"at beta {beta} the spread does not come to rest")


def moments(p: Tensor) -> tuple[float, float]:
    mean = float(p @ REWARDS)
    return mean, float(p @ (REWARDS - mean) ** 2) ** 0.5


def settled(rule: Rule, ref: Tensor, beta: float, mean: float, spread: float) -> Tensor:
    """The fixed point while mean and spread are held."""
    step = conditional(ref)
    p = {}

    def solve(prefix: Prefix) -> tuple[float, float]:
        """(E[w A | prefix], E[w | prefix]) under the solution; fills `p` on the way up."""
        ends = []
        for token in range(len(WORDS)):
            longer = (*prefix, token)
            if token == END or len(longer) == LENGTH:
                w = 1 / len(longer) if rule.per_length else 1.0
                a = (float(REWARDS[INDEX[longer]]) - mean) / (spread if rule.scale else 1.0)
                ends.append((w * a, w))
            else:
                ends.append(solve(longer))
        probs = level(rule.pull, step[prefix], [u for u, _ in ends], [beta * v for _, v in ends])
        p[prefix] = probs
        return sum(q * u for q, (u, _) in zip(probs, ends, strict=True)), sum(q * v for q, (_, v) in zip(probs, ends, strict=True))

    solve(())
    out = torch.ones(len(STRINGS), dtype=torch.float64)
    for i, string in enumerate(STRINGS):
        for t, token in enumerate(string):
            out[i] *= p[string[:t]][token]
    return out


def level(pull: str, ref: list[float], u: list[float], b: list[float]) -> list[float]:
    """Probabilities over the next token at which u - b g(log p/ref) is one number x for all of them.

    k3: p = b ref/(b + x - u); k2: p = ref exp((u - x)/b). Their sum falls with x, and x is where it is 1.
    """

    def probs(x: float) -> list[float]:
        if pull == "k3":
            return [bi * r / (bi + x - ui) for r, ui, bi in zip(ref, u, b, strict=True)]
        return [r * math.exp((ui - x) / bi) for r, ui, bi in zip(ref, u, b, strict=True)]

    low = max(ui - bi for ui, bi in zip(u, b, strict=True)) if pull == "k3" else min(u) - 1
    high = max(u) + 1
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if sum(probs(middle)) > 1 else (low, middle)
    return probs(high)


def conditional(ref: Tensor) -> dict[Prefix, list[float]]:
    """The reference as probabilities of the next token after each prefix."""
    out: dict[Prefix, list[float]] = {}
    for i, string in enumerate(STRINGS):
        for t, token in enumerate(string):
            out.setdefault(string[:t], [0.0] * len(WORDS))[token] = float(ref[i, t].exp())
    return out


def field(rule: Rule, p: Tensor, ref: Tensor, beta: float) -> dict[Prefix, list[float]]:
    """The expected update of the logits after each prefix, from its definition: a sum over all strings and their tokens."""
    mean, spread = moments(p)
    prefixes = sorted({s[:t] for s in STRINGS for t in range(len(s))})
    mass = {s: sum(float(p[i]) for i, y in enumerate(STRINGS) if y[: len(s)] == s) for s in [*prefixes, *STRINGS]}
    step, out = conditional(ref), {s: [0.0] * len(WORDS) for s in prefixes}
    for i, y in enumerate(STRINGS):
        w = 1 / int(LENGTHS[i]) if rule.per_length else 1.0
        a = (float(REWARDS[i]) - mean) / (spread if rule.scale else 1.0)
        if rule.pull == "reward":
            a -= beta * float(p[i].log() - ref[i].sum())
        for t, token in enumerate(y):
            s = y[:t]
            ratio = mass[(*s, token)] / mass[s] / step[s][token]
            g = {"k3": 1 - 1 / ratio, "k2": math.log(ratio), "reward": 0.0}[rule.pull]
            for v in range(len(WORDS)):
                score = (v == token) - mass[(*s, v)] / mass[s]
                out[s][v] += float(p[i]) * w * (a - beta * g) * score
    return out
