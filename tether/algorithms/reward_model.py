"""A reward model from comparisons (Bradley and Terry 1952; Ouyang et al. 2022, eq. 1).

P(a beats b) = s(r_a - r_b). Minimises -log s(r_w - r_l - margin) + centre (r_w + r_l)^2 over pairs; a ranking of k answers is
all its pairs, weighted so that each prompt counts once. The score is read at the answer's last token by a scalar head, the
prompt is computed once for all its answers, and nothing depends on what else is in the batch.

With several heads (an ensemble on one trunk) every head learns from the same pairs but from its own start; the score that is
used is mean - lcb x standard deviation over the heads: where they disagree, it trusts less (Coste et al. 2023).
Only differences of scores of one prompt mean anything: with centre 0 the loss cannot see a constant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tether import preferences, stats
from tether.batch import Example
from tether.chat import encode_rankings
from tether.loop import Loop, Tally
from tether.losses.reward_model import reward_model_loss
from tether.packing import pack
from tether.recipe import RewardRecipe
from tether.run import Run
from tether.scalar import ScalarModel
from tether.training_rows import Rows, training_rows


def train(recipe: RewardRecipe, run: Run) -> dict[str, Any]:
    """Run the recipe to its end, from wherever the run directory stands. Returns the summary, also written to the run."""
    if recipe.features:
        from tether.algorithms import linear_reward

        return linear_reward.train(recipe, run)

    # 1. The model with a fresh scalar head, and the comparisons as token ids.
    model = ScalarModel.from_recipe(recipe, run)
    data = load_comparisons(recipe, model, run)
    examples, held_out = data.train, data.held_out

    # 2. Steps.
    with Loop(recipe, run, model, n_rows=len(examples), title="reward") as loop:
        for _ in loop:
            rows = loop.rows()
            total = sum(bool(comparisons(examples[i])) for i in rows)
            tally = Tally()
            for part in loop.parts(examples):
                packed = pack([examples[i] for i in part], device=model.device)
                scores = model.scores(packed)  # (A, heads)
                duel = Duels.of([examples[i] for i in part], use_margin=recipe.margin)
                loss, metrics = duel.loss(scores, center_coef=recipe.center_coef, total=total)
                loss.backward()
                tally.add(loss, metrics, tokens=packed.n_tokens)
            loop.end(tally.merged())
            if held_out and loop.due(recipe.eval_steps):
                evaluate(recipe, model, held_out, run, loop.step)

    # 3. The offset and scale of its scores, so that a later run can start from mean zero; then the result.
    seen = model.score_examples(examples[:512], recipe.tokens_per_micro_batch)
    model.set_normalisation(mean=float(seen.mean()), std=float(seen.std()))
    summary: dict[str, Any] = {"steps": loop.step, "prompts": len(examples)}
    if held_out:
        summary["held_out"] = evaluate(recipe, model, held_out, run, loop.step)
        accuracy = summary["held_out"]["accuracy"]
        run.say(f"held-out accuracy {accuracy['value']:.3f} (95 % interval {accuracy['low']:.3f} to {accuracy['high']:.3f})")
    model.save(run.folder / "model")
    return run.finish(summary)


def load_comparisons(recipe: RewardRecipe, model: ScalarModel, run: Run) -> Rows:
    """Prompts with two or more answers as token ids, their ranks in `extra`."""
    options: Any = {"max_length": recipe.max_length, "truncation": recipe.truncation}
    return training_rows(
        recipe,
        run,
        preferences.load_comparisons,
        lambda rows: encode_rankings(rows, model.codec, **options),
        what="prompts with compared answers",
        model=model.model,
    )


def comparisons(example: Example) -> list[tuple[int, int]]:
    """(winner, loser) for every pair of answers with different ranks; a tie is no comparison.

    >>> comparisons(Example([1], [[2], [3], [4]], [[True]] * 3, extra={"ranks": [2, 1, 2]}))
    [(1, 0), (1, 2)]
    """
    ranks = example.extra["ranks"]
    return [(a, b) for a in range(len(ranks)) for b in range(len(ranks)) if ranks[a] < ranks[b]]


@dataclass(frozen=True)
class Duels:
    """The comparisons of a packed batch as indices into its answers."""

    winners: Tensor  # (D,)
    losers: Tensor  # (D,)
    weights: Tensor  # (D,) 1 / number of the prompt's pairs, so that a prompt with many answers is not overfitted
    margins: Tensor | None  # (D,)

    @classmethod
    def of(cls, examples: Sequence[Example], *, use_margin: bool) -> Duels:
        winners, losers, weights, margins, first = [], [], [], [], 0
        for example in examples:
            pairs = comparisons(example)
            for a, b in pairs:
                winners.append(first + a)
                losers.append(first + b)
                weights.append(1 / len(pairs))
                margins.append(float(example.extra.get("margin") or 0.0))
            first += len(example.answers)
        given = use_margin and any(margins)
        return cls(
            torch.tensor(winners, dtype=torch.long),
            torch.tensor(losers, dtype=torch.long),
            torch.tensor(weights),
            torch.tensor(margins) if given else None,
        )

    def loss(self, scores: Tensor, *, center_coef: float, total: int) -> tuple[Tensor, dict[str, Tensor]]:
        """`scores` is (A, heads)."""
        weights = self.weights.to(scores)
        margin = None if self.margins is None else self.margins.to(scores)
        return reward_model_loss(
            scores[self.winners], scores[self.losers], margin=margin, center_coef=center_coef, weights=weights, total=total
        )


def evaluate(recipe: RewardRecipe, model: ScalarModel, held_out: list[Example], run: Run, step: int) -> dict[str, Any]:
    """Accuracy with interval, calibration curve, and how far score and length go together, on prompts never trained on."""
    scores = model.score_examples(held_out, recipe.tokens_per_micro_batch)
    gaps: list[float] = []
    longer_wins: list[bool] = []
    lengths: list[int] = []
    first = 0
    for example in held_out:
        sizes = [len(a) for a in example.answers]
        for a, b in comparisons(example):
            gaps.append(float(scores[first + a] - scores[first + b]))
            if sizes[a] != sizes[b]:
                longer_wins.append((sizes[a] > sizes[b]) == (gaps[-1] > 0))
        lengths += sizes
        first += len(sizes)
    right = sum(gap > 0 for gap in gaps)
    low, high = stats.wilson(right, len(gaps))
    # Each pair is seen from its better-scored side: predicted P(win) >= 1/2 against how often that side did win.
    predicted = [1 / (1 + math.exp(-abs(gap))) for gap in gaps]
    out: dict[str, Any] = {
        "accuracy": {"value": right / len(gaps), "low": low, "high": high, "n": len(gaps)},
        "calibration": stats.calibration_bins(predicted, [gap > 0 for gap in gaps], low=0.5),
        "length_correlation": stats.pearson([float(n) for n in lengths], scores.tolist()),
        "prefers_longer": sum(longer_wins) / len(longer_wins) if longer_wins else None,
        "mean_margin": sum(gaps) / len(gaps),
    }
    run.log(step, {"eval_accuracy": out["accuracy"]["value"], "eval_margin": out["mean_margin"]})
    return out
