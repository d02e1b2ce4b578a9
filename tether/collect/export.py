"""Votes of a desk as rows to train on: pairs, labelled answers, rankings; and the votes themselves, to be kept.

Each row says where it comes from: item, answers, models, how the votes stood and how many people gave them, the file of the item. An
item that gives no row is counted under the reason why.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tether.collect import tally
from tether.collect.ballots import Ranks, Vote
from tether.collect.items import Item
from tether.errors import UserError
from tether.messages import plain

Rule = Literal["majority", "all", "soft"]
Row = dict[str, Any]


@dataclass
class Exported:
    """`rows`, each with its prompt; `without`: how many items (or pairs of a ranking) gave none, by reason; `notes` in sentences."""

    rows: list[Row] = field(default_factory=list)
    without: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


def export(items: Mapping[str, Item], votes: Sequence[Vote], kind: str, rule: str = "majority", *, min_votes: int = 1) -> Exported:
    """Rows of one kind by one rule; items with fewer than `min_votes` opinions are left out and counted."""
    if kind not in KINDS:
        raise UserError(f"there is no kind {kind!r}", where="--as", remedy=f"One of {', '.join(KINDS)}.")
    if rule not in ("majority", "all", "soft"):
        raise UserError(f"there is no rule {rule!r}", where="--votes", remedy="One of majority, all, soft.")
    if kind == "feedback" and rule == "soft":
        remedy = "Use majority or all; soft goes with preferences and rankings."
        raise UserError("a labelled answer is good or bad, there is no label between", where="--votes soft", remedy=remedy)
    out = Exported()
    if kind == "votes":
        out.rows = [_vote_row(items[v.item], v) for v in votes if not v.undone]
        return out
    by_item: defaultdict[str, list[Vote]] = defaultdict(list)
    for vote in votes:
        if not vote.undone and not vote.repeat:
            by_item[vote.item].append(vote)
    for item in items.values():
        given = by_item[item.id]
        opinions = [v for v in given if v.counts]
        if not opinions:
            out.without["skipped" if given else "no votes"] += 1
        elif len(opinions) < min_votes:
            out.without[f"fewer than {min_votes} votes"] += 1
        else:
            for part in [[v] for v in opinions] if rule == "all" else [opinions]:
                KINDS[kind](item, part, rule, out)
    if kind == "feedback":
        _note_contradictions(out)
    return out


# -- preferences -------------------------------------------------------------------------------------------------------


def _preferences(item: Item, votes: list[Vote], rule: str, out: Exported) -> None:
    decide = tally.by_share if rule == "soft" else tally.by_majority
    for i, j in itertools.combinations(range(len(item.answers)), 2):
        counts = tally.count(votes, i, j)
        result = decide(counts)
        if result not in ("a", "b"):
            out.without["not ranked" if result == "no opinion" else result] += 1
            continue
        better, worse, counts = (i, j, counts) if result == "a" else (j, i, counts.swapped())
        soft = {"margin": max(0.0, counts.margin), "soft_label": counts.share} if rule == "soft" else {}
        chosen, rejected = item.answers[better], item.answers[worse]
        if (fault := _unusable(chosen.text, rejected.text)) is not None:
            out.without[fault] += 1
            continue
        out.rows.append(
            {
                "prompt": item.prompt,
                "chosen": item.answer(better),
                "rejected": item.answer(worse),
                **soft,
                "item": item.id,
                "chosen_id": chosen.id,
                "rejected_id": rejected.id,
                "chosen_model": chosen.model,
                "rejected_model": rejected.model,
                **_told(votes, rule, {"chosen": counts.a, "rejected": counts.b, "tie": counts.ties, "bad": counts.bad}, counts.voters),
                **_origin(item),
            }
        )


def _unusable(better: str, worse: str) -> str | None:
    """Why there is nothing to learn from a pair, whatever people said of it: training would drop it."""
    return "the better answer is empty" if not better.strip() else "both answers read the same" if better == worse else None


def _told(votes: list[Vote], rule: str, counted: Mapping[str, int], voters: Sequence[str]) -> Row:
    """How the votes stood, or of a single vote everything about it."""
    if rule != "all":
        return {"votes": dict(counted), "annotators": len(set(voters))}
    (vote,) = votes
    return {
        "vote": vote.id,
        "annotator": vote.annotator,
        "annotators": 1,
        "strength": vote.strength,
        "reason": vote.reason,
        "voted_at": vote.voted_at,
        "chosen_by": vote.chosen_by,
    }


def _origin(item: Item) -> Row:
    return {"source": item.source, **({"columns": item.extra} if item.extra else {})}


# -- labelled answers --------------------------------------------------------------------------------------------------


def _feedback(item: Item, votes: list[Vote], rule: str, out: Exported) -> None:
    """Of two answers the better is good and the worse bad; of several the best and the worst, for those between are neither."""
    n = len(item.answers)
    if tally.all_bad(votes):
        labels: dict[int, bool] = dict.fromkeys(range(n), False)
    else:
        ranks = tally.rank_by_majority(votes, n)
        ranked = [r for r in ranks if r is not None]
        if len(set(ranked)) < 2:
            out.without[_why_level(votes, n)] += 1
            return
        ends = {min(ranked): True, max(ranked): False}
        labels = {i: ends[r] for i, r in enumerate(ranks) if r in ends}
        if middle := n - len(labels):
            out.without["neither best nor worst"] += middle
        texts = {label: {item.answers[i].text for i in labels if labels[i] is label} for label in (True, False)}
        if (fault := next((f for a in texts[True] for b in texts[False] if (f := _unusable(a, b)) is not None), None)) is not None:
            out.without[fault] += 1
            return
    counted: Counter[str] = Counter(v.outcome for v in votes)
    for i, label in labels.items():
        answer = item.answers[i]
        out.rows.append(
            {
                "prompt": item.prompt,
                "completion": item.answer(i),
                "label": label,
                "item": item.id,
                "answer_id": answer.id,
                "model": answer.model,
                **_told(votes, rule, _by_answer(item, counted), [v.annotator for v in votes]),
                **_origin(item),
            }
        )


def _why_level(votes: list[Vote], answers: int) -> str:
    """Why no answer is above another: ties by majority between all of them, or no majority."""
    results = {tally.by_majority(tally.count(votes, i, j)) for i, j in itertools.combinations(range(answers), 2)}
    decided = results - {"no opinion"}
    return "tie" if decided == {"tie"} else "bad" if decided == {"bad"} else "undecided" if decided else "not ranked"


def _by_answer(item: Item, counted: Mapping[str, int]) -> dict[str, int]:
    """Counts of outcomes, those for one answer by its id."""
    names = {"first": item.answers[0].id, "second": item.answers[1].id}
    return {names.get(outcome, outcome): n for outcome, n in sorted(counted.items())}


def _note_contradictions(out: Exported) -> None:
    labels: defaultdict[tuple[str, str], set[bool]] = defaultdict(set)
    for row in out.rows:
        labels[plain(row["prompt"]), plain(row["completion"])].add(row["label"])
    if both := sum(len(found) > 1 for found in labels.values()):
        words = "answer is" if both == 1 else "answers are"
        out.notes.append(f"{both} {words} labelled good in one row and bad in another, as votes differ or one is better than a worse one")


# -- rankings ----------------------------------------------------------------------------------------------------------


def _rankings(item: Item, votes: list[Vote], rule: str, out: Exported) -> None:
    n = len(item.answers)
    shares = tally.win_shares(votes, n)
    ranks: Ranks = tally.dense(shares) if rule == "soft" else tally.rank_by_majority(votes, n)
    if len({r for r in ranks if r is not None}) < 2 or tally.all_bad(votes):
        out.without["bad" if tally.all_bad(votes) else _why_level(votes, n)] += 1
        return
    order = {"scores": shares} if rule == "soft" else {"ranks": list(ranks)}
    counted: Counter[str] = Counter(v.outcome for v in votes)
    out.rows.append(
        {
            "prompt": item.prompt,
            "answers": [item.answer(i) for i in range(n)],
            **order,
            "item": item.id,
            "answer_ids": [a.id for a in item.answers],
            "models": [a.model for a in item.answers],
            **_told(votes, rule, _by_answer(item, counted), [v.annotator for v in votes]),
            **_origin(item),
        }
    )


# -- votes -------------------------------------------------------------------------------------------------------------


def _vote_row(item: Item, vote: Vote) -> Row:
    """Everything about a vote and its item; `imports.load_votes` reads it back whole."""
    answers = [{"id": a.id, "text": item.answer(i), **({"model": a.model} if a.model else {})} for i, a in enumerate(item.answers)]
    return {
        "prompt": item.prompt,
        "answers": answers,
        "outcome": vote.outcome,
        **({"ranks": list(vote.ranks)} if vote.ranks is not None else {}),
        "annotator": vote.annotator,
        "item": item.id,
        "vote": vote.id,
        "order": [item.answers[i].id for i in vote.order],
        "strength": vote.strength,
        "reason": vote.reason,
        "shown_at": vote.shown_at,
        "voted_at": vote.voted_at,
        "seconds": vote.seconds,
        "repeat": vote.repeat,
        "chosen_by": vote.chosen_by,
        **({"vote_columns": vote.extra} if vote.extra else {}),
        **_origin(item),
    }


Writer = Callable[[Item, "list[Vote]", str, Exported], None]


def _no_items(item: Item, votes: list[Vote], rule: str, out: Exported) -> None:
    raise AssertionError("votes are exported one by one")


KINDS: dict[str, Writer] = {"preferences": _preferences, "feedback": _feedback, "rankings": _rankings, "votes": _no_items}


# -- splits ------------------------------------------------------------------------------------------------------------


def in_test(prompt: Any, share: float, seed: int = 0) -> bool:
    """Whether a prompt is held out. It depends on the prompt's words alone, so that a desk that grows moves no prompt across.

    Case and blanks do not make another prompt, nor does whether it is text or a message.
    """
    words = " ".join(plain(prompt).split()).casefold()
    drawn = int.from_bytes(hashlib.blake2b(f"{seed}:{words}".encode("utf-8", "replace"), digest_size=8).digest(), "big")
    return drawn < share * 2**64


def split(rows: Sequence[Row], share: float, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """(train, test) by prompt. UserError where one of them would be empty."""
    if not 0 < share < 1:
        raise UserError(f"the share of prompts held out lies between 0 and 1, got {share}", where="--test-share", remedy="Such as 0.1.")
    parts: tuple[list[Row], list[Row]] = ([], [])
    for row in rows:
        parts[in_test(row["prompt"], share, seed)].append(row)
    if not all(parts):
        words = f"of {len(rows)} rows {len(parts[1])} fell to the test split: there are too few prompts for a share of {share}"
        raise UserError(words, where="--test-share", remedy="Take another share or another --seed, or export without a split.")
    return parts
