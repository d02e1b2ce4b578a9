"""Speed and memory against TRL, transformers and vLLM on the same machine, model and rows: A B A B, medians, ratios.

    make bench                                   every row
    python bench/run.py --only dpo_mixed --repeats 1
    python bench/run.py --only grpo generate vllm ppo

Sets up `.venv-trl` and `.venv-vllm` when a row needs them and they are not there. Each measurement is a process of its own that trains
a few steps on the same rows with full fine-tuning, or samples; "tuned" rows give both sides the same allocator settings (glibc gives
big blocks back to the system after every use otherwise, which costs TRL much of its time). The first loss of both sides on the same
rows, or what else shows it, stands beside each ratio: a fast step that computes something else is worth nothing. The rows that
sample are in online.py. What has been measured is written after every row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import online
from sides import ROOT, measure, trl_python


@dataclass(frozen=True)
class Row:
    name: str
    method: str
    data: str
    want: float  # TRL's time over Tether's
    tuned: bool
    trl: list[str] = field(default_factory=list)
    tether: list[str] = field(default_factory=list)


ROWS = [
    Row("dpo_mixed", "dpo", "mixed.jsonl", 2.5, True),
    Row("dpo_cached", "dpo", "mixed.jsonl", 2.0, True, ["--precompute"]),
    Row("dpo_long", "dpo", "long.jsonl", 3.0, True),
    Row("reward", "reward", "mixed.jsonl", 1.2, False),
    Row("sft", "sft", "mixed.jsonl", 1.7, False),
    Row("sft_packed", "sft", "mixed.jsonl", 1.2, False, ["--packing"]),
]


def per_token(results: list[dict]) -> float:
    """Median seconds per real token of the rows: the two sides shuffle differently, so steps differ in length."""
    return statistics.median(s / t for r in results for s, t in zip(r["seconds"], r["tokens"], strict=False))


def compare(row: Row, model: str, folder: Path, *, repeats: int, steps: int, trl: Path) -> dict:
    base = [row.method, "--model", model, "--data", str(folder / row.data), "--steps", str(steps)]
    theirs, ours = [], []
    for _ in range(repeats):
        theirs.append(measure(trl, "trl_side.py", [*base, *row.trl], tuned=row.tuned))
        ours.append(measure(sys.executable, "tether_side.py", [*base, *row.tether], tuned=row.tuned))
    seconds = [statistics.median(s for r in side for s in r["seconds"]) for side in (theirs, ours)]
    out = {
        "row": row.name, "trl_s": seconds[0], "tether_s": seconds[1], "ratio": seconds[0] / seconds[1], "want": row.want,
        "trl_mib": max(r["rss_mib"] for r in theirs), "tether_mib": max(r["rss_mib"] for r in ours),
    }  # fmt: skip
    out["memory_ratio"] = out["tether_mib"] / out["trl_mib"]
    return out


def equal_losses(model: str, folder: Path, trl: Path) -> list[dict]:
    """The first two losses of both sides on the same four rows."""
    out = []
    for method, extra in (("dpo", []), ("sft", []), ("reward", ["--zero-head"])):
        for dtype in ("fp32", "bf16"):
            arguments = [
                method,
                "--model",
                model,
                "--data",
                str(folder / "mixed.jsonl"),
                "--rows",
                "4",
                "--batch",
                "4",
                "--steps",
                "2",
                "--warmup",
                "0",
            ]
            arguments += ["--dtype", dtype, *extra]
            theirs, ours = (
                measure(trl, "trl_side.py", arguments, tuned=True),
                measure(sys.executable, "tether_side.py", arguments, tuned=True),
            )
            gaps = [abs(a - b) for a, b in zip(theirs["losses"], ours["losses"], strict=True)]
            out.append(
                {
                    "method": method,
                    "dtype": dtype,
                    "trl": theirs["losses"],
                    "tether": ours["losses"],
                    "first_gap": gaps[0],
                    "second_gap": gaps[1],
                }
            )
            print(json.dumps(out[-1]), flush=True)
    return out


def start_up() -> list[dict]:
    out = []
    for name, code, want in (
        ("import tether", [sys.executable, "-c", "import tether"], 0.3),
        ("tether --help", [str(Path(sys.executable).parent / "tether"), "--help"], 0.5),
    ):
        import time

        times = []
        for _ in range(7):
            began = time.perf_counter()
            subprocess.run(code, check=True, capture_output=True)
            times.append(time.perf_counter() - began)
        out.append({"row": name, "seconds": statistics.median(times[1:]), "want": want})
        print(json.dumps(out[-1]), flush=True)
    return out


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    offline = [r.name for r in ROWS]
    p.add_argument("--only", nargs="*", default=None, choices=[*offline, *online.NAMES, "losses", "startup"], help="names of rows")
    p.add_argument("--repeats", type=int, default=2)
    p.add_argument("--steps", type=int, default=None, help="measured steps a process; left out: 3, and 1 in rows that sample")
    p.add_argument("--model", default=None)
    p.add_argument("--out", default="runs/bench.json")
    for name, default in (("prompts", 8), ("group", 8), ("completion", 128), ("threads", 2)):
        p.add_argument(f"--{name}", type=int, default=default, help="of the rows that sample")
    a = p.parse_args()
    from tether.models import fetch_smollm2

    model = a.model or str(fetch_smollm2())
    folder = ROOT / "runs/bench-data"
    if not (folder / "prompts.jsonl").exists():
        subprocess.run([sys.executable, str(ROOT / "bench/data.py"), model, str(folder)], check=True)
    wanted = set(a.only or [*offline, *online.NAMES, "losses", "startup"])
    results: dict[str, list] = {"rows": []}

    def keep() -> None:
        Path(a.out).parent.mkdir(parents=True, exist_ok=True)
        Path(a.out).write_text(json.dumps(results, indent=1))

    if "startup" in wanted:
        results["startup"] = start_up()
        keep()
    if "losses" in wanted:
        results["losses"] = equal_losses(model, folder, trl_python())
        keep()
    for row in ROWS:
        if row.name in wanted:
            results["rows"].append(compare(row, model, folder, repeats=a.repeats, steps=a.steps or 3, trl=trl_python()))
            r = results["rows"][-1]
            print(
                f"{r['row']:12s} TRL {r['trl_s']:7.2f} s  Tether {r['tether_s']:7.2f} s  {r['ratio']:5.2f}x (first bar {r['want']}x)   "
                f"memory {r['trl_mib']} -> {r['tether_mib']} MiB ({r['memory_ratio']:.2f})",
                flush=True,
            )
            keep()
    setting = online.Setting(model, folder / "prompts.jsonl", a.prompts, a.group, a.completion, a.steps or 1, a.repeats, a.threads)
    for name, measured in online.ROWS.items():
        if name in wanted or (name == "grpo" and "grpo_sampling" in wanted):
            for found in measured(setting):
                results["rows"].append(found)
                print("\n".join(online.lines(found)), flush=True)
            keep()
    print(f"written: {a.out}")


if __name__ == "__main__":
    main()
