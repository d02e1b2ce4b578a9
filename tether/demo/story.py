"""`tether demo`: comparisons in, a better model and the evidence out, on this machine.

A reward model learns from choices of simulated people; DPO learns from such choices without it; GRPO and PPO learn from the reward model,
once with a tether to the start and once without. Every model answers prompts that training never saw, and because the people are
simulated, the page can say what they truly like.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tether import atomic, progress
from tether.demo import online
from tether.demo.online import Trial
from tether.demo.sizes import FULL, QUICK, TINY, Clock, Size
from tether.demo.world import DemoData, read_rows, sentiment
from tether.errors import UserError

FOLDER = "runs/demo"
SHOWN = 3  # answers of each model, on the screen and on the page


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Without PPO and with fewer steps of GRPO: about half the time.")] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="The same road in seconds, with a random model: a test of the machine.")] = False,
    run: Annotated[str | None, typer.Option("--run", help=f"The folder for everything; by default {FOLDER}.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Decides row order, the reward model's head and the sampled answers.")] = 0,
) -> None:
    """Comparisons in, a better model and the evidence out, and what a tether is for: on this machine, some minutes on two cores."""
    from tether.loop import Interrupted

    if quick and tiny:
        raise UserError("--quick and --tiny exclude each other", remedy="Choose one; --tiny is the shorter.")
    try:
        folder = tell(free_folder(run), size=TINY if tiny else QUICK if quick else FULL, seed=seed)
    except Interrupted:
        print("stopped; begin again with: tether demo", file=sys.stderr)
        raise typer.Exit(130) from None
    print(folder / "report.html")
    if quick:
        print(f"The whole story has PPO beside GRPO and twice the steps (about {FULL.minutes} minutes): tether demo")


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


def tell(folder: Path, *, size: Size = FULL, seed: int = 0) -> Path:
    """Run the whole demo into `folder` and return it. Leaves its runs, samples.jsonl, comparison.json and report.html."""
    from tether.allocator import keep_freed_memory
    from tether.demo.outcome import outcome
    from tether.demo.sampled import Side, answer_prompts, distances, sample_rows, score_with_reward_model
    from tether.report import write_report

    keep_freed_memory()
    sentiment("ready")  # a missing package is told now, not after minutes
    data = copied(DemoData.shipped(), folder / "data", size)
    prompts = [row["prompt"] for row in read_rows(data.prompts_test)]
    trials = online.trials(size.methods)
    clock, parts = Clock(size.seconds), 3 + len(trials)
    progress.say(f"The demo takes about {size.minutes} minutes on two cores, less on more; everything goes to {folder}.")
    with clock.part("fetching the model"):
        model = the_model(folder, data, size is TINY)

    # 1. A reward model from the choices.
    clock.announce(1, parts, f"A reward model learns from {size.reward_pairs} choices")
    with clock.part("reward model"):
        trained("reward", folder / "reward", reward_settings(model, data, size, seed))
    judge = folder / "reward" / "model"

    # 2. DPO from the choices themselves, without the reward model.
    clock.announce(2, parts, f"DPO learns from {size.pairs} choices, without a reward model")
    with clock.part("DPO"):
        trained("dpo", folder / "dpo", dpo_settings(model, data, size, seed))

    # 3. The reward model as the judge, with and without a tether to the start.
    for number, trial in enumerate(trials, 3):
        clock.announce(number, parts, f"{trial.name}: learns from what the reward model says of its own answers")
        with clock.part(trial.name):
            values = online.settings(trial, model, prompts_only(data.pairs_train), judge, size, seed)
            trained(trial.method, folder / trial.folder, values)

    # 4. The same prompts before and after.
    clock.announce(parts, parts, f"{len(prompts)} prompts that training never saw, answered by every model")
    with clock.part("answers and scores"):
        models = {"the start": model, "DPO": folder / "dpo" / "model", **{t.name: folder / t.folder / "model" for t in trials}}
        written = answer_prompts(models, prompts, samples=size.samples, max_new_tokens=size.limit, seed=seed)
        answers = {{"the start": "before", "DPO": "after"}.get(name, name): side for name, side in written.items()}
        scores = score_with_reward_model(judge, prompts, list(answers.values()))
        # The start is no distance from itself.
        gaps = [[0.0] * len(answers["before"]), *distances(model, prompts, [side for name, side in answers.items() if name != "before"])]
        sides = {name: Side(answers[name], size.samples, s, g) for name, s, g in zip(answers, scores, gaps, strict=True)}

    # 5. What came of it.
    rows = sample_rows(prompts, sides)
    atomic.write_file(folder / "samples.jsonl", "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    comparison = outcome(folder, sides, trials, clock.took, size)
    atomic.write_file(folder / "comparison.json", json.dumps(comparison, indent=2, ensure_ascii=False) + "\n")
    write_report(folder)
    show(comparison, rows[:SHOWN], trials)
    return folder


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


def prompts_only(pairs: Path) -> Path:
    """The prompts of the training pairs, to be answered anew."""
    path = pairs.with_name("prompts_train.jsonl")
    atomic.write_file(path, "".join(json.dumps({"prompt": row["prompt"]}, ensure_ascii=False) + "\n" for row in read_rows(pairs)))
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
        "keep_checkpoints": 0,  # nobody continues a run of the demo, and a checkpoint is three times the size of the model
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
        "keep_checkpoints": 0,  # nobody continues a run of the demo, and a checkpoint is three times the size of the model
        "trackers": [],
        "seed": seed,
    }


def trained(command: str, folder: Path, settings: dict[str, Any]) -> None:
    """One run of a command that trains, as the command line would do it."""
    from tether.recipe import RECIPES
    from tether.run import Run

    recipe = RECIPES[command](**settings)
    algorithm = importlib.import_module(f"tether.algorithms.{'reward_model' if command == 'reward' else command}")
    with Run.create(folder, recipe, command) as run:
        algorithm.train(recipe, run)


def show(comparison: dict[str, Any], rows: list[dict[str, Any]], trials: Sequence[Trial]) -> None:
    """The result as two tables, sentences and a few answers, on standard output."""
    from rich.console import Console
    from rich.table import Table

    from tether.report.numbers import measured

    console = Console(highlight=False)
    table = Table("DPO", "before", "after", "change", "95 % interval")
    for m in comparison["measures"]:
        change, low, high = (measured(x, sign=True) for x in m["gain"])
        table.add_row(m["name"], measured(m["before"][0]), measured(m["after"][0]), change, f"{low} to {high}")
    print()
    console.print(table)
    practice = comparison["practice"]
    online_table = Table(*practice["changes"]["header"])
    for row in practice["changes"]["rows"]:
        online_table.add_row(*row)
    console.print(online_table)
    for finding in [*comparison["findings"], *practice["findings"]]:
        console.print(f"- {finding['text']}", markup=False)
    for row in rows:
        console.print(f"\n{row['prompt']}", style="bold", markup=False)
        for side in ("before", "after", *(t.name for t in trials)):
            numbers, name = row[side]["numbers"], "after DPO" if side == "after" else side
            told = f"  {name}: {row[side]['text']}  [sentiment {numbers['sentiment']:.2f}, {numbers['tokens']} tokens]"
            console.print(told, markup=False)
    print()
