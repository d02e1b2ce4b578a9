"""What the demo leaves for its page: every figure with its interval, and the sentences that follow from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tether import stats
from tether.demo.lessons import from_choices, from_practice
from tether.demo.online import TETHER, Trial
from tether.demo.sampled import UNITS, Side, measure
from tether.demo.sizes import TINY, Size
from tether.demo.world import FREE_TOKENS, TOKEN_COST
from tether.report.numbers import measured
from tether.run import Run

LEAD = (
    "Simulated people chose {pairs} times between two answers of the model. They like cheerful answers; they also lean to the longer one, "
    "although answers beyond 40 tokens annoy them afterwards. The models learnt from these choices alone. Here is what they learnt."
)
TINY_LEAD = "A test of the machine: the model is random and so are its answers; only the road is real."
SCALES = (
    "Each prompt was answered before and after, at temperature 1. Sentiment is VADER's compound score; the true score takes off "
    f"{TOKEN_COST} for every token beyond {FREE_TOKENS}. Bars are 95 % intervals of the mean; the interval of a change is over prompts, paired."
)
START = "the start"
# As a run of the third stage logs them: metric, heading, unit.
WATCHED = {
    "rewards/model/mean": ("Reward model's score: what is optimised", "standard deviations"),
    "rewards/true_score/mean": ("True score: what it stands for", f"sentiment less the cost beyond {FREE_TOKENS} tokens"),
    "completions/mean_length": ("Length", "tokens"),
    "objective/kl": ("Distance from the start", "square root of KL, nats"),
}


def outcome(folder: Path, sides: Mapping[str, Side], trials: Sequence[Trial], took: Mapping[str, float], size: Size) -> dict[str, Any]:
    """comparison.json: DPO before and after, then the runs on the reward model side by side."""
    before, after = sides["before"], sides["after"]
    measures = measure(before, after)
    tiny, n = size is TINY, len(before.values("length"))
    model = "SmolLM2-135M-Instruct" if not tiny else "two random layers"
    return {
        "title": f"A small model learns from {size.pairs} choices" if not tiny else "The demo with a tiny random model",
        "lead": LEAD.format(pairs=size.pairs) if not tiny else TINY_LEAD,
        "part": "Learning from the choices: DPO",
        "facts": [["Model", model], ["Held-out prompts", str(n)], ["Answers to each", str(size.samples)]],
        "text": [SCALES],
        "seconds": {name: round(seconds, 1) for name, seconds in took.items()},
        "measures": [m.row() for m in measures.values()],
        "cut_at_limit": {name: side.cut for name, side in sides.items()} | {"limit": size.limit},
        "findings": from_choices(measures, (before.cut, after.cut), n),
        "practice": practice(folder, before, {t: sides[t.name] for t in trials}, size),
        "samples_shown": 3,
        "runs": {"reward": "The reward model", "dpo": "DPO", **{t.folder: t.name for t in trials}},
    }


def practice(folder: Path, start: Side, sides: Mapping[Trial, Side], size: Size) -> dict[str, Any]:
    named: dict[str, Side] = {START: start, **{t.name: side for t, side in sides.items()}}
    ends = [
        {"name": name, "unit": unit, "values": {who: list(stats.mean_interval(s.values(key))[:3]) for who, s in named.items()}}
        for key, (name, unit) in ((k, UNITS[k]) for k in ("reward", "true", "length"))
    ]
    roots = {t.name: [_root(x) for x in stats.mean_interval(s.values("kl"))[:3]] for t, s in sides.items()}
    ends.append({"name": "Distance from the start", "unit": "square root of KL, nats", "values": roots})
    lines: dict[str, dict[str, list[tuple[int, float]]]] = {metric: {} for metric in WATCHED}
    for trial in sides:
        for row in Run.open(folder / trial.folder).metrics():
            for metric in WATCHED:
                if isinstance(row.get(metric), (int, float)):
                    value = _root(row[metric]) if metric == "objective/kl" else row[metric]
                    lines[metric].setdefault(trial.name, []).append((row["step"], value))
    rows = []
    for trial, side in sides.items():
        cells = [trial.name]
        for key in ("reward", "true"):
            value, low, high = (measured(x, sign=True) for x in stats.paired_difference(side.values(key), start.values(key))[:3])
            cells.append(f"{value} ({low} to {high})")
        cells += [measured(stats.mean_interval(side.values(key)).value) for key in ("length", "kl")]
        rows.append(cells)
    colours = [{"name": START, "colour": 5, "dashed": False}]
    colours += [{"name": t.name, "colour": 1 if t.tethered else 2, "dashed": t.method == "ppo"} for t in sides]
    return {
        "title": "Learning from the reward model, with and without a tether",
        "text": [
            f"Each run sampled {size.batch_online} answers a step for {size.steps} steps and learnt from what the reward model said of them. "
            f"With the tether, every nat of distance from the start costs {TETHER:g}; this was fixed beforehand. The reward model is a stand-in "
            "that learnt from choices: what it pays for and what the people truly like part ways once a model chases it far enough. "
            f"Below: {size.samples * len(start.values('length'))} answers of each model to prompts that no training saw, {size.limit} tokens at most."
        ],
        "sides": colours,
        "measures": ends,
        "curves": [{"name": name, "unit": unit, "lines": lines[metric]} for metric, (name, unit) in WATCHED.items()],
        "changes": {"header": ["", "reward model's score", "true score", "tokens", "KL (nats)"], "rows": rows},
        "findings": from_practice(start, sides),
    }


def _root(x: float) -> float:
    """Of an estimate that may fall below 0 by chance."""
    return math.sqrt(max(x, 0.0))
