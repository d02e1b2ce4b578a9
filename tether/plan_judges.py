"""Models that only judge, in the memory of a plan: reward models, and a language model that is asked in this process."""

from __future__ import annotations

from collections.abc import Callable

from tether.errors import UserError
from tether.hub import first_line
from tether.plan_memory import Part, Size, frozen_bytes
from tether.plan_sizes import FLOAT, HALF
from tether.precision import Precision
from tether.rl_recipe import SamplingRecipe

Sizer = Callable[[str, bool], Size]  # a model's name, and whether it goes without a vocabulary head


def judges_of(recipe: SamplingRecipe) -> list[tuple[str, str]]:
    """(name, model) of each model that the recipe's rewards load, in order: name is the reward's.

    >>> from tether.recipe import GRPORecipe
    >>> judges_of(GRPORecipe(model="m", data="d", rewards=["math", {"reward": "model", "model": ["a", "b"]}, {"reward": "principles", "local": {}}]))
    [('model', 'a'), ('model', 'b'), ('principles', 'm')]
    """
    found: list[tuple[str, str]] = []
    for reward in recipe.rewards:
        if isinstance(reward, str):
            continue
        name, model, local = str(reward.get("reward")), reward.get("model"), reward.get("local")
        if name == "model" and model is not None:
            found += [(name, str(m)) for m in (model if isinstance(model, list) else [model])]
        if isinstance(local, dict):
            found.append((name, str(local.get("model") or recipe.model)))
    return found


def judge_parts(recipe: SamplingRecipe, kind: Precision, ranks: int, size_of: Sizer) -> tuple[list[Part], list[str]]:
    """Lines of the memory table, and a note for each judge whose config cannot be read. A reward model is shared out over the ranks, a
    model that is asked is whole on each. What they need while they read or write is not in it."""
    parts, notes = [], []
    for name, model in judges_of(recipe):
        scores = name == "model"
        try:
            size = size_of(model, scores)
        except (UserError, ValueError) as error:  # transformers' word for a config without a language model
            why = error.what if isinstance(error, UserError) else first_line(error)
            notes.append(f"the memory of {model}, which judges for the reward {name}, is not counted: {why}")
            continue
        whole = (FLOAT + (HALF if kind == "bf16" else 0)) * size.parameters
        held = frozen_bytes(size.layout, kind) if scores and ranks > 1 else whole
        parts.append(Part("judge", held, f"{model}, {size.parameters:,} parameters, frozen, for the reward {name}"))
    return parts, notes
