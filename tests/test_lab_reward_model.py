"""The lab's reward model: print to its digits, the true run against the library's own, the bias, and exercise 1."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.lab_docs import rows_missing
from tether.algorithms.linear_reward import fit
from tether.lab import reward_model
from tether.lab.as_printed import FEATURES, PAIRS
from tether.lab.experiment import Result
from tether.lab.reward_model import EXPERIMENT, contrary, contrary_printed, features, longer, longer_printed, loss_of_gap, shifted, train


@pytest.fixture(scope="module")
def both() -> Result:
    return EXPERIMENT.run("both")


def test_the_true_run_is_what_the_command_for_features_learns() -> None:
    chosen, rejected = features(PAIRS)
    model, epochs = fit(chosen, rejected, FEATURES, learning_rate=0.1, epochs=200, batch_size=1)
    run = train()
    assert run.weights[-1] == pytest.approx(model.weights.tolist(), rel=1e-13)
    assert run.losses == pytest.approx([e.loss for e in epochs], rel=1e-12)
    assert run.correct == [round(e.accuracy * 5) for e in epochs]


@pytest.mark.parametrize("epoch, loss", [(50, "0.142"), (100, "0.081"), (150, "0.057"), (200, "0.044")])
def test_the_true_losses_round_to_the_printed_ones(epoch: int, loss: str) -> None:
    run = train()
    assert (format(run.losses[epoch - 1], ".3f"), run.correct[epoch - 1]) == (loss, 5)


def test_the_true_weights_agree_with_print_to_six_digits() -> None:
    assert train().weights[-1] == pytest.approx([2.75978374, 3.33906937, 1.14370286, 3.75525808], rel=1e-6)
    assert [f"{w:+.3f}" for w in train().weights[-1]] == ["+2.760", "+3.339", "+1.144", "+3.755"]


@pytest.mark.parametrize("bias", [0.0, 3.5, 100.0])
def test_the_bias_cannot_move_and_changes_nothing(bias: float) -> None:
    run = train(bias=bias)
    assert (run.bias, run.largest_bias_gradient) == (bias, 0.0)
    assert run.weights[-1] == pytest.approx(train().weights[-1], rel=1e-12)
    assert run.losses == pytest.approx(train().losses, rel=1e-11)


def test_adding_a_hundred_to_every_score_changes_no_probability_but_by_rounding() -> None:
    weights = train().weights[-1]
    assert shifted(weights, torch.float64) < 1e-14
    assert 1e-9 < shifted(weights, torch.float32) < 1e-6
    assert shifted(weights, torch.bfloat16) > 0.01  # numbers near 100 are half a reward apart


def test_one_update_by_hand() -> None:
    # From zero weights p = 1/2, so the first update of each weight is 0.1 * 0.5 * (chosen - rejected).
    run = train(PAIRS[:1], epochs=1)
    assert run.weights[0] == pytest.approx([0.05 * d for d in (0.6, 0.6, 0.2, 0.2)], rel=1e-14)
    assert run.losses[0] == pytest.approx(math.log(2), rel=1e-15)


@pytest.mark.parametrize("gap", [-30.0, -1.0, 0.0, 2.0])
def test_the_loss_is_exact_where_the_listing_is_bounded(gap: float) -> None:
    assert loss_of_gap(gap) == pytest.approx(np.logaddexp(0, -gap), rel=1e-15)


@pytest.mark.parametrize("copies, safety, accuracy", [(0, 3.755, 3.339), (1, 0.611, 5.187), (2, -0.222, 5.961), (3, -0.678, 6.418)])
def test_exercise_1_contrary_pairs_turn_the_weight_of_safety(copies: int, safety: float, accuracy: float) -> None:
    weights, _ = contrary(copies)
    assert (round(weights["safety"], 3), round(weights["accuracy"], 3)) == (safety, accuracy)


def test_weights_of_separable_pairs_grow_until_a_penalty_stops_them() -> None:
    free, held = longer([100, 400, 1600, 3200]), longer([100, 400, 1600, 3200], 0.01)
    sizes, losses = [size for _, size, _ in free], [loss for _, _, loss in free]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 2 * sizes[0]
    assert losses == sorted(losses, reverse=True)
    assert held[-1][1] == pytest.approx(held[-2][1], rel=1e-6)
    assert all(correct == len(PAIRS) for correct in train().correct)  # after every epoch, the first included


def test_the_page_says_what_was_measured(both: Result) -> None:
    losses, weights, *_ = both.tables
    assert [row[:3] for row in losses.rows[1:]] == [
        ["50", "0.142", "5/5"],
        ["100", "0.081", "5/5"],
        ["150", "0.057", "5/5"],
        ["200", "0.044", "5/5"],
    ]
    assert [row[1:3] for row in weights.rows] == [
        ["+2.760", "2.75978374"],
        ["+3.339", "3.33906937"],
        ["+1.144", "1.14370286"],
        ["+3.755", "3.75525808"],
        ["+0.000", "0"],
    ]
    assert [(d.printed, d.true) for d in both.differences[:2]] == [("3.75525808", "3.75525851"), ("18.42", "30.00")]
    assert (both.differences[3].printed, both.differences[3].true) == ("0.142", "0.679")
    assert len(both.charts) == 4


def test_each_variant_shows_its_own_numbers_only() -> None:
    assert EXPERIMENT.has_variants
    printed, true = EXPERIMENT.run("printed"), EXPERIMENT.run("true")
    assert [list(r.tables[1].header) for r in (printed, true)] == [["weight", "as printed", "its nine digits"], ["weight", "float64"]]
    assert not printed.differences
    assert not true.differences
    told = str((printed.tables, [s.text for s in printed.sections], [c.header for c in printed.charts]))
    assert "float64" not in told
    assert "λ" not in told
    assert "as printed" not in str((true.tables, [s.text for s in true.sections]))


def test_long_runs_and_the_exercise_by_the_listing_agree_with_float64_to_its_digits() -> None:
    for copies in (1, 3):
        (weights, correct), (wanted, wanted_correct) = contrary_printed(copies), contrary(copies)
        assert correct == wanted_correct
        assert weights == pytest.approx(wanted, abs=2e-5)
    for (n, size, loss), (_, wanted_size, wanted_loss) in zip(longer_printed([25, 800]), longer([25, 800]), strict=True):
        assert size == pytest.approx(wanted_size, rel=1e-4), n
        assert loss == pytest.approx(wanted_loss, rel=1e-3), n


def test_the_docs_show_these_numbers(both: Result) -> None:
    # Without what is rounding noise: the table of the added hundred.
    assert rows_missing("reward-model", [t for t in both.tables if t.title != "One hundred more for every answer"]) == []
    assert reward_model.SHIFT == 100
