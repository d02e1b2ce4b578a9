"""What the figures of a desk mean, in sentences, and what to do about it."""

from __future__ import annotations

from tether.agreement import WORDS_PER_SECOND, Agreement
from tether.collect.calibration import Calibration
from tether.collect.quality import Person, Quality
from tether.report.numbers import number, percent, plural
from tether.report.view import Finding, Tone
from tether.stats import Interval

RELIABLE, TENTATIVE = 0.8, 0.667  # Krippendorff (2004), "Content Analysis", p. 241
UNLIKELY = 0.01  # a habit is pointed out where luck alone shows it to fewer than one desk in a hundred
UNREAD_SHARE = 0.05  # of a person's votes that are faster than reading
ENOUGH_SIDES = 100  # decided votes of which 64 % for one side are unlikely by luck; fewer show only a gross favour
FEWEST_REPEATS = 5
CONSISTENT = 0.9
INVALID_SHARE = 0.1  # of the judge's pairs, above which its figures are about the rest alone


def findings(q: Quality) -> list[Finding]:
    """The desk first, then whoever stands out, then the models."""
    made = [_agreement(q), _consistency(q), _side(q), *(f for p in q.people for f in person_findings(p, q)), *_models(q)]
    return [f for f in made if f is not None]


def _agreement(q: Quality) -> Finding:
    if q.percent.value is None:
        remedy = "Ask for two or more votes of each item (--votes 2)."
        return Finding("watch", f"How far people agree is not known: {q.percent.why}.", remedy)
    lead = f"Two people give the same verdict on {percent(q.percent.value)} of {plural(q.percent.items, 'pair')} of answers"
    a = q.alpha
    if a.value is None:
        return Finding("watch", f"{lead}; how much of it is chance is not known: {a.why}.")
    text = f"{lead}; Krippendorff's alpha, chance taken out, is {interval(a)}"
    if a.value >= RELIABLE:
        return Finding("good", f"{text}: single votes are reliable labels.")
    if a.value >= TENTATIVE:
        return Finding("plain", f"{text}: enough for tentative conclusions from single votes.")
    remedy = "Take the majority of several votes, or soft labels; and look whether the guidelines leave open what people disagree about."
    if a.high is not None and a.low is not None and a.low <= 0 <= a.high:
        return Finding("bad", f"{text}: the votes may be no more than chance.", remedy)
    return Finding("watch", f"{text}: single votes are noisy labels.", remedy)


def _consistency(q: Quality) -> Finding | None:
    if q.consistent is None:
        return Finding("plain", "Whether people repeat their own verdicts is not known: no item was voted on twice by one of them.")
    text = f"Asked again, people repeat their own verdict in {share(q.consistent)} of cases."
    return Finding("good" if q.consistent.low >= TENTATIVE else "plain", text)


def _side(q: Quality) -> Finding | None:
    p = q.position
    if p.share is None or p.p is None:
        return None
    text = f"The answer shown first won {percent(p.share)} of {p.n} decided votes (p = {number(p.p, 2)})"
    if p.p < UNLIKELY:
        return Finding(
            "watch", f"{text}: the side matters.", "Sides are shuffled, so it adds noise and no tilt. Ask people to read both to the end."
        )
    return Finding("good" if p.n >= ENOUGH_SIDES else "plain", f"{text}: no favour that stands out from chance.")


def person_findings(p: Person, q: Quality) -> list[Finding]:
    """What stands out about one annotator against the others of the desk."""
    found = []
    if p.position.p is not None and p.position.share is not None and p.position.p < UNLIKELY / len(q.people) and len(q.people) > 1:
        text = f"{p.name} chose the answer shown first in {percent(p.position.share)} of {p.position.n} decided votes."
        found.append(Finding("watch", text, "Half is expected. Look at a few of these votes together."))
    if p.agreement is not None and q.percent.value is not None and p.agreement.high < q.percent.value and len(q.people) > 2:
        text = (
            f"{p.name} gives the others' verdict in {share(p.agreement)} of cases, where people here agree in {percent(q.percent.value)}."
        )
        found.append(Finding("watch", text, "Go through the guidelines together, or leave these votes out."))
    if p.consistent is not None and p.consistent.n >= FEWEST_REPEATS and p.consistent.high < CONSISTENT:
        found.append(
            Finding("watch", f"{p.name} repeats the own verdict in only {share(p.consistent)} of {p.consistent.n} items shown again.")
        )
    voted = p.votes - p.skips
    if len(p.speed.unread) > max(1.0, UNREAD_SHARE * voted):
        text = (
            f"{len(p.speed.unread)} of {p.name}'s {plural(voted, 'vote')} came faster than {WORDS_PER_SECOND:g} words a second: not read."
        )
        found.append(Finding("bad", text, "Their numbers are in the JSON (`--json`, hasty_votes)."))
    return found


def _models(q: Quality) -> list[Finding]:
    if q.models is None:
        return []
    top = [s for s in q.models.strengths if s.comparisons > 0][:2]
    if len(top) < 2:
        return []
    found = q.models.chance(top[0].name, top[1].name)
    if found is None:
        return [Finding("plain", f"{s.name}: {s.why}.") for s in q.models.strengths if s.why]
    rate = f"{percent(found[0])} ({percent(found[1])} to {percent(found[2])})"
    if found[1] > 0.5:
        return [Finding("good", f"{top[0].name} is the strongest: it beats {top[1].name} on {rate} of prompts.")]
    return [Finding("plain", f"{top[0].name} and {top[1].name} cannot be told apart: {rate} of prompts for the first.")]


def judge_findings(c: Calibration) -> list[Finding]:
    """What a judge is worth, measured by people."""
    found, n = [], len(c.cases)
    if c.invalid:
        lost = len(c.invalid) / n
        tone: Tone = "bad" if lost > INVALID_SHARE else "watch"
        reasons = sorted({x.verdict.reason or "no reason given" for x in c.invalid})[:3]
        text = f"{c.judge} could not decide {len(c.invalid)} of {plural(n, 'pair')} ({'; '.join(reasons)}): they are left out, not counted as ties."
        found.append(Finding(tone, text, "Below, it is judged by the rest alone." if lost > INVALID_SHARE else ""))
    if c.accuracy is None:
        found.append(Finding("bad", f"{c.judge} cannot be measured: there is no pair on which most people decided and it did too."))
        return found
    chance = c.accuracy.low <= 0.5 <= c.accuracy.high
    text = f"{c.judge} chooses as most people do in {share(c.accuracy)} of {plural(c.accuracy.n, 'prompt')}"
    found.append(
        Finding("bad" if c.accuracy.high < 0.5 else "watch" if chance else "good", text + (": no better than a coin." if chance else "."))
    )
    if c.with_one_person is not None and c.two_people.value is not None:
        text = f"It shares one person's choice in {share(c.with_one_person)} of cases; another person does in {interval(c.two_people, percent)}."
        found.append(Finding("plain", text))
    if c.too_sure is not None:
        by = f"{100 * abs(c.too_sure.value):.0f} points"
        if c.too_sure.low > 0:
            found.append(
                Finding(
                    "watch",
                    f"It is too sure of itself: its confidence is {by} above the share of people on its side.",
                    "Scale its scores down before they are read as chances.",
                )
            )
        elif c.too_sure.high < 0:
            found.append(
                Finding("plain", f"It is less sure than it could be: its confidence is {by} below the share of people on its side.")
            )
        else:
            found.append(Finding("good", "Its confidence is what it should be, within the interval."))
    else:
        found.append(Finding("plain", "It gives no scores, so there is no confidence to check."))
    return found


def interval(a: Agreement, write: object = None) -> str:
    """A coefficient with its interval, where it has one.

    >>> interval(Agreement(0.5, 0.25, 0.75)), interval(Agreement(0.5))
    ('0.50 (0.25 to 0.75)', '0.50')
    """
    said = percent if write is percent else _two
    if a.value is None:
        return "–"
    return said(a.value) if a.low is None or a.high is None else f"{said(a.value)} ({said(a.low)} to {said(a.high)})"


def share(x: Interval | None) -> str:
    """
    >>> share(Interval(0.5, 0.25, 0.75, 8))
    '50 % (25 % to 75 %)'
    """
    return "–" if x is None else f"{percent(x.value)} ({percent(x.low)} to {percent(x.high)})"


def _two(x: float) -> str:
    return f"{x:.2f}".replace("-", "−")
