"""From votes to a model: what `tether export` writes goes straight into the commands that train on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests import desks
from tests.tiny import save_tiny
from tether import cli
from tether.collect.ballots import Ballot
from tether.collect.items import make_item
from tether.run import Run


@pytest.fixture
def desk_folder(tmp_path: Path) -> Path:
    items = [
        make_item(f"w{10 + i} w11", [f"w{20 + i} w{40 + i}", f"w{60 + i}", *([f"w{50 + i}"] if i % 3 == 0 else [])]) for i in range(12)
    ]
    desk = desks.desk(tmp_path / "votes.desk", items, votes_per_item=2)
    for name in ("Ann", "Bo"):
        me = desk.annotator(name).id
        while (shown := desk.next(me)) is not None:
            if len(shown.order) == 3:
                desk.vote(me, Ballot(shown.assignment, "ranking", ranks=tuple(i + 1 for i in shown.order)))
            else:
                desk.vote(me, Ballot(shown.assignment, "left" if shown.order[0] == 0 else "right", strength=1 if name == "Bo" else 3))
    return desk.folder


@pytest.mark.parametrize(
    "kind, rule, command, more",
    [
        ("preferences", "soft", "reward", []),
        ("rankings", "majority", "reward", []),
        ("preferences", "all", "dpo", []),
        ("feedback", "majority", "dpo", ["loss_type=kto"]),
    ],
)
def test_votes_train(tmp_path: Path, desk_folder: Path, kind: str, rule: str, command: str, more: list[str]) -> None:
    def run(*words: str) -> Any:
        result = CliRunner().invoke(cli.app, list(words))
        assert result.exception is None, result.output
        return result

    run("export", str(desk_folder), "--as", kind, "--votes", rule, "--out", str(tmp_path / "rows.jsonl"))
    model = save_tiny(tmp_path / "tiny")
    words = ["max_steps=2", "batch_size=4", "precision=fp32", *more]
    run(command, "--model", str(model), "--data", str(tmp_path / "rows.jsonl"), "--run", str(tmp_path / "run"), *words)
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert (tmp_path / "run/summary.json").exists()
    assert sum("loss" in m for m in metrics) == 2
    with Run.open(tmp_path / "run") as finished:
        notices = finished.notices()
    assert [n for n in notices if n["kind"] in ("reject", "drop", "duplicate", "empty", "identical")] == []
