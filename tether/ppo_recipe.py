"""`PPORecipe`: proximal policy optimisation with a critic. Defaults are TRL's, with OpenRLHF's clip of scores."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import Self

from tether.keys import SettingError
from tether.rl_recipe import OptionalPositive, SamplingRecipe
from tether.values import Count, Flag, NotNegative, OptionalText, Positive, number

UpToOne = Annotated[float, Field(ge=0, le=1), BeforeValidator(number)]


class PPORecipe(SamplingRecipe):
    """`tether ppo`: sample answers, judge them, and learn with a critic that says token by token what was expected."""

    command: ClassVar[str] = "ppo"
    learning_rate: Positive = Field(
        default=3e-6, description="Size of a step; too high breaks the model, too low learns nothing in the time."
    )
    num_generations: Count = Field(default=1, description="Answers sampled for each prompt; the critic compares, so one is enough.")
    updates_per_batch: Count = Field(default=4, description="Passes over each batch of samples; more reuses them and leans on the clip.")
    beta: NotNegative = Field(
        default=0.05, description="Cost of each token's distance from the reference (k1), taken off the reward; 0 needs no reference."
    )
    critic: Literal["shared", "separate"] = Field(
        default="shared", description="A value head on the policy's own trunk, or a model of its own: twice the memory, no interference."
    )
    critic_model: OptionalText = Field(
        default=None,
        description="With critic: separate, what it starts from: a reward model (its head is kept) or a language model; null: the policy's model.",
    )
    critic_learning_rate: OptionalPositive = Field(
        default=None, description="Size of the critic's steps (with critic: shared, the head's); null: as learning_rate."
    )
    vf_coef: Positive = Field(default=0.1, description="Weight of the critic's loss beside the policy's; higher fits the values faster.")
    value_clip: OptionalPositive = Field(
        default=0.2, description="How far a value may move in one batch before its error stops counting; null: no bound."
    )
    gamma: UpToOne = Field(default=1.0, description="Discount of later rewards; below 1 it punishes length.")
    lam: UpToOne = Field(
        default=0.95, description="Trust in what was earned (1) over what the critic expects (0); lower is steadier and more biased."
    )
    whiten_rewards: Flag = Field(default=False, description="Divide per-token rewards by their spread in the batch; their mean stays.")
    whiten_advantages: Flag = Field(default=True, description="Centre advantages over the batch's tokens and divide by their spread.")
    std: Literal["sample", "population"] = Field(
        default="sample", description="How those spreads are worked out: over n - 1 (sample) or n."
    )
    score_scaling: Literal["none", "running"] = Field(
        default="none", description="Divide scores by the spread of all scores so far (running); their mean stays."
    )
    score_clip: OptionalPositive = Field(default=10.0, description="Scores beyond this, either way, count as this; null: no bound.")
    missing_end_penalty: NotNegative = Field(
        default=0.0, description="Taken off the score of an answer without an end; 1 teaches to finish."
    )
    max_approx_kl: OptionalPositive = Field(
        default=None, description="Skip the remaining passes once the update has moved this many nats per token; null: never."
    )

    @model_validator(mode="after")
    def _ppo_settings_agree(self) -> Self:
        if self.critic_model is not None and self.critic == "shared":
            raise SettingError("only acts with critic: separate", key="critic_model", remedy="Leave it out, or set critic: separate.")
        if self.missing_end_penalty and self.mask_truncated:
            raise SettingError(
                "an answer without an end cannot be penalised and left out of the loss",
                key="missing_end_penalty",
                remedy="Keep one: missing_end_penalty or mask_truncated.",
            )
        return self

    @property
    def critic_rate(self) -> float:
        return self.critic_learning_rate or self.learning_rate

    def _unused(self) -> frozenset[str]:
        whitens = self.whiten_rewards or self.whiten_advantages
        return super()._unused() | ({"critic_model"} if self.critic == "shared" else set()) | (set() if whitens else {"std"})
