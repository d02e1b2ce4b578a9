"""The pictures of the lab's GRPO."""

from __future__ import annotations

from torch import Tensor

from tether.lab.group_baseline import VARIANCE, Spread, pull
from tether.lab.group_runs import BEST, EPS, REWARDS, STEPS, Run
from tether.report.bars import Bars, bar_chart
from tether.report.charts import Chart, Series, line_chart
from tether.report.numbers import number

PRINTED, OLD, REFERENCE = "as printed", "ratio to old", "ratio to reference"
COLOURS = {PRINTED: 2, OLD: 1, REFERENCE: 3}


def reward_chart(runs: dict[str, Run]) -> Chart:
    noisy = PRINTED if PRINTED in runs else OLD
    return line_chart(
        [
            *(
                Series(f"exact, {name}", [(n, r.expected) for n, r in enumerate(run.steps, 1)], COLOURS[name], dashed=name == REFERENCE)
                for name, run in runs.items()
            ),
            Series(f"group of six, {noisy}", [(n, r.group) for n, r in enumerate(runs[noisy].steps, 1)], 4, dots=True),
        ],
        title="What it earns, and what six draws say",
        x_label="step",
        y_label="reward",
        smooth=False,
    )


def ratio_chart(run: Run) -> Chart:
    ratios = [(n, r.probs[BEST] / 0.25) for n, r in enumerate(run.steps, 1)]
    return line_chart(
        [
            Series("a bad draw (A < 0)", ratios, 2),
            Series("a good draw (A > 0)", [(n, min(r, 1 + EPS)) for n, r in ratios], 3),
            Series("ratio to the policy that drew", [(1, 1.0), (STEPS, 1.0)], 1, dashed=True),
        ],
        title="What a draw of the best action weighs",
        x_label="step",
        y_label="weight of its advantage",
        smooth=False,
        with_zero=True,
    )


def spread_chart(spreads: list[Spread]) -> Chart:
    grid = range(spreads[0].size, spreads[-1].size + 1)
    return line_chart(
        [
            Series("group's mean, theory", [(g, (VARIANCE / g) ** 0.5) for g in grid], 1),
            Series("group's mean, measured", [(s.size, s.with_self.value**0.5) for s in spreads], 1, dots=True, joined=False),
            Series("mean of the others, theory", [(g, (VARIANCE / (g - 1)) ** 0.5) for g in grid], 2, dashed=True),
            Series("mean of the others, measured", [(s.size, s.without.value**0.5) for s in spreads], 2, dots=True, joined=False),
        ],
        title="Noise of the baseline",
        x_label="group size G",
        y_label="standard deviation (reward)",
        smooth=False,
        with_zero=True,
        caption="Measured on 2,000 groups of each size.",
    )


def scale_chart(scaled: dict[tuple[float, bool], Tensor]) -> Chart:
    scales = list(dict.fromkeys(scale for scale, _ in scaled))
    return bar_chart(
        [Bars(f"× {number(scale)}", [float(scaled[scale, divide].mean()) for divide in (True, False)]) for scale in scales],
        ["divided by the deviation", "mean subtracted only"],
        title="What is learnt when rewards are scaled",
        x_label="expected reward, in units of the scale",
        mark=float(REWARDS.mean()),
        mark_label="start",
        text=lambda v: f"{v:.2f}",
    )


def pull_chart() -> Chart:
    grid = [k / 50 for k in range(1, 50)]
    kinds = {"divided, G = 8": (8, True, 1), "divided, G = 64": (64, True, 3), "mean subtracted only": (8, False, 2)}
    return line_chart(
        [
            Series(name, [(p, pull(p, size, divide) / pull(0.5, size, divide)) for p in grid], colour, dashed=not divide)
            for name, (size, divide, colour) in kinds.items()
        ],
        title="How hard a prompt pulls",
        x_label="probability of a right answer",
        y_label="push, relative to p = 0.5",
        whole_x=False,
        smooth=False,
        with_zero=True,
    )
