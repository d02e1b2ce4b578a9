"""Votes out of files: earlier ones of Tether's desks, and those of other tools.

What a file says decides; what it does not say is not made up: an order that is not known stays empty, so that no share of left sides
is computed from it. A reply of a judge that holds no clear verdict is invalid: it is counted, and never a tie and never a win.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from tether import preferences, rankings
from tether.collect.ballots import OUTCOMES, Outcome, Ranks
from tether.collect.imported import ImportedVote
from tether.collect.items import Item, listed, make_item, models_of, sides
from tether.errors import UserError
from tether.files import Loaded, Problem
from tether.messages import BadRow
from tether.rewards.verdicts import parse_verdict
from tether.shapes import PROMPT, Fields, Shape, load_rows

MAX_INVALID = 0.1  # share of a file's replies of judges


def load_votes(path: str | list[str], *, max_invalid: float = MAX_INVALID) -> Loaded[ImportedVote]:
    """Votes in any shape of docs/export.md: of a desk, of several annotators in columns (PandaLM), one verdict or ranking with its
    annotator in each row, pairs with their annotator, replies of a judge.

    Raises UserError when more than `max_invalid` of a file's judge replies are invalid: a judge that was down is no judge.
    """

    def check(votes: list[ImportedVote], problems: list[Problem]) -> None:
        invalid = [p for p in problems if p.kind == "invalid_verdict"]
        replies = len(invalid) + sum("reply" in v.extra for v in votes)
        if len(invalid) > max_invalid * replies:
            words = f"{len(invalid)} of {replies} replies of the judge are no verdict, above the limit of {max_invalid:.0%}"
            raise UserError(words, where=str(invalid[0].source), remedy="Was the judge down? Ask it again; no vote was taken.")

    return load_rows(path, SHAPES, "votes", check)


# -- what a verdict says -----------------------------------------------------------------------------------------------

STRENGTHS = {"slightly": 1, "": 2, "clearly": 2, "much": 3, "significantly": 3}
SIDES: dict[int, Outcome] = {0: "tie", 1: "first", 2: "second"}


def read_verdict(value: Any, name: str, *, zero_is_tie: bool = False) -> tuple[Outcome, int | None]:
    """(outcome, strength) of what a tool wrote: 1 or 2, a or b, "a-is-slightly-better", "tie", "tie (bothbad)". BadRow otherwise.

    >>> read_verdict("b-is-slightly-better", "preference"), read_verdict("tie (bothbad)", "winner"), read_verdict(2, "label")
    (('second', 1), ('bad', None), ('second', None))
    """
    if isinstance(value, str):
        if re.search(r"both[ _-]?bad", value, re.IGNORECASE):
            return "bad", None
        word = re.fullmatch(r"([ab])-is-(?:(slightly|clearly|much|significantly)-)?better", value.strip().lower())
        if word:
            return ("first" if word.group(1) == "a" else "second"), STRENGTHS[word.group(2) or ""]
    return SIDES[preferences.which(value, name, zero_is_tie=zero_is_tie)], None


def judge_outcome(reply: str | None, swapped: str | None = None, *, both: bool = False) -> Outcome | None:
    """What a judge's reply says of the first answer shown as A; with `both`, the reply to the swapped order counts as much.

    None is invalid: no clear verdict, no reply, or one of two orders without one. Two orders that contradict each other are a tie.

    >>> judge_outcome("[[A]]"), judge_outcome("HTTP 503"), judge_outcome("[[A]]", "[[A]]", both=True), judge_outcome("[[A]]", None, both=True)
    ('first', None, 'tie', None)
    """
    said: list[Outcome | None] = [VERDICTS[parse_verdict(reply or "")]]
    if both:
        exchanged: dict[Outcome | None, Outcome | None] = {"first": "second", "second": "first"}
        other = VERDICTS[parse_verdict(swapped or "")]
        said.append(exchanged.get(other, other))
    if None in said:
        return None
    return said[0] if len(set(said)) == 1 else "tie"


VERDICTS: dict[str, Outcome | None] = {"A": "first", "B": "second", "tie": "tie", "invalid": None}


# -- shapes ------------------------------------------------------------------------------------------------------------

ANNOTATOR = ("annotator", "evaluator", "rater", "annotator_id", "worker", "judge")
TIMES = ("voted_at", "timestamp", "created_at", "tstamp")
REASONS = ("reason", "comment", "comments")
REPLIES = ("reply", "raw", "judgement", "judgment")


def _annotator(fields: Fields, name: str) -> str:
    value = fields.get(name)
    who = " ".join(str(value).split()) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
    if not who:
        raise BadRow("no_annotator", f"who voted is not said, got {value!r:.40}", "Write a name or a number.", field=name)
    return who[:80]


def _when(fields: Fields) -> str | None:
    """UTC; a time without a zone is taken as UTC, and seconds since 1970 are read as such."""
    for name in TIMES:
        value = fields.get(name)
        try:
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                moment = datetime.fromtimestamp(value, timezone.utc)
            elif isinstance(value, str) and value:
                moment = datetime.fromisoformat(value.replace("Z", "+00:00"))
                moment = moment.replace(tzinfo=timezone.utc) if moment.tzinfo is None else moment.astimezone(timezone.utc)
            else:
                continue
        except (ValueError, OverflowError, OSError):
            raise BadRow("bad_time", f"{value!r:.40} is no time", "Write it as 2025-01-31 12:00:00.", field=name) from None
        return moment.isoformat(timespec="milliseconds")
    return None


def _said(fields: Fields) -> str:
    return next((v for name in REASONS if isinstance(v := fields.get(name), str)), "")[:4000]


def _of_several(fields: Fields, prompt_name: str, one: str, other: str, first_column: str) -> list[ImportedVote]:
    """annotator1, annotator2, ...: 1 first, 2 second, 0 tie. The order that they saw is not said."""
    names = [n for n in fields.row.data if re.fullmatch(r"annotator_?\d+", n)]
    outcomes = [read_verdict(fields.get(n), n, zero_is_tie=True) for n in names]
    item = sides(fields, prompt_name, one, other)
    return [ImportedVote(item, n, o, None, s, source=item.source) for n, (o, s) in zip(names, outcomes, strict=True)]


def _verdict(fields: Fields, prompt_name: str, one: str, other: str, verdict_name: str, who: str) -> list[ImportedVote]:
    """Columns a and b are taken as the sides that were shown."""
    annotator, when, reason = _annotator(fields, who), _when(fields), _said(fields)
    outcome, strength = read_verdict(fields.get(verdict_name), verdict_name)
    item = sides(fields, prompt_name, one, other)
    order = (0, 1) if one.endswith("a") else ()
    kept, item = _kept(item)
    return [ImportedVote(item, annotator, outcome, None, strength, reason, order, None, when, source=item.source, extra=kept)]


def _kept(item: Item) -> tuple[dict[str, Any], Item]:
    """The row's other columns belong to the vote, not to the item, which other rows share."""
    return item.extra, Item(item.id, item.prompt, item.answers, item.source, {})


def _reply(fields: Fields, prompt_name: str, one: str, other: str, reply_name: str) -> list[ImportedVote]:
    """A judge's reply, with the first answer as A; `reply_swapped` is its reply with the first answer as B."""
    who = next((n for n in ANNOTATOR if n in fields.row.data), None)
    annotator = "judge" if who is None else _annotator(fields, who)
    reply, both = fields.get(reply_name), f"{reply_name}_swapped" in fields.row.data
    swapped = fields.get(f"{reply_name}_swapped") if both else None
    texts = [r if isinstance(r, str) else None for r in (reply, swapped)]
    outcome = judge_outcome(texts[0], texts[1], both=both)
    if outcome is None:
        words = f"no verdict in the judge's reply {reply!r:.60}" + (f" or in the swapped one {swapped!r:.60}" if both else "")
        raise BadRow("invalid_verdict", words, "It is counted as invalid, and is no vote.", field=reply_name, action="drop")
    kept, item = _kept(sides(fields, prompt_name, one, other))
    extra = {**kept, "reply": reply, **({"reply_swapped": swapped} if both else {})}
    return [ImportedVote(item, annotator, outcome, order=() if both else (0, 1), source=item.source, extra=extra)]


def _pair(fields: Fields, prompt_name: str, chosen: str, rejected: str, who: str) -> list[ImportedVote]:
    """The exported pairs of single votes, or any pairs that say who chose."""
    annotator, when, reason = _annotator(fields, who), _when(fields), _said(fields)
    strength, models = _strength(fields), models_of(fields, "chosen", "rejected")
    ids = [fields.get("chosen_id"), fields.get("rejected_id")]
    shape = next(s for s in preferences.PAIRS if s.needs == (PROMPT, preferences.BETTER, preferences.WORSE))
    found = []
    for p in shape.read(fields, prompt_name, chosen, rejected):
        given = [str(i) for i in ids] if all(ids) else None
        item = make_item(p.prompt, [p.chosen, p.rejected], models=models, ids=given, source=str(p.source))
        found.append(
            ImportedVote(item, annotator, "first", None, strength, reason, (), None, when, source=str(p.source), extra=dict(p.extra))
        )
    return found


def _strength(fields: Fields) -> int | None:
    value = fields.get("strength")
    if value is not None and (isinstance(value, bool) or value not in (1, 2, 3)):
        raise BadRow("bad_strength", f"the strength is 1, 2 or 3, got {value!r:.40}", "Leave it out, or mend it.", field="strength")
    return None if value is None else int(value)


def _ranked(fields: Fields, prompt_name: str, answers: str, ranks_name: str, who: str) -> list[ImportedVote]:
    annotator, when, reason = _annotator(fields, who), _when(fields), _said(fields)
    ranks = _read_ranks(fields.get(ranks_name), ranks_name)
    kept, item = _kept(listed(fields, prompt_name, answers))
    _one_each(ranks, item, ranks_name)
    return [ImportedVote(item, annotator, "ranking", ranks, None, reason, (), None, when, source=item.source, extra=kept)]


def _read_ranks(value: Any, name: str) -> Ranks:
    if not isinstance(value, list) or not all(r is None or (isinstance(r, int) and not isinstance(r, bool) and r >= 1) for r in value):
        words = f"ranks are a list of whole numbers from 1, null where an answer is not ranked, got {value!r:.60}"
        raise BadRow("not_a_rank", words, "1 is the best; equal ranks are a tie.", field=name)
    if not any(r is not None for r in value):
        raise BadRow("no_rank", "no answer is ranked", "Remove the row.", field=name, action="drop")
    return tuple(value)


def _one_each(ranks: Sequence[Any], item: Item, name: str) -> None:
    if len(ranks) != len(item.answers):
        words = f"{len(ranks)} ranks for {len(item.answers)} answers"
        raise BadRow("ranks_missing", words, "Give one for each answer; null where it was not ranked.", field=name)


def _of_a_desk(fields: Fields, prompt_name: str, answers: str, outcome_name: str, who: str) -> list[ImportedVote]:
    """A row of `tether export --as votes`: nothing is lost on the way."""
    annotator, when, reason, strength = _annotator(fields, who), _when(fields), _said(fields), _strength(fields)
    outcome, ranks, order = fields.get(outcome_name), fields.get("ranks"), fields.get("order") or []
    given, columns, seconds = fields.get("item"), fields.get("columns") or {}, fields.number("seconds")
    rest = {name: fields.get(name) for name in ("shown_at", "repeat", "source", "vote", "chosen_by", "vote_columns")}
    item = listed(fields, prompt_name, answers)
    texts = [item.answer(i) for i in range(len(item.answers))]
    item = make_item(
        item.prompt,
        texts,
        models=[a.model for a in item.answers],
        ids=[a.id for a in item.answers],
        source=rest["source"] or item.source,
        extra=columns,
        item_id=given if isinstance(given, str) else None,
    )
    if outcome not in OUTCOMES or (outcome in ("first", "second") and len(item.answers) != 2):
        raise BadRow("bad_verdict", f"{outcome!r:.40} is no outcome", f"One of {', '.join(OUTCOMES)}.", field=outcome_name)
    if outcome == "ranking":
        ranks = _read_ranks(ranks, "ranks")
        _one_each(ranks, item, "ranks")
    known = {a.id: i for i, a in enumerate(item.answers)}
    if order and sorted(map(str, order)) != sorted(known):
        raise BadRow("bad_order", "the order does not name each answer once", "Leave it out where it is not known.", field="order")
    return [
        ImportedVote(
            item,
            annotator,
            outcome,
            ranks if outcome == "ranking" else None,
            strength,
            reason,
            tuple(known[str(i)] for i in order),
            rest["shown_at"],
            when,
            seconds,
            bool(rest["repeat"]),
            str(fields.source),
            rest["vote_columns"] or {},
        )
    ]


SHAPES: list[Shape[ImportedVote]] = [
    Shape("votes of a desk", (PROMPT, ("answers",), ("outcome",), ("annotator",)), _of_a_desk),
    *(
        Shape(f"two answers with {what}", (PROMPT, (a,), (b,), *needs), read)
        for a, b in preferences.SIDES
        for what, needs, read in (
            ("a judge's reply", (REPLIES,), _reply),
            ("votes of several annotators", (("annotator1", "annotator_1"),), _of_several),
            ("an annotator's verdict", (preferences.VERDICTS["verdict"], ANNOTATOR), _verdict),
        )
    ),
    Shape("an annotator's ranking", (PROMPT, rankings.ANSWERS, rankings.RANKS, ANNOTATOR), _ranked),
    Shape("an annotator's pairs", (PROMPT, preferences.BETTER, preferences.WORSE, ANNOTATOR), _pair),
]
