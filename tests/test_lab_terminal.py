"""`tether lab` at a terminal of any width, with a page that cannot be written, and with flags that ask for nothing."""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tether import atomic, cli
from tether.lab import catalogue, page
from tether.lab.catalogue import NAMES, experiment
from tether.lab.experiment import Experiment, Result
from tether.lab.terminal import show
from tether.report.view import Table

MADE = Table(
    ["weights of the run", "step", "probabilities", "what E[r] is worth, and why"],
    [
        ["as printed", "2", "0.157 0.627 0.038 0.178", "A sentence that needs a line or two before it has said what it means."],
        ["", "10", "−7.33904839 −11.6168251", "[bold]Brackets[/] are text."],
    ],
    "A table",
    "Its caption: E[r].",
    frozenset({1, 2}),
)
WORLD = Experiment("made", "A title [x]", "A question", lambda variant: Result(("First: E[r].", "Second."), [MADE]))


def shown(width: int) -> str:
    stream = io.StringIO()
    show(Console(file=stream, width=width, highlight=False, markup=False), WORLD, WORLD.run("both"))
    return stream.getvalue()


@pytest.mark.parametrize("width", [40, 45, 60, 80, 160])
def test_no_figure_and_no_word_is_cut_at_any_width(width: int) -> None:
    told = shown(width)
    assert max(map(len, told.splitlines())) <= width
    assert "…" not in told
    words = set(re.findall(r"[^\s│┃]+", told))
    wanted = " ".join([MADE.title, MADE.caption, *MADE.header, *(cell for row in MADE.rows for cell in row)])
    assert set(wanted.split()) <= words
    assert {"E[r].", "[x]", "[bold]Brackets[/]"} <= words


@pytest.mark.parametrize("width", [60, 160])
def test_the_numbers_of_a_cell_stay_on_one_line(width: int) -> None:
    assert "0.157 0.627 0.038 0.178" in shown(width)


def test_a_narrow_terminal_gets_lines_in_which_every_row_says_which_it_is() -> None:
    told = shown(45)
    assert "┃" not in told
    assert len(re.findall(r"^weights of the run +as printed", told, re.MULTILINE)) == 2


@pytest.mark.parametrize("name", [n for n in NAMES if n in ("ppo", "normalise", "memory", "clipping")])
def test_the_experiments_own_tables_are_whole_at_sixty_columns(name: str) -> None:
    stream, found = io.StringIO(), experiment(name)
    result = found.run("both")
    show(Console(file=stream, width=60, highlight=False, markup=False), found, result)
    told = stream.getvalue()
    assert "…" not in told
    assert all(cell in told for table in result.tables for row in table.rows for i, cell in enumerate(row) if i in table.numeric)


def test_signs_that_the_encoding_lacks_do_not_stop_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(kept, encoding="ascii"))
    assert cli.run(["lab", "normalise", "--out", str(tmp_path)]) == 0
    sys.stdout.flush()
    assert b"2.6458" in kept.getvalue()


def refused(words: list[str], capsys: Any) -> str:
    assert cli.run(["lab", *words]) == 2
    told = capsys.readouterr()
    assert not told.out  # nothing ran
    return " ".join(told.err.split())


def test_a_page_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "file").write_text("kept")
    for out in ("file", "file/sub"):
        assert "is a file, not a folder. Name another folder with --out." in refused(["memory", "--out", str(tmp_path / out)], capsys)
    assert (tmp_path / "file").read_text() == "kept"
    (tmp_path / "taken" / "memory.html").mkdir(parents=True)
    assert "is a folder; the page would have this name" in refused(["memory", "--out", str(tmp_path / "taken")], capsys)


def test_a_folder_that_takes_no_file_is_the_users_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    def full(path: Path, content: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic, "write_file", full)
    assert cli.run(["lab", "memory", "--out", str(tmp_path)]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "memory.html: the page cannot be written: No space left on device. Name another folder" in told
    monkeypatch.setattr("tether.commands.lab.os.access", lambda path, mode: mode != os.W_OK)
    assert "nothing can be written into this folder" in refused(["memory", "--out", str(tmp_path)], capsys)


@pytest.mark.parametrize("option", ["--as-printed", "--true-gradient"])
def test_an_option_without_a_name_is_not_passed_over(option: str, capsys: Any) -> None:
    assert f"{option}: no experiment is named. Write `tether lab ppo {option}`" in refused([option], capsys)


def test_all_beside_names_is_all_and_a_wrong_name_is_still_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setattr(catalogue, "NAMES", {name: NAMES[name] for name in ("normalise", "memory")})
    assert "no experiment 'memry'. Did you mean memory?" in refused(["all", "memry"], capsys)
    assert cli.run(["lab", "memory", "all", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "index.html").read_text(encoding="utf-8").count('<a href="#part-') == 2


def test_a_page_of_one_side_says_so(tmp_path: Path) -> None:
    for variant, words in page.ONLY.items():
        page.write(tmp_path / "page.html", [(WORLD, WORLD.run(variant))], variant)
        told = (tmp_path / "page.html").read_text(encoding="utf-8")
        assert words.replace("'", "&#39;") in told
        assert told.count("Only ") == (variant != "both")
