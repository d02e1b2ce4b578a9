"""glibc's generator, and the three listings to the last digit that they print."""

from __future__ import annotations

import numpy as np
import pytest

from tether.lab import as_printed
from tether.lab.glibc_rand import LARGEST, GlibcRand


def digits(values: object, pattern: str = ".9g") -> list[str]:
    return [format(v, pattern) for v in values]  # type: ignore[attr-defined]


# rand -------------------------------------------------------------------------------------------------------------------------------

FIRST_TEN = [71876166, 708592740, 1483128881, 907283241, 442951012, 537146758, 1366999021, 1854614940, 647800535, 53523743]


def test_the_first_thousand_numbers_of_seed_42() -> None:
    rand = GlibcRand(42)
    assert [rand() for _ in range(10)] == FIRST_TEN
    assert sum(rand() for _ in range(990)) == 1044899158977


# The second column: the sum of the next 5,000 numbers, printed by a C program.
@pytest.mark.parametrize(
    "seed, first, then",
    [
        (0, 1804289383, 5357944323017),
        (1, 1804289383, 5357944323017),
        (42, 71876166, 5387837065483),
        (2**31, 1336741213, 5391173198597),
        (3000000000, 2058147116, 5359784145542),
        (2**32 - 1, 254925627, 5353470185121),
    ],
)
def test_every_seed_including_those_that_are_negative_as_signed_numbers(seed: int, first: int, then: int) -> None:
    rand = GlibcRand(seed)
    assert (rand(), sum(rand() for _ in range(5000))) == (first, then)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_c_would_wrap_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match="unsigned 32-bit"):
        GlibcRand(seed)


def test_uniform_numbers_are_float32_and_can_be_one() -> None:
    rand, same = GlibcRand(42), GlibcRand(42)
    for _ in range(100):
        assert rand.uniform() == np.float32(same()) / np.float32(2**31)
    assert np.float32(LARGEST) / np.float32(LARGEST) == 1
    assert np.float32(LARGEST - 63) / np.float32(LARGEST) == 1  # rounded up before the division

    class One(GlibcRand):
        def __call__(self) -> int:
            return LARGEST

    assert as_printed.draw(One(1), [np.float32(0.25)] * 4) == 3  # no running sum passes 1: the last action


# Listing 161 ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch, loss", [(50, "0.142"), (100, "0.081"), (150, "0.057"), (200, "0.044")])
def test_listing_161_prints_its_losses(epoch: int, loss: str) -> None:
    at = as_printed.reward_model()[epoch - 1]
    assert (format(at.loss, ".3f"), at.correct) == (loss, 5)


def test_listing_161_prints_its_weights() -> None:
    history = as_printed.reward_model()
    assert digits(history[-1].weights) == ["2.75978374", "3.33906937", "1.14370286", "3.75525808"]
    assert digits(history[-1].weights, "+.3f") == ["+2.760", "+3.339", "+1.144", "+3.755"]
    assert all(epoch.bias == 0 for epoch in history)
    assert format(history[0].loss, ".6f") == "0.679168"


# Listing 162 ------------------------------------------------------------------------------------------------------------------------

PPO_ROWS = {
    2: ("0.157 0.627 0.038 0.178", "1.52"),
    4: ("0.045 0.855 0.005 0.095", "1.17"),
    6: ("0.008 0.958 0.000 0.034", "1.06"),
    8: ("0.001 0.989 0.000 0.010", "1.02"),
    10: ("0.000 0.997 0.000 0.002", "1.00"),
}


@pytest.mark.parametrize("step", PPO_ROWS)
def test_listing_162_prints_its_rows(step: int) -> None:
    steps = as_printed.ppo().steps
    largest = max(s.largest_ratio for s in steps[step - 2 : step])
    assert (" ".join(digits(steps[step - 1].probs, ".3f")), format(largest, ".2f")) == PPO_ROWS[step]


def test_listing_162_counts_68_of_160_and_both_ends_of_its_ratio() -> None:
    run = as_printed.ppo()
    assert [s.below + s.above for s in run.steps] == [5, 4, 5, 6, 8, 8, 8, 8, 8, 8]
    assert sum(s.below + s.above for s in run.steps) == sum(s.binding for s in run.steps) == 68
    assert [s.above for s in run.steps] == [2, 1, 0, 0, 0, 0, 0, 0, 0, 0]  # from the third step on all are on the low side
    assert digits((s.smallest_ratio for s in run.steps), ".3f") == [
        "0.612", "0.546", "0.490", "0.443", "0.407", "0.383", "0.368", "0.361", "0.357", "0.355",
    ]  # fmt: skip
    assert digits(run.logits) == ["-7.33904839", "1.45094979", "-11.6168251", "-4.53900576"]


def test_listing_162_with_one_inner_step_has_nothing_to_clip() -> None:
    run = as_printed.ppo(inner=1)
    assert sum(s.below + s.above for s in run.steps) == 0
    assert digits(run.steps[-1].probs, ".3f") == ["0.113", "0.704", "0.018", "0.164"]


# Listing 163 ------------------------------------------------------------------------------------------------------------------------

GRPO_ROWS = {
    5: ("0.21 0.42 0.18 0.20", "3.28", "3.65", "3.27647495", "3.64601064"),
    10: ("0.14 0.60 0.10 0.16", "3.86", "5.11", "3.86079431", "5.11339998"),
    15: ("0.09 0.73 0.06 0.11", "4.24", "4.56", "4.24403095", "4.55604887"),
    20: ("0.08 0.79 0.05 0.08", "4.39", "4.04", "4.39416027", "4.04466915"),
}


@pytest.mark.parametrize("step", GRPO_ROWS)
def test_listing_163_prints_its_rows(step: int) -> None:
    s = as_printed.grpo().steps[step - 1]
    found = (" ".join(digits(s.probs, ".2f")), f"{s.expected:.2f}", f"{s.group:.2f}", f"{s.expected:.9g}", f"{s.group:.9g}")
    assert found == GRPO_ROWS[step]


def test_listing_163_to_nine_digits() -> None:
    run = as_printed.grpo()
    assert digits(run.steps[-1].probs) == ["0.0832206458", "0.785516381", "0.046825856", "0.0844371095"]
    assert digits(run.logits) == ["-0.521924436", "1.99871027", "-0.977538943", "-0.387967557"]


@pytest.mark.parametrize(
    "changed, printed",
    [
        ({"group_size": 2}, "3.07/3.65 3.84/4.20 4.16/3.64 4.08/4.89"),
        ({"group_size": 32}, "3.25/3.26 3.97/4.30 4.45/4.70 4.68/4.64"),
        ({"divide": False}, "3.50/3.65 4.37/5.11 4.55/5.22 4.55/4.54"),
        ({"beta": 0.0}, "3.28/3.65 3.86/5.11 4.26/4.56 4.43/4.04"),
    ],
)
def test_listing_163_changed_as_its_exercises_ask(changed: dict[str, float], printed: str) -> None:
    steps = as_printed.grpo(**changed).steps  # type: ignore[arg-type]
    assert " ".join(f"{steps[k].expected:.2f}/{steps[k].group:.2f}" for k in (4, 9, 14, 19)) == printed


def test_every_number_stays_float32() -> None:
    assert type(as_printed.reward_model(epochs=1)[0].loss) is np.float32
    assert type(as_printed.ppo(outer=1).steps[0].probs[0]) is np.float32
    step = as_printed.grpo(steps=2).steps[1]
    assert {type(v) for v in (*step.probs, step.expected, step.group)} == {np.float32}
