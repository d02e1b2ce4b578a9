"""The desk's store: the same page until it is voted on, one vote to a page, nothing lost by an undo, a reload or a crowd."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.desks import make
from tether.collect.assign import REPEAT_GAP
from tether.collect.ballots import AlreadyVoted, BadBallot, Ballot, opinion_of
from tether.collect.desk import Desk, Shown
from tether.collect.items import make_item
from tether.errors import UserError


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = datetime(2025, 1, 1, tzinfo=timezone.utc)

    def __call__(self) -> datetime:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pages(desk: Desk, annotator: int, choice: Any = "left") -> Iterator[Shown]:
    """Votes on everything that comes."""
    while (shown := desk.next(annotator)) is not None:
        desk.vote(annotator, Ballot(shown.assignment, choice))
        yield shown


# -- a turn ------------------------------------------------------------------------------------------------------------


def test_a_page_stays_until_it_is_voted_on_also_after_a_restart(tmp_path: Path) -> None:
    desk = make(tmp_path)
    ann = desk.annotator("Ann").id
    shown = desk.next(ann)
    assert shown is not None
    assert desk.next(ann) == shown
    desk.close()
    again = Desk.open(tmp_path / "desk")
    assert again.next(ann) == shown
    assert again.settings == desk.settings
    again.vote(ann, Ballot(shown.assignment, "tie"))
    following = again.next(ann)
    assert following is not None
    assert following.item.id != shown.item.id


def test_a_vote_is_about_the_answer_and_not_about_the_side(tmp_path: Path) -> None:
    """Both orders come up among 30 items, and whoever always takes answer 0 votes "first" always."""
    desk = make(tmp_path, 30)
    ann = desk.annotator("Ann").id
    orders = Counter()
    while (shown := desk.next(ann)) is not None:
        orders[shown.order] += 1
        vote = desk.vote(ann, Ballot(shown.assignment, "left" if shown.order[0] == 0 else "right", strength=3, reason=" because "))
        assert (vote.outcome, vote.order, vote.strength, vote.reason) == ("first", shown.order, 3, "because")
        assert vote.standing == (1, 2)
    assert set(orders) == {(0, 1), (1, 0)}


def test_the_same_ballot_again_is_the_same_vote_and_another_one_is_refused(tmp_path: Path) -> None:
    desk = make(tmp_path)
    ann, bob = desk.annotator("Ann").id, desk.annotator("Bob").id
    shown = desk.next(ann)
    assert shown is not None
    first = desk.vote(ann, Ballot(shown.assignment, "left", strength=1))
    assert desk.vote(ann, Ballot(shown.assignment, "left", strength=1)) == first
    for other in (Ballot(shown.assignment, "right", strength=1), Ballot(shown.assignment, "left"), Ballot(shown.assignment, "skip")):
        with pytest.raises(AlreadyVoted):
            desk.vote(ann, other)
    for who, assignment in ((bob, shown.assignment), (ann, 999)):
        with pytest.raises(BadBallot, match="not shown to this annotator"):
            desk.vote(who, Ballot(assignment, "left"))
    assert desk.votes() == [first]


def test_undo_brings_the_same_page_back_and_keeps_the_history(tmp_path: Path) -> None:
    desk = make(tmp_path)
    ann = desk.annotator("Ann").id
    assert desk.undo(ann) is None
    one, two = (next(pages(desk, ann)) for _ in range(2))
    open_page = desk.next(ann)
    assert desk.undo(ann) == two
    assert desk.next(ann) == two
    assert desk.undo(ann) == one
    assert desk.progress(ann).mine == 0
    assert [v.undone for v in desk.votes(undone=True)] == [True, True]
    assert desk.votes() == []
    # Forward again: what was taken back first, then the page that was open.
    back = []
    for _ in range(3):
        shown = desk.next(ann)
        assert shown is not None
        back.append(shown)
        desk.vote(ann, Ballot(shown.assignment, "right"))
    assert back == [one, two, open_page]
    assert [_side(v) for v in desk.votes()] == ["right"] * 3
    assert len(desk.votes(undone=True)) == 5


def _side(vote: Any) -> str:
    return "left" if vote.order[0] == {"first": 0, "second": 1}[vote.outcome] else "right"


def test_seconds_are_those_that_the_page_was_looked_at(tmp_path: Path, clock: Clock) -> None:
    desk = make(tmp_path, clock=clock)
    ann = desk.annotator("Ann").id
    one = desk.next(ann)
    assert one is not None
    clock.wait(10)
    desk.next(ann)  # a reload is no new look
    clock.wait(2.5)
    vote = desk.vote(ann, Ballot(one.assignment, "left"))
    assert (vote.seconds, vote.shown_at, vote.voted_at) == (12.5, "2025-01-01T00:00:00.000+00:00", "2025-01-01T00:00:12.500+00:00")
    two = desk.next(ann)
    assert two is not None
    clock.wait(60)
    desk.undo(ann)
    clock.wait(4)
    assert desk.vote(ann, Ballot(one.assignment, "right")).seconds == 4
    desk.next(ann)
    clock.wait(7)
    assert desk.vote(ann, Ballot(two.assignment, "left")).seconds == 7  # the minute before was spent on the other page


# -- ballots -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ballot, words",
    [
        ({"choice": "first"}, "no choice 'first'"),
        ({"choice": "tie", "strength": 4}, "strength is 1, 2 or 3"),
        ({"choice": "tie", "strength": True}, "strength is 1, 2 or 3"),
        ({"choice": "left", "ranks": (1, 2, 3)}, "left is no choice among 3"),
        ({"choice": "tie", "ranks": (1, 1, 1)}, "ranks go with the choice ranking"),
        ({"choice": "ranking"}, "0 ranks for 3 answers"),
        ({"choice": "ranking", "ranks": (1, 2)}, "2 ranks for 3 answers"),
        ({"choice": "ranking", "ranks": (1, 2, 4)}, "whole number from 1 to 3"),
        ({"choice": "ranking", "ranks": (1, 2, 0)}, "whole number from 1 to 3"),
        ({"choice": "ranking", "ranks": (1, 2, 1.5)}, "whole number from 1 to 3"),
        ({"choice": "ranking", "ranks": (None, None, None)}, "no answer has rank 1"),
        ({"choice": "skip", "reason": "x" * 4001}, "at most 4000"),
    ],
)
def test_a_ballot_that_is_not_clear_writes_nothing(tmp_path: Path, ballot: dict[str, Any], words: str) -> None:
    desk = make(tmp_path, k=3)
    ann = desk.annotator("Ann").id
    shown = desk.next(ann)
    assert shown is not None
    with pytest.raises(BadBallot, match=words):
        desk.vote(ann, Ballot(shown.assignment, **ballot))
    assert desk.votes(undone=True) == []
    assert desk.next(ann) == shown


def test_a_strength_is_kept_for_a_preference_and_asked_for_only_where_the_desk_does(tmp_path: Path) -> None:
    desk = make(tmp_path, strength=False)
    ann = desk.annotator("Ann").id
    shown = desk.next(ann)
    assert shown is not None
    with pytest.raises(BadBallot, match="does not ask"):
        desk.vote(ann, Ballot(shown.assignment, "left", strength=2))
    desk.change(strength=True)
    assert desk.vote(ann, Ballot(shown.assignment, "tie", strength=2)).strength is None


@given(data=st.data(), k=st.integers(2, 6))
@settings(max_examples=60, deadline=None)
def test_ranks_travel_with_their_answers_whatever_the_order_shown(data: st.DataObject, k: int) -> None:
    order = data.draw(st.permutations(range(k)))
    by_answer = [1, *data.draw(st.lists(st.none() | st.integers(1, k), min_size=k - 1, max_size=k - 1))]
    shown = tuple(by_answer[answer] for answer in order)
    assert opinion_of(Ballot(1, "ranking", ranks=shown), order).ranks == tuple(by_answer)


def test_texts_of_every_kind_come_back_as_they_were(tmp_path: Path) -> None:
    """Scripts, NUL, marks that turn text round, half a character: stored and returned, and a reason that is no text is mended."""
    odd = "<script>alert(1)</script> \x00 \u202eabc\u202c \u2028 " + "x" * 200_000
    desk = Desk.create(tmp_path / "desk")
    desk.add_items([make_item(odd, [odd + "1", "\ud83d broken"])])
    ann = desk.annotator("Ann").id
    shown = desk.next(ann)
    assert shown is not None
    assert shown.item.prompt == odd
    assert {a.text for a in shown.item.answers} == {odd + "1", "\ud83d broken"}
    vote = desk.vote(ann, Ballot(shown.assignment, "bad", reason="half \ud83d"))
    assert vote.reason == "half ?"
    assert Desk.open(tmp_path / "desk").votes() == [vote]


# -- whose turn --------------------------------------------------------------------------------------------------------


def test_each_item_gets_its_votes_from_as_many_people_and_no_more(tmp_path: Path) -> None:
    desk = make(tmp_path, 6, votes_per_item=2)
    people = [desk.annotator(name).id for name in ("Ann", "Bob", "Cy")]
    busy = list(people)
    while busy:
        for who in list(busy):
            shown = desk.next(who)
            if shown is None:
                busy.remove(who)
            else:
                desk.vote(who, Ballot(shown.assignment, "left"))
    votes = desk.votes()
    assert set(Counter(v.item for v in votes).values()) == {2}
    assert max(Counter((v.item, v.annotator) for v in votes).values()) == 1
    progress = desk.progress(people[0])
    assert (progress.done, progress.total, progress.left) == (12, 12, 0)


def test_items_that_were_begun_are_finished_first(tmp_path: Path) -> None:
    desk = make(tmp_path, 20, votes_per_item=3)
    people = [desk.annotator(f"p{i}").id for i in range(3)]
    for who in people:
        for _ in range(4):
            next(pages(desk, who))
    assert Counter(Counter(v.item for v in desk.votes()).values()) == {3: 4}


def test_a_skip_is_no_opinion_and_somebody_else_is_asked(tmp_path: Path) -> None:
    desk = make(tmp_path, 1)
    ann, bob = desk.annotator("Ann").id, desk.annotator("Bob").id
    assert len(list(pages(desk, ann, "skip"))) == 1
    assert desk.next(ann) is None
    assert desk.progress(ann).done == 0
    assert len(list(pages(desk, bob, "bad"))) == 1
    assert desk.progress(ann).done == 1


def test_what_somebody_looks_at_is_kept_for_them_for_a_while(tmp_path: Path, clock: Clock) -> None:
    desk = make(tmp_path, 1, clock=clock, hold_minutes=30)
    ann, bob = desk.annotator("Ann").id, desk.annotator("Bob").id
    shown = desk.next(ann)
    assert shown is not None
    assert desk.next(bob) is None
    assert desk.progress(bob).left == 1  # it may come back
    clock.wait(31 * 60)
    theirs = desk.next(bob)
    assert theirs is not None
    desk.vote(bob, Ballot(theirs.assignment, "left"))
    desk.vote(ann, Ballot(shown.assignment, "right"))  # late, and still welcome
    assert len(desk.votes()) == 2
    assert desk.progress(ann).done == 1


def test_repeats_are_own_items_from_a_while_ago_each_once_and_never_the_end(tmp_path: Path) -> None:
    desk = make(tmp_path, 60, repeat_share=0.5, votes_per_item=2)
    ann = desk.annotator("Ann").id
    shown = list(pages(desk, ann))
    again = [s for s in shown if s.repeat]
    assert 10 < len(again) < 60
    assert max(Counter(s.item.id for s in again).values()) == 1
    for i, s in enumerate(shown):
        if s.repeat:
            first = next(j for j, other in enumerate(shown) if other.item.id == s.item.id)
            assert i - first >= REPEAT_GAP
    assert {s.order for s in again} == {(0, 1), (1, 0)}  # sides are drawn anew
    assert sum(not s.repeat for s in shown) == 60
    assert desk.progress(ann).done == 60  # a repeat is no second opinion


def test_uncertain_items_come_first_and_it_is_recorded(tmp_path: Path) -> None:
    desk = make(tmp_path, 6, choice="uncertain")
    ids = list(desk.items())
    desk.set_spreads({ids[4]: 2.0, ids[1]: 0.5, ids[2]: 1.0})
    shown = list(pages(desk, desk.annotator("Ann").id))
    assert [s.item.id for s in shown[:3]] == [ids[4], ids[2], ids[1]]
    assert [s.chosen_by for s in shown] == ["uncertain"] * 3 + ["random"] * 3
    assert [v.chosen_by for v in desk.votes()] == [s.chosen_by for s in shown]
    with pytest.raises(UserError, match="not on this desk"):
        desk.set_spreads({"unknown": 1.0})


def test_draws_depend_on_the_seed_and_the_annotator(tmp_path: Path) -> None:
    def drawn(name: str, who: str, seed: int) -> list[tuple[str, tuple[int, ...]]]:
        desk = make(tmp_path / name, 20, seed=seed, votes_per_item=5)
        for extra in ("x", who):
            me = desk.annotator(extra).id
        return [(s.item.id, s.order) for s in pages(desk, me)]

    assert drawn("a", "Ann", 1) == drawn("b", "Bo", 1)  # second annotator of the same seed
    assert drawn("c", "Ann", 2) != drawn("a2", "Ann", 1)


# -- a crowd -----------------------------------------------------------------------------------------------------------


def test_twenty_annotators_at_once_fill_every_item_exactly(tmp_path: Path) -> None:
    """Each person has two windows open, so the same page is shown and voted on twice at the same moment."""
    desk = make(tmp_path, 25, votes_per_item=8, repeat_share=0.1)
    people = [desk.annotator(f"p{i}").id for i in range(20)]
    faults: list[BaseException] = []

    def work(who: int) -> None:
        try:
            while (shown := desk.next(who)) is not None:
                desk.vote(who, Ballot(shown.assignment, "left"))
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(who,)) for who in people for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    votes = desk.votes()
    assert set(Counter(v.item for v in votes if v.counts).values()) == {8}
    assert max(Counter(v.assignment for v in votes).values()) == 1
    assert max(Counter((v.item, v.annotator, v.repeat) for v in votes).values()) == 1
