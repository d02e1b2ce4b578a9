"""`tether ppo` against exact expectations, on the policy of `enumerable`, whose every answer is written out.

With lam = 1 and gamma = 1 and without whitening an advantage is the reward to go less a value of the state ahead, and
E[sum_t A_t grad log pi(y_t)] is the gradient of E[R] - beta KL(policy, reference) whatever the critic says: a baseline drops out. The
fixed point is then p*(y) proportional to ref(y) exp(R(y)/beta). There every reward to go depends on the prefix alone, so that a
critic which has learnt it leaves no advantage at all: the noise of sampling dies out. What each other setting does is tested below.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.test_enumerable import DIRECTIONS, EXACT, THREE_STANDARD_ERRORS, Caught, World, start, start_logps
from tether import rollout
from tether.algorithms import ppo
from tether.engines.local import LocalSampler, Request
from tether.engines.sampling import Sampling
from tether.packing import Packed
from tether.policy import Policy
from tether.recipe import PPORecipe
from tether.run import Run
from tether.token_batch import token_batch
from tether.verify import enumerable
from tether.verify.enumerable import INDEX, LENGTH, MASK, PROMPT_IDS, REWARDS, total_variation
from tether.verify.expectation import attempt, even_group
from tether.verify.expectation_ppo import CUT, STATES, N, foreseen, led_by_expectation, look_at, pull
from tether.verify.fixed_points import moments, optimum, optimum_of_scaled

__all__ = ["start", "start_logps"]  # fixtures
EXACT_SETTINGS: dict[str, Any] = {"lam": 1.0, "gamma": 1.0, "whiten_advantages": False, "beta": 0.5}


def recipe_of(**changes: Any) -> PPORecipe:
    size = {"model": "m", "data": "d", "batch_size": 128, "num_generations": 128, "max_completion_length": LENGTH}
    return PPORecipe(**{**size, **EXACT_SETTINGS, "updates_per_batch": 1, **changes})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def whims() -> Tensor:
    """A critic that has learnt nothing: any number for each state."""
    return torch.randn(13, generator=torch.Generator().manual_seed(5), dtype=torch.float64)[STATES] * MASK


# --- which way a step goes --------------------------------------------------------------------------------------------------------


def expected(recipe: PPORecipe, world: World, values: Tensor) -> Tensor:
    """Exact mean over answers of what one answer adds to the parameters, in eight directions."""
    each = torch.stack([pull(recipe, torch.tensor([i]), world.lp, world.ref, values, per_answer=True) for i in range(N)])
    return world.project(torch.einsum("n,nit->it", world.p, each))


@pytest.mark.parametrize("critic", ["nothing", "whims", "everything"])
def test_the_expected_step_is_the_gradient_of_the_objective_whatever_the_critic_says(critic: str, world: World, whims: Tensor) -> None:
    recipe = recipe_of()
    values = {"nothing": torch.zeros_like(whims), "whims": whims, "everything": foreseen(recipe, world.lp, world.ref)}[critic]
    torch.testing.assert_close(expected(recipe, world, values), world.objective(0.5), **EXACT)


def test_below_one_lam_leans_on_the_critic_and_gamma_changes_the_objective(world: World, whims: Tensor) -> None:
    recipe, want = recipe_of(lam=0.9), world.objective(0.5)
    torch.testing.assert_close(expected(recipe, world, foreseen(recipe, world.lp, world.ref)), want, **EXACT)
    assert float((expected(recipe, world, whims) - want).norm() / want.norm()) > 0.05
    recipe = recipe_of(gamma=0.9)
    assert float((expected(recipe, world, foreseen(recipe, world.lp, world.ref)) - want).norm() / want.norm()) > 0.05


@pytest.mark.parametrize("setting", ["whiten_advantages", "whiten_rewards"])
def test_whitening_over_many_answers_changes_the_length_of_a_step_and_not_its_direction(setting: str, world: World, whims: Tensor) -> None:
    want = world.objective(0.5)
    step = world.project(pull(recipe_of(**{setting: True}), even_group(world.p, 20_000), world.lp, world.ref, whims))
    assert float(torch.cosine_similarity(step, want, dim=0)) > 0.999
    assert abs(float(step.norm() / want.norm()) - 1) > 0.05


@pytest.fixture(scope="module")
def drawn(world: World) -> Counter[int]:
    """Answers from the sampler, counted."""
    policy = Policy.load(world.folder, precision="fp32")
    sampler = LocalSampler(policy.model, policy.codec, precision="fp32", slots=1024)
    made = sampler.sample([Request(PROMPT_IDS, Sampling(max_new_tokens=LENGTH), 12_000, "answers")])
    return Counter(INDEX[tuple(c.tokens)] for c in made)


@pytest.mark.slow
@pytest.mark.parametrize("critic", ["nothing", "whims", "everything"])
def test_the_mean_of_sampled_gradients_is_the_exact_gradient(critic: str, world: World, drawn: Counter[int], whims: Tensor) -> None:
    """First update, ratio 1. All eight directions are judged together: the squared distance in standard errors, with correlations."""
    recipe = recipe_of()
    values = {"nothing": torch.zeros_like(whims), "whims": whims, "everything": foreseen(recipe, world.lp, world.ref)}[critic]
    gradients = torch.stack([world.project(pull(recipe, torch.tensor([i]), world.lp, world.ref, values, per_answer=True)) for i in drawn])
    counts, n = torch.tensor(list(drawn.values()), dtype=torch.float64), sum(drawn.values())
    mean = counts @ gradients / n
    spread = torch.einsum("n,ni,nj->ij", counts, gradients - mean, gradients - mean) / (n - 1) / n

    def squared_distance(exact: Tensor) -> float:
        return float((mean - exact) @ torch.linalg.solve(spread, mean - exact))

    print(f"{critic}: chi-square {squared_distance(world.objective(0.5)):.1f}, {DIRECTIONS} expected")
    assert squared_distance(world.objective(0.5)) < THREE_STANDARD_ERRORS
    assert squared_distance(0.8 * world.objective(0.5)) > THREE_STANDARD_ERRORS, "a bias of a fifth would be seen"
    assert squared_distance(world.objective(0.25)) > THREE_STANDARD_ERRORS, "and half a tie"


class FixedCritic:
    """Says what it is told; has nothing to learn."""

    def __init__(self, values: Tensor) -> None:
        self.values = values  # (40, 3)

    def judge(self, policy: Policy, packed: Packed, temperature: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logps, stats = policy.logprobs(packed, temperature, stats=True)
        told = []
        for k in range(packed.n_answers):
            tokens = tuple(packed.targets[packed.answer == k].tolist())
            told.append(self.values[INDEX[tokens], : len(tokens)])
        return logps, torch.cat(told), stats


@pytest.mark.parametrize("budget", [1, 10_000])
@pytest.mark.parametrize("settings", [{}, {"whiten_advantages": True, "lam": 0.9}], ids=["exact", "whitened"])
def test_the_updates_of_the_loop_backpropagate_just_that(budget: int, settings: dict[str, Any], world: World, whims: Tensor) -> None:
    """Through the engine, several answers to a prompt, any micro-batch."""
    recipe = recipe_of(tokens_per_micro_batch=budget, **settings)
    rows = torch.tensor([1, 22, 3, 8, 39, 8, 30, 4])
    batch = token_batch([[attempt(i, g, k) for k, i in enumerate(rows[4 * g : 4 * g + 4].tolist())] for g in (0, 1)], least=1)
    _, before, advantages, returns = look_at(recipe, rows, world.lp, world.ref, whims)
    loop: Any = Caught(world)
    critic: Any = FixedCritic(whims)
    ppo.updates(recipe, world.policy, critic, loop, batch, before, advantages, returns)
    want = world.project(pull(recipe, rows, world.lp, world.ref, whims))
    torch.testing.assert_close(-loop.gradient, want, rtol=1e-5, atol=1e-7)


# --- where a run ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, knowing",
    [
        ({}, False),
        ({}, True),
        ({"whiten_advantages": True}, False),
        ({"whiten_rewards": True}, False),
        ({"lam": 0.5}, True),
        ({"lam": 0.95, "whiten_advantages": True}, True),
        ({"score_clip": 0.6, "missing_end_penalty": 0.3}, False),
    ],
    ids=["exact", "exact, knowing", "whitened", "rewards whitened", "lam, knowing", "as by default, knowing", "clip and penalty"],
)
def test_expected_updates_end_at_the_optimum_of_the_scores(
    settings: dict[str, Any], knowing: bool, start: Path, start_logps: Tensor
) -> None:
    recipe = recipe_of(**settings)
    scores = REWARDS.clamp(max=recipe.score_clip) - recipe.missing_end_penalty * CUT
    ref = start_logps.sum(1).exp()
    want = ref * torch.exp(scores / recipe.beta)
    want = want / want.sum()
    if "score_clip" in settings:
        assert total_variation(want, optimum(ref, recipe.beta)) > 0.1, "other scores, another optimum"
    else:
        torch.testing.assert_close(want, optimum(ref, recipe.beta))
    distance = total_variation(led_by_expectation(recipe, start, start_logps, knowing)[0], want)
    print(f"{settings}, {'knowing' if knowing else 'no'} critic: {distance:.4f} of {total_variation(want, ref):.3f}")
    assert total_variation(want, ref) > 0.15, "there is a way to go"
    assert distance < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, knowing", [({"lam": 0.5}, False), ({"gamma": 0.5}, True)], ids=["lam with a critic that knows nothing", "gamma"]
)
def test_what_moves_the_end_of_a_run(settings: dict[str, Any], knowing: bool, start: Path, start_logps: Tensor) -> None:
    recipe = recipe_of(**settings)
    distance = total_variation(led_by_expectation(recipe, start, start_logps, knowing)[0], optimum(start_logps.sum(1).exp(), recipe.beta))
    print(f"{settings}: {distance:.3f} from the optimum")
    assert distance > 0.04


@pytest.mark.slow
def test_scores_divided_by_their_spread_end_at_the_optimum_of_a_tie_that_counts_in_spreads(start: Path, start_logps: Tensor) -> None:
    """R / s at the tie beta has the optimum of R at the tie beta s. s is the spread of all rewards of the run; it nears the spread
    under the policy that the run comes to, so the place it nears is p* at beta s with s the spread under that p* itself."""
    ref, recipe = start_logps.sum(1).exp(), recipe_of(score_scaling="running", beta=1.0)
    p, spreads = led_by_expectation(recipe, start, start_logps, knowing=False)
    limit = optimum_of_scaled(ref, 1.0)
    here, there = (total_variation(p, x) for x in (optimum(ref, spreads[-1]), limit))
    print(f"{here:.4f} from p* at the run's spread {spreads[-1]:.4f}, {there:.4f} from the limit, spread {moments(limit)[1]:.4f}")
    assert here < 0.02
    assert there < 0.03
    assert spreads[-1] == pytest.approx(moments(limit)[1], rel=0.1)
    assert total_variation(p, optimum(ref, 1.0)) > 0.3, "rewards of spread 0.24 at a tie of 1 are tied as at 0.24"


@pytest.mark.slow
def test_scores_divided_by_their_spread_do_not_come_to_rest_at_a_weak_tie(start: Path, start_logps: Tensor) -> None:
    """The surer the policy, the smaller the spread, the weaker the tie: the run follows p* at beta s, which goes on moving."""
    ref, recipe = start_logps.sum(1).exp(), recipe_of(score_scaling="running", beta=0.5)
    p, spreads = led_by_expectation(recipe, start, start_logps, knowing=False)
    print(f"{total_variation(p, optimum(ref, 0.5 * spreads[-1])):.4f} from p* at the run's spread; spreads {spreads[::50]}")
    assert total_variation(p, optimum(ref, 0.5 * spreads[-1])) < 0.02
    assert spreads[-1] < 0.9 * spreads[100] < 0.9 * spreads[50]
    with pytest.raises(ArithmeticError):
        optimum_of_scaled(ref, 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"critic": "shared"},
        {"critic": "separate"},
        {"critic": "shared", "lam": 0.95, "whiten_advantages": True, "value_clip": 0.2},
        {"critic": "shared", "score_scaling": "running", "beta": 1.0, "max_steps": 170},
    ],
    ids=["shared", "separate", "lam and whitening", "scores divided by their spread"],
)
def test_a_run_with_sampled_answers_and_a_critic_that_learns_ends_at_the_optimum(
    settings: dict[str, Any], start: Path, start_logps: Tensor, tmp_path: Path
) -> None:
    """The loop whole: sampler, rewards, reference, critic, AdamW and its schedule."""
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": enumerable.PROMPT}) + "\n")
    where = {"model": str(start), "data": str(tmp_path / "prompts.jsonl"), "run": str(tmp_path / "run"), "trackers": []}
    pace = {"learning_rate": 0.01, "adam_beta1": 0.8, "adam_beta2": 0.98, "max_steps": 200, "vf_coef": 0.5, "value_clip": None}
    recipe = recipe_of(precision="fp32", sampling_slots=128, save_steps=1000, log_every=1000, **{**where, **pace, **settings})
    with Run.create(str(tmp_path / "run"), recipe) as run:
        ppo.train(recipe, run, rewards=[enumerable.reward])
        rewards = torch.tensor([row["total"] for row in run.rows(rollout.FILE)], dtype=torch.float64)
    p, ref = enumerable.distribution(Policy.load(tmp_path / "run/model", precision="fp32")), start_logps.sum(1).exp()
    want = optimum(ref, recipe.beta * (float(rewards.std()) if recipe.score_scaling == "running" else 1.0))
    distance = total_variation(p, want)
    print(f"{settings}: {distance:.4f} of {total_variation(ref, want):.3f}, spread {float(rewards.std()):.4f}")
    assert distance < 0.02
