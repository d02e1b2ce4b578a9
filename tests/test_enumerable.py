"""Every estimator of `tether grpo` against exact expectations, on a policy whose every answer is written out.

Where a method ends: its expected update, by the loop's own advantages and losses, moves a real transformer to the fixed point that
`fixed_points` works out without them. Which way it goes: gradients of groups drawn by the real sampler average to the expectation of
the method's formula over all groups, written down here once more. Weights are float64 but in the sampler and the runs of the loop.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tether.algorithms import grpo
from tether.engines.local import LocalSampler, Request
from tether.engines.sampling import Sampling
from tether.losses.sheet import POLICY_PRESETS
from tether.policy import Policy
from tether.recipe import GRPORecipe
from tether.run import Run
from tether.token_batch import mini_batches, parts, token_batch
from tether.verify import enumerable
from tether.verify.enumerable import INDEX, LENGTH, LENGTHS, MASK, PROMPT_IDS, REWARDS, STRINGS, total_variation
from tether.verify.expectation import EVEN, START, attempt, in_float64, judges, led_by_expectation, step_loss
from tether.verify.fixed_points import Rule, field, fixed_point, moments, settled

N = len(STRINGS)


@dataclass(frozen=True)
class Method:
    settings: dict[str, Any]
    rule: Rule
    beta: float


def method(pull: Any, beta: float, scale: bool = False, per_length: bool = False, **settings: Any) -> Method:
    return Method(settings, Rule(pull, scale, per_length), beta)


METHODS = {
    # k1 of the whole answer in the reward: at the optimum all answers earn the same, so no baseline, spread or weight moves it.
    "reinforce": method("reward", 0.5, preset="reinforce"),
    "rloo": method("reward", 0.5, preset="rloo"),
    "reinforce_pp": method("reward", 0.5, preset="reinforce_pp"),
    "grpo, group_mean, k1 in the reward": method("reward", 0.5, preset="grpo", advantage="group_mean", kl_in="reward"),
    "grpo, k1 in the reward": method("reward", 0.5, preset="grpo", kl_in="reward"),
    # The tie in the loss acts at each token for itself. k3 pulls along KL(reference, policy), k2 along KL(policy, reference).
    "dr_grpo, k3": method("k3", 0.5, preset="dr_grpo"),
    "dr_grpo, k2": method("k2", 0.5, preset="dr_grpo", kl_kind="k2"),
    "dr_grpo, ratio times k3": method("k2", 0.5, preset="dr_grpo", kl_unbiased=True),
    # Divided by the spread of the rewards, which shrinks as the policy learns.
    "dapo, k3": method("k3", 1.0, scale=True, preset="dapo"),
    "cispo, k3": method("k3", 1.0, scale=True, preset="cispo"),
    "reinforce_pp_baseline, k2": method("k2", 2.0, scale=True, advantage="reinforce_pp_baseline", std="population", kl_kind="k2"),
    # A mean over each answer's tokens: long answers weigh less.
    "grpo, k3": method("k3", 1.0, scale=True, per_length=True, preset="grpo"),
    "gspo, k3": method("k3", 1.0, scale=True, per_length=True, preset="gspo"),
}


def recipe_of(name: str, group: int, **changes: Any) -> GRPORecipe:
    size = {"model": "m", "data": "d", "num_generations": group, "batch_size": group, "max_completion_length": LENGTH}
    given = {"dynamic_sampling": False, "overlong_cache": None, "beta": METHODS[name].beta, **METHODS[name].settings}
    return GRPORecipe(**{**size, **given, **changes})


def test_every_preset_is_here() -> None:
    assert {m.settings["preset"] for m in METHODS.values() if "preset" in m.settings} == set(POLICY_PRESETS) - {"ppo"}


# --- where a method ends ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return enumerable.save(tmp_path_factory.mktemp("start"), START)


@pytest.fixture(scope="module")
def start_logps(start: Path) -> Tensor:
    return enumerable.table(in_float64(start)).detach()


@pytest.mark.parametrize("name", METHODS)
def test_at_the_fixed_point_the_expected_update_is_nothing(name: str, start_logps: Tensor) -> None:
    m = METHODS[name]
    p = fixed_point(m.rule, start_logps, m.beta)
    assert float(p.sum()) == pytest.approx(1, abs=1e-12)
    assert max(abs(x) for row in field(m.rule, p, start_logps, m.beta).values() for x in row) < 1e-12
    assert max(abs(x) for row in field(m.rule, start_logps.sum(1).exp(), start_logps, m.beta).values() for x in row) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_the_expected_update_of_a_method_ends_at_its_fixed_point(name: str, start: Path, start_logps: Tensor) -> None:
    m = METHODS[name]
    p, want = led_by_expectation(recipe_of(name, EVEN), start, start_logps), fixed_point(m.rule, start_logps, m.beta)
    distance = total_variation(p, want)
    print(f"{name}: {distance:.4f} from its fixed point, which is {total_variation(want, start_logps.sum(1).exp()):.3f} from the start")
    assert total_variation(want, start_logps.sum(1).exp()) > 0.2, "there is a way to go"
    assert distance < 0.02
    for other in {r.rule for r in METHODS.values()} - {m.rule}:
        if not other.scale or m.rule.scale:  # at a beta that suits plain rewards, scaled ones have no fixed point to speak of
            assert distance < total_variation(want, fixed_point(other, start_logps, m.beta)) / 2, f"as near to that of {other}"


@pytest.mark.slow
def test_a_weak_k2_tie_cannot_hold_a_reward_divided_by_its_spread(start: Path, start_logps: Tensor) -> None:
    """The surer the policy, the smaller the spread and the larger the advantages: below some beta there is nowhere to rest but a
    policy with one answer. The pull of k3 grows without bound as a probability falls, and holds."""
    weak, scaled = 0.5, Rule("k2", scale=True)
    for spread in (0.02 * i for i in range(1, 21)):
        p = settled(scaled, start_logps, weak, mean=0.0, spread=spread)
        assert moments(p)[1] < spread, "a fixed point would have the spread that it was solved with"
    got = led_by_expectation(recipe_of("reinforce_pp_baseline, k2", EVEN, beta=weak), start, start_logps)
    assert float(got.max()) > 0.99
    assert float(fixed_point(Rule("k3", scale=True), start_logps, weak).max()) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rloo", "grpo, group_mean, k1 in the reward"])
def test_a_run_with_sampled_answers_ends_there_too(name: str, start: Path, start_logps: Tensor, tmp_path: Path) -> None:
    """The loop whole: sampler, rewards, reference, clipping, AdamW and its schedule. Its noise dies out, since at the optimum all
    answers earn the same."""
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": enumerable.PROMPT}) + "\n")
    where = {"model": str(start), "data": str(tmp_path / "prompts.jsonl"), "run": str(tmp_path / "run"), "trackers": []}
    pace = {"learning_rate": 0.01, "lr_scheduler": "cosine", "adam_beta1": 0.5, "adam_beta2": 0.95, "max_steps": 250}
    recipe = recipe_of(name, 128, precision="fp32", sampling_slots=128, save_steps=1000, log_every=1000, **where, **pace)
    with Run.create(str(tmp_path / "run"), recipe) as run:
        grpo.train(recipe, run, rewards=[enumerable.reward])
    p = enumerable.distribution(Policy.load(tmp_path / "run/model", precision="fp32"))
    distance = total_variation(p, fixed_point(METHODS[name].rule, start_logps, recipe.beta))
    print(f"{name}: {distance:.4f} from its fixed point")
    assert distance < 0.02


# --- which way a step goes --------------------------------------------------------------------------------------------------------

GROUP, DRAWN, DIRECTIONS = 3, 4000, 8
# A chi-square variable with 8 degrees of freedom is above this as seldom as a normal one is beyond 3 standard errors (0.0027).
THREE_STANDARD_ERRORS = 23.574
EXACT = {"rtol": 1e-6, "atol": 1e-6}  # the model's norms compute in float32, whatever its weights are


class World:
    """A policy, another one as its reference, and everything about both that can be written down."""

    def __init__(self, folder: Path) -> None:
        self.folder = enumerable.save(folder / "policy", START)
        self.policy = in_float64(self.folder)
        self.parameters = list(self.policy.parameters().values())
        lp = enumerable.table(self.policy)
        rows = [torch.cat([g.reshape(-1) for g in torch.autograd.grad(x, self.parameters, retain_graph=True)]) for x in lp[MASK]]
        # Some random directions stand for all 2096 parameters, so that one number can judge them together.
        self.directions = torch.randn(len(rows[0]), DIRECTIONS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        self.jacobian = torch.zeros(N, LENGTH, DIRECTIONS, dtype=torch.float64)
        self.jacobian[MASK] = torch.stack(rows) @ self.directions
        self.lp = lp.detach()  # (40, 3)
        self.ref = enumerable.table(in_float64(enumerable.save(folder / "reference", seed=1))).detach()
        self.p = self.lp.sum(1).exp()
        ids = torch.cartesian_prod(*[torch.arange(N)] * GROUP)  # (64000, 3): every group there is, in every order
        self.groups, self.weights = ids, self.p[ids].prod(1)

    def project(self, c: Tensor) -> Tensor:
        """Coefficients (40, 3) on the log-probs -> the gradient of the parameters in the directions, (8,)."""
        return torch.einsum("nt,ntd->d", c, self.jacobian)

    def objective(self, beta: float) -> Tensor:
        """Gradient of E[R] - beta KL(policy, reference) over whole answers."""
        value = self.p * (REWARDS - beta * (self.lp - self.ref).sum(1))
        return self.project(value[:, None] * MASK)

    def expected(self, name: str, beta: float) -> Tensor:
        """The mean of a method's published formula over all groups."""
        c = self.weights[:, None, None] * published(name, self.groups, self.lp - self.ref, beta)
        return self.project(torch.zeros(N, LENGTH, dtype=torch.float64).index_add_(0, self.groups.flatten(), c.flatten(0, 1)))


def published(name: str, groups: Tensor, d: Tensor, beta: float) -> Tensor:
    """What each method's paper adds to a token's log-prob, at ratio 1: (n, G) strings -> (n, G, 3). `d`: log pi - log ref, (40, 3)."""
    mask, lengths = MASK[groups].double(), LENGTHS[groups][..., None].double()
    rewards, d = REWARDS[groups], d[groups] * mask
    size, tokens = groups.shape[1], lengths.sum(1, keepdim=True)
    k3 = beta * (1 - torch.exp(-d))

    def centred(x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)

    def scaled(x: Tensor, over: int) -> Tensor:
        """Sample (over n - 1) or population spread; a group of equals has nothing to tell."""
        spread = (centred(x) ** 2).sum(1, keepdim=True).div(over).sqrt()
        return torch.where(spread > 1e-7, centred(x) / (spread + 1e-6), 0.0)

    tied = rewards - beta * d.sum(2)
    to_go = (rewards[..., None] - beta * d.flip(2).cumsum(2).flip(2)) * mask
    middle = to_go.sum((1, 2), keepdim=True) / tokens
    whitened = (to_go - middle) / ((((to_go - middle) * mask) ** 2).sum((1, 2), keepdim=True) / tokens + 1e-8).sqrt()
    formulas = {
        "reinforce": centred(tied)[..., None] / size,
        "rloo": (tied - (tied.sum(1, keepdim=True) - tied) / (size - 1))[..., None] / size,
        "reinforce_pp": whitened / tokens,
        "grpo, group_mean, k1 in the reward": centred(tied)[..., None] / lengths / size,
        "grpo, k1 in the reward": scaled(tied, size - 1)[..., None] / lengths / size,
        "dr_grpo, k3": (centred(rewards)[..., None] - k3) / (size * LENGTH),
        "dr_grpo, k2": (centred(rewards)[..., None] - beta * d) / (size * LENGTH),
        "dr_grpo, ratio times k3": (centred(rewards)[..., None] - beta * (torch.exp(-d) - 1 + d) - k3) / (size * LENGTH),
        "dapo, k3": (scaled(rewards, size - 1)[..., None] - k3) / tokens,
        "cispo, k3": (scaled(rewards, size - 1)[..., None] - k3) / tokens,
        "reinforce_pp_baseline, k2": (scaled(rewards, size)[..., None] - beta * d) / tokens,
        "grpo, k3": (scaled(rewards, size - 1)[..., None] - k3) / lengths / size,
        "gspo, k3": (scaled(rewards, size - 1)[..., None] - k3) / lengths / size,
    }
    return formulas[name] * mask


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def drawn(world: World) -> Counter[tuple[int, ...]]:
    """Groups from the sampler, counted; the order within a group is of no account."""
    policy = Policy.load(world.folder, precision="fp32")
    sampler = LocalSampler(policy.model, policy.codec, precision="fp32", slots=1024)
    made = sampler.sample([Request(PROMPT_IDS, Sampling(max_new_tokens=LENGTH), GROUP * DRAWN, "groups")])
    ids = [INDEX[tuple(c.tokens)] for c in made]
    return Counter(tuple(sorted(ids[i : i + GROUP])) for i in range(0, len(ids), GROUP))


def coefficients(recipe: GRPORecipe, world: World, rows: tuple[int, ...]) -> Tensor:
    """(40, 3): what one group adds to each log-prob, by the package."""
    lp = world.lp.clone().requires_grad_()
    return -torch.autograd.grad(step_loss(recipe, torch.tensor(rows), lp, world.ref), lp)[0]


@pytest.mark.parametrize("name", METHODS)
def test_the_package_and_the_formula_agree_group_by_group(name: str, world: World) -> None:
    recipe = recipe_of(name, GROUP)
    for rows in ((0, 1, 2), (3, 20, 39), (39, 5, 5), (12, 12, 12), (7, 30, 31)):
        want = torch.zeros(N, LENGTH, dtype=torch.float64)
        want.index_add_(0, torch.tensor(rows), published(name, torch.tensor([rows]), world.lp - world.ref, recipe.beta)[0])
        torch.testing.assert_close(coefficients(recipe, world, rows), want, rtol=2e-6, atol=2e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_the_mean_of_sampled_gradients_is_the_exact_gradient(name: str, world: World, drawn: Counter[tuple[int, ...]]) -> None:
    """All eight directions are judged together: the squared distance in standard errors, with their correlations."""
    recipe = recipe_of(name, GROUP)
    gradients = torch.stack([world.project(coefficients(recipe, world, rows)) for rows in drawn])  # (groups, 8)
    counts = torch.tensor(list(drawn.values()), dtype=torch.float64)
    mean = (counts @ gradients) / DRAWN
    spread = torch.einsum("n,ni,nj->ij", counts, gradients - mean, gradients - mean) / (DRAWN - 1) / DRAWN

    def squared_distance(exact: Tensor) -> float:
        return float((mean - exact) @ torch.linalg.solve(spread, mean - exact))

    exact = world.expected(name, recipe.beta)
    print(f"{name}: chi-square {squared_distance(exact):.1f}, 8 expected")
    assert squared_distance(exact) < THREE_STANDARD_ERRORS
    assert squared_distance(0.8 * exact) > THREE_STANDARD_ERRORS, "a bias of a fifth would be seen"
    assert squared_distance(world.expected(name, 0.5 * recipe.beta)) > THREE_STANDARD_ERRORS, "and half a tie"


@pytest.mark.parametrize("name, scale", [("rloo", 1.0), ("reinforce", 1 - 1 / GROUP)])
def test_what_is_unbiased_is_the_gradient_of_the_objective(name: str, scale: float, world: World) -> None:
    """A baseline that holds the answer itself costs 1/G and changes no direction."""
    torch.testing.assert_close(world.expected(name, 0.5), scale * world.objective(0.5), **EXACT)


def test_small_groups_make_a_tie_in_the_loss_stronger(world: World) -> None:
    """Centring by a mean that holds the answer itself takes 1/G off the reward's part and nothing off the tie's: beta acts as
    beta G/(G - 1)."""
    reward = LENGTH * world.expected("dr_grpo, k3", 0.0)
    tie = LENGTH * world.expected("dr_grpo, k3", 1.0) - reward
    torch.testing.assert_close(reward, (1 - 1 / GROUP) * world.objective(0.0), **EXACT)
    torch.testing.assert_close(tie, -world.project(world.p[:, None] * (1 - torch.exp(world.ref - world.lp)) * MASK), **EXACT)


class Caught:
    """Takes the gradient where the loop would take a step."""

    step = 0

    def __init__(self, world: World) -> None:
        self.world, self.gradient = world, torch.zeros(())

    def apply(self, loss: float) -> None:
        assert math.isfinite(loss)
        self.gradient = torch.cat([p.grad.reshape(-1) for p in self.world.parameters]) @ self.world.directions  # type: ignore[union-attr]
        for p in self.world.parameters:
            p.grad = None


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("budget", [1, 10_000])
def test_the_updates_of_the_loop_backpropagate_just_that(name: str, budget: int, world: World) -> None:
    """Through the engine, with shared prompts, several groups in a step and any micro-batch."""
    chosen = [(1, 22, 3), (8, 39, 8), (30, 4, 17)]
    recipe = recipe_of(name, GROUP, batch_size=9, tokens_per_micro_batch=budget)
    batch = token_batch([[attempt(i, g, k) for k, i in enumerate(rows)] for g, rows in enumerate(chosen)])
    rows = torch.tensor(chosen).flatten()
    old, ref = world.lp[rows], world.ref[rows]
    advantages = grpo.advantages_of(recipe, batch, old, ref, recipe.beta, judges())
    loop: Any = Caught(world)
    grpo.updates(recipe, world.policy, loop, batch, advantages, old, ref, recipe.beta)
    [mini] = mini_batches(batch, 1, "")
    [part] = parts(batch, mini.examples, 10**6)
    lp = world.lp.clone().requires_grad_()
    loss, _ = grpo.part_loss(recipe, batch, part, mini, lp[rows], advantages, old, ref, None, recipe.beta)
    [c] = torch.autograd.grad(loss, lp)
    torch.testing.assert_close(loop.gradient, world.project(c), rtol=1e-5, atol=1e-7)
