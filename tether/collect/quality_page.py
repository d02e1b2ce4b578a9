"""The figures of a desk as tables and as one HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tether.collect.calibration import LOWEST, Calibration
from tether.collect.quality import Quality
from tether.collect.quality_findings import findings, interval, judge_findings, share
from tether.messages import plain
from tether.report.charts import Chart, Estimate, calibration_chart, interval_chart
from tether.report.numbers import number, percent, seconds
from tether.report.page import Page, Part
from tether.report.view import Section, Table
from tether.stats import Interval

FOOT = "Made from the votes on the desk. It can be made again with `tether agreement`."
NAME = 24  # characters of a name in a chart
PROMPT = 160  # characters of a prompt in a table
MOST_PEOPLE = 40  # in a chart


def quality_page(q: Quality, judge: Calibration | None, *, desk: str, worst: int = 10) -> Page:
    """One part for the people, one for the judge where there is one."""
    facts = [
        ("Items", f"{q.items:,}"),
        ("With a vote", f"{q.voted_items:,}"),
        ("Votes", f"{q.votes:,}"),
        ("Shown again", f"{q.repeats:,}"),
        ("Annotators", str(len(q.people))),
        ("Verdicts", ", ".join(f"{n} {name}" for name, n in sorted(q.outcomes.items(), key=lambda x: -x[1]))),
    ]
    sections = [
        Section(
            "How far people agree", ["Intervals are over prompts, at 95 %."], agreement_charts(q), [agreement_table(q), *cohen_tables(q)]
        ),
        Section("Annotators", charts=people_charts(q), tables=people_tables(q)),
        *models_sections(q),
    ]
    parts = [Part("The votes", facts, findings(q), sections)]
    if judge is not None:
        parts.append(Part(f"The judge {judge.judge}", [], judge_findings(judge), judge_sections(judge, worst)))
    return Page("How far the votes can be trusted", f"The desk in {desk}.", parts, foot=FOOT)


# -- people --------------------------------------------------------------------------------------------------------------


def agreement_table(q: Quality) -> Table:
    """One row for each measure: its value, what it rests on, what it means."""
    rows = []
    for name, a, meaning in (
        ("same verdict", q.percent, "two people on the same pair of answers; chance alone gives some of it"),
        (
            "Krippendorff's alpha",
            q.alpha,
            "the same with chance taken out: 1 is full agreement, 0 is chance; of first, second, tie and both bad",
        ),
        ("alpha, ordered", q.ordinal_alpha, "a tie is half as far from a win as a loss is; both bad counts as a tie"),
        ("Fleiss' kappa", q.fleiss, "chance taken out, over the pairs that were rated equally often"),
    ):
        value = _kept(interval(a, percent) if a is q.percent else interval(a))
        rows.append([name, value, f"{a.items:,}", f"not known: {a.why}" if a.value is None else meaning])
    rows.append(
        ["own verdict again", share(q.consistent), str(q.consistent.n) if q.consistent else "0", "the same person on the same item"]
    )
    p = q.position
    side = "–" if p.share is None or p.low is None or p.high is None else share(Interval(p.share, p.low, p.high, p.n))
    rows.append(["first shown won", _kept(side), f"{p.n:,}", "half is expected" + ("" if p.p is None else f"; p = {number(p.p, 2)}")])
    return Table(["measure", "value (95 % interval)", "of", "what it is"], rows, numeric=frozenset({2}))


def cohen_tables(q: Quality) -> list[Table]:
    if not q.cohen:
        return []
    rows = [[a, b, _kept(interval(k)), str(k.items), k.why] for (a, b), k in q.cohen.items()]
    return [Table(["annotator", "and", "Cohen's kappa", "pairs of answers", ""], rows, "Two by two", numeric=frozenset({3}), folded=True)]


def people_tables(q: Quality) -> list[Table]:
    """How each annotator judges, and what they gave in which time: two tables, as one is too wide for a terminal."""
    judging, giving = [], []
    for p in q.people:
        first = "–" if p.position.share is None else f"{percent(p.position.share)} of {p.position.n}"
        judging.append([p.name, *(_kept(x) for x in (share(p.agreement), share(p.consistent), first))])
        middle = "–" if p.speed.median_s is None else seconds(p.speed.median_s)
        hasty = "–" if p.speed.why else str(len(p.speed.hasty))
        giving.append([p.name, *map(str, (p.votes, p.skips, p.ties, p.bad)), _kept(middle), str(len(p.speed.unread)), hasty])
    return [
        Table(["annotator", "as the others", "as before, shown again", "shown first won"], judging),
        Table(
            ["annotator", "votes", "skipped", "ties", "both bad", "median time", "unread", "hasty"], giving, numeric=frozenset(range(1, 8))
        ),
    ]


def agreement_charts(q: Quality) -> list[Chart]:
    named = (("alpha", q.alpha), ("alpha, ordered", q.ordinal_alpha), ("Fleiss' kappa", q.fleiss))
    rows = [Estimate(n, a.value, a.low, a.high) for n, a in named if a.value is not None and a.low is not None and a.high is not None]
    if not rows:
        return []
    low = min(0.0, *(e.low for e in rows))
    return [
        interval_chart(rows, title="Agreement beyond chance", x_label="coefficient", mark=0.0, mark_label="chance", limits=(low, 1.0)),
    ]


def people_charts(q: Quality) -> list[Chart]:
    people = q.people[:MOST_PEOPLE]
    agree = [_estimate(p.name, p.agreement) for p in people if p.agreement is not None]
    sides = [
        Estimate(_short(p.name), p.position.share, p.position.low, p.position.high)
        for p in people
        if p.position.share is not None and p.position.low is not None and p.position.high is not None
    ]
    made = []
    if agree:
        made.append(interval_chart(agree, title="Same verdict as the others", x_label="share of pairs", limits=(0.0, 1.0)))
    if sides:
        made.append(
            interval_chart(
                sides,
                title="The answer shown first won",
                x_label="share of decided votes",
                mark=0.5,
                mark_label="no favour",
                limits=(0.0, 1.0),
            )
        )
    return made


def models_sections(q: Quality) -> list[Section]:
    if q.models is None:
        return []
    told = q.models.strengths
    rows = [
        Estimate(_short(s.name), s.value, s.low, s.high) for s in told if s.value is not None and s.low is not None and s.high is not None
    ]
    caption = "Log-odds against the mean of the models; a difference of 1 is a win rate of 73 %. Ties and both bad are half a win each."
    charts = [interval_chart(rows, title="Strength", x_label="Bradley-Terry, log-odds", caption=caption)] if rows else []
    return [Section("The models", charts=charts, tables=[models_table(q)])]


def models_table(q: Quality) -> Table:
    """Each model with its strength and the chance to beat the one below it."""
    told = q.models.strengths if q.models is not None else ()
    rows = []
    for i, s in enumerate(told):
        below = told[i + 1].name if i + 1 < len(told) else None
        chance = q.models.chance(s.name, below) if q.models is not None and below is not None else None
        beats = "–" if chance is None else f"{percent(chance[0])} ({percent(chance[1])} to {percent(chance[2])})"
        rate = "–" if s.win_rate is None else percent(s.win_rate)
        rows.append([s.name, number(s.comparisons), rate, _kept(_strength(s.value, s.low, s.high)), _kept(beats), s.why])
    return Table(["model", "prompts", "win rate", "strength", "beats the next", ""], rows, numeric=frozenset({1, 2}))


def _strength(value: float | None, low: float | None, high: float | None) -> str:
    return "–" if value is None else f"{value:+.2f} ({low:+.2f} to {high:+.2f})".replace("-", "−")


# -- the judge -----------------------------------------------------------------------------------------------------------


def judge_sections(c: Calibration, worst: int) -> list[Section]:
    charts = []
    named = [("judge, most people", c.accuracy), ("judge, one person", c.with_one_person)]
    two = c.two_people
    if two.value is not None and two.low is not None and two.high is not None:
        named.append(("two people", Interval(two.value, two.low, two.high, two.items)))
    rows = [_estimate(name, x) for name, x in named if x is not None]
    if rows:
        charts.append(
            interval_chart(rows, title="Choosing the same answer", x_label="share", mark=0.5, mark_label="a coin", limits=(0.0, 1.0))
        )
    if c.bins:
        caption = "Confidence from the two scores, against the share of people on that side. Below the diagonal it is too sure."
        charts.append(calibration_chart(c.bins, title="Calibration", caption=caption, low=LOWEST))
    return [Section("Against people", charts=charts, tables=judge_tables(c, worst))]


def judge_tables(c: Calibration, worst: int) -> list[Table]:
    """What came of the pairs, the calibration, and the rows on which judge and people differ most."""
    counts = c.counts
    meaning = {
        "agree": "it chose the side of most people",
        "differ": "it chose the other side",
        "tie": "it called a tie where most people chose a side",
        "undecided": "people were even, whatever it says",
        "invalid": "it gave no verdict: its own outcome, not a tie",
    }
    made = [Table(["outcome", "pairs", "what it is"], [[k, str(counts[k]), meaning[k]] for k in meaning], numeric=frozenset({1}))]
    if c.bins:
        rows = [
            [f"{percent(b['low'])} to {percent(b['high'])}", str(b["n"]), percent(b["predicted"]), percent(b["frequency"])] for b in c.bins
        ]
        caption = f"Calibration error {percent(c.error or 0.0)}; confidence less the share of people {_points(c.too_sure)}."
        made.append(Table(["confidence", "pairs", "mean", "people on its side"], rows, "Confidence", caption, frozenset({1, 2, 3})))
    apart = c.worst(worst)
    if apart:
        rows = [
            [x.item, _prompt(x.prompt), _votes(x.verdicts), percent(x.people), percent(x.chance or 0.0), x.source or "–"] for x in apart
        ]
        header = ["item", "prompt", "votes", "people", "judge", "from"]
        caption = "Shares for the first answer as stored."
        made.append(Table(header, rows, "Where judge and people differ most", caption, frozenset({3, 4})))
    if c.invalid:
        rows = [[x.item, _prompt(x.prompt), x.verdict.reason or "no reason given", x.source or "–"] for x in c.invalid[:worst]]
        title = f"Without a verdict of the judge: {len(c.invalid)}"
        made.append(Table(["item", "prompt", "why", "from"], rows, title))
    return made


def _votes(verdicts: Sequence[str]) -> str:
    return ", ".join(f"{n} {v}" for v, n in Counter(verdicts).most_common())


def _points(x: Interval | None) -> str:
    return "–" if x is None else f"{100 * x.value:+.0f} points ({100 * x.low:+.0f} to {100 * x.high:+.0f})".replace("-", "−")


def _prompt(prompt: object) -> str:
    text = " ".join(plain(prompt).split())  # type: ignore[arg-type]  # a Text
    return text if len(text) <= PROMPT else text[: PROMPT - 1] + "…"


def _estimate(name: str, x: Interval) -> Estimate:
    return Estimate(_short(name), x.value, x.low, x.high)


def _kept(value: str) -> str:
    """A value that stays on one line: in a narrow table it would break at every blank."""
    return value.replace(" ", "\u00a0")


def _short(name: str) -> str:
    return name if len(name) <= NAME else name[: NAME - 1] + "…"
