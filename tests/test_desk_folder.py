"""What a desk keeps: names, items, its folder and its database."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from tests import desks
from tests.desks import make
from tether.collect.ballots import Ballot
from tether.collect.desk import Desk
from tether.collect.items import make_item
from tether.errors import UserError

# -- names, items, folders ---------------------------------------------------------------------------------------------


def test_a_name_is_one_person_whatever_the_case_and_blanks(tmp_path: Path) -> None:
    desk = make(tmp_path)
    ann = desk.annotator("  Ann  Lee ")
    assert ann.name == "Ann Lee"
    assert desk.annotator("ann lee") == ann
    assert desk.by_token(ann.token) == ann
    assert desk.by_token("guess") is None
    assert len(ann.token) >= 20
    assert desk.annotators() == [ann]
    for bad in ("", "   ", "x" * 81, "a\x00b", "a\u202eb"):
        with pytest.raises(UserError, match="1 to 80 printable"):
            desk.annotator(bad)
    for method in (desk.next, desk.undo, desk.progress):
        with pytest.raises(UserError, match="no annotator 77"):
            method(77)


def test_an_item_is_added_once_and_an_id_stands_for_one_thing(tmp_path: Path) -> None:
    desk = make(tmp_path, 3)
    assert desk.add_items([desks.item(1, answers=["answer 1", "answer 0"]), desks.item(7)]) == 1
    assert len(desk.items()) == 4
    other = make_item("another prompt", ["a", "b"], item_id=next(iter(desk.items())))
    with pytest.raises(UserError, match="two different items"):
        desk.add_items([desks.item(8), other])
    assert len(desk.items()) == 4  # all or nothing


def test_folders_that_are_no_desk_are_told_in_a_sentence(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(UserError, match="there is a desk already"):
        Desk.create(tmp_path / "desk")
    with pytest.raises(UserError, match="there is no desk"):
        Desk.open(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/letter.txt").write_text("dear")
    with pytest.raises(UserError, match="not empty"):
        Desk.create(tmp_path / "full")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="no desk can be made here"):
        Desk.create(tmp_path / "file")
    settings = tmp_path / "desk/desk.json"
    stored = json.loads(settings.read_text())
    settings.write_text(json.dumps({**stored, "format": 99}))
    with pytest.raises(UserError, match="another format"):
        Desk.open(tmp_path / "desk")
    settings.write_text(json.dumps({**stored, "settings": {**stored["settings"], "votes_per_item": 0}}))
    with pytest.raises(UserError, match="at least 1"):
        Desk.open(tmp_path / "desk")
    settings.write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        Desk.open(tmp_path / "desk")
    settings.write_text(json.dumps(stored))
    for name in (tmp_path / "desk").glob("desk.sqlite*"):
        name.unlink()
    with pytest.raises(UserError, match="database of the desk is missing"):
        Desk.open(tmp_path / "desk")
    (tmp_path / "desk/desk.sqlite").write_text("This is no database, and long enough to be seen as none. " * 10)
    with pytest.raises(UserError, match="cannot be read or written"):
        Desk.open(tmp_path / "desk")


def test_a_desk_on_a_full_disk_says_so_and_takes_no_vote(tmp_path: Path) -> None:
    desk = make(tmp_path, 2)
    ann = desk.annotator("Ann").id
    shown = desk.next(ann)
    assert shown is not None
    connection: sqlite3.Connection = desk.store._connection()
    (pages_now,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages_now}")
    with pytest.raises(UserError, match="full"):
        desk.vote(ann, Ballot(shown.assignment, "left", reason="\u4e00" * 4000))
    assert desk.votes(undone=True) == []
    assert desk.next(ann) == shown
    connection.execute("PRAGMA max_page_count = 1000000")
    assert desk.vote(ann, Ballot(shown.assignment, "left")).outcome in ("first", "second")


def test_the_database_is_written_ahead_and_flushed(tmp_path: Path) -> None:
    connection = make(tmp_path).store._connection()
    assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert connection.execute("PRAGMA synchronous").fetchone()[0] == 2  # FULL
