"""The lines of a verification in their order, and how they are run: from words to tokens to numbers to steps."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.errors import UserError
from tether.hub import first_line
from tether.recipe import RECIPES, RewardRecipe, TrainRecipe
from tether.verify import equal, exact, losses, tokens, training
from tether.verify.check import Check, Found, LeftOut, judged
from tether.verify.sampled import sampled_here
from tether.verify.subject import Subject, make


@dataclass(frozen=True)
class Line:
    name: str
    compared: str
    compare: Callable[[Subject], Found]


LINES = (
    Line("trained tokens", "trained positions against the rows' own words and ends", tokens.trained_tokens),
    Line("packed = padded", "all rows in one stream against each row alone in transformers", equal.packed_is_padded),
    Line("shared = repeated", "a prompt computed once against once for each answer", equal.shared_is_repeated),
    Line("chunked = whole", "vocabulary in tiles against one table, with gradients", equal.chunked_is_whole),
    Line("sampling = training", "log-probs as sampled against those that are trained", equal.sampling_is_training),
    Line("reference", "kept reference scores against the model at its start", equal.reference_is_kept),
    Line("loss = formula", "loss and slopes against plain arithmetic", losses.loss_is_its_formula),
    Line("advantage = formula", "advantages and returns against plain arithmetic", losses.advantages_are_their_formula),
    Line("gradient = slope", "backward pass against difference quotients in float64", losses.gradient_is_the_slope),
    Line("any split = whole", "one micro-batch against two and one for each row", training.any_split_is_whole),
    Line("a step of the loop", "a whole run of one step against the formula's gradient", training.a_step_follows_the_formula),
    Line("checkpoint", "saved and read again, bit for bit, and the next step", training.a_checkpoint_keeps_everything),
    Line("exact policy", "expected updates over every answer there is", exact.expected_updates_lead_where_they_should),
    Line("bf16", "bfloat16 against float32", equal.half_precision),
)
ABOUT_WORDS = LINES[:6] + LINES[8:]  # these need rows or a model
WITHOUT_MODEL = "no language model is trained"


def verify(recipe: TrainRecipe, on_notes: Callable[[list[str]], None], on_check: Callable[[Check], None]) -> list[Check]:
    """Every line for one recipe; `on_notes` hears what is verified with, `on_check` each line as it is done.

    UserError for data or a model that is there and cannot be used.
    """
    done = []
    recipe = sampled_here(recipe)
    with tempfile.TemporaryDirectory(prefix="tether-verify-") as folder:
        bare = isinstance(recipe, RewardRecipe) and recipe.features is not None
        subject: Any = _Bare(recipe) if bare else make(recipe, Path(folder))
        on_notes([f"features {', '.join(recipe.features or [])}, made-up pairs"] if bare else notes(subject))  # type: ignore[attr-defined]
        for check in run(subject, ABOUT_WORDS if bare else ()):
            done.append(check)
            on_check(check)
    return done


@dataclass(frozen=True)
class _Bare:
    """A recipe without a language model has nothing but its formula."""

    recipe: TrainRecipe
    samples: bool = False


def notes(subject: Subject) -> list[str]:
    """What is verified with, in words."""
    model = f"model: {subject.main}" + (f", because {subject.main.why}" if subject.main.why else "")
    if subject.small.name != subject.main.name:
        model += f"; what trains or needs float64 is checked on {subject.small}, because {subject.small.why}"
    return [model, f"rows: {subject.rows.note}"]


def run(subject: Subject, left_out: tuple[Line, ...]) -> Iterator[Check]:
    for line in LINES:
        yield check(line, subject, WITHOUT_MODEL if line in left_out else None)


def check(line: Line, subject: Subject, why_not: str | None = None) -> Check:
    """One line. What stops in the middle does not hold: that is what the line is there to find out, whatever it is called."""
    started = time.perf_counter()

    def made(verdict: Any, difference: float | None, limit: float | None, detail: str) -> Check:
        return Check(line.name, line.compared, verdict, difference, limit, detail, time.perf_counter() - started)

    if why_not is not None:
        return made("left out", None, None, why_not)
    try:
        found = line.compare(subject)
    except LeftOut as why:
        return made("left out", None, None, str(why))
    except UserError as error:
        return made("fails", None, None, f"stopped: {error}")
    except Exception as error:
        return made("fails", None, None, f"stopped by {type(error).__name__}: {first_line(error)}")
    return made(judged(found), found.difference, found.limit, found.detail)


# -- without a recipe --------------------------------------------------------------------------------------------------

BUILT_IN: dict[str, dict[str, Any]] = {
    "sft": {},
    "reward": {"heads": 3, "center_coef": 0.01},
    "dpo": {},
    "kto": {"loss_type": "kto"},
    "grpo": {"preset": "grpo", "max_completion_length": 16},
    "ppo": {"max_completion_length": 16},
}


def built_in() -> dict[str, TrainRecipe]:
    """A recipe of every method, without model or data: both are stood in for."""
    nothing = {"model": "a model of your own", "data": "rows of your own", "precision": "fp32"}
    return {name: RECIPES["dpo" if name == "kto" else name](**{**nothing, **given}) for name, given in BUILT_IN.items()}
