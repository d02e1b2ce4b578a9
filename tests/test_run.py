"""The run directory: whole or old, one writer, nothing smoothed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tether.errors import UserError
from tether.recipe import DPORecipe
from tether.run import Run

RECIPE = DPORecipe(model="m", data="d.jsonl", loss_type="simpo")


def test_a_new_run_keeps_the_whole_recipe_and_what_it_was_made_with(tmp_path: Path) -> None:
    with Run.create(tmp_path / "r", RECIPE) as run:
        assert run.is_new
    kept = yaml.safe_load((tmp_path / "r/recipe.yaml").read_text())
    assert kept["command"] == "dpo"
    assert kept["beta"] == 2.0
    assert kept["run"] == str(tmp_path / "r")
    assert {"version", "commit", "started", "packages", "machine"} <= set(kept["record"])
    again = Run.open(tmp_path / "r").recipe
    assert again.resolved() == {**RECIPE.resolved(), "run": str(tmp_path / "r")}


def test_a_folder_with_anything_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"not empty.*notes\.txt"):
        Run.create(tmp_path, RECIPE)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_run_with_steps_is_refused_and_resume_is_offered(tmp_path: Path) -> None:
    with Run.create(tmp_path / "r", RECIPE) as run:
        run.log(1, {"loss": 1.0})
    with pytest.raises(UserError, match="tether resume"):
        Run.create(tmp_path / "r", RECIPE)


def test_a_run_that_never_took_a_step_can_be_begun_again(tmp_path: Path) -> None:
    with Run.create(tmp_path / "r", RECIPE) as run:
        run.note("error", "the model was mistyped")
    with Run.create(tmp_path / "r", RECIPE) as run:
        assert run.notices() == []


def test_what_is_not_finite_is_written_and_read_as_such(tmp_path: Path) -> None:
    with Run.create(tmp_path / "r", RECIPE) as run:
        run.log(1, {"loss": math.nan, "grad_norm": math.inf, "margin": -math.inf, "n": 3})
    line = json.loads((tmp_path / "r/metrics.jsonl").read_text())
    assert (line["loss"], line["grad_norm"], line["margin"]) == ("NaN", "Infinity", "-Infinity")
    row = Run.open(tmp_path / "r").metrics()[0]
    assert math.isnan(row["loss"])
    assert (row["grad_norm"], row["margin"], row["n"]) == (math.inf, -math.inf, 3)


def test_rows_of_one_step_are_read_as_one(tmp_path: Path) -> None:
    with Run.create(tmp_path / "r", RECIPE) as run:
        run.log(1, {"loss": 1.0})
        run.log(2, {"loss": 0.5})
        run.log(2, {"eval_loss": 0.7})
        with pytest.raises(ValueError, match="truncate first"):
            run.log(1, {"loss": 0.1})
        assert run.metrics() == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5, "eval_loss": 0.7}]


def test_truncating_forgets_later_rows_of_every_file_and_keeps_notices_without_a_step(tmp_path: Path) -> None:
    with Run.create(tmp_path / "r", RECIPE) as run:
        for step in (1, 2, 3):
            run.log(step, {"loss": 1 / step})
            run.append("pairs.jsonl", step, [{"pair": 0}, {"pair": 1}])
        run.note("dropped", "d.jsonl:7")
        run.note("warning", "late", step=3)
        run.truncate(1)
        assert [row["step"] for row in run.metrics()] == [1]
        assert len(run.rows("pairs.jsonl")) == 2
        assert [row["kind"] for row in run.notices()] == ["dropped"]
        run.log(2, {"loss": 0.4})
        assert [row["loss"] for row in run.metrics()] == [1.0, 0.4]


def test_the_same_notice_is_kept_once_also_after_reopening(tmp_path: Path) -> None:
    with Run.create(tmp_path / "r", RECIPE) as run:
        run.note("dropped", "d.jsonl:7", action="drop")
        run.note("dropped", "d.jsonl:7", action="drop")
        run.note("dropped", "d.jsonl:8", action="drop")
    with Run.open(tmp_path / "r") as run:
        run.note("dropped", "d.jsonl:7", action="drop")
        assert len(run.notices()) == 2


def test_a_torn_line_is_left_out_and_then_taken_out(tmp_path: Path) -> None:
    with Run.create(tmp_path / "r", RECIPE) as run:
        run.log(1, {"loss": 1.0})
    path = tmp_path / "r/metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    with Run.open(tmp_path / "r") as run:
        assert [row["step"] for row in run.metrics()] == [1]
        run.log(2, {"loss": 0.5})
        assert [row["step"] for row in run.metrics()] == [1, 2]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    with Run.create(tmp_path / "r", RECIPE) as run:
        run.log(1, {"loss": 1.0})
    path = tmp_path / "r/metrics.jsonl"
    path.write_text('{"step": 1}\nrubbish\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
        Run.open(tmp_path / "r").metrics()


def test_only_complete_checkpoints_count_and_the_newest_is_last(tmp_path: Path) -> None:
    with Run.create(tmp_path / "r", RECIPE) as run:
        for name in ("000002", "000010", "000009", ".000012.tmp", "000011"):
            (run.folder / "checkpoints" / name).mkdir(parents=True)
            if name != "000011":
                (run.folder / "checkpoints" / name / "manifest.json").write_text("{}")
        assert [path.name for path in run.checkpoints()] == ["000002", "000009", "000010"]
        assert not run.is_new


def test_two_writers_are_refused_and_readers_are_not(tmp_path: Path) -> None:
    with Run.create(tmp_path / "r", RECIPE) as run:
        run.log(1, {"loss": 1.0})
        other = Run.open(tmp_path / "r")
        assert len(other.metrics()) == 1
        with pytest.raises(UserError, match="another process"):
            other.log(2, {"loss": 1.0})
    with Run.open(tmp_path / "r") as other:
        other.log(2, {"loss": 1.0})


def test_the_lock_dies_with_its_process(tmp_path: Path) -> None:
    script = (
        "import os, sys; from tether.run import Run; from tether.recipe import DPORecipe\n"
        "run = Run.create(sys.argv[1], DPORecipe(model='m', data='d')); run.log(1, {'loss': 1.0}); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "r")], check=False)
    assert done.returncode == 9
    with Run.open(tmp_path / "r") as run:
        run.log(2, {"loss": 0.5})
        assert len(run.metrics()) == 2


def test_changed_data_is_refused_when_a_run_is_continued(tmp_path: Path) -> None:
    with Run.create(tmp_path / "r", RECIPE) as run:
        run.fingerprint(["d.jsonl"], "aaa")
        run.fingerprint(["e.jsonl"], "bbb")
    with Run.open(tmp_path / "r") as run:
        run.fingerprint(["d.jsonl"], "aaa")
        with pytest.raises(UserError, match="has changed since"):
            run.fingerprint(["d.jsonl"], "ccc")


def test_a_summary_makes_a_run_finished(tmp_path: Path) -> None:
    with Run.create(tmp_path / "r", RECIPE) as run:
        with run.phase("encoding"):
            pass
        assert not run.finished
        summary = run.finish({"steps": 3, "loss": math.nan})
        assert summary["steps"] == 3
        assert "encoding" in summary["phases"]
    again = Run.open(tmp_path / "r")
    assert again.finished
    kept = again.summary()
    assert kept is not None
    assert math.isnan(kept["loss"])


def test_what_is_no_run_is_refused_with_the_runs_that_there_are(tmp_path: Path) -> None:
    Run.create(tmp_path / "first", RECIPE).close()
    with pytest.raises(UserError, match=r"no such folder.*first"):
        Run.open(tmp_path / "frist")
    with pytest.raises(UserError, match="not a run directory"):
        Run.open(tmp_path)
