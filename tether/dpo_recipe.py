"""`DPORecipe`: the settings of the DPO family. Names, settings and defaults of the losses come from `losses/sheet.py`.

A setting that the chosen loss has no place for is refused, never ignored.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from tether.keys import SettingError, nearest
from tether.losses.sheet import LOSS_ALIASES, NEEDS_REFERENCE, NEUTRAL, SHEET, loss_settings
from tether.train_recipe import TrainRecipe
from tether.values import (
    Count,
    Flag,
    NotNegative,
    Positive,
    Share,
    Text,
)

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
