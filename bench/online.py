"""The rows that sample: a GRPO step against TRL's, sampling against transformers and vLLM, a PPO step against our own GRPO step.

Two sides draw different answers, so their times are compared per completion token; the ratio of plain times stands beside it. Where
the seconds went on each side is part of every row, and so is a check that both sides computed the same thing.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sides import TUNED, measure, trl_python, vllm_python

Measurement = dict[str, Any]
# Named on the command line; grpo_sampling is read off the same steps as grpo.
NAMES = ("grpo", "grpo_sampling", "generate", "vllm", "ppo")


@dataclass(frozen=True)
class Setting:
    """What all online rows have in common."""

    model: str
    data: Path
    prompts: int = 8
    group: int = 8
    completion: int = 128  # tokens at most, or exactly where both sides must do the same work
    steps: int = 1
    repeats: int = 2
    threads: int = 2

    def arguments(self, *more: str) -> list[str]:
        sizes = {"prompts": self.prompts, "group": self.group, "completion": self.completion, "steps": self.steps, "threads": self.threads}
        return ["--model", self.model, "--data", str(self.data), *(x for k, v in sizes.items() for x in (f"--{k}", str(v))), *more]


def by_turns(repeats: int, *sides: Callable[[], Measurement]) -> list[list[Measurement]]:
    """A B A B: the results of each side."""
    rounds = [[side() for side in sides] for _ in range(repeats)]
    return [list(results) for results in zip(*rounds, strict=True)]


def summary(results: list[Measurement]) -> dict[str, Any]:
    """Medians over all measured steps of one side; `phases` in seconds."""
    seconds = [s for r in results for s in r["seconds"]]
    tokens = [t for r in results for t in r["tokens"]]
    phases = {name: statistics.median(s for r in results for s in r["phases"][name]) for name in results[0]["phases"]}
    return {
        "s": statistics.median(seconds),
        "tokens": statistics.median(tokens),
        "s_per_token": statistics.median(s / t for s, t in zip(seconds, tokens, strict=True)),
        "phases": {name: round(value, 3) for name, value in phases.items()},
        "mib": max(r["rss_mib"] for r in results),
    }


def sampling_rate(results: list[Measurement]) -> float:
    """Completion tokens per second of the sampling phase, median."""
    return statistics.median(t / s for r in results for t, s in zip(r["tokens"], r["phases"]["sampling"], strict=True))


def row(name: str, want: float, slow: tuple[str, list[Measurement]], fast: tuple[str, list[Measurement]]) -> dict[str, Any]:
    """`ratio`: seconds per completion token of the first side over those of the second; `plain_ratio`: seconds."""
    (slow_name, theirs), (fast_name, ours) = slow, fast
    a, b = summary(theirs), summary(ours)
    out: dict[str, Any] = {"row": name, "sides": [slow_name, fast_name]}
    for side, figures in ((slow_name, a), (fast_name, b)):
        out |= {f"{side}_{key}": value for key, value in figures.items() if key not in ("phases", "s_per_token")}
        out[f"{side}_tokens_per_s"] = round(1 / figures["s_per_token"], 1)
    ratios = {"ratio": a["s_per_token"] / b["s_per_token"], "plain_ratio": a["s"] / b["s"]}
    return {**out, **ratios, "want": want, "memory_ratio": b["mib"] / a["mib"], "phases": {slow_name: a["phases"], fast_name: b["phases"]}}


# -- the rows ----------------------------------------------------------------------------------------------------------


def grpo(s: Setting) -> list[dict[str, Any]]:
    """One step with the reference scored, TRL as it is installed; the sampling inside it is a row of its own."""
    trl = trl_python()
    theirs, ours = by_turns(
        s.repeats,
        lambda: measure(trl, "trl_grpo_side.py", s.arguments()),
        lambda: measure(sys.executable, "tether_online_side.py", ["grpo", *s.arguments()]),
    )
    step = row("grpo", 3.0, ("trl", theirs), ("tether", ours)) | {"memory_want": 0.6, "same": same_gradient(s, trl)}
    rates = [sampling_rate(side) for side in (theirs, ours)]
    sampling = {"row": "grpo_sampling", "sides": ["trl", "tether"], "trl_tokens_per_s": round(rates[0], 1)}
    return [step, {**sampling, "tether_tokens_per_s": round(rates[1], 1), "ratio": rates[1] / rates[0], "want": 2.5}]


def same_gradient(s: Setting, trl: Path) -> dict[str, Any]:
    """Both sides on the answers that TRL has sampled, in float32 and a small first step: log-probs, advantages, gradient."""
    small = Setting(s.model, s.data, prompts=2, group=4, completion=24, threads=s.threads)
    with tempfile.TemporaryDirectory() as folder:
        kept = str(Path(folder) / "rows.jsonl")
        arguments = small.arguments("--dtype", "fp32", "--warmup", "0")
        theirs = measure(trl, "trl_grpo_side.py", [*arguments, "--keep", kept])
        ours = measure(sys.executable, "tether_online_side.py", ["grpo", *arguments, "--replay", kept])
    a, b = theirs["grad_norms"][0], ours["grad_norms"][0]
    return {
        "reward_gap": abs(theirs["rewards"][0] - ours["rewards"][0]),
        "advantage_gap": ours["advantage_gap"],
        "logp_gap": ours["logp_gaps"][0],
        "trl_grad_norm": a,
        "tether_grad_norm": b,
    }


def generate(s: Setting) -> list[dict[str, Any]]:
    """Sampling alone, transformers with all its weights in bfloat16. Every completion has the full length on both sides."""
    theirs, ours = by_turns(s.repeats, *(lambda side=side: _sampling(s, side) for side in ("transformers", "tether")))
    exact = _sampling(s, "greedy")
    same = equal_tokens(exact["tether"], exact["transformers"])
    return [row("generate", 1.6, ("transformers", theirs), ("tether", ours)) | {"same": same}]


def vllm(s: Setting) -> list[dict[str, Any]]:
    """Sampling alone, vLLM's CPU build in bfloat16, the fastest of a few ways to run it. Its likeliest tokens are compared with ours
    in float32."""
    python = vllm_python()
    cores = ["--cores", f"0-{s.threads - 1}"]
    short = [*cores, "--block", "32"]
    preload = {"LD_PRELOAD": str(python.parents[1] / "lib/libiomp5.so"), **TUNED}
    ways: dict[str, tuple[list[str], dict[str, str]]] = {
        "as it comes": ([], {}),
        "all cores": (cores, {}),
        "all cores, short blocks": (short, {}),
        "all cores, short blocks, its OpenMP, freed memory kept": (short, preload),
    }

    def run(way: str) -> Measurement:
        more, environment = ways[way]
        return measure(python, "vllm_side.py", s.arguments(*more), environment=environment)

    rates = {way: round(1 / summary([run(way)])["s_per_token"], 1) for way in ways}
    fastest = max(rates, key=lambda way: rates[way])
    theirs, ours = by_turns(s.repeats, lambda: run(fastest), lambda: _sampling(s, "tether"))
    exact = _sampling(s, "greedy")
    same = equal_tokens(exact["tether"], theirs[0]["greedy"], exact["tether_logps"], theirs[0]["greedy_logps"])
    found = row("vllm", 1.0, ("vllm", theirs), ("tether", ours))
    return [found | {"same": same, "vllm_tokens_per_s_by_way": rates, "way": fastest, "vllm_start_s": theirs[0]["start_s"]}]


def ppo(s: Setting) -> list[dict[str, Any]]:
    """Our own two methods with one optimiser step a batch: what the critic costs. The first step samples the same answers in both."""
    sides = [lambda method=method: measure(sys.executable, "tether_online_side.py", [method, *s.arguments()]) for method in ("grpo", "ppo")]
    grpo_steps, ppo_steps = by_turns(s.repeats, *sides)
    same = {"grpo_first_reward": grpo_steps[0]["rewards"][0], "ppo_first_reward": ppo_steps[0]["rewards"][0]}
    return [row("ppo", 0.6, ("grpo", grpo_steps), ("ppo", ppo_steps)) | {"same": same}]


ROWS: dict[str, Callable[[Setting], list[dict[str, Any]]]] = {"grpo": grpo, "generate": generate, "vllm": vllm, "ppo": ppo}


def _sampling(s: Setting, side: str) -> Measurement:
    return measure(sys.executable, "sampling_side.py", [side, *s.arguments()])


def equal_tokens(
    ours: list[list[int]],
    theirs: list[list[int]],
    our_logps: list[list[float]] | None = None,
    their_logps: list[list[float]] | None = None,
) -> dict[str, Any]:
    """Greedy tokens that are equal and that are not; with log-probs their mean difference, up to the first other token of each prompt.

    >>> equal_tokens([[1, 2, 3]], [[1, 2, 4]])
    {'equal': 2, 'unequal': 1}
    """
    pairs = [list(zip(a, b, strict=True)) for a, b in zip(ours, theirs, strict=True)]
    equal = sum(a == b for prompt in pairs for a, b in prompt)
    out: dict[str, Any] = {"equal": equal, "unequal": sum(map(len, pairs)) - equal}
    if our_logps is not None and their_logps is not None:
        gaps = []
        for prompt, x, y in zip(pairs, our_logps, their_logps, strict=True):
            same = next((i for i, (a, b) in enumerate(prompt) if a != b), len(prompt))
            gaps += [abs(x[i] - y[i]) for i in range(same)]
        out |= {"compared": len(gaps), "logp_gap": statistics.fmean(gaps) if gaps else None}
    return out


# -- what is printed ---------------------------------------------------------------------------------------------------


def lines(r: dict[str, Any]) -> list[str]:
    """A row for people: times and ratio, then where the seconds went, then what shows that both computed the same."""
    a, b = r["sides"]
    if "phases" not in r:
        rates = "  ".join(f"{side} {r[f'{side}_tokens_per_s']:.0f} tokens/s" for side in (a, b))
        return [f"{r['row']:14s} {rates}  {r['ratio']:5.2f}x (first bar {r['want']}x)"]
    times = "  ".join(
        f"{side} {r[f'{side}_s']:7.2f} s, {r[f'{side}_tokens']:.0f} tokens, {r[f'{side}_tokens_per_s']:.0f}/s" for side in (a, b)
    )
    bar = f", bar {r['memory_want']}" if "memory_want" in r else ""
    out = [
        f"{r['row']:14s} {times}  {r['ratio']:5.2f}x per token, {r['plain_ratio']:.2f}x plain (first bar {r['want']}x)   "
        f"memory {r[f'{a}_mib']} -> {r[f'{b}_mib']} MiB ({r['memory_ratio']:.2f}{bar})"
    ]
    for side in (a, b):
        split = r["phases"][side]
        rest = r[f"{side}_s"] - sum(split.values())
        out.append(f"  {side:12s} " + "  ".join(f"{name} {value:.2f} s" for name, value in split.items()) + f"  other {rest:.2f} s")
    if "way" in r:
        out.append(f"  {r['way']} is the fastest of: " + ", ".join(f"{way} {n:.0f}/s" for way, n in r["vllm_tokens_per_s_by_way"].items()))
    if "same" in r:
        out.append("  the same?    " + json.dumps(r["same"]))
    return out
