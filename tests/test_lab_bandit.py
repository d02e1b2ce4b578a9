"""The small softmax policy of the lab against closed forms and finite sums."""

from __future__ import annotations

import pytest
import torch

from tether.lab.bandit import Direction, ascend, expected_penalty, kl, optimum, surrogate, vector

REWARDS = vector([2, 5, 1, 3])
START = vector([0.5, 0.3, -0.2, 0.1]).log_softmax(0)
UNIFORM = vector([0, 0, 0, 0]).log_softmax(0)

# direction, beta: p* from the start above, E[r]
FROM_THE_START: list[tuple[Direction, float, list[float], float]] = [
    ("reverse", 1, [0.051415, 0.845507, 0.009393, 0.093685], 4.620813),
    ("reverse", 2, [0.164591, 0.603934, 0.049574, 0.181901], 3.944128),
    ("reverse", 5, [0.269025, 0.401338, 0.109377, 0.220259], 3.314897),
    ("forward", 1, [0.099755, 0.766846, 0.038169, 0.095230], 4.357599),
    ("forward", 2, [0.171545, 0.606060, 0.067819, 0.154575], 3.904937),
    ("forward", 5, [0.264491, 0.411534, 0.113428, 0.210546], 3.331720),
]
# beta: p*, log Z, J*, KL, E[r]
FROM_UNIFORM = {
    0.1: ([9.36e-14, 1.0, 4.25e-18, 2.06e-9], 48.613706, 4.861371, 1.386294, 5.0),
    0.5: ([0.002427, 0.979307, 0.000329, 0.017937], 8.634615, 4.317308, 1.276445, 4.955530),
    1.0: ([0.041371, 0.830953, 0.015219, 0.112457], 3.798888, 3.798888, 0.791208, 4.590096),
    2.0: ([0.129250, 0.579259, 0.078394, 0.213097], 1.659712, 3.319424, 0.276527, 3.872479),
}


@pytest.mark.parametrize("direction, beta, p, reward", FROM_THE_START)
def test_optimum_of_either_direction(direction: Direction, beta: float, p: list[float], reward: float) -> None:
    best = optimum(REWARDS, START, beta, direction)
    assert [round(x, 6) for x in best.p.tolist()] == p
    assert round(best.reward, 6) == reward
    assert float(best.p.sum()) == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("beta", FROM_UNIFORM)
def test_optimum_from_the_uniform_policy(beta: float) -> None:
    p, log_z, value, distance, reward = FROM_UNIFORM[beta]
    best = optimum(REWARDS, UNIFORM, beta)
    assert best.p.tolist() == pytest.approx(p, rel=1e-3, abs=5e-7 if beta > 0.1 else 0)
    assert (round(best.value / beta, 6), round(best.value, 6)) == (log_z, value)
    assert (round(best.kl, 6), round(best.reward, 6)) == (distance, reward)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("beta", [0.3, 1.0, 7.0])
def test_no_policy_nearby_is_better_than_the_optimum(direction: Direction, beta: float) -> None:
    best = optimum(REWARDS, START, beta, direction)
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        other = (best.p.log() + 0.1 * torch.randn(4, generator=generator, dtype=torch.float64)).log_softmax(0)
        assert float(other.exp() @ REWARDS - beta * kl(other, START, direction)) < best.value


def test_what_is_lost_is_beta_times_the_divergence_from_the_optimum() -> None:
    best, p = optimum(REWARDS, START, 0.7), vector([0.2, -1.0, 0.4, 1.1]).log_softmax(0)
    value = float(p.exp() @ REWARDS - 0.7 * kl(p, START))
    assert best.value - value == pytest.approx(0.7 * float(kl(p, best.p.log())), rel=1e-13)


def test_a_penalty_must_be_above_zero() -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        optimum(REWARDS, START, 0.0)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_estimator_in_the_loss_pulls_like_the_divergence_of_its_direction(direction: Direction) -> None:
    z = vector([1.0, -0.5, 0.3, 0.0]).requires_grad_()
    logp = z.log_softmax(0)
    (estimated,) = torch.autograd.grad(expected_penalty(logp, START, direction), z, retain_graph=True)
    (exact,) = torch.autograd.grad(kl(logp, START, direction), z)
    torch.testing.assert_close(estimated, exact, rtol=1e-13, atol=1e-15)


def test_a_step_goes_up_the_gradient_of_the_expected_reward() -> None:
    def objective(logp: torch.Tensor) -> torch.Tensor:
        p = logp.detach().exp()
        return surrogate(logp, logp.detach(), REWARDS - p @ REWARDS, weights=p, total_tokens=1)[0]

    p = START.exp()
    torch.testing.assert_close(ascend(START, objective, 0.1), START + 0.1 * p * (REWARDS - p @ REWARDS), rtol=1e-14, atol=1e-16)


def test_an_action_without_probability_adds_nothing_to_the_divergence() -> None:
    sure = torch.tensor([0.0, -torch.inf], dtype=torch.float64)
    assert float(kl(sure, vector([0.5, 0.5]).log())) == pytest.approx(0.6931471805599453, abs=1e-16)
