"""`Prompt`: a question without an answer, with whatever else the row holds for rewards to look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tether.files import Loaded, Source
from tether.messages import BadRow, Text, plain
from tether.shapes import PROMPT, Fields, Shape, load_rows


@dataclass(frozen=True)
class Prompt:
    prompt: Text
    source: Source
    extra: dict[str, Any]


def load(path: str | list[str]) -> Loaded[Prompt]:
    """Prompts. Every other column is kept in `extra` under its own name."""
    return load_rows(path, SHAPES, "prompts")


def _made(fields: Fields, prompt: Text, name: str, **more: Any) -> list[Prompt]:
    if not plain(prompt).strip():
        raise BadRow("empty", "the prompt is empty", "Fill it in, or remove the row.", field=name)
    return [Prompt(prompt, fields.source, {**fields.rest(), **more})]


def _prompt(fields: Fields, name: str) -> list[Prompt]:
    return _made(fields, fields.prompt(name), name)


def _chat(fields: Fields, name: str) -> list[Prompt]:
    """A conversation; an answer at its end is no part of the prompt and is kept as extra["completion"]."""
    turns = [*fields.system_turn(), *fields.messages(name)]
    if turns[-1]["role"] == "assistant":
        return _made(fields, turns[:-1], name, completion=turns[-1]["content"])
    return _made(fields, turns, name)


def _text(fields: Fields, name: str) -> list[Prompt]:
    return _made(fields, fields.ask(fields.string(name)), name)


def _body(fields: Fields, body_name: str, question_name: str) -> list[Prompt]:
    body = fields.string(body_name).strip()
    joined = f"{body}{'' if body[-1:] in '.!?' else '.'} {fields.string(question_name).strip()}"
    return _made(fields, fields.ask(joined), question_name)


SHAPES: list[Shape[Prompt]] = [
    Shape("prompts", (("prompt",),), _prompt),
    Shape("conversations as prompts", (("messages", "conversations"),), _chat),
    Shape("word problems", (("Body",), ("Question",)), _body),
    Shape("instructions as prompts", (PROMPT,), _prompt),
    Shape("text as prompts", (("text",),), _text),
]
