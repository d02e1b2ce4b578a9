"""Recipe files, key=value words and flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tether.config import Configured, configure
from tether.errors import UserError

BASE = "command: dpo\nmodel: m\ndata: d.jsonl\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "my.yaml"
    path.write_text(text)
    return path


def refusal(folder: Path, text: str, words: list[str] | None = None, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        configure(write(folder, text), words or [], **options)
    return str(caught.value)


def made(folder: Path, text: str, words: list[str] | None = None, **options: Any) -> Configured:
    return configure(write(folder, text), words or [], **options)


@pytest.mark.parametrize(
    ("written", "read"), [("1e-5", 1e-5), ("1E-5", 1e-5), ("5e-7", 5e-7), ("1.0e-6", 1e-6), (".5", 0.5), ("2", 2.0), ("+1e-3", 1e-3)]
)
def test_numbers_are_numbers_however_they_are_written(tmp_path: Path, written: str, read: float) -> None:
    assert made(tmp_path, f"{BASE}learning_rate: {written}\n").recipe.learning_rate == read
    assert made(tmp_path, BASE, [f"learning_rate={written}"]).recipe.learning_rate == read


@pytest.mark.parametrize("written", ["yes", "no", "on", "off", "'true'"])
def test_only_true_and_false_are_truth_values(tmp_path: Path, written: str) -> None:
    assert "my.yaml:4: shuffle: true or false is wanted" in refusal(tmp_path, f"{BASE}shuffle: {written}\n")


def test_leading_zeros_and_colons_are_not_other_number_systems(tmp_path: Path) -> None:
    assert made(tmp_path, f"{BASE}max_steps: 010\n").recipe.max_steps == 10
    assert "is not a number" in refusal(tmp_path, f"{BASE}max_steps: 1:30\n")


def test_words_win_over_the_file_and_flags_set_their_settings(tmp_path: Path) -> None:
    recipe = made(tmp_path, f"{BASE}lora:\n  rank: 8\n", ["lora.alpha=4", "seed=3"], flags={"model": "other", "max_steps": 5, "run": None})
    assert recipe.recipe.lora is not None
    assert (recipe.recipe.lora.rank, recipe.recipe.lora.alpha, recipe.recipe.seed) == (8, 4, 3)
    assert (recipe.recipe.model, recipe.recipe.max_steps) == ("other", 5)
    assert recipe.places["lora.rank"].endswith("my.yaml:5")
    assert recipe.places["seed"] == "command line"
    assert recipe.places["max_steps"] == "--steps"


def test_the_line_of_the_key_is_named(tmp_path: Path) -> None:
    assert "my.yaml:6: lora.aplha: unknown setting" in refusal(tmp_path, f"{BASE}lora:\n  rank: 8\n  aplha: 1\n")
    assert "my.yaml:5: lora.rank: must be at least 1" in refusal(tmp_path, f"{BASE}lora:\n  rank: 0\n")
    assert "command line: lora.rank" in refusal(tmp_path, f"{BASE}lora:\n  rank: 8\n", ["lora.rank=0"])


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    assert "my.yaml:5: beta is given twice, first on line 4" in refusal(tmp_path, f"{BASE}beta: 0.1\nbeta: 0.2\n")
    assert "given twice" in refusal(tmp_path, BASE, ["beta=0.1", "beta=0.2"])
    assert "given by command line and by --steps" in refusal(tmp_path, BASE, ["max_steps=1"], flags={"max_steps": 2})


def test_a_file_for_another_command_is_refused(tmp_path: Path) -> None:
    assert "my.yaml:1: command: the recipe is for `tether dpo`, not for `tether sft`" in refusal(tmp_path, BASE, command="sft")
    assert "Did you mean reward?" in refusal(tmp_path, "command: rewrd\nmodel: m\ndata: d\n")
    assert "not said what the recipe is for" in refusal(tmp_path, "model: m\ndata: d\n")


def test_what_is_not_a_recipe_is_told_with_its_line(tmp_path: Path) -> None:
    assert "my.yaml:1" in refusal(tmp_path, "- a\n- b\n")
    assert "my.yaml:3: not valid YAML" in refusal(tmp_path, "model: m\ndata: d\n bad: x\n")
    assert "my.yaml:2: a key must be a name" in refusal(tmp_path, "model: m\n5: x\n")
    with pytest.raises(UserError, match=r"Did you mean .*my\.yaml"):
        configure(tmp_path / "my.yml", [])
    with pytest.raises(UserError, match="tether resume"):
        configure(tmp_path, [])


def test_words_that_are_no_settings_are_refused(tmp_path: Path) -> None:
    assert "Settings are given as key=value" in refusal(tmp_path, BASE, ["beta"])
    assert "learning_rate=3" in refusal(tmp_path, BASE, ["--learning-rate=3"])


def test_a_run_is_called_after_its_recipe_and_the_next_free_number(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert made(tmp_path, BASE).folder == Path("runs/dpo-my-1")
    (tmp_path / "runs/dpo-my-1").mkdir(parents=True)
    assert made(tmp_path, BASE).folder == Path("runs/dpo-my-2")
    assert made(tmp_path, BASE, flags={"run": "elsewhere"}).folder == Path("elsewhere")
    assert configure(None, ["model=m", "data=some/pairs.jsonl"], command="dpo").folder == Path("runs/dpo-pairs-1")


def test_lists_and_blocks_can_be_given_as_words(tmp_path: Path) -> None:
    recipe = made(tmp_path, BASE, ["data=[a.jsonl, b.jsonl]", "lora={rank: 4}", "trackers=[]"]).recipe
    assert recipe.data == ["a.jsonl", "b.jsonl"]
    assert recipe.lora is not None
    assert recipe.lora.rank == 4
    assert recipe.trackers == []
