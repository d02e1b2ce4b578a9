"""The lab's tether against closed forms: where training ends, what best-of-n does, and where the true score turns."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.lab_docs import rows_missing
from tether.best_of import chances, kl_bound
from tether.lab import tether as lab
from tether.lab.tether import BETAS, LENGTHS, LONGEST, SIZES, best_of, kl, optimum, place, total_variation, train

REF = lab.reference()
TRUE = lab.true_scores()
PROXY = lab.proxy_scores()


def test_a_policy_of_decisions_can_write_any_distribution_of_lengths() -> None:
    back = lab.decisions(lab.logits_of(REF)).sum(1).exp()
    torch.testing.assert_close(back, REF, rtol=1e-12, atol=1e-15)
    assert float(back.sum()) == pytest.approx(1, abs=1e-14)
    assert int(lab.MADE[-1].sum()) == LONGEST - 1, "the longest answer never decides to stop"


def test_the_reward_models_slope_is_where_the_slope_of_its_loss_is_zero() -> None:
    """d/dw of the expected loss: E[(s(w d) - s(t)) d] = 0 with d and t the differences of lengths and of true scores."""
    gap, better = LENGTHS[:, None] - LENGTHS, TRUE[:, None] - TRUE
    slope = (REF[:, None] * REF * (torch.sigmoid(lab.proxy_weight() * gap) - torch.sigmoid(better)) * gap).sum()
    assert abs(float(slope)) < 1e-9
    assert lab.proxy_weight() > 0, "longer usually was better"


def test_reward_and_true_score_agree_on_the_reference_and_part_beyond() -> None:
    assert float(REF @ PROXY) == pytest.approx(float(REF @ TRUE), abs=1e-12)
    assert int(PROXY.argmax()) == LONGEST - 1
    assert int(LENGTHS[TRUE.argmax()]) == 18
    assert TRUE[-1] < REF @ TRUE


@pytest.mark.parametrize("beta", BETAS)
def test_training_ends_at_the_closed_form(beta: float) -> None:
    made, wanted = train(PROXY, beta), optimum(PROXY, beta)
    assert total_variation(made.p, wanted) < 0.01
    assert made.mean_lengths[-1] == pytest.approx(float(wanted @ LENGTHS), abs=0.1)


def test_without_a_tether_the_length_hits_the_limit_and_with_one_it_does_not() -> None:
    assert train(PROXY, 0.0).mean_lengths[-1] > 39.9
    assert optimum(PROXY, 0.0).tolist() == [0.0] * (LONGEST - 1) + [1.0]
    lengths = [float(optimum(PROXY, beta) @ LENGTHS) for beta in BETAS]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < 11


def test_another_seed_ends_at_the_same_place_and_the_same_seed_is_the_same_run() -> None:
    runs = [train(PROXY, 1.0, updates=200, batch=64, seed=s) for s in (3, 3, 4)]
    assert runs[0].mean_lengths == runs[1].mean_lengths != runs[2].mean_lengths
    assert total_variation(runs[0].p, runs[2].p) < 0.01


@pytest.mark.parametrize("beta", [0.2, 1.0, 5.0])
def test_the_gap_to_the_optimum_is_a_kl(beta: float) -> None:
    best = optimum(PROXY, beta)

    def objective(p: torch.Tensor) -> float:
        return float(p @ PROXY) - beta * kl(p)

    assert objective(best) == pytest.approx(beta * float(torch.logsumexp(REF.log() + PROXY / beta, 0)), abs=1e-10)
    for other in (REF, best_of(4, PROXY), optimum(PROXY, 3.0)):
        between = float((torch.xlogy(other, other) - torch.xlogy(other, best)).sum())
        assert objective(best) - objective(other) == pytest.approx(beta * between, abs=1e-10)


def test_at_the_optimum_every_advantage_is_zero() -> None:
    net = PROXY - 1.0 * (optimum(PROXY, 1.0).log() - REF.log())
    assert float(net.max() - net.min()) < 1e-12


@pytest.mark.parametrize("n", [1, 2, 3])
def test_best_of_n_is_what_drawing_n_and_taking_the_best_gives(n: int) -> None:
    few = 12  # lengths; the others are so rare together that they are looked at as one
    mass = torch.cat([REF[: few - 1], REF[few - 1 :].sum()[None]])
    wanted = torch.zeros(few, dtype=torch.float64)
    for drawn in itertools.product(range(few), repeat=n):
        wanted[max(drawn)] += math.prod(float(mass[i]) for i in drawn)
    found = best_of(n, LENGTHS)
    torch.testing.assert_close(torch.cat([found[: few - 1], found[few - 1 :].sum()[None]]), wanted, rtol=1e-12, atol=1e-15)


def test_best_of_n_follows_the_scores_and_not_the_order_of_lengths() -> None:
    falling = best_of(3, -LENGTHS)
    shortest = 1 - (1 - REF[0]) ** 3
    assert float(falling[0]) == pytest.approx(float(shortest), rel=1e-12)
    torch.testing.assert_close(best_of(1, TRUE), REF, rtol=1e-12, atol=1e-15)


def test_best_of_n_agrees_with_the_estimate_from_samples() -> None:
    drawn = torch.multinomial(REF, 4000, replacement=True, generator=torch.Generator().manual_seed(0))
    scores = PROXY[drawn].tolist()
    estimate = sum(c * s for c, s in zip(chances(scores, 8), scores, strict=True))
    assert estimate == pytest.approx(place(8, best_of(8, PROXY), PROXY).proxy, abs=0.1)  # three standard errors


@pytest.mark.parametrize("n", SIZES)
def test_the_bound_on_best_of_n_holds_and_a_tether_earns_more_at_that_distance(n: int) -> None:
    at = place(n, best_of(n, PROXY), PROXY)
    assert -1e-12 <= at.kl <= kl_bound(n) + 1e-12
    assert kl_bound(n) == pytest.approx(math.log(n) - (n - 1) / n, abs=1e-15)
    frontier = lab.tethered_frontier(PROXY, PROXY)
    nearest = next(p for p in frontier if p.kl >= at.kl)
    assert nearest.proxy >= at.proxy - 1e-9
    ceiling = lab.tethered_frontier(TRUE, PROXY)
    assert max(p.true for p in ceiling if p.kl <= nearest.kl + 0.3) >= at.true - 1e-9


def test_reward_rises_all_along_while_the_true_score_turns() -> None:
    for frontier in (lab.tethered_frontier(PROXY, PROXY), lab.best_of_frontier(PROXY)):
        rewards, true = [p.proxy for p in frontier], [p.true for p in frontier]
        assert rewards == sorted(rewards)
        turn = true.index(max(true))
        assert true[: turn + 1] == sorted(true[: turn + 1])
        assert true[turn:] == sorted(true[turn:], reverse=True)
        assert 0 < turn < len(true) - 1
        assert true[-1] < float(REF @ TRUE), "in the end worse than not training at all"


def test_the_page_and_the_docs_say_what_was_measured() -> None:
    result = lab.EXPERIMENT.run("both")
    assert rows_missing("tether", result.tables) == []
    assert [row[0] for row in result.tables[0].rows] == ["0", "0.2", "0.5", "1", "2", "5"]
    assert all(float(row[3]) < 0.01 for row in result.tables[0].rows)
    assert [row[0] for row in result.tables[1].rows] == [f"{n:,}" for n in SIZES]
    assert result.tables[2].rows[2][1] == "n = 10"
    assert len(result.charts) == 5
    assert not lab.EXPERIMENT.has_variants
