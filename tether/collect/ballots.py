"""`Ballot`, what an annotator chose on the page; `Vote`, the same as it is kept: about the answers, never about the sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tether.errors import UserError

Choice = Literal["left", "right", "tie", "bad", "skip", "ranking"]
Outcome = Literal["first", "second", "tie", "bad", "skip", "ranking"]
Ranks = tuple[int | None, ...]
CHOICES: tuple[str, ...] = get_args(Choice)
OUTCOMES: tuple[str, ...] = get_args(Outcome)
MAX_REASON = 4000  # characters


class BadBallot(UserError):
    """What was sent is no choice that the page offered. Nothing was written."""


class AlreadyVoted(UserError):
    """This page was voted on before, and the vote was another one."""


@dataclass(frozen=True)
class Ballot:
    """`ranks` are as shown, left or topmost first: 1 is the best, equal ranks are a tie, None is not ranked."""

    assignment: int
    choice: Choice
    ranks: Ranks | None = None
    strength: int | None = None  # 1 slightly, 2 clearly, 3 much better
    reason: str = ""


@dataclass(frozen=True)
class Vote:
    """`outcome` and `ranks` are about item.answers as stored. `order` is how they were shown: order[0] was left or topmost.

    Of an imported vote `order` is () and `shown_at` and `seconds` are None where the file does not say.
    """

    id: int
    assignment: int
    item: str
    annotator: str
    outcome: Outcome
    ranks: Ranks | None  # aligned with item.answers; only where outcome is "ranking"
    strength: int | None
    reason: str
    order: tuple[int, ...]
    shown_at: str | None  # UTC, ISO 8601
    voted_at: str | None
    seconds: float | None
    repeat: bool  # shown to this annotator a second time, to measure self-consistency
    chosen_by: str  # "random", "uncertain" or "imported"
    undone: bool = False
    source: str = ""  # file and line of an imported vote
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        """Whether it is an opinion on the item: not undone, not a repeat, not a skip."""
        return not self.undone and not self.repeat and self.outcome != "skip"

    @property
    def standing(self) -> Ranks | None:
        """Ranks of the answers whatever the kind of vote; None where no answer is above another or equal: "bad" and "skip"."""
        return standing(self.outcome, self.ranks)


def standing(outcome: Outcome, ranks: Ranks | None) -> Ranks | None:
    """
    >>> standing("second", None), standing("ranking", (2, None, 1)), standing("bad", None)
    ((2, 1), (2, None, 1), None)
    """
    if outcome == "ranking":
        return ranks
    return {"first": (1, 2), "second": (2, 1), "tie": (1, 1)}.get(outcome)


@dataclass(frozen=True)
class Opinion:
    """A ballot turned from sides to answers."""

    outcome: Outcome
    ranks: Ranks | None
    strength: int | None
    reason: str


def opinion_of(ballot: Ballot, order: Sequence[int], *, strength_asked: bool = True) -> Opinion:
    """What the ballot says about the answers, which were shown in `order`. BadBallot where it says nothing clear.

    A strength is kept for left and right alone. Bytes that are no text are replaced in a reason.

    >>> opinion_of(Ballot(1, "left"), (1, 0)).outcome
    'second'
    >>> opinion_of(Ballot(1, "ranking", ranks=(1, 3, 2)), (2, 0, 1)).ranks
    (3, 2, 1)
    """
    choice, ranks = ballot.choice, ballot.ranks
    if choice not in CHOICES:
        raise BadBallot(f"there is no choice {choice!r:.40}", remedy=f"The choices are: {', '.join(CHOICES)}.")
    if choice in ("left", "right") and len(order) != 2:
        raise BadBallot(f"{choice} is no choice among {len(order)} answers", remedy="Rank them.")
    strength = _strength(ballot, strength_asked)
    if not isinstance(ballot.reason, str) or len(ballot.reason) > MAX_REASON:
        raise BadBallot(f"a reason is text of at most {MAX_REASON} characters", remedy="Shorten it.")
    reason = ballot.reason.encode("utf-8", "replace").decode("utf-8").strip()
    if choice == "ranking":
        return Opinion("ranking", _ranks(ranks, order), None, reason)
    if ranks is not None:
        raise BadBallot(f"ranks go with the choice ranking, not with {choice}", remedy="Leave them out.")
    if choice in ("left", "right"):
        place = order[0 if choice == "left" else 1]
        return Opinion("first" if place == 0 else "second", None, strength, reason)
    return Opinion("tie" if choice == "tie" else "bad" if choice == "bad" else "skip", None, None, reason)


def _strength(ballot: Ballot, asked: bool) -> int | None:
    value = ballot.strength
    if value is None:
        return None
    if isinstance(value, bool) or value not in (1, 2, 3):
        raise BadBallot(f"the strength is 1, 2 or 3, got {value!r:.40}", remedy="1 is slightly, 2 clearly, 3 much better.")
    if not asked:
        raise BadBallot("this desk does not ask how much better an answer is", remedy="Leave the strength out.")
    return int(value) if ballot.choice in ("left", "right") else None


def _ranks(shown: Sequence[int | None] | None, order: Sequence[int]) -> Ranks:
    """Ranks by the stored place of each answer, out of ranks by the place where it was shown."""
    n = len(order)
    if shown is None or len(shown) != n:
        words = f"{0 if shown is None else len(shown)} ranks for {n} answers"
        raise BadBallot(words, remedy="Give one for each, in the order shown; an answer may be left unranked by None.")
    for rank in shown:
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= n):
            raise BadBallot(f"a rank is a whole number from 1 to {n}, got {rank!r:.40}", remedy="1 is the best; equal ranks are a tie.")
    if 1 not in shown:
        raise BadBallot("no answer has rank 1", remedy="The best answer has rank 1; skip the item if none can be ranked.")
    stored: list[int | None] = [None] * n
    for place, rank in zip(order, shown, strict=True):
        stored[place] = rank
    return tuple(stored)
