"""Laws of the losses on pairs: what must not change anything, what must be exactly so, and what bad input must come to."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.loss_pairs import EVERY_LOSS, LOG2, finite, loss_of, pairs_of, settings_for, some_pairs
from tests.slow_way import quick, slow_derivative, t
from tether.errors import UserError
from tether.losses.preference import PREFERENCE_LOSSES, PairLogps, log1mexp, preference_loss
from tether.losses.sheet import LOSS_ALIASES, NEEDS_REFERENCE, SHEET, resolve_loss


@pytest.mark.parametrize(
    "name", sorted(set(EVERY_LOSS) & NEEDS_REFERENCE - {"ipo_avg", "dpo_norm", "dpop", "dpo_nll_seq", "dpo_nll_token"})
)
@given(shift=finite)
@quick
def test_a_constant_per_pair_changes_nothing(name: str, shift: float) -> None:
    p = some_pairs()
    both = pairs_of(p.chosen + shift, p.rejected + shift, p.ref_chosen, p.ref_rejected)
    ref = pairs_of(p.chosen, p.rejected, p.ref_chosen + shift, p.ref_rejected + shift)
    plain = loss_of(pairs_of(p.chosen, p.rejected, p.ref_chosen, p.ref_rejected), name)
    torch.testing.assert_close(loss_of(both, name), plain, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(loss_of(ref, name), plain, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", sorted(NEEDS_REFERENCE & set(EVERY_LOSS)))
def test_swapping_the_answers_negates_the_margin(name: str) -> None:
    p = some_pairs()
    swapped = PairLogps(p.rejected, p.chosen, p.ref_rejected, p.ref_chosen, p.n_rejected, p.n_chosen)
    one = preference_loss(p, name, **settings_for(name))[1]
    other = preference_loss(swapped, name, **settings_for(name))[1]
    torch.testing.assert_close(one["rewards/margins"], -other["rewards/margins"])


@pytest.mark.parametrize(
    "name, expected",
    [
        ("dpo", LOG2),
        ("cdpo", LOG2),
        ("robust_dpo", LOG2),
        ("dpo_norm", LOG2),
        ("dpop", LOG2),
        ("hinge", 1.0),
        ("ipo_sum", 25.0),
        ("ipo_avg", 25.0),
    ],
)
def test_the_loss_where_policy_and_reference_agree(name: str, expected: float) -> None:
    p = some_pairs()
    same = PairLogps(p.chosen, p.rejected, p.chosen, p.rejected, p.n_chosen, p.n_rejected)
    loss, metrics = preference_loss(same, name, **settings_for(name))
    assert float(loss) == pytest.approx(expected, abs=1e-14)
    assert metrics["rewards/accuracies"].tolist() == [0.0] * 5  # strict: a tie counts as wrong
    assert metrics["displacement/chosen"].tolist() == [0.0] * 5


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_gradients_agree_with_finite_differences(name: str) -> None:
    p = some_pairs(grad=True)
    loss = loss_of(p, name)
    grads = torch.autograd.grad(loss, (p.chosen, p.rejected))
    c, r = p.chosen.detach(), p.rejected.detach()

    def at(chosen: Tensor, rejected: Tensor) -> Tensor:
        return loss_of(PairLogps(chosen, rejected, p.ref_chosen, p.ref_rejected, p.n_chosen, p.n_rejected), name)

    torch.testing.assert_close(grads[0], slow_derivative(lambda x: at(x, r), c), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(grads[1], slow_derivative(lambda x: at(c, x), r), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", EVERY_LOSS)
@pytest.mark.parametrize("split", [[1, 4], [2, 3], [1, 1, 1, 1, 1]])
def test_micro_batches_of_pairs_add_up(name: str, split: list[int]) -> None:
    whole = some_pairs(grad=True)
    expected, metrics = preference_loss(whole, name, **settings_for(name))
    parts, rows = [], []
    for at in torch.arange(5).split(split):
        f = [getattr(whole, n)[at] for n in ("chosen", "rejected", "ref_chosen", "ref_rejected", "n_chosen", "n_rejected")]
        loss, m = preference_loss(PairLogps(*f), name, **settings_for(name), total_pairs=5, total_chosen_tokens=float(whole.n_chosen.sum()))
        parts.append(loss)
        rows.append(m["loss/per_pair"])
    summed = torch.stack(parts).sum()
    torch.testing.assert_close(summed, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat(rows), metrics["loss/per_pair"])
    torch.testing.assert_close(torch.cat(rows).mean(), expected)  # per-row values average to the loss
    for leaf in (whole.chosen, whole.rejected):
        a, b = (torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in (summed, expected))
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_losses_stay_finite_far_from_the_reference(name: str) -> None:
    for gap in (-900.0, 900.0):
        c = torch.tensor([-901.0 + max(gap, 0)], requires_grad=True)
        r = torch.tensor([-901.0 - min(gap, 0)], requires_grad=True)
        loss = loss_of(pairs_of(c, r, torch.tensor([-450.0]), torch.tensor([-450.0])), name)
        grads = torch.autograd.grad(loss, (c, r))
        assert all(bool(torch.isfinite(x).all()) for x in (loss, *grads))


@pytest.mark.parametrize("name", EVERY_LOSS)
def test_half_precision_inputs_are_computed_in_float32(name: str) -> None:
    p = some_pairs()
    halves = [getattr(p, n).bfloat16() for n in ("chosen", "rejected", "ref_chosen", "ref_rejected")]
    narrow = PairLogps(*halves, p.n_chosen, p.n_rejected)
    wide = PairLogps(*(x.float() for x in halves), p.n_chosen, p.n_rejected)
    assert loss_of(narrow, name).dtype == torch.float32
    assert torch.equal(loss_of(narrow, name), loss_of(wide, name))


@pytest.mark.parametrize(
    "beta, margin, expected", [(0.01, 0.021, 0.682702), (0.1, 0.21, 0.593650), (0.5, 1.05, 0.300058), (1, 2.1, 0.115520)]
)
def test_the_quiz_of_the_falling_loser(beta: float, margin: float, expected: float) -> None:
    """Log-ratios +0.1 and -2.0: d = 2.1, of which 2.0/2.1 = 95.2 % come from pushing the loser down."""
    loss, m = preference_loss(pairs_of(t(-9.9), t(-12.0), t(-10.0), t(-10.0)), "dpo", beta=beta)
    assert float(loss) == pytest.approx(expected, abs=5e-7)
    assert float(m["rewards/margins"]) == pytest.approx(margin)
    up, down = float(m["displacement/chosen"]), -float(m["displacement/rejected"])
    assert down / (up + down) == pytest.approx(0.952, abs=5e-4)


def test_label_smoothing_in_dpo_is_cdpo_and_zero_is_dpo() -> None:
    p = some_pairs()
    assert torch.equal(loss_of(p, "dpo", label_smoothing=0.1), loss_of(p, "cdpo", label_smoothing=0.1))
    for name in ("cdpo", "robust_dpo"):
        torch.testing.assert_close(loss_of(p, name, label_smoothing=0.0), loss_of(p, "dpo"))


def test_robust_dpo_is_unbiased_under_flips_and_cdpo_shrinks_by_the_square() -> None:
    """At d = 0, labels flipped with probability e: the mean gradient is DPO's for robust and (1-2e)^2 of it for cDPO."""
    e = 0.2

    def slope(name: str, flipped: bool, **changes: float) -> float:
        c = t(-2.0).requires_grad_()
        p = pairs_of(t(-2.0), c, t(-2.0), t(-2.0)) if flipped else pairs_of(c, t(-2.0), t(-2.0), t(-2.0))
        return float(torch.autograd.grad(loss_of(p, name, **changes), c)[0])

    clean = slope("dpo", False)
    noisy = {n: (1 - e) * slope(n, False, label_smoothing=e) + e * slope(n, True, label_smoothing=e) for n in ("robust_dpo", "cdpo")}
    assert clean == pytest.approx(-0.05)
    assert noisy["robust_dpo"] == pytest.approx(clean)
    assert noisy["cdpo"] == pytest.approx((1 - 2 * e) ** 2 * clean)


def test_cdpo_is_least_where_the_label_is_believed_as_much_as_it_deserves() -> None:
    d = math.log(0.9 / 0.1) / 0.1  # s(0.1 d) = 0.9
    c = t(d - 5).requires_grad_()
    loss = loss_of(pairs_of(c, t(-5.0), t(0.0), t(0.0)), "cdpo", label_smoothing=0.1)
    assert float(torch.autograd.grad(loss, c)[0]) == pytest.approx(0, abs=1e-12)
    assert loss.item() == pytest.approx(-0.9 * math.log(0.9) - 0.1 * math.log(0.1))


def test_gamma_of_simpo_stands_outside_beta() -> None:
    p = pairs_of(t(-4.0), t(-6.0), None, None)  # averages -1 and -2
    assert float(loss_of(p, "simpo", beta=2.0, gamma=1.0)) == pytest.approx(math.log1p(math.exp(-(2 * 1 - 1))))


def test_orpo_at_certainty_is_clamped_and_counted() -> None:
    c = torch.tensor([0.0, -4.0], requires_grad=True)
    loss, metrics = preference_loss(pairs_of(c, torch.tensor([-6.0, -6.0]), None, None), "orpo", lambda_or=0.1)
    assert metrics["clamped"].tolist() == [1.0, 0.0]
    assert bool(torch.isfinite(torch.autograd.grad(loss, c)[0]).all())


def test_orpo_probability_ratios_by_hand() -> None:
    """P_w = 1/2, P_l = 1/4: odds 1 and 1/3, log odds difference log 3, s = 3/4."""
    p = pairs_of(t(math.log(0.5)), t(math.log(0.25)), None, None, torch.tensor([1]), torch.tensor([1]))
    loss, metrics = preference_loss(p, "orpo", lambda_or=0.5)
    assert float(metrics["log_odds_chosen"]) == pytest.approx(math.log(3))
    assert float(loss) == pytest.approx(math.log(2) - 0.5 * math.log(0.75))


@given(a=st.floats(-700, -1e-12))
@quick
def test_log1mexp_keeps_its_digits(a: float) -> None:
    assert float(log1mexp(t(a))) == pytest.approx(math.log1p(-math.exp(a)) if a < -1 else math.log(-math.expm1(a)), rel=1e-13)


@pytest.mark.parametrize(
    "name, bad, words",
    [
        ("hinge", {"label_smoothing": 0.1}, "no place for label_smoothing"),
        ("ipo_avg", {"label_smoothing": 0.1}, "no place for label_smoothing"),
        ("dpo", {"nll_coef": 1.0}, "used by slic, dpo_nll_seq"),
        ("dpo", {"gamma": 1.0}, "used by simpo"),
        ("robust_dpo", {"label_smoothing": 0.5}, "must lie in"),
        ("dpo", {"beta": 0.0}, "beta must be above 0"),
    ],
)
def test_settings_that_would_be_ignored_or_mean_nothing_are_refused(name: str, bad: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        preference_loss(some_pairs(), name, **bad)


def test_a_loss_with_a_reference_refuses_to_do_without() -> None:
    p = some_pairs()
    bare = pairs_of(p.chosen, p.rejected, None, None)
    for name in EVERY_LOSS:
        if name in NEEDS_REFERENCE:
            with pytest.raises(ValueError, match="compares with a reference"):
                loss_of(bare, name)
        else:
            assert torch.isfinite(loss_of(bare, name))


def test_an_empty_answer_is_an_error_not_a_number() -> None:
    with pytest.raises(ValueError, match="pair 1 has no trained token in its rejected answer"):
        PairLogps(t(-1, -1), t(-1, 0), None, None, torch.tensor([1, 1]), torch.tensor([1, 0]))


def test_identical_answers_cost_log_two_and_pull_nowhere() -> None:
    logp = t(-3.0).requires_grad_()
    loss = loss_of(pairs_of(logp, logp, t(-2.0), t(-2.0)), "dpo")
    assert loss.item() == pytest.approx(LOG2)
    assert float(torch.autograd.grad(loss, logp)[0]) == 0.0


def test_names_and_the_sheet_agree() -> None:
    assert set(PREFERENCE_LOSSES) == set(SHEET)
    assert resolve_loss("sigmoid") == "dpo"
    assert set(LOSS_ALIASES.values()) <= set(SHEET)
    with pytest.raises(UserError, match="three papers"):
        resolve_loss("rpo")
    with pytest.raises(UserError, match="Did you mean"):
        resolve_loss("simp")
    for name, row in PREFERENCE_LOSSES.items():
        assert (name in NEEDS_REFERENCE) == row.score.__name__.startswith("log_ratio")
