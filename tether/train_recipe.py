"""`TrainRecipe`: the settings that every training command understands. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self

from tether.keys import SettingError
from tether.settings import Settings
from tether.values import (
    Count,
    Flag,
    NotNegative,
    OptionalCount,
    OptionalText,
    OptionalTextOrList,
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
    keep_checkpoints: Whole = Field(
        default=2, description="How many of the newest checkpoints stay on disk; 0 writes none but on Ctrl-C, so a crash loses the run."
    )
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
        from tether.recipe import RECIPES

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
