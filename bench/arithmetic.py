"""Does every method learn? SmolLM2-135M on small sums and products, one command a run, held-out answers before and after.

    python bench/arithmetic.py                        every method, seed 0; GRPO on three seeds; two-digit sums
    python bench/arithmetic.py grpo/1 rloo ppo        these only (method/seed)
    python bench/arithmetic.py --steps 30 rloo        fewer steps than the recipe's

Prints one line a run and leaves the runs in runs/arithmetic. Minutes are those of the steps; loading and evaluating are not in them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs" / "arithmetic"
TETHER = [sys.executable, "-m", "tether"]
METHODS = ["rloo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce", "reinforce_pp", "ppo"]
ALL = ["grpo/0", "grpo/1", "grpo/2", *METHODS, "two_digit"]


def commands(name: str, folder: Path, seed: int, steps: int | None) -> list[list[str]]:
    """What is run for one line of the table; the last one is the run that is read."""
    said = [f"run={folder}", f"seed={seed}", *([] if steps is None else [f"max_steps={steps}"])]
    if name == "two_digit":
        before = folder.with_name(folder.name + "_sft")
        shutil.rmtree(before, ignore_errors=True)
        return [
            [*TETHER, "sft", "recipes/sft_two_digit.yaml", f"run={before}", f"seed={seed}"],
            [*TETHER, "grpo", "recipes/grpo_two_digit.yaml", f"model={before / 'model'}", *said],
        ]
    if name == "ppo":
        return [[*TETHER, "ppo", "recipes/ppo_arithmetic.yaml", *said]]
    # Without a preset the recipe is GRPO with tokens averaged over the step.
    preset = [] if name == "grpo" else [f"preset={name}", "beta=0.0"]
    return [[*TETHER, "grpo", "recipes/grpo_arithmetic.yaml", *preset, *said]]


def measured(name: str, seed: int, steps: int | None) -> dict[str, Any]:
    folder = RUNS / f"{name}_{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    RUNS.mkdir(parents=True, exist_ok=True)
    for command in commands(name, folder, seed, steps):
        with (RUNS / f"{name}_{seed}.log").open("a") as log:
            done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}; see {RUNS / name}_{seed}.log")
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = sum(row.get("step_time", 0.0) for row in metrics)
    sft = folder.with_name(folder.name + "_sft") / "metrics.jsonl"
    if sft.exists():
        seconds += sum(json.loads(line).get("step_time", 0.0) for line in sft.read_text().splitlines())
    evaluated = [row for row in metrics if "eval_reward" in row]
    start, end = evaluated[0], json.loads((folder / "summary.json").read_text())["held_out"]
    return {
        "method": name,
        "seed": seed,
        "steps": max(row["step"] for row in metrics),
        "minutes": round(seconds / 60, 2),
        "sampled": [start["eval_reward"], end["eval_reward"]],
        "greedy": [start["eval_greedy_reward"], end["eval_greedy_reward"]],
        "n": end["n"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", default=ALL)
    parser.add_argument("--steps", type=int, help="of the last command of each run; by default the recipe's")
    arguments = parser.parse_args()
    print("| method | seed | minutes | sampled before | after | greedy before | after |\n| --- | --- | --- | --- | --- | --- | --- |")
    for run in arguments.runs:
        name, _, seed = run.partition("/")
        row = measured(name, int(seed or 0), arguments.steps)
        shares = [f"{100 * x:.0f} %" for pair in (row["sampled"], row["greedy"]) for x in pair]
        print(f"| {name} | {row['seed']} | {row['minutes']} | {' | '.join(shares)} |", flush=True)
        with (RUNS / "results.jsonl").open("a") as out:
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
