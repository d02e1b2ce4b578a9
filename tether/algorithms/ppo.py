"""Proximal policy optimisation with a critic, on sampled answers.

PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9) as it is used for language models (Ziegler et al. 2019, arXiv:1909.08593):
the reward of a token is -beta (log old - log ref), that of the last token also holds the score; advantages come from generalised
advantage estimation against the critic; policy and critic are updated several times on each batch, both clipped.

Ours: the score stands at the last token that was sampled, the end mark where there is one, and exactly once. After that token
nothing follows, also where an answer was cut off. A missing end costs a penalty after the score was clipped, so that it survives. The
critic's returns use advantages before they are whitened. Every mean is over the tokens of the whole mini-batch, so micro-batches do
not show. Gradients of policy and critic are clipped together. `docs/ppo.md` compares this with TRL and OpenRLHF.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tether import ranks
from tether.advantage import gae
from tether.critic import Critic, make_critic
from tether.learner import Anchor, Learner
from tether.loop import Loop, Tally
from tether.losses.kl import AdaptiveKL, shaped_rewards
from tether.losses.policy_gradient import mismatch_weights, policy_loss
from tether.losses.value import explained_variance, value_loss
from tether.masked import masked_whiten, select
from tether.policy import Policy
from tether.ppo_scores import RunningSpread, scores_of
from tether.recipe import PPORecipe
from tether.reward import Reward, RewardFunction
from tether.rl_metrics import record, row_metrics, sampling_difference, warn, weight_metrics
from tether.rollouts import Rollouts, check_first_step, evaluate, load_prompts, make_rewards
from tether.run import Run
from tether.stopwatch import Stopwatch
from tether.token_batch import MiniBatch, Part, TokenBatch, mini_batches, over_all, parts, token_batch
from tether.token_rows import to_rows


@dataclass(frozen=True)
class Before:
    """What held when the batch was sampled: constants of its updates, all (R, T)."""

    logp: Tensor
    values: Tensor
    ref: Tensor | None


def train(recipe: PPORecipe, run: Run, rewards: Sequence[Reward | RewardFunction] | None = None) -> dict[str, Any]:
    """Run the recipe to its end, from wherever the run directory stands. Returns the summary, also written to the run."""
    # 1. What judges, the policy, the critic, the prompts.
    with closing(make_rewards(recipe, run, rewards)) as judges:
        policy = Policy.from_recipe(recipe, run)
        critic = make_critic(recipe, policy, run)
        data = load_prompts(recipe, policy, run)
        watch = Stopwatch()
        source = Rollouts(recipe, policy, data.train, judges, run, watch)
        anchor = Anchor(policy, recipe.reference_refresh_steps) if recipe.has_reference else None
        with Loop(
            recipe,
            run,
            Learner(policy, anchor, critic),
            n_rows=len(data.train),
            title=f"ppo ({recipe.critic} critic)",
            rows_per_step=recipe.groups_per_step,
            updates_per_step=recipe.updates_per_step,
            rates={"critic.": recipe.critic_rate},
        ) as loop:
            if data.held_out and run.is_new:
                evaluate(source, data.held_out, 0)
            checked = not run.is_new
            for step in loop:
                beta = float(loop.state.get("beta", recipe.beta))
                # 2. Attempts, sampled from the weights as they are, and scored.
                if anchor is not None and anchor.refresh(step):
                    run.note("reference", "the policy has become its own reference", step=step + 1)
                sampled = source.step(step, loop.rows())
                batch = token_batch(sampled.groups, mask_truncated=recipe.mask_truncated, device=policy.device, least=1)
                # 3. Log-probs and values of what was sampled, before anything moves.
                with watch("scoring"):
                    before = look(recipe, policy, critic, anchor, batch)
                    checked = checked or check_first_step(run, policy, batch, before.logp, before.ref)
                # 4. Scores: scaled, clipped, less the penalty for a missing end. The spread is kept for the next step.
                spread = RunningSpread.from_state(loop.state.get("scores"))
                scores, loop.state["scores"], clipped = scores_of(recipe, batch, spread)  # (R,)
                # 5. Rewards per token, and from them advantages and what the critic should have said.
                advantages, returns = advantages_of(recipe, batch, before, scores, beta)  # (R, T) each
                # 6. Several passes over the batch.
                with watch("update"):
                    tally = updates(recipe, policy, critic, loop, batch, before, advantages.float(), returns.float())
                # 7. What happened.
                extra = {**sampled.metrics, **objective(batch, before, scores, returns, beta), **clipped}
                if recipe.kl_target is not None and "objective/kl" in extra:
                    adapted = AdaptiveKL(beta, recipe.kl_target, recipe.kl_horizon)
                    loop.state["beta"] = adapted.update(extra["objective/kl"], len(batch.rollouts))
                record(run, loop.step + 1, sampled, batch, select(advantages, batch.mask).sum(1) / batch.mask.sum(1).clamp(min=1))
                warn(run, batch, advantages, step, {**tally.means(), **extra})
                warn_of_clipped_scores(run, recipe, step, clipped)
                loop.end(tally, {**extra, **watch.metrics()})
                if data.held_out and loop.due(recipe.eval_steps):
                    evaluate(source, data.held_out, loop.step)

        # 8. The result, and what it does on prompts it has not seen.
        summary: dict[str, Any] = {"steps": loop.step, "prompts": len(data.train), "critic": recipe.critic}
        if data.held_out:
            summary["held_out"] = {"n": len(data.held_out), **evaluate(source, data.held_out, loop.step)}
        policy.save_result(run)
        return run.finish(summary)


def look(recipe: PPORecipe, policy: Policy, critic: Critic, anchor: Anchor | None, batch: TokenBatch) -> Before:
    """Log-probs and values in one walk over the batch, then the reference's log-probs."""
    budget, heat = recipe.tokens_per_micro_batch, recipe.temperature
    logp, values = torch.zeros_like(batch.sampled_logp), torch.zeros_like(batch.sampled_logp)
    with torch.no_grad():
        for part in parts(batch, range(len(batch.examples)), budget, policy.device):
            lp, v, _ = critic.judge(policy, part.packed, heat)
            logp[part.rows] = to_rows(part.packed, lp, batch.width)
            values[part.rows] = to_rows(part.packed, v, batch.width)
    ref = None
    if anchor is not None:
        with anchor.reference() as reference:
            ref = over_all(batch, lambda packed: reference.logprobs(packed, heat), budget, policy.device)
    return Before(ranks.summed(logp), ranks.summed(values), ref)


def rewards_of(recipe: PPORecipe, batch: TokenBatch, before: Before, scores: Tensor, beta: float) -> Tensor:
    """(R, T): the cost of distance from the reference at every token, the score at the last."""
    ref = before.logp if before.ref is None else before.ref
    shaped = shaped_rewards(scores, before.logp.double(), ref.double(), batch.mask, kl_coef=beta)
    if recipe.whiten_rewards and int(batch.mask.sum()) >= 2:
        shaped = masked_whiten(shaped, batch.mask, std_kind=recipe.std, shift_mean=False)
    return shaped


def advantages_of(recipe: PPORecipe, batch: TokenBatch, before: Before, scores: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Advantages, whitened if that is asked for, and returns, which never are; (R, T) each."""
    token_rewards = rewards_of(recipe, batch, before, scores, beta)
    advantages, returns = gae(token_rewards, before.values, batch.mask, recipe.gamma, recipe.lam)
    if recipe.whiten_advantages and int(batch.mask.sum()) >= 2:
        advantages = masked_whiten(advantages, batch.mask, std_kind=recipe.std)
    return advantages, returns


def updates(
    recipe: PPORecipe,
    policy: Policy,
    critic: Critic,
    loop: Loop,
    batch: TokenBatch,
    before: Before,
    advantages: Tensor,
    returns: Tensor,
) -> Tally:
    """All optimiser steps on one batch. Returns what they came to on all ranks."""
    tally = Tally()
    tally.tokens = ranks.once(batch.tokens)
    weights = None
    sampling_difference(tally, before.logp, batch.sampled_logp, batch.mask)
    if recipe.importance != "none":
        bounds = {"c_min": recipe.importance_min, "c_max": recipe.importance_max}
        weights = mismatch_weights(before.logp, batch.sampled_logp, batch.mask, recipe.importance, **bounds)
        weight_metrics(tally, weights, before.logp, batch)
    for number in range(recipe.updates_per_batch):
        moved, tokens = 0.0, 0
        for mini in mini_batches(batch, recipe.mini_batches, f"{recipe.seed}/{loop.step}/{number}"):
            shares: dict[str, float] = {}
            for part in parts(batch, mini.examples, recipe.tokens_per_micro_batch, policy.device):
                lp, values, stats = critic.judge(policy, part.packed, recipe.temperature)  # (M,) each
                lp, values = (to_rows(part.packed, x, batch.width) for x in (lp, values))  # (A, T) each
                loss, metrics = part_loss(recipe, batch, part, mini, lp, values, before, advantages, returns, weights)
                loss.backward()
                metrics["loss"], metrics["entropy"] = loss.detach(), stats["entropy"].sum() / mini.total_tokens
                metrics["policy/entropy_avg"] = metrics["entropy"]
                for name, share in metrics.items():
                    shares[name] = shares.get(name, 0.0) + float(share)
                row_metrics(tally, batch, part.rows, lp.detach(), before.logp, before.ref)
            shares = ranks.total(shares)
            for name, mean in shares.items():
                tally.add_ratio(name, ranks.once(mean), ranks.once(1.0))
            loop.apply(shares["loss"])
            moved, tokens = moved + shares["approx_kl_k1"] * mini.total_tokens, tokens + mini.total_tokens
        if recipe.max_approx_kl is not None and tokens and moved / tokens > recipe.max_approx_kl:
            tally.add_ratio("policy/passes", number + 1.0, 1.0)
            break
    return tally.merged()


def part_loss(
    recipe: PPORecipe,
    batch: TokenBatch,
    part: Part,
    mini: MiniBatch,
    lp: Tensor,
    values: Tensor,
    before: Before,
    advantages: Tensor,
    returns: Tensor,
    weights: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A part's share of the loss of its mini-batch; lp and values (A, T) are with gradient."""
    rows, mask, total = part.rows, batch.mask[part.rows], mini.total_tokens
    policy_part, metrics = policy_loss(
        lp,
        before.logp[rows],
        advantages[rows],
        mask,
        eps_low=recipe.eps_low,
        eps_high=recipe.eps_high,
        dual_clip=recipe.dual_clip,
        weights=None if weights is None else weights[rows],
        ref_logp=None if before.ref is None else before.ref[rows],
        total_tokens=total,
    )
    value_part, more = value_loss(values, before.values[rows], returns[rows], mask, value_clip=recipe.value_clip, total_tokens=total)
    delta = select(lp.detach() - before.logp[rows], mask)
    metrics["clip_ratio/region_mean"] = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
    more |= {
        "val/clipfrac_avg": more["val/clipfrac"],
        "val/ratio": metrics["ratio/mean"],
        "val/ratio_var": (select(delta.exp() - 1, mask) ** 2).sum() / total,  # around 1, so that parts add up
        "policy/approxkl_avg": 0.5 * (delta**2).sum() / total,
        "policy/clipfrac_avg": metrics["clip_ratio/region_mean"],
        "loss/policy_avg": policy_part.detach(),
        "loss/value_avg": value_part.detach(),
    }
    return policy_part + recipe.vf_coef * value_part, {**metrics, **more}


def objective(batch: TokenBatch, before: Before, scores: Tensor, returns: Tensor, beta: float) -> dict[str, float]:
    """What the batch as it was sampled is worth, and how much of it the critic foresaw."""
    rows = batch.active
    if not bool(rows.any()):
        return {}
    out = {"objective/scores": float(scores[rows].mean())}
    out["objective/entropy"] = -float(select(before.logp, batch.mask)[rows].sum(1).mean())
    if before.ref is not None:
        distance = select(before.logp - before.ref, batch.mask)[rows].sum(1)
        kl = float(distance.mean())
        # Of the policy that sampled: later in the step the tokens are no longer its own, and a mean below 0 would say nothing.
        out["kl/k1"] = float(distance.sum() / batch.mask.sum())
        out |= {"objective/kl": kl, "objective/non_score_reward": -beta * kl, "kl_coef": beta}
        out["objective/rlhf_reward"] = out["objective/scores"] - beta * kl
    ended = [r.finished for r in batch.rollouts]
    out["val/num_eos_tokens"] = float(sum(ended))
    foreseen = explained_variance(before.values, returns, batch.mask)
    if foreseen is not None:
        out["val/explained_variance"] = foreseen
    return out


def warn_of_clipped_scores(run: Run, recipe: PPORecipe, step: int, clipped: Mapping[str, float]) -> None:
    """Once: scores that all count the same teach nothing, and rewards far from 0 end so."""
    if not clipped.get("objective/scores_clipped"):
        return
    # Scaled scores have the same size whatever the reward's weight.
    others = "" if recipe.score_scaling == "running" else ", give the reward a smaller weight, or set score_scaling: running"
    text = (
        f"in some steps scores lay beyond score_clip {recipe.score_clip:g} and counted as that: differences among them are lost. See "
        f"objective/scores_clipped; raise score_clip{others}"
    )
    if run.note("scores_clipped", text):
        run.say(
            f"warning: {clipped['objective/scores_clipped']:.0%} of the scores of step {step + 1} lie beyond score_clip {recipe.score_clip:g}"
        )
