"""The lab's GRPO: print beside the published objective, group sizes against theory, and what the division is for."""

from __future__ import annotations

import math

import pytest
import torch

from tests.lab_docs import rows_missing
from tether.advantage import group_mean, rloo
from tether.lab import group_runs
from tether.lab.bandit import vector
from tether.lab.experiment import Result
from tether.lab.group_baseline import MEAN, VARIANCE, many, pull, spread
from tether.lab.group_runs import BETA, NORM, REF_LOGP, REWARDS, learn, listing, penalty_push
from tether.lab.grpo import EXPERIMENT, SIZES

TRUE = {
    "old": (
        ["0.20 0.40 0.18 0.22", "0.15 0.54 0.10 0.21", "0.10 0.68 0.07 0.15", "0.07 0.80 0.05 0.08"],
        ["3.24/3.65", "3.73/5.11", "4.13/4.39", "4.43/4.04"],
        [-0.654595, 1.982100, -0.954079, -0.373426],
    ),
    "reference": (
        ["0.22 0.35 0.20 0.24", "0.19 0.37 0.19 0.26", "0.20 0.37 0.19 0.24", "0.19 0.35 0.19 0.26"],
        ["3.08/3.98", "3.17/3.28", "3.16/3.89", "3.13/3.04"],
        [-0.217408, 0.366607, -0.239679, 0.090480],
    ),
}


@pytest.fixture(scope="module")
def both() -> Result:
    return EXPERIMENT.run("both")


@pytest.mark.parametrize("ratio_to", TRUE)
def test_true_gradient_on_the_listings_draws(ratio_to: str) -> None:
    probs, rewards, logits = TRUE[ratio_to]
    run = learn(ratio_to)
    at = [run.at(n) for n in (5, 10, 15, 20)]
    assert [" ".join(f"{p:.2f}" for p in s.probs) for s in at] == probs
    assert [f"{s.expected:.2f}/{s.group:.2f}" for s in at] == rewards
    assert [round(z, 6) for z in run.logits] == logits


# exp / group at step 20, printed by the listing compiled with other group sizes
@pytest.mark.parametrize(
    "size, printed",
    [
        (2, "4.07803822 / 4.89287853"),
        (4, "4.3866353 / 4.96744728"),
        (6, "4.39416027 / 4.04466915"),
        (8, "4.59674454 / 4.73412991"),
        (16, "4.66435862 / 4.62613535"),
        (32, "4.67527819 / 4.64398766"),
        (64, "4.67903423 / 4.58888149"),
    ],
)
def test_print_at_every_group_size(size: int, printed: str) -> None:
    assert listing(group_size=size).digits[20] == printed


@pytest.mark.parametrize("p", [0.01, 0.1, 0.25, 0.6])
def test_the_gradient_of_the_penalty_has_the_sign_of_the_distance(p: float) -> None:
    assert penalty_push(p, 0.25) == pytest.approx(-BETA * (1 - 0.25 / p), abs=1e-14)


def test_step_fifteen_differs_from_print_by_one_draw() -> None:
    gap = listing().at(15).group - learn().at(15).group
    assert gap == pytest.approx(1 / 6, abs=1e-6)  # one draw of six, worth one more


@pytest.mark.parametrize("size", SIZES)
def test_variance_of_a_group_baseline_is_that_of_theory(size: int) -> None:
    s = spread(size)
    for measured, theory in zip((s.with_self, s.without, s.centred, s.left_out), s.theory, strict=True):
        error = (measured.high - measured.low) / 2 / 1.96
        assert abs(measured.value - theory) < 3.5 * error


def test_the_variance_of_one_reward_is_that_of_the_actions_and_the_noise() -> None:
    assert pytest.approx(2.75) == MEAN
    assert pytest.approx(2.1875 + 1 / 12, rel=1e-15) == VARIANCE


def test_with_self_and_without_differ_by_a_factor_alone() -> None:
    rewards = vector([2.1, 5.3, 0.9, 2.7, 3.2])
    one_group = torch.zeros(5)
    torch.testing.assert_close(rloo(rewards, one_group), group_mean(rewards, one_group) * 5 / 4, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("gap", [1e-3, 0.5, 4.0])
def test_two_draws_get_plus_and_minus_one_however_close(gap: float) -> None:
    assert NORM(vector([2.0 + gap, 2.0]), torch.zeros(2)).tolist() == pytest.approx([1.0, -1.0], rel=1e-9)


def test_larger_groups_end_closer_together_and_smaller_ones_take_more_steps() -> None:
    two, thirty_two = many(20, group_size=2), many(20, group_size=32)
    assert float(two.std()) > 5 * float(thirty_two.std())
    assert float(two.mean()) < float(thirty_two.mean())
    assert float(many(96, group_size=2).mean()) > float(many(6, group_size=32).mean()) + 1  # 192 draws each


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_with_the_deviation_a_scale_changes_nothing_and_without_it_learning_fails(scale: float) -> None:
    torch.testing.assert_close(many(20, scale=scale), many(20), rtol=1e-9, atol=0)
    plain, scaled = many(40, divide=False), many(40, divide=False, scale=scale)
    assert float(plain.min()) > 4.5
    assert float(scaled.min()) < 3.5  # in hundredths none has learnt; in hundreds some stay with the first action they met
    if scale < 1:
        assert float(scaled.max()) < 3


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.95])
def test_without_the_deviation_a_prompt_pulls_with_the_true_gradient(p: float) -> None:
    assert pull(p, 8, divide=False) == pytest.approx(p * (1 - p) * 7 / 8, rel=1e-12)


def test_with_the_deviation_nearly_solved_prompts_pull_more() -> None:
    relative = {size: pull(0.95, size, True) / pull(0.5, size, True) for size in (8, 32, 64)}
    true = 4 * 0.95 * 0.05
    assert true < relative[8] < relative[32] < relative[64] < 2 * math.sqrt(0.95 * 0.05)
    assert relative[64] > 2 * true


def test_every_policy_starts_uniform_and_is_described_before_its_update() -> None:
    assert learn().at(1).probs == pytest.approx((0.25,) * 4)
    assert learn().at(1).expected == pytest.approx(float(REWARDS.mean()))
    assert REF_LOGP.exp().tolist() == [0.25] * 4


def test_the_page_says_what_was_measured(both: Result) -> None:
    steps, ends, best, changed, *_ = both.tables
    assert [list(row[2:]) for row in steps.rows[:4]] == [
        ["0.21 0.42 0.18 0.20", "3.28", "3.65", "3.27647495 / 3.64601064"],
        ["0.14 0.60 0.10 0.16", "3.86", "5.11", "3.86079431 / 5.11339998"],
        ["0.09 0.73 0.06 0.11", "4.24", "4.56", "4.24403095 / 4.55604887"],
        ["0.08 0.79 0.05 0.08", "4.39", "4.04", "4.39416027 / 4.04466915"],
    ]
    assert ends.rows[0][1] == "0.0832206458 0.785516381 0.046825856 0.0844371095"
    assert ends.rows[0][2] == "−0.521924436 1.99871027 −0.977538943 −0.387967557"
    assert [list(row[2:]) for row in best.rows] == [
        ["48.613706", "4.861371", "1.386294", "5.000000"],
        ["8.634615", "4.317308", "1.276445", "4.955530"],
        ["3.798888", "3.798888", "0.791208", "4.590096"],
        ["1.659712", "3.319424", "0.276527", "3.872479"],
    ]
    printed = {row[0]: " ".join(row[2:]) for row in changed.rows if row[1] == "as printed"}
    assert printed["G = 2"] == "3.07/3.65 3.84/4.20 4.16/3.64 4.08/4.89"
    assert printed["G = 32"] == "3.25/3.26 3.97/4.30 4.45/4.70 4.68/4.64"
    assert printed["no division by the deviation"] == "3.50/3.65 4.37/5.11 4.55/5.22 4.55/4.54"
    assert printed["no penalty, β = 0"] == "3.28/3.65 3.86/5.11 4.26/4.56 4.43/4.04"
    assert [(d.printed, d.true) for d in both.differences[:4]] == [("3.14", "1"), ("4.39", "3.13"), ("4.39", "4.43"), ("−0.266", "+0.434")]
    assert "2.6 times" in both.differences[0].why
    assert len(both.charts) == 5


def test_each_variant_shows_its_own_numbers_only() -> None:
    assert EXPERIMENT.has_variants
    printed, true = EXPERIMENT.run("printed"), EXPERIMENT.run("true")
    assert [row[0] for row in printed.tables[1].rows] == ["as printed"]
    assert [row[0] for row in true.tables[1].rows] == ["ratio to old", "ratio to reference"]
    assert not printed.differences
    assert not true.differences
    assert [t.title for t in printed.tables] == ["Twenty steps, six draws each", "Where they end", "The same program, one thing changed"]
    assert {row[1] for row in printed.tables[2].rows} == {"as printed"}
    assert "objective" not in str((printed.tables, [s.text for s in printed.sections]))  # no line learns by its gradient


def test_no_two_lines_of_a_picture_have_one_name(both: Result) -> None:
    for chart in both.charts:
        assert len(set(chart.header)) == len(chart.header)


def test_the_ratio_to_the_reference_stays_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_runs, "STEPS", 200)
    ends = [learn("reference").at(n).expected for n in (20, 50, 100, 200)]
    assert all(abs(end - 3.13) < 0.15 for end in ends)


def test_the_docs_show_these_numbers(both: Result) -> None:
    assert rows_missing("grpo", both.tables) == []
