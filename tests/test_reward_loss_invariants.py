"""Laws of the reward model's loss: shifts, heads, rankings, and scores far apart."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.slow_way import quick, slow_derivative, t
from tether.losses.reward_model import reward_model_loss


@given(shift=st.floats(-50, 50))
@quick
def test_adding_a_constant_to_every_score_changes_nothing(shift: float) -> None:
    w, l = t(0.3, -1.2, 2.0), t(0.1, 0.5, -0.4)
    torch.testing.assert_close(reward_model_loss(w + shift, l + shift)[0], reward_model_loss(w, l)[0], rtol=1e-10, atol=1e-12)


def test_a_bias_of_the_head_has_gradient_exactly_zero_until_scores_are_centred() -> None:
    features = torch.randn(8, 2, 3, generator=torch.Generator().manual_seed(1))
    head = torch.nn.Linear(3, 1)
    for center, moves in ((0.0, False), (0.01, True)):
        scores = head(features)[..., 0]
        loss, _ = reward_model_loss(scores[:, 0], scores[:, 1], center_coef=center)
        (grad,) = torch.autograd.grad(loss, head.bias)
        assert bool(abs(float(grad)) > 1e-6) == moves


def test_reward_model_gradients_agree_with_finite_differences() -> None:
    w, l = t(0.3, -1.2, 2.0), t(0.1, 0.5, -0.4)
    options = {"margin": t(0.2, 0, 1), "center_coef": 0.05, "soft_labels": t(1, 0.5, 0.3), "weights": t(1, 0.5, 0.5)}
    x = w.clone().requires_grad_()
    grad = torch.autograd.grad(reward_model_loss(x, l, **options)[0], x)[0]
    torch.testing.assert_close(grad, slow_derivative(lambda v: reward_model_loss(v, l, **options)[0], w), rtol=1e-7, atol=1e-9)


def test_an_ensemble_is_its_heads_each_learning_alone() -> None:
    g = torch.Generator().manual_seed(0)
    w, l = (torch.randn(4, 3, generator=g, dtype=torch.float64) for _ in range(2))
    margin, weights = t(0.1, 0, 0.5, 0), t(1, 0.5, 0.25, 0.25)
    options = {"margin": margin, "weights": weights, "center_coef": 0.02, "total": 7.0}
    loss, metrics = reward_model_loss(w, l, **options)
    alone = torch.stack([reward_model_loss(w[:, h], l[:, h], **options)[0] for h in range(3)])
    torch.testing.assert_close(loss, alone.mean())
    assert metrics["disagreement"].shape == (4,)
    torch.testing.assert_close(metrics["margin"], (w - l).mean(1))


def test_swapping_answers_and_label_changes_nothing() -> None:
    w, l, y, m = t(0.3, -1.2), t(0.1, 0.5), t(0.8, 0.5), t(0.4, 0.0)
    one, other = reward_model_loss(w, l, soft_labels=y, margin=m), reward_model_loss(l, w, soft_labels=1 - y, margin=m)
    torch.testing.assert_close(one[0], other[0])
    assert one[1]["accuracy"].tolist() == other[1]["accuracy"].tolist() == [1.0]  # the tie is left out


def test_each_prompt_of_a_ranking_counts_once() -> None:
    """A prompt of three pairs and one of a single pair, weights 1/3 and 1: the mean over prompts of the mean over pairs."""
    w, l = t(1, 2, 3, 0.5), t(0, 0, 0, 0)
    weights = t(1 / 3, 1 / 3, 1 / 3, 1)
    first, second = reward_model_loss(w[:3], l[:3])[0], reward_model_loss(w[3:], l[3:])[0]
    torch.testing.assert_close(reward_model_loss(w, l, weights=weights)[0], (first + second) / 2)
    torch.testing.assert_close(reward_model_loss(w, l, weights=weights, total=2)[0], (first + second) / 2)


def test_the_reward_loss_does_not_overflow() -> None:
    w = torch.tensor([-900.0, 900.0], requires_grad=True)
    loss, _ = reward_model_loss(w, torch.tensor([0.0, 0.0]))
    assert float(loss) == 450.0
    assert torch.autograd.grad(loss, w)[0].tolist() == [-0.5, 0.0]
