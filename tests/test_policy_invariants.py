"""Laws of masks, advantages and policy gradients: what must not show, what must be exactly so, what degenerate input comes to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.slow_way import quick, slow_derivative, t
from tether import advantage, masked
from tether.losses import kl
from tether.losses.policy_gradient import Clip, clipped_objective, mismatch_weights, policy_loss
from tether.losses.sft import sft_loss
from tether.losses.value import explained_variance, value_loss

# --- masks and totals ---------------------------------------------------------------------------------------------------------


def test_a_row_without_active_tokens_adds_nothing_and_has_no_nan_gradient() -> None:
    x = torch.tensor([[1.0, 2.0], [math.nan, math.inf]], requires_grad=True)
    mask = torch.tensor([[1, 1], [0, 0]])
    for mode in masked.MODES:
        value = masked.reduce(x, mask, mode, norm_constant=2)
        assert float(value) == {"seq-mean-token-sum": 3.0, "seq-mean-token-sum-norm": 0.75}.get(mode, 1.5)
        grad = torch.autograd.grad(value, x)[0]
        assert grad[1].tolist() == [0.0, 0.0]


def test_a_step_without_active_tokens_is_exactly_zero() -> None:
    x = torch.full((2, 3), math.nan, requires_grad=True)
    for mode in masked.MODES:
        value = masked.reduce(x, torch.zeros(2, 3), mode, norm_constant=4)
        assert float(value) == 0.0
        assert torch.autograd.grad(value, x)[0].abs().sum() == 0


@given(data=st.data())
@quick
def test_splits_permutations_and_padding_do_not_show(data: st.DataObject) -> None:
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    rows, width = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 5))
    x, mask = torch.randn(rows, width, generator=g, dtype=torch.float64), torch.rand(rows, width, generator=g) < 0.6
    if not mask.any():
        return
    mode = data.draw(st.sampled_from(sorted(masked.MODES)))
    total_rows = rows if mode.endswith("norm") else int(mask.any(1).sum())
    totals = {"total_tokens": int(mask.sum()), "total_rows": total_rows, "norm_constant": 7}
    whole = masked.reduce(x, mask, mode, norm_constant=7)
    cut = data.draw(st.integers(1, rows - 1))
    parts = [masked.reduce(x[i], mask[i], mode, **totals) for i in torch.arange(rows).split([cut, rows - cut])]
    order = torch.randperm(rows, generator=g)
    wider = torch.cat([x, torch.full((rows, 2), math.nan)], 1), torch.cat([mask, torch.zeros(rows, 2, dtype=torch.bool)], 1)
    close = {"rtol": 1e-12, "atol": 1e-14}
    torch.testing.assert_close(torch.stack(parts).sum(), whole, **close)
    torch.testing.assert_close(masked.reduce(x[order], mask[order], mode, norm_constant=7), whole, **close)
    torch.testing.assert_close(masked.reduce(*wider, mode, norm_constant=7), whole, **close)


def test_cut_off_rows_do_not_weaken_the_others() -> None:
    """Lengths 2, 3, 5 and 30, the last one masked: the gradient is that of the first three alone."""
    g = torch.Generator().manual_seed(0)
    lengths = [2, 3, 5, 30]
    logp = (-torch.rand(4, 30, generator=g)).requires_grad_()
    mask = torch.tensor([[t < n for t in range(30)] for n in lengths])
    masked_out = mask & torch.tensor([[True], [True], [True], [False]])
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        a = torch.autograd.grad(masked.reduce(-logp, masked_out, mode), logp)[0][:3]
        b = torch.autograd.grad(masked.reduce(-logp[:3], mask[:3], mode), logp)[0][:3]
        assert torch.equal(a, b)


def test_row_and_token_means_agree_for_equal_lengths() -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(masked.reduce(x, torch.ones(3, 4)), masked.reduce(x, torch.ones(3, 4), "seq-mean-token-mean"))


def test_totals_and_modes_that_mean_nothing_are_refused() -> None:
    x = torch.ones(1, 1)
    with pytest.raises(ValueError, match="unknown aggregation"):
        masked.reduce(x, x, "mean")
    with pytest.raises(ValueError, match="norm_constant"):
        masked.reduce(x, x, "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="above 0"):
        masked.reduce(x, x, total_tokens=0)
    with pytest.raises(ValueError, match="pass row"):
        sft_loss(torch.zeros(2), mode="seq-mean-token-mean")


def test_whitening() -> None:
    x, mask = t(1, 2, 3, math.nan), torch.tensor([1, 1, 1, 0])
    out = masked.masked_whiten(x, mask, std_kind="population")
    assert out.tolist() == pytest.approx([-1.2247448622, 0, 1.2247448622, 0], abs=1e-7)
    assert masked.masked_whiten(t(2, 2, 2), torch.ones(3)).tolist() == [0, 0, 0]
    scaled = masked.masked_whiten(t(1, 2, 3), torch.ones(3), shift_mean=False)
    assert (scaled / t(1, 2, 3)).std() < 1e-12  # divided, not shifted
    with pytest.raises(ValueError, match="at least 2"):
        masked.masked_whiten(t(1, 2), torch.tensor([1, 0]))


# --- advantages -----------------------------------------------------------------------------------------------------------------


def group_of(*rewards: float) -> tuple[Tensor, Tensor]:
    return t(*rewards), torch.zeros(len(rewards), dtype=torch.long)


@pytest.mark.parametrize(
    "right, population, sample",
    [
        (1, (2.6458, -0.3780), (2.4749, -0.3536)),
        (2, (1.7321, -0.5774), (1.6202, -0.5401)),
        (3, (1.2910, -0.7746), (1.2076, -0.7246)),
        (4, (1.0000, -1.0000), (0.9354, -0.9354)),
        (5, (0.7746, -1.2910), (0.7246, -1.2076)),
        (6, (0.5774, -1.7321), (0.5401, -1.6202)),
        (7, (0.3780, -2.6458), (0.3536, -2.4749)),
    ],
)
def test_normalised_advantages_of_eight_answers(right: int, population: tuple[float, float], sample: tuple[float, float]) -> None:
    rewards, ids = group_of(*[1.0] * right + [0.0] * (8 - right))
    for kind, expected in (("population", population), ("sample", sample)):
        got = advantage.group_norm(rewards, ids, kind, 0.0)
        assert (float(got[0]), float(got[-1])) == pytest.approx(expected, abs=5e-5)
        # The pair +1.15 / -0.58 that is sometimes printed for eight answers belongs to one right answer of three:
        assert not (abs(float(got[0]) - 1.15) < 0.005 and abs(float(got[-1]) + 0.58) < 0.005)


def test_one_right_answer_of_three() -> None:
    got = advantage.group_norm(*group_of(1, 0, 0), std_kind="sample", std_eps=0.0)
    assert got.tolist() == pytest.approx([2 / math.sqrt(3), -1 / math.sqrt(3), -1 / math.sqrt(3)])


@given(rewards=st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=8), shift=st.floats(-20, 20), scale=st.floats(0.5, 20))
@quick
def test_laws_of_group_advantages(rewards: list[float], shift: float, scale: float) -> None:
    r, ids = group_of(*rewards)
    n = len(rewards)
    centred = advantage.group_mean(r, ids)
    assert abs(float(centred.sum())) < 1e-9
    torch.testing.assert_close(advantage.rloo(r, ids), centred * n / (n - 1), rtol=1e-12, atol=1e-12)
    others = torch.stack([r[i] - (r.sum() - r[i]) / (n - 1) for i in range(n)])  # leave-one-out, the slow obvious way
    torch.testing.assert_close(advantage.rloo(r, ids), others, rtol=1e-9, atol=1e-9)
    for rule in ("group_mean", "rloo"):
        torch.testing.assert_close(advantage.ADVANTAGES[rule](r + shift, ids), advantage.ADVANTAGES[rule](r, ids), rtol=1e-6, atol=1e-6)
    spread = max(rewards) - min(rewards)
    if spread > 1e-2:
        plain = advantage.group_norm(r, ids, std_eps=0.0)
        torch.testing.assert_close(advantage.group_norm(r * scale + shift, ids, std_eps=0.0), plain, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["sample", "population"])
def test_rewards_that_agree_up_to_rounding_give_exact_zeros(kind: str) -> None:
    noise = [0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2]
    for rule in ("group_norm", "batch_std", "reinforce_pp_baseline"):
        assert advantage.ADVANTAGES[rule](*group_of(*noise), std_kind=kind).tolist() == [0.0] * 4
    mixed = torch.cat([t(*noise), t(0, 1)]), torch.tensor([0, 0, 0, 0, 1, 1])
    for rule in ("group_norm", "batch_std", "reinforce_pp_baseline"):
        assert advantage.ADVANTAGES[rule](*mixed, std_kind=kind)[:4].tolist() == [0.0] * 4


def test_unscored_rows_get_zero_and_enter_no_statistic() -> None:
    rewards, ids = t(1, math.nan, 0, math.inf, 5), torch.tensor([0, 0, 0, 0, 1])
    without = t(1, 0, 5), torch.tensor([0, 0, 1])
    for rule in advantage.ADVANTAGES.values():
        got, expected = rule(rewards, ids), rule(*without)
        assert got[[1, 3]].tolist() == [0, 0]
        torch.testing.assert_close(got[[0, 2, 4]], expected)


def test_a_group_of_one_has_no_advantage() -> None:
    for rule in ("group_mean", "group_norm", "batch_std", "rloo"):
        assert advantage.ADVANTAGES[rule](t(3.0), torch.zeros(1)).tolist() == [0.0]


def test_an_unscored_column_is_skipped_not_zero() -> None:
    matrix = t(1, math.nan, math.nan, math.nan).view(2, 2)
    got = advantage.weighted_sum(matrix, t(2.0, 5.0))
    assert float(got[0]) == 2.0
    assert math.isnan(float(got[1]))


def test_gae_at_its_two_ends() -> None:
    g = torch.Generator().manual_seed(0)
    r, v = torch.randn(3, 6, generator=g, dtype=torch.float64), torch.randn(3, 6, generator=g, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()
    adv, ret = advantage.gae(r, v, mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(adv, torch.where(mask, advantage.reward_to_go(r, mask) - v, 0))
    torch.testing.assert_close(ret, advantage.reward_to_go(r, mask))
    adv, _ = advantage.gae(r, v, mask, gamma=0.9, lam=0.0)
    for row in range(3):  # one-step errors, the slow obvious way; holes are skipped
        places = mask[row].nonzero().flatten().tolist()
        for here, following in zip(places, [*places[1:], None], strict=False):
            ahead = 0.9 * v[row, following] if following is not None else 0
            torch.testing.assert_close(adv[row, here], r[row, here] + ahead - v[row, here])


def test_shaped_rewards_sum_to_the_score_less_the_penalty() -> None:
    g = torch.Generator().manual_seed(0)
    old, ref = -torch.rand(2, 5, generator=g, dtype=torch.float64), -torch.rand(2, 5, generator=g, dtype=torch.float64)
    mask, rewards = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]]), t(2.0, -1.0)
    shaped = kl.shaped_rewards(rewards, old, ref, mask, kl_coef=0.1)
    torch.testing.assert_close(shaped.sum(1), kl.penalised_rewards(rewards, old, ref, mask, 0.1))
    assert float(shaped[0, 3] + 0.1 * (old - ref)[0, 3]) == pytest.approx(2.0)  # at the last active token
    with pytest.raises(ValueError, match="finite"):
        kl.shaped_rewards(t(math.nan, 0), old, ref, mask, kl_coef=0.1)


# --- policy gradient ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "a, rho, value, slope",
    [(1, 0.5, 0.5, 1), (1, 1.0, 1.0, 1), (1, 1.5, 1.2, 0), (-1, 0.5, -0.8, 0), (-1, 1.0, -1.0, -1), (-1, 1.5, -1.5, -1)],
)
def test_the_six_cases_of_the_clip(a: float, rho: float, value: float, slope: float) -> None:
    ratio = t(rho).requires_grad_()
    objective = clipped_objective(ratio, t(a), Clip())
    assert float(objective) == pytest.approx(value)
    assert float(torch.autograd.grad(objective.sum(), ratio)[0]) == pytest.approx(slope)


def test_dual_clip_bounds_what_a_bad_action_can_cost() -> None:
    ratio = t(0.5, 1.5, 9.0)
    assert clipped_objective(ratio, t(-1, -1, -1), Clip(dual=3.0)).tolist() == pytest.approx([-0.8, -1.5, -3.0])
    assert clipped_objective(ratio, t(1, 1, 1), Clip(dual=3.0)).tolist() == pytest.approx([0.5, 1.2, 1.2])


def rollout(seed: int = 0, moved: float = 0.3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logp, old, advantages, mask) of five rows with holes."""
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(5, 6, generator=g, dtype=torch.float64)
    logp = (old + moved * torch.randn(5, 6, generator=g, dtype=torch.float64)).requires_grad_()
    mask = torch.rand(5, 6, generator=g) < 0.7
    mask[:, 0] = True
    return logp, old, torch.randn(5, generator=g, dtype=torch.float64), mask


def grad_of(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf)[0]


def test_at_the_first_update_every_surrogate_has_the_gradient_of_reinforce() -> None:
    logp, old, a, mask = rollout(moved=0.0)
    mode = "seq-mean-token-mean"
    expected = grad_of(policy_loss(logp, None, a, mask, surrogate="reinforce", mode=mode)[0], logp)
    for surrogate in ("ppo", "cispo", "gspo_token"):
        loss, metrics = policy_loss(logp, old, a, mask, surrogate=surrogate, mode=mode)
        torch.testing.assert_close(grad_of(loss, logp), expected)
        assert float(metrics["clip_ratio/out_of_band"]) == 0.0
        assert float(metrics["ratio/mean"]) == pytest.approx(1.0)
        assert float(metrics["approx_kl_k1"]) == 0.0
    assert float(policy_loss(logp, old, a, mask, mode=mode)[0]) == pytest.approx(-float(a.mean()))


def test_gspo_and_its_token_form_agree() -> None:
    logp, old, a, mask = rollout()
    mode = "seq-mean-token-mean"
    one, other = (policy_loss(logp, old, a, mask, surrogate=s, mode=mode)[0] for s in ("gspo", "gspo_token"))
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(grad_of(one, logp), grad_of(other, logp))


def test_an_infinite_band_is_importance_weighting() -> None:
    logp, old, a, mask = rollout()
    wide = policy_loss(logp, old, a, mask, eps_low=0.999999, eps_high=1e6)[0]
    plain = masked.reduce(-(masked.select(logp, mask) - masked.select(old, mask)).exp() * a[:, None], mask)
    torch.testing.assert_close(wide, plain)


def test_weights_of_an_engine_that_agrees_are_one() -> None:
    logp, old, a, mask = rollout()
    weights = mismatch_weights(old, old.clone(), mask)
    assert torch.equal(weights, mask.to(weights.dtype))
    torch.testing.assert_close(policy_loss(logp, old, a, mask, weights=weights)[0], policy_loss(logp, old, a, mask)[0])


def test_the_kl_term_is_not_touched_by_the_weights() -> None:
    logp, old, a, mask = rollout()
    ref = old - 0.1
    none = torch.zeros_like(old)
    with_kl = policy_loss(logp, old, a, mask, weights=none, ref_logp=ref, kl_coef=0.5)[0]
    torch.testing.assert_close(with_kl, 0.5 * masked.reduce(kl.kl_penalty(logp, ref, mask, "k3"), mask))


def test_policy_gradients_agree_with_finite_differences() -> None:
    # gspo_token and cispo stop gradients on purpose: their value does not have the gradient that they use.
    for surrogate in ("reinforce", "ppo", "seq_ratio", "gspo"):
        logp, old, a, mask = rollout(seed=3)
        options = {"surrogate": surrogate, "mode": "seq-mean-token-mean", "ref_logp": old - 0.2, "kl_coef": 0.1, "kl_is_weight": True}
        grad = grad_of(policy_loss(logp, old, a, mask, **options)[0], logp)

        def value(x: Tensor, old: Tensor = old, a: Tensor = a, mask: Tensor = mask, options: dict[str, Any] = options) -> Tensor:
            return policy_loss(x, old, a, mask, **options)[0]

        torch.testing.assert_close(grad, slow_derivative(value, logp.detach()), rtol=1e-6, atol=1e-8)


def test_metrics_are_shares_that_add_up_and_padding_does_not_dilute_them() -> None:
    logp, old, a, mask = rollout()
    options = {"ref_logp": old - 0.1, "total_tokens": int(mask.sum())}
    whole = policy_loss(logp, old, a, mask, **options)[1]
    parts = [policy_loss(logp[i], old[i], a[i], mask[i], **options | {"ref_logp": old[i] - 0.1})[1] for i in torch.arange(5).split([2, 3])]
    pad = [torch.cat([x, torch.full((5, 3), math.nan)], 1) for x in (logp, old, old - 0.1)]
    wide = policy_loss(pad[0], pad[1], a, torch.cat([mask, torch.zeros(5, 3, dtype=torch.bool)], 1), ref_logp=pad[2])[1]
    for name, value in whole.items():
        torch.testing.assert_close(parts[0][name] + parts[1][name], value)
        torch.testing.assert_close(wide[name], value)


def test_huge_log_ratios_are_clamped_counted_and_finite() -> None:
    logp = torch.tensor([[-1.0, -900.0]], requires_grad=True)
    loss, metrics = policy_loss(logp, torch.tensor([[-900.0, -1.0]]), torch.tensor([-1.0]), torch.ones(1, 2))
    assert float(metrics["ratio/clamped"]) == 2
    assert bool(torch.isfinite(loss))
    assert bool(torch.isfinite(grad_of(loss, logp)).all())


@pytest.mark.parametrize(
    "options, words",
    [
        ({"surrogate": "gspo"}, "any_mode"),
        ({"kl_coef": 0.1}, "no ref_logp"),
        ({"kl_coef": 0.1, "ref_logp": torch.zeros(1, 1), "kl_kind": "k1"}, "gradient 0 in expectation"),
        ({"eps_low": 1.0}, "eps_low"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"surrogate": "clip"}, "unknown surrogate"),
    ],
)
def test_policy_settings_that_mean_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=words):
        policy_loss(x, x, torch.zeros(1), torch.ones(1, 1), **options)


def test_old_log_probs_are_needed_except_by_reinforce() -> None:
    x = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="needs old_logp"):
        policy_loss(x, None, torch.zeros(1), torch.ones(1, 1))


def test_estimators_are_zero_at_the_reference_and_k3_is_never_negative() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name, rule in kl.KL_ESTIMATORS.items():
        assert float(rule(torch.zeros(()))) == 0, name
    assert bool((kl.k3(x) >= 0).all())
    assert bool(torch.isfinite(kl.k3(t(-900, 900))).all())


def test_the_controller_cannot_reach_zero() -> None:
    with pytest.raises(ValueError, match="could reach 0"):
        kl.AdaptiveKL(0.1, horizon=100).update(0.0, n=500)


def test_the_critic_pays_the_larger_error() -> None:
    v = t(1.0).view(1, 1).requires_grad_()
    loss, metrics = value_loss(v, t(0.0).view(1, 1), t(1.0).view(1, 1), torch.ones(1, 1), value_clip=0.2)
    assert float(loss) == pytest.approx(0.5 * 0.8**2)  # V is right, but moved further than allowed
    assert float(metrics["val/clipfrac"]) == 1.0
    assert float(grad_of(loss, v)) == 0.0


def test_explained_variance() -> None:
    ret, mask = t(1, 2, 3, math.nan), torch.tensor([1, 1, 1, 0])
    assert explained_variance(ret, ret, mask) == 1.0
    assert explained_variance(torch.zeros(4), ret, mask) == pytest.approx(0.0)
    assert explained_variance(ret, torch.ones(4), mask) is None


def test_overlong_bounds_are_checked() -> None:
    with pytest.raises(ValueError, match="cache"):
        advantage.overlong_penalty(3, max_length=10, cache=0)
    assert advantage.overlong_penalty(torch.tensor([80, 90, 101]), 100, 20).tolist() == [0.0, -0.5, -1.0]
