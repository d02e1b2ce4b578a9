"""A judge (or reward model) against the votes of people: how often it decides as they do, how sure it may be, where they differ.

Of every pair of answers the votes give a share for the first one (a tie, and both bad, is half). A judge's two scores are read as a
reward model's are: P(first is better) = 1 / (1 + exp(score of second - score of first)), Bradley and Terry. A pair that the judge
could not decide is invalid: an outcome of its own, never a tie and never a win.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from tether import stats
from tether.agreement import Agreement, percent
from tether.collect.ballots import Vote
from tether.collect.items import Item
from tether.collect.quality import SHARE, interval_as_dict, prompt_key, rated_pairs
from tether.errors import UserError
from tether.judges import Judge, Verdict, shuffled_sides
from tether.messages import Text, plain

OUTCOMES = {"a": 1.0, "tie": 0.5, "b": 0.0}
LOWEST = 0.5  # of the confidence in the side that it chose


@dataclass(frozen=True)
class Case:
    """Two answers of an item, what people and what the judge said of them. `people` and `chance` are shares for the first answer."""

    item: str
    answers: tuple[str, str]  # ids
    prompt: Text
    source: str
    verdicts: tuple[str, ...]  # of the people: first, second, tie, bad
    verdict: Verdict  # of the judge: "a" is the first answer

    @property
    def people(self) -> float:
        return sum(SHARE[v] for v in self.verdicts) / len(self.verdicts)

    @property
    def chance(self) -> float | None:
        """The judge's chance for the first answer; where it gives no scores, its verdict as 1, 0.5 or 0. None where it is invalid."""
        v = self.verdict
        if v.winner == "invalid":
            return None
        if v.score_a is None or v.score_b is None:
            return OUTCOMES[v.winner]
        return _sigmoid(v.score_a - v.score_b)

    @property
    def gap(self) -> float | None:
        return None if self.chance is None else abs(self.chance - self.people)

    def as_dict(self) -> dict[str, Any]:
        return {
            "item": self.item,
            "answers": list(self.answers),
            "source": self.source,
            "people": self.people,
            "votes": dict(Counter(self.verdicts)),
            "judge": self.verdict.winner,
            "chance": self.chance,
            "scores": [self.verdict.score_a, self.verdict.score_b],
            "reason": self.verdict.reason,
        }


@dataclass(frozen=True)
class Calibration:
    """What came of `calibrate`. Every interval is over prompts."""

    judge: str
    cases: list[Case]

    @property
    def judged(self) -> list[Case]:
        return [c for c in self.cases if c.verdict.winner != "invalid"]

    @property
    def invalid(self) -> list[Case]:
        return [c for c in self.cases if c.verdict.winner == "invalid"]

    @property
    def counts(self) -> dict[str, int]:
        """Of the pairs: agree, differ, tie (of the judge, where people decided), undecided (people, whatever the judge says), invalid."""
        found = Counter(self._outcome(c) for c in self.cases)
        return {k: found[k] for k in ("agree", "differ", "tie", "undecided", "invalid")}

    @staticmethod
    def _outcome(c: Case) -> str:
        if c.verdict.winner in ("invalid", "tie") or c.people == 0.5:
            return "invalid" if c.verdict.winner == "invalid" else "undecided" if c.people == 0.5 else "tie"
        return "agree" if (c.verdict.winner == "a") == (c.people > 0.5) else "differ"

    @cached_property
    def accuracy(self) -> stats.Interval | None:
        """Share of the pairs on which most people decided and the judge chose their side; its ties count half, invalid ones not at all."""
        decided = [c for c in self.judged if c.people != 0.5]
        if not decided:
            return None
        right = [0.5 if c.verdict.winner == "tie" else float(self._outcome(c) == "agree") for c in decided]
        return stats.win_rate(right, prompts=[_key(c) for c in decided])

    @cached_property
    def with_one_person(self) -> stats.Interval | None:
        """Share of single decided votes that the judge shares, averaged by pair: what to hold against two people's agreement."""
        found = [(_key(c), x) for c in self.judged if (x := _with_votes(c)) is not None]
        return stats.win_rate([x for _, x in found], prompts=[k for k, _ in found]) if found else None

    @cached_property
    def two_people(self) -> Agreement:
        """How often two people who both decided chose the same answer."""
        decided = [[v for v in c.verdicts if v in ("first", "second")] for c in self.cases]
        return percent(decided, groups=[_key(c) for c in self.cases])

    @cached_property
    def confident(self) -> list[tuple[str, float, float]]:
        """(prompt, confidence in the side it chose, share of people for that side) where the judge gave two different scores."""
        found = []
        for c in self.judged:
            if c.verdict.score_a is None or c.verdict.score_b is None or c.verdict.winner == "tie":
                continue
            first = c.verdict.winner == "a"
            chance = c.chance or 0.0
            found.append((_key(c), max(LOWEST, chance if first else 1 - chance), c.people if first else 1 - c.people))
        return found

    @cached_property
    def bins(self) -> list[dict[str, Any]]:
        return stats.calibration_bins([p for _, p, _ in self.confident], [y for _, _, y in self.confident], bins=5, low=LOWEST)

    @property
    def error(self) -> float | None:
        """Expected calibration error over `bins`. Of few pairs it is above 0 by chance alone."""
        return stats.calibration_error(self.bins)

    @cached_property
    def too_sure(self) -> stats.Interval | None:
        """Mean confidence less the share of people on its side: above 0 it claims more than it knows."""
        if not self.confident:
            return None
        prompts = [k for k, _, _ in self.confident]
        return stats.paired_difference([p for _, p, _ in self.confident], [y for _, _, y in self.confident], prompts=prompts)

    def worst(self, n: int) -> list[Case]:
        """Where judge and people are furthest apart, those with more votes first."""
        apart = [c for c in self.judged if (c.gap or 0.0) > 0]
        return sorted(apart, key=lambda c: (-(c.gap or 0.0), -len(c.verdicts), c.item, c.answers))[:n]

    def as_dict(self, worst: int = 10) -> dict[str, Any]:
        return {
            "judge": self.judge,
            "pairs": len(self.cases),
            "counts": self.counts,
            "accuracy": interval_as_dict(self.accuracy),
            "with_one_person": interval_as_dict(self.with_one_person),
            "two_people": asdict(self.two_people),
            "too_sure": interval_as_dict(self.too_sure),
            "calibration": self.bins,
            "calibration_error": self.error,
            "worst": [c.as_dict() for c in self.worst(worst)],
            "invalid": [c.as_dict() for c in self.invalid],
        }


def calibrate(judge: Judge, items: Mapping[str, Item], votes: Sequence[Vote], *, seed: int = 0) -> Calibration:
    """Ask the judge about every pair of answers that people voted on, its sides shuffled by `seed`.

    UserError where nobody voted, and where the judge does not answer once for each pair.
    """
    rated = rated_pairs(items, [v for v in votes if v.counts])
    if not rated:
        raise UserError("there is no vote to hold the judge against", remedy="Collect some with `tether collect`.")
    places = list(rated)
    swapped = shuffled_sides(len(places), seed)
    prompts = [items[i].prompt for i, _, _ in places]
    texts = [(items[i].answers[a].text, items[i].answers[b].text) for i, a, b in places]
    shown = [(b, a) if s else (a, b) for (a, b), s in zip(texts, swapped, strict=True)]
    said = judge(prompts, [a for a, _ in shown], [b for _, b in shown])
    if len(said) != len(places):
        raise UserError(f"judge '{judge.name}' returned {len(said)} verdicts for {len(places)} pairs", remedy="Return one for each.")
    cases = []
    for (item_id, i, j), verdict, s in zip(places, said, swapped, strict=True):
        item = items[item_id]
        ids = (item.answers[i].id, item.answers[j].id)
        by = tuple(rated[item_id, i, j].values())
        cases.append(Case(item_id, ids, item.prompt, item.source, by, verdict.swapped() if s else verdict))
    return Calibration(judge.name, cases)


def columns(items: Mapping[str, Item]) -> dict[str, dict[str, Any]]:
    """What a reward by name is given beside prompt and answer: the item's own columns, by question."""
    return {prompt_key(item): item.extra for item in items.values()}


def _with_votes(c: Case) -> float | None:
    decided = [v for v in c.verdicts if v in ("first", "second")]
    if not decided:
        return None
    if c.verdict.winner == "tie":
        return 0.5
    return sum(v == ("first" if c.verdict.winner == "a" else "second") for v in decided) / len(decided)


def _key(c: Case) -> str:
    return plain(c.prompt).strip()


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
