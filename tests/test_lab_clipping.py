"""The lab's clipped objective against the lecture's tables, closed forms and exact gradients."""

from __future__ import annotations

import pytest
import torch

from tests.lab_docs import rows_missing
from tether.lab import clipping
from tether.lab.clipping import DUAL, EPS, LECTURE_ROWS, NO_CLIP, RULES, flat, lecture_rows, moved_gradients, push

# A, ratio: unclipped, clipped, minimum as the lecture prints them, and the slope by the ratio.
LECTURE = {
    (1.0, 0.5): (0.5, 0.8, 0.5, 1.0),
    (1.0, 1.0): (1.0, 1.0, 1.0, 1.0),
    (1.0, 1.5): (1.5, 1.2, 1.2, 0.0),
    (-1.0, 0.5): (-0.5, -0.8, -0.8, 0.0),
    (-1.0, 1.0): (-1.0, -1.0, -1.0, -1.0),
    (-1.0, 1.5): (-1.5, -1.2, -1.5, -1.0),
}


@pytest.mark.parametrize("i", range(6), ids=[f"A={a:+g}, ratio {r}" for a, r in LECTURE_ROWS])
def test_the_lectures_six_rows(i: int) -> None:
    row = lecture_rows()[i]
    found = (row.unclipped, row.clipped, row.smaller, row.gradient)
    assert found == pytest.approx(LECTURE[row.advantage, row.ratio], abs=1e-15)


def test_the_gradient_is_zero_only_beyond_the_band_on_the_side_that_the_advantage_wants() -> None:
    ratios = [0.01, 0.4, 0.79, 0.81, 1.0, 1.19, 1.21, 1.6, 5.0]
    assert flat(1.0, ratios) == [1.21, 1.6, 5.0]
    assert flat(-1.0, ratios) == [0.01, 0.4, 0.79]
    assert flat(-1.0, ratios, dual_clip=DUAL) == [0.01, 0.4, 0.79, 5.0]


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.3, -2.5])
@pytest.mark.parametrize("ratio", [0.3, 0.7, 1.0, 1.1, 2.0, 4.0])
def test_pushes_are_the_closed_forms(ratio: float, advantage: float) -> None:
    held = (advantage > 0 and ratio > 1 + EPS) or (advantage < 0 and ratio < 1 - EPS)
    ppo = 0.0 if held else ratio * advantage
    wanted = {
        "PPO": ppo,
        "PPO, dual clip 3": 0.0 if advantage < 0 and ratio > DUAL else ppo,
        "CISPO": min(ratio, 1 + EPS) * advantage,
        "REINFORCE": advantage,
    }
    assert {name: push(ratio, advantage, **settings).by_logp for name, settings in RULES.items()} == pytest.approx(wanted, abs=1e-14)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_no_clip_is_reinforce_at_ratio_one_and_nowhere_else(advantage: float) -> None:
    assert push(1.0, advantage, **NO_CLIP).by_logp == advantage
    for ratio in (0.2, 0.5, 1.5, 3.0):
        assert push(ratio, advantage, **NO_CLIP).by_logp == pytest.approx(ratio * advantage, rel=1e-14)


def test_without_a_clip_old_samples_give_the_exact_gradient_and_reinforce_does_not() -> None:
    here, moved = moved_gradients(0.0), moved_gradients(0.5)
    for kind in ("no clip", "REINFORCE", "clip 0.2"):
        torch.testing.assert_close(here[kind], here["exact"], rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(moved["no clip"], moved["exact"], rtol=1e-13, atol=1e-15)
    assert (moved["REINFORCE"] - moved["exact"]).norm() > 0.1 * moved["exact"].norm()


def test_the_page_and_the_docs_say_what_was_measured() -> None:
    result = clipping.EXPERIMENT.run("both")
    assert rows_missing("clipping", result.tables) == []
    assert [row[-1] for row in result.tables[0].rows] == ["1", "1", "0", "0", "−1", "−1"]
    assert [row[-2] for row in result.tables[0].rows] == ["0.5", "1.0", "1.2", "−0.8", "−1.0", "−1.5"]
    assert result.differences[0].true == "0.5, 1, 1.5"
    assert len(result.charts) == 4
    assert not clipping.EXPERIMENT.has_variants
