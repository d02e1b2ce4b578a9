"""Listing 163 as printed and by the objective's gradient, on the same random numbers (Shao et al. 2024, arXiv:2402.03300, eq. 3).

    A = (R - mean of the group) / std        max mean over the group of [min(rho A, clip(rho) A) - beta k3(p, ref)]

rho is the ratio to the policy that drew the group: 1, because each group is used once. Losses and advantages are those of training,
`losses.policy_gradient.policy_loss` and `advantage.group_norm`, in float64 by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from tether.advantage import group_mean, group_norm
from tether.lab import as_printed
from tether.lab.bandit import ascend, surrogate, vector
from tether.lab.glibc_rand import GlibcRand

REWARDS = vector(as_printed.REWARDS)
GROUP, STEPS, RATE, EPS, BETA = 6, 20, 0.3, 0.2, 0.1
REF_LOGP = torch.zeros(4, dtype=torch.float64).log_softmax(0)  # uniform, and where every policy starts
BEST, WORST = 1, 2  # actions

# The listing's deviation: that of the population. Its 1e-8 inside the root changes nothing that is shown here.
NORM: Callable[[Tensor, Tensor], Tensor] = partial(group_norm, std_kind="population", std_eps=0.0)


@dataclass(frozen=True)
class Step:
    """The policy before the update: its probabilities, what it earns on average, and what its group earned."""

    probs: tuple[float, ...]
    expected: float
    group: float


@dataclass(frozen=True)
class Run:
    """Twenty steps and the logits after the last. `digits` are the nine of print: of "expected / group" by step, probabilities and logits."""

    steps: list[Step]
    logits: tuple[float, ...]
    digits: dict[int | str, str] = field(default_factory=dict)

    def at(self, step: int) -> Step:
        """Counted from 1, as print does."""
        return self.steps[step - 1]


def listing(*, group_size: int = GROUP, beta: float = BETA, divide: bool = True) -> Run:
    """What the listing prints, changed as its exercises ask."""
    run = as_printed.grpo(group_size=group_size, beta=beta, divide=divide)
    steps = [Step(tuple(float(p) for p in s.probs), float(s.expected), float(s.group)) for s in run.steps]
    digits: dict[int | str, str] = {n: f"{s.expected:.9g} / {s.group:.9g}" for n, s in enumerate(run.steps, 1)}
    digits["probabilities"] = " ".join(f"{p:.9g}" for p in run.steps[-1].probs)
    digits["logits"] = " ".join(f"{z:.9g}" for z in run.logits)
    return Run(steps, tuple(float(z) for z in run.logits), digits)


def learn(ratio_to: str = "old", *, group_size: int = GROUP, beta: float = BETA, divide: bool = True) -> Run:
    """The listing's twenty steps on its own random numbers. `ratio_to` "old" is GRPO; "reference" is the ratio that the listing takes."""
    rand, logits, steps = GlibcRand(42), torch.zeros(4, dtype=torch.float64), []
    for _ in range(STEPS):
        logp = logits.log_softmax(0)
        probs = logp.exp()
        # 1. A group: for each response a number for the action, then one for the noise.
        drawn, earned = [], []
        for _ in range(group_size):
            drawn.append(as_printed.draw(rand, list(probs.numpy())))
            earned.append(float(REWARDS[drawn[-1]]) + float(rand.uniform()) - 0.5)
        actions, rewards = torch.tensor(drawn), vector(earned)
        # 2. How much better than its siblings each one is.
        advantages = (NORM if divide else group_mean)(rewards, torch.zeros(group_size))
        steps.append(Step(tuple(probs.tolist()), float(probs @ REWARDS), float(rewards.mean())))
        # 3. One update.
        old = logp if ratio_to == "old" else REF_LOGP

        def objective(logp: Tensor, actions: Tensor = actions, old: Tensor = old, advantages: Tensor = advantages) -> Tensor:
            tie = {"ref_logp": REF_LOGP[actions], "kl_coef": beta, "kl_kind": "k3"}
            return surrogate(logp[actions], old[actions], advantages, weights=None, eps_low=EPS, eps_high=EPS, **tie)[0]

        logits = ascend(logits, objective, RATE)
    return Run(steps, tuple(logits.tolist()))


def penalty_push(p: float, ref: float) -> float:
    """d(beta k3)/d log p of one sampled action, by autograd, with its sign turned: how hard the penalty pushes the action up."""
    logp = torch.tensor([math.log(p)], dtype=torch.float64, requires_grad=True)
    none = torch.zeros(1, dtype=torch.float64)
    value, _ = surrogate(logp, logp.detach(), none, ref_logp=vector([math.log(ref)]), kl_coef=BETA, kl_kind="k3")
    (gradient,) = torch.autograd.grad(value, logp)
    return float(gradient)
