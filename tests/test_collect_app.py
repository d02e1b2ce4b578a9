"""The desk over HTTP: whom it answers, what it saves, and what it gives away."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import desks
from tests.desk_visits import SECRET, Browser, browser, four_pairs
from tether.collect.app import LiveState, make_app
from tether.collect.desk import Desk
from tether.collect.guard import LOOPBACK
from tether.collect.items import make_item
from tether.errors import UserError


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = four_pairs(tmp_path)
    yield made
    made.close()


# -- voting by plain forms -----------------------------------------------------------------------------------------------


def test_name_guidelines_votes_undo_and_the_end(desk: Desk) -> None:
    ada = browser(desk)
    assert "Which answer is better?" in ada.get()
    assert "Be fair" in ada.post("/join", name="Ada"), "the guidelines come first"
    ada.get()
    first, assignment = ada.sides, ada.field("assignment")
    assert "Saved." in ada.vote("left", strength="2", tag=[], reason="It is\r\nright")
    assert ada.field("assignment") != assignment
    assert "Taken back" in ada.post("/undo")
    assert (ada.sides, ada.field("assignment")) == (first, assignment)
    for choice in ("right", "tie", "bad", "skip"):
        ada.vote(choice)
    assert "That was all" in ada.page
    assert "You gave 4 votes" in ada.page
    votes = desk.votes(undone=True)
    assert [v.undone for v in votes] == [True, False, False, False, False]
    assert (votes[0].strength, votes[0].reason) == (2, "It is\nright")
    assert votes[0].outcome != votes[1].outcome, "left and right of the same page are the two answers"
    assert [v.outcome for v in votes[2:]] == ["tie", "bad", "skip"]


def test_left_is_the_answer_that_stood_on_the_left(desk: Desk) -> None:
    ada = browser(desk)
    ada.join()
    orders = set()
    for _ in range(4):
        left = ada.sides[0]
        ada.vote("left")
        vote = desk.votes()[-1]
        item = desk.items()[vote.item]
        assert item.answers[0 if vote.outcome == "first" else 1].text in left
        orders.add(vote.order)
    assert orders == {(0, 1), (1, 0)}, "sides are shuffled"


def test_a_ballot_sent_twice_is_one_vote(desk: Desk) -> None:
    ada = browser(desk)
    page = ada.join()
    ada.vote("left")
    ada.page = page  # the back button
    ada.vote("left")
    assert len(desk.votes()) == 1
    ada.page = page
    assert "first vote stays" in ada.vote("right")
    assert len(desk.votes()) == 1


def test_a_reload_and_a_restart_show_the_same_page(desk: Desk) -> None:
    ada = browser(desk)
    first = ada.join()
    assert ada.get() == first
    again = browser(Desk.open(desk.folder))
    again.client.cookies = ada.client.cookies
    assert again.get() == first
    again.page = first
    assert "Saved." in again.vote("tie"), "a page from before the restart still votes"


def test_reasons_that_are_offered_and_own_words_are_kept_together(tmp_path: Path) -> None:
    desk = desks.desk(tmp_path / "desk", [desks.item(0)], reasons=("more <correct>", "clearer"), strength=False)
    ada = browser(desk)
    ada.join()
    assert "more &lt;correct&gt;" in ada.page
    assert 'name="strength"' not in ada.page
    ada.vote("left", tag=["1", "0", "77"], reason="and kind")
    assert desk.votes()[0].reason == "more <correct>; clearer; and kind"


def test_a_reason_that_is_too_long_is_not_lost_and_nothing_is_saved(desk: Desk) -> None:
    ada = browser(desk)
    ada.join()
    ada.vote("left", reason="x" * 4001, strength="3")
    assert ada.status == 422
    assert "Not saved: the reason has 4001 characters" in ada.page
    assert "x" * 4001 in ada.page
    assert re.search(r'value="3" checked', ada.page)
    assert desk.votes() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"choice": "both"},
        {"choice": ""},
        {"choice": "left", "assignment": "-1"},
        {"choice": "left", "assignment": "9" * 40},
        {"choice": "ranking", "rank_0": "1"},
    ],
)
def test_a_ballot_that_says_nothing_clear_is_refused_in_words(fields: dict[str, str], desk: Desk) -> None:
    ada = browser(desk)
    ada.join()
    ada.post("/vote", **fields)
    assert ada.status in (409, 422)
    assert "othing was saved" in ada.page or "Not saved" in ada.page
    assert desk.votes() == []


def test_nobody_votes_on_a_page_of_somebody_else(desk: Desk) -> None:
    ada, ben = browser(desk), browser(desk)
    ada.join("Ada")
    ben.join("Ben")
    theirs = ada.field("assignment")
    ben.vote("left", assignment=theirs)
    assert ben.status == 409
    assert desk.votes() == []


# -- rankings ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ranked(tmp_path: Path) -> Desk:
    return desks.desk(tmp_path / "desk", [desks.item(i, answers=["one", "two", "three", "four"]) for i in range(2)])


def test_answers_are_put_in_order_by_plain_fields(ranked: Desk) -> None:
    ada = browser(ranked)
    ada.join()
    sides = ada.sides
    assert len(sides) == 4
    ada.vote("ranking", rank_0="3", rank_1="1", rank_2="", rank_3="3")
    (vote,) = ranked.votes()
    item = ranked.items()[vote.item]
    assert vote.ranks is not None
    by_text = {answer.text: rank for answer, rank in zip(item.answers, vote.ranks, strict=True)}
    assert [by_text[re.sub(r"<[^>]*>", "", s).strip()] for s in sides] == [2, 1, None, 2], "places without gaps"


def test_all_equal_is_a_ranking_and_no_order_is_refused(ranked: Desk) -> None:
    ada = browser(ranked)
    ada.join()
    empty = {f"rank_{i}": "" for i in range(4)}
    assert "Not saved" in ada.vote("ranking", **empty)
    ada.vote("tie", **empty)
    assert [(v.outcome, v.ranks) for v in ranked.votes()] == [("ranking", (1, 1, 1, 1))]


# -- blind ---------------------------------------------------------------------------------------------------------------


def test_a_page_does_not_tell_whose_answers_they_are(desk: Desk) -> None:
    told = make_item(
        "q", ["a one", "a two"], models=["model-x", "model-y"], source="secret.jsonl:3", extra={"chosen_by_author": "hidden-extra"}
    )
    desk.add_items([told])
    ada = browser(desk)
    ada.join()
    for _ in range(5):
        for item in desk.items().values():
            hidden = [item.id, item.source, *(a.id for a in item.answers), "model-x", "model-y", "hidden-extra", "random"]
            assert not [h for h in hidden if h in ada.page]
        ada.vote("tie")


# -- many at once --------------------------------------------------------------------------------------------------------


def test_twenty_people_vote_at_once(tmp_path: Path) -> None:
    desk = desks.desk(tmp_path / "desk", [desks.item(i) for i in range(5)], votes_per_item=20)
    app = make_app(desk, hosts=LOOPBACK, secret=SECRET)
    acknowledged: list[tuple[str, str]] = []

    def person(n: int) -> None:
        me = Browser(app)
        me.join(f"person {n}")
        while assignment := me.field("assignment"):
            if "Saved." in me.vote(["left", "right", "tie"][n % 3]):
                acknowledged.append((f"person {n}", assignment))

    people = [threading.Thread(target=person, args=(n,)) for n in range(20)]
    for p in people:
        p.start()
    for p in people:
        p.join()
    votes = desk.votes()
    assert len(votes) == 100
    assert sorted((v.annotator, str(v.assignment)) for v in votes) == sorted(acknowledged)


# -- answers that are made meanwhile -------------------------------------------------------------------------------------


class Slowly:
    """A source of answers that has one more ready whenever it is told to."""

    def __init__(self, desk: Desk, total: int) -> None:
        self.desk, self.ready, self.total, self.asked = desk, 0, total, [0]
        self.failed = ""

    def more(self) -> None:
        self.desk.add_items([desks.item(self.ready)])
        self.ready += 1

    def state(self) -> LiveState:
        return LiveState(self.ready, self.total, self.ready == self.total or bool(self.failed), self.failed)

    def wanted(self, left: int) -> None:
        self.asked.append(left)


def test_the_page_waits_for_answers_and_goes_on(tmp_path: Path) -> None:
    desk = desks.desk(tmp_path / "desk", [])
    live = Slowly(desk, 2)
    ada = browser(desk, live=live)
    assert "are being written" in ada.join()
    live.more()
    assert "ballot" in ada.get()
    assert "of 2" in re.sub(r"<[^>]*>", "", ada.page), "what is to come counts"
    assert "are being written" in ada.vote("left")
    live.more()
    ada.get()
    assert "That was all" in ada.vote("left")
    assert set(live.asked) == {0, 1}


def test_a_model_that_fails_is_told_on_the_page(tmp_path: Path) -> None:
    desk = desks.desk(tmp_path / "desk", [])
    live = Slowly(desk, 2)
    live.failed = "Sampling ended: out of memory"
    assert "out of memory" in browser(desk, live=live).join()


def test_a_desk_that_cannot_be_written_says_that_nothing_was_saved(desk: Desk, monkeypatch: Any) -> None:
    ada = browser(desk)
    ada.join()

    def full(*_: Any) -> None:
        raise UserError("the desk cannot be read or written: disk full", remedy="Is there room on the disk?")

    monkeypatch.setattr(desk, "vote", full)
    answer = ada.vote("left")
    assert ada.status == 503
    assert "Nothing was saved" in answer
    assert "disk full" in answer


def test_a_request_is_quick(desk: Desk) -> None:
    long = make_item("q", ["word " * 5000, "**b** " * 5000])
    desk.add_items([long, *(desks.item(i) for i in range(10, 40))])
    ada = browser(desk)
    ada.join()
    began = time.monotonic()
    for _ in range(30):
        ada.vote("tie")
    assert (time.monotonic() - began) / 30 < 0.5
