"""Laws of the KTO loss: its baseline, its weights, one class alone, and micro-batches."""

from __future__ import annotations

import pytest
import torch

from tests.slow_way import t
from tether.losses.kto import class_balance, kto_baseline, kto_loss


def test_kto_starts_at_half_of_each_weight() -> None:
    loss, m = kto_loss(t(-3, -5), t(-3, -5), torch.tensor([1, 0]), 0.0, beta=0.1, desirable_weight=1.5, undesirable_weight=1.0)
    assert m["loss/per_row"].tolist() == [0.75, 0.5]
    assert float(loss) == 0.625


def test_kto_baseline_clamps_the_mean_not_the_values_and_carries_no_gradient() -> None:
    gaps = t(2.0, -1.0, -4.0).requires_grad_()
    z0, raw = kto_baseline(gaps)
    assert (float(z0), float(raw)) == (0.0, -1.0)
    assert not z0.requires_grad
    with pytest.raises(ValueError, match="at least one"):
        kto_baseline(t())


def test_kto_of_one_class_is_legal_and_leaves_the_other_out() -> None:
    loss, m = kto_loss(t(-1, -2), t(-1, -2), torch.tensor([True, True]), t(0.3).squeeze(), beta=0.1)
    assert torch.isfinite(loss)
    assert "rewards/rejected" not in m


def test_kto_saturates_and_stays_finite() -> None:
    x = t(-900, 900, -900, 900).requires_grad_()
    loss, m = kto_loss(x, torch.zeros(4), torch.tensor([1, 1, 0, 0]), 0.0, beta=1.0)
    assert m["loss/per_row"].tolist() == pytest.approx([1, 0, 0, 1])
    assert bool(torch.isfinite(torch.autograd.grad(loss, x)[0]).all())


def test_kto_micro_batches_add_up() -> None:
    x, y, labels = t(-1, -2, -3, -4, -5), t(-2, -2, -2, -2, -2), torch.tensor([1, 0, 0, 1, 1])
    whole = kto_loss(x, y, labels, 0.2, beta=0.1)[0]
    parts = [kto_loss(x[i], y[i], labels[i], 0.2, beta=0.1, total=5)[0] for i in torch.arange(5).split([1, 2, 2])]
    torch.testing.assert_close(torch.stack(parts).sum(), whole)


def test_class_balance() -> None:
    assert class_balance(10, 40, desirable_weight=4.0) == 1.0
    with pytest.raises(ValueError, match="both"):
        class_balance(3, 0)
