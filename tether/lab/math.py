"""Exercise 5: 0 or 1 by the math rule on a transformer made from nothing. SFT, then GRPO; and GRPO by its own majority vote.

Two worlds differ in how people slip: any wrong number (then the right one is still given most often), or always one too many, and
more often than not (then the majority is wrong). The worlds and their runs are in `sums.py`.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tether.lab.catalogue import NAMES
from tether.lab.experiment import Experiment, Result, Variant
from tether.lab.sums import (
    Accuracy,
    Slip,
    accuracy,
    by_gold,
    by_vote,
    questions,
    reinforce,
    save_untrained,
    tune,
    write_demonstrations,
    write_questions,
)
from tether.progress import say
from tether.report.bars import Bars, bar_chart
from tether.report.charts import Chart, Series, line_chart
from tether.report.numbers import number, percent
from tether.report.view import Section, Table
from tether.rewards.math import MathReward
from tether.run import Run

# How people slip, and how often: at 50 % of any number the right one leads by far; at 65 % of one too many the wrong one does.
WORLDS: dict[str, tuple[Slip, float]] = {"slips at random": ("anything", 0.5), "one too many": ("one more", 0.65)}
STAGES = ("untrained", "SFT", "GRPO by the rule", "GRPO by vote")


@dataclass(frozen=True)
class Stage:
    """A model asked the questions it was trained on, and those it has never seen."""

    name: str
    seen: Accuracy
    unseen: Accuracy


@dataclass(frozen=True)
class World:
    name: str
    stages: Sequence[Stage]
    rule: Sequence[tuple[float, float]]  # (step, share of right answers) while GRPO learns from the rule
    vote: Sequence[tuple[float, float]]  # the same while it learns from the vote
    agreement: Sequence[tuple[float, float]]  # the reward of that run: the share that gives the majority's answer


def run(variant: Variant) -> Result:
    with tempfile.TemporaryDirectory(prefix="tether-lab-") as folder:
        worlds = trained(Path(folder))
    honest, wrong = worlds
    unseen = [percent(_stage(honest, name).unseen.sampled.value) for name in STAGES[:3]]
    return Result(
        see=(
            f"Where slips are at random the vote of a question's own attempts is mostly right, and learning from it alone lifts sampled "
            f"accuracy from {_share(honest, 'SFT')} to {_share(honest, 'GRPO by vote')}; the rule, which knows, reaches "
            f"{_share(honest, 'GRPO by the rule')} (on sums never trained on: {unseen[0]} untrained, {unseen[1]} after SFT, {unseen[2]} after the rule).",
            f"Where most people make the same mistake the vote makes it too: accuracy goes from {_share(wrong, 'SFT')} to "
            f"{_share(wrong, 'GRPO by vote')}, although its reward rises as before; the rule goes the other way, to {_share(wrong, 'GRPO by the rule')}.",
        ),
        tables=[_table(world) for world in worlds],
        sections=[
            Section(
                "Learning from 0 and 1",
                [
                    "reward = 1 where the math rule finds the right number, else 0; A = (R − mean)/std over the 8 attempts at a question. By "
                    "vote: 1 where an attempt gives what most of the 8 gave. Across: GRPO steps. Upwards: share of right answers, sampled; "
                    "agreement, the reward by vote, rises whether or not the majority is right."
                ],
                [_curves(world) for world in worlds],
            ),
            Section(
                "Before and after",
                ["80 questions of training and 20 that are only asked, 16 attempts each at temperature 1. Across: share of right answers."],
                [_bars(world) for world in worlds],
            ),
        ],
    )


def trained(folder: Path) -> list[World]:
    """Every run of the experiment. The folder is given up afterwards."""
    train, held_out = questions()
    seen, unseen = write_questions(folder / "train.jsonl", train), write_questions(folder / "held_out.jsonl", held_out)
    with contextlib.closing(MathReward()) as rule:

        def asked(name: str, model: Path) -> Stage:
            with silent():
                return Stage(name, accuracy(model, seen, rule), accuracy(model, unseen, rule))

        untrained = save_untrained(folder / "untrained")
        before = asked(STAGES[0], untrained)
        worlds = []
        for name, (slip, share) in WORLDS.items():
            place = folder / slip.replace(" ", "_")
            place.mkdir()
            say(f"{name}: SFT, GRPO by the rule, GRPO by vote")
            with silent():
                tuned = tune(untrained, write_demonstrations(place / "people.jsonl", train, share, slip), place / "sft")
                by_rule, rule_run = reinforce(tuned, seen, place / "rule", [by_gold(rule)])
                by_votes, vote_run = reinforce(tuned, seen, place / "vote", [by_vote(rule), by_gold(rule, weight=0.0)])
            after = [asked(stage, model) for stage, model in zip(STAGES[1:], (tuned, by_rule, by_votes), strict=True)]
            worlds.append(World(name, [before, *after], _curve(rule_run), _curve(vote_run), _curve(vote_run, "vote")))
        return worlds


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """A run tells of itself line by line; for so many small ones a line for each world is enough."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def _curve(run: Run, reward: str = "gold") -> list[tuple[float, float]]:
    """(step, mean of that reward over the step's attempts)."""
    return [(row["step"], row[f"rewards/{reward}/mean"]) for row in run.metrics() if f"rewards/{reward}/mean" in row]


def _stage(world: World, name: str) -> Stage:
    return next(stage for stage in world.stages if stage.name == name)


def _share(world: World, name: str) -> str:
    return percent(_stage(world, name).seen.sampled.value)


def _table(world: World) -> Table:
    slip, share = WORLDS[world.name]
    how = "any other number" if slip == "anything" else "one more than is right"
    rows = []
    for stage in world.stages:
        for name, found in (("training", stage.seen), ("unseen", stage.unseen)):
            s = found.sampled
            rows.append(
                [
                    stage.name if name == "training" else "",
                    name,
                    percent(s.value),
                    f"{percent(s.low)} to {percent(s.high)}",
                    percent(found.greedy),
                    percent(found.vote),
                ]
            )
    return Table(
        ["", "questions", "sampled", "95 % interval", "likeliest", "vote of 16"],
        rows,
        f"People, {world.name}",
        f"Of the demonstrations {number(100 * share)} % give {how}. Share of right answers; the interval is over questions.",
        numeric=frozenset({2, 3, 4, 5}),
    )


def _curves(world: World) -> Chart:
    return line_chart(
        [
            Series("by the rule", world.rule, 1),
            Series("by vote", world.vote, 2),
            Series("by vote: agreement", world.agreement, 2, dashed=True),
        ],
        title=f"People: {world.name}",
        x_label="GRPO step",
        y_label="share of answers",
        limits=(0.0, 1.0),
        smooth=False,
    )


def _bars(world: World) -> Chart:
    return bar_chart(
        [Bars(stage.name, (stage.seen.sampled.value, stage.unseen.sampled.value)) for stage in world.stages],
        ["trained on", "never seen"],
        title=f"People: {world.name}",
        x_label="share of right answers",
        text=percent,
    )


EXPERIMENT = Experiment("math", "Sums from nothing", NAMES["math"], run)
