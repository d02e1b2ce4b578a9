"""The desk at a terminal: by lines from a pipe and by keys of a real pseudo-terminal; blind, undone, ranked, and safe to look at."""

from __future__ import annotations

import io
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.desks import desk, item
from tether.collect.ballots import BadBallot, Ballot
from tether.collect.desk import Desk
from tether.collect.guidelines import default_guidelines
from tether.collect.items import make_item
from tether.collect.keyboard import ranks_of
from tether.collect.terminal import run_terminal

TAKEN = re.compile(r"-- (\d+) --\n(.*)")


def typed(where: Desk, *lines: str, name: str = "Ana") -> tuple[int, str]:
    out = io.StringIO()
    given = run_terminal(where, where.annotator(name), io.StringIO("".join(f"{line}\n" for line in lines)), out)
    return given, out.getvalue()


def test_lines_from_a_pipe_are_votes(tmp_path: Path) -> None:
    made = desk(tmp_path / "desk", [item(i) for i in range(5)])
    given, said = typed(made, "1", "2 3 it is right", "t", "b nobody said so", "s")
    assert given == 5
    votes = made.votes()
    assert [v.outcome for v in votes][2:] == ["tie", "bad", "skip"]
    assert (votes[1].strength, votes[1].reason) == (3, "it is right")
    assert votes[3].reason == "nobody said so"
    assert "Nothing is left for you" in said
    assert "5 votes given; all of them are on the disk." in said


def test_a_vote_is_about_the_answer_that_stood_there(tmp_path: Path) -> None:
    """Whatever the shuffled order: always choosing the right answer by what is on the screen makes all votes for it."""
    made = desk(tmp_path / "desk", [item(i) for i in range(12)])
    person = made.annotator("Ana")
    orders = set()
    for _ in range(12):
        shown = made.next(person.id)
        assert shown is not None
        orders.add(shown.order)
        out = io.StringIO()
        run_terminal(made, person, io.StringIO("q\n"), out)
        seen = dict(TAKEN.findall(out.getvalue()))
        run_terminal(made, person, io.StringIO(next(n for n, text in seen.items() if text.startswith("right")) + "\nq\n"), io.StringIO())
    assert orders == {(0, 1), (1, 0)}
    assert {v.outcome for v in made.votes()} == {"first"}


def test_the_end_of_the_input_loses_nothing_and_the_same_item_comes_back(tmp_path: Path) -> None:
    made = desk(tmp_path / "desk", [item(i) for i in range(4)])
    assert typed(made, "1", "2")[0] == 2
    again, said = typed(Desk.open(tmp_path / "desk"), "q")
    assert again == 0
    assert TAKEN.findall(said) == TAKEN.findall(typed(made, "q")[1])
    assert typed(made, "1", "1")[0] == 2
    assert len(made.votes()) == 4


def test_undo_takes_back_and_shows_the_item_again_in_the_same_order(tmp_path: Path) -> None:
    made = desk(tmp_path / "desk", [item(i) for i in range(3)])
    given, said = typed(made, "u", "1", "u", "2", "q")
    assert given == 1
    assert "There is no vote to take back." in said
    first, second, third, *_ = [TAKEN.findall(part) for part in said.split("\n== ")[1:]]
    assert first == third != second
    assert len(made.votes()) == 1
    assert len(made.votes(undone=True)) == 2


def test_the_last_vote_can_be_taken_back_when_nothing_is_left(tmp_path: Path) -> None:
    made = desk(tmp_path / "desk", [item(0)])
    given, _ = typed(made, "1", "u", "b", "")
    assert given == 1
    assert [v.outcome for v in made.votes()] == ["bad"]


def test_what_is_no_choice_is_told_and_asked_again(tmp_path: Path) -> None:
    made = desk(tmp_path / "desk", [item(0)], reasons=("It is right.", "It is clear."))
    given, said = typed(made, "3", "", "\x1b[2J", "1 2 9", "1 2 #2")
    assert given == 1
    assert "'3' is no key here" in said
    assert "Please choose" in said
    assert "there is no reason 9" in said
    assert "\x1b" not in said
    (vote,) = made.votes()
    assert (vote.strength, vote.reason) == (2, "It is clear.")


def test_reason_and_strength_may_come_before_the_choice(tmp_path: Path) -> None:
    made = desk(tmp_path / "desk", [item(0), item(1)], reasons=("It is right.", "It is clear."))
    typed(made, "+", "+", "r", "1", "1", "t")
    first, second = made.votes()
    assert (first.strength, first.reason) == (2, "It is right.")
    assert (second.strength, second.reason) == (None, "")  # they belong to the item that was in front


def test_a_desk_that_asks_no_strength_takes_none(tmp_path: Path) -> None:
    made = desk(tmp_path / "desk", [item(0)], strength=False)
    _, said = typed(made, "+", "1 2 is twice as good")
    assert "'+' is no key here" in said
    (vote,) = made.votes()
    assert (vote.strength, vote.reason) == (None, "2 is twice as good")


# -- rankings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("2 1 3", (2, 1, 3)),
        ("213", (2, 1, 3)),
        ("2>1>3", (2, 1, 3)),
        ("2, 1=3", (2, 1, 2)),
        ("1 = 2 = 3", (1, 1, 1)),
        ("21-3", (2, 1, None)),
        ("2 -1=3", (None, 1, None)),
    ],
)
def test_an_order_becomes_ranks(text: str, ranks: tuple[int | None, ...]) -> None:
    assert ranks_of(text, 3) == ranks


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("2 1", "no rank was given for 3"),
        ("1 1 2 3", "named twice"),
        ("1 2 4", "no answer '4'"),
        ("", "no rank was given for 1, 2, 3"),
        ("x", "no answer 'x'"),
    ],
)
def test_an_order_with_gaps_or_repeats_is_refused(text: str, told: str) -> None:
    with pytest.raises(BadBallot, match=told):
        ranks_of(text, 3)


def test_more_than_nine_answers_need_blanks() -> None:
    assert ranks_of("10 1 2 3 4 5 6 7 8 9", 10) == (2, 3, 4, 5, 6, 7, 8, 9, 10, 1)


def test_a_ranking_is_kept_by_answer_not_by_place(tmp_path: Path) -> None:
    """Whatever order they are shown in, ranking by their names keeps c before a before b."""
    items = [make_item(f"question {i}", ["a", "b", "c"]) for i in range(6)]
    made = desk(tmp_path / "desk", items)
    person = made.annotator("Ana")
    for _ in items:
        shown = made.next(person.id)
        assert shown is not None
        texts = [shown.item.answers[place].text for place in shown.order]
        order = " ".join(str(texts.index(t) + 1) for t in "cab")
        run_terminal(made, person, io.StringIO(f"{order} : well ordered\nq\n"), io.StringIO())
    for vote in made.votes():
        answers = made.items()[vote.item].answers
        assert {answers[i].text: vote.ranks[i] for i in range(3)} == {"c": 1, "a": 2, "b": 3}  # type: ignore[index]
        assert vote.reason == "well ordered"


def test_ties_both_bad_and_gaps_of_rankings(tmp_path: Path) -> None:
    made = desk(tmp_path / "desk", [make_item(f"question {i}", ["a", "b", "c"]) for i in range(3)])
    given, said = typed(made, "1 2", "t", "b", "s")
    assert given == 3
    assert "no rank was given for 3" in said
    tie, bad, skip = made.votes()
    assert (tie.outcome, tie.ranks) == ("ranking", (1, 1, 1))
    assert (bad.outcome, skip.outcome) == ("bad", "skip")


# -- what is shown -------------------------------------------------------------------------------------------------------


def test_nothing_tells_who_wrote_an_answer(tmp_path: Path) -> None:
    made = desk(tmp_path / "desk", [item(i, models=["secret-model-a", "secret-model-b"]) for i in range(3)])
    _, said = typed(made, "1", "a", "?", "g", "2", "1")
    assert "secret" not in said


def test_a_repeat_looks_like_any_other_item(tmp_path: Path) -> None:
    made = desk(tmp_path / "desk", [item(i) for i in range(30)], repeat_share=0.5)
    _, said = typed(made, *["1"] * 60)
    assert any(v.repeat for v in made.votes())
    assert "repeat" not in said.lower().replace("question", "")
    assert "again" not in said.replace("show it again", "")


HOSTILE = "a\x1b]0;title\x07b\x1b[2J\x00 \u202eevil\u202c" + "x" * 5000 + "[red]markup[/red]"


def test_control_characters_of_an_answer_are_shown_not_obeyed(tmp_path: Path) -> None:
    made = desk(tmp_path / "desk", [make_item("who\x1b[31m?", [HOSTILE, "plain"])])
    _, said = typed(made, "1")
    assert not set(said) & {"\x1b", "\x07", "\x00", "\u202e", "\u202c"}
    assert "[U+001B][2J" in said
    assert "[U+202E]evil" in said
    assert "[red]markup[/red]" in said


def test_bytes_that_are_no_text_do_not_end_the_session(tmp_path: Path) -> None:
    made = desk(tmp_path / "desk", [item(0)])
    source = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n1\n"), encoding="utf-8")
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert run_terminal(made, made.annotator("Ana"), source, out) == 1


def test_guidelines_come_first(tmp_path: Path) -> None:
    made = desk(tmp_path / "desk", [item(0)], guidelines=default_guidelines())
    _, said = typed(made, "q")
    assert said.index("Which answer is better?") < said.index("question 0")
    for word in ("Tie", "Both bad", "Skip", "same judge"):
        assert word in default_guidelines()


def test_a_vote_given_in_another_window_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    made = desk(tmp_path / "desk", [item(0), item(1)])
    person = made.annotator("Ana")
    shown = made.next(person.id)
    assert shown is not None

    class Slow(io.StringIO):
        """Votes elsewhere just before the first line is read."""

        def readline(self, *args: Any) -> str:
            if not made.votes():
                made.vote(person.id, Ballot(shown.assignment, "left"))
            return super().readline(*args)

    out = io.StringIO()
    run_terminal(made, person, Slow("2\n1\n"), out)
    assert "another vote was given" in out.getvalue()
    assert len(made.votes()) == 2


# -- a real terminal -----------------------------------------------------------------------------------------------------


def test_single_keys_at_a_terminal(tmp_path: Path) -> None:
    """Keys count without Enter: any key begins, right arrow, + + 1, r with a line, undo, tie, q; the modes are as before."""
    termios = pytest.importorskip("termios", reason="there are no pseudo-terminals here")
    made = desk(tmp_path / "desk", [item(i) for i in range(4)], guidelines="# Be fair")
    ours, theirs = os.openpty()
    before = termios.tcgetattr(theirs)
    seen: list[bytes] = []
    threading.Thread(target=_drain, args=(ours, seen), daemon=True).start()
    with open(theirs, "r+b", buffering=0, closefd=False) as raw:
        stdin, stdout = io.TextIOWrapper(raw, encoding="utf-8"), io.TextIOWrapper(io.FileIO(theirs, "w", closefd=False), encoding="utf-8")
        session = threading.Thread(target=run_terminal, args=(made, made.annotator("Ana"), stdin, stdout), daemon=True)
        session.start()
        for keys, n, undone in (
            (b" ", 0, 0),
            (b"\x1b[C", 1, 0),
            (b"++1", 2, 0),
            (b"t", 3, 0),
            (b"u", 2, 1),
            (b"b", 3, 1),
        ):
            _type(ours, keys, seen)
            _until(lambda n=n, undone=undone: (len(made.votes()), len(made.votes(undone=True)) - len(made.votes())) == (n, undone))
        _type(ours, b"r", seen)
        _until(lambda: b"Reason: " in b"".join(seen))
        os.write(ours, "schön\n".encode())
        _until(lambda: b"with a reason" in b"".join(seen))
        _type(ours, b"2", seen)
        _until(lambda: len(made.votes()) == 4)
        _type(ours, b"q", seen)
        session.join(10)
        assert not session.is_alive()
        stdin.detach()
    votes = made.votes()
    assert [v.strength for v in votes] == [None, 2, None, None]
    assert [v.outcome for v in votes][2:3] == ["bad"]
    assert votes[0].outcome == ("first" if votes[0].order == (1, 0) else "second")  # the arrow to the right
    assert votes[3].reason == "schön"
    assert termios.tcgetattr(theirs)[3] == before[3]
    assert b"Be fair" in b"".join(seen)


def _drain(fd: int, seen: list[bytes]) -> None:
    while True:
        try:
            seen.append(os.read(fd, 65536))
        except OSError:
            return


def _type(fd: int, keys: bytes, seen: list[bytes]) -> None:
    """Once a question stands there: keys typed before it would be echoed in the terminal's own mode, and might be dropped."""
    _until(lambda: b"".join(seen).rstrip().endswith(b":"))
    for key in [keys] if keys.startswith(b"\x1b") else [bytes([k]) for k in keys]:
        _until(lambda: b"".join(seen).rstrip().endswith(b":"))
        size = len(b"".join(seen))
        os.write(fd, key)
        _until(lambda size=size: len(b"".join(seen)) > size)


def _until(true: Any, seconds: float = 10) -> None:
    import time

    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)
