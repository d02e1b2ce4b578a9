"""What the votes on an item come to: counts for a pair of its answers, who wins by which rule, and a ranking of all of them.

An opinion prefers one answer of a pair, or ties them, or finds both bad. A ranking says nothing about a pair of which it left an
answer unranked. Undone votes, repeats and skips are no opinions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tether.collect.ballots import Ranks, Vote

# A margin by how much better the answer was said to be (Touvron et al. 2023, arXiv:2307.09288, table 27, the small margin). Where
# nobody was asked a preference counts as clear.
MARGINS = {1: 1 / 3, 2: 2 / 3, 3: 1.0, None: 2 / 3}

Undecided = Literal["tie", "bad", "undecided", "no opinion"]


@dataclass(frozen=True)
class Counts:
    """Opinions on two answers, a and b; `margin` is the mean of signed margins, above 0 towards a. `voters` names who gave them."""

    a: int
    b: int
    ties: int
    bad: int
    margin: float
    voters: tuple[str, ...]

    @property
    def opinions(self) -> int:
        return self.a + self.b + self.ties + self.bad

    @property
    def share(self) -> float:
        """Of a win for a: ties and both bad are half a win. Half without opinions."""
        return (self.a + (self.ties + self.bad) / 2) / self.opinions if self.opinions else 0.5

    def swapped(self) -> Counts:
        return Counts(self.b, self.a, self.ties, self.bad, -self.margin, self.voters)


def count(votes: Sequence[Vote], a: int, b: int) -> Counts:
    """Opinions of `votes`, all on one item, on its answers at the places a and b."""
    wins, losses, ties, bad, margins, voters = 0, 0, 0, 0, [], []
    for vote in votes:
        ranks = vote.standing
        if not vote.counts or (ranks is not None and (ranks[a] is None or ranks[b] is None)):
            continue
        sign = 0 if ranks is None else _sign(ranks, a, b)
        wins, losses = wins + (sign > 0), losses + (sign < 0)
        bad, ties = bad + (ranks is None), ties + (ranks is not None and sign == 0)
        margins.append(sign * MARGINS[vote.strength])
        voters.append(vote.annotator)
    return Counts(wins, losses, ties, bad, sum(margins) / len(margins) if margins else 0.0, tuple(voters))


def _sign(ranks: Ranks, a: int, b: int) -> int:
    one, other = ranks[a], ranks[b]
    assert one is not None
    assert other is not None
    return (one < other) - (one > other)


def by_majority(counts: Counts) -> Literal["a", "b"] | Undecided:
    """What more than half of the opinions say.

    >>> by_majority(Counts(2, 1, 0, 0, 0.2, ())), by_majority(Counts(1, 1, 0, 0, 0.0, ())), by_majority(Counts(1, 0, 2, 0, 0.2, ()))
    ('a', 'undecided', 'tie')
    """
    outcomes: dict[Literal["a", "b"] | Undecided, int] = {"a": counts.a, "b": counts.b, "tie": counts.ties, "bad": counts.bad}
    if not counts.opinions:
        return "no opinion"
    return next((name for name, n in outcomes.items() if 2 * n > counts.opinions), "undecided")


def by_share(counts: Counts) -> Literal["a", "b"] | Undecided:
    """Whom the larger share of wins favours; undecided at exactly half, or what all of the opinions were."""
    if counts.share != 0.5:
        return "a" if counts.share > 0.5 else "b"
    if not counts.opinions:
        return "no opinion"
    return "tie" if counts.ties == counts.opinions else "bad" if counts.bad == counts.opinions else "undecided"


def rank_by_majority(votes: Sequence[Vote], answers: int) -> Ranks:
    """Ranks by majorities won minus lost over all pairs (Copeland 1951); None where nobody compared the answer.

    Of one vote it is the vote itself, of two answers the majority between them; equal scores share a rank.
    """
    score: list[int | None] = [None] * answers
    for a in range(answers):
        met = [c for b in range(answers) if b != a and (c := count(votes, a, b)).opinions]
        if met:
            results = [by_majority(c) for c in met]
            score[a] = results.count("a") - results.count("b")
    return dense(score)


def win_shares(votes: Sequence[Vote], answers: int) -> list[float | None]:
    """Share of duels won by each answer, over its opinions on all pairs; None where nobody compared it."""
    shares: list[float | None] = []
    for a in range(answers):
        met = [count(votes, a, b) for b in range(answers) if b != a]
        n = sum(c.opinions for c in met)
        shares.append(sum(c.share * c.opinions for c in met) / n if n else None)
    return shares


def dense(scores: Sequence[float | None]) -> Ranks:
    """Higher is better, equal scores share a rank, and no rank is left out.

    >>> dense([1, 3, None, 1])
    (2, 1, None, 2)
    """
    levels = sorted({s for s in scores if s is not None}, reverse=True)
    return tuple(None if s is None else levels.index(s) + 1 for s in scores)


def all_bad(votes: Sequence[Vote]) -> bool:
    """Whether more than half of the opinions find no answer good."""
    opinions = [v for v in votes if v.counts]
    return 2 * sum(v.outcome == "bad" for v in opinions) > len(opinions)
