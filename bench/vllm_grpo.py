"""Does GRPO learn as well when vLLM samples? SmolLM2-135M on small sums and products, sampled here and by a server that the run starts.

    python bench/vllm_grpo.py                          all four ways, the recipe's 60 steps
    python bench/vllm_grpo.py --steps 30 local/lora vllm/lora
    python bench/vllm_grpo.py vllm/full/ahead1         sampling one step ahead of training

From a bare machine: the environment with vLLM (`.venv-vllm`) is made where it is missing, the model comes out of a package. A way is
engine/weights: `full` trains every weight and reloads the server's, `lora` trains an adapter (rank 16) and loads it under a new name.
Prints a table: held-out answers right before and after with 95 % intervals, whether the intervals of the two engines overlap, the
difference between the log-probs of sampling and of training, completion tokens per second of sampling, seconds to hand weights over.
Runs are left in runs/vllm_grpo.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from sides import ROOT, vllm_python

from tether.stats import wilson

RUNS = ROOT / "runs" / "vllm_grpo"
WAYS = ["local/full", "vllm/full", "local/lora", "vllm/lora"]
LORA = ["lora.rank=16", "learning_rate=1e-4"]  # an adapter starts at nothing and takes larger steps
# All cores (vLLM leaves one idle otherwise; training waits while it samples), and blocks short enough for these prompts to be reused.
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}", "HF_HUB_OFFLINE": "1"}
OPTIONS = "[--block-size, 32]"


def command(way: str, folder: Path, python: Path | None, steps: int | None, seed: int) -> list[str]:
    engine, trained, *more = way.split("/")
    out = [sys.executable, "-m", "tether", "grpo", "recipes/grpo_arithmetic.yaml", f"run={folder}", f"seed={seed}"]
    out += [f"max_steps={steps}"] if steps is not None else []
    out += LORA if trained == "lora" else []
    if engine == "vllm":
        out += [f"engine.python={python}", f"engine.options={OPTIONS}"]
        out += [f"ahead_steps={name.removeprefix('ahead')}" for name in more]
    return out


def measured(way: str, python: Path | None, steps: int | None, seed: int) -> dict[str, Any]:
    folder = RUNS / f"{way.replace('/', '_')}_{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    RUNS.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    words = command(way, folder, python, steps, seed)
    with log.open("w") as out:
        done = subprocess.run(words, cwd=ROOT, stdout=out, stderr=out, env={**ENVIRONMENT, **os.environ})
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}; see {log}")
    return read(way, folder)


def read(way: str, folder: Path) -> dict[str, Any]:
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in metrics if "step_time" in row]
    start = next(row for row in metrics if "eval_reward" in row)
    end = json.loads((folder / "summary.json").read_text())["held_out"]
    tokens: dict[int, int] = {}
    for line in (folder / "rollouts.jsonl").read_text().splitlines():
        row = json.loads(line)
        tokens[row["step"]] = tokens.get(row["step"], 0) + len(row["tokens"])
    warm = steps[1:] or steps  # the first step compiles
    seconds = sum(row["time/sampling"] - row.get("time/hand_over", 0.0) for row in warm)
    gaps = [row["sampling/sampling_logp_difference/mean"] for row in steps if "sampling/sampling_logp_difference/mean" in row]
    hand_over = [row["time/hand_over"] for row in warm if "time/hand_over" in row]
    return {
        "way": way,
        "steps": len(steps),
        "n": end["n"],
        "before": [start["eval_reward"], start["eval_greedy_reward"]],
        "after": [end["eval_reward"], end["eval_greedy_reward"]],
        "logp_difference": statistics.mean(gaps) if gaps else None,
        "tokens_per_second": sum(tokens[row["step"]] for row in warm) / seconds,
        "hand_over_s": statistics.median(hand_over) if hand_over else None,
        "step_s": statistics.median(row["step_time"] for row in warm),
        "staleness": steps[-1].get("staleness/mean"),
    }


def share(value: float, n: int) -> str:
    low, high = wilson(value * n, n)
    return f"{100 * value:.0f} % ({100 * low:.0f} to {100 * high:.0f})"


def line(row: dict[str, Any]) -> str:
    cells = [row["way"], str(row["steps"])]
    cells += [share(value, row["n"]) for pair in zip(row["before"], row["after"], strict=True) for value in pair]
    cells += ["" if row["logp_difference"] is None else f"{row['logp_difference']:.1e}", f"{row['tokens_per_second']:.0f}"]
    cells += ["" if row["hand_over_s"] is None else f"{row['hand_over_s']:.2f}", f"{row['step_s']:.1f}"]
    return f"| {' | '.join(cells)} |"


def overlap(one: dict[str, Any], two: dict[str, Any]) -> str:
    """Of the held-out answers at the end, sampled and greedy."""
    found = []
    for name, a, b in zip(("sampled", "greedy"), one["after"], two["after"], strict=True):
        (low_a, high_a), (low_b, high_b) = wilson(a * one["n"], one["n"]), wilson(b * two["n"], two["n"])
        found.append(f"{name} {'overlap' if max(low_a, low_b) <= min(high_a, high_b) else 'DO NOT OVERLAP'}")
    return f"{one['way']} and {two['way']}, 95 % intervals after training: {', '.join(found)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", default=WAYS)
    parser.add_argument("--steps", type=int, help="by default the recipe's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", type=Path, help="a Python that has vLLM; left out: .venv-vllm, made where it is missing")
    a = parser.parse_args()
    python = (a.python or vllm_python()) if any(way.startswith("vllm") for way in a.ways) else None
    titles = ["way", "steps", "sampled before", "sampled after", "greedy before", "greedy after"]
    titles += ["log-prob difference", "tokens/s", "hand-over, s", "step, s"]
    print(f"| {' | '.join(titles)} |\n|{' --- |' * len(titles)}")
    rows: dict[str, dict[str, Any]] = {}
    for way in a.ways:
        rows[way] = measured(way, python, a.steps, a.seed)
        print(line(rows[way]), flush=True)
        with (RUNS / "results.jsonl").open("a") as out:
            out.write(json.dumps({**rows[way], "seed": a.seed}) + "\n")
    for way, row in rows.items():
        here = f"local/{way.split('/')[1]}"
        if way.startswith("vllm") and here in rows:
            print(overlap(rows[here], row))


if __name__ == "__main__":
    main()
