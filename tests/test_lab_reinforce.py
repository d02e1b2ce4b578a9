"""The lab's REINFORCE: the trick, the theory of five baselines against every possible batch, and what was measured."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.lab_docs import rows_missing
from tether.advantage import batch_mean, group_mean
from tether.lab import reinforce
from tether.lab.reinforce import ANSWERS, LOGITS, REWARDS, ascent, baselines, logps, measure, world


def test_probabilities_of_all_answers_add_up_to_one() -> None:
    assert float(logps(LOGITS).sum(-1).exp().sum()) == pytest.approx(1.0, abs=1e-15)


def test_the_exact_gradient_is_the_finite_difference() -> None:
    h = 1e-6
    for k in range(len(LOGITS)):
        bump = torch.zeros_like(LOGITS).index_fill_(0, torch.tensor([k]), h)
        up, down = (logps(LOGITS + s * bump).sum(-1).exp() @ REWARDS for s in (1, -1))
        assert float(up - down) / (2 * h) == pytest.approx(float(reinforce.exact_gradient()[k]), abs=1e-9)


@pytest.mark.parametrize("baseline", [0.0, 3.0, -7.5])
def test_the_trick_gives_the_exact_gradient_with_any_constant(baseline: float) -> None:
    assert float((reinforce.trick_gradient(baseline=baseline) - reinforce.exact_gradient()).abs().max()) < 1e-15


def test_without_the_log_it_is_another_direction() -> None:
    wrong, exact = reinforce.gradient_without_log(), reinforce.exact_gradient()
    p = logps(LOGITS).sum(-1).exp()
    by_hand = (p.square() * REWARDS) @ world().scores
    torch.testing.assert_close(wrong, by_hand, rtol=1e-12, atol=1e-15)
    assert float(torch.cosine_similarity(wrong, exact, 0)) < 0.9


def test_scores_have_expectation_zero_and_give_the_gradient() -> None:
    w = world()
    assert float((w.p @ w.scores).abs().max()) < 1e-16
    torch.testing.assert_close((w.p * REWARDS) @ w.scores, w.gradient, rtol=1e-13, atol=1e-16)


@pytest.mark.parametrize("size", [2, 3])
def test_theory_is_what_every_possible_batch_says(size: int) -> None:
    """All 81 or 729 batches with their probabilities: mean and variance of the gradient, none of it sampled."""
    w = world()
    batches = torch.tensor(list(itertools.product(range(len(ANSWERS)), repeat=size)))  # (n, G)
    chance = w.p[batches].prod(1)
    ids = torch.arange(len(batches)).repeat_interleave(size)
    for baseline in baselines(w):
        advantages = baseline.advantages(REWARDS[batches].flatten(), ids)
        gradients = (advantages[:, None] * w.scores[batches.flatten()]).view(len(batches), size, -1).mean(1)
        mean = chance @ gradients
        variance = float(chance @ (gradients - mean).square().sum(1))
        torch.testing.assert_close(mean, baseline.scale(size) * w.gradient, rtol=1e-12, atol=1e-15, msg=baseline.name)
        assert variance == pytest.approx(baseline.variance(size), rel=1e-12), baseline.name


def test_the_gradient_of_a_batch_is_the_losss_own() -> None:
    w = world()
    drawn = torch.tensor([0, 4, 4, 7, 2, 8, 1, 3])
    advantages = group_mean(REWARDS[drawn], torch.zeros(8))
    z = LOGITS.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(ascent(logps(z)[drawn], advantages), z)
    torch.testing.assert_close(gradient, (advantages[:, None] * w.scores[drawn]).mean(0), rtol=1e-13, atol=1e-16)


def test_the_mean_of_a_batch_is_its_group_mean() -> None:
    rewards = REWARDS[torch.tensor([0, 4, 4, 7])]
    torch.testing.assert_close(batch_mean(rewards, torch.zeros(4)), group_mean(rewards, torch.zeros(4)), rtol=0, atol=0)


def test_no_constant_has_less_variance_than_the_best() -> None:
    w = world()
    least = w.constant_variance(w.best_baseline)
    assert all(w.constant_variance(w.best_baseline + d) > least for d in (-1.0, -0.01, 0.01, 1.0))
    assert least < w.constant_variance(w.value) < w.leave_one_out_variance() < w.constant_variance(0.0)


def test_measured_values_agree_with_theory() -> None:
    w = world()
    for m in measure(w, baselines(w), batches=2000, seed=3):
        for found, exact in ((m.variance, m.baseline.variance(8)), (m.scale, m.baseline.scale(8))):
            error = (found.high - found.value) / 1.96
            assert abs(found.value - exact) < 4 * error, m.baseline.name


def test_leave_one_out_is_the_batch_mean_scaled_up() -> None:
    _, own, others, *_ = baselines(world())
    assert others.variance(8) / own.variance(8) == pytest.approx((8 / 7) ** 2, rel=1e-13)
    assert [own.scale(g) for g in (2, 8)] == [0.5, 0.875]


def test_learning_without_a_baseline_ends_lower() -> None:
    ends = {name: reinforce.learn(name, runs=32)[-1] for name in reinforce.LEARNERS}
    assert ends["leave one out"] > 4.9
    assert ends["critic"] > 4.9
    assert ends["none"] < ends["leave one out"] - 0.1


def test_the_page_and_the_docs_say_what_was_measured() -> None:
    result = reinforce.EXPERIMENT.run("both")
    assert rows_missing("reinforce", result.tables) == []
    w = world()
    trick, five = result.tables
    assert all(float(row[1].replace("−", "-")) < 1e-15 for row in trick.rows[1:3])
    assert [row[1] for row in five.rows] == [f"{b.variance(8):.4f}" for b in baselines(w)]
    assert len(result.charts) == 4
    assert all(math.isfinite(float(row[1].replace("−", "-"))) for chart in result.charts for row in chart.rows if row[1] != "–")
