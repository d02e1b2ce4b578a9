"""The loss of one step from the numbers that it is a function of, by the functions that the loops call; and by the formulas.

Per method: what a model says of the rows (`said`: log-probs per token, sums per answer, or scores), the loop's loss of it, and the
same loss in plain arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tether.algorithms import dpo, kto, reward_model, sft
from tether.batch import Example
from tether.packing import Packed, pack
from tether.recipe import DPORecipe, RewardRecipe, SFTRecipe, TrainRecipe
from tether.verify import formulas
from tether.verify.formulas import Duel, Pair


@dataclass(frozen=True)
class Step:
    """The rows of one step, and what does not move while it is taken."""

    recipe: TrainRecipe
    examples: list[Example]
    ref: Tensor | None = None  # (A,) sums of the reference
    z0: float = 0.0  # of KTO

    @property
    def packed(self) -> Packed:
        return pack(self.examples)

    @property
    def lengths(self) -> list[int]:
        return [sum(t) for e in self.examples for t in e.trained]


def said(step: Step, model: Any, packed: Packed | None = None) -> Tensor:
    """What the loss is a function of: (M,) log-probs for sft, (A,) sums for pairs and kto, (A, heads) scores for a reward model."""
    packed = packed or step.packed
    if isinstance(step.recipe, RewardRecipe):
        scores: Tensor = model.scores(packed)
        return scores
    logps: Tensor = model.logprobs(packed)
    return logps if isinstance(step.recipe, SFTRecipe) else packed.sum_by_answer(logps)


def by_loop(step: Step, values: Tensor) -> Tensor:
    """The loss by the functions that the loop calls, in the order in which it calls them."""
    recipe = step.recipe
    if isinstance(recipe, SFTRecipe):
        return sft.sft_loss(values, total_tokens=len(values))
    if isinstance(recipe, RewardRecipe):
        duels = reward_model.Duels.of(step.examples, use_margin=recipe.margin)
        total = sum(bool(reward_model.comparisons(e)) for e in step.examples)
        return duels.loss(values, center_coef=recipe.center_coef, total=total)[0]
    assert isinstance(recipe, DPORecipe)
    if recipe.loss_type == "kto":
        assert step.ref is not None
        weights = {"beta": recipe.beta, "desirable_weight": recipe.desirable_weight, "undesirable_weight": recipe.undesirable_weight}
        labels = kto.label_tensor(step.examples, range(len(step.examples))).to(values.device)
        return kto.kto_loss(values, step.ref.to(values), labels, torch.tensor(step.z0), **weights, total=len(step.examples))[0]
    counts = torch.tensor(step.lengths, device=values.device).view(-1, 2)
    sums = values.view(-1, 2)
    ref_chosen, ref_rejected = (None, None) if step.ref is None else step.ref.to(values).view(-1, 2).unbind(1)
    pairs = dpo.PairLogps(sums[:, 0], sums[:, 1], ref_chosen, ref_rejected, counts[:, 0], counts[:, 1])
    chosen_tokens = int(counts[:, 0].sum())
    return dpo.preference_loss(pairs, **recipe.loss_settings(), total_pairs=len(pairs.chosen), total_chosen_tokens=chosen_tokens)[0]


def by_formula(step: Step, values: Sequence[float]) -> float:
    """The same in plain arithmetic; `values` flat."""
    recipe = step.recipe
    if isinstance(recipe, SFTRecipe):
        return formulas.sft(values)
    if isinstance(recipe, RewardRecipe):
        return formulas.reward_model(_duels(recipe, step.examples, values), len(step.examples), recipe.center_coef)
    assert isinstance(recipe, DPORecipe)
    ref = [0.0] * len(values) if step.ref is None else step.ref.tolist()
    if recipe.loss_type == "kto":
        good = [bool(e.extra["label"]) for e in step.examples]
        weights = {"desirable": recipe.desirable_weight, "undesirable": recipe.undesirable_weight}
        return formulas.kto(values, ref, good, step.z0, beta=recipe.beta, **weights)
    n = step.lengths
    pairs = [Pair(values[i], values[i + 1], ref[i], ref[i + 1], n[i], n[i + 1]) for i in range(0, len(values), 2)]
    settings = {name: value for name, value in recipe.loss_settings().items() if name != "loss_type"}
    return formulas.preference(recipe.loss_type, pairs, settings)


def _duels(recipe: RewardRecipe, examples: Sequence[Example], flat: Sequence[float]) -> list[Duel]:
    """Every two answers of a prompt with different ranks; a prompt counts once."""
    scores = [flat[i : i + recipe.heads] for i in range(0, len(flat), recipe.heads)]
    out, first = [], 0
    for example in examples:
        ranks = example.extra["ranks"]
        pairs = [(a, b) for a, one in enumerate(ranks) for b, other in enumerate(ranks) if one < other]
        margin = float(example.extra.get("margin") or 0.0) if recipe.margin else 0.0
        out += [Duel(scores[first + a], scores[first + b], margin, 1 / len(pairs)) for a, b in pairs]
        first += len(ranks)
    return out


def random_step(recipe: TrainRecipe, seed: int = 3) -> tuple[Step, Tensor]:
    """Made-up answers of different lengths, and float64 values over all that a loss tells apart: good and bad gaps, near and far."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, size: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * size

    n = 12
    if isinstance(recipe, RewardRecipe):
        answers = [2, 3, 2, 4] * 3
        ranks = [[1, 2], [2, 1, 2], [2, 1], [1, 3, 2, 4]] * 3
        extra = [{"ranks": r, "margin": 0.3 * (i % 3)} for i, r in enumerate(ranks)]
        examples = [_example(i, [2 + k for k in range(a)], e) for i, (a, e) in enumerate(zip(answers, extra, strict=True))]
        return Step(recipe, examples), draw(sum(answers), recipe.heads, size=2.0)
    if isinstance(recipe, SFTRecipe):
        examples = [_example(i, [1 + (5 * i) % 7], {}) for i in range(n)]
        return Step(recipe, examples), -draw(sum(e.n_trained for e in examples)).abs()
    assert isinstance(recipe, DPORecipe)
    if recipe.loss_type == "kto":
        examples = [_example(i, [1 + (5 * i) % 7], {"label": i % 3 != 0}) for i in range(n)]
        counts = n
    else:
        examples = [_example(i, [1 + (5 * i) % 7, 1 + (3 * i) % 5], {}) for i in range(n)]
        counts = 2 * n
    lengths = torch.tensor([sum(t) for e in examples for t in e.trained], dtype=torch.float64)
    values = -lengths * draw(counts).abs() - 0.05
    # Gaps from the reference of the size that the loss bends at: 1/beta.
    ref = (values + draw(counts, size=1.5 / recipe.beta) * lengths.sqrt()).clamp(max=-1e-3)
    return Step(recipe, examples, ref if recipe.has_reference else None, 0.4), values


def _example(i: int, lengths: Sequence[int], extra: dict[str, Any]) -> Example:
    return Example([1 + i], [[2] * n for n in lengths], [[True] * n for n in lengths], None, extra)
