"""Every case of the golden file: values, gradients, metrics, in float64 and float32, with rubbish behind the mask.

The file is chosen by TETHER_CASES_GOLDEN (default: the copy in tests/cases); every case in it is run.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.golden_variants import CASES, GOLDEN, Batch, Out, advantages_of, compute, flat, gradient, policy
from tether.losses.policy_gradient import mismatch_weights, policy_loss
from tether.losses.sft import sft_loss

DTYPES = {"float64": torch.float64, "float32": torch.float32}
FILLERS = [math.nan, math.inf, -math.inf, 1e30]


def metrics_at_the_files_own_zeros(case: dict[str, Any], dtype: torch.dtype) -> Out:
    """A row of equal rewards has advantage 0, for us exactly. Where the file's arithmetic left a residue of some 1e-62 instead, it
    counts the row as A > 0 in `clip_ratio/*`; there the metrics are compared at the file's advantages, residue included."""
    values = torch.tensor(case["expected"]["advantages"], dtype=torch.float64)
    return policy(Batch(case["batch"], dtype, None), case["params"], values)["metrics"]


def has_residue(case: dict[str, Any]) -> bool:
    values = torch.tensor(case["expected"].get("advantages", [0.0]), dtype=torch.float64)
    return "metrics" in case["expected"] and bool(((values != 0) & (values.abs() < 1e-30)).any())


def assert_matches(got: Any, expected: Any, tolerance: dict[str, float], where: str) -> None:
    if isinstance(expected, dict):
        for name, value in expected.items():
            assert_matches(got[name], value, tolerance, f"{where}.{name}")
    elif isinstance(expected, bool):
        assert got is expected, where
    else:
        ours = torch.as_tensor(got, dtype=torch.float64) if not isinstance(got, Tensor) else got.detach().double()
        theirs = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(ours, theirs, rtol=tolerance["rtol"], atol=tolerance["atol"], msg=lambda m: f"{where}: {m}")


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=[c["id"] for c in CASES])
def test_golden_value_gradient_and_metrics(case: dict[str, Any], precision: str) -> None:
    got = compute(case, DTYPES[precision])
    if has_residue(case):
        got["metrics"] = metrics_at_the_files_own_zeros(case, DTYPES[precision])
    assert_matches(got, case["expected"], GOLDEN["meta"]["tolerance"][precision], case["id"])
    for name, value in got.items():
        if isinstance(value, Tensor):
            assert value.dtype in (DTYPES[precision], torch.float64 if case["variant"] == "overlong" else DTYPES[precision]), name


@pytest.mark.parametrize("fill", FILLERS, ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c["batch"]], ids=[c["id"] for c in CASES if c["batch"]])
def test_what_stands_behind_the_mask_changes_no_bit(case: dict[str, Any], fill: float) -> None:
    for dtype in DTYPES.values():
        assert_same_bits(compute(case, dtype), compute(case, dtype, fill), case["id"])


def assert_same_bits(one: Any, other: Any, where: str) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same_bits(one[name], other[name], f"{where}.{name}")
    elif isinstance(one, Tensor):
        assert torch.equal(one, other), where
    else:
        assert one == other, where


@pytest.mark.parametrize("case", [c for c in CASES if c["variant"] == "sft_accum"], ids=lambda c: c["id"])
def test_the_average_of_micro_batch_averages_is_not_the_loss(case: dict[str, Any]) -> None:
    got = compute(case, torch.float64)
    assert abs(float(got["loss"]) - case["expected"]["wrong_mean_of_microbatch_means"]) > 1e-6


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c["batch"] and "grad_policy_logps" in c["expected"] and c["variant"] not in ("kto", "kl_in_loss")],
    ids=lambda c: c["id"],
)
def test_micro_batches_add_up_to_the_step(case: dict[str, Any]) -> None:
    """One row at a time, dividing by the step's totals: the same loss, gradient and shares."""
    whole, params = Batch(case["batch"], torch.float64, None), case["params"]
    mask = whole["mask"].bool()
    every_row = params["aggregation"] == "seq-mean-token-sum-norm"
    totals = {"total_tokens": int(mask.sum()), "total_rows": len(mask) if every_row else int(mask.any(1).sum())}
    logp, summed = whole.leaf("policy_logps"), torch.zeros((), dtype=torch.float64)
    values = None if case["variant"] == "sft" else advantages_of(whole, params)
    names = ("surrogate", "eps_low", "eps_high", "dual_clip", "cispo_lower", "kl_kind", "kl_is_weight")
    for i in range(len(mask)):
        options = {"mode": params["aggregation"], "norm_constant": params.get("norm_constant"), **totals}
        if values is None:
            tokens, row = flat(logp[i : i + 1], mask[i : i + 1])
            summed = summed + sft_loss(tokens, row=row, n_rows=1, **options)
            continue
        weights = None
        if "mismatch" in params:
            bounds = {name: params[name] for name in ("c_min", "c_max") if name in params}
            weights = mismatch_weights(whole["old_logps"], whole["sampler_logps"], mask, params["mismatch"], **bounds)[i : i + 1]
        loss, _ = policy_loss(
            logp[i : i + 1],
            whole["old_logps"][i : i + 1],
            values[i : i + 1],
            mask[i : i + 1],
            weights=weights,
            ref_logp=whole["ref_logps"][i : i + 1],
            kl_coef=params.get("kl_loss_coef", 0.0),
            **{name: params[name] for name in names if name in params},
            **options,
        )
        summed = summed + loss
    tolerance = GOLDEN["meta"]["tolerance"]["float64"]
    assert_matches(summed, case["expected"]["loss"], tolerance, case["id"])
    assert_matches(gradient(summed, logp), case["expected"]["grad_policy_logps"], tolerance, case["id"])
