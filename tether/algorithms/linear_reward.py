"""The transparent reward model: a linear Bradley-Terry model over named features. Free of torch.

    r(f) = bias + sum_k w_k f_k        P(a beats b) = s(r(f_a) - r(f_b))        minimise the mean of -log s(r_w - r_l - margin)

Every learned number has a name, so what people valued can be read off. Why the bias cannot move:

    r_w - r_l = (bias + w.f_w) - (bias + w.f_l) = w.(f_w - f_l)

The bias is in both scores and cancels, so the loss is the same function for every bias and its derivative with respect to it is
(p - 1)(1 - 1) = 0 exactly, on every pair. Comparisons say which answer is better, never how good: adding 100 to every score
changes no loss, no gradient, no probability. Only a penalty on the scores themselves (or weight decay) could move it; the L2
penalty here leaves it out.

On pairs that a linear score separates the loss has no minimum: the weights grow for as long as the training lasts, and
accuracy does not say so. `feature_l2` above 0 keeps them finite.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tether import ranks, stats
from tether.algorithms.feature_rows import FeaturePair, load_feature_pairs
from tether.atomic import write_file
from tether.batch import DataOrder
from tether.errors import UserError
from tether.recipe import RewardRecipe
from tether.run import Run

FILE = "linear_reward.json"


@dataclass(frozen=True)
class LinearReward:
    """Names, weights (F,) and bias. Scores of one model mean something only against each other."""

    names: tuple[str, ...]
    weights: np.ndarray
    bias: float = 0.0

    def score(self, features: Any) -> np.ndarray:
        """Scores of feature rows (..., F) -> (...)."""
        return np.asarray(features, dtype=float) @ self.weights + self.bias

    def named(self) -> dict[str, float]:
        """Each weight under its name: what the comparisons valued."""
        return dict(zip(self.names, map(float, self.weights), strict=True))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / FILE, json.dumps({"weights": self.named(), "bias": self.bias}, indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> LinearReward:
        path = folder / FILE
        if not path.is_file():
            raise UserError(f"holds no {FILE}", where=str(folder), remedy="Pass the model folder of a run with features.")
        kept = json.loads(path.read_text(encoding="utf-8"))
        return cls(tuple(kept["weights"]), np.array(list(kept["weights"].values()), dtype=float), float(kept["bias"]))


@dataclass(frozen=True)
class Epoch:
    """One pass: `loss` is the mean over its pairs, each before the update that it caused; accuracy and margin are after the pass."""

    number: int
    loss: float
    accuracy: float
    margin: float


def train(recipe: RewardRecipe, run: Run) -> dict[str, Any]:
    """Run the recipe to its end. It takes seconds, so a run that was interrupted is done again. Returns the summary."""
    # 1. Pairs of feature rows.
    names = tuple(recipe.features or ())
    loaded = load_feature_pairs(recipe.data, names)
    run.say(f"read {len(loaded.rows)} pairs from {', '.join(loaded.files)}: {loaded.shape}")
    loaded.enforce(recipe.on_bad_rows)
    run.truncate(0)
    for problem in loaded.problems:
        run.note(problem.kind, str(problem))
    run.fingerprint(loaded.files, loaded.fingerprint)
    pairs, held_out = split_pairs(loaded.rows, recipe.eval_fraction, recipe.seed)
    if recipe.eval_data:
        other = load_feature_pairs(recipe.eval_data, names)
        other.enforce(recipe.on_bad_rows)
        held_out = other.rows
    if not pairs:
        raise UserError("every pair is held out", where="eval_fraction", remedy="Lower it.")

    # 2. Passes over the pairs.
    model, epochs = fit(
        [pair.chosen for pair in pairs],
        [pair.rejected for pair in pairs],
        names,
        learning_rate=recipe.feature_learning_rate,
        epochs=recipe.feature_epochs,
        batch_size=recipe.batch_size,
        l2=recipe.feature_l2,
        margins=[pair.margin for pair in pairs] if recipe.margin else None,
        seed=recipe.seed,
        shuffle=recipe.shuffle,
        on_epoch=lambda e: run.log(e.number, {"loss": e.loss, "accuracy": e.accuracy, "margin": e.margin, "epoch": e.number}),
    )

    # 3. What was learnt, in words that can be checked.
    for name, weight in model.named().items():
        run.say(f"  {name:<20} {weight:+.3f}")
    run.say(f"  {'bias':<20} {model.bias:+.3f}  (cannot move: it cancels in every difference of scores)")
    told = sorted({max(1, len(epochs) * k // 4) for k in (1, 2, 3, 4)})
    run.say("  loss " + ", ".join(f"{epochs[n - 1].loss:.3f} after {n}" for n in told) + " epochs")
    run.say(f"  {round(epochs[-1].accuracy * len(pairs))} of {len(pairs)} pairs told apart")
    if epochs[-1].accuracy == 1 and recipe.feature_l2 == 0:
        words = "the pairs can be separated, so the weights grow with every epoch; set feature_l2 (0.01, say) to compare runs"
        run.note("separable_pairs", words)
        run.say("note: " + words)
    summary: dict[str, Any] = {
        "epochs": recipe.feature_epochs,
        "pairs": len(pairs),
        "weights": model.named(),
        "bias": model.bias,
        "loss": epochs[-1].loss,
        "accuracy": epochs[-1].accuracy,
    }
    if held_out:
        summary["held_out"] = evaluate(model, held_out)
    if ranks.first():
        model.save(run.folder / "model")
    return run.finish(summary)


def split_pairs(pairs: list[FeaturePair], fraction: float, seed: int) -> tuple[list[FeaturePair], list[FeaturePair]]:
    """Hold out about `fraction` of the prompts, all pairs of a prompt on the same side."""
    if fraction <= 0:
        return pairs, []
    prompts = sorted({pair.prompt for pair in pairs})
    random.Random(f"{seed}/split").shuffle(prompts)
    held = set(prompts[: round(fraction * len(prompts))])
    return [p for p in pairs if p.prompt not in held], [p for p in pairs if p.prompt in held]


def evaluate(model: LinearReward, pairs: Sequence[FeaturePair]) -> dict[str, Any]:
    """Accuracy with its interval and the calibration curve on pairs that were never trained on."""
    gaps = model.score([p.chosen for p in pairs]) - model.score([p.rejected for p in pairs])
    right = int((gaps > 0).sum())
    low, high = stats.wilson(right, len(gaps))
    # Each pair is seen from its better-scored side: predicted P(win) >= 1/2 against how often that side did win.
    predicted = [1 / (1 + math.exp(-abs(gap))) for gap in gaps]
    return {
        "accuracy": {"value": right / len(gaps), "low": low, "high": high, "n": len(gaps)},
        "calibration": stats.calibration_bins(predicted, [bool(gap > 0) for gap in gaps], low=0.5),
        "mean_margin": float(gaps.mean()),
    }


def fit(
    chosen: Any,
    rejected: Any,
    names: Sequence[str],
    *,
    learning_rate: float = 0.1,
    epochs: int = 200,
    batch_size: int | None = None,
    l2: float = 0.0,
    margins: Sequence[float] | None = None,
    bias: float = 0.0,
    seed: int = 0,
    shuffle: bool = False,
    on_epoch: Callable[[Epoch], None] | None = None,
) -> tuple[LinearReward, list[Epoch]]:
    """Gradient descent from zero weights in float64: on all pairs at once, or on `batch_size` of them at a time.

    `chosen` and `rejected` are feature rows (N, F) in the order of `names`. The loss of a batch is its mean, plus l2/2 |w|^2.

    >>> model, epochs = fit([[1.0], [0.8]], [[0.0], [0.1]], ["safety"], epochs=10, bias=3.0)
    >>> round(float(model.weights[0]), 3), model.bias, epochs[-1].accuracy
    (0.391, 3.0, 1.0)
    """
    difference = _matrix("chosen", chosen, names) - _matrix("rejected", rejected, names)  # (N, F): all that a comparison shows
    if not len(difference):
        raise ValueError("there is no pair to learn from")
    lead = np.zeros(len(difference)) if margins is None else np.asarray(margins, dtype=float)
    weights = np.zeros(len(names))
    order = DataOrder(len(difference), min(batch_size or len(difference), len(difference)), seed, shuffle)
    history = []
    for epoch in range(epochs):
        total = 0.0
        for step in range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch):
            rows = order.batch(step)
            gap = difference[rows] @ weights - lead[rows]
            total += float(np.logaddexp(0, -gap).sum())  # -log s(gap), stable on both sides
            wrong = np.exp(-np.logaddexp(0, gap))  # 1 - s(gap)
            with np.errstate(over="ignore", invalid="ignore"):  # told in words below
                weights = weights + learning_rate * (wrong @ difference[rows] / len(rows) - l2 * weights)
        if not np.isfinite(weights).all():
            raise UserError(f"the weights are not finite after epoch {epoch + 1}", where="feature_learning_rate", remedy="Lower it.")
        gap = difference @ weights
        history.append(Epoch(epoch + 1, total / len(difference), float((gap > 0).mean()), float(gap.mean())))
        if on_epoch:
            on_epoch(history[-1])
    return LinearReward(tuple(names), weights, bias), history


def _matrix(side: str, rows: Any, names: Sequence[str]) -> np.ndarray:
    x = np.asarray(rows, dtype=float)
    if x.ndim != 2 or x.shape[1] != len(names):
        raise ValueError(f"{side} holds rows of {len(names)} features ({', '.join(names)}), got shape {x.shape}")
    if not np.isfinite(x).all():
        raise ValueError(f"{side} row {int(np.argwhere(~np.isfinite(x))[0][0])} holds a value that is not finite")
    return x
