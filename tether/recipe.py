"""Typed recipes: every setting with its default and one line on what moving it does. Torch-free.

The descriptions are the documentation: `docs/recipes.md`, `tether explain` and `tether <command> --help` are made from them.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from tether.dpo_recipe import DPORecipe
from tether.keys import SettingError
from tether.train_recipe import LoraConfig, TrainRecipe
from tether.values import (
    Count,
    Flag,
    NotNegative,
    OptionalText,
    OptionalTexts,
    Positive,
)


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

__all__ = ["RECIPES", "DPORecipe", "GRPORecipe", "LoraConfig", "RewardRecipe", "SFTRecipe", "TrainRecipe"]
