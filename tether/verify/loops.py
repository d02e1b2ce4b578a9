"""One optimiser step of a recipe's own loop, on the small model and the subject's rows, from which the gradient can be read.

The step is AdamW's with an epsilon so large that it is plain gradient descent: g/(|g| + 1e8) x rate is g x rate/1e8 to eight digits.
So the run is a whole run (files, packing, loss, backward pass, update, checkpoint) and what it took off the weights is the gradient.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tether import rollout
from tether.algorithms import dpo, grpo, ppo, reward_model, sft
from tether.critic import make_critic
from tether.models import save_model
from tether.policy import Policy
from tether.recipe import DPORecipe, PPORecipe, TrainRecipe
from tether.reward import Reward
from tether.rl_recipe import SamplingRecipe
from tether.rollout import Rollout
from tether.run import Run
from tether.verify import rows as data
from tether.verify.sampled import WEIGHTS, shortened
from tether.verify.small import move
from tether.verify.subject import Desk, Subject, without_dropout

EPSILON, GAIN = 1e8, 1e3  # the gain lifts gradients out of the rounding of the weights that they are taken from
GROUPS, EACH = 4, 4
WHOLE = 10**9  # tokens: one micro-batch
TRAIN: dict[str, Callable[..., Any]] = {
    "sft": lambda recipe, run: sft.train(recipe, run),
    "reward": lambda recipe, run: reward_model.train(recipe, run),
    "dpo": lambda recipe, run: dpo.train(recipe, run),
    "grpo": lambda recipe, run: grpo.train(recipe, run, rewards=made_up_rewards()),
    "ppo": lambda recipe, run: ppo.train(recipe, run, rewards=made_up_rewards()),
}


@dataclass(frozen=True)
class Taken:
    """What a step of the loop did: by parameter name what it took off the weights, over the gain; the loss that it logged."""

    recipe: Any
    gradient: dict[str, Tensor]
    loss: float
    rollouts: list[Rollout]


def settings(subject: Subject, tokens_per_micro_batch: int, run: Path) -> TrainRecipe:
    """The recipe for one such step. What it learns from and how is the recipe's; what surrounds it is not."""
    recipe, n = subject.recipe, len(subject.rows.examples)
    file = data.write(subject.rows, subject.folder / "rows.jsonl")
    changes: dict[str, Any] = {
        "model": subject.small.name,
        "data": str(file),
        "eval_data": None,
        "eval_fraction": 0.0,
        "eval_steps": None,
        "run": str(run),
        "precision": "fp32",
        "lora": without_dropout(subject.small.lora),
        "on_bad_rows": "drop",
        "batch_size": n,
        "tokens_per_micro_batch": tokens_per_micro_batch,
        "max_steps": 1,
        "epochs": 1.0,
        "learning_rate": GAIN * EPSILON,
        "lr_scheduler": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "adam_epsilon": EPSILON,
        "max_grad_norm": 1e30,
        "save_steps": 1,
        "keep_checkpoints": 1,
        "log_every": 1000,
        "trackers": [],
        "shuffle": False,
    }
    if isinstance(recipe, DPORecipe):
        changes |= {"min_edit_distance": 0.0, "cache_reference": False}
        if recipe.has_reference and recipe.loss_type != "kto" and not is_adapter(subject):
            # At its own reference every pair has margin 0, where one sigmoid is as good as another.
            changes["reference"] = str(other(subject))
    if isinstance(recipe, SamplingRecipe):
        each = min(recipe.num_generations, EACH)
        changes |= {"rewards": [], "num_generations": each, "batch_size": each * min(n, GROUPS), **shortened(recipe)}
        changes |= {"updates_per_batch": 1, "mini_batches": 1, "reference_refresh_steps": None}
        changes |= {"critic_learning_rate": None, "critic_model": None} if isinstance(recipe, PPORecipe) else {}
        changes |= {"dynamic_sampling": False, "max_sampling_rounds": 3} if recipe.command == "grpo" else {}
    return recipe.replace(**changes)


def is_adapter(subject: Subject) -> bool:
    return (Path(subject.small.name) / "adapter_config.json").is_file()


def other(subject: Subject) -> Path:
    """A model near the small one, as a folder: a reference that the policy differs from."""
    folder = subject.folder / "other"
    if not folder.exists():
        policy = Policy.load(subject.small.name, precision="fp32", trust_remote_code=subject.recipe.trust_remote_code)
        move(policy.model.parameters(), size=0.05, seed=8)
        save_model(policy.model, policy.tokenizer, folder, dtype=torch.float32)
    return folder


def take(subject: Subject, tokens_per_micro_batch: int) -> Taken:
    """Run the loop for one step. What it says on the way is nobody's business here; what it refuses is raised."""
    folder = subject.folder / f"run-{tokens_per_micro_batch}"
    recipe = settings(subject, tokens_per_micro_batch, folder)
    if isinstance(recipe, SamplingRecipe):
        # A random model seldom ends an answer within a few tokens; what is left out of a loss is looked at on made-up attempts.
        recipe = recipe.replace(mask_truncated=False)
    with contextlib.redirect_stderr(io.StringIO()), Run.create(folder, recipe) as run:
        TRAIN[recipe.command](recipe, run)
        losses = [row["loss"] for row in run.metrics() if "loss" in row]
    made = list(rollout.read(folder / rollout.FILE)) if subject.samples else []
    parts = models(subject, recipe)
    before = {name: p.detach().clone() for name, p in parameters(parts).items()}
    [checkpoint] = run.checkpoints()
    for part in parts:
        part.read_weights(checkpoint)
    after = parameters(parts)
    gradient = {name: (before[name].double() - after[name].detach().double()) / GAIN for name in before}
    return Taken(recipe, gradient, float(losses[0]), made)


def take_once(subject: Subject, tokens_per_micro_batch: int) -> Taken:
    """`take`, kept for the lines that look at the same step."""
    made: Taken = subject.keep(f"step {tokens_per_micro_batch}", lambda: take(subject, tokens_per_micro_batch))
    return made


def models(subject: Subject, recipe: TrainRecipe) -> list[Any]:
    """What the loop trains, as it begins: a policy or a reward model, and the critic where there is one."""
    model = subject.load(subject.small)
    if not isinstance(recipe, PPORecipe):
        return [model]
    desk: Any = Desk(subject.folder)
    return [model, make_critic(recipe, model, desk)]


def parameters(parts: list[Any]) -> dict[str, Any]:
    """Trained parameters of all of them; the critic's names begin with `critic.`."""
    out = dict(parts[0].parameters())
    for critic in parts[1:]:
        out |= {f"critic.{name}": p for name, p in critic.parameters().items()}
    return out


def made_up_rewards() -> list[Reward]:
    """Two functions of the sampled ids alone: their values differ from attempt to attempt, and nothing has to be installed."""

    def a(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float]:
        return [(sum((t + 1) * (i + 7) for i, t in enumerate(ids)) % 89) / 89 for ids in completion_ids]

    def b(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float]:
        return [(sum(ids) % 13) / 13 - len(ids) / 10 for ids in completion_ids]

    return [Reward(f, name, weight) for f, name, weight in zip((a, b), "ab", WEIGHTS, strict=True)]
