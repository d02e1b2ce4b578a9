"""The transparent reward model: the textbook's digits, the bias that cannot move, weights that can be read, files that are told off."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.textbook import TEXTBOOK_NAMES, TEXTBOOK_PAIRS, textbook
from tether.algorithms.feature_rows import load_feature_pairs
from tether.algorithms.linear_reward import LinearReward, fit, train
from tether.errors import UserError
from tether.losses.reward_model import reward_model_loss
from tether.recipe import RewardRecipe
from tether.run import Run

CHOSEN, REJECTED = ([pair[side] for pair in TEXTBOOK_PAIRS] for side in (0, 1))


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def textbook_rows() -> list[dict[str, Any]]:
    return [
        {"chosen": dict(zip(TEXTBOOK_NAMES, w, strict=True)), "rejected": dict(zip(TEXTBOOK_NAMES, l, strict=True))}
        for w, l in TEXTBOOK_PAIRS
    ]


def run_of(tmp_path: Path, data: str, **given: Any) -> tuple[RewardRecipe, Run]:
    recipe = RewardRecipe(data=data, **{"features": list(TEXTBOOK_NAMES), **given})
    return recipe, Run.create(tmp_path / "run", recipe)


def test_the_textbook_program_to_its_last_digit() -> None:
    model, epochs = textbook()
    assert [f"{w:.9g}" for w in model.weights] == ["2.75978374", "3.33906937", "1.14370286", "3.75525808"]
    assert [f"{epochs[n - 1].loss:.3f}" for n in (50, 100, 150, 200)] == ["0.142", "0.081", "0.057", "0.044"]
    assert [f"{epochs[n - 1].accuracy * 5:.0f}/5" for n in (50, 100, 150, 200)] == ["5/5"] * 4
    assert f"{epochs[0].loss:.6f}" == "0.679168"
    assert model.bias == 0.0


def test_double_precision_gives_the_same_to_six_digits() -> None:
    single, _ = textbook()
    double, epochs = fit(CHOSEN, REJECTED, TEXTBOOK_NAMES, batch_size=1)
    assert double.weights == pytest.approx(single.weights, abs=2e-5)
    assert f"{epochs[-1].loss:.3f}" == "0.044"


@pytest.mark.parametrize("copies, safety, accuracy", [(0, 3.755, 3.339), (1, 0.611, 5.187), (2, -0.222, 5.961), (3, -0.678, 6.418)])
def test_unsafe_winners_turn_the_weight_of_safety_round(copies: int, safety: float, accuracy: float) -> None:
    chosen, rejected = CHOSEN + [(0.8, 0.8, 0.6, 0.1)] * copies, REJECTED + [(0.7, 0.7, 0.6, 0.9)] * copies
    weights = fit(chosen, rejected, TEXTBOOK_NAMES, batch_size=1)[0].named()
    assert (weights["safety"], weights["accuracy"]) == (pytest.approx(safety, abs=5e-4), pytest.approx(accuracy, abs=5e-4))


def test_adding_a_hundred_to_every_score_changes_nothing() -> None:
    plain, before = fit(CHOSEN, REJECTED, TEXTBOOK_NAMES, bias=0.0)
    lifted, after = fit(CHOSEN, REJECTED, TEXTBOOK_NAMES, bias=100.0)
    assert np.array_equal(plain.weights, lifted.weights)
    assert before == after
    assert lifted.bias == 100.0
    assert lifted.score(CHOSEN) == pytest.approx(plain.score(CHOSEN) + 100)


def test_the_bias_has_gradient_exactly_zero() -> None:
    bias = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    w = torch.tensor([0.3, -0.2, 0.5, 1.0], dtype=torch.float64)
    chosen, rejected = (torch.tensor(x, dtype=torch.float64) @ w + bias for x in (CHOSEN, REJECTED))
    loss, _ = reward_model_loss(chosen, rejected)
    assert float(torch.autograd.grad(loss, bias)[0]) == 0.0


def test_a_step_is_the_gradient_of_the_loss() -> None:
    """One full-batch step from 0, against autograd of the reward-model loss with margins and L2 from a non-zero start."""
    margins, l2, rate = [0.1, 0.0, 0.3, 0.0, 0.2], 0.05, 0.1
    first, _ = fit(CHOSEN, REJECTED, TEXTBOOK_NAMES, epochs=1, learning_rate=rate, l2=l2, margins=margins)
    second, _ = fit(CHOSEN, REJECTED, TEXTBOOK_NAMES, epochs=2, learning_rate=rate, l2=l2, margins=margins)
    w = torch.tensor(first.weights, requires_grad=True)
    chosen, rejected = (torch.tensor(x, dtype=torch.float64) @ w for x in (CHOSEN, REJECTED))
    loss = reward_model_loss(chosen, rejected, margin=torch.tensor(margins, dtype=torch.float64))[0] + l2 / 2 * (w @ w)
    (grad,) = torch.autograd.grad(loss, w)
    assert second.weights == pytest.approx((w - rate * grad).detach().numpy())


def test_true_weights_come_back_from_enough_comparisons() -> None:
    rng = np.random.default_rng(0)
    truth = np.array([2.0, -1.0, 0.0])
    a, b = rng.normal(size=(2, 4000, 3))
    first_wins = rng.random(4000) < 1 / (1 + np.exp(-(a - b) @ truth))
    chosen, rejected = np.where(first_wins[:, None], a, b), np.where(first_wins[:, None], b, a)
    model, _ = fit(chosen, rejected, ["good", "bad", "idle"], learning_rate=1.0, epochs=300)
    assert model.weights == pytest.approx(truth, abs=0.15)


def test_without_l2_separable_weights_grow_and_with_it_they_settle() -> None:
    sizes = {
        l2: [np.linalg.norm(fit(CHOSEN, REJECTED, TEXTBOOK_NAMES, epochs=n, l2=l2)[0].weights) for n in (1000, 2000)] for l2 in (0, 0.1)
    }
    assert sizes[0][1] > 1.1 * sizes[0][0]
    assert sizes[0.1][1] == pytest.approx(sizes[0.1][0], rel=1e-6)


def test_a_run_prints_the_textbook_weights_by_name(tmp_path: Path) -> None:
    data = write(tmp_path / "pairs.jsonl", textbook_rows())
    recipe, run = run_of(tmp_path, data, batch_size=1, shuffle=False)
    with run:
        summary = train(recipe, run)
    assert {name: f"{w:+.3f}" for name, w in summary["weights"].items()} == {
        "helpfulness": "+2.760",
        "accuracy": "+3.339",
        "conciseness": "+1.144",
        "safety": "+3.755",
    }
    assert summary["bias"] == 0.0
    metrics = run.metrics()
    assert [f"{metrics[n - 1]['loss']:.3f}" for n in (50, 100, 150, 200)] == ["0.142", "0.081", "0.057", "0.044"]
    assert any(n["kind"] == "separable_pairs" for n in run.notices())
    kept = LinearReward.load(run.folder / "model")
    assert kept.named() == summary["weights"]
    with pytest.raises(UserError, match="holds no"):
        LinearReward.load(tmp_path)


def test_held_out_pairs_come_with_an_interval(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = [
        {"prompt": f"p{i // 2}", "chosen_x": float(max(pair)), "rejected_x": float(min(pair)), "margin": 0.1}
        for i, pair in enumerate(rng.normal(size=(40, 2)))
    ]
    data = write(tmp_path / "pairs.jsonl", rows)
    recipe, run = run_of(tmp_path, data, features=["x"], eval_fraction=0.25)
    with run:
        summary = train(recipe, run)
    held = summary["held_out"]
    assert (held["accuracy"]["value"], held["accuracy"]["n"], summary["pairs"]) == (1.0, 10, 30)
    assert held["accuracy"]["low"] < 1.0
    assert sum(b["n"] for b in held["calibration"]) == 10


def test_a_table_reads_like_the_objects(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([f"{side}_{name}" for side in ("chosen", "rejected") for name in TEXTBOOK_NAMES])
        writer.writerows([*w, *l] for w, l in TEXTBOOK_PAIRS)
    table = load_feature_pairs(str(path), TEXTBOOK_NAMES)
    objects = load_feature_pairs(write(tmp_path / "pairs.jsonl", textbook_rows()), TEXTBOOK_NAMES)
    assert [(p.chosen, p.rejected) for p in table.rows] == [(p.chosen, p.rejected) for p in objects.rows] == list(TEXTBOOK_PAIRS)


@pytest.mark.parametrize(
    "row, kind, words",
    [
        ({"chosen": {"safty": 1.0}, "rejected": {"safety": 0.0}}, "missing_feature", "Did you mean safty?"),
        ({"chosen": {"safety": "high"}, "rejected": {"safety": 0.0}}, "bad_feature", "chosen.safety: 'high' is not a finite number"),
        ({"chosen": {"safety": True}, "rejected": {"safety": 0.0}}, "bad_feature", "True is not a finite number"),
        ({"chosen": {"safety": 1.0}}, "missing_feature", "rejected_safety"),
        ({"chosen": {"safety": 1.0}, "rejected": {"safety": 1.0}}, "same_features", "same features"),
        ({"chosen_safety": 1.0, "rejected_safety": 0.5, "margin": -1}, "bad_margin", "at least 0"),
    ],
)
def test_rows_that_cannot_be_used_are_named_by_line(tmp_path: Path, row: dict[str, Any], kind: str, words: str) -> None:
    data = write(tmp_path / "pairs.jsonl", [{"chosen_safety": 1.0, "rejected_safety": 0.0}, row])
    loaded = load_feature_pairs(data, ["safety"])
    assert len(loaded.rows) == 1
    (problem,) = loaded.problems
    assert problem.kind == kind
    assert words in str(problem)
    assert "pairs.jsonl:2" in str(problem)
    if problem.action == "reject":
        recipe, run = run_of(tmp_path, data, features=["safety"])
        with run, pytest.raises(UserError, match=r"pairs\.jsonl:2"):
            train(recipe, run)


def test_a_runaway_step_is_refused() -> None:
    with pytest.raises(UserError, match="feature_learning_rate"):
        fit([[1e200]], [[-1e200]], ["x"], learning_rate=1e200, l2=1.0)
    with pytest.raises(ValueError, match="rows of 2 features"):
        fit([[1.0]], [[0.0]], ["x", "y"])
