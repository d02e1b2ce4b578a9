"""Which curves a run's metrics make, in the order in which a reader asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tether.report.charts import Chart, Point, Series, line_chart, scatter_chart
from tether.report.numbers import number, plural, signed
from tether.report.view import RunView, Section, Table, is_number
from tether.stats import pearson


@dataclass(frozen=True)
class Curve:
    """One chart: (metric, label) for each line; the chart is made when at least one of them was logged."""

    title: str
    y_label: str
    lines: tuple[tuple[str, str], ...]
    caption: str = ""
    limits: tuple[float | None, float | None] = (None, None)
    mark: float | None = None
    mark_label: str = ""


SHARE = (0.0, 1.0)
LEARNING = (
    Curve("Loss", "{loss_unit}", (("loss", "training"), ("eval_loss", "held-out"))),
    Curve(
        "Pairs ordered right",
        "share of the step's pairs",
        (("rewards/accuracies", "training"), ("eval_rewards/accuracies", "held-out")),
        limits=SHARE,
        mark=0.5,
        mark_label="guessing",
    ),
    Curve(
        "Pairs ordered right",
        "share of the step's pairs",
        (("accuracy", "training"), ("eval_accuracy", "held-out")),
        limits=SHARE,
        mark=0.5,
        mark_label="guessing",
    ),
    Curve(
        "Implicit rewards",
        "beta x nats per answer",
        (("rewards/chosen", "chosen"), ("rewards/rejected", "rejected"), ("rewards/margins", "margin")),
    ),
    Curve(
        "Log-probabilities",
        "nats per answer, sum over its tokens",
        (("logps/chosen", "chosen"), ("logps/rejected", "rejected")),
    ),
    Curve("Margin", "score of chosen less score of rejected", (("margin", "training"), ("eval_margin", "held-out"))),
    Curve("Scores", "score", (("reward/chosen", "chosen"), ("reward/rejected", "rejected"), ("mean_reward", "mean"))),
    Curve("Disagreement of the heads", "standard deviation of the margin", (("disagreement", "training"),)),
    Curve(
        "Tokens predicted right",
        "share of trained tokens",
        (("mean_token_accuracy", "training"), ("eval_mean_token_accuracy", "held-out")),
        limits=SHARE,
    ),
    Curve("Likelihood of the chosen answers", "negative log-likelihood, nats", (("nll_loss", "training"), ("eval_nll_loss", "held-out"))),
    Curve("Distance from the reference", "nats per answer", (("kl", "baseline used (never below 0)"), ("kl/raw", "as measured"))),
    Curve("Entropy", "nats per token", (("entropy", "training"), ("eval_entropy", "held-out"))),
)
MACHINERY = (
    Curve("Gradient norm", "before clipping", (("grad_norm", "gradient norm"),)),
    Curve("Learning rate", "size of a step", (("learning_rate", "learning rate"),), limits=(0.0, None)),
    Curve("Speed", "tokens per second", (("tokens_per_second", "tokens per second"),), limits=(0.0, None)),
)
LOSS_UNITS = {"sft": "nats per token", "reward": "nats per pair"}
# Told elsewhere on the page, or bookkeeping.
NOT_LISTED = {"step", "epoch", "num_tokens", "step_time", "skipped", "skip_reason"}


def learning(view: RunView) -> Section | None:
    charts = [c for curve in LEARNING if (c := drawn(view, curve)) is not None]
    return Section("Learning", charts=charts) if charts else None


def machinery(view: RunView) -> Section | None:
    charts = [c for curve in MACHINERY if (c := drawn(view, curve)) is not None]
    limit = view.settings.get("max_grad_norm")
    norms = [y for _, y in view.series("grad_norm")]
    if norms and is_number(limit) and max(norms) > 0.3 * limit:
        with_limit = Curve(
            "Gradient norm", "before clipping", MACHINERY[0].lines, mark=float(limit), mark_label=f"max_grad_norm {number(limit)}"
        )
        charts[0] = drawn(view, with_limit) or charts[0]
    table = all_metrics(view)
    return Section("Optimiser and machine", charts=charts, tables=[table] if table else []) if charts or table else None


def drawn(view: RunView, curve: Curve) -> Chart | None:
    """The chart, or None when the run logged none of its metrics."""
    series = []
    for colour, (name, label) in enumerate(curve.lines, start=1):
        points = view.series(name)
        if points:
            series.append(Series(label, points, colour, dots=name.startswith("eval_") and len(points) < 40))
    if not series:
        return None
    unit = curve.y_label.format(loss_unit=LOSS_UNITS.get(view.command, "loss per pair"))
    return line_chart(
        series,
        title=curve.title,
        y_label=unit,
        caption=curve.caption,
        limits=curve.limits,
        mark=curve.mark,
        mark_label=curve.mark_label,
    )


def all_metrics(view: RunView) -> Table | None:
    """Every number that was logged, so that a metric without a chart is not hidden."""
    names = list(dict.fromkeys(key for row in view.metrics for key in row if key not in NOT_LISTED))
    rows = []
    for name in names:
        values = [y for _, y in view.series(name)]
        finite = [y for y in values if y == y]
        if finite:
            rows.append([name, *(number(v) for v in (values[0], values[-1], min(finite), max(finite))), str(len(values))])
    if not rows:
        return None
    return Table(
        ["metric", "first", "last", "lowest", "highest", "steps"], rows, "Every metric", numeric=frozenset({1, 2, 3, 4, 5}), folded=True
    )


# Displacement ---------------------------------------------------------------------------------------------------------------


def displacement(view: RunView, worst: int = 10) -> Section | None:
    """The margin's two halves over the steps, and the pairs in which the chosen answer fell most."""
    chosen, rejected = view.series("displacement/chosen"), view.series("displacement/rejected")
    if not chosen or not rejected:
        return None
    down = [(step, -value) for step, value in rejected]
    by_step = dict(chosen)
    margin = [(step, by_step[step] + value) for step, value in down if step in by_step]
    text = [
        "A margin can grow in two ways: the chosen answer becomes more likely, or the rejected one less likely. "
        "The loss sees only their sum. Here are the two halves, as log-probability under the model less that under the reference."
    ]
    halves = line_chart(
        [
            Series("margin", margin, 5, dashed=True),
            Series("from chosen answers rising", chosen, 1),
            Series("from rejected answers falling", down, 2),
        ],
        title="Where the margin comes from",
        y_label="nats per answer, mean of the step's pairs",
        caption=halves_in_words(view),
        with_zero=True,
        wide=True,
    )
    charts = [halves]
    share = view.series("displacement/frac_chosen_down")
    if share:
        charts.append(
            line_chart(
                [Series("chosen answers below the reference", share, 1)],
                title="Chosen answers that fell",
                y_label="share of the step's pairs",
                limits=SHARE,
                mark=0.5,
                mark_label="half",
            )
        )
    tables = []
    last = list({row["pair"]: row for row in view.pairs if is_number(row.get("chosen_up"))}.values())
    if last:
        charts += similarity_chart(last)
        tables.append(worst_pairs(last, worst))
    return Section("Displacement: where the margin comes from", text, charts, tables)


def halves_in_words(view: RunView) -> str:
    chosen, rejected = view.late("displacement/chosen"), view.late("displacement/rejected")
    if chosen is None or rejected is None:
        return ""
    return (
        f"Over the last {plural(view.n_late, 'step')}: margin {signed(chosen - rejected)} = {signed(chosen)} from the chosen answers "
        f"and {signed(-rejected)} from the rejected ones. Where the blue line is below zero, the answers that people chose have become "
        "less likely than they were under the reference."
    )


def similarity_chart(pairs: Sequence[dict[str, Any]]) -> list[Chart]:
    late = sorted(pairs, key=lambda row: row["step"])[len(pairs) // 2 :]
    points: list[Point] = [(row["similarity"], row["chosen_up"]) for row in late if is_number(row.get("similarity"))]
    if len(points) < 10:
        return []
    r = pearson([x for x, _ in points], [y for _, y in points])
    return [
        scatter_chart(
            points,
            title="Do similar answers fall together?",
            x_label="share of tokens that the two answers have in common",
            y_label="change of the chosen answer, nats",
            limits_x=(0.0, None),
            caption=f"One dot per pair of the second half of the run. Correlation {number(r, 2)}."
            + (" Pairs that are too alike can be left out with min_edit_distance." if r is not None and r < -0.2 else ""),
        )
    ]


def worst_pairs(pairs: Sequence[dict[str, Any]], worst: int) -> Table:
    ranked = sorted(pairs, key=lambda row: row["chosen_up"])[:worst]
    rows = [
        [
            str(row.get("source", row["pair"])),
            str(row["step"]),
            signed(row["chosen_up"]),
            signed(-row["rejected_down"]),
            number(row.get("similarity")),
        ]
        for row in ranked
    ]
    return Table(
        ["pair", "step", "change of chosen (nats)", "change of rejected (nats)", "tokens in common"],
        rows,
        f"The {plural(len(rows), 'pair')} whose chosen answer fell furthest",
        "As each pair was last seen in training, before that step's update.",
        frozenset({1, 2, 3, 4}),
    )
