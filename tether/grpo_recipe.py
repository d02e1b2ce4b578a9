"""`GRPORecipe`: a method of policy gradient without a critic, as independent choices. Presets are rows of `losses/sheet.py`.

A preset fills in what was not given; a given setting wins over it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from tether.keys import SettingError, nearest
from tether.losses.sheet import POLICY_PRESETS
from tether.rl_recipe import SamplingRecipe
from tether.values import Count, Flag, OptionalCount

PRESETS = tuple(name for name in POLICY_PRESETS if name != "ppo")
# These compare an answer with the others to the same prompt; the rest compare with the whole batch.
COMPARED_IN_GROUPS = ("group_norm", "group_mean", "batch_std", "rloo", "reinforce_pp_baseline")
ONE_RATIO_PER_ANSWER = ("gspo", "gspo_token", "seq_ratio")
# Clip settings that a surrogate has no place for.
NO_PLACE = {"reinforce": ("eps_low", "eps_high", "dual_clip"), "cispo": ("eps_low", "dual_clip")}


class GRPORecipe(SamplingRecipe):
    """`tether grpo`: sample several answers to a prompt and learn from which of them did better."""

    command: ClassVar[str] = "grpo"
    preset: Literal["reinforce", "rloo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce_pp"] | None = Field(
        default=None,
        description="A published method: fills in advantage, surrogate, aggregation, kl_in, beta and clip bounds that are not given.",
    )
    advantage: Literal["batch_mean", "group_mean", "group_norm", "batch_std", "rloo", "reinforce_pp_baseline", "reinforce_pp"] = Field(
        default="group_norm",
        description="What an answer's reward is compared with and divided by; group_norm: mean and spread of the answers to the same prompt.",
    )
    std: Literal["sample", "population"] = Field(
        default="sample",
        description="How a spread is worked out: over n - 1 (sample) or n; at small groups sample gives smaller advantages.",
    )
    surrogate: Literal["reinforce", "ppo", "gspo", "gspo_token", "cispo", "seq_ratio"] = Field(
        default="ppo", description="What is maximised per token, and where a ratio stops counting; docs/losses.md has each formula."
    )
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = Field(
        default="token-mean",
        description="How tokens become one loss: which of long and short answers weigh more; docs/losses.md has each formula.",
    )
    kl_in: Literal["loss", "reward"] = Field(
        default="loss", description="Where the tie to the reference acts: as a term of the loss, or as a cost in the reward (k1)."
    )
    kl_kind: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="Estimator of the tie in the loss: k2 pulls along KL(policy, reference), k3 along KL(reference, policy)."
    )
    kl_unbiased: Flag = Field(
        default=False, description="Multiply the tie in the loss by the ratio: with it k1 and k3 pull along KL(policy, reference)."
    )
    reward_mixture: Literal["sum_then_normalize", "normalize_then_sum"] = Field(
        default="sum_then_normalize",
        description="With several rewards: add them up before comparing (the widest decides), or compare each for itself first (weights decide).",
    )
    dynamic_sampling: Flag = Field(
        default=False, description="Sample more prompts in place of those whose answers all earn the same and teach nothing."
    )
    max_sampling_rounds: Count = Field(
        default=3, description="With dynamic_sampling: rounds of sampling at most; then the step learns from what there is."
    )
    overlong_cache: OptionalCount = Field(
        default=None,
        description="Tokens before max_completion_length over which a penalty for length grows to -1; null: none. Longer starts earlier.",
    )

    @classmethod
    def _fill(cls, data: dict[str, Any], notes: list[str]) -> dict[str, Any]:
        data = super()._fill(data, notes)
        name = data.get("preset")
        if name is not None and name not in PRESETS:
            close = nearest(str(name), PRESETS)
            remedy = "It has a command of its own: `tether ppo`." if name == "ppo" else f"Did you mean {close}?" if close else None
            raise SettingError(f"{name!r} is not one of: {', '.join(PRESETS)}", key="preset", remedy=remedy)
        filled = {**preset_settings(name, data), **data} if name else data
        surrogate = filled.get("surrogate", "ppo")
        for key in NO_PLACE.get(surrogate, ()) if isinstance(surrogate, str) else ():
            if key in data:
                raise SettingError(f"the surrogate {surrogate} does not use it", key=key, remedy="Leave it out.")
        return filled

    @model_validator(mode="after")
    def _grpo_settings_agree(self) -> Self:
        if self.num_generations < 2 and self.advantage in COMPARED_IN_GROUPS:
            raise SettingError(
                f"a group needs at least 2 answers to compare, got {self.num_generations}: one answer alone is neither better nor worse",
                key="num_generations",
                remedy="8 is usual.",
            )
        if self.surrogate in ONE_RATIO_PER_ANSWER and self.aggregation != "seq-mean-token-mean":
            raise SettingError(
                f"{self.surrogate} has one ratio per answer: {self.aggregation} would weigh answers by their length",
                key="aggregation",
                remedy="Use seq-mean-token-mean.",
            )
        if self.kl_in == "loss" and self.beta > 0 and self.kl_kind == "k1" and not self.kl_unbiased:
            raise SettingError(
                "k1 in the loss has no pull: its gradient is 0 on average",
                key="kl_kind",
                remedy="Use k2 or k3, or kl_unbiased: true, or kl_in: reward.",
            )
        if self.kl_in == "reward":
            for key in ("kl_kind", "kl_unbiased"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise SettingError("only acts with kl_in: loss; in the reward the tie is k1", key=key, remedy="Leave it out.")
        if self.reward_mixture == "normalize_then_sum" and (self.advantage != "group_norm" or (self.kl_in == "reward" and self.beta > 0)):
            raise SettingError(
                "normalises each reward in its group, so it needs advantage: group_norm and no tie in the reward", key="reward_mixture"
            )
        if self.overlong_cache is not None:
            if self.mask_truncated:
                raise SettingError(
                    "answers that are cut off would be both penalised and left out", key="overlong_cache", remedy="Choose one of the two."
                )
            if self.overlong_cache > self.max_completion_length:
                raise SettingError(f"is above max_completion_length {self.max_completion_length}", key="overlong_cache")
        if not self.dynamic_sampling and self.max_sampling_rounds != type(self).model_fields["max_sampling_rounds"].default:
            raise SettingError("only acts with dynamic_sampling", key="max_sampling_rounds", remedy="Set dynamic_sampling: true.")
        return self

    def loss_settings(self) -> dict[str, Any]:
        """The keyword arguments of `policy_loss` that stay the same for the whole run."""
        out: dict[str, Any] = {"surrogate": self.surrogate, "mode": self.aggregation}
        out |= {"eps_low": self.eps_low, "eps_high": self.eps_high, "dual_clip": self.dual_clip}
        if self.kl_in == "loss":
            out |= {"kl_kind": self.kl_kind, "kl_is_weight": self.kl_unbiased}
        if self.aggregation == "seq-mean-token-sum-norm":
            out["norm_constant"] = float(self.max_completion_length)
        return out

    def _unused(self) -> frozenset[str]:
        out = set(super()._unused()) | set(NO_PLACE.get(self.surrogate, ()))
        if self.kl_in == "reward" or self.beta == 0:
            out |= {"kl_kind", "kl_unbiased"}
        if not self.dynamic_sampling:
            out |= {"max_sampling_rounds"}
        return frozenset(out)


def preset_settings(name: str, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """The settings of a preset.

    >>> preset_settings("dr_grpo")["aggregation"], preset_settings("rloo")["kl_in"]
    ('seq-mean-token-sum-norm', 'reward')
    """
    row = POLICY_PRESETS[name]
    out: dict[str, Any] = {"advantage": row.advantage, "surrogate": row.surrogate, "aggregation": row.reduction}
    out["kl_in"] = "reward" if row.kl.startswith("in reward") else "loss"
    out["beta"] = row.settings.get("kl_coef", 0.0)
    unused = NO_PLACE.get(row.surrogate, ())
    out |= {key: row.settings[key] for key in ("eps_low", "eps_high") if key in row.settings and key not in unused}
    if row.advantage == "reinforce_pp":
        out["std"] = "population"
    if name == "dapo":
        out["dynamic_sampling"] = True
        length = (given or {}).get("max_completion_length", 512)
        if isinstance(length, int) and not (given or {}).get("mask_truncated"):
            out["overlong_cache"] = max(1, length // 5)  # the paper's share: 4096 of 20480
    return out
