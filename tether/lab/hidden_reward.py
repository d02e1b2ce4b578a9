"""The reward hidden in a policy, as numbers (Rafailov et al. 2023, arXiv:2305.18290, eqs. 4 to 7).

    p*(y) = ref(y) exp(r(y)/beta) / Z               the optimum of E[r] - beta KL(p, ref)
    r(y) = beta log(p*(y)/ref(y)) + beta log Z      the same, solved for r
    r(a) - r(b) = beta log(p*(a)/ref(a)) - beta log(p*(b)/ref(b))      Z is gone: what a comparison needs

One prompt, five answers. The last step of the derivation, a policy in place of p*, is done by training: the loss of every pair in
both orders, each by the share of people who would choose so, has its minimum at p*.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.lab import bandit
from tether.losses.preference import PairLogps, preference_loss

REF = torch.tensor([0.40, 0.30, 0.15, 0.10, 0.05], dtype=torch.float64)
REWARDS = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5], dtype=torch.float64)
BETA = 0.5


@dataclass(frozen=True)
class Hidden:
    """All over answers (N,). `implicit` is beta log(p*/ref); `recovered` adds beta log Z to it."""

    p: Tensor
    log_z: float
    implicit: Tensor
    recovered: Tensor

    @property
    def reward_error(self) -> float:
        return float((self.recovered - REWARDS).abs().max())

    @property
    def difference_error(self) -> float:
        """Largest error of a difference of implicit rewards over all pairs."""
        return float(((self.implicit[:, None] - self.implicit) - (REWARDS[:, None] - REWARDS)).abs().max())


def hidden(beta: float = BETA) -> Hidden:
    """What the optimum says of the rewards, computed from its probabilities and from Z."""
    p = bandit.optimum(REWARDS, REF.log(), beta).p
    log_z = float(torch.logsumexp(REF.log() + REWARDS / beta, 0))
    implicit = beta * (p / REF).log()
    return Hidden(p, log_z, implicit, implicit + beta * log_z)


def objective(p: Tensor, beta: float = BETA) -> float:
    """E[r] - beta KL(p, ref), where p may put nothing on an answer."""
    return float(p @ REWARDS - beta * bandit.kl(p.log(), REF.log()))


def greedy() -> Tensor:
    """All mass where r + beta log ref is highest."""
    return torch.nn.functional.one_hot((REWARDS + BETA * REF.log()).argmax(), len(REF)).double()


# (better, worse) of every pair of answers
PAIRS = [(a, b) if REWARDS[a] > REWARDS[b] else (b, a) for a, b in itertools.combinations(range(len(REF)), 2)]


def pair(logp: Tensor, better: int, worse: int) -> PairLogps:
    one = torch.ones(1, dtype=torch.float64)
    return PairLogps(logp[[better]], logp[[worse]], REF.log()[[better]], REF.log()[[worse]], one, one)


def preferred(better: int, worse: int) -> float:
    """Bradley and Terry: the share that chooses the better answer."""
    return float(torch.sigmoid(REWARDS[better] - REWARDS[worse]))


def expected_loss(logp: Tensor, beta: float = BETA) -> Tensor:
    """DPO over all pairs and both orders. Both orders of one pair are the loss with label smoothing 1 - share."""
    losses = [
        preference_loss(pair(logp, a, b), "cdpo", beta=beta, label_smoothing=1 - preferred(a, b), total_pairs=len(PAIRS))[0]
        for a, b in PAIRS
    ]
    return torch.stack(losses).sum()


def train(beta: float = BETA) -> Tensor:
    """Probabilities (N,) at the minimum of `expected_loss`, from the reference on."""
    logits = REF.log().requires_grad_()
    optimiser = torch.optim.LBFGS([logits], max_iter=300, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = expected_loss(logits.log_softmax(0), beta)
        value.backward()
        return value

    optimiser.step(closure)
    return logits.detach().softmax(0)
