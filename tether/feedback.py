"""`Feedback`: one answer, and whether it is good or bad (KTO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tether import preferences
from tether.files import Loaded, Problem, Source
from tether.messages import BadRow, Text, is_blank
from tether.shapes import PROMPT, Fields, Shape, comparable, contradictions, load_rows, same_form


@dataclass(frozen=True)
class Feedback:
    prompt: Text
    completion: Text
    label: bool
    source: Source
    extra: dict[str, Any]


def load(path: str | list[str]) -> Loaded[Feedback]:
    """Answers labelled good or bad; comparisons are taken apart into a good and a bad row.

    A text label ("true", "False") and 1 or 0 are converted, and each conversion is counted; anything else is rejected.
    """
    return load_rows(path, SHAPES, "labelled answers", _check_all)


def _check_all(rows: list[Feedback], problems: list[Problem]) -> None:
    contradictions(rows, lambda r: ((comparable(r.prompt), comparable(r.completion)), r.label), "the label", problems)


def as_label(fields: Fields, name: str) -> bool:
    """True or False. The text "False" is truthy in Python, so text is never passed through bool()."""
    value = fields.get(name)
    if isinstance(value, bool):
        return value
    if value is None:
        raise BadRow("null", "there is no label", "Use true or false, or remove the row.", field=name)
    known = {"true": True, "false": False, "1": True, "0": False}
    word = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip().lower()
    if isinstance(value, (str, int, float)) and word in known:
        if not fields.row.textual:
            kind = "label_from_text" if isinstance(value, str) else "label_from_number"
            fields.warn(kind, f"the label {value!r} was read as {str(known[word]).lower()}", "Write true or false.", name)
        return known[word]
    raise BadRow("bad_label", f"the label {value!r} is neither true nor false", "Use true or false.", field=name)


def _made(fields: Fields, prompt: Text, completion: Text, label: bool, name: str) -> list[Feedback]:
    if is_blank(completion):
        if label:
            raise BadRow("empty", "the good answer is empty: nothing to learn but to stop", "Fill it in.", field=name, action="drop")
        fields.warn("empty_rejected", "the bad answer is empty: it is kept, and its end mark is what is unlearnt", "Fine.", name)
    return [Feedback(prompt, completion, label, fields.source, fields.rest())]


def _labelled(fields: Fields, prompt_name: str, answer_name: str, label_name: str) -> list[Feedback]:
    prompt = fields.prompt(prompt_name)
    prompt, (completion,) = same_form(fields, prompt_name, prompt, fields.text(answer_name))
    return _made(fields, prompt, completion, as_label(fields, label_name), answer_name)


def _chat(fields: Fields, name: str, label_name: str) -> list[Feedback]:
    turns = [*fields.system_turn(), *fields.messages(name)]
    if turns[-1]["role"] != "assistant":
        raise BadRow("no_answer", "the conversation does not end with an assistant turn", "Add the answer.", field=name, action="drop")
    return _made(fields, turns[:-1], turns[-1:], as_label(fields, label_name), name)


def _taken_apart(shape: Shape[preferences.Preference]) -> Shape[Feedback]:
    def read(fields: Fields, *names: str) -> list[Feedback]:
        return [
            Feedback(p.prompt, answer, label, p.source, p.extra)
            for p in shape.read(fields, *names)
            for answer, label in ((p.chosen, True), (p.rejected, False))
        ]

    return Shape(f"{shape.name}, taken apart", shape.needs, read, shape.also)


LABELS = ("label", "kto_tag")

SHAPES: list[Shape[Feedback]] = [
    Shape("labelled answers", (PROMPT, ("completion", "output", "response", "answer"), LABELS), _labelled),
    Shape("labelled conversations", (("messages", "conversations"), LABELS), _chat),
    *map(_taken_apart, preferences.PAIRS),  # not rankings: their middle answers are neither good nor bad
]
