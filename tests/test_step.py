"""The update: what it does to numbers that can be worked by hand, and what it refuses to do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.tiny import some_examples, tiny_model
from tether.engine import Engine
from tether.errors import UserError
from tether.packing import pack
from tether.step import PATIENCE, Diverged, Update


@dataclass
class Settings:
    learning_rate: float = 0.1
    lr_scheduler: str = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1e9


def parameters(**values: Any) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.tensor(value)) for name, value in values.items()}


def pull(update: Update, **gradients: Any) -> None:
    for name, value in gradients.items():
        update.parameters[name].grad = torch.tensor(value)


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_two_adamw_steps_by_hand() -> None:
    """AdamW of one matrix entry w = 1, gradients 0.5 then -0.25, rate 0.1, decay 0.01, against the formulas in float64."""
    update = Update(parameters(w=[[1.0]]), Settings(weight_decay=0.01), 10)
    w, m, v = 1.0, 0.0, 0.0
    for t, g in ((1, 0.5), (2, -0.25)):
        pull(update, w=[[g]])
        update.apply()
        w -= 0.1 * 0.01 * w
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w -= 0.1 * (m / (1 - 0.9**t)) / (math.sqrt(v / (1 - 0.999**t)) + 1e-8)
        assert update.parameters["w"].item() == pytest.approx(w, rel=1e-6)


def test_matrices_decay_and_vectors_do_not() -> None:
    update = Update(parameters(matrix=[[1.0, 2.0]], norm=[1.0, 2.0], bias=3.0), Settings(weight_decay=0.5), 10)
    pull(update, matrix=[[0.0, 0.0]], norm=[0.0, 0.0], bias=0.0)
    update.apply()
    assert update.parameters["matrix"].tolist() == [[pytest.approx(0.95), pytest.approx(1.9)]]
    assert update.parameters["norm"].tolist() == [1.0, 2.0]
    assert update.parameters["bias"].item() == 3.0


def test_clipping_scales_to_the_limit_and_reports_the_norm_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradient (3, 4, 12) has norm 13; clipped to 1.3 it is a tenth of that."""
    update = Update(parameters(a=[0.0, 0.0], b=[[0.0]]), Settings(max_grad_norm=1.3), 10)
    seen: dict[str, Any] = {}
    monkeypatch.setattr(update.optimizer, "step", lambda: seen.update({n: p.grad.clone() for n, p in update.parameters.items()}))
    pull(update, a=[3.0, 4.0], b=[[12.0]])
    assert update.apply()["grad_norm"] == pytest.approx(13.0)
    assert seen["a"].tolist() == pytest.approx([0.3, 0.4])
    assert seen["b"].item() == pytest.approx(1.2)
    pull(update, a=[0.3, 0.4], b=[[0.0]])
    assert update.apply()["grad_norm"] == pytest.approx(0.5)
    assert seen["a"].tolist() == pytest.approx([0.3, 0.4]), "a short gradient is left as it is"


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ("cosine", [0.5, 1.0, 1.0, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4, 0.0, 0.0]),
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_the_schedule_by_hand(shape: str, expected: list[float]) -> None:
    """6 steps, 2 of warm-up; what stands behind the end is 0, or the peak."""
    update = Update(parameters(w=[1.0]), Settings(learning_rate=1.0, lr_scheduler=shape, warmup_steps=2), 6)
    assert [update.learning_rate(s) for s in range(8)] == pytest.approx(expected, abs=1e-12)
    rates = []
    for _ in range(6):
        pull(update, w=[1.0])
        rates.append(update.apply()["learning_rate"])
    assert rates == pytest.approx(expected[:6], abs=1e-12)
    assert all(r > 0 for r in rates), "no step of the run is wasted at rate 0"


def test_gradients_are_cleared_by_an_applied_and_by_a_refused_step() -> None:
    update = Update(parameters(w=[1.0]), Settings(), 10)
    for loss in (0.5, math.nan):
        pull(update, w=[1.0])
        update.apply(loss)
        assert update.parameters["w"].grad is None


def test_an_applied_step_is_seen_by_whoever_keeps_copies_of_the_weights() -> None:
    """Kept bfloat16 copies are told by a tensor's version that it has moved; a fused step alone would not count as one."""
    update = Update(parameters(w=[1.0], unused=[1.0]), Settings(), 10)
    versions = {n: p._version for n, p in update.parameters.items()}
    pull(update, w=[1.0])
    update.apply()
    assert update.parameters["w"]._version > versions["w"]
    assert update.parameters["unused"]._version == versions["unused"]
    moved = update.parameters["w"]._version
    pull(update, w=[math.nan])
    update.apply()
    assert moved == update.parameters["w"]._version


# -- B05: what is not finite is not applied ----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", ["nan loss", "inf loss", "nan gradient", "inf gradient", "overflowing norm", "minus inf gradient"])
def test_a_step_that_is_not_finite_is_not_applied_and_says_so(bad: str) -> None:
    update = Update(parameters(v=[1.0, 2.0], w=[1.0]), Settings(lr_scheduler="linear", weight_decay=0.1), 6)
    pull(update, v=[0.1, 0.1], w=[0.1])
    assert update.apply(0.5)["skipped"] == 0
    before = {n: p.detach().clone() for n, p in update.parameters.items()}
    state = {k: t.clone() for k, t in update.state_dict()["tensors"].items()}

    loss = {"nan loss": math.nan, "inf loss": math.inf}.get(bad, 0.5)
    entry = {"nan gradient": math.nan, "inf gradient": math.inf, "overflowing norm": 3e38, "minus inf gradient": -math.inf}.get(bad, 0.1)
    pull(update, v=[entry, entry], w=[0.1])
    out = update.apply(loss)
    assert out["skipped"] == 1
    assert out["skip_reason"]
    assert not math.isfinite(out["grad_norm"]) or not math.isfinite(loss), "the log shows what was not finite"
    assert all(torch.equal(p, before[n]) for n, p in update.parameters.items())
    assert all(torch.equal(t, state[k]) for k, t in update.state_dict()["tensors"].items())
    if "gradient" in bad:
        assert "(v)" in out["skip_reason"]

    pull(update, v=[0.1, 0.1], w=[0.1])
    assert update.apply(0.5)["learning_rate"] == pytest.approx(0.1 * 5 / 6), "the schedule did not move"


def test_a_nan_at_step_3_of_6_leaves_finite_weights_and_a_nan_in_the_log() -> None:
    model = tiny_model()
    engine = Engine(model, precision="fp32")
    update = Update(dict(model.named_parameters()), Settings(learning_rate=1e-3), 6)
    packed = pack(some_examples(3))
    log = []
    for step in range(6):
        loss = -engine.logprobs(packed).mean() * (math.inf if step == 2 else 1.0)
        loss = loss - loss if step == 2 else loss  # inf - inf
        loss.backward()
        log.append({"loss": float(loss.detach()), **update.apply(loss.detach())})
    assert [row["skipped"] for row in log] == [0, 0, 1, 0, 0, 0]
    assert math.isnan(log[2]["loss"])
    assert log[5]["loss"] < log[0]["loss"]
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_five_refusals_in_a_row_stop_the_run_and_four_do_not() -> None:
    update = Update(parameters(w=[1.0]), Settings(), 100)
    for _ in range(3):
        for _ in range(PATIENCE - 1):
            pull(update, w=[math.nan])
            update.apply()
        pull(update, w=[1.0])
        update.apply()
    for _ in range(PATIENCE - 1):
        update.apply(math.nan)
    with pytest.raises(Diverged, match="5 steps in a row") as caught:
        update.apply(math.nan)
    assert isinstance(caught.value, UserError)
    assert caught.value.remedy
    assert torch.isfinite(update.parameters["w"]).all()


def test_a_step_without_a_trained_token_is_skipped_and_never_stops_a_run() -> None:
    update = Update(parameters(w=[[1.0]]), Settings(weight_decay=0.5), 10)
    for _ in range(2 * PATIENCE):
        out = update.apply(0.0)
        assert (out["skipped"], out["skip_reason"]) == (1, "no token is trained in this step")
    assert update.parameters["w"].item() == 1.0
    assert update.applied == 0


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    update = Update(parameters(used=[1.0], unused=[1.0]), Settings(), 10)
    pull(update, used=[1.0])
    update.apply()
    assert update.parameters["used"].item() < 1.0 == update.parameters["unused"].item()


# -- B36: small steps in half precision --------------------------------------------------------------------------------


def test_half_precision_weights_are_warned_about_and_move_all_the_same() -> None:
    """At rate 1e-6 bfloat16 weights near 1 cannot take one step (half an ulp is 2e-3); through the float32 copy they gather."""
    weights = nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    with pytest.warns(UserWarning, match="half precision"):
        update = Update({"w": weights}, Settings(learning_rate=1e-6), 10000)
    for _ in range(20):
        weights.grad = torch.ones(100, dtype=torch.bfloat16)
        update.apply()
    assert torch.equal(weights, torch.ones(100, dtype=torch.bfloat16))
    assert update.masters["w"].detach().mean() == pytest.approx(1 - 20e-6, abs=2e-6)
    for _ in range(4200):
        weights.grad = torch.ones(100, dtype=torch.bfloat16)
        update.apply()
    assert (weights < 1).all()


def test_float32_weights_all_move_at_a_rate_of_1e_6(recwarn: pytest.WarningsRecorder) -> None:
    model = tiny_model()
    engine = Engine(model, precision="bf16")
    update = Update(dict(model.named_parameters()), Settings(learning_rate=1e-6), 20)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    packed = pack(some_examples(3))
    for _ in range(20):
        (-engine.logprobs(packed).mean()).backward()
        update.apply()
    moved = torch.cat([(p != before[n]).flatten() for n, p in model.named_parameters() if "embed" not in n])
    assert moved.float().mean() > 0.95
    assert not [w for w in recwarn if "half precision" in str(w.message)]


# -- state -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.filterwarnings("ignore:.*half precision"))]
)
def test_a_restored_update_takes_the_same_steps_bit_for_bit(dtype: torch.dtype) -> None:
    def made() -> Update:
        generator = torch.Generator().manual_seed(0)
        named = {n: nn.Parameter(torch.randn(3, 4, generator=generator).to(dtype)) for n in ("a", "b", "unused")}
        return Update(named, Settings(learning_rate=0.01, lr_scheduler="cosine", warmup_steps=3, weight_decay=0.1), 10)

    def step(update: Update, s: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(s)
        for name in ("a", "b"):
            update.parameters[name].grad = torch.randn(3, 4, generator=generator).to(dtype)
        return update.apply(math.nan if s in (3, 4) else 0.1)

    straight, first = made(), made()
    whole = [step(straight, s) for s in range(10)]
    for s in range(4):
        step(first, s)
    second = made()
    with torch.no_grad():
        for name, parameter in second.parameters.items():
            parameter.copy_(first.parameters[name])
    second.load_state_dict(first.state_dict())
    assert [step(second, s) for s in range(4, 10)] == whole[4:]
    for name, parameter in straight.parameters.items():
        assert torch.equal(parameter, second.parameters[name])
    ours, theirs = straight.state_dict(), second.state_dict()
    assert ours["scalars"] == theirs["scalars"]
    assert all(torch.equal(t, theirs["tensors"][k]) for k, t in ours["tensors"].items())


def test_state_of_other_parameters_is_refused_by_name() -> None:
    update = Update(parameters(a=[1.0], b=[[1.0]]), Settings(), 10)
    pull(update, a=[1.0], b=[[1.0]])
    update.apply()
    state = update.state_dict()
    with pytest.raises(UserError, match="trained b, which is not"):
        Update(parameters(a=[1.0]), Settings(), 10).load_state_dict(state)
    with pytest.raises(UserError, match="c was not trained then"):
        Update(parameters(a=[1.0], b=[[1.0]], c=[1.0]), Settings(), 10).load_state_dict(state)
    with pytest.raises(UserError, match=r"state of b is \[1, 1\], here it is \[2, 1\]"):
        Update(parameters(a=[1.0], b=[[1.0], [2.0]]), Settings(), 10).load_state_dict(state)


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        Update({}, Settings(), 10)
