"""What `explain` prints is true: the formula with its numbers evaluates to the loss, and the papers and departures are named."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tether.errors import UserError
from tether.explain import explain, filled, formula_of
from tether.losses.preference import PairLogps, preference_loss
from tether.losses.sheet import POLICY_PRESETS, SHEET, loss_settings, markdown_rows

DOCS = Path(__file__).parents[1] / "docs"
FIELDS = [
    *("command", "loss_type", "beta", "label_smoothing", "gamma", "delta", "nll_coef", "lambda_dpop", "lambda_or"),
    *("desirable_weight", "undesirable_weight", "center_coef", "margin", "heads", "lcb", "train_on", "reference"),
    *("learning_rate", "batch_size"),
]


def recipe(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**dict.fromkeys(FIELDS), "learning_rate": 1e-6, "batch_size": 8, **given})


def words_of(text: str) -> str:
    """The text without its folds."""
    return " ".join(text.split())


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def evaluate(formula: str) -> float:
    """A filled-in formula as arithmetic, for one pair with c = -3, r = -5, c0 = -2.5, r0 = -4, n_c = 4, n_r = 3."""
    c, r, c0, r0, n_c, n_r = -3.0, -5.0, -2.5, -4.0, 4.0, 3.0
    code = formula.replace("^", "**").replace("[", "(").replace("]", ")")
    code = re.sub(r"log s\(", "log_s(", code)
    names = {"c": c, "r": r, "c0": c0, "r0": r0, "n_c": n_c, "n_r": n_r, "max": max}
    names |= {"d": (c - c0) - (r - r0), "dn": (c - c0) / n_c - (r - r0) / n_r, "NLL_tokens": -c / n_c}
    names |= {"log_s": lambda z: math.log(sigmoid(z)), "logodds": lambda a: a - math.log(1 - math.exp(a))}
    return float(eval(code, {"__builtins__": {}}, names))


@pytest.mark.parametrize("smoothing", [None, 0.2])
@pytest.mark.parametrize("name", sorted(SHEET))
def test_the_printed_formula_is_the_loss(name: str, smoothing: float | None) -> None:
    row = SHEET[name]
    if smoothing is not None and "label_smoothing" not in row.uses:
        return
    values = loss_settings(name, {"label_smoothing": smoothing})
    pair = PairLogps(*(torch.tensor([x], dtype=torch.float64) for x in (-3.0, -5.0, -2.5, -4.0, 4.0, 3.0)))
    loss, _ = preference_loss(pair, name, **values)
    formula = filled(formula_of(row, values.get("label_smoothing", 0.0)), values)
    assert evaluate(formula) == pytest.approx(loss.item(), rel=1e-12)
    text = explain(recipe(command="dpo", loss_type=name, label_smoothing=smoothing))
    assert f"mean over pairs of  {formula}" in text
    assert not re.search(r"\b(beta|gamma|delta|nll_coef|lambda_\w+)\b", text.split("minimise")[1].splitlines()[0])
    paper = SHEET["cdpo"].paper if name == "dpo" and smoothing else row.paper  # smoothed DPO is cDPO
    assert paper.split(",")[0] in words_of(text)


@pytest.mark.parametrize(
    "given, words",
    [
        ({"loss_type": "dpo", "label_smoothing": 0.1}, "this is cDPO"),
        ({"loss_type": "cdpo", "label_smoothing": 0.0}, "this is DPO"),
        ({"loss_type": "robust_dpo", "label_smoothing": 0.0}, "this is DPO"),
        ({"loss_type": "sigmoid"}, "loss_type dpo"),
        ({"loss_type": "dpop", "lambda_dpop": 0.0}, "with lambda_dpop 0 this is DPO"),
        ({"loss_type": "dpo_nll_seq", "nll_coef": 0.0}, "with nll_coef 0 this is DPO"),
        ({"loss_type": "cpo", "nll_coef": 0.0}, "this is DPO with a uniform reference"),
        ({"loss_type": "ipo_avg"}, "1/(2*0.1) = 5, per token"),
        ({"loss_type": "ipo_sum"}, "eq. 17 as printed"),
        ({"loss_type": "simpo", "beta": 2.5, "gamma": 1.375}, "as gamma_beta_ratio it is 0.55"),
        ({"loss_type": "simpo", "beta": 0.1}, "hardly acts"),
        ({"loss_type": "simpo", "label_smoothing": 0.1}, "label_smoothing 0.1 is not in the paper"),
        ({"loss_type": "dpo_norm", "beta": 0.1}, "far below the paper's 5"),
        ({"loss_type": "dpo", "reference": "other/model"}, "tied to other/model"),
        ({"loss_type": "dpo_reference_free"}, "no reference"),
        ({"loss_type": "hinge"}, "the loss is 1.0000"),
        ({"loss_type": "kto", "desirable_weight": 1.5}, "good: 1.5*(1 - s(0.1*(h - z0)))   bad: 1*(1 - s(0.1*(z0 - h)))"),
        ({"loss_type": "kto"}, "arXiv:2402.01306"),
    ],
)
def test_dpo_says_what_the_settings_amount_to(given: dict[str, Any], words: str) -> None:
    assert words_of(words) in words_of(explain(recipe(command="dpo", **given)))


def test_a_foreign_reference_is_not_said_to_start_at_zero() -> None:
    assert "at step 0 the policy is the reference" not in explain(recipe(command="dpo", loss_type="dpo", reference="other"))


def test_sft_and_reward() -> None:
    assert "every assistant turn" in explain(recipe(command="sft", train_on="assistant"))
    assert "the prompt too" in explain(recipe(command="sft", train_on="all"))
    plain = explain(recipe(command="reward", margin=False))
    assert "-log s(r_w - r_l)" in plain
    assert "a constant added to every score changes nothing" in plain
    full = explain(recipe(command="reward", margin=True, center_coef=0.01, heads=4, lcb=0.5))
    assert "over 4 heads of  -log s(r_w - r_l - m) + 0.01*(r_w + r_l)^2" in full
    assert "mean of the heads - 0.5 * their standard deviation" in full
    linear = explain(recipe(command="reward", features=["helpfulness", "safety"], feature_l2=0.01))
    assert "r = bias + w_1*helpfulness + w_2*safety" in linear
    assert "0.01/2*|w|^2" in linear


def test_policy_gradient_recipes() -> None:
    grpo = recipe(command="grpo", eps_low=0.2, eps_high=0.2, beta=0.0, scale_rewards="group")
    assert "departing from its paper by mean over all tokens of the step in place of per-row means, no KL term" in explain(grpo)
    assert "clip(rho, 1-0.2, 1+0.28)*A)" in explain(recipe(command="grpo", eps_low=0.2, eps_high=0.28))
    assert "the loss of dapo" in explain(recipe(command="grpo", eps_low=0.2, eps_high=0.28))
    assert "the loss of grpo" in explain(recipe(command="grpo", beta=0.04, aggregation="seq-mean-token-mean"))
    for name, row in POLICY_PRESETS.items():
        text = words_of(explain(recipe(command="ppo", preset=name)))
        assert row.paper in text
    with pytest.raises(UserError, match="unknown preset"):
        explain(recipe(command="ppo", preset="gropo"))


def test_mappings_do_as_well_and_unknown_commands_are_refused() -> None:
    assert explain({"command": "sft"}).startswith("SFT")
    with pytest.raises(UserError, match="no objective"):
        explain({"command": "fetch"})


def test_the_page_of_losses_has_every_row_of_the_sheet() -> None:
    page = (DOCS / "losses.md").read_text()
    for row in markdown_rows():
        assert row in page
    for name in POLICY_PRESETS:
        assert f"| `{name}` |" in page


def test_explaining_needs_no_torch() -> None:
    code = "import sys, tether.explain, tether.stats, tether.algorithms.linear_reward; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
