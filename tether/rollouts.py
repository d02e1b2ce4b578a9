"""From prompts to scored attempts: groups are sampled from the policy as it is, judged by the rewards, and counted.

Everything is a pure function of weights, seed and step, so a step that is made again after an interruption is the same step. Over
several ranks each samples its share of the prompts, and all of them hold all attempts.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tether import prompts, ranks
from tether.ahead import Source, requests_of, seeds_of, staleness
from tether.batch import Example
from tether.chat import encode_prompts
from tether.engines.choice import remote_source
from tether.engines.kv import round_up
from tether.engines.local import Completion, LocalSampler, Request
from tether.engines.sampling import Sampling
from tether.engines.together import sample_together
from tether.errors import UserError
from tether.files import Loaded, Problem
from tether.masked import all_equal
from tether.policy import Policy
from tether.prompts import Prompt
from tether.reward import Reward, RewardFunction, Rewards, Scored
from tether.rewards.functions import reward
from tether.rewards.length import OverlongPenalty
from tether.rl_recipe import SamplingRecipe
from tether.rollout import Rollout, from_sampled
from tether.rollout import groups as by_group
from tether.run import Run
from tether.startup import check_start
from tether.stopwatch import Stopwatch
from tether.token_batch import TokenBatch
from tether.training_rows import Rows, training_rows

OVERLONG = "overlong"
# Mean difference in nats per token between the log-probs of sampling and of training that rounding explains. In bfloat16 it is the
# rounding of scores of size 16 on both sides; SmolLM2-135M measures 0.035, without a bias (mean of the signed differences 1e-4).
SAMPLING_TOLERANCE = {"fp32": 1e-4, "bf16": 0.1}
CUT_OFF_SHARE, FIRST_STEPS = 0.5, 3  # above this share in one of the first steps, the length limit is warned of


def load_prompts(recipe: SamplingRecipe, policy: Policy, run: Run) -> Rows:
    """Prompts as token ids; `extra` holds the text (`prompt`) and the row's other columns (`columns`)."""

    def encode(loaded: Loaded[Prompt]) -> Any:
        rows = [Prompt(row.prompt, row.source, {"prompt": row.prompt, "columns": row.extra}) for row in loaded.rows]
        return encode_prompts(dataclasses.replace(loaded, rows=rows), policy.codec, max_length=recipe.max_length)

    rows = training_rows(
        recipe, run, prompts.load, encode, what="prompts", model=policy.model, refine=lambda examples: _with_room(recipe, examples)
    )
    if len(rows.train) < recipe.groups_per_step:
        n, wanted = len(rows.train), recipe.groups_per_step
        text = (
            f"{n} prompt{'s' if n > 1 else ''} to train on, and a step wants {wanted}: it learns from {n * recipe.num_generations} answers "
            f"in place of batch_size {recipe.batch_size}"
        )
        run.note("few_prompts", text)
        run.say(f"warning: {text}")
    return rows


def _with_room(recipe: SamplingRecipe, examples: Sequence[Example]) -> tuple[list[Example], list[Problem]]:
    """Leave out prompts that would not leave `max_completion_length` tokens within `max_length`."""
    room = recipe.max_length - recipe.max_completion_length
    kept = [e for e in examples if len(e.prompt) <= room]
    problems = []
    for e in examples:
        if len(e.prompt) > room and e.source is not None:
            words = f"the prompt has {len(e.prompt)} tokens; with answers of {recipe.max_completion_length} max_length leaves {room}"
            problems.append(Problem(e.source, "prompt_too_long", words, "Raise max_length, or shorten the prompt.", "drop", "prompt"))
    return kept, problems


def make_rewards(recipe: SamplingRecipe, run: Run, given: Sequence[Reward | RewardFunction] | None = None) -> Rewards:
    """The recipe's rewards, or functions given in Python; with `overlong_cache` the penalty for length as one more part."""
    if given is not None and recipe.rewards:
        raise UserError("rewards were given in the recipe and in the call", where="rewards", remedy="Keep one of the two.")
    parts: list[Reward | RewardFunction] = list(given or [])
    for entry in recipe.rewards:
        block: dict[str, Any] = {"reward": entry} if isinstance(entry, str) else dict(entry)
        if isinstance(block.get("local"), Mapping) and "model" not in block["local"]:
            # The policy judges itself: a copy of it as the run starts.
            own = {name: getattr(recipe, name) for name in ("model", "chat_template", "trust_remote_code")}
            block["local"] = {**own, "precision": run.recorded("precision") or recipe.precision, **block["local"]}
        parts.append(reward(block.pop("reward"), **block))
    if not parts:
        raise UserError(
            "no reward was given: there is nothing to learn from",
            where="rewards",
            remedy="Add `rewards: [math]` or your own function, as in `rewards: [my_rewards.py:brevity]`.",
        )
    cache = getattr(recipe, "overlong_cache", None)
    if cache is not None:
        parts.append(Reward(OverlongPenalty(max_length=recipe.max_completion_length, cache=cache), OVERLONG))
    return Rewards(parts, mixture=getattr(recipe, "reward_mixture", "sum_then_normalize"), say=run.say)


@dataclass
class Attempts:
    """The attempts of a step. `groups` are learnt from; `all` holds also those that dynamic sampling set aside."""

    groups: list[list[Rollout]]
    all: list[Rollout]
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def rollouts(self) -> list[Rollout]:
        return [r for group in self.groups for r in group]


class Rollouts:
    """Samples and scores for one run. `watch` is told how long each of the two takes."""

    def __init__(
        self, recipe: SamplingRecipe, policy: Policy, data: Sequence[Example], rewards: Rewards, run: Run, watch: Stopwatch | None = None
    ) -> None:
        self.recipe, self.policy, self.data, self.rewards, self.run = recipe, policy, data, rewards, run
        self.watch = watch or Stopwatch()
        self._told_of_cuts = False
        self.sampling = Sampling(max_new_tokens=recipe.max_completion_length, temperature=recipe.temperature)
        longest = max((len(e.prompt) for e in data), default=1) + recipe.max_completion_length
        self.sampler = remote_source(recipe, policy, data, self.sampling, run, self.watch) or self._local(longest)
        if self.sampler.notice:
            run.note("slow_sampling", self.sampler.notice)
            run.say(self.sampler.notice)
        limit = self.sampler.positions
        if limit is not None and longest > limit:
            raise UserError(
                f"a prompt and its answer may have {longest} tokens together, the model has {limit} positions",
                where="max_completion_length",
                remedy="Lower it, or lower max_length.",
            )

    def _local(self, longest: int) -> LocalSampler:
        # A stated size: what happens to be free would decide who shares a forward pass, and with it the last bits.
        slots = self.recipe.sampling_slots
        with self.policy.whole() as model:
            return LocalSampler(
                model, self.policy.codec, precision=self.policy.precision, slots=slots, cache_tokens=slots * round_up(longest)
            )

    def step(self, step: int, rows: Sequence[int]) -> Attempts:
        """The step's groups: `num_generations` attempts at each of the prompts `rows`, scored."""
        kept = self.round(step, 0, rows)
        groups = by_group(kept)
        more: dict[str, float] = {}
        if getattr(self.recipe, "dynamic_sampling", False):
            groups, kept, more = self._until_enough(step, rows, kept)
        metrics = {**attempt_metrics(kept, groups), **more}
        if self.recipe.engine.remote:
            metrics |= staleness(kept, step)
        self._warn_of_cut_answers(step, metrics)
        return Attempts(groups, kept, metrics)

    def _until_enough(
        self, step: int, rows: Sequence[int], kept: list[Rollout]
    ) -> tuple[list[list[Rollout]], list[Rollout], dict[str, float]]:
        """Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): more prompts in place of those whose answers all earn the same.

        Returns the groups to learn from, at most one for each of `rows` and perhaps none; everything sampled; and counts.
        """
        groups = [g for g in by_group(kept) if not alike(g)]
        seen, tried = len(rows), set(rows)
        for number in range(1, self.recipe.max_sampling_rounds):  # type: ignore[attr-defined]
            missing = len(rows) - len(groups)
            if missing <= 0:  # a round may find more than were missing
                break
            wanted = min(len(rows), math.ceil(missing * seen / max(1, len(groups))))
            others = self._others(step, number, wanted, tried)
            made = self.round(step, number, others)
            groups += [g for g in by_group(made) if not alike(g)]
            kept = [*kept, *made]
            seen, tried = seen + wanted, tried | set(others)
        counts = {"dynamic_sampling/acceptance": len(groups) / seen, "dynamic_sampling/prompts": float(seen)}
        return groups[: len(rows)], kept, counts

    def round(self, step: int, number: int, rows: Sequence[int]) -> list[Rollout]:
        """One round of sampling and scoring."""
        many = self.recipe.groups_per_step * (getattr(self.recipe, "max_sampling_rounds", 1) + 1)
        first = step * many + number * self.recipe.groups_per_step
        seeds = seeds_of(self.recipe, step, number, len(rows))
        return self.attempts([self.data[i] for i in rows], rows, seeds, self.sampling, self.recipe.num_generations, first, step)

    def attempts(
        self,
        examples: Sequence[Example],
        ids: Sequence[int],
        seeds: Sequence[str],
        sampling: Sampling,
        n: int,
        first_group: int,
        version: int,
    ) -> list[Rollout]:
        """`n` attempts at each example, scored, in the order of the examples."""
        if not examples:
            return []
        with self.watch("sampling"):
            completions, made_by = self._sample(requests_of(examples, seeds, sampling, n), version)
            made = [
                from_sampled(
                    c,
                    prompt=examples[c.request].extra["prompt"],
                    prompt_ids=examples[c.request].prompt,
                    prompt_id=ids[c.request],
                    group=first_group + c.request,
                    codec=self.policy.codec,
                    policy_version=made_by,
                    source=examples[c.request].source,
                    columns=examples[c.request].extra["columns"],
                )
                for c in completions
            ]
        with self.watch("reward"):
            scored, table = self.rewards.score_rollouts(made)
        self._tell(table)
        return scored

    def _sample(self, requests: Sequence[Request], version: int) -> tuple[list[Completion], int]:
        """From the weights as they are now, or by servers that run ahead, and the version of those weights; the same on every rank."""
        if isinstance(self.sampler, Source):
            return self.sampler.sample(requests, version)
        with self.policy.whole():
            self.sampler.refresh()
            completions = sample_together(self.sampler, requests)
            if ranks.size() > 1:
                self.sampler.refresh()  # what it has copied of the weights would stay beside this rank's part of them
        return completions, version

    def _others(self, step: int, number: int, n: int, tried: set[int]) -> list[int]:
        """`n` more prompts at random: those that the step has not had; when they run out, any, each as seldom as can be."""
        draw = random.Random(f"{self.recipe.seed}/{step}/{number}")
        out = [i for i in range(len(self.data)) if i not in tried]
        draw.shuffle(out)
        while len(out) < n:
            out += draw.sample(range(len(self.data)), len(self.data))
        return out[:n]

    def _tell(self, table: Scored) -> None:
        for text in table.notices:
            self.run.note("reward", text)
            self.run.say(f"warning: {text}")

    def _warn_of_cut_answers(self, step: int, metrics: dict[str, float]) -> None:
        share = metrics.get("completions/clipped_ratio", 0.0)
        if step < FIRST_STEPS and share > CUT_OFF_SHARE:
            text = (
                f"{share:.0%} of the answers were cut off at max_completion_length {self.recipe.max_completion_length} in step {step + 1}: "
                "what is cut off can hardly earn anything. Raise max_completion_length, or ask for shorter answers in the prompt."
            )
            if not self._told_of_cuts:
                self.run.say(f"warning: {text}")
            self._told_of_cuts = True
            self.run.note("cut_off", text, step=step + 1)


def alike(group: Sequence[Rollout]) -> bool:
    """Whether all scored attempts earn the same, up to rounding and before any penalty for length: nothing to learn from."""
    totals = [task_reward(r) for r in group if r.total is not None]
    return all_equal(torch.tensor(totals, dtype=torch.float64))


def task_reward(rollout: Rollout) -> float:
    """The total without the penalty for length."""
    assert rollout.total is not None
    return rollout.total - (rollout.rewards.get(OVERLONG) or 0.0)


def attempt_metrics(rollouts: Sequence[Rollout], learnt: Sequence[Sequence[Rollout]] = ()) -> dict[str, float]:
    """Rewards by part, groups without a spread, lengths: over everything sampled, so that selection does not flatter it."""
    groups = by_group(rollouts)
    totals = [r.total for r in rollouts if r.total is not None]
    out: dict[str, float] = {}
    if totals:
        out["reward"] = _mean(totals)
        spreads = [_std([r.total for r in g if r.total is not None]) for g in groups if sum(r.total is not None for r in g) > 1]
        if spreads:
            out["reward_std"] = _mean(spreads)
    for name in rollouts[0].rewards if rollouts else ():
        values = [v for r in rollouts if (v := r.rewards[name]) is not None]
        if values:
            out |= {f"rewards/{name}/mean": _mean(values), f"rewards/{name}/std": _std(values)}
        if len(values) < len(rollouts):
            out[f"rewards/{name}/unscored"] = 1 - len(values) / len(rollouts)
    if any(len(g) > 1 for g in groups):
        flat = [g for g in groups if alike(g)]
        right = sum(_mean([task_reward(r) for r in g if r.total is not None]) > 0 for g in flat if any(r.total is not None for r in g))
        out["frac_reward_zero_std"] = len(flat) / len(groups)
        out["frac_reward_zero_std/all_right"] = right / len(groups)
        out["frac_reward_zero_std/all_wrong"] = (len(flat) - right) / len(groups)
    kept = [r.total for g in learnt for r in g if r.total is not None]
    if kept and len(kept) < len(totals):
        out["dynamic_sampling/reward"] = _mean(kept)
    lengths = [len(r.tokens) for r in rollouts]
    ended = [len(r.tokens) for r in rollouts if r.finished]
    if lengths:
        out |= {
            "completions/mean_length": _mean(lengths),
            "completions/min_length": float(min(lengths)),
            "completions/max_length": float(max(lengths)),
            "completions/clipped_ratio": 1 - len(ended) / len(lengths),
        }
    if ended:
        out["completions/mean_terminated_length"] = _mean(ended)
    return out


def evaluate(rollouts: Rollouts, held_out: Sequence[Example], step: int) -> dict[str, float]:
    """Rewards on prompts that are never trained on: sampled as in training, and greedily. Logged with the prefix `eval_`."""
    recipe = rollouts.recipe
    out: dict[str, float] = {}
    ids = list(range(len(held_out)))
    for prefix, sampling in (
        ("eval_", rollouts.sampling),
        ("eval_greedy_", dataclasses.replace(rollouts.sampling, temperature=0.0)),
    ):
        made = rollouts.attempts(held_out, ids, [f"{recipe.seed}/eval/{i}" for i in ids], sampling, 1, 0, step)
        found = attempt_metrics(made)
        out |= {
            f"{prefix}{name}": value for name, value in found.items() if name == "reward" or name.endswith(("/mean", "length", "ratio"))
        }
    rollouts.watch.metrics()
    rollouts.run.log(step, out)
    return out


def check_sampling(run: Run, sampled: Tensor, trained: Tensor, mask: Tensor, *, precision: str, remote: bool = False) -> None:
    """Before anything is learnt: the log-probs kept while sampling are those of the training pass, so ratios begin at 1.

    All (R, T). Raises UserError when they differ by more than rounding: the update would be off by it at every step. Another program
    (`remote`) has its own kernels and perhaps its own arithmetic: what bfloat16 explains is reported, and corrected by importance weights.
    """
    gap = (trained - sampled)[mask]
    worst, mean = float(gap.abs().max()), float(gap.abs().mean())
    limit = SAMPLING_TOLERANCE["bf16" if remote else precision]
    if not math.isfinite(worst) or mean > limit:
        remedy = "Set precision: fp32; if it stays, this model's sampling and training passes disagree and it cannot be trained so."
        if remote:
            remedy = (
                "The servers compute with another model, or in fewer bits (a quantised one): start them with the model that is trained."
            )
        raise UserError(
            f"at the start the log-probs of sampling and of training differ by {mean:.2e} nats per token (at most {limit:.0e} expected)",
            remedy=remedy,
        )
    words = f"start-up check: ratio {float(gap.exp().mean()):.6f} between sampling and training, largest difference {worst:.1e} nats"
    if remote:
        words += f", mean {mean:.1e}"
    run.say(words)
    run.note("startup_check", words)


def check_first_step(run: Run, policy: Policy, batch: TokenBatch, old: Tensor, ref: Tensor | None) -> bool:
    """Ratio 1 between sampling and training, KL 0 to the reference; `old` and `ref` are (R, T).

    UserError when it is not so. Says whether there was a token to look at.
    """
    if not bool(batch.mask.any()):
        return False
    remote = run.settings.get("engine", "local") != "local"
    check_sampling(run, batch.sampled_logp, old, batch.mask, precision=policy.precision, remote=remote)
    if ref is not None:
        rows = batch.active
        check_start(run, old[rows].sum(1), ref[rows].sum(1), batch.mask[rows].sum(1), precision=policy.precision)
    return True


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _std(values: Sequence[float | None]) -> float:
    """Sample standard deviation; 0 for one value."""
    numbers = [v for v in values if v is not None]
    if len(numbers) < 2:
        return 0.0
    mean = _mean(numbers)
    return math.sqrt(sum((v - mean) ** 2 for v in numbers) / (len(numbers) - 1))
