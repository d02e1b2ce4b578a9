"""`tether lab`: lists, runs, refuses, and writes one offline page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tether import cli
from tether.lab import catalogue
from tether.lab.catalogue import NAMES, experiment


def test_without_a_name_every_experiment_is_listed(capsys: Any) -> None:
    assert cli.run(["lab"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_can_be_found_and_has_a_page_of_its_own(name: str) -> None:
    found = experiment(name)
    assert (found.name, found.question) == (name, NAMES[name])
    assert (Path(__file__).parents[1] / "docs" / "lab" / f"{name}.md").is_file()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["normalize"], "there is no experiment 'normalize'. Did you mean normalise?"),
        (["clipping", "--as-printed", "--true-gradient"], "exclude each other"),
        (["clipping", "--as-printed"], "--as-printed: clipping: print and mathematics do not differ there"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], told: str, tmp_path: Path, capsys: Any) -> None:
    assert cli.run(["lab", *words, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert told in " ".join(error.split())
    assert "Traceback" not in error


def test_all_is_one_offline_page_with_a_table_of_contents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    quick = {name: NAMES[name] for name in ("normalise", "memory")}
    monkeypatch.setattr(catalogue, "NAMES", quick)
    assert cli.run(["lab", "all", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert page.count('<a href="#part-') == 2
    assert not re.search(r"https?:|@import|url\(|<script|<img|<link", page)
    told = capsys.readouterr()
    assert all(sentence[:20] in " ".join(told.out.split()) for name in quick for sentence in experiment(name).run("both").see)
    assert "index.html" in told.err


def test_one_experiment_has_a_page_of_its_name(tmp_path: Path) -> None:
    assert cli.run(["lab", "normalise", "--out", str(tmp_path)]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["normalise.html"]
