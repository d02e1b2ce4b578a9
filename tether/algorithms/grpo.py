"""Policy gradients from groups of sampled answers: GRPO and the methods around it.

GRPO (Shao et al. 2024, arXiv:2402.03300, eq. 3): sample G answers to a prompt, take A = (R - mean of the group)/(std of the group),
maximise min(rho A, clip(rho) A) per token, rho = pi/old, minus beta k3(pi, ref). The other methods change the advantage, the
surrogate, the reduction or the place of the KL; each is a row of `losses/sheet.py: POLICY_PRESETS`, and nothing below asks which.

Ours: without a preset tokens are averaged over the whole step and beta is 0. A prompt is computed once for all its answers.
Every mean divides by a total of the whole optimiser step, so micro-batches do not show. With one update for a batch rho is 1 by
construction, and the loss shown may be 0 with a gradient that is not. A group whose rewards agree has advantages of exactly 0 and
is computed without a backward pass; a step of such groups alone changes no weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from tether import ranks
from tether.advantage import ADVANTAGES, MIXTURES, reward_to_go
from tether.learner import Anchor, Learner
from tether.loop import Loop, Tally
from tether.losses.kl import AdaptiveKL, penalised_rewards, shaped_rewards
from tether.losses.policy_gradient import mismatch_weights, policy_loss
from tether.masked import all_equal, masked_whiten
from tether.policy import Policy
from tether.recipe import GRPORecipe
from tether.reward import Reward, RewardFunction, Rewards
from tether.rl_metrics import record, row_metrics, sampling_difference, warn, weight_metrics
from tether.rollouts import Rollouts, check_first_step, evaluate, load_prompts, make_rewards
from tether.run import Run
from tether.stopwatch import Stopwatch
from tether.token_batch import MiniBatch, Part, TokenBatch, mini_batches, over_all, parts, token_batch
from tether.token_rows import to_rows


def train(recipe: GRPORecipe, run: Run, rewards: Sequence[Reward | RewardFunction] | None = None) -> dict[str, Any]:
    """Run the recipe to its end, from wherever the run directory stands. Returns the summary, also written to the run.

    `rewards`: functions in place of the recipe's names, such as `[lambda prompts, completions: [...]]`.
    """
    # 1. What judges, the model, the prompts.
    with closing(make_rewards(recipe, run, rewards)) as judges:
        policy = Policy.from_recipe(recipe, run)
        data = load_prompts(recipe, policy, run)
        watch = Stopwatch()
        source = Rollouts(recipe, policy, data.train, judges, run, watch)
        anchor = Anchor(policy, recipe.reference_refresh_steps) if recipe.has_reference else None
        summary: dict[str, Any] = {"prompts": len(data.train), "preset": recipe.preset}
        with Loop(
            recipe,
            run,
            Learner(policy, anchor),
            n_rows=len(data.train),
            title=f"grpo ({recipe.preset or 'no preset'})",
            rows_per_step=recipe.groups_per_step,
            updates_per_step=recipe.updates_per_step,
        ) as loop:
            if data.held_out and run.is_new:
                evaluate(source, data.held_out, 0)
            checked = not run.is_new
            for step in loop:
                beta = float(loop.state.get("beta", recipe.beta))
                # 2. Attempts, sampled from the weights as they are, and scored.
                if anchor is not None and anchor.refresh(step):
                    loop.state["anchored"] = loop.update.applied
                    run.note("reference", "the policy has become its own reference", step=step + 1)
                at_reference = loop.update.applied == loop.state.get("anchored", 0)
                sampled = source.step(step, loop.rows())
                batch = token_batch(
                    sampled.groups, mask_truncated=recipe.mask_truncated, device=policy.device, least=min(2, recipe.num_generations)
                )
                # 3. Their log-probs under the policy that sampled (where more is asked than one update) and the reference.
                with watch("scoring"):
                    old, ref = constants(recipe, policy, anchor, batch, first=not checked)
                    if not checked and old is not None:
                        checked = check_first_step(run, policy, batch, old, ref)
                # 4. How much better than the others each one did.
                advantages = advantages_of(recipe, batch, old, ref, beta, judges)  # (R,) or (R, T)
                # 5. Updates.
                with watch("update"):
                    old = old if needs_old(recipe) else None
                    tally = updates(recipe, policy, loop, batch, advantages, old, ref, beta, at_reference=at_reference)
                # 6. What happened.
                kl = tally.means().get("objective/kl")
                if recipe.kl_target is not None and kl is not None:
                    loop.state["beta"] = AdaptiveKL(beta, recipe.kl_target, recipe.kl_horizon).update(kl, recipe.batch_size)
                per_row = advantages if advantages.dim() == 1 else advantages.sum(1) / batch.mask.sum(1).clamp(min=1)
                record(run, loop.step + 1, sampled, batch, per_row)
                extra = {**sampled.metrics, **({"kl_coef": beta} if anchor is not None else {})}
                if len(per_row):
                    extra["advantage/abs_mean"] = float(per_row.abs().mean())
                warn(run, batch, advantages, step, tally.means())
                loop.end(tally, {**extra, **watch.metrics()})
                if data.held_out and loop.due(recipe.eval_steps):
                    evaluate(source, data.held_out, loop.step)
            summary["steps"] = loop.step

        # 7. The result, and what it does on prompts it has not seen.
        if data.held_out:
            summary["held_out"] = {"n": len(data.held_out), **evaluate(source, data.held_out, loop.step)}
        policy.save_result(run)
        return run.finish(summary)


def needs_old(recipe: GRPORecipe) -> bool:
    """With one update for a batch the policy is `old` itself, and rho is 1 without computing it."""
    return recipe.updates_per_step > 1 or recipe.importance != "none" or (recipe.beta > 0 and recipe.kl_in == "reward")


def constants(
    recipe: GRPORecipe, policy: Policy, anchor: Anchor | None, batch: TokenBatch, *, first: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Log-probs (R, T) of the sampled tokens before the update: under the policy, and under the reference."""
    budget, heat = recipe.tokens_per_micro_batch, recipe.temperature
    old = ref = None
    if needs_old(recipe) or first:
        old = over_all(batch, lambda packed: policy.logprobs(packed, heat), budget, policy.device)
    if anchor is not None:
        with anchor.reference() as reference:
            ref = over_all(batch, lambda packed: reference.logprobs(packed, heat), budget, policy.device)
    return old, ref


def advantages_of(recipe: GRPORecipe, batch: TokenBatch, old: Tensor | None, ref: Tensor | None, beta: float, judges: Rewards) -> Tensor:
    """(R,), or (R, T) for reinforce_pp. A cost of distance from the reference comes before any baseline."""
    if not batch.rollouts:
        return torch.zeros(0, device=batch.mask.device)
    tied = recipe.kl_in == "reward" and ref is not None and beta > 0
    rewards = batch.rewards.to(batch.mask.device)
    if recipe.advantage == "reinforce_pp":
        # Hu 2025: reward-to-go of (the score at the end, k1 at every token), whitened over the tokens of the step.
        here = old if tied and old is not None else torch.zeros_like(batch.sampled_logp)
        there = ref if tied and ref is not None else here
        scores = torch.where(batch.active, rewards, 0.0)
        to_go = reward_to_go(shaped_rewards(scores, here.double(), there.double(), batch.mask, kl_coef=beta if tied else 0.0), batch.mask)
        few = int(batch.mask.sum()) < 2
        return (torch.zeros_like(to_go) if few else masked_whiten(to_go, batch.mask, std_kind=recipe.std)).float()
    if tied and old is not None and ref is not None:
        rewards = penalised_rewards(rewards, old, ref, batch.mask, beta)
    if recipe.reward_mixture == "normalize_then_sum":
        acting = [r for r in judges.rewards if r.weight != 0]
        table = [[float("nan") if (v := r.rewards[judge.name]) is None else v for judge in acting] for r in batch.rollouts]
        weights = torch.tensor([judge.weight for judge in acting], dtype=torch.float64)
        return (
            MIXTURES[recipe.reward_mixture](torch.tensor(table, dtype=torch.float64), weights, batch.groups, recipe.std).to(rewards).float()
        )
    advantages = ADVANTAGES[recipe.advantage](rewards, batch.groups.to(rewards.device), recipe.std).float()
    return advantages if tied else torch.where(flat_rows(recipe, batch).to(rewards.device), 0.0, advantages)


def flat_rows(recipe: GRPORecipe, batch: TokenBatch) -> Tensor:
    """(R,) whether all that a row is compared with earned the same up to rounding: AdamW would make full steps of such noise."""
    groups = torch.zeros_like(batch.groups) if recipe.advantage == "batch_mean" else batch.groups
    flat = torch.zeros(len(groups), dtype=torch.bool)
    for group in torch.unique(groups):
        rewards = batch.rewards[groups == group]
        flat[groups == group] = all_equal(rewards[torch.isfinite(rewards)])
    return flat


def updates(
    recipe: GRPORecipe,
    policy: Policy,
    loop: Loop,
    batch: TokenBatch,
    advantages: Tensor,
    old: Tensor | None,
    ref: Tensor | None,
    beta: float,
    *,
    at_reference: bool = False,
) -> Tally:
    """All optimiser steps on one batch. Returns what they came to on all ranks.

    `at_reference`: the policy is its reference, which then pulls nowhere. What its gradient would hold is rounding, and AdamW makes
    a full step of any gradient, however small.
    """
    tally = Tally()
    tally.tokens = ranks.once(batch.tokens)
    if not batch.rollouts:  # dynamic sampling found no group to learn from
        loop.rest()
        return tally.merged()
    weights = None
    if recipe.importance != "none" and old is not None:
        bounds = {"c_min": recipe.importance_min, "c_max": recipe.importance_max}
        weights = mismatch_weights(old, batch.sampled_logp, batch.mask, recipe.importance, **bounds)
        weight_metrics(tally, weights, old, batch)
    if old is not None:
        sampling_difference(tally, old, batch.sampled_logp, batch.mask)
    tied = recipe.kl_in == "loss" and ref is not None and beta > 0
    for number in range(recipe.updates_per_batch):
        for mini in mini_batches(batch, recipe.mini_batches, f"{recipe.seed}/{loop.step}/{number}"):
            pulls = tied and not at_reference
            taught = [i for i in mini.examples if pulls or bool((advantages[batch.rows[i]] != 0).any())]
            silent = [i for i in mini.examples if i not in set(taught)]
            shares: dict[str, float] = {}
            for grad, examples in ((True, taught), (False, silent)):
                for part in parts(batch, examples, recipe.tokens_per_micro_batch, policy.device):
                    with torch.set_grad_enabled(grad):
                        logps, stats = policy.logprobs(part.packed, recipe.temperature, stats=True)  # (M,)
                        lp = to_rows(part.packed, logps, batch.width)  # (A, T)
                        loss, metrics = part_loss(recipe, batch, part, mini, lp, advantages, old, ref, weights, beta)
                    if grad:
                        loss.backward()
                    metrics["loss"], metrics["entropy"] = loss.detach(), stats["entropy"].sum() / mini.total_tokens
                    for name, share in metrics.items():
                        shares[name] = shares.get(name, 0.0) + float(share)
                    row_metrics(tally, batch, part.rows, lp.detach(), old, ref)
            shares = ranks.total(shares)
            for name, mean in shares.items():
                tally.add_ratio(name, ranks.once(mean), ranks.once(1.0))
            if taught:
                loop.apply(shares["loss"])
                at_reference = False
            else:
                loop.rest()
    return tally.merged()


def part_loss(
    recipe: GRPORecipe,
    batch: TokenBatch,
    part: Part,
    mini: MiniBatch,
    lp: Tensor,
    advantages: Tensor,
    old: Tensor | None,
    ref: Tensor | None,
    weights: Tensor | None,
    beta: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A part's share of the loss of its mini-batch; lp (A, T) are the policy's log-probs with gradient."""
    rows = part.rows
    in_loss = recipe.kl_in == "loss" and ref is not None
    settings = recipe.loss_settings()
    loss, metrics = policy_loss(
        lp,
        lp.detach() if old is None else old[rows],
        advantages[rows],
        batch.mask[rows],
        weights=None if weights is None else weights[rows],
        ref_logp=None if ref is None else ref[rows],
        kl_coef=beta if in_loss else 0.0,
        total_tokens=mini.total_tokens,
        total_rows=mini.all_rows if settings["mode"] == "seq-mean-token-sum-norm" else mini.active_rows,
        **settings,
    )
    if "clip_ratio/low_mean" in metrics:
        metrics["clip_ratio/region_mean"] = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
    return loss, metrics
