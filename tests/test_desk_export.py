"""Votes become training rows: named by id, counted, split by prompt, and read by the loaders of every command that trains on them."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests import desks
from tether import cli, feedback, preferences, rankings
from tether.collect import tally
from tether.collect.ballots import BadBallot, Ballot, Vote
from tether.collect.desk import Desk, DeskSettings
from tether.collect.export import Exported, export, in_test, split
from tether.collect.items import Item, make_item
from tether.errors import UserError

EVENTS = Path(os.environ.get("TETHER_CASES_RANKING_EVENTS") or Path(__file__).parent / "cases/ranking_events.jsonl")


# -- rankings as they were clicked -------------------------------------------------------------------------------------


def order_drawn(folder: Path, k: int, seed: int) -> tuple[int, ...]:
    """The order in which a desk of one item shows its k answers: it does not depend on what they say."""
    desk = Desk.create(folder, DeskSettings(seed=seed))
    desk.add_items([make_item("?", [f"{i}" for i in range(k)])])
    shown = desk.next(desk.annotator("x").id)
    assert shown is not None
    return shown.order


@pytest.mark.parametrize("event", [json.loads(line) for line in EVENTS.read_text().splitlines() if line.strip()], ids=lambda e: e["item"])
def test_a_ranking_is_kept_as_it_was_clicked(tmp_path: Path, event: dict[str, Any]) -> None:
    """The answers are stored in another order than they are shown in; the page is reloaded before it is saved, and saved twice."""
    ids, k = event["shown"], len(event["shown"])
    seed = next(s for s in range(50) if order_drawn(tmp_path / f"draw{s}", k, s) != tuple(range(k)))
    order = order_drawn(tmp_path / "drawn", k, seed)
    stored = [""] * k
    for place, name in zip(order, ids, strict=True):
        stored[place] = name
    assert stored != ids
    desk = Desk.create(tmp_path / "desk", DeskSettings(seed=seed))
    desk.add_items([make_item("?", [f"text of {i}" for i in stored], ids=stored, item_id=event["item"])])
    ann = desk.annotator(event["annotator"]).id
    desk.next(ann)
    desk.close()
    desk = Desk.open(tmp_path / "desk")
    shown = desk.next(ann)
    assert shown is not None
    assert [shown.item.answers[i].id for i in shown.order] == ids
    ballot = Ballot(shown.assignment, "ranking", ranks=tuple(event["ranked_positions"]))
    if str(event.get("expect_best_to_worst")).startswith("invalid"):
        with pytest.raises(BadBallot, match="ranks for"):
            desk.vote(ann, ballot)
        assert desk.votes(undone=True) == []
        assert desk.next(ann) == shown
        return
    assert desk.vote(ann, ballot) == desk.vote(ann, ballot)
    (vote,) = Desk.open(tmp_path / "desk").votes()
    ranks = dict(zip(stored, vote.ranks or (), strict=True))
    assert [ranks[i] for i in ids] == event["ranked_positions"]
    best = event.get("expect_best_to_worst")
    wanted = event.get("expect_pairs") or (list(map(list, itertools.combinations(best, 2))) if isinstance(best, list) else [])
    for rule in ("majority", "all", "soft"):
        found = export(desk.items(), desk.votes(), "preferences", rule).rows
        assert sorted([r["chosen_id"], r["rejected_id"]] for r in found) == sorted(wanted)
        assert all(r["chosen"] == f"text of {r['chosen_id']}" and r["item"] == event["item"] for r in found)
        ranked = export(desk.items(), desk.votes(), "rankings", rule).rows
        if not wanted:
            assert ranked == []
        elif isinstance(best, list):
            (row,) = ranked
            rank = row["ranks"] if rule != "soft" else [-s for s in row["scores"]]
            assert [i for _, i in sorted(zip(rank, row["answer_ids"], strict=True))] == best
            assert row["answers"] == [f"text of {i}" for i in row["answer_ids"]]


# -- what votes come to ------------------------------------------------------------------------------------------------


@pytest.fixture
def vote() -> desks.Votes:
    return desks.Votes()


def exported(item: Item, votes: list[Vote], kind: str, rule: str = "majority", **options: Any) -> Exported:
    return export({item.id: item}, votes, kind, rule, **options)


@pytest.mark.parametrize(
    "outcomes, majority, share",
    [
        (["first"], "a", 1.0),
        (["first", "first", "second"], "a", 2 / 3),
        (["first", "second"], "undecided", 0.5),
        (["first", "tie"], "undecided", 0.75),
        (["second", "second", "tie"], "b", 1 / 6),
        (["tie", "tie", "first"], "tie", 2 / 3),
        (["bad", "bad", "first"], "bad", 2 / 3),
        (["bad", "tie"], "undecided", 0.5),
        (["skip"], "no opinion", 0.5),
    ],
)
def test_majorities_and_shares(vote: desks.Votes, outcomes: list[str], majority: str, share: float) -> None:
    item = desks.item(0)
    counts = tally.count([vote(item, f"p{i}", o) for i, o in enumerate(outcomes)], 0, 1)
    assert tally.by_majority(counts) == majority
    assert counts.share == pytest.approx(share)
    assert tally.by_majority(counts.swapped()) == {"a": "b", "b": "a"}.get(majority, majority)


def test_soft_labels_and_margins_by_hand(vote: desks.Votes) -> None:
    """Much, slightly and unsaid for the first, clearly for the second, one tie: share (3 + 1/2)/5, margin (1 + 1/3 + 2/3 - 2/3 + 0)/5."""
    item = desks.item(0, models=["A", "B"])
    said = [("first", 3), ("first", 1), ("first", None), ("second", 2), ("tie", None)]
    votes = [vote(item, f"p{i}", o, strength=s) for i, (o, s) in enumerate(said)]
    (row,) = exported(item, votes, "preferences", "soft").rows
    assert row["soft_label"] == pytest.approx(0.7)
    assert row["margin"] == pytest.approx((1 + 1 / 3 + 2 / 3 - 2 / 3) / 5)
    assert row["votes"] == {"chosen": 3, "rejected": 1, "tie": 1, "bad": 0}
    # Two slightly for it and one much against: the share favours it, and there is no margin to lead by.
    against = [vote(item, f"p{i}", o, strength=s) for i, (o, s) in enumerate([("first", 1), ("first", 1), ("second", 3)])]
    (row,) = exported(item, against, "preferences", "soft").rows
    assert (row["chosen_model"], row["margin"]) == ("A", 0.0)


def test_undone_votes_repeats_and_skips_are_no_opinions(vote: desks.Votes) -> None:
    item = desks.item(0)
    votes = [
        vote(item, "a", "first"),
        vote(item, "a", "second", repeat=True),
        vote(item, "b", "second", undone=True),
        vote(item, "c", "skip"),
    ]
    for rule in ("majority", "all", "soft"):
        (row,) = exported(item, votes, "preferences", rule).rows
        assert row["chosen"] == item.answers[0].text
        assert row["annotators"] == 1


def test_provenance_of_a_row(vote: desks.Votes) -> None:
    item = make_item("P", ["x", "y"], models=["A", "B"], source="pairs.jsonl:7", extra={"topic": "sky"})
    votes = [vote(item, "Ann", "second"), vote(item, "Bo", "second", strength=3, reason="clearer")]
    common = {
        "prompt": "P",
        "chosen": "y",
        "rejected": "x",
        "item": item.id,
        "chosen_id": item.answers[1].id,
        "rejected_id": item.answers[0].id,
        "chosen_model": "B",
        "rejected_model": "A",
        "source": "pairs.jsonl:7",
        "columns": {"topic": "sky"},
    }
    (row,) = exported(item, votes, "preferences").rows
    assert row == {**common, "votes": {"chosen": 2, "rejected": 0, "tie": 0, "bad": 0}, "annotators": 2}
    one, two = exported(item, votes, "preferences", "all").rows
    about = {"annotators": 1, "voted_at": "2025-01-01T00:00:20+00:00", "chosen_by": "random"}
    assert one == {**common, **about, "vote": votes[0].id, "annotator": "Ann", "strength": None, "reason": ""}
    assert two == {**common, **about, "vote": votes[1].id, "annotator": "Bo", "strength": 3, "reason": "clearer"}


def test_items_without_a_row_are_counted_by_reason(vote: desks.Votes) -> None:
    items = [desks.item(i) for i in range(9)] + [
        make_item("P", [" ", "y"]),
        make_item("Q", ["same", "same"], models=["A", "B"]),
    ]
    said = [
        ["tie"],
        ["bad"],
        ["first", "second"],
        ["skip"],
        [],
        ["first"],
        ["second", "second"],
        ["first", "tie"],
        ["bad", "tie"],
        ["first"],
    ]
    votes = [vote(items[i], f"p{j}", o) for i, outcomes in enumerate([*said, ["first"]]) for j, o in enumerate(outcomes)]
    found = export({i.id: i for i in items}, votes, "preferences")
    assert len(found.rows) == 2
    assert found.without == {
        "tie": 1,
        "bad": 1,
        "undecided": 3,
        "skipped": 1,
        "no votes": 1,
        "the better answer is empty": 1,
        "both answers read the same": 1,
    }
    fewer = export({i.id: i for i in items}, votes, "preferences", min_votes=2)
    assert len(fewer.rows) == 1
    assert fewer.without["fewer than 2 votes"] == 5


def test_feedback_labels(vote: desks.Votes) -> None:
    """The better answer is good, the worse bad; both bad are two bad ones; between best and worst there is no label."""
    pair, triple = desks.item(0), desks.item(1, answers=["x", "y", "z"])

    def labels(item: Item, *outcomes: Any, ranks: Any = None, rule: str = "majority") -> list[tuple[int, bool]]:
        votes = [vote(item, f"p{i}", o, ranks=ranks) for i, o in enumerate(outcomes)]
        return [(item.place(r["answer_id"]), r["label"]) for r in exported(item, votes, "feedback", rule).rows]

    assert labels(pair, "second") == [(0, False), (1, True)]
    assert labels(pair, "bad", "bad", "first") == [(0, False), (1, False)]
    assert labels(pair, "tie") == labels(pair, "first", "second") == labels(pair, "skip") == []
    assert labels(pair, "first", "bad", rule="all") == [(0, True), (1, False), (0, False), (1, False)]
    assert labels(triple, "ranking", ranks=(2, 1, 3)) == [(1, True), (2, False)]
    assert labels(triple, "ranking", ranks=(2, 1, 1)) == [(0, False), (1, True), (2, True)]
    assert labels(triple, "ranking", ranks=(None, 1, 2)) == [(1, True), (2, False)]
    assert labels(triple, "bad") == [(0, False), (1, False), (2, False)]
    found = exported(pair, [vote(pair, "a", "first"), vote(pair, "b", "second")], "feedback", "all")
    assert "2 answers are labelled good in one row and bad in another" in found.notes[0]
    with pytest.raises(UserError, match="no label between"):
        exported(pair, [], "feedback", "soft")


def test_rankings_of_several_people(vote: desks.Votes) -> None:
    """x before y twice of three, x before z always, y before z twice: majorities won minus lost 2, 0, -2."""
    item = desks.item(0, answers=["x", "y", "z"])
    votes = [vote(item, f"p{i}", "ranking", ranks=r) for i, r in enumerate([(1, 2, 3), (1, 3, 2), (2, 1, 3)])]
    (row,) = exported(item, votes, "rankings").rows
    assert row["ranks"] == [1, 2, 3]
    (row,) = exported(item, votes, "rankings", "soft").rows
    assert row["scores"] == pytest.approx([(2 / 3 + 1) / 2, (1 / 3 + 2 / 3) / 2, (0 + 1 / 3) / 2])
    assert [r["ranks"] for r in exported(item, votes, "rankings", "all").rows] == [[1, 2, 3], [1, 3, 2], [2, 1, 3]]
    # A circle has no best: each beats one and loses to one.
    circle = [vote(item, f"c{i}", "ranking", ranks=r) for i, r in enumerate([(1, 2, 3), (3, 1, 2), (2, 3, 1)])]
    assert exported(item, circle, "rankings").without == {"undecided": 1}
    assert len(exported(item, circle, "preferences").rows) == 3


@given(ranks=st.lists(st.none() | st.integers(1, 4), min_size=2, max_size=4).filter(lambda r: 1 in r))
@settings(max_examples=80, deadline=None)
def test_the_ranking_of_one_vote_is_that_vote(ranks: list[int | None]) -> None:
    item = desks.item(0, answers=[f"a{i}" for i in range(len(ranks))])
    vote = desks.Votes()(item, "p", "ranking", ranks=tuple(ranks))
    found = tally.rank_by_majority([vote], len(ranks))
    for i, j in itertools.combinations(range(len(ranks)), 2):
        a, b, x, y = ranks[i], ranks[j], found[i], found[j]
        if a is not None and b is not None:
            assert x is not None
            assert y is not None
            assert ((a < b) - (a > b)) == ((x < y) - (x > y))


# -- into training -----------------------------------------------------------------------------------------------------


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """Forty pairs and ten triples, text and messages, three opinions each."""
    items = []
    for i in range(50):
        prompt: Any = f"question {i // 2}" if i % 3 else [{"role": "user", "content": f"question {i // 2}"}]
        answers = [f"a{i}", f"b{i}", f"c{i}"] if i % 5 == 0 else [f"a{i}", f"b{i}"]
        items.append(make_item(prompt, answers, models=["A", "B", "C"][: len(answers)], source=f"pairs.jsonl:{i + 1}", extra={"topic": i}))
    made = desks.desk(tmp_path / "desk", items, votes_per_item=3, repeat_share=0.1)
    for name in ("Ann", "Bo", "Cy"):
        me, n = made.annotator(name).id, 0
        while (shown := made.next(me)) is not None:
            n += 1
            if len(shown.order) == 3:
                ballot = Ballot(shown.assignment, "ranking", ranks=((1, 2, 3), (2, 1, None), (1, 1, 2), (3, 1, 1))[n % 4])
            else:
                choice: Any = ("left", "right", "left", "tie", "right", "bad", "left", "skip")[n % 8]
                ballot = Ballot(shown.assignment, choice, strength=n % 3 + 1 if choice in ("left", "right") else None)
            made.vote(me, ballot)
    return made


def run(*words: str) -> Any:
    return CliRunner().invoke(cli.app, ["export", *words])


@pytest.mark.parametrize("kind, load", [("preferences", preferences.load), ("feedback", feedback.load), ("rankings", rankings.load)])
@pytest.mark.parametrize("rule", ["majority", "all", "soft"])
def test_every_row_loads(desk: Desk, tmp_path: Path, kind: str, load: Any, rule: str) -> None:
    if (kind, rule) == ("feedback", "soft"):
        return
    out = tmp_path / "rows.jsonl"
    result = run(str(desk.folder), "--as", kind, "--votes", rule, "--out", str(out))
    assert result.exception is None, result.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    loaded = load(str(out))
    assert [p for p in loaded.problems if p.kind not in ("contradiction", "no_rank")] == []
    assert len(loaded.rows) == len(rows) > 10
    comparisons = preferences.load_comparisons(str(out)).rows if kind != "feedback" else []
    for row, read in zip(rows, loaded.rows, strict=True):
        assert read.prompt == row["prompt"]
        assert read.extra["item"] == row["item"]
        assert read.extra["source"] == row["source"]
        if kind == "preferences":
            assert (read.chosen, read.rejected, read.margin) == (row["chosen"], row["rejected"], row.get("margin"))
        elif kind == "feedback":
            assert (read.completion, read.label) == (row["completion"], row["label"])
    assert len(comparisons) == (len(rows) if kind != "feedback" else 0)
    if rule == "soft" and kind == "preferences":
        assert all(0 <= r["margin"] <= 1 and 0.5 < r["soft_label"] <= 1 for r in rows)
        assert any(c.extra["margin"] > 0 for c in comparisons)


def test_no_prompt_is_on_both_sides_of_a_split(desk: Desk, tmp_path: Path) -> None:
    """Each question is asked twice, once as text and once as a message: both go the same way, in every kind of file."""
    held_out: dict[str, bool] = {}
    for kind in ("preferences", "feedback", "rankings", "votes"):
        out = tmp_path / f"{kind}.jsonl"
        assert run(str(desk.folder), "--as", kind, "--out", str(out), "--test-share", "0.3").exception is None
        for path, test in ((out, False), (tmp_path / f"{kind}.test.jsonl", True)):
            lines = path.read_text().splitlines()
            assert lines
            for line in lines:
                prompt = json.loads(line)["prompt"]
                words = prompt if isinstance(prompt, str) else prompt[0]["content"]
                assert held_out.setdefault(words, test) == test


def test_a_prompt_stays_where_it_is_when_the_desk_grows() -> None:
    few, many = ([{"prompt": f"question {i}"} for i in range(n)] for n in (100, 1000))
    (train, test), (more_train, more_test) = split(few, 0.2), split(many, 0.2)
    assert all(r in more_train for r in train)
    assert all(r in more_test for r in test)
    assert 150 < len(more_test) < 250  # binomial: 200 +- 13
    assert in_test("  Question\n7 ", 0.5) == in_test([{"role": "user", "content": "question 7"}], 0.5)
    assert split(many, 0.2, seed=1)[1] != more_test
    with pytest.raises(UserError, match="too few prompts"):
        split([{"prompt": "only one"}, {"prompt": "only one"}], 0.5)
    for share in (0.0, 1.0, -1.0):
        with pytest.raises(UserError, match="between 0 and 1"):
            split(few, share)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_tells_what_it_left_out(desk: Desk, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    result = run(str(desk.folder), "--out", str(out))
    assert f"votes on 50 items -> {out} (" in result.output
    assert "without a row: " in result.output
    assert "undecided" in result.output
    assert f"next: tether reward data={out}" in result.output
    printed = run(str(desk.folder))
    lines = [line for line in printed.stdout.splitlines() if line.startswith("{")]
    assert [json.loads(line) for line in lines] == [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize(
    "words, said",
    [
        (["--as", "pairs"], "--as: there is no kind 'pairs'. One of preferences, feedback, rankings, votes"),
        (["--votes", "mean"], "--votes: there is no rule 'mean'"),
        (["--as", "votes", "--votes", "all"], "votes are exported as they are"),
        (["--test-share", "0.1"], "two files need a name"),
        (["--test-share", "2", "--out", "x.jsonl"], "between 0 and 1"),
        (["--min-votes", "0"], "at least 1"),
        (["--out", "x.csv"], "written as JSONL. Call it x.jsonl"),
        (["--min-votes", "9"], "give no row. Of 50 items: 50 fewer than 9 votes"),
    ],
)
def test_mistakes_are_told_in_a_sentence_and_write_nothing(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(str(desk.folder), *words)
    assert isinstance(result.exception, UserError)
    assert said in str(result.exception)
    assert [p.name for p in tmp_path.iterdir()] == ["desk"]


def test_a_folder_that_is_no_desk_is_told(tmp_path: Path) -> None:
    result = run(str(tmp_path))
    assert isinstance(result.exception, UserError)
    assert "there is no desk" in str(result.exception)


def test_texts_that_break_lines_or_are_broken_stay_one_line(tmp_path: Path) -> None:
    odd = "a\u2028b\u0085c\x00 <script> \u202e"
    made = desks.desk(tmp_path / "desk", [make_item(odd, [odd + "1", odd + "2"]), make_item("half \ud83d", ["x", "y"])])
    me = made.annotator("Ann").id
    while (shown := made.next(me)) is not None:
        made.vote(me, Ballot(shown.assignment, "left"))
    out = tmp_path / "rows.jsonl"
    assert run(str(made.folder), "--out", str(out)).exception is None
    text = out.read_text(encoding="utf-8")
    assert len(text.splitlines()) == 2
    loaded = preferences.load(str(out))
    assert [r.prompt for r in loaded.rows] == [odd]
    assert [p.kind for p in loaded.problems] == ["half_character"]
