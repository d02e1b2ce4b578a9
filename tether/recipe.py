"""Typed recipes: every setting with its default and one line on what moving it does. Torch-free.

The descriptions are the documentation: `docs/recipes.md`, `tether explain` and `tether <command> --help` are made from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self

from tether.keys import SettingError, nearest
from tether.losses.sheet import LOSS_ALIASES, NEEDS_REFERENCE, NEUTRAL, SHEET, loss_settings
from tether.settings import Settings
from tether.values import (
    Count,
    Flag,
    NotNegative,
    OptionalCount,
    OptionalText,
    OptionalTextOrList,
    OptionalTexts,
    Positive,
    Share,
    Text,
    TextOrList,
    Texts,
    Whole,
    texts,
)


class LoraConfig(Settings):
    """Low-rank adapters: train a small addition to each linear layer and leave the weights themselves alone."""

    rank: Count = Field(default=16, description="Width of the addition; higher learns more and takes more memory.")
    alpha: Positive = Field(
        default=32.0, description="Scale of the addition: it is multiplied by alpha / rank, so raising it acts like a larger learning rate."
    )
    dropout: Share = Field(
        default=0.0,
        description="Share of the adapter's inputs dropped while training; fights overfitting in sft, must be 0 where log-probs are compared.",
    )
    target_modules: TextOrList = Field(
        default="all-linear",
        description="Which linear layers get an adapter: all-linear, or a list of module names; fewer is lighter and learns less.",
    )
    modules_to_save: Texts = Field(
        default=[], description="Modules trained in full beside the adapter (such as a new head); each adds its whole size to the adapter."
    )


class TrainRecipe(Settings):
    """What every training command understands."""

    model: Text = Field(description="The model to start from: a folder, a hub id, a .gguf file or an adapter folder.")
    data: TextOrList = Field(description="Training rows: one file, folder or hub id, or a list of them (JSONL, JSON, CSV, Parquet).")
    eval_data: OptionalTextOrList = Field(default=None, description="Rows to evaluate on and never train on; the report shows both curves.")
    eval_fraction: Share = Field(
        default=0.0,
        description="Share of the training prompts held out for evaluation when there is no eval_data; more gives a surer number and less to learn from.",
    )
    eval_steps: OptionalCount = Field(
        default=None, description="Evaluate every so many steps; null: once, at the end. Smaller shows overfitting earlier and costs time."
    )
    run: OptionalText = Field(
        default=None, description="The run directory; null: runs/<command>-<recipe name>-<n>, the first n that is free."
    )
    seed: Whole = Field(
        default=0, description="Decides row order, fresh heads and adapters; the same seed on the same machine gives the same numbers."
    )
    precision: Literal["auto", "bf16", "fp32"] = Field(
        default="auto",
        description="Arithmetic of the forward and backward pass; auto takes bf16 where a short probe finds it faster. Weights and losses stay float32.",
    )
    lora: LoraConfig | None = Field(
        default=None,
        description="Train low-rank adapters instead of all weights: far less memory for gradients and optimiser, a little less to learn with. {} takes the defaults.",
    )
    max_length: Count = Field(
        default=1024,
        description="Longest row in tokens, prompt and answer together; longer rows are treated by `truncation`. Memory of one row grows with it.",
    )
    truncation: Literal["drop", "keep_start"] = Field(
        default="keep_start",
        description="A row longer than max_length is cut at its end (keep_start) or left out (drop); both are counted and listed.",
    )
    on_bad_rows: Literal["refuse", "drop"] = Field(
        default="refuse", description="Unusable rows stop the run before it starts (refuse), or are left out and counted (drop)."
    )
    batch_size: Count = Field(
        default=8, description="Rows per optimiser step; larger is smoother and slower per step, and needs no more memory."
    )
    tokens_per_micro_batch: Count = Field(
        default=4096, description="Tokens computed at once; lower takes less memory and changes nothing else."
    )
    epochs: Positive = Field(default=1.0, description="Passes over the data; more fits the rows harder, and overfits sooner.")
    max_steps: OptionalCount = Field(
        default=None, description="Stop after exactly this many optimiser steps; null: as many as epochs asks for."
    )
    learning_rate: Positive = Field(
        default=2e-5, description="Size of a step; too high breaks the model, too low learns nothing in the time."
    )
    lr_scheduler: Literal["linear", "cosine", "constant"] = Field(
        default="linear", description="How the learning rate falls after warm-up: to 0 in a line, to 0 along a cosine, or not at all."
    )
    warmup_steps: Whole = Field(
        default=0, description="Steps over which the learning rate rises from 0; more is gentler on a fresh optimiser."
    )
    weight_decay: NotNegative = Field(default=0.0, description="Pull of the weights towards 0 at each step; higher keeps them smaller.")
    adam_beta1: Share = Field(default=0.9, description="Memory of the mean gradient; nearer 1 is smoother and slower to turn.")
    adam_beta2: Share = Field(default=0.999, description="Memory of the squared gradient; nearer 1 gives steadier step sizes.")
    adam_epsilon: Positive = Field(default=1e-8, description="Floor under the step's divisor; higher damps weights with tiny gradients.")
    max_grad_norm: Positive = Field(
        default=1.0, description="Gradients longer than this are scaled down to it; lower is safer against odd batches and slower."
    )
    save_steps: Count = Field(
        default=50, description="Save a checkpoint every so many steps; smaller loses less when interrupted and writes more."
    )
    keep_checkpoints: Count = Field(default=2, description="How many of the newest checkpoints stay on disk.")
    log_every: Count = Field(
        default=1,
        description="Print a line every so many steps when the output is not a terminal; the run directory always gets every step.",
    )
    trackers: Annotated[list[Literal["tensorboard", "wandb", "trackio"]], BeforeValidator(texts)] = Field(
        default=["tensorboard"], description="Where the curves also go, besides the run directory; [] for nowhere."
    )
    threads: OptionalCount = Field(default=None, description="CPU threads to compute with; null: as many as torch finds.")
    gradient_checkpointing: Flag = Field(
        default=False,
        description="Recompute activations in the backward pass: much less memory, about a third more time, the same numbers.",
    )
    shuffle: Flag = Field(default=True, description="A new row order each epoch; false keeps the file's order.")
    chat_template: OptionalText = Field(
        default=None, description="A Jinja file that replaces the tokenizer's chat template; null: the tokenizer's own."
    )
    trust_remote_code: Flag = Field(
        default=False, description="Run Python code that comes with the model. Only for models whose code you have read."
    )

    dropout_forbidden: ClassVar[bool] = False

    @classmethod
    def _other_commands(cls) -> Mapping[str, list[str]]:
        return {name: list(recipe.paths()) for name, recipe in RECIPES.items() if recipe is not cls}

    @model_validator(mode="after")
    def _common_settings_agree(self) -> Self:
        if self.eval_data is not None and self.eval_fraction > 0:
            raise SettingError(
                "held-out rows were asked for twice, by eval_data and by eval_fraction", key="eval_fraction", remedy="Give one of the two."
            )
        if self.eval_steps is not None and self.eval_data is None and self.eval_fraction == 0:
            raise SettingError("there are no rows to evaluate on", key="eval_steps", remedy="Give eval_data, or eval_fraction such as 0.1.")
        if self.max_steps is not None and self.warmup_steps > self.max_steps:
            raise SettingError(
                f"the warm-up ({self.warmup_steps} steps) is longer than the run ({self.max_steps} steps)", key="warmup_steps"
            )
        if self.dropout_forbidden and self.lora is not None and self.lora.dropout > 0:
            raise SettingError(
                f"dropout must be 0 for {self.command}: with it the policy differs from its reference before anything is learnt",
                key="lora.dropout",
                remedy="Leave it out.",
            )
        return self

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimiser steps of the whole run."""
        return self.max_steps or max(1, math.ceil(self.epochs * steps_per_epoch - 1e-9))


class SFTRecipe(TrainRecipe):
    """`tether sft`: raise the likelihood of given answers."""

    command: ClassVar[str] = "sft"
    train_on: Literal["assistant", "last", "all"] = Field(
        default="assistant",
        description="Which tokens are learnt: every assistant turn, the last one only, or the whole text with the prompt.",
    )


class RewardRecipe(TrainRecipe):
    """`tether reward`: learn from comparisons to give an answer one number."""

    command: ClassVar[str] = "reward"
    dropout_forbidden: ClassVar[bool] = True
    model: OptionalText = Field(
        default=None,
        description="The model to start from: a folder, a hub id, a .gguf file or an adapter folder. Not needed with `features`.",
    )  # type: ignore[assignment]
    learning_rate: Positive = Field(
        default=1e-5, description="Size of a step; too high breaks the model, too low learns nothing in the time."
    )
    heads: Count = Field(default=1, description="Scalar heads on one trunk; with several, their disagreement shows how sure a score is.")
    lcb: NotNegative = Field(
        default=1.0, description="With several heads the score is mean - lcb x spread; higher trusts less where the heads disagree."
    )
    margin: Flag = Field(
        default=True, description="Use the data's margin column where there is one: the scores must differ by more than it."
    )
    center_coef: NotNegative = Field(
        default=0.0, description="Pull of each pair's scores towards a mean of 0; 0.01 fixes the offset that comparisons alone cannot see."
    )
    features: OptionalTexts = Field(
        default=None, description="Columns of numbers per answer: learn one readable weight for each instead of training a language model."
    )
    feature_epochs: Count = Field(default=200, description="With features: passes over the pairs; more separates them further.")
    feature_learning_rate: Positive = Field(default=0.1, description="With features: size of a step of the weights.")
    feature_l2: NotNegative = Field(
        default=0.0, description="With features: pull of the weights towards 0; above 0 they stay finite on pairs that can be separated."
    )

    @model_validator(mode="after")
    def _reward_settings_agree(self) -> Self:
        if self.features is None:
            if self.model is None:
                raise SettingError("is needed and was not given", key="model", remedy="Add `model: ...` to the recipe or pass --model.")
            for name in sorted(self.given_feature_settings()):
                raise SettingError(
                    "only acts together with features, which was not given", key=name, remedy="Leave it out, or give features: [...]."
                )
        else:
            for name in sorted(self._language_only()):
                if getattr(self, name) != type(self).model_fields[name].default:
                    ours = {"learning_rate": "feature_learning_rate", "epochs": "feature_epochs", "weight_decay": "feature_l2"}.get(name)
                    remedy = f"With features it is {ours}." if ours else "Leave it or features out."
                    raise SettingError("does not act with features: no language model is trained", key=name, remedy=remedy)
        if self.heads == 1 and self.lcb != 1.0:
            raise SettingError(
                "only acts with several heads: one head has no spread", key="lcb", remedy="Set heads to 3 or more, or leave lcb out."
            )
        return self

    def given_feature_settings(self) -> list[str]:
        names = ("feature_epochs", "feature_learning_rate", "feature_l2")
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]

    def _unused(self) -> frozenset[str]:
        if self.features is None:
            return frozenset({"features", "feature_epochs", "feature_learning_rate", "feature_l2"})
        return self._language_only()

    @classmethod
    def _language_only(cls) -> frozenset[str]:
        """Settings that only act when a language model is trained."""
        with_features = {"data", "eval_data", "eval_fraction", "run", "seed", "on_bad_rows", "batch_size", "shuffle", "margin"}
        return frozenset(name for name in cls.model_fields if name not in with_features and not name.startswith("feature"))


KTO_SETTINGS = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}
LOSS_NAMES = (*SHEET, "kto")
# The value of a setting in a loss that has no place for it: the one that changes nothing.
OFF = {"beta": 0.1, **NEUTRAL, "desirable_weight": 1.0, "undesirable_weight": 1.0}


def settings_of(loss: str) -> dict[str, float]:
    """The settings that a loss has a place for, with its own defaults."""
    return dict(KTO_SETTINGS) if loss == "kto" else loss_settings(loss, {})


LossType = Literal[
    "dpo", "dpo_reference_free", "cdpo", "robust_dpo", "hinge", "slic", "ipo_sum", "ipo_avg", "dpo_norm", "dpop",
    "dpo_nll_seq", "dpo_nll_token", "simpo", "cpo", "orpo", "kto",
]  # fmt: skip


class DPORecipe(TrainRecipe):
    """`tether dpo`: learn from pairs (or, with kto, from answers marked good or bad) without a reward model."""

    command: ClassVar[str] = "dpo"
    dropout_forbidden: ClassVar[bool] = True
    learning_rate: Positive = Field(
        default=1e-6, description="Size of a step; too high drives both answers of a pair down, too low learns nothing in the time."
    )
    loss_type: LossType = Field(
        default="dpo", description="The loss: what is asked of a pair's log-probs; docs/losses.md has each formula."
    )
    beta: Positive = Field(
        default=OFF["beta"],
        description="Strength of the tie to the reference; higher stays nearer to it. For ipo_* it is tau, for simpo and cpo the scale of the difference.",
    )
    label_smoothing: Share = Field(
        default=0.0, description="Share of pairs taken to be labelled the wrong way round; higher holds the margin back."
    )
    gamma: NotNegative = Field(
        default=0.0, description="SimPO's target margin, not multiplied by beta; higher pushes the two answers further apart."
    )
    delta: Positive = Field(default=1.0, description="SLiC's wanted difference of log-probs; pairs beyond it no longer pull.")
    nll_coef: NotNegative = Field(
        default=0.0, description="Weight of the chosen answer's likelihood; higher keeps the chosen answer from falling."
    )
    lambda_dpop: NotNegative = Field(
        default=0.0, description="Weight of DPO-positive's penalty for a chosen answer below the reference; 5 is gentle, 50 is the paper's."
    )
    lambda_or: Positive = Field(default=0.0, description="Weight of ORPO's odds-ratio term beside the likelihood; higher prefers harder.")
    desirable_weight: Positive = Field(default=1.0, description="KTO's weight of good answers; raise it when they are few.")
    undesirable_weight: Positive = Field(default=1.0, description="KTO's weight of bad answers; raise it when they are few.")
    reference: Text = Field(
        default="start", description="The model the policy is tied to: start (what the run begins with), or a model as in `model`."
    )
    cache_reference: Flag = Field(
        default=True,
        description="Work the reference's scores out once and keep them beside the data; false works them out anew in every run.",
    )
    displacement_warn_steps: Count = Field(
        default=50,
        description="Warn when most chosen answers have been less likely than at the start for this many steps; lower warns earlier.",
    )
    min_edit_distance: Share = Field(
        default=0.0,
        description="Leave out pairs whose answers differ in less than this share of their tokens: they drive both answers down.",
    )

    @classmethod
    def _fill(cls, data: dict[str, Any], notes: list[str]) -> dict[str, Any]:
        loss = data.get("loss_type", "dpo")
        if not isinstance(loss, str):
            return data  # told by the field itself
        if loss in LOSS_ALIASES:
            notes.append(f"loss_type {loss} is called {LOSS_ALIASES[loss]} here")
            loss = data["loss_type"] = LOSS_ALIASES[loss]
        if loss not in LOSS_NAMES:
            raise SettingError(f"{loss!r} is not one of: {', '.join(LOSS_NAMES)}", key="loss_type", remedy=_loss_meant(loss))
        used = settings_of(loss)
        for name in OFF:
            if name in data and name not in used:
                users = [other for other in LOSS_NAMES if name in settings_of(other)]
                remedy = f"It acts in: {', '.join(users)}. The settings of {loss} are: {', '.join(used)}."
                raise SettingError(f"{loss} does not use it", key=name, remedy=remedy)
        return {**used, **data}

    @model_validator(mode="after")
    def _dpo_settings_agree(self) -> Self:
        if self.label_smoothing >= 0.5:
            raise SettingError(
                f"must be below 0.5, got {self.label_smoothing:g}: at one half the labels say nothing",
                key="label_smoothing",
                remedy="0.1 is usual.",
            )
        if self.reference != "start" and not self.has_reference:
            raise SettingError(
                f"{self.loss_type} has no reference", key="reference", remedy="Leave it out, or take a loss with a reference, such as dpo."
            )
        if self.loss_type == "kto":
            if self.batch_size < 2:
                raise SettingError(
                    "kto needs at least 2 rows in a step: its baseline compares each prompt with another row's answer", key="batch_size"
                )
            if self.min_edit_distance > 0:
                raise SettingError("kto has no pairs to compare", key="min_edit_distance", remedy="Leave it out.")
            if self.reference != "start":
                raise SettingError("kto is tied to the model it starts from", key="reference", remedy="Leave it out.")
        return self

    def loss_settings(self) -> dict[str, Any]:
        """loss_type and the settings that this loss has a place for: the keyword arguments of its function."""
        return {"loss_type": self.loss_type, **{name: getattr(self, name) for name in settings_of(self.loss_type)}}

    @property
    def has_reference(self) -> bool:
        return self.loss_type == "kto" or self.loss_type in NEEDS_REFERENCE

    def _unused(self) -> frozenset[str]:
        unused = set(OFF) - set(settings_of(self.loss_type))
        return frozenset(unused if self.has_reference else unused | {"reference", "cache_reference"})


def _loss_meant(loss: str) -> str | None:
    if loss == "rpo":
        return "It names three papers: take dpo_nll_seq (iterative RPO), dpo_nll_token (likelihood as regulariser) or dpop."
    close = nearest(loss, [*LOSS_NAMES, *LOSS_ALIASES])
    if close is None:
        return None
    return f"Did you mean {close}" + (f", which is called {LOSS_ALIASES[close]} here?" if close in LOSS_ALIASES else "?")


class GRPORecipe(TrainRecipe):
    """Group-relative policy optimisation: sample several answers to a prompt and learn from which of them did better."""

    command: ClassVar[str] = "grpo"
    dropout_forbidden: ClassVar[bool] = True
    batch_size: Count = Field(
        default=64, description="Completions per optimiser step, a multiple of num_generations; larger is smoother and slower per step."
    )
    learning_rate: Positive = Field(
        default=1e-6, description="Size of a step; too high breaks the model, too low learns nothing in the time."
    )
    num_generations: Count = Field(
        default=8, description="Answers sampled for each prompt; more gives a steadier comparison and costs more sampling."
    )
    max_completion_length: Count = Field(
        default=512, description="Longest answer sampled, in tokens; too short cuts answers off before they can earn anything."
    )
    temperature: Positive = Field(
        default=1.0, description="Spread of the sampling; higher explores more. The log-probs are worked out at the same temperature."
    )
    updates_per_batch: Count = Field(default=1, description="Passes over each batch of samples; more reuses them and leans on the clip.")
    beta: NotNegative = Field(default=0.0, description="Strength of the tie to the reference; 0 needs no reference.")
    eps_low: Positive = Field(default=0.2, description="How far a token's ratio may fall below 1 before it stops counting.")
    eps_high: Positive = Field(
        default=0.2, description="How far a token's ratio may rise above 1 before it stops counting; higher lets rare tokens grow."
    )
    scale_rewards: Literal["group", "batch", "none"] = Field(
        default="group", description="What the centred rewards are divided by: their spread in the group, in the batch, or nothing."
    )
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = Field(
        default="token-mean",
        description="How tokens become one loss: which of long and short answers weigh more; docs/losses.md has each formula.",
    )
    mask_truncated: Flag = Field(
        default=False, description="Leave answers that hit max_completion_length out of the loss; their reward still counts in the group."
    )

    @model_validator(mode="after")
    def _grpo_settings_agree(self) -> Self:
        rows, group = self.batch_size, self.num_generations
        if group < 2:
            raise SettingError(f"a group needs at least 2 answers to compare, got {group}", key="num_generations", remedy="8 is usual.")
        if rows % group:
            nearby = [n for n in (rows - rows % group, rows - rows % group + group) if n]
            divisors = [n for n in range(2, rows + 1) if rows % n == 0]
            raise SettingError(
                f"batch_size {rows} is not a multiple of num_generations {group}",
                key="batch_size",
                remedy=f"These would work: batch_size {_either(nearby)}"
                + (f", or num_generations {_either(sorted(divisors, key=lambda n: abs(n - group))[:3])}." if divisors else "."),
            )
        if self.eps_low >= 1:
            raise SettingError(f"must be below 1, got {self.eps_low:g}: a ratio cannot fall below 0", key="eps_low", remedy="0.2 is usual.")
        return self


def _either(numbers: list[int]) -> str:
    listed = [str(n) for n in sorted(numbers)]
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} or {listed[-1]}"


RECIPES: dict[str, type[TrainRecipe]] = {"sft": SFTRecipe, "reward": RewardRecipe, "dpo": DPORecipe, "grpo": GRPORecipe}

Recipe = SFTRecipe | RewardRecipe | DPORecipe | GRPORecipe
__all__ = ["RECIPES", "DPORecipe", "GRPORecipe", "LoraConfig", "Recipe", "RewardRecipe", "SFTRecipe", "TrainRecipe"]
