"""The recipes that come with Tether, and the page that documents their settings."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tether import cli
from tether.config import configure

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def test_there_are_recipes_for_every_training_command() -> None:
    assert {configure(path).command for path in RECIPES} >= {"sft", "reward", "dpo"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_says_what_it_is_for_and_is_explained(path: Path, capsys: Any) -> None:
    assert path.read_text().startswith("#")
    assert cli.run(["explain", str(path)]) == 0
    told = capsys.readouterr().out
    assert "minimise" in told
    for key in configure(path).recipe.given:
        assert f"  {key} = " in told or f"  {key}." in told
    assert f"({path}:" in told


def test_the_recipe_page_is_made_from_the_settings() -> None:
    spec = importlib.util.spec_from_file_location("recipe_docs", ROOT / "scripts/recipe_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run scripts/recipe_docs.py"


def test_explain_takes_a_command_and_settings(capsys: Any) -> None:
    assert cli.run(["explain", "dpo", "loss_type=sigmoid", "beta=0.3"]) == 0
    told = capsys.readouterr().out
    assert "0.3*d" in told
    assert "note: loss_type sigmoid is called dpo here" in told
    assert "beta = 0.3  (command line)" in told
    assert "max_length = 1024  (default)" in told
    assert cli.run(["explain", "grpo", "num_generations=4"]) == 0
    assert cli.run(["explain", "dpo", "gamma=1"]) == 2
