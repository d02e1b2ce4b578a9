"""Which of two sets of answers to the same prompts is better: win rate, scores and lengths, each with its interval.

Everything is paired by prompt. Ties count half; an invalid verdict is neither a tie nor a win, it is counted apart and left
out of the rates. Several answers to one prompt are averaged before intervals are made: the prompts are what is independent.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tether import stats
from tether.answers import Answer, same_question
from tether.errors import UserError
from tether.judges import Judge, Verdict, shuffled_sides
from tether.messages import Text

OUTCOMES = {"a": 1.0, "tie": 0.5, "b": 0.0}
POSITION_ALPHA = 0.01  # how unlikely the share of wins of the side shown first must be before it is pointed out


@dataclass(frozen=True)
class Pair:
    """One prompt with the answers of both sides; `swapped` when b was shown first."""

    prompt: Text
    a: Answer
    b: Answer
    swapped: bool
    verdict: Verdict
    weight: float = 1.0  # chance that these are the two answers, where a side chooses among samples


@dataclass(frozen=True)
class Comparison:
    name_a: str
    name_b: str
    judge: str
    seed: int
    pairs: list[Pair]

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(p.verdict.winner for p in self.pairs)
        return {k: found[k] for k in ("a", "b", "tie", "invalid")}

    @property
    def judged(self) -> list[Pair]:
        return [p for p in self.pairs if p.verdict.winner != "invalid"]

    @property
    def win_rate(self) -> stats.Interval | None:
        """Of a over b, over prompts, ties half, Wilson interval. None when no pair was judged."""
        pairs = self.judged
        if not pairs:
            return None
        rates = _per_prompt(pairs, [OUTCOMES[p.verdict.winner] for p in pairs])
        return stats.win_rate([min(1.0, max(0.0, r)) for r in rates])  # rounding must not leave 0..1

    @property
    def score_difference(self) -> stats.Interval | None:
        """Mean of a's score less b's, over prompts, bootstrap interval. None for judges that give no scores."""
        scored = [p for p in self.judged if p.verdict.score_a is not None and p.verdict.score_b is not None]
        if not scored:
            return None
        return self._difference(scored, [p.verdict.score_a or 0.0 for p in scored], [p.verdict.score_b or 0.0 for p in scored])

    def mean_score(self, side: str) -> float | None:
        scored = [(p, v) for p in self.judged if (v := p.verdict.score_a if side == "a" else p.verdict.score_b) is not None]
        return _mean([p for p, _ in scored], [v for _, v in scored]) if scored else None

    def lengths(self, side: str, unit: str = "words") -> list[float] | None:
        """Words, which mean the same for both sides; or "tokens", end tokens included, None where they are not known."""
        answers = [p.a if side == "a" else p.b for p in self.pairs]
        if unit == "words":
            return [float(len(x.text.split())) for x in answers]
        counts = [x.completion_tokens for x in answers]
        return None if None in counts else [float(c or 0) for c in counts]

    def length(self, unit: str = "words") -> tuple[float, float, stats.Interval] | None:
        """Mean of a, mean of b, and the difference with its interval."""
        a, b = self.lengths("a", unit), self.lengths("b", unit)
        return None if a is None or b is None else (_mean(self.pairs, a), _mean(self.pairs, b), self._difference(self.pairs, a, b))

    @property
    def longer_wins(self) -> tuple[int, int]:
        """In how many decided pairs of unequal length (words) the longer answer won, and how many there are."""
        gaps = [(p.verdict.winner, len(p.a.text.split()) - len(p.b.text.split())) for p in self.pairs]
        decided = [(winner, gap) for winner, gap in gaps if winner in ("a", "b") and gap]
        return sum((winner == "a") == (gap > 0) for winner, gap in decided), len(decided)

    @property
    def first_wins(self) -> tuple[int, int]:
        """In how many decided pairs the side shown first won, and how many there are: half, for a judge without a favourite place."""
        decided = [p for p in self.pairs if p.verdict.winner in ("a", "b")]
        return sum((p.verdict.winner == "a") != p.swapped for p in decided), len(decided)

    @property
    def position_matters(self) -> bool:
        """Whether the side shown first won so often, or so rarely, that chance is a poor explanation."""
        first, decided = self.first_wins
        if not decided:
            return False
        low, high = stats.wilson(first, decided, 1 - POSITION_ALPHA)
        return not low <= 0.5 <= high

    def cut(self, side: str) -> int | None:
        """Answers that ran into the length limit; None where the finish reasons are not known."""
        reasons = [(p.a if side == "a" else p.b).finish_reason for p in self.pairs]
        return None if None in reasons else sum(r == "length" for r in reasons)

    def _difference(self, pairs: Sequence[Pair], a: Sequence[float], b: Sequence[float]) -> stats.Interval:
        return stats.paired_difference(_per_prompt(pairs, a), _per_prompt(pairs, b), seed=self.seed)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: infinite ends of an interval (one prompt) are null."""
        return {
            "a": self.name_a,
            "b": self.name_b,
            "judge": self.judge,
            "seed": self.seed,
            "pairs": len(self.pairs),
            "prompts": len({same_question(p.prompt) for p in self.pairs}),
            "counts": self.counts,
            "win_rate": interval_as_dict(self.win_rate),
            "score": {"a": self.mean_score("a"), "b": self.mean_score("b"), "difference": interval_as_dict(self.score_difference)},
            "length": {unit: _length(self.length(unit)) for unit in ("words", "tokens")},
            "longer_wins": list(self.longer_wins),
            "cut": {"a": self.cut("a"), "b": self.cut("b")},
            "first_wins": list(self.first_wins),
        }

    def rows(self) -> list[dict[str, Any]]:
        """One row for each pair, in full."""
        return [
            {
                "prompt": p.prompt,
                "a": p.a.text,
                "b": p.b.text,
                "winner": p.verdict.winner,
                "score_a": p.verdict.score_a,
                "score_b": p.verdict.score_b,
                "reason": p.verdict.reason,
                "shown_first": "b" if p.swapped else "a",
                "weight": p.weight,
            }
            for p in self.pairs
        ]


def compare(
    judge: Judge,
    answers_a: Sequence[Answer],
    answers_b: Sequence[Answer],
    *,
    names: tuple[str, str] = ("a", "b"),
    seed: int = 0,
    chances: tuple[Sequence[float] | None, Sequence[float] | None] | None = None,
) -> Comparison:
    """Asks the judge about every pair, its sides shuffled by the seed, and turns the verdicts back.

    Pairs are made by prompt (`pair_up`). With `chances`, how likely each answer of a side is the one it gives (None: all alike), every
    answer of a meets every one of b and pairs weigh by their chance. Raises UserError when the two sides do not answer the same prompts.
    """
    if chances is None:
        pairs = [(*pair, 1.0) for pair in pair_up(answers_a, answers_b, names)]
    else:
        pairs = cross(answers_a, answers_b, chances, names)
    swaps = shuffled_sides(len(pairs), seed)
    shown = [(b, a) if swap else (a, b) for (_, a, b, _), swap in zip(pairs, swaps, strict=True)]
    prompts = [prompt for prompt, _, _, _ in pairs]
    verdicts = judge(prompts, [first.text for first, _ in shown], [second.text for _, second in shown])
    if len(verdicts) != len(pairs):
        raise UserError(f"judge '{judge.name}' returned {len(verdicts)} verdicts for {len(pairs)} pairs")
    judged = [
        Pair(prompt, a, b, swap, v.swapped() if swap else v, weight)
        for (prompt, a, b, weight), swap, v in zip(pairs, swaps, verdicts, strict=True)
    ]
    return Comparison(*names, judge.name, seed, judged)


def cross(
    a: Sequence[Answer],
    b: Sequence[Answer],
    chances: tuple[Sequence[float] | None, Sequence[float] | None],
    names: tuple[str, str] = ("a", "b"),
) -> list[tuple[Text, Answer, Answer, float]]:
    """Every answer of a with every one of b to the same prompt, and the chance of that pair; pairs without chance are left out.

    The chances of a prompt's pairs sum to 1: the two sides choose independently.
    """
    sides = []
    for answers, given in zip((a, b), chances, strict=True):
        by_prompt: defaultdict[str, list[tuple[Answer, float]]] = defaultdict(list)
        for i, x in enumerate(answers):
            by_prompt[same_question(x.prompt or "")].append((x, 1.0 if given is None else given[i]))
        sides.append(by_prompt)
    if alone := [(side, q) for side in (0, 1) for q in sides[side] if q not in sides[1 - side]]:
        missing, question = alone[0]
        raise UserError(
            f"{len(alone)} prompts are answered by one side alone; the first is {question[:60]!r}, which {names[1 - missing]} does not answer",
            remedy="Both sides must answer the same prompts.",
        )
    out = []
    for question, first in sides[0].items():
        second = sides[1][question]
        total = sum(c for _, c in first) * sum(c for _, c in second)
        out += [(x.prompt or "", x, y, c * d / total) for x, c in first for y, d in second if c * d > 0]
    return out


def pair_up(a: Sequence[Answer], b: Sequence[Answer], names: tuple[str, str] = ("a", "b")) -> list[tuple[Text, Answer, Answer]]:
    """Answers to the same prompt side by side, in the order of a.

    Several answers to one prompt pair in their order. Where one side holds no prompts, rows pair by their number.
    """
    if not a or not b:
        raise UserError("there are no answers", where=names[0] if not a else names[1])
    if any(x.prompt is None for x in (a[0], b[0])):
        if len(a) != len(b):
            raise UserError(
                f"{len(a)} and {len(b)} answers cannot be paired by their number",
                where=f"{names[0]}, {names[1]}",
                remedy="Give both files a prompt column, or equally many rows.",
            )
        return [(x.prompt or y.prompt or "", x, y) for x, y in zip(a, b, strict=True)]
    by_prompt: defaultdict[str, list[Answer]] = defaultdict(list)
    for y in b:
        by_prompt[same_question(y.prompt or "")].append(y)
    out: list[tuple[Text, Answer, Answer]] = []
    alone: list[tuple[str, Answer]] = []
    for x in a:
        partners = by_prompt[same_question(x.prompt or "")]
        if partners:
            out.append((x.prompt or "", x, partners.pop(0)))
        else:
            alone.append((names[1], x))
    alone += [(names[0], y) for left in by_prompt.values() for y in left]
    if alone:
        missing, first = alone[0]
        raise UserError(
            f"{len(alone)} answers have no partner; the first answers {same_question(first.prompt or '')[:60]!r}, which {missing} does not",
            where=str(first.source) if first.source else None,
            remedy="Both sides must answer the same prompts, equally often.",
        )
    return out


def _per_prompt(pairs: Sequence[Pair], values: Sequence[float]) -> list[float]:
    """One value for each prompt: the mean over its pairs, by their weights."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for p, value in zip(pairs, values, strict=True):
        entry = sums[same_question(p.prompt)]
        entry[0] += p.weight * value
        entry[1] += p.weight
    return [total / weight for total, weight in sums.values()]


def _mean(pairs: Sequence[Pair], values: Sequence[float]) -> float:
    return sum(p.weight * v for p, v in zip(pairs, values, strict=True)) / sum(p.weight for p in pairs)


def interval_as_dict(x: stats.Interval | None) -> dict[str, float | int | None] | None:
    """For JSON: an end that is infinite (one prompt) is null."""
    if x is None:
        return None
    low, high = (None if abs(v) == float("inf") else v for v in (x.low, x.high))
    return {"value": x.value, "low": low, "high": high, "n": x.n}


def _length(x: tuple[float, float, stats.Interval] | None) -> dict[str, Any] | None:
    return None if x is None else {"a": x[0], "b": x[1], "difference": interval_as_dict(x[2])}
