"""`SamplingRecipe`: what every way of learning by doing has in common: answers are sampled, rewards judge them. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_serializer, model_validator
from typing_extensions import Self

from tether.engine_recipe import LOCAL, EngineConfig, engine_of
from tether.keys import SettingError
from tether.train_recipe import TrainRecipe
from tether.values import Count, Flag, NotNegative, OptionalCount, Positive, Whole, number, optional, text, texts

OptionalPositive = Annotated[Annotated[float, Field(gt=0)] | None, optional(number)]


def reward_list(value: Any) -> list[str | dict[str, Any]]:
    """Names of rewards, or blocks with a name under `reward`; one alone counts as a list of one."""
    if isinstance(value, (str, Mapping)):
        value = [value]
    if not isinstance(value, (list, tuple)):
        return list(texts(value))
    out: list[str | dict[str, Any]] = []
    for entry in value:
        if not isinstance(entry, Mapping):
            out.append(text(entry))
            continue
        if "reward" not in entry:
            raise ValueError("a reward's block needs its name; write {reward: math, weight: 1.0, ...}")
        text(entry["reward"])
        if "weight" in entry:
            number(entry["weight"])
        out.append(dict(entry))
    return out


class SamplingRecipe(TrainRecipe):
    """Settings shared by `tether grpo` and `tether ppo`. A step samples `batch_size` answers and learns from them."""

    dropout_forbidden: ClassVar[bool] = True
    rewards: Annotated[list[str | dict[str, Any]], BeforeValidator(reward_list)] = Field(
        default=[],
        description="What an answer earns: names such as math or my_rewards.py:brevity, or blocks {reward: format, weight: 0.1, ...}; "
        "the weighted sum is learnt from. A part of weight 0 is only watched.",
    )
    batch_size: Count = Field(
        default=64, description="Answers sampled in a step, a multiple of num_generations; larger is smoother and slower per step."
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
    sampling_slots: Count = Field(
        default=128, description="Answers sampled side by side; more is faster and takes more memory for keys and values."
    )
    engine: Annotated[EngineConfig, BeforeValidator(engine_of)] = Field(
        default=LOCAL,
        description="Who samples: local (this process), vllm (a server that the run starts), or a block such as {urls: [...]}; docs/engines.md.",
    )
    ahead_steps: Whole = Field(
        default=0,
        description="Steps that sampling may run ahead of training (needs engine vllm); more keeps servers busy with weights that are older.",
    )
    updates_per_batch: Count = Field(default=1, description="Passes over each batch of samples; more reuses them and leans on the clip.")
    mini_batches: Count = Field(
        default=1,
        description="Parts that a pass is cut into, each with an optimiser step of its own; more learns faster and drifts further.",
    )
    beta: NotNegative = Field(default=0.0, description="Strength of the tie to the reference; 0 needs no reference.")
    watch_kl: Flag = Field(
        default=False,
        description="Measure the KL to the start also where beta is 0; costs a pass without gradient over each step's answers.",
    )
    kl_target: OptionalPositive = Field(
        default=None,
        description="Let beta rise and fall so that the KL to the reference stays near this many nats per answer; null keeps beta fixed.",
    )
    kl_horizon: Positive = Field(default=10000.0, description="With kl_target: answers over which beta adapts; smaller turns faster.")
    reference_refresh_steps: OptionalCount = Field(
        default=None,
        description="Make the policy its own reference anew every so many steps; null keeps the start. Smaller lets it drift further.",
    )
    eps_low: Positive = Field(default=0.2, description="How far a ratio may fall below 1 before it stops counting.")
    eps_high: Positive = Field(
        default=0.2, description="How far a ratio may rise above 1 before it stops counting; higher lets rare tokens grow."
    )
    dual_clip: OptionalPositive = Field(
        default=None, description="Most that a bad answer's ratio can weigh, above 1 (3 is usual); null: no such bound."
    )
    importance: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geo_mask_token_weight"] = Field(
        default="none",
        description="Weights for the difference between the distribution that sampled and the one that trains; none where both are one program.",
    )
    importance_max: Positive = Field(default=2.0, description="Largest such weight; a mask drops what lies above it.")
    importance_min: NotNegative = Field(default=0.0, description="Smallest such weight; a mask drops what lies below it.")
    mask_truncated: Flag = Field(
        default=False, description="Leave answers that hit max_completion_length out of the loss; their reward still counts in the group."
    )

    @field_serializer("engine")
    def _engine_in_plain(self, value: EngineConfig) -> str | dict[str, Any]:
        return value.plain()

    @classmethod
    def _fill(cls, data: dict[str, Any], notes: list[str]) -> dict[str, Any]:
        """Where another program samples, its log-probs differ from those of training by more than rounding here explains."""
        chosen = data.get("engine")
        remote = chosen == "vllm" or (isinstance(chosen, EngineConfig) and chosen.remote)
        if remote and "importance" not in data:
            notes.append("importance: token_truncate, because the engine that samples is another program than the one that trains")
            return {**data, "importance": "token_truncate"}
        return data

    @model_validator(mode="after")
    def _sampling_settings_agree(self) -> Self:
        rows, group = self.batch_size, self.num_generations
        if rows % group:
            nearby = [n for n in (rows - rows % group, rows - rows % group + group) if n]
            divisors = [n for n in range(2, rows + 1) if rows % n == 0]
            raise SettingError(
                f"batch_size {rows} is not a multiple of num_generations {group}",
                key="batch_size",
                remedy=f"These would work: batch_size {_either(nearby)}"
                + (f", or num_generations {_either(sorted(divisors, key=lambda n: abs(n - group))[:3])}." if divisors else "."),
            )
        if self.ahead_steps and not self.engine.remote:
            raise SettingError(
                "needs a sampler beside training, and engine: local samples in this process", key="ahead_steps", remedy="Set engine: vllm."
            )
        if self.engine.remote:
            if not 0.01 <= self.temperature <= 2:
                raise SettingError(f"vLLM samples at 0.01 to 2, got {self.temperature:g}", key="temperature")
            if self.lora is not None and self.lora.modules_to_save:
                raise SettingError(
                    "vLLM loads adapters alone, without modules trained in full", key="lora.modules_to_save", remedy="Leave it out."
                )
        if self.eps_low >= 1:
            raise SettingError(f"must be below 1, got {self.eps_low:g}: a ratio cannot fall below 0", key="eps_low", remedy="0.2 is usual.")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise SettingError(f"must be above 1, got {self.dual_clip:g}", key="dual_clip", remedy="3 is usual.")
        if self.max_completion_length >= self.max_length:
            raise SettingError(
                f"{self.max_completion_length} leaves no room for a prompt within max_length {self.max_length}",
                key="max_completion_length",
                remedy="Raise max_length: it counts prompt and answer together.",
            )
        if self.importance_min > self.importance_max:
            raise SettingError(f"is above importance_max {self.importance_max:g}", key="importance_min")
        for name in ("importance_max", "importance_min"):
            if self.importance == "none" and getattr(self, name) != type(self).model_fields[name].default:
                raise SettingError("only acts with importance weights", key=name, remedy="Set importance, such as token_truncate.")
        for name in ("kl_target", "reference_refresh_steps"):
            if self.beta == 0 and getattr(self, name) is not None:
                raise SettingError("only acts with a tie to the reference, and beta is 0", key=name, remedy="Set beta, such as 0.05.")
        if self.kl_target is None and self.kl_horizon != type(self).model_fields["kl_horizon"].default:
            raise SettingError("only acts with kl_target", key="kl_horizon", remedy="Set kl_target, such as 6.")
        if self.batch_size >= 5 * self.kl_horizon:
            raise SettingError(
                f"must be above a fifth of batch_size {self.batch_size}, got {self.kl_horizon:g}: beta could reach 0", key="kl_horizon"
            )
        return self

    @property
    def groups_per_step(self) -> int:
        return self.batch_size // self.num_generations

    @property
    def updates_per_step(self) -> int:
        return self.updates_per_batch * self.mini_batches

    @property
    def has_reference(self) -> bool:
        return self.beta > 0 or self.watch_kl

    def total_steps(self, steps_per_epoch: int) -> int:
        """Steps of the whole run: a step is a batch of samples with all its updates."""
        return super().total_steps(steps_per_epoch)

    def _unused(self) -> frozenset[str]:
        out = {"truncation"}
        if self.importance == "none":
            out |= {"importance_max", "importance_min"}
        if not self.engine.remote:
            out |= {"ahead_steps"}
        elif self.engine.urls is not None:
            out |= {"sampling_slots"}
        if self.kl_target is None:
            out |= {"kl_horizon"}
        if self.beta > 0:  # measured anyway
            out |= {"watch_kl"}
        return frozenset(out)


def _either(numbers: list[int]) -> str:
    listed = [str(n) for n in sorted(numbers)]
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} or {listed[-1]}"
