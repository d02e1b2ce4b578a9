"""`Conversation`: text to imitate, for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tether.files import Loaded, Source
from tether.messages import BadRow, Message, Text, as_string, assistant, has_assistant, is_blank
from tether.shapes import PROMPT, Fields, Shape, load_rows, same_form

__all__ = ["Conversation", "Message", "Text", "load"]


@dataclass(frozen=True)
class Conversation:
    """One of three: `messages`, or `prompt` with `completion`, or `text` (a document without a prompt)."""

    messages: list[Message] | None
    prompt: Text | None
    completion: Text | None
    text: str | None
    source: Source


def load(path: str | list[str]) -> Loaded[Conversation]:
    """Demonstrations in any shape of docs/data.md. A row without an answer is dropped and counted, a malformed one rejected."""
    return load_rows(path, SHAPES, "demonstrations for sft")


def _messages(fields: Fields, name: str) -> list[Conversation]:
    turns = [*fields.system_turn(), *fields.messages(name)]
    if not has_assistant(turns):
        raise BadRow("no_answer", "no assistant turn: nothing to learn from", "Add the answer.", field=name, action="drop")
    if fields.get("tools"):
        fields.warn(
            "tools_ignored", "the tools column is not shown to the template", "Put the descriptions into a system message.", "tools"
        )
    return [Conversation(turns, None, None, None, fields.source)]


def _pair(fields: Fields, prompt_name: str, answer_name: str) -> list[Conversation]:
    prompt = fields.prompt(prompt_name)
    prompt, (completion,) = same_form(fields, prompt_name, prompt, fields.text(answer_name))
    if is_blank(completion):
        raise BadRow("empty", "the answer is empty: nothing to learn but to stop", "Fill it in.", field=answer_name, action="drop")
    return [Conversation(None, prompt, completion, None, fields.source)]


def _instances(fields: Fields, instruction: str, name: str) -> list[Conversation]:
    """Self-Instruct: one instruction with several inputs and outputs."""
    asked, found = fields.string(instruction), []
    for i, item in enumerate(fields.get(name)):
        if not isinstance(item, dict):
            raise BadRow("not_text", "an instance is an object with input and output", "Write it so.", field=f"{name}[{i}]")
        given, answer = item.get("input") or "", as_string(item.get("output"), f"{name}[{i}].output")
        if not answer.strip():
            fields.warn("empty_instance", "an instance without an output is left out", "Fill it in.", f"{name}[{i}]")
            continue
        prompt = fields.ask(f"{asked}\n\n{given}" if given else asked)
        found.append(Conversation(None, prompt, assistant(answer), None, fields.source))
    if not found:
        raise BadRow("empty", "no instance has an output", "Fill it in.", field=name, action="drop")
    return found


def _document(fields: Fields, name: str) -> list[Conversation]:
    text = fields.string(name)
    if not text.strip():
        raise BadRow("empty", "the text is empty", "Fill it in, or remove the row.", field=name, action="drop")
    return [Conversation(None, None, None, text, fields.source)]


ANSWERS = ("completion", "output", "solution", "answer", "response", "canonical_solution", "code", "target")


def _text_and_code(fields: Fields, text: str, code: str) -> list[Conversation]:
    asked, answer = fields.string(text), fields.string(code)
    if not answer.strip():
        raise BadRow("empty", "the answer is empty", "Fill it in.", field=code, action="drop")
    return [Conversation(None, fields.ask(asked), assistant(answer), None, fields.source)]


def _demonstration(shape: Shape[Conversation]) -> Shape[Conversation]:
    """Keeps other kinds of data out: comparisons do not fit, and an answer labelled bad is nothing to imitate."""

    def read(fields: Fields, *names: str) -> list[Conversation]:
        if fields.row.data.get("label") is False and "text" not in names:
            raise BadRow("labelled_bad", "the answer is labelled bad", "Train on it with loss_type=kto.", field="label", action="drop")
        return shape.read(fields, *names)

    def also(data: Mapping[str, Any]) -> bool:
        return not {"chosen", "rejected"} <= set(data) and shape.also(data)

    return Shape(shape.name, shape.needs, read, also)


SHAPES: list[Shape[Conversation]] = [
    _demonstration(shape)
    for shape in (
        Shape("messages", (("messages",),), _messages),
        Shape("ShareGPT conversations", (("conversations", "conversation"),), _messages),
        Shape(
            "instruction with instances", (("instruction",), ("instances",)), _instances, lambda data: isinstance(data["instances"], list)
        ),
        Shape("prompt and completion", (("prompt",), ("completion",)), _pair),
        Shape("Alpaca instruction", (("instruction",), ("output", "response")), _pair),
        Shape("question and answer", (PROMPT, ANSWERS), _pair),
        Shape("text and code", (("text",), ("code",)), _text_and_code),
        Shape("text", (("text",),), _document),
    )
]
