"""Small numbers worked by hand: every case of the file named by TETHER_CASES_RL_NUMBERS, recognised by its fields."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tether import advantage
from tether.losses.kl import kl_penalty
from tether.losses.preference import PairLogps, preference_loss
from tether.losses.sft import sft_loss

FILE = Path(os.environ.get("TETHER_CASES_RL_NUMBERS") or Path(__file__).parent / "cases/rl_numbers.json")
CASES = json.loads(FILE.read_text())["cases"]


def close(got: Any, expected: Any) -> None:
    got = got.detach().double() if isinstance(got, Tensor) else torch.tensor(got, dtype=torch.float64)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def having(*fields: str) -> list[Any]:
    """The cases whose own fields, or those of their rows or groups, include these."""
    found = []
    for case in CASES:
        inner = (case.get("rows") or case.get("groups") or [{}])[0]
        if set(fields) <= {*case, *inner}:
            found.append(pytest.param(case, id=case["name"]))
    return found


def test_every_case_is_recognised() -> None:
    known = [having("token_nll"), having("mean_centred"), having("k1"), having("policy_chosen"), having("lam")]
    assert sum(map(len, known)) == len(CASES)


@pytest.mark.parametrize("case", having("token_nll"))
def test_token_mean_over_an_update(case: dict[str, Any]) -> None:
    rows = [torch.tensor(nll, dtype=torch.float64) for nll in case["token_nll"]]
    total = sum(map(len, rows))
    leaf = (-torch.cat(rows)).requires_grad_()
    whole = sft_loss(leaf)
    close(whole, case["expected_loss"])
    expected = torch.autograd.grad(whole, leaf)[0]
    for size in [n for n in range(1, len(rows) + 1) if len(rows) % n == 0]:
        parts = leaf.split([len(r) for r in rows])
        loss = torch.stack([sft_loss(torch.cat(parts[i : i + size]), total_tokens=total) for i in range(0, len(rows), size)]).sum()
        close(loss, case["expected_loss"])
        torch.testing.assert_close(torch.autograd.grad(loss, leaf, retain_graph=True)[0], expected)
    for name, wrong in case["wrong_values"].items():
        assert abs(float(whole.detach()) - wrong) > 1e-9, name


@pytest.mark.parametrize("case", having("mean_centred"))
def test_group_advantages(case: dict[str, Any]) -> None:
    eps = 1e-6
    for group in case["groups"]:
        rewards = torch.tensor(group["rewards"], dtype=torch.float64)
        ids = torch.zeros(len(rewards), dtype=torch.long)
        close(advantage.group_mean(rewards, ids), group["mean_centred"])
        for kind in ("sample", "population"):
            expected = group[f"scaled_{kind}_std"]
            got = advantage.group_norm(rewards, ids, kind, 0.0)
            torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)
            if not any(expected):
                assert got.tolist() == [0.0] * len(rewards)  # exactly
                continue
            std = float(rewards.std(correction=1 if kind == "sample" else 0))
            close(advantage.group_norm(rewards, ids, kind, eps), [x * std / (std + eps) for x in got.tolist()])


@pytest.mark.parametrize("case", having("mean_centred"))
def test_groups_side_by_side_do_not_mix(case: dict[str, Any]) -> None:
    rewards = torch.tensor([r for g in case["groups"] for r in g["rewards"]], dtype=torch.float64)
    ids = torch.tensor([i for i, g in enumerate(case["groups"]) for _ in g["rewards"]])
    close(advantage.group_mean(rewards, ids), [a for g in case["groups"] for a in g["mean_centred"]])


@pytest.mark.parametrize("case", having("k1"))
def test_kl_estimates(case: dict[str, Any]) -> None:
    for row in case["rows"]:
        logp, ref = (torch.tensor([row[name]], dtype=torch.float64) for name in ("logp", "ref_logp"))
        for kind in ("k1", "k2", "k3"):
            close(kl_penalty(logp, ref, torch.ones(1), kind), [row[kind]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", having("policy_chosen"))
def test_dpo(case: dict[str, Any], dtype: torch.dtype) -> None:
    tolerance = {"rel": 1e-9, "abs": 1e-9} if dtype == torch.float64 else {"rel": 1e-5, "abs": 1e-6}
    for row in case["rows"]:
        names = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")
        scores = [torch.tensor([row[name]], dtype=dtype, requires_grad=name.startswith("policy")) for name in names]
        loss, m = preference_loss(PairLogps(*scores, torch.ones(1), torch.ones(1)), "dpo", beta=row["beta"])
        grads = torch.autograd.grad(loss, scores[:2])
        assert all(math.isfinite(float(g)) for g in grads)
        assert loss.item() == pytest.approx(row["loss"], **tolerance)
        assert m["rewards/margins"].item() == pytest.approx(row["margin"], **tolerance)
        assert m["rewards/chosen"].item() == pytest.approx(row["reward_chosen"], **tolerance)
        assert m["rewards/rejected"].item() == pytest.approx(row["reward_rejected"], **tolerance)
        assert m["rewards/accuracies"].item() == row["accuracy"]  # strict: a tie counts as 0


@pytest.mark.parametrize("rubbish", [None, math.nan, math.inf, -1e30], ids=str)
@pytest.mark.parametrize("case", having("lam"))
def test_gae(case: dict[str, Any], rubbish: float | None) -> None:
    mask = torch.tensor([case["mask"]]).bool()
    rewards, values = (torch.tensor([case[name]], dtype=torch.float64) for name in ("rewards", "values"))
    if rubbish is not None:
        rewards, values = (torch.where(mask, x, rubbish) for x in (rewards, values))
    advantages, returns = advantage.gae(rewards, values, mask, case["gamma"], case["lam"])
    close(advantages[0], case["advantages"])
    close(returns[0], case["returns"])
