"""The loss, the advantages and the gradient: each against arithmetic that shares nothing with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tether.algorithms import linear_reward
from tether.critic import SeparateCritic, SharedCritic, make_critic
from tether.packing import pack
from tether.recipe import GRPORecipe, PPORecipe, RewardRecipe
from tether.token_batch import TokenBatch
from tether.token_rows import to_rows
from tether.verify import formulas, objectives, policy_step, sampled
from tether.verify.check import Found, LeftOut, largest
from tether.verify.subject import Desk, Subject

EXACT = 1e-5  # advantages are float32 inside; everything else here is float64
DIRECTIONS, ROWS = 3, 2
SLOPE = 1e-4  # norms of transformers compute in float32 whatever the weights are, which a difference quotient sees


def loss_is_its_formula(subject: Subject) -> Found:
    """Value and slopes of the loss, with the recipe's own settings, on made-up log-probs that reach every branch of it."""
    recipe = subject.recipe
    if isinstance(recipe, RewardRecipe) and recipe.features:
        return _linear(recipe)
    if isinstance(recipe, GRPORecipe | PPORecipe):
        return _policy_loss(recipe)
    step, values = objectives.random_step(recipe)
    leaf = values.clone().requires_grad_()
    loss = objectives.by_loop(step, leaf)
    [slope] = torch.autograd.grad(loss, leaf)
    flat = values.flatten().tolist()
    plain = objectives.by_formula(step, flat)
    slopes = formulas.slopes(lambda x: objectives.by_formula(step, x), flat)
    return _found(loss, slope.flatten(), plain, slopes, _settings(subject))


def _found(loss: Tensor, slope: Tensor, plain: float, slopes: list[float], settings: str) -> Found:
    value = abs(float(loss.detach()) - plain) / max(1.0, abs(plain))
    bent = largest(slope, torch.tensor(slopes, dtype=torch.float64)) / max(max(map(abs, slopes)), 1e-12)
    detail = f"{settings}: loss {float(loss.detach()):.6f}, formula {plain:.6f}; {len(slopes)} slopes differ by {bent:.1e} of the largest"
    return Found(max(value, bent), EXACT, detail)


def _settings(subject: Subject) -> str:
    recipe: Any = subject.recipe
    settings = recipe.loss_settings() if recipe.command == "dpo" else {"loss": recipe.command}
    return ", ".join(str(v) if isinstance(v, str) else f"{k} {v:g}" for k, v in settings.items())


def _policy_loss(recipe: GRPORecipe | PPORecipe) -> Found:
    batch = policy_step.batch_of(recipe, sampled.made_up(recipe, [[1, 2]], 50))
    held = policy_step.constants(batch)
    given = policy_step.learnt(recipe, batch, held)
    lp, values = policy_step.moved(recipe, batch, held, given)
    leaves = [lp.clone().requires_grad_(), values.clone().requires_grad_()]
    loss = policy_step.by_loop(recipe, batch, held, given, *leaves)
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    slope = torch.cat([g[batch.mask] for g in found if g is not None])
    # The loop's own advantages: whether those are right is another line.
    a = given.advantages.double()
    a = a if a.dim() == 2 else a[:, None].expand_as(lp)
    returns = None if given.returns is None else policy_step.rows_of(given.returns.double(), batch)
    taken = (policy_step.rows_of(a, batch), returns)
    rows = policy_step.tries(batch, held)
    if not recipe.has_reference:
        rows = policy_step.without_reference(rows)
    sizes = [t.tokens for t in rows]
    with_critic = returns is not None
    flat = [*lp[batch.mask].tolist(), *(values[batch.mask].tolist() if with_critic else [])]

    def formula(x: list[float]) -> float:
        n = sum(sizes)
        here, there = policy_step.cut(x[:n], sizes), policy_step.cut(x[n:], sizes)
        return policy_step.by_formula(recipe, rows, taken, here, there, policy_step.rows_of(lp, batch))

    settings = [f"ratios within {1 - recipe.eps_low:g} to {1 + recipe.eps_high:g}", f"beta {recipe.beta:g}"]
    if isinstance(recipe, GRPORecipe):
        settings = [
            recipe.surrogate,
            recipe.aggregation,
            *settings,
            *([f"kl {recipe.kl_kind}"] if recipe.kl_in == "loss" and recipe.beta else []),
        ]
    return _found(loss, slope, formula(flat), formulas.slopes(formula, flat), ", ".join(settings))


def advantages_are_their_formula(subject: Subject) -> Found:
    """From rewards to advantages (and with a critic to returns), on made-up groups: one agrees, one holds an unscored attempt."""
    recipe = subject.recipe
    if not isinstance(recipe, GRPORecipe | PPORecipe):
        raise LeftOut("nothing is rewarded")
    batch = policy_step.batch_of(recipe, sampled.made_up(recipe, [[1, 2]], 50))
    held = policy_step.constants(batch, seed=2)
    given = policy_step.learnt(recipe, batch, held)
    rows = policy_step.tries(batch, held)
    if not recipe.has_reference:
        rows = policy_step.without_reference(rows)
    plain, returns = policy_step.targets(recipe, rows)
    a = given.advantages.double()
    a = a if a.dim() == 2 else a[:, None].expand(batch.mask.shape)
    gaps = [largest(a[batch.mask], torch.tensor([x for row in plain for x in row], dtype=torch.float64))]
    words = recipe.advantage if isinstance(recipe, GRPORecipe) else f"gae, lam {recipe.lam:g}, gamma {recipe.gamma:g}"
    if given.returns is not None:
        gaps.append(largest(given.returns.double()[batch.mask], torch.tensor([x for row in returns for x in row], dtype=torch.float64)))
        words += ", and returns"
    return Found(max(gaps), EXACT, f"{words}, of {len(rows)} attempts in {len({t.group for t in rows})} groups")


def gradient_is_the_slope(subject: Subject) -> Found:
    """The backward pass against difference quotients of the loss, in float64, along random directions of all trained weights."""
    if isinstance(subject.recipe, RewardRecipe) and subject.recipe.features:
        raise LeftOut("no language model is trained; the slopes are in the line above")
    model = subject.load(subject.small)
    model.model.double()
    parameters = list(model.parameters().values())
    stirred = torch.Generator().manual_seed(4)
    with torch.no_grad():  # a fresh adapter is 0, where half of its slopes are 0
        for p in parameters:
            p.add_(torch.randn(p.shape, generator=stirred, dtype=torch.float64).to(p) * 0.02)
    loss, more = _loss_of_weights(subject, model)
    parameters += more
    gradient = torch.autograd.grad(loss(), parameters, allow_unused=True)
    grads = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradient, strict=True)]
    _leave_out_padding(model.model, parameters, grads)
    size = _length(grads)
    gaps = []
    for k in range(DIRECTIONS):
        direction = _direction(grads, seed=k)
        _leave_out_padding(model.model, parameters, direction)
        expected = sum(float((g * d).sum()) for g, d in zip(grads, direction, strict=True))
        gaps.append(abs(expected - _quotient(loss, parameters, direction)) / max(size, 1e-12))
    count = sum(p.numel() for p in parameters)
    return Found(max(gaps), SLOPE, f"{DIRECTIONS} directions of {count:,} weights, gradient of length {size:.2g}, on {subject.small}")


def _direction(grads: list[Tensor], seed: int) -> list[Tensor]:
    """Of length 1: half along the gradient and half at random, so that there is a slope to see."""
    generator = torch.Generator().manual_seed(seed)
    noise = [torch.randn(g.shape, generator=generator, dtype=torch.float64).to(g) for g in grads]

    def unit(xs: list[Tensor]) -> list[Tensor]:
        return [x / max(_length(xs), 1e-12) for x in xs]

    return unit([a + b for a, b in zip(unit(grads), unit(noise), strict=True)])


def _leave_out_padding(model: Any, parameters: list[Any], tensors: list[Tensor]) -> None:
    """torch's embedding does not learn from the pad token as an input, and many tokenizers pad with the end mark: no direction there."""
    embedding = model.get_input_embeddings()
    pad = getattr(embedding, "padding_idx", None)
    for parameter, tensor in zip(parameters, tensors, strict=True):
        if parameter is embedding.weight and pad is not None:
            tensor[pad] = 0.0


def _length(tensors: list[Tensor]) -> float:
    return float(torch.stack([t.double().norm() for t in tensors]).norm())


@torch.no_grad()
def _quotient(loss: Any, parameters: list[Any], direction: list[Tensor], step: float = 2e-3) -> float:
    """Slope along a direction by four values: (8 (f(h) - f(-h)) - (f(2h) - f(-2h))) / 12h."""
    values, at = {}, 0.0
    for place in (1, -1, 2, -2, 0):
        for p, d in zip(parameters, direction, strict=True):
            p.add_(d, alpha=(place - at) * step)
        at = place
        if place:
            values[place] = float(loss())
    return (8 * (values[1] - values[-1]) - (values[2] - values[-2])) / (12 * step)


Loss = Callable[[], Tensor]


def _loss_of_weights(subject: Subject, model: Any) -> tuple[Loss, list[nn.Parameter]]:
    """The step's loss on the fewest rows that make one, as a function of the weights alone; and weights beside the model's."""
    recipe = subject.recipe
    if isinstance(recipe, GRPORecipe | PPORecipe):
        return _policy_loss_of_weights(subject, recipe, model)
    examples = subject.rows.examples[:ROWS]
    packed = pack(examples, device=model.device)
    step = objectives.Step(recipe, examples)
    if getattr(recipe, "has_reference", False):
        with torch.no_grad():
            sums = objectives.said(step, model, packed)
        # A reference near the policy and not at it: there some losses have a kink.
        step = objectives.Step(
            recipe, examples, sums.double() + torch.linspace(0.3, 1.1, len(sums), dtype=torch.float64).to(sums.device), 0.1
        )
    return lambda: objectives.by_loop(step, objectives.said(step, model, packed)), []


def _policy_loss_of_weights(subject: Subject, recipe: GRPORecipe | PPORecipe, model: Any) -> tuple[Loss, list[nn.Parameter]]:
    desk: Any = Desk(subject.folder)
    vocabulary = len(model.tokenizer)
    batch = policy_step.batch_of(
        recipe, sampled.made_up(recipe, [e.prompt for e in subject.rows.examples[:ROWS]], vocabulary), model.device
    )
    packed = pack(batch.examples, device=model.device)
    critic: SharedCritic | SeparateCritic | None = None
    more: list[nn.Parameter] = []
    if isinstance(recipe, PPORecipe):
        critic = make_critic(recipe.replace(critic_model=None, model=subject.small.name, lora=None), model, desk)
        if isinstance(critic, SharedCritic):  # its head starts at 0, where the trunk learns nothing from it; values are float32
            torch.nn.init.constant_(critic.head.weight, 0.1)
        else:
            critic.scalar.model.double()
            more = list(critic.parameters().values())

    def ask() -> tuple[Tensor, Tensor]:
        if critic is None:
            logps = model.logprobs(packed, recipe.temperature)
            return logps, torch.zeros_like(logps)
        logps, values, _ = critic.judge(model, packed, recipe.temperature)
        return logps, values

    order = policy_step.whole(batch)[0].rows

    def matrix(x: Tensor) -> Tensor:
        """(M,) -> (R, T)."""
        rows = to_rows(packed, x, batch.width)
        return rows.new_zeros(batch.mask.shape).index_copy(0, order, rows)

    with torch.no_grad():
        lp, values = (matrix(x) for x in ask())
    batch = near(batch, lp)
    held, given = _where_the_slope_lives(recipe, batch, lp.double(), values.double())

    def loss() -> Tensor:
        now, then = (matrix(x) for x in ask())
        return policy_step.by_loop(recipe, batch, held, given, now, then)

    return loss, more


def near(batch: TokenBatch, lp: Tensor) -> TokenBatch:
    """The attempts as if a sampler had drawn them that nearly agrees with training."""
    return dataclasses.replace(batch, sampled_logp=torch.where(batch.mask, lp - 0.05, 0.0).float())


def _where_the_slope_lives(
    recipe: GRPORecipe | PPORecipe, batch: TokenBatch, lp: Tensor, values: Tensor
) -> tuple[policy_step.Constants, policy_step.Learnt]:
    """Constants at which no ratio is near a bound: good attempts have become less likely, bad ones more. A weight that is cut off is
    a constant of cispo, and is cut off everywhere."""
    near = policy_step.Constants(lp, lp - 0.3, values - 0.01)
    given = policy_step.learnt(recipe, batch, near)
    a = given.advantages.double()
    a = a if a.dim() == 2 else a[:, None].expand_as(lp)
    shift = -0.5 * torch.sign(a)
    if isinstance(recipe, GRPORecipe) and recipe.surrogate == "cispo":
        shift = torch.full_like(lp, 1.0)
    if isinstance(recipe, GRPORecipe) and recipe.surrogate in ("seq_ratio", "gspo", "gspo_token"):
        shift = -0.5 * torch.sign(a.mean(1, keepdim=True)).expand_as(lp)
    return policy_step.Constants(lp - shift, lp - 0.3, values - 0.01), given


def _linear(recipe: RewardRecipe) -> Found:
    """The readable reward model takes the steps of gradient descent on its formula."""
    names, rate = list(recipe.features or []), recipe.feature_learning_rate
    generator = torch.Generator().manual_seed(6)
    chosen, rejected = (torch.rand(7, len(names), generator=generator, dtype=torch.float64).tolist() for _ in range(2))
    margins = [0.0, 0.5, 0.2, 0.0, 0.1, 0.0, 1.0] if recipe.margin else [0.0] * 7
    weights = [0.0] * len(names)
    pairs = list(zip(chosen, rejected, margins, strict=True))
    for _ in range(20):
        slope = formulas.slopes(lambda w: formulas.linear_reward(w, pairs, recipe.feature_l2), weights)
        weights = [w - rate * s for w, s in zip(weights, slope, strict=True)]
    settings: dict[str, Any] = {"learning_rate": rate, "epochs": 20, "l2": recipe.feature_l2, "margins": margins}
    model, _ = linear_reward.fit(chosen, rejected, names, **settings)
    gap = largest(torch.tensor(model.weights), torch.tensor(weights, dtype=torch.float64))
    return Found(
        gap, EXACT, f"20 steps on 7 made-up pairs of {len(names)} features, weights of length {float(torch.tensor(weights).norm()):.2g}"
    )
