"""Where expected updates lead on a policy of forty answers, all written out: to the fixed point of the objective, or uphill.

With a tie to the reference a method has a place where it rests, and `fixed_points` finds it without the package's losses. The
recipe's advantage, surrogate, aggregation and tie are kept; its beta is put at a value at which that place is neither the start nor
one answer alone (the recipe's own beta is in the line `loss = formula`). Without a tie the expected reward must rise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tether.recipe import GRPORecipe, PPORecipe
from tether.verify import enumerable, expectation, expectation_ppo
from tether.verify.check import Found, LeftOut
from tether.verify.enumerable import LENGTH, REWARDS, total_variation
from tether.verify.expectation import EVEN
from tether.verify.expectation_ppo import CUT
from tether.verify.fixed_points import Rule, fixed_point, moments
from tether.verify.subject import Subject

NEAR = 0.02  # total variation
RISE = 0.1  # of an expected reward that lies between 0 and 1
SCALED = ("group_norm", "batch_std", "reinforce_pp_baseline")
SHORT = 60  # steps uphill


def expected_updates_lead_where_they_should(subject: Subject) -> Found:
    """Expected updates by the loop's own advantages and loss, on all answers at once."""
    recipe = subject.recipe
    if isinstance(recipe, GRPORecipe):
        rule = rule_of(recipe)
        if recipe.beta > 0 and rule is not None:
            return _to_the_fixed_point(subject, recipe, rule)
        return _uphill(subject, recipe)
    if isinstance(recipe, PPORecipe):
        return _to_the_optimum(subject, recipe) if recipe.beta > 0 and recipe.gamma == 1 else _uphill(subject, recipe)
    raise LeftOut("nothing is sampled")


def rule_of(recipe: GRPORecipe) -> Rule | None:
    """The recipe's field in the words of `fixed_points`; None where those have no word for it.

    >>> rule_of(GRPORecipe(model="m", data="d", preset="grpo"))
    Rule(pull='k3', scale=True, per_length=True)
    """
    if recipe.kl_in == "reward":
        return Rule("reward")
    per_length = recipe.aggregation == "seq-mean-token-mean"
    scale = recipe.advantage in SCALED or recipe.reward_mixture == "normalize_then_sum"
    if recipe.advantage == "reinforce_pp" or recipe.surrogate == "seq_ratio" or (recipe.kl_kind == "k2" and recipe.kl_unbiased):
        return None
    return Rule("k3" if recipe.kl_kind == "k3" and not recipe.kl_unbiased else "k2", scale, per_length)


def on_forty(recipe: GRPORecipe, **changes: Any) -> GRPORecipe:
    """The recipe for an endless group of the forty answers."""
    size: dict[str, Any] = {"num_generations": EVEN, "batch_size": EVEN, "max_completion_length": LENGTH, "lora": None}
    size |= {"dynamic_sampling": False, "max_sampling_rounds": 3, "overlong_cache": None, "mask_truncated": False, "importance": "none"}
    size |= {"importance_max": 2.0, "importance_min": 0.0, "kl_target": None, "kl_horizon": 10_000.0, "reference_refresh_steps": None}
    return recipe.replace(**{**size, "max_length": 1024, "temperature": 1.0, **changes})


def _to_the_fixed_point(subject: Subject, recipe: GRPORecipe, rule: Rule) -> Found:
    beta = 0.5 if rule.pull == "reward" or not rule.scale else 1.0 if rule.pull == "k3" else 2.0
    start, ref = _start(subject)
    p = expectation.led_by_expectation(on_forty(recipe, beta=beta), start, ref)
    want = fixed_point(rule, ref, beta)
    way = total_variation(want, ref.sum(1).exp())
    words = f"total variation from the fixed point of {_named(rule)} at beta {beta:g}, which is {way:.2f} from the start"
    return Found(total_variation(p, want), NEAR, words)


def _named(rule: Rule) -> str:
    tie = {"reward": "k1 in the reward", "k2": "a pull along KL(policy, reference)", "k3": "a pull along KL(reference, policy)"}[rule.pull]
    return tie + (", rewards over their spread" if rule.scale else "") + (", a mean over each answer" if rule.per_length else "")


def _to_the_optimum(subject: Subject, recipe: PPORecipe) -> Found:
    """p* proportional to ref exp(score/beta). A critic that knows everything stands beside lam below 1, one that says 0 beside lam 1."""
    tied, scores = _ppo_on_forty(recipe, 0.5), _scores(recipe)
    start, ref = _start(subject)
    p, _ = expectation_ppo.led_by_expectation(tied, start, ref, knowing=recipe.lam < 1)
    want = ref.sum(1).exp() * torch.exp(scores / tied.beta)
    want = want / want.sum()
    way = total_variation(want, ref.sum(1).exp())
    words = f"total variation from the optimum of E[score] - {tied.beta:g} KL, which is {way:.2f} from the start"
    return Found(total_variation(p, want), NEAR, words)


def _ppo_on_forty(recipe: PPORecipe, beta: float) -> PPORecipe:
    size: dict[str, Any] = {"num_generations": 128, "batch_size": 128, "max_completion_length": LENGTH, "lora": None, "importance": "none"}
    size |= {"importance_max": 2.0, "importance_min": 0.0, "mask_truncated": False, "score_scaling": "none", "max_length": 1024}
    size |= {"kl_target": None, "kl_horizon": 10_000.0, "reference_refresh_steps": None, "temperature": 1.0}
    return recipe.replace(**size, beta=beta)


def _scores(recipe: PPORecipe) -> Tensor:
    """(40,) what each answer earns after clip and penalty."""
    bound = float("inf") if recipe.score_clip is None else recipe.score_clip
    return REWARDS.clamp(-bound, bound) - recipe.missing_end_penalty * CUT


def _uphill(subject: Subject, recipe: GRPORecipe | PPORecipe) -> Found:
    start, ref = _start(subject)
    if isinstance(recipe, PPORecipe):
        free, scores = _ppo_on_forty(recipe, 0.0), _scores(recipe)
        p, _ = expectation_ppo.led_by_expectation(free, start, ref, knowing=recipe.lam < 1, steps=SHORT)
        before, after = float(ref.sum(1).exp() @ scores), float(p @ scores)
    else:
        p = expectation.led_by_expectation(on_forty(recipe, beta=0.0, watch_kl=False), start, ref, steps=SHORT)
        before, after = moments(ref.sum(1).exp())[0], moments(p)[0]
    left_out = "" if recipe.beta == 0 else "; with its tie this recipe has no fixed point that is known, so the tie is left out"
    words = f"short of a rise by {RISE:g}: the expected reward goes from {before:.3f} to {after:.3f} in {SHORT} expected updates{left_out}"
    return Found(max(0.0, RISE - (after - before)), 0.0, words)


def _start(subject: Subject) -> tuple[Any, Tensor]:
    folder = subject.folder / "forty"
    if not folder.exists():
        enumerable.save(folder, expectation.START)
    return folder, enumerable.table(expectation.in_float64(folder)).detach()
