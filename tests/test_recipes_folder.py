"""The recipes that come with Tether, and the page that documents their settings."""

from __future__ import annotations

import importlib.util
import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import TEMPLATE, save_tiny, tiny_config
from tests.whole_runs import rows_for, tokenizer_of, write_rows
from tether import cli
from tether.config import configure
from tether.recipe import TrainRecipe
from tether.rl_recipe import SamplingRecipe

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def test_there_are_recipes_for_every_training_command() -> None:
    assert {configure(path).command for path in RECIPES} == {"sft", "reward", "dpo", "grpo", "ppo"}


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


# -- one step of each --------------------------------------------------------------------------------------------------

# What a random model says by words: a number, a vote or a mood, so that every kind of reward has something to read.
SAID = [f"{i}" for i in range(60)] + [f"it{i}[[yes]]" for i in range(40)] + [f"it{i}[[no]]" for i in range(40)] + ["good", "awful", "happy"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tokenizer_of(["user assistant system", *SAID], TEMPLATE)
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", tiny_config(len(tokenizer)), tokenizer=tokenizer)


def few_rows(recipe: TrainRecipe, name: str, folder: Path, n: int = 8) -> Path:
    """The first rows of a file that is shipped; else rows of the kind that the recipe asks for."""
    if (ROOT / name).is_file():
        with (ROOT / name).open(encoding="utf-8") as file:
            return write_rows(folder / Path(name).name, [json.loads(line) for line in islice(file, n)])
    kind = getattr(recipe, "loss_type", None) == "kto"
    rows = rows_for("kto" if kind else recipe.command, n)
    if recipe.command == "grpo":
        rows = [{"question": f"What is {i} plus {i}?", "answer": str(2 * i)} for i in range(n)]
    return write_rows(folder / "rows.jsonl", rows)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_one_step_of_a_recipe_runs(path: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own method, rewards and data, as far as they are shipped, on a tiny model with short answers."""
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))
    configured = configure(path)
    recipe = configured.recipe
    assert isinstance(recipe.data, str)
    words = [f"data={few_rows(recipe, recipe.data, tmp_path)}", f"run={tmp_path / 'run'}"]
    if recipe.model is not None:
        words += [f"model={model}", "precision=fp32", "trackers=[]", "max_steps=1", "warmup_steps=0"]
    if recipe.eval_data is not None:
        words += [f"eval_data={few_rows(recipe, str(recipe.eval_data), tmp_path, n=2)}"]
    if isinstance(recipe, SamplingRecipe):
        generations = min(recipe.num_generations, 4)
        words += [f"num_generations={generations}", f"batch_size={2 * generations}", "max_completion_length=8"]
    assert cli.run([configured.command, str(path), *words]) == 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    if recipe.model is None:
        return
    assert summary["steps"] == 1
    step = [row for row in map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines()) if "loss" in row]
    assert len(step) == 1
    if isinstance(recipe, SamplingRecipe):
        judged = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
        assert judged
        assert all(row["total"] is not None for row in judged), "an answer that nobody judged"


def test_the_origin_of_every_data_file_is_told() -> None:
    told = set(re.findall(r"`(\w+\.jsonl)`", (ROOT / "recipes/data/README.md").read_text(encoding="utf-8")))
    assert told == {path.name for path in (ROOT / "recipes/data").glob("*.jsonl")}


@pytest.mark.parametrize("name", ["arithmetic", "two_digit", "gsm8k", "mbpp"])
def test_held_out_questions_are_not_among_those_trained_on(name: str) -> None:
    def asked(file: str) -> list[str]:
        rows = [json.loads(line) for line in (ROOT / "recipes/data" / file).read_text(encoding="utf-8").splitlines()]
        return [json.dumps(row.get("prompt", row.get("question"))) for row in rows]

    train, held_out = asked(f"{name}.jsonl"), asked(f"{name}_held_out.jsonl")
    assert len(set(train)) == len(train)
    assert not set(train) & set(held_out)
