"""Votes from elsewhere: what a file says is kept, what it does not say is not made up, and an unclear reply is no vote."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests import desks
from tether import cli
from tether.collect.ballots import Ballot
from tether.collect.desk import Added, Desk
from tether.collect.export import export
from tether.collect.imports import load_votes
from tether.collect.items import load_items
from tether.errors import UserError

CASES = Path(__file__).parent / "cases"
REPLIES = Path(os.environ.get("TETHER_CASES_JUDGE") or CASES / "judge_replies.jsonl")
FIVE_POINT = Path(os.environ.get("TETHER_CASES_FIVE_POINT") or CASES / "real/five_point.jsonl")
SEVERAL = Path(os.environ.get("TETHER_CASES_SEVERAL_VOTES") or CASES / "real/votes.json")


def written(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


# -- replies of a judge ------------------------------------------------------------------------------------------------

CASES_OF_REPLIES = [json.loads(line) for line in REPLIES.read_text(encoding="utf-8").splitlines() if line.strip()]
OUTCOMES = {"A": "first", "B": "second", "tie": "tie"}


def reply_row(i: int, **more: Any) -> dict[str, Any]:
    return {"prompt": f"Question {i}", "answer_a": "one", "answer_b": "other", **more}


@pytest.mark.parametrize("case", CASES_OF_REPLIES, ids=lambda c: repr(c["raw"][:30]))
def test_a_reply_is_the_vote_that_it_says_or_none(tmp_path: Path, case: dict[str, Any]) -> None:
    """Where the file of replies leaves a choice: [[C]] is a tie, a small "a" alone is invalid."""
    allowed = case["expect"].split(",")[0].split(" or ")
    loaded = load_votes(written(tmp_path, reply_row(0, raw=case["raw"])), max_invalid=1.0)
    if loaded.rows:
        assert loaded.rows[0].outcome in [OUTCOMES[e] for e in allowed if e != "invalid"]
    else:
        assert "invalid" in allowed
        assert [(p.kind, p.action, p.source.line) for p in loaded.problems] == [("invalid_verdict", "drop", 1)]


def test_too_many_invalid_replies_write_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, *(reply_row(i, raw=c["raw"]) for i, c in enumerate(CASES_OF_REPLIES)))
    invalid = load_votes(path, max_invalid=1.0).counts()["invalid_verdict"]
    assert invalid > 0.1 * len(CASES_OF_REPLIES)
    with pytest.raises(UserError, match=rf"{invalid} of {len(CASES_OF_REPLIES)} replies of the judge are no verdict"):
        load_votes(path)
    result = CliRunner().invoke(cli.app, ["collect", path, "--desk", str(tmp_path / "desk"), "--import", path, "--terminal"], input="q\n")
    assert isinstance(result.exception, UserError)
    assert not (tmp_path / "desk").exists()


@pytest.mark.parametrize("reply", [None, "", "HTTP 503 service busy", {"error": "down"}])
def test_a_judge_that_is_down_gives_no_ties(tmp_path: Path, reply: Any) -> None:
    with pytest.raises(UserError, match="3 of 3 replies"):
        load_votes(written(tmp_path, *(reply_row(i, reply=reply) for i in range(3))))


def test_a_judge_that_fails_on_one_of_two_orders_gives_no_vote(tmp_path: Path) -> None:
    rows = [
        reply_row(0, reply="[[A]]", reply_swapped="[[B]]"),
        reply_row(1, reply="[[B]]", reply_swapped="[[A]]"),
        reply_row(2, reply="[[A]]", reply_swapped="[[A]]"),  # it likes whatever comes first: a tie
        reply_row(3, reply="[[A]]", reply_swapped=None),
        reply_row(4, reply="HTTP 503", reply_swapped="[[A]]"),
        reply_row(5, reply="tie", reply_swapped="tie"),
    ]
    loaded = load_votes(written(tmp_path, *rows), max_invalid=0.5)
    assert [(v.item.prompt, v.outcome) for v in loaded.rows] == [
        ("Question 0", "first"),
        ("Question 1", "second"),
        ("Question 2", "tie"),
        ("Question 5", "tie"),
    ]
    assert [p.source.line for p in loaded.problems] == [4, 5]
    desk = Desk.create(tmp_path / "desk")
    desk.add_votes(loaded.rows)
    found = export(desk.items(), desk.votes(), "preferences")
    assert [(r["prompt"], r["chosen"]) for r in found.rows] == [("Question 0", "one"), ("Question 1", "other")]


# -- files of other tools ----------------------------------------------------------------------------------------------

FIVE = {
    "a-is-better": ("first", 2),
    "a-is-slightly-better": ("first", 1),
    "tie": ("tie", None),
    "b-is-slightly-better": ("second", 1),
    "b-is-better": ("second", 2),
}


def test_a_five_point_scale_with_shuffled_sides(tmp_path: Path) -> None:
    """Sides differ from rater to rater, so each vote is checked by the model that it is for."""
    rows = [json.loads(line) for line in FIVE_POINT.read_text(encoding="utf-8").splitlines() if line.strip()]
    desk = Desk.create(tmp_path / "desk")
    loaded = load_votes(str(FIVE_POINT))
    assert loaded.problems == []
    added = desk.add_votes(loaded.rows)
    assert added.votes == len(rows)
    items, votes = desk.items(), {v.source.rpartition(":")[2]: v for v in desk.votes()}
    for number, row in enumerate(rows, 1):
        vote = votes[str(number)]
        item = items[vote.item]
        outcome, strength = FIVE[row["preference"]]
        assert vote.annotator == row["evaluator"]
        assert vote.strength == strength
        assert [item.answers[i].model for i in vote.order] == [row["model_a"], row["model_b"]]
        winner = {"first": 0, "second": 1}.get(vote.outcome)
        wanted = {"first": row["model_a"], "second": row["model_b"]}.get(outcome)
        assert (None if winner is None else item.answers[winner].model) == wanted
        assert vote.extra["a_acceptable"] == row["a_acceptable"]
        assert vote.voted_at is not None
        assert vote.voted_at.startswith(row["timestamp"].replace(" ", "T"))
        assert vote.seconds is None
    assert desk.add_votes(load_votes(str(FIVE_POINT)).rows) == Added(0, 0, 0, len(rows))  # once, however often
    one_each = Counter((v.item, v.annotator) for v in votes.values() if not v.repeat)
    assert set(one_each.values()) == {1}


def test_votes_of_several_annotators_in_columns(tmp_path: Path) -> None:
    rows = json.loads(SEVERAL.read_text(encoding="utf-8"))
    desk = Desk.create(tmp_path / "desk")
    loaded = load_votes(str(SEVERAL))
    desk.add_votes(loaded.rows)
    refused = {p.source.line for p in loaded.problems if p.action in ("drop", "reject")}
    votes: dict[tuple[str, str], Any] = {(v.source.rpartition(":")[2], v.annotator): v for v in desk.votes()}
    items = desk.items()
    for number, row in enumerate(rows, 1):
        for name in ("annotator1", "annotator2", "annotator3"):
            if number in refused:
                assert (str(number), name) not in votes
                continue
            vote = votes[str(number), name]
            texts = [a.text for a in items[vote.item].answers]
            wanted = {0: None, 1: row["response1"], 2: row["response2"]}[row[name]]
            assert (texts[{"first": 0, "second": 1}[vote.outcome]] if wanted is not None else None) == wanted
            assert vote.order == ()  # which was left is not said
    # The majority is what the loader of training data reads out of the same file.
    from tether import preferences

    exported = {(r["source"], str(r["chosen"])) for r in export(items, desk.votes(), "preferences").rows}
    theirs = {(str(p.source), str(p.chosen)) for p in preferences.load(str(SEVERAL)).rows}
    assert exported == theirs


@pytest.mark.parametrize(
    "row, outcome, ranks",
    [
        ({"winner": "model_b", "judge": "Bo"}, "second", None),
        ({"winner": "tie (bothbad)", "judge": "Bo"}, "bad", None),
        ({"winner": "tie", "rater": 7}, "tie", None),
        ({"label": 1, "evaluator": "Bo"}, "first", None),
    ],
)
def test_verdicts_with_their_annotator(tmp_path: Path, row: dict[str, Any], outcome: str, ranks: Any) -> None:
    (vote,) = load_votes(written(tmp_path, {"prompt": "P", "answer_a": "x", "answer_b": "y", **row})).rows
    assert (vote.outcome, vote.ranks, vote.order) == (outcome, ranks, (0, 1))
    assert vote.annotator == str(next(iter(v for k, v in row.items() if k in ("judge", "rater", "evaluator"))))


def test_rankings_and_pairs_with_their_annotator(tmp_path: Path) -> None:
    (ranked,) = load_votes(written(tmp_path, {"prompt": "P", "answers": ["x", "y", "z"], "ranks": [2, None, 1], "annotator": "Bo"})).rows
    assert (ranked.outcome, ranked.ranks) == ("ranking", (2, None, 1))
    row = {"prompt": "P", "chosen": "x", "rejected": "y", "annotator": "Bo", "strength": 3, "timestamp": "2025-01-31T12:00:00Z"}
    (pair,) = load_votes(written(tmp_path, row)).rows
    assert (pair.outcome, pair.strength, pair.voted_at) == ("first", 3, "2025-01-31T12:00:00.000+00:00")


@pytest.mark.parametrize(
    "row, kind",
    [
        ({"winner": "x", "judge": "Bo"}, "bad_verdict"),
        ({"winner": "", "judge": "Bo"}, "bad_verdict"),
        ({"winner": None, "judge": "Bo"}, "bad_verdict"),
        ({"winner": 0, "judge": "Bo"}, "bad_verdict"),
        ({"winner": "a", "judge": None}, "no_annotator"),
        ({"winner": "a", "judge": "Bo", "timestamp": "yesterday"}, "bad_time"),
    ],
)
def test_what_is_not_clear_is_refused_by_line(tmp_path: Path, row: dict[str, Any], kind: str) -> None:
    loaded = load_votes(written(tmp_path, {"prompt": "P", "answer_a": "x", "answer_b": "y", **row}))
    assert loaded.rows == []
    assert [(p.kind, p.action, p.source.line) for p in loaded.problems] == [(kind, "reject", 1)]


def test_ranks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    base = {"prompt": "P", "answers": ["x", "y", "z"], "annotator": "Bo"}
    for ranks, kind in (([1, 2], "ranks_missing"), ([1, 2, "3"], "not_a_rank"), ([1, 2, 0], "not_a_rank"), ([None] * 3, "no_rank")):
        assert load_votes(written(tmp_path, {**base, "ranks": ranks})).counts() == {kind: 1}


# -- a desk's own votes ------------------------------------------------------------------------------------------------


def voted(folder: Path) -> Desk:
    """Pairs and a triple, every kind of vote, a repeat, an undone one and a conversation of several turns."""
    turns = [{"role": "assistant", "content": "A."}, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "B."}]
    from tether.collect.items import make_item

    items = [desks.item(i, models=["A", "B"] if i % 2 else None) for i in range(12)]
    items += [make_item([{"role": "user", "content": "Hi"}], [turns, "C."], source="chats.jsonl:1", extra={"topic": "talk"})]
    items += [desks.item(50, answers=["x", "y", "z"])]
    desk = desks.desk(folder, items, repeat_share=0.4, votes_per_item=2)
    choices = ["left", "right", "tie", "bad", "skip"]
    for name in ("Ann", "Bo"):
        me, n = desk.annotator(name).id, 0
        while (shown := desk.next(me)) is not None:
            n += 1
            if len(shown.order) == 3:
                ballot = Ballot(shown.assignment, "ranking", ranks=(2, None, 1))
            else:
                choice: Any = choices[n % 5]
                ballot = Ballot(
                    shown.assignment, choice, strength=n % 3 + 1 if choice in ("left", "right") else None, reason="because" * (n % 2)
                )
            desk.vote(me, ballot)
            if n == 3:
                desk.undo(me)
    return desk


def test_votes_go_out_and_come_back_whole(tmp_path: Path) -> None:
    desk = voted(tmp_path / "desk")
    rows = export(desk.items(), desk.votes(), "votes").rows
    path = written(tmp_path, *rows)
    loaded = load_votes(path)
    assert loaded.problems == []
    other = Desk.create(tmp_path / "other")
    added = other.add_votes(loaded.rows)
    assert (added.votes, added.known, added.repeats) == (len(desk.votes()), 0, sum(v.repeat for v in desk.votes()))
    assert added.repeats > 0

    def content(d: Desk) -> list[Any]:
        items = d.items()
        found = []
        for v in d.votes():
            item = items[v.item]
            ranks = None if v.standing is None else sorted((item.answers[i].id, str(r)) for i, r in enumerate(v.standing))
            order = [item.answers[i].id for i in v.order]
            about = (
                v.item,
                v.annotator,
                v.outcome in ("bad", "skip", "tie"),
                ranks,
                order,
                v.strength,
                v.reason,
                v.shown_at,
                v.voted_at,
                v.repeat,
            )
            found.append((*map(str, about), f"{v.seconds:.3f}"))
        return sorted(found)

    assert content(other) == content(desk)
    assert {i.id: i for i in other.items().values()} == {v.item: desk.items()[v.item] for v in desk.votes()}
    # Into the very desk that they came from: all known.
    assert desk.add_votes(loaded.rows) == Added(0, 0, 0, len(rows))


def test_imported_votes_count_towards_what_is_wanted_and_are_not_undone_here(tmp_path: Path) -> None:
    desk = desks.desk(tmp_path / "desk", [desks.item(i) for i in range(2)])
    answers = [a.text for a in desks.item(0).answers]
    row = {"prompt": "question 0", "answer_a": answers[1], "answer_b": answers[0], "winner": "a", "judge": "Ann"}
    assert desk.add_votes(load_votes(written(tmp_path, row)).rows) == Added(0, 1, 0, 0)
    ann = desk.annotator("ann").id
    (vote,) = desk.votes()
    assert (vote.outcome, vote.order, vote.chosen_by) == ("second", (1, 0), "imported")  # as the desk has the answers
    assert desk.progress(ann).done == 1
    assert desk.undo(ann) is None
    shown = desk.next(ann)
    assert shown is not None
    assert shown.item.prompt == "question 1"


def test_the_command_takes_votes_over(tmp_path: Path) -> None:
    words = ["collect", str(FIVE_POINT), "--desk", str(tmp_path / "desk"), "--import", str(FIVE_POINT), "--terminal"]
    result = CliRunner().invoke(cli.app, words, input="q\n")
    assert result.exception is None, result.output
    votes = Desk.open(tmp_path / "desk").votes()
    assert len(votes) == len(load_votes(str(FIVE_POINT)).rows)
    assert {i.id for i in load_items(str(FIVE_POINT)).rows} <= set(Desk.open(tmp_path / "desk").items())
