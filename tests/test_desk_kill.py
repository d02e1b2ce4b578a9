"""The desk's process is killed while people vote: every acknowledged vote is there, and none twice. bench/desk_kill.py has the full size."""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import ModuleType

import pytest

from tests import desks
from tether.collect.ballots import Ballot

SIZE = [int(n) for n in os.environ.get("TETHER_DESK_KILL", "8,240,3").split(",")]  # annotators, votes, kills


@pytest.fixture
def ordeal(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "bench"))
    return __import__("desk_kill")


def test_no_acknowledged_vote_is_lost_or_doubled_by_a_kill(ordeal: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="the desk's web application is not installed: pip install 'tether-lm[desk]'")
    annotators, votes, kills = SIZE
    figures = ordeal.run(tmp_path, annotators=annotators, votes=votes, kills=kills, seed=random.randrange(10**6))
    assert figures["votes"] >= votes
    assert figures["kills"] == kills


def test_a_vote_that_is_not_there_or_another_one_would_be_seen(ordeal: ModuleType, tmp_path: Path) -> None:
    desk = desks.desk(tmp_path / "desk", [desks.item(i) for i in range(3)])
    ann = desk.annotator("Ann")
    shown = desk.next(ann.id)
    assert shown is not None
    desk.vote(ann.id, Ballot(shown.assignment, "left"))
    person = ordeal.Person("Ann", 0, random.Random(0))
    for acknowledged, lost in (
        ({shown.assignment: "left"}, []),
        ({shown.assignment: "right"}, [("Ann", shown.assignment)]),
        ({shown.assignment: "left", 99: "tie"}, [("Ann", 99)]),
    ):
        person.acknowledged = acknowledged
        assert ordeal.missing(tmp_path / "desk", [person]) == lost
