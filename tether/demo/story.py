"""`tether demo`: comparisons in, a better model and the evidence out, on this machine.

Four parts: a reward model learns from choices of simulated people; DPO learns from such choices without it; the models before and after
answer prompts that training never saw; and because the people are simulated, the page can say what they truly like.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tether import atomic, progress
from tether.demo.world import FREE_TOKENS, TOKEN_COST, DemoData, read_rows, sentiment
from tether.errors import UserError

FOLDER = "runs/demo"
SHOWN = 3  # answers before and after, on the screen and on the page


@dataclass(frozen=True)
class Size:
    """How much of everything: the demo proper, or the same road in seconds for a test machine."""

    pairs: int
    test_pairs: int
    reward_pairs: int
    prompts: int
    max_new_tokens: int
    batch: int
    reward_rate: float
    dpo_rate: float


# 400 pairs in batches of 8 are 50 steps of DPO, enough to see everything the page talks about. The reward model gets the first half of
# them, so that the whole stays within minutes.
FULL = Size(pairs=400, test_pairs=100, reward_pairs=200, prompts=128, max_new_tokens=64, batch=8, reward_rate=5e-5, dpo_rate=2e-5)
TINY = Size(pairs=48, test_pairs=24, reward_pairs=32, prompts=16, max_new_tokens=16, batch=8, reward_rate=1e-3, dpo_rate=1e-3)


def demo(
    tiny: Annotated[bool, typer.Option("--tiny", help="The same road in seconds, with a random model: a test of the machine.")] = False,
    run: Annotated[str | None, typer.Option("--run", help=f"The folder for everything; by default {FOLDER}.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Decides row order, the reward model's head and the sampled answers.")] = 0,
) -> None:
    """Comparisons in, a better model and the evidence out, on this machine: some minutes on two cores."""
    from tether.loop import Interrupted

    try:
        folder = tell(free_folder(run), tiny=tiny, seed=seed)
    except Interrupted:
        print("stopped; begin again with: tether demo", file=sys.stderr)
        raise typer.Exit(130) from None
    print(folder / "report.html")


def free_folder(asked: str | None) -> Path:
    """The folder asked for, which must be new; or runs/demo, or the first of runs/demo-2, runs/demo-3, ... that is free."""
    if asked is not None:
        folder = Path(asked)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError("is not an empty folder", where=str(folder), remedy="Pass a new one with --run, or leave --run out.")
        return folder
    folder, n = Path(FOLDER), 2
    while folder.exists() and any(folder.iterdir()):
        folder, n = Path(f"{FOLDER}-{n}"), n + 1
    return folder


def tell(folder: Path, *, tiny: bool = False, seed: int = 0) -> Path:
    """Run the whole demo into `folder` and return it. Leaves two runs, samples.jsonl, comparison.json and report.html."""
    from tether.allocator import keep_freed_memory
    from tether.demo.sampled import answer_prompts, lessons, measure, sample_rows, score_with_reward_model
    from tether.report import write_report

    keep_freed_memory()
    size = TINY if tiny else FULL
    took: dict[str, float] = {}
    sentiment("ready")  # a missing package is told now, not after minutes
    data = copied(DemoData.shipped(), folder / "data", size)
    prompts = [row["prompt"] for row in read_rows(data.prompts_test)]
    if not tiny:
        progress.say("The demo takes about five minutes on two cores, less on more. Four parts: reward model, DPO, answers, report.")
    with timed(took, "fetching the model"):
        model = the_model(folder, data, tiny)

    # 1. A reward model from the choices.
    progress.say(f"\n1/4 A reward model learns from {size.reward_pairs} choices")
    with timed(took, "reward model"):
        trained("reward", folder / "reward", reward_settings(model, data, size, seed))

    # 2. DPO from the choices themselves, without the reward model.
    progress.say(f"\n2/4 DPO learns from {size.pairs} choices, without a reward model")
    with timed(took, "DPO"):
        trained("dpo", folder / "dpo", dpo_settings(model, data, size, seed))

    # 3. The same prompts before and after.
    progress.say(f"\n3/4 {len(prompts)} prompts that training never saw, answered before and after")
    with timed(took, "answers and scores"):
        asked = {"max_new_tokens": size.max_new_tokens, "seed": seed}
        before = answer_prompts(model, prompts, title="answers before", **asked)
        after = answer_prompts(folder / "dpo" / "model", prompts, title="answers after", **asked)
        judge = folder / "reward" / "model"
        scores = score_with_reward_model(judge, prompts, before), score_with_reward_model(judge, prompts, after)

    # 4. What came of it.
    measures = measure(before, after, scores)
    rows = sample_rows(prompts, before, after, scores)
    cut = tuple(sum(not a.ended for a in side) / len(side) for side in (before, after))
    atomic.write_file(folder / "samples.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    comparison: dict[str, Any] = {
        "title": "A small model learns from 400 choices" if not tiny else "The demo with a tiny random model",
        "lead": LEAD if not tiny else "A test of the machine: the model is random and so are its answers; only the road is real.",
        "facts": [["Model", "SmolLM2-135M-Instruct" if not tiny else "two random layers"], ["Held-out prompts", str(len(prompts))]],
        "text": [SCALES],
        "seconds": {name: round(seconds, 1) for name, seconds in took.items()},
        "measures": [m.row() for m in measures.values()],
        "cut_at_limit": {"before": cut[0], "after": cut[1], "limit": size.max_new_tokens},
        "findings": lessons(measures, (cut[0], cut[1]), len(prompts)),
        "samples_shown": SHOWN,
        "runs": ["dpo", "reward"],
    }
    atomic.write_file(folder / "comparison.json", json.dumps(comparison, indent=2, ensure_ascii=False) + "\n")
    progress.say("\n4/4 What came of it\n")
    write_report(folder)
    show(comparison, rows[:SHOWN])
    return folder


LEAD = (
    "Simulated people chose 400 times between two answers of the model. They like cheerful answers; they also lean to the longer one, "
    "although answers beyond 40 tokens annoy them afterwards. The model learnt from the choices alone. Here is what it learnt."
)

SCALES = (
    "Each prompt was answered once before and once after, at temperature 1. Sentiment is VADER's compound score; the true score takes off "
    f"{TOKEN_COST} for every token beyond {FREE_TOKENS}. Bars are 95 % intervals of the mean; the interval of a change is over prompts, paired."
)


def copied(shipped: DemoData, folder: Path, size: Size) -> DemoData:
    """The rows that are used, in the run's own folder: the package's folder may not be written to."""

    def part(source: Path, n: int) -> Path:
        rows = read_rows(source, n)
        atomic.write_file(folder / source.name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return folder / source.name

    return DemoData(
        part(shipped.pairs_train, size.pairs), part(shipped.pairs_test, size.test_pairs), part(shipped.prompts_test, size.prompts)
    )


def first_rows(pairs: Path, n: int) -> Path:
    """The first n rows as a file of their own, or the file itself when that is all of them."""
    rows = read_rows(pairs)
    if n >= len(rows):
        return pairs
    path = pairs.with_name("pairs_reward.jsonl")
    atomic.write_file(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[:n]))
    return path


def the_model(folder: Path, data: DemoData, tiny: bool) -> Path:
    if tiny:
        from tether.demo.tiny import make_tiny_model

        return make_tiny_model(data.pairs_train, folder / "model")
    from tether.models import fetch_smollm2

    return fetch_smollm2()


def reward_settings(model: Path, data: DemoData, size: Size, seed: int) -> dict[str, Any]:
    return {
        "model": str(model),
        "data": str(first_rows(data.pairs_train, size.reward_pairs)),
        "eval_data": str(data.pairs_test),
        "batch_size": size.batch,
        "learning_rate": size.reward_rate,
        "warmup_steps": 3,  # the head is fresh
        "save_steps": 1000,
        "trackers": [],
        "seed": seed,
    }


def dpo_settings(model: Path, data: DemoData, size: Size, seed: int) -> dict[str, Any]:
    return {
        "model": str(model),
        "data": str(data.pairs_train),
        "batch_size": size.batch,
        "learning_rate": size.dpo_rate,
        "displacement_warn_steps": 10,
        "save_steps": 1000,
        "trackers": [],
        "seed": seed,
    }


def trained(command: str, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """One run of `tether reward` or `tether dpo`, as the command line would do it."""
    from tether.algorithms import dpo, reward_model
    from tether.recipe import DPORecipe, RewardRecipe
    from tether.run import Run

    if command == "reward":
        reward = RewardRecipe(**settings)
        with Run.create(folder, reward, command) as run:
            summary = reward_model.train(reward, run)
    else:
        preference = DPORecipe(**settings)
        with Run.create(folder, preference, command) as run:
            summary = dpo.train(preference, run)
    # Nobody continues a finished run of the demo, and a checkpoint is three times the size of the model.
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return summary


@contextmanager
def timed(took: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    took[name] = time.monotonic() - began


def show(comparison: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """The result as a table and a few answers, on standard output."""
    from rich.console import Console
    from rich.table import Table

    from tether.report.numbers import measured

    console = Console(highlight=False)
    table = Table("", "before", "after", "change", "95 % interval")
    for m in comparison["measures"]:
        change, low, high = (measured(x, sign=True) for x in m["gain"])
        table.add_row(m["name"], measured(m["before"][0]), measured(m["after"][0]), change, f"{low} to {high}")
    console.print(table)
    for finding in comparison["findings"]:
        console.print(f"- {finding['text']}", markup=False)
    for row in rows:
        console.print(f"\n{row['prompt']}", style="bold", markup=False)
        for side in ("before", "after"):
            numbers = row[side]["numbers"]
            console.print(
                f"  {side}: {row[side]['text']}  [sentiment {numbers['sentiment']:.2f}, {numbers['tokens']} tokens]", markup=False
            )
    print()
