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
from tether.grpo_recipe import PRESETS
from tether.losses.preference import PairLogps, preference_loss
from tether.losses.sheet import POLICY_PRESETS, SHEET, loss_settings
from tether.recipe import RECIPES

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


def of(command: str, **given: object) -> str:
    made = RECIPES[command](model="m", data="d", **given)
    return words_of(explain({"command": command, **made.resolved()}))


def test_policy_gradient_recipes() -> None:
    plain = of("grpo")
    assert "method grpo" in plain
    assert "departs mean over all tokens of the step in place of mean over rows of the row's token mean" in plain
    assert "departs tie to the reference left out" in plain
    assert "8 prompts x 8 completions" in plain
    assert "clip(rho, 1-0.2, 1+0.28)*A)" in of("grpo", eps_high=0.28)
    assert "method dapo" in of("grpo", eps_high=0.28)
    assert "not replaced by others" in of("grpo", eps_high=0.28)
    assert "+ 0.04*k3" in of("grpo", beta=0.04, aggregation="seq-mean-token-mean")
    for name in PRESETS:
        text = of("grpo", preset=name)
        assert words_of(POLICY_PRESETS[name].paper) in text
        assert "departs" not in text, "a preset is what it says it is"
    changed = of("grpo", preset="dapo", beta=0.1, advantage="group_mean")
    assert "departs tie to the reference in the loss" in changed
    assert "departs A = R - mean of the group" in changed
    assert "hardly ever clip" in of("grpo", preset="gspo", eps_high=0.2)
    assert "rho is 1" in plain
    assert "rho is 1" not in of("grpo", updates_per_batch=2)
    assert "w*min" in of("grpo", importance="token_truncate")
    with pytest.raises(UserError, match="unknown preset"):
        explain(recipe(command="grpo", preset="gropo"))


def test_ppo_says_every_number_that_acts() -> None:
    text = of("ppo", beta=0.07, vf_coef=0.3, value_clip=0.4, lam=0.9, missing_end_penalty=1.5, score_clip=5, kl_target=3)
    for words in (
        "-0.07*(log old - log ref)",
        "0.3*0.5*max(",
        "V_old-0.4",
        "A_t = delta_t + 0.9*A_t+1",
        "clipped to +-5",
        "less 1.5 where",
    ):
        assert words in text
    assert "clip(KL/3 - 1" in text
    assert words_of(POLICY_PRESETS["ppo"].paper.split(";")[0]) in text
    assert "no tie to the reference" in of("ppo", beta=0)
    assert "punishes length" in of("ppo", gamma=0.99)


def test_mappings_do_as_well_and_unknown_commands_are_refused() -> None:
    assert explain({"command": "sft"}).startswith("SFT")
    with pytest.raises(UserError, match="no objective"):
        explain({"command": "fetch"})


def test_the_page_of_losses_has_every_row_of_the_sheet() -> None:
    page = (DOCS / "losses.md").read_text()
    for name, row in SHEET.items():
        defaults = ", ".join(f"{key} {value:g}" for key, value in row.defaults.items())
        paper = row.paper + (f" ({row.departs})" if row.departs else "")
        assert f"| `{name}` | `{row.formula}` | {'yes' if row.needs_reference else 'no'} | {defaults} | {row.when} | {paper} |" in page
    for name in POLICY_PRESETS:
        assert f"| `{name}` |" in page


def test_explaining_needs_no_torch() -> None:
    code = "import sys, tether.explain, tether.stats, tether.algorithms.linear_reward; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
