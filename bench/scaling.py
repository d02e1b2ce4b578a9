"""Several ranks on this machine: seconds a step, tokens a second, waiting, memory and traffic on 1, 2 and 4 gloo ranks of SmolLM2-135M.

    python bench/scaling.py                              every row
    python bench/scaling.py --only dpo --ranks 1 2 --no-strong

Weak scaling: each rank has as many rows whatever the number of ranks. The ranks share this machine's cores (each has cores / ranks
threads, at least one), so that with all else free a step takes N times as long and tokens a second stay as they were; what is lost is what
several ranks cost. The strong rows give 1, 2 and 4 ranks the same rows together. Every run is `tether sft|dpo|grpo RECIPE --ranks N` with
the watch of `ranks_watch/` beside it; the first steps are left out, figures are medians over steps. Beside what was received and held
stands what `tether plan --ranks N` says. Written after every row to --out, and printed as a table for docs/scale.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sides import ROOT

METHODS = ("sft", "dpo", "grpo")


@dataclass(frozen=True)
class Row:
    method: str
    kind: str  # weak or strong
    ranks: int
    rows: int  # of a step, on all ranks together


@dataclass(frozen=True)
class Setting:
    model: str
    data: Path
    work: Path
    steps: int
    warmup: int
    precision: str
    group: int
    completion: int
    probe: bool

    def words(self, row: Row) -> list[str]:
        """The recipe of a row as the command line takes it, and as `tether plan` does."""
        words = [f"model={self.model}", f"data={self.data / (row.method + '.jsonl')}", f"precision={self.precision}", "max_length=512"]
        words += [f"max_steps={self.steps + self.warmup}", "keep_checkpoints=0", "tokens_per_micro_batch=8192", "learning_rate=1e-6"]
        if row.method == "grpo":
            words += [f"rewards={ROOT / 'bench/rule.py'}:different_words", f"num_generations={self.group}", "beta=0.04"]
            words += [f"max_completion_length={self.completion}", f"batch_size={row.rows * self.group}"]
        else:
            words.append(f"batch_size={row.rows}")
        return words


def rows_of(methods: list[str], ranks: list[int], rows: int, *, strong: bool) -> list[Row]:
    """Weak rows, then for each method those of the same total that the weak ones do not hold already."""
    out = [Row(method, "weak", n, rows * n) for method in methods for n in ranks]
    if strong:
        total = rows * max(n for n in ranks if n <= 2)
        out += [Row(method, "strong", n, total) for method in methods for n in ranks]
    return out


def measure(row: Row, setting: Setting) -> dict[str, Any]:
    name = f"{row.method}_{row.kind}_{row.ranks}"
    watched, run = setting.work / f"{name}_watched", setting.work / name
    for folder in (watched, run):
        shutil.rmtree(folder, ignore_errors=True)
    watched.mkdir(parents=True)
    words = setting.words(row)
    threads = max(1, (os.cpu_count() or 1) // row.ranks)
    environment = {**os.environ, "RANKS_WATCH": str(watched), "OMP_NUM_THREADS": str(threads)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "bench/ranks_watch"), os.environ.get("PYTHONPATH")]))
    several = ["--ranks", str(row.ranks)] if row.ranks > 1 else []
    command = [sys.executable, "-m", "tether", row.method, *words, "--run", str(run), *several]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    counted = [json.loads((watched / f"rank_{n}.json").read_text()) for n in range(row.ranks)]
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {**asdict(row), "threads": threads, **figures(counted, logged, setting.warmup), "planned": planned(row, setting)}
    shutil.rmtree(run)
    return found


def figures(counted: list[list[dict[str, Any]]], logged: list[dict[str, Any]], warmup: int) -> dict[str, Any]:
    """Of the steps after the first `warmup`. `counted`: for each rank its totals at the end of each step, by the watch.

    The rank that waits least is the one the others wait for: its share is what the exchange itself takes.
    """
    spans = list(range(max(1, warmup), len(counted[0])))

    def difference(rank: list[dict[str, Any]], i: int, name: str) -> float:
        return float(rank[i][name] - rank[i - 1][name])

    def received(rank: list[dict[str, Any]], i: int, kind: str) -> int:
        return int(rank[i]["received"].get(kind, 0) - rank[i - 1]["received"].get(kind, 0))

    def middle(values: list[float]) -> float:
        return statistics.median(values)

    seconds = [difference(counted[0], i, "time") for i in spans]
    waiting = [[difference(rank, i, "waited") / difference(rank, i, "time") for i in spans] for rank in counted]
    kinds = sorted({kind for rank in counted for kind in rank[-1]["received"]})
    tokens = [b["num_tokens"] - a["num_tokens"] for a, b in itertools.pairwise(logged)]
    return {
        "seconds": middle(seconds),
        "tokens": middle([float(t) for t in tokens[spans[0] - 1 :]]),
        "tokens_per_second": sum(tokens[spans[0] - 1 :]) / sum(seconds),
        "waiting": statistics.mean(middle(shares) for shares in waiting),
        "waiting_least": min(middle(shares) for shares in waiting),
        "received": {kind: middle([float(max(received(rank, i, kind) for rank in counted)) for i in spans]) for kind in kinds},
        "loopback": middle([difference(counted[0], i, "loopback") for i in spans]) / len(counted),
        "peak": max(rank[-1]["peak"] for rank in counted),
    }


def planned(row: Row, setting: Setting) -> dict[str, Any]:
    """What `tether plan` says of the same recipe."""
    command = [sys.executable, "-m", "tether", "plan", row.method, *setting.words(row), "--ranks", str(row.ranks), "--json"]
    command += [] if setting.probe else ["--no-probe"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    made = json.loads(done.stdout[done.stdout.index("{") :])
    kinds = {"gathered": 0.0, "summed": 0.0, "sampling": 0.0}
    for flow in made["traffic"]:
        kinds["summed" if flow["summed"] else "sampling" if flow["name"] == "sampling" else "gathered"] += flow["bytes"]
    keep = ("bytes", "compute_seconds", "exchange_seconds", "seconds_per_step")
    return {"received": kinds, **{name: made[name] for name in keep}, "link": made["cluster"]["link"]}


def table(results: list[dict[str, Any]]) -> list[str]:
    """Markdown. Efficiency is tokens a second against one rank's of the same method and kind: all ranks share the same cores."""
    lines = [
        "| method | ranks x threads | rows | s a step (planned) | tokens/s | of one rank's | waiting, mean (least) | received, MiB a rank and step (planned) "
        "| over loopback | peak, MiB a rank (planned) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        one = next((o for o in results if (o["method"], o["kind"], o["ranks"]) == (r["method"], r["kind"], 1)), None)
        share = f"{r['tokens_per_second'] / one['tokens_per_second']:.2f}" if one else ""
        plan = r["planned"]
        seconds = "" if plan["seconds_per_step"] is None else f" ({plan['seconds_per_step']:.1f})"
        alone = r["ranks"] == 1
        traffic = "0" if alone else f"{mib(sum(r['received'].values()))} ({mib(sum(plan['received'].values()))})"
        lines.append(
            f"| {r['method']}, {r['kind']} | {r['ranks']} x {r['threads']} | {r['rows']} | {r['seconds']:.2f}{seconds} | {r['tokens_per_second']:.0f} "
            f"| {share} | {r['waiting']:.0%} ({r['waiting_least']:.0%}) | {traffic} | {'0' if alone else mib(r['loopback'])} "
            f"| {mib(r['peak'])} ({mib(plan['bytes'])}) |"
        )
    return lines


def mib(size: float) -> str:
    """
    >>> mib(3 * 2**20)
    '3'
    """
    return f"{size / 2**20:.0f}"


def prepare(setting: Setting) -> None:
    """Rows of bench/data.py, in the shapes of each method."""
    if all((setting.data / f"{method}.jsonl").exists() for method in METHODS):
        return
    subprocess.run([sys.executable, str(ROOT / "bench/data.py"), setting.model, str(setting.data)], check=True)
    pairs = [json.loads(line) for line in (setting.data / "mixed.jsonl").read_text().splitlines()]
    shapes = {
        "sft": [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs],
        "dpo": pairs,
        "grpo": [json.loads(line) for line in (setting.data / "prompts.jsonl").read_text().splitlines()],
    }
    for method, rows in shapes.items():
        (setting.data / f"{method}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", nargs="*", default=list(METHODS), choices=METHODS)
    p.add_argument("--ranks", nargs="*", type=int, default=[1, 2, 4])
    p.add_argument("--rows", type=int, default=4, help="of a step, for each rank; of grpo prompts")
    p.add_argument("--group", type=int, default=4, help="of grpo: answers to a prompt")
    p.add_argument("--completion", type=int, default=48, help="of grpo: tokens at most")
    p.add_argument("--steps", type=int, default=4, help="measured steps of a run")
    p.add_argument("--warmup", type=int, default=1, help="steps before them")
    p.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    p.add_argument("--strong", action=argparse.BooleanOptionalAction, default=True, help="also with the same rows together")
    p.add_argument("--probe", action=argparse.BooleanOptionalAction, default=True, help="let the plan measure, for its seconds")
    p.add_argument("--model", default="smollm2")
    p.add_argument("--out", default="runs/scaling.json")
    a = p.parse_args()
    model = a.model
    if model == "smollm2":
        from tether.models import fetch_smollm2

        model = str(fetch_smollm2())
    work = ROOT / "runs/scaling"
    setting = Setting(model, work / "data", work, a.steps, a.warmup, a.precision, a.group, a.completion, a.probe)
    prepare(setting)
    results: list[dict[str, Any]] = []
    for row in rows_of(a.only, a.ranks, a.rows, strong=a.strong):
        same = next((r for r in results if (r["method"], r["ranks"], r["rows"]) == (row.method, row.ranks, row.rows)), None)
        results.append({**same, "kind": row.kind} if same else measure(row, setting))
        print("\n".join(table(results)[-1:]), flush=True)
        Path(a.out).parent.mkdir(parents=True, exist_ok=True)
        Path(a.out).write_text(json.dumps({"setting": {**vars(a), "cores": os.cpu_count()}, "rows": results}, indent=1))
    print("\n".join(table(results)))
    print(f"written: {a.out}")


if __name__ == "__main__":
    main()
