"""Attempts for recipes that sample: drawn by the local sampler, or made up where every case must come up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tether.engines.local import Completion, LocalSampler, Request
from tether.recipe import TrainRecipe
from tether.reward import Reward, Rewards
from tether.rl_recipe import SamplingRecipe
from tether.rollout import Rollout, View, from_sampled
from tether.rollouts import Rollouts
from tether.verify.subject import Desk, Subject

PROMPTS, EACH, LONGEST = 4, 2, 12
WEIGHTS = (1.0, 0.5)  # of the two parts of a made-up reward


def limit(recipe: SamplingRecipe) -> int:
    """Tokens of an answer while verifying."""
    return min(recipe.max_completion_length, LONGEST)


def shortened(recipe: SamplingRecipe) -> dict[str, Any]:
    """The settings that change with it."""
    cache = getattr(recipe, "overlong_cache", None)
    return {"max_completion_length": limit(recipe), **({} if cache is None else {"overlong_cache": min(cache, limit(recipe))})}


def judges() -> Rewards:
    """Two parts with different weights, for attempts that are scored already or never will be."""

    def unasked(prompts: Any, completions: Any) -> list[float]:
        raise AssertionError("nobody asks for these rewards")

    return Rewards([Reward(unasked, name, weight) for name, weight in zip("ab", WEIGHTS, strict=True)])


def sampled_here(recipe: TrainRecipe) -> TrainRecipe:
    """The recipe with its sampler in this process: what servers answer is checked where a run begins, against its own training pass."""
    if isinstance(recipe, SamplingRecipe) and recipe.engine.remote:
        return recipe.replace(engine="local", ahead_steps=0, importance=recipe.importance)
    return recipe


def sample(subject: Subject) -> list[Completion]:
    """A few short answers to the first prompts, by the sampler and the settings that the recipe's run has; drawn once."""
    drawn: list[Completion] = subject.keep("sampled", lambda: _sample(subject))
    return drawn


def _sample(subject: Subject) -> list[Completion]:
    recipe: Any = subject.recipe
    prompts, desk = subject.rows.examples[:PROMPTS], Desk(subject.folder)
    run: Any = desk
    source = Rollouts(recipe.replace(**shortened(recipe)), subject.model, prompts, judges(), run)
    assert isinstance(source.sampler, LocalSampler)  # `sampled_here` has seen to it
    return source.sampler.sample([Request(e.prompt, source.sampling, EACH, f"verify/{i}", str(e.source)) for i, e in enumerate(prompts)])


def attempts(subject: Subject) -> list[list[Rollout]]:
    """`sample` as groups of rollouts."""
    groups: list[list[Rollout]] = [[] for _ in subject.rows.examples[:PROMPTS]]
    for completion in sample(subject):
        example = subject.rows.examples[completion.request]
        groups[completion.request].append(
            from_sampled(
                completion,
                prompt="",
                prompt_ids=example.prompt,
                prompt_id=completion.request,
                group=completion.request,
                codec=subject.model.codec,
                policy_version=0,
            )
        )
    return groups


def made_up(recipe: SamplingRecipe, prompts: Sequence[Sequence[int]], vocabulary: int, *, seed: int = 0) -> list[list[Rollout]]:
    """Groups of attempts of random tokens, of different lengths, good and bad: one cut off, and one unscored in a group of its own size."""
    draw = random.Random(f"verify/{seed}")
    size = max(3, min(recipe.num_generations, 4)) if recipe.num_generations > 1 else 1
    groups = []
    for g in range(3 if size > 1 else 8):
        prompt, group = list(prompts[g % len(prompts)]), []
        for k in range(size):
            number = g * size + k
            n = min(limit(recipe), 1 + (3 * number + g) % 6)
            parts = {"a": round(draw.uniform(-1, 1), 3), "b": round(draw.uniform(-1, 1), 3)}
            unscored = number == 2 * size - 1 or (size == 1 and number == 3)
            group.append(
                Rollout(
                    prompt_id=g,
                    group=g,
                    sample=k,
                    prompt="",
                    prompt_ids=prompt,
                    tokens=[draw.randrange(vocabulary) for _ in range(n)],
                    trained=[True] * n,
                    logps=[-draw.uniform(0.5, 2.0) for _ in range(n)],
                    sampling_logps=[0.0] * n,
                    finish_reason="length" if number % 5 == 4 else "stop",
                    view=View("", ""),
                    policy_version=0,
                    rewards={"a": None, "b": None} if unscored else dict(parts),
                    total=None if unscored else sum(w * p for w, p in zip(WEIGHTS, parts.values(), strict=True)),
                )
            )
        groups.append(group)
    return groups
