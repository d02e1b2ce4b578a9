"""A step of the loop itself: whatever it is cut into, against the gradient worked out beside it, and kept by a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tether.algorithms import grpo, ppo
from tether.batch import Example
from tether.checkpoint import load_checkpoint, save_checkpoint
from tether.critic import SharedCritic
from tether.learner import Anchor, Learner
from tether.packing import micro_batches
from tether.policy import Policy
from tether.recipe import GRPORecipe, PPORecipe, RewardRecipe, SFTRecipe
from tether.step import Update
from tether.token_batch import over_all
from tether.verify import formulas, loops, objectives, plain, policy_step, sampled
from tether.verify.check import Found, LeftOut, flat, relative
from tether.verify.losses import near
from tether.verify.policy_formulas import Try
from tether.verify.small import move
from tether.verify.subject import Desk, Subject, gradients

SHARE = 1e-4  # of a gradient's largest entry


# -- any split ---------------------------------------------------------------------------------------------------------


def any_split_is_whole(subject: Subject) -> Found:
    """The same step in one micro-batch, in about two, and in one for each row: loss and gradient."""
    _needs_a_language_model(subject)
    examples, budgets, found = _split(subject)
    counts = [len(micro_batches(examples, budget)) for budget in budgets]
    if counts[-1] < 2:
        raise LeftOut("one row alone cannot be split")
    first = found[0]
    gaps = [relative(flat(first[0].values()), flat(other[0].values())) for other in found[1:]]
    losses = [abs(first[1] - other[1]) / max(1.0, abs(first[1])) for other in found[1:]]
    detail = f"{', '.join(map(str, counts))} micro-batches; losses differ by {max(losses):.1e}; on {subject.small}"
    return Found(max(*gaps, *losses), SHARE, detail)


def _split(subject: Subject) -> tuple[list[Example], list[int], list[tuple[dict[str, Tensor], float]]]:
    recipe = subject.recipe
    if isinstance(recipe, GRPORecipe | PPORecipe):
        return _split_updates(subject, recipe)
    examples = subject.rows.examples
    budgets = _budgets(examples)
    taken = [loops.take_once(subject, budget) for budget in budgets]
    return examples, budgets, [(t.gradient, t.loss) for t in taken]


def _budgets(examples: Sequence[Example]) -> list[int]:
    """Tokens of a micro-batch that cut the rows into one, two and as many as there are rows."""
    whole = sum(e.n_tokens for e in examples)
    two = next((b for b in range(whole // 2, whole) if len(micro_batches(examples, max(b, 1))) == 2), 1)
    return [loops.WHOLE, two, 1]


@dataclass
class Caught:
    """Stands where the loop would update: keeps the gradient and the loss instead."""

    parameters: dict[str, Any]
    step: int = 0
    gradient: dict[str, Tensor] = field(default_factory=dict)
    loss: float = 0.0

    def apply(self, loss: float) -> None:
        self.gradient, self.loss = gradients(self.parameters), loss

    def rest(self) -> None:
        self.gradient = gradients(self.parameters)


def _split_updates(
    subject: Subject, recipe: GRPORecipe | PPORecipe
) -> tuple[list[Example], list[int], list[tuple[dict[str, Tensor], float]]]:
    """By the loop's `updates` on made-up attempts, some ratios away from 1."""
    small: Any = loops.settings(subject, loops.WHOLE, subject.folder / "unused")
    parts = loops.models(subject, small)
    policy: Policy = parts[0]
    move(p for p in policy.parameters().values())
    prompts = [e.prompt for e in subject.rows.examples[: sampled.PROMPTS]]
    batch = policy_step.batch_of(small, sampled.made_up(small, prompts, len(policy.tokenizer)), policy.device)
    lp = over_all(batch, lambda packed: policy.logprobs(packed, small.temperature), loops.WHOLE, policy.device)
    noise = torch.randn(lp.shape, generator=torch.Generator().manual_seed(2)).to(lp) * 0.3
    held = policy_step.Constants(lp - noise, lp - 0.5 * noise.flip(0), 0.3 * noise.flip(1))
    batch = near(batch, lp)
    given = policy_step.learnt(small, batch, held)
    ref = held.ref if small.has_reference else None
    budgets, found = _budgets(batch.examples), []
    for budget in budgets:
        cut = small.replace(tokens_per_micro_batch=budget)
        loop: Any = Caught(loops.parameters(parts))
        if isinstance(cut, PPORecipe):
            assert given.returns is not None
            before = ppo.Before(held.old, held.values, ref)
            ppo.updates(cut, policy, parts[1], loop, batch, before, given.advantages, given.returns)
        else:
            old = held.old if grpo.needs_old(cut) else None
            grpo.updates(cut, policy, loop, batch, given.advantages, old, ref, cut.beta)
        found.append((loop.gradient, loop.loss))
    return batch.examples, budgets, found


# -- one step of the loop ----------------------------------------------------------------------------------------------


def a_step_follows_the_formula(subject: Subject) -> Found:
    """A whole run of one step, from files to weights, against the formula's slopes carried back through plain forward passes."""
    _needs_a_language_model(subject)
    taken = loops.take_once(subject, loops.WHOLE)
    parts = loops.models(subject, taken.recipe)
    told = _attempts(subject, taken, parts) if subject.samples else _rows(subject, taken, parts[0])
    told.surrogate.backward()
    wanted = gradients(loops.parameters(parts))
    gap = relative(flat(taken.gradient[name] for name in wanted), flat(wanted.values()))
    value = abs(taken.loss - told.loss) / max(1.0, abs(told.loss))
    detail = f"{told.words}; loss {taken.loss:.6f}, formula {told.loss:.6f}; on {subject.small}"
    return Found(max(gap, value), SHARE, detail)


@dataclass(frozen=True)
class Told:
    """The loss by the formula, and a sum whose gradient is the loss's."""

    loss: float
    surrogate: Tensor
    words: str


def _rows(subject: Subject, taken: loops.Taken, model: Any) -> Told:
    recipe, examples = taken.recipe, subject.rows.examples
    values = _said(recipe, model.model, examples)  # with gradient
    ref = None
    if getattr(recipe, "has_reference", False):
        with torch.no_grad():
            ref = values.detach()
            if recipe.reference != "start":
                ref = _said(recipe, Policy.load(recipe.reference, precision="fp32").model, examples)
    step = objectives.Step(recipe, examples, None if ref is None else ref.double())
    at = values.detach().double().flatten().tolist()
    slopes = values.new_tensor(formulas.slopes(lambda x: objectives.by_formula(step, x), at))
    words = f"{len(examples)} rows" + ("" if ref is None or recipe.reference == "start" else ", tied to another model")
    return Told(objectives.by_formula(step, at), (slopes * values.flatten()).sum(), words)


def _said(recipe: Any, model: Any, examples: Sequence[Example]) -> Tensor:
    """As `objectives.said`, a row at a time."""
    if isinstance(recipe, RewardRecipe):
        return plain.scores(model, examples)
    logps = plain.logprobs(model, examples)
    return logps if isinstance(recipe, SFTRecipe) else torch.stack([row.sum() for row in plain.by_answer(logps, examples)])


def _attempts(subject: Subject, taken: loops.Taken, parts: list[Any]) -> Told:
    """The attempts that the run sampled, with the rewards that it gave them. The policy is still the one that sampled, and the reference."""
    recipe, policy = taken.recipe, parts[0]
    active = [r for r in taken.rollouts if r.finished or not recipe.mask_truncated]
    examples = [Example(r.prompt_ids, [r.tokens], [r.trained]) for r in active]
    logps = plain.logprobs(policy.model, examples, recipe.temperature)
    values = _values(parts, examples) if len(parts) > 1 else torch.zeros_like(logps)
    cut, cut_values = (iter(plain.by_answer(x.detach().double(), examples)) for x in (logps, values))
    rows = []
    for r in taken.rollouts:
        names = list(r.rewards)
        if any(r is one for one in active):
            old = next(cut).tolist()
            state = {"old": old, "ref": old, "sampled": old, "old_values": next(cut_values).tolist()}
        else:
            state = {}
        rows.append(Try(r.group, r.total, tuple(r.rewards[name] for name in names), r.finished, **state))
    given = policy_step.targets(recipe, rows)
    sizes = [t.tokens for t in rows]

    def formula(x: list[float]) -> float:
        n = len(logps)
        here, there = policy_step.cut(x[:n], sizes), policy_step.cut(x[n:], sizes)
        return policy_step.by_formula(recipe, rows, given, here, there, [t.old for t in rows])

    both = torch.cat([logps, values]) if len(parts) > 1 else logps
    at = both.detach().double().tolist()
    slopes = logps.new_tensor(formulas.slopes(formula, at))
    words = f"{len(rows)} attempts sampled and rewarded by the loop"
    return Told(formula(at), (slopes * both).sum(), words)


def _values(parts: list[Any], examples: Sequence[Example]) -> Tensor:
    policy, critic = parts
    if isinstance(critic, SharedCritic):
        return plain.values(policy.model, critic.head, examples)
    return plain.values_of_scalar(critic.scalar.model, examples)


# -- checkpoint --------------------------------------------------------------------------------------------------------


def a_checkpoint_keeps_everything(subject: Subject) -> Found:
    """Two steps, a checkpoint, a fresh start from it: weights and optimiser bit for bit, and the same third step."""
    _needs_a_language_model(subject)
    recipe: Any = subject.recipe
    folder = subject.folder / "kept"
    folder.mkdir(exist_ok=True)
    desk = Desk(folder)
    learner, update = _learner(subject)
    for seed in (0, 1):
        _pretend(learner, seed)
        update.apply(loss=0.0)
    save_checkpoint(desk, 2, learner, update, {"beta": 0.25})
    fresh, again = _learner(subject)
    found = load_checkpoint(desk, fresh, again)
    faults = [] if found is not None and (found.step, found.extra) == (2, {"beta": 0.25}) else ["step or state is lost"]
    different = _different(learner, fresh, update, again)
    rates = (update.learning_rate(update.applied), again.learning_rate(again.applied))
    for each, one in ((learner, update), (fresh, again)):
        _pretend(each, 2)
        one.apply(loss=0.0)
    later = _different(learner, fresh, update, again)
    faults += [f"the learning rate goes on at {rates[1]:.2e} in place of {rates[0]:.2e}"] if rates[0] != rates[1] else []
    count = sum(p.numel() for p in learner.parameters().values())
    detail = f"{count:,} weights and their moments, and the next step ({recipe.lr_scheduler} schedule), on {subject.small}"
    return Found(different + later + len(faults), 0, "; ".join([*faults, detail]))


def _learner(subject: Subject) -> tuple[Any, Update]:
    recipe: Any = subject.recipe
    if not subject.samples:
        learner = subject.load(subject.small)
        return learner, Update(learner.parameters(), recipe, total_steps=10)
    parts = loops.models(subject, loops.settings(subject, loops.WHOLE, subject.folder / "unused"))
    anchor = Anchor(parts[0], 1) if recipe.has_reference else None
    if anchor is not None:
        anchor.refresh(1)
    learner = Learner(parts[0], anchor, parts[1] if len(parts) > 1 else None)
    rates = {"critic.": recipe.critic_rate} if isinstance(recipe, PPORecipe) else None
    return learner, Update(learner.parameters(), recipe, total_steps=10, rates=rates)


def _pretend(learner: Any, seed: int) -> None:
    """Gradients, as a backward pass would leave them."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in learner.parameters().values():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter) * 0.01


def _different(one: Any, other: Any, update: Update, again: Update) -> int:
    """How many numbers are not the same to the last bit."""
    first = {**{f"weight {n}": p for n, p in one.parameters().items()}, **update.state_dict()["tensors"]}
    second = {**{f"weight {n}": p for n, p in other.parameters().items()}, **again.state_dict()["tensors"]}
    missing = sum(first[name].numel() for name in first.keys() ^ second.keys() if name in first)
    return missing + sum(int((first[name] != second[name]).sum()) for name in first.keys() & second.keys())


def _needs_a_language_model(subject: Subject) -> None:
    if getattr(subject.recipe, "features", None):
        raise LeftOut("no language model is trained")
