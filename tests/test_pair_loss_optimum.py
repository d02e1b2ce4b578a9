"""Where the losses on pairs lead: the optimum on an enumerable policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.slow_way import kl_full, t
from tether.losses.preference import PairLogps, preference_loss

REWARDS, REF, BETA = t(1.0, 0.25, -0.5, 0.4), t(-0.4, 0.1, 0.2, -1.0).log_softmax(-1), 0.5


def every_pair(z: Tensor) -> tuple[PairLogps, Tensor]:
    """All ordered pairs of distinct actions, and the Bradley-Terry probability that the first is preferred."""
    k = len(REWARDS)
    first, second = (torch.tensor([(i, j) for i in range(k) for j in range(k) if i != j]).T).unbind(0)
    logp, ones = z.log_softmax(-1), torch.ones(len(first))
    return PairLogps(logp[first], logp[second], REF[first], REF[second], ones, ones), torch.sigmoid(REWARDS[first] - REWARDS[second])


def minimise(name: str, weigh: Any = None) -> Tensor:
    """Probabilities at the minimum of the per-pair losses weighted by how often each order is seen (Newton-like, float64)."""
    z = REF.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([z], lr=1.0, max_iter=500, tolerance_grad=1e-14, tolerance_change=1e-18, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        pairs, seen = every_pair(z)
        one_by_one = [
            preference_loss(PairLogps(*(getattr(pairs, f)[i : i + 1] for f in FIELDS)), name, beta=BETA)[0] for i in range(len(seen))
        ]
        loss = (torch.stack(one_by_one) * (seen if weigh is None else weigh(seen))).sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    return z.detach().softmax(-1)


FIELDS = ("chosen", "rejected", "ref_chosen", "ref_rejected", "n_chosen", "n_rejected")


def test_dpo_on_true_preferences_reaches_the_exact_optimum() -> None:
    """p* = ref exp(r/beta)/Z, because the loss is least where beta log(pi/ref) differs from r by a constant."""
    star = (REF + REWARDS / BETA).softmax(-1)
    torch.testing.assert_close(minimise("dpo"), star, rtol=1e-6, atol=1e-8)
    # one-token answers: lengths do not matter, so the length-normalised loss has the same optimum
    torch.testing.assert_close(minimise("dpo_norm"), star, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["ipo_sum", "ipo_avg"])
def test_ipo_on_true_preferences_reaches_its_own_optimum(name: str) -> None:
    """Least squares: with each order seen with probability q or 1-q, the gaps fit (2q-1)/(2 tau), summed over partners."""
    q = torch.sigmoid(REWARDS[:, None] - REWARDS[None, :])
    share = (2 * q - 1).sum(1) / len(REWARDS)  # projection of the pairwise targets on differences
    star = (REF + share / (2 * BETA)).softmax(-1)
    torch.testing.assert_close(minimise(name), star, rtol=1e-6, atol=1e-8)


def test_the_gap_to_the_optimum_is_a_divergence() -> None:
    star = REF + REWARDS / BETA
    best = BETA * star.logsumexp(-1)
    for seed in range(5):
        z = torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        p = z.softmax(-1)
        j = (p * REWARDS).sum() - BETA * kl_full(z, REF)
        torch.testing.assert_close(best - j, BETA * kl_full(z, star))
