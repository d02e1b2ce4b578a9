"""Rewards by name: every ready one is documented and found, and mistakes in names and settings are told."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tether.errors import UserError
from tether.reward import Rewards
from tether.rewards.functions import READY, reward


def test_every_ready_reward_is_documented_and_found() -> None:
    page = (Path(__file__).parents[1] / "docs/rewards.md").read_text()
    for name in READY:
        assert f"`{name}`" in page, f"docs/rewards.md does not name {name}"
    assert reward("vader").function(["q"] * 2, ["This is wonderful!", "This is awful."])[0] > 0.5
    named = reward("format", tags=["answer"], weight=0.2)
    assert (named.name, named.weight) == ("format", 0.2)
    cosine = reward("cosine", max_length=10, correct="repetition")
    assert cosine.function(["q"], ["a"], completion_ids=[[0]])[0] < 0
    assert math.isclose(reward("judge", endpoint={"url": "http://x", "model": "m"}).function.max_invalid, 0.2)


def test_mistakes_in_names_and_settings_are_told(tmp_path: Path) -> None:
    for spec, settings, words in [
        ("maths", {}, "Did you mean math"),
        ("format", {"tag": ["a"]}, "no setting 'tag'.*Did you mean tags"),
        ("overlong", {}, "needs the setting 'max_length'"),
        ("judge", {"endpoint": {"url": "http://x"}}, "needs the setting 'model'"),
        ("nowhere.py:f", {}, "there is no file"),
        ("tether.no_such:f", {}, "cannot be imported"),
        ("tether.rewards.functions:reword", {}, "reword.*is not there.*reward"),
    ]:
        with pytest.raises(UserError, match=words):
            reward(spec, **settings)


def test_functions_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("K = 2.0")
    file = tmp_path / "math.py"
    file.write_text(
        "from helper import K\n"
        "def brevity(prompts, completions, scale=1.0, **columns):\n    return [scale * K - len(c) for c in completions]\n"
        "class Made:\n    def __init__(self, bonus=1.0):\n        self.bonus = bonus\n"
        "    def __call__(self, completions, **_):\n        return [self.bonus] * len(completions)\n"
        "x = 3\n"
    )
    assert Rewards([reward(f"{file}:brevity")]).score(["q"], ["abc"]).totals == [-1.0]
    assert reward(f"{file}:brevity").name == "brevity"
    assert Rewards([reward(f"{file}:brevity", scale=2.0)]).score(["q"], ["abc"]).totals == [1.0]
    assert Rewards([reward(f"{file}:Made", bonus=0.5)]).score(["q"], ["abc"]).totals == [0.5]
    assert math.sqrt(4) == 2  # a file called math.py hides nothing
    with pytest.raises(UserError, match=r"'brevty' is not there.*The file has: brevity"):
        reward(f"{file}:brevty")
    with pytest.raises(UserError, match="is a int, not a function"):
        reward(f"{file}:x")
    (tmp_path / "broken.py").write_text("1/0")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        reward(f"{tmp_path / 'broken.py'}:f")
