"""The lab's PPO: print beside the clipped objective's gradient, and the penalty of exercise 2 against closed forms."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.lab_docs import rows_missing
from tether.lab.bandit import Direction, kl, optimum, vector
from tether.lab.clipped_updates import BEST, EPS, REWARDS, START, WEIGHTINGS, WORST, climb, clipped, listing, pushes, rested
from tether.lab.experiment import Result, Variant
from tether.lab.ppo import EXPERIMENT
from tether.lab.ppo import WEIGHTINGS as SHOWN_WEIGHTINGS

# weights: probabilities and largest ratio at steps 2, 4, 6, 8, 10; clips; final logits
TRUE = {
    "old probability": (
        [".243 .428 .122 .207", ".154 .611 .080 .155", ".094 .750 .052 .104", ".062 .831 .035 .072", ".044 .877 .026 .053"],
        ["1.18", "1.16", "1.10", "1.05", "1.02"],
        0,
        [-0.480005, 2.504380, -1.027618, -0.296757],
    ),
    "1 per action": (
        [".193 .513 .086 .208", ".087 .773 .030 .110", ".019 .947 .005 .030", ".002 .993 .000 .004", ".000 .999 .000 .000"],
        ["1.37", "1.25", "1.13", "1.04", "1.00"],
        85,
        [-1.743923, 6.795934, -3.471954, -0.880057],
    ),
    "1/4 per action": (
        [".267 .410 .109 .215", ".185 .576 .063 .176", ".105 .748 .033 .114", ".057 .861 .016 .067", ".029 .925 .008 .038"],
        ["1.17", "1.15", "1.13", "1.08", "1.04"],
        30,
        [-0.438560, 3.014070, -1.686576, -0.188934],
    ),
}


@cache
def found(variant: Variant) -> Result:
    return EXPERIMENT.run(variant)


@pytest.fixture(scope="module")
def both() -> Result:
    return found("both")


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_true_gradient_with_each_weighting(weighting: str) -> None:
    probs, largest, clips, logits = TRUE[weighting]
    run = climb(weighting)
    assert [" ".join(f"{p:.3f}"[1:] for p in run.steps[n - 1].probs) for n in (2, 4, 6, 8, 10)] == probs
    assert [f"{run.ends(n - 1, n)[1]:.2f}" for n in (2, 4, 6, 8, 10)] == largest
    assert run.clips == clips
    assert [round(z, 6) for z in run.logits] == logits


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_the_gradient_is_the_one_that_is_written_by_hand(weighting: str) -> None:
    # dJ/dz_j = sum_a g_a (1[a = j] - p_j), g_a = w_a A_a rho_a, or 0 where the clip binds.
    logits = (START + vector([-0.6, 0.9, -0.1, 0.3])).requires_grad_()
    old = START.log_softmax(0)
    advantages = REWARDS - old.exp() @ REWARDS
    logp = logits.log_softmax(0)
    (found,) = torch.autograd.grad(clipped(logp, old, advantages, weighting)[0], logits)
    with torch.no_grad():
        ratio, p = (logp - old).exp(), logp.exp()
        held = ((advantages > 0) & (ratio > 1 + EPS)) | ((advantages < 0) & (ratio < 1 - EPS))
        assert held.any()
        assert not held.all()
        weights = {"old probability": old.exp(), "1 per action": torch.ones(4), "1/4 per action": torch.full((4,), 0.25)}[weighting]
        g = torch.where(held, 0.0, weights * advantages * ratio)
        torch.testing.assert_close(found, g - p * g.sum(), rtol=1e-13, atol=1e-15)


def test_one_update_a_batch_has_ratio_one_and_nothing_to_clip() -> None:
    run = climb(inner=1, outer=50)
    assert (run.clips, run.ends()) == (0, (1.0, 1.0))


def test_the_listings_epsilon_shows_once_a_probability_is_as_small() -> None:
    run = listing(inner=1, outer=50)
    assert run.ends()[0] < 0.6
    assert run.clips > 0
    assert listing(inner=1).clips == 0


def test_more_updates_of_a_batch_run_away_as_printed_and_are_held_by_the_gradient() -> None:
    assert listing(inner=32).ends()[0] < 1e-30
    assert climb(inner=32).ends()[0] > 0.5
    assert climb(inner=32).ends()[1] < 1.4


def test_what_the_clip_stops_by_the_gradient_and_not_as_printed() -> None:
    old = START.softmax(0)
    advantage = float(REWARDS[BEST] - old @ REWARDS)
    p = 1.3 * float(old[BEST])
    printed, own, other = pushes(1.3)
    assert printed == pytest.approx(1.2 * advantage * (1 - p), rel=1e-13)
    assert (own, other) == (0.0, 0.0)
    printed, own, other = pushes(1.0)
    assert printed == pytest.approx(own, rel=1e-12)  # at ratio 1 the value and the derivative agree: on the action's own logit
    assert other == pytest.approx(-advantage * float(old[WORST]), rel=1e-12)  # which the listing leaves out


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("beta", [1.0, 2.0, 5.0])
def test_exercise_2_comes_to_rest_at_the_closed_form(direction: Direction, beta: float) -> None:
    rest, best = rested(beta, direction), optimum(REWARDS, START.log_softmax(0), beta, direction)
    torch.testing.assert_close(vector(rest.steps[-1].probs), best.p, rtol=0, atol=1e-9)
    after = vector(rest.logits).log_softmax(0)
    value = float(after.exp() @ REWARDS - beta * kl(after, START.log_softmax(0), direction))
    assert value == pytest.approx(best.value, abs=1e-12)


def test_a_larger_penalty_keeps_the_policy_nearer_its_start() -> None:
    def distance(beta: float) -> float:
        return float(kl(vector(climb(beta=beta).logits).log_softmax(0), START.log_softmax(0)))

    distances = [distance(beta) for beta in (0.0, 1.0, 2.0, 5.0)]
    assert distances == sorted(distances, reverse=True)


def test_the_page_says_what_was_measured(both: Result) -> None:
    steps, ends, outer, inner, _ = both.tables
    assert [row[2:4] for row in steps.rows[:5]] == [
        ["0.157 0.627 0.038 0.178", "1.52"],
        ["0.045 0.855 0.005 0.095", "1.17"],
        ["0.008 0.958 0.000 0.034", "1.06"],
        ["0.001 0.989 0.000 0.010", "1.02"],
        ["0.000 0.997 0.000 0.002", "1.00"],
    ]
    assert [row[-1] for row in ends.rows] == ["68/160", "0/160", "85/160", "30/160"]
    assert list(ends.rows[0][1:5]) == ["−7.33904839", "1.45094979", "−11.6168251", "−4.53900576"]
    assert [int(row[2]) + int(row[3]) for row in outer.rows] == [5, 4, 5, 6, 8, 8, 8, 8, 8, 8]
    assert [row[1].split()[0] for row in outer.rows] == [
        "0.612", "0.546", "0.490", "0.443", "0.407", "0.383", "0.368", "0.361", "0.357", "0.355",
    ]  # fmt: skip
    assert list(inner.rows[0][2:]) == ["1", "0/40", "0.113 0.704 0.018 0.164"]
    told = {d.what: (d.printed, d.true) for d in both.differences}
    assert told["clips of 160 checks"] == ("68", "0")
    assert told["probability of the best action at the end"] == ("0.997", "0.877")
    assert told["smallest ratio of the last batch"] == ("0.355", "0.887")
    assert len(both.charts) == 5


def test_each_variant_shows_its_own_numbers_only() -> None:
    assert EXPERIMENT.has_variants
    printed, true = found("printed"), found("true")
    assert [row[0] for row in printed.tables[1].rows] == ["as printed"]
    assert [row[0] for row in true.tables[1].rows] == list(SHOWN_WEIGHTINGS)
    assert not printed.differences
    assert not true.differences
    assert "as printed" not in str(true.sections)
    assert "objective" not in str([s.text for s in printed.sections])


def test_firings_that_bind_nothing_are_told(both: Result) -> None:
    # Counted by the compiled listing with N_INNER 16 and 32: firings, and those at which the minimum is the clipped value.
    runs = {n: listing(inner=n) for n in (4, 8, 16, 32)}
    assert {n: (run.clips, run.clips - run.idle) for n, run in runs.items()} == {4: (68, 68), 8: (201, 201), 16: (464, 456), 32: (968, 944)}
    assert "8 with 16 and 24 with 32 updates" in both.tables[3].caption
    assert "counter" not in found("true").tables[3].caption


@pytest.mark.parametrize("variant, weightings", [("both", True), ("printed", False), ("true", True)])
def test_a_caption_speaks_of_the_rows_that_are_there(variant: Variant, weightings: bool) -> None:
    assert ("the other two weightings" in found(variant).tables[0].caption) == weightings


def test_what_the_penalty_takes_is_told_apart_from_what_the_listing_does(both: Result) -> None:
    (told,) = (d for d in both.differences if d.what.startswith("distance"))
    ends = [float(kl(vector(climb(beta=b).logits).log_softmax(0), START.log_softmax(0))) for b in (1.0, 0.0)]
    assert told.true == f"{ends[0]:.3f}"
    assert f"without it they end at {ends[1]:.3f}" in told.why


def test_the_docs_show_these_numbers(both: Result) -> None:
    assert rows_missing("ppo", both.tables) == []
