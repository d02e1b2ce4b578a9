"""A table of slips, each made in a recipe file, on the command line and in a Python call: none is ever ignored."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tether.cli import run
from tether.config import configure
from tether.dpo_recipe import LOSS_NAMES
from tether.errors import UserError
from tether.recipe import RECIPES

CASES = Path(os.environ.get("TETHER_CASES_CONFIG_SLIPS", Path(__file__).parent / "cases" / "config_slips.jsonl"))
ROWS = [json.loads(line) for line in CASES.read_text().splitlines() if line.strip()]
NEEDED = {"model": "m", "data": "d.jsonl"}


def command_for(given: dict[str, Any], expect: str) -> str:
    """The command whose settings the row speaks of: the one that knows most of its keys, or the one that the row suggests."""
    wanted = {*given, *re.findall(r"suggests (\w+)", expect)}
    return max(("dpo", "sft", "reward", "grpo"), key=lambda name: len(wanted & set(RECIPES[name].paths())))


def as_words(given: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in given.items():
        if isinstance(value, dict):
            yield from as_words(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={json.dumps(value)}"


def leaves(given: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in given.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def unknown_key(given: dict[str, Any], command: str) -> str | None:
    return next((key for key, _ in leaves(given) if key not in RECIPES[command].paths()), None)


def check_message(message: str, given: dict[str, Any], expect: str, command: str) -> None:
    """The expectation's own words decide what the message must say."""
    unknown = unknown_key(given, command)
    at_fault = unknown or next(key for key, _ in leaves(given))
    if "unknown key" in expect or unknown:
        assert "unknown setting" in message
        # The full path of the key, or of the block that is unknown as a whole.
        known_blocks = {path.rpartition(".")[0] for path in RECIPES[command].paths()}
        block = at_fault.rpartition(".")[0]
        assert at_fault in message or (block and block not in known_blocks and f"{block}: " in message)
    for suggested in re.findall(r"suggests (\w+)", expect):
        assert suggested in message
    if "lists the allowed names" in expect:
        assert all(name in message for name in LOSS_NAMES)
    if "not a number" in expect:
        assert "not a number" in message
    if "whole number" in expect:
        assert "whole number" in message
    for least in re.findall(r"at least (\d+)", expect):
        assert f"at least {least}" in message
    if "do not divide" in expect:
        numbers = [int(value) for _, value in leaves(given)]
        assert all(str(n) in message for n in numbers)
        words = message.split("These would work:")[1]
        suggested = [int(n) for n in re.findall(r"\d+", words.split(", or num_generations")[0])]
        assert suggested
        assert all(n % given["num_generations"] == 0 for n in suggested)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: json.dumps(row["given"]))
def test_a_slip_in_a_python_call_is_refused(row: dict[str, Any]) -> None:
    given, expect = row["given"], row["expect"]
    command = command_for(given, expect)
    with pytest.raises(UserError) as caught:
        RECIPES[command](**{**NEEDED, **given})
    check_message(str(caught.value), given, expect, command)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: json.dumps(row["given"]))
def test_a_slip_in_a_file_is_refused_with_file_and_line(row: dict[str, Any], tmp_path: Path) -> None:
    given, expect = row["given"], row["expect"]
    command = command_for(given, expect)
    file = tmp_path / "recipe.yaml"
    text = yaml.safe_dump({"command": command, **NEEDED, **given}, sort_keys=False)
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        configure(file)
    check_message(str(caught.value), given, expect, command)
    line = int(re.search(rf"{re.escape(str(file))}:(\d+)", str(caught.value))[1])  # type: ignore[index]
    named = text.splitlines()[line - 1].split(":")[0].strip()
    assert named in {part for key, _ in leaves(given) for part in key.split(".")}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: json.dumps(row["given"]))
def test_a_slip_on_the_command_line_ends_with_code_2_and_one_message(row: dict[str, Any], capsys: Any) -> None:
    given, expect = row["given"], row["expect"]
    command = command_for(given, expect)
    # `explain` takes the settings of every command, those that are planned included; the others refuse alike.
    code = run(["explain", command, *as_words(given)])
    told = capsys.readouterr().err
    assert code == 2
    check_message(told, given, expect, command)
    assert "command line" in told
    assert "Traceback" not in told


def test_a_slip_stops_a_training_command_before_anything_is_written(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["dpo", "--model", "m", "--data", "d", "learning_rte=1e-5"]) == 2
    assert "Did you mean learning_rate?" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_table_is_not_empty() -> None:
    assert len(ROWS) >= 10
