"""The lab's DPO: the derivation to rounding, the quiz to its last digit, displacement where the features say so, and stale pairs."""

from __future__ import annotations

import math

import pytest
import torch

from tests.lab_docs import rows_missing
from tether.lab import collapse, dpo, hidden_reward, stale_pairs
from tether.losses.preference import preference_loss

# --- the reward inside the policy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0, 5.0])
def test_the_optimum_returns_its_reward_and_z_cancels_from_differences(beta: float) -> None:
    best = hidden_reward.hidden(beta)
    assert float(best.p.sum()) == pytest.approx(1.0, abs=1e-14)
    assert best.reward_error < 1e-12
    assert best.difference_error < 1e-12
    z = sum(q * math.exp(r / beta) for q, r in zip(hidden_reward.REF.tolist(), hidden_reward.REWARDS.tolist(), strict=True))
    assert best.log_z == pytest.approx(math.log(z), rel=1e-14)


def test_the_optimum_is_worth_beta_log_z_and_nothing_is_worth_more() -> None:
    best = hidden_reward.hidden()
    most = hidden_reward.objective(best.p)
    assert most == pytest.approx(hidden_reward.BETA * best.log_z, rel=1e-14)
    rng = torch.Generator().manual_seed(0)
    others = [hidden_reward.greedy(), hidden_reward.REF, *torch.rand(50, 5, generator=rng, dtype=torch.float64).log().mul(2).softmax(-1)]
    for p in others:
        worth = hidden_reward.objective(p)
        kl = float(torch.where(p > 0, p * (p / best.p).log(), 0.0).sum())
        assert most - worth == pytest.approx(hidden_reward.BETA * kl, abs=1e-12)  # the gap to the optimum is a KL
        assert worth < most


@pytest.mark.parametrize(("better", "worse"), hidden_reward.PAIRS)
def test_at_the_optimum_dpo_says_what_bradley_and_terry_say(better: int, worse: int) -> None:
    pair = hidden_reward.pair(hidden_reward.hidden().p.log(), better, worse)
    loss, _ = preference_loss(pair, "dpo", beta=hidden_reward.BETA)
    assert math.exp(-loss.item()) == pytest.approx(hidden_reward.preferred(better, worse), rel=1e-14)


def test_comparisons_alone_lead_to_the_optimum() -> None:
    best = hidden_reward.hidden().p
    logits = best.log().requires_grad_()
    (gradient,) = torch.autograd.grad(hidden_reward.expected_loss(logits.log_softmax(0)), logits)
    assert float(gradient.abs().max()) < 1e-16
    assert 0.5 * float((hidden_reward.train() - best).abs().sum()) < 1e-9


# --- the quiz ----------------------------------------------------------------------------------------------------------------------

QUIZ = {0.01: (0.021, 0.505250, 0.682702), 0.1: (0.21, 0.552308, 0.593650), 0.5: (1.05, 0.740775, 0.300058), 1.0: (2.1, 0.890903, 0.115520)}


@pytest.mark.parametrize("beta", QUIZ)
def test_the_quiz(beta: float) -> None:
    found = dpo.quiz(beta)
    assert (round(found.margin, 6), round(found.probability, 6), round(found.loss, 6)) == QUIZ[beta]
    assert found.gap == pytest.approx(2.1, rel=1e-14)
    assert round(100 * found.rejected_share, 1) == 95.2


def test_a_large_gap_is_a_small_loss_only_where_beta_is_large() -> None:
    assert dpo.quiz(0.1).loss > 0.85 * math.log(2)
    assert dpo.quiz(1.0).loss < 0.17 * math.log(2)


# --- the chosen answer falls -------------------------------------------------------------------------------------------------------


def test_training_starts_at_the_start() -> None:
    torch.testing.assert_close(collapse.Features.made().logps(torch.zeros(13, dtype=torch.float64)).exp(), collapse.START)
    assert float((collapse.START.sum(1) - 1).abs().max()) < 1e-15
    path = collapse.train("DPO", until_gap=0.0)
    assert path.loss == pytest.approx([math.log(2)], rel=1e-14)
    assert path.chosen == [0.0]
    assert path.updates == 0


@pytest.mark.parametrize("share", dpo.SHARES)
def test_the_first_step_moves_the_chosen_answer_as_the_features_say(share: float) -> None:
    """d log p(chosen) along -grad = weight x (phi(chosen) - E phi) . (sum of the pairs' differences of features)."""
    features = collapse.Features.made(share)
    theta = torch.zeros(13, dtype=torch.float64, requires_grad=True)
    (down,) = torch.autograd.grad(collapse.loss("dpo", features.logps(theta)), theta)
    differences = [features.phi[x, collapse.CHOSEN[x]] - features.phi[x, collapse.REJECTED[x]] for x in range(2)]
    torch.testing.assert_close(-down, 0.1 * 0.5 * (differences[0] + differences[1]) / 2, rtol=1e-13, atol=1e-16)
    step = 1e-6
    moved = features.logps((theta - step * down).detach()) - features.logps(theta.detach())
    expected = features.phi[0, 0] - collapse.START[0] @ features.phi[0]
    assert float(moved[0, 0]) / step == pytest.approx(float(expected @ -down), rel=1e-4)


@pytest.mark.parametrize(("share", "falls"), [(0.0, False), (0.5, False), (1.0, True), (1.5, True)])
def test_the_chosen_answer_falls_where_the_score_is_above_zero(share: float, falls: bool) -> None:
    path = collapse.train("DPO", share=share)
    assert (collapse.Features.made(share).score() > 0) is falls
    assert (path.chosen[-1] < 0) is falls
    assert path.loss[-1] < 0.52 < path.loss[0]  # the loss falls either way
    assert path.gap[-1] >= 4.0


def test_the_score_is_a_warning_and_no_border() -> None:
    assert collapse.Features.made(0.75).score() < 0
    assert collapse.train("DPO", share=0.75).chosen[-1] < 0


def test_what_the_pair_loses_goes_to_answers_in_no_pair() -> None:
    path = collapse.train("DPO")
    assert path.others[-1] > 0.9 > path.others[0]
    assert path.reward[-1] < 0.2 < path.reward[0]


def test_losses_of_the_gap_alone_share_one_path_and_the_others_leave_it() -> None:
    ends = {name: collapse.train(name).chosen[-1] for name in ("DPO", "IPO", "SimPO", "DPO + NLL", "DPOP")}
    assert ends["IPO"] == pytest.approx(ends["DPO"], abs=0.05)
    assert ends["SimPO"] == pytest.approx(ends["DPO"], abs=0.05)
    assert ends["DPO + NLL"] > 1.0
    assert abs(ends["DPOP"]) < 0.05  # held at the reference
    assert ends["DPO"] < -1.0


@pytest.mark.parametrize("name", ["KTO", "ORPO"])
def test_losses_that_are_not_of_the_gap_alone_make_it_too(name: str) -> None:
    path = collapse.train(name, until_gap=1.0)
    assert path.gap[-1] >= 1.0
    assert path.loss[-1] < path.loss[0]
    assert (path.chosen[-1] > 0) is (name == "ORPO")


# --- pairs of yesterday ------------------------------------------------------------------------------------------------------------


def test_the_limit_of_the_pairs_is_where_their_expected_loss_is_flat() -> None:
    limit = stale_pairs.limit_of_pairs()
    seen = torch.nonzero(stale_pairs.SEEN).flatten().tolist()
    implicit = stale_pairs.BETA * (limit / stale_pairs.REF).log()
    for a in seen:
        for b in seen:
            assert float(implicit[a] - implicit[b]) == pytest.approx(float(stale_pairs.REWARDS[a] - stale_pairs.REWARDS[b]), abs=1e-12)
    # No pair moves the sum of the seen logits, nor the unseen one.
    policies = stale_pairs.Policies.made(0)
    chosen, rejected = torch.randint(5, (2, stale_pairs.RUNS, 8), generator=policies.rng)
    (gradient,) = torch.autograd.grad(stale_pairs.dpo_loss(policies.logps, chosen, rejected), policies.logits)
    assert float(gradient[:, stale_pairs.BEST].abs().max()) < 1e-16
    assert float(gradient.sum(1).abs().max()) < 1e-15


def test_fixed_pairs_end_at_their_limit_and_the_others_find_the_best_answer() -> None:
    learned = {name: stale_pairs.learn(name) for name in stale_pairs.METHODS}
    limit = float(stale_pairs.limit_of_pairs() @ stale_pairs.REWARDS)
    assert learned["DPO, fixed pairs"].reward[-1] == pytest.approx(limit, abs=0.1)
    assert learned["DPO, fixed pairs"].best < stale_pairs.REF[stale_pairs.BEST]
    for name in ("DPO, fresh pairs", "PPO", "GRPO"):
        assert learned[name].best > 0.7, name
        assert learned[name].reward[-1] > 4.0, name
    assert learned["PPO"].reward[-1] == pytest.approx(stale_pairs.optimal_reward(), abs=0.05)
    assert all(v.reward[0] == pytest.approx(1.39, abs=1e-12) for v in learned.values())


def test_a_seed_gives_one_run() -> None:
    first, again, other = (stale_pairs.learn("PPO", updates=3, seed=s).reward for s in (0, 0, 1))
    assert first == again != other


def test_the_page_and_the_docs_say_what_was_measured() -> None:
    result = dpo.EXPERIMENT.run("both")
    assert rows_missing("dpo", result.tables) == []
    _, quiz, *_ = result.tables
    assert [row[3] for row in quiz.rows] == [f"{v[2]:.6f}" for v in QUIZ.values()]
    assert "95.2 %" in quiz.caption
    assert [(d.printed, d.true) for d in result.differences] == [("small", "0.594"), ("1", "0.660")]
    assert len(result.charts) == 5
