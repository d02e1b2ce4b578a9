"""Typed recipes: every setting with its default and one line on what moving it does. Torch-free.

The descriptions are the documentation: `docs/recipes.md`, `tether explain` and `tether <command> --help` are made from them.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from tether.dpo_recipe import DPORecipe
from tether.grpo_recipe import GRPORecipe
from tether.keys import SettingError
from tether.ppo_recipe import PPORecipe
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


RECIPES: dict[str, type[TrainRecipe]] = {"sft": SFTRecipe, "reward": RewardRecipe, "dpo": DPORecipe, "grpo": GRPORecipe, "ppo": PPORecipe}

__all__ = ["RECIPES", "DPORecipe", "GRPORecipe", "LoraConfig", "PPORecipe", "RewardRecipe", "SFTRecipe", "TrainRecipe"]
