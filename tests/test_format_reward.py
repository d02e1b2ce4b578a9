"""Format rewards: tags, patterns and JSON of a shape, by hand."""

from __future__ import annotations

import pytest

from tether.errors import UserError
from tether.reward import Rewards
from tether.rewards.format import JsonReward, PatternReward, TagsReward
from tether.rollout import Rollout, View

SHAPE = "<think>why</think>\n<answer>4</answer>"


@pytest.mark.parametrize(
    "text, opened, value",
    [
        (SHAPE, "", 1.0),
        (SHAPE + "\n", "", 1.0),
        ("why</think>\n<answer>4</answer>", "<think>\n", 1.0),
        (SHAPE, "<think>\n", 0.0),  # opened twice
        (SHAPE + " and more", "", 0.0),
        ("well, " + SHAPE, "", 0.0),
        (SHAPE + SHAPE, "", 0.0),
        ("<answer>4</answer><think>why</think>", "", 0.0),
        ("<think></think><answer> </answer>", "", 0.0),
        ("<think>why<answer>4</answer></think>", "", 0.0),
        ("<think>why", "", 0.0),
        ("", "", 0.0),
    ],
)
def test_tags_once_in_order_with_content(text: str, opened: str, value: float) -> None:
    assert TagsReward()(["q"], [text], opened=[opened]) == [value]
    chat = [{"role": "assistant", "content": text}]
    assert TagsReward()(["q"], [chat], opened=[opened]) == [value]


def test_tags_loose_and_partial() -> None:
    assert TagsReward(loose=True).score("well " + SHAPE + " so") == 1.0
    assert TagsReward(partial=True).score("<think>why</think> 4") == 0.5
    assert TagsReward(["answer"]).score("<answer>4</answer>") == 1.0


def test_format_sees_the_text_up_to_the_end_mark_through_a_rollout() -> None:
    """The template opened the tag, the end mark and what follows it are no part of the text."""
    view = View("why</think><answer>4</answer>", "why</think><answer>4</answer></s> junk </s>", "<think>")
    rollout = Rollout(0, 0, 0, "q", [1], [5, 2], [True] * 2, [-1.0] * 2, [-1.0] * 2, "stop", view, 0)
    for part in (TagsReward(), PatternReward(r"<think>.+</think>\s*<answer>.+</answer>")):
        assert Rewards([part]).score_rollouts([rollout])[1].totals == [1.0]


def test_patterns_have_a_time_limit_and_must_ask_for_something() -> None:
    assert PatternReward("a.c")(["q"] * 2, [" a\nc\n", "ac"]) == [1.0, 0.0]
    with pytest.raises(UserError, match="longer than"):
        PatternReward(r"(a|a)+b", limit_s=0.2)(["q"], ["a" * 60])
    with pytest.raises(UserError, match="empty answer"):
        PatternReward(".*")
    with pytest.raises(UserError, match="no regular expression"):
        PatternReward("(")


SCHEMA = {
    "type": "object",
    "required": ["name", "age"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "minLength": 1, "pattern": "^[A-Z]"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "none": {"type": ["null", "boolean"]},
    },
}


@pytest.mark.parametrize(
    "text, value",
    [
        ('{"name": "Ann", "age": 3}', 1.0),
        ('Here:\n```json\n{"name": "Ann", "age": 3, "tags": ["a", "b"], "none": null}\n```', 1.0),
        ('{"name": "Ann"}', 0.0),
        ('{"name": "ann", "age": 3}', 0.0),
        ('{"name": "Ann", "age": 3.5}', 0.0),
        ('{"name": "Ann", "age": true}', 0.0),
        ('{"name": "Ann", "age": 151}', 0.0),
        ('{"name": "Ann", "age": 3, "more": 1}', 0.0),
        ('{"name": "Ann", "age": 3, "tags": ["c"]}', 0.0),
        ('{"name": "Ann", "age": NaN}', 0.0),
        ("[1, 2]", 0.0),
        ("no json", 0.0),
    ],
)
def test_json_of_a_shape(text: str, value: float) -> None:
    assert JsonReward(SCHEMA)(["q"], [text]) == [value]


def test_a_schema_that_is_not_understood_is_refused() -> None:
    with pytest.raises(UserError, match=r"schema\.properties\.a: 'oneOf' is not understood"):
        JsonReward({"properties": {"a": {"oneOf": []}}})
    with pytest.raises(UserError, match="no type 'text'"):
        JsonReward({"type": "text"})
