"""`Message` and `Text`: what a prompt or an answer may be, read strictly from raw values, whatever the dialect."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict, cast

from tether.files import Action


class Message(TypedDict):
    """One turn. Other keys of the data (`tool_calls`, `name`, `reasoning_content`) are kept for the chat template."""

    role: str
    content: str


Text = str | list[Message]

# The dialect of ShareGPT, and other spellings of the same roles.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function": "tool",
    "ipython": "tool",
    "function_call": "assistant",
}


class BadRow(Exception):
    """This row cannot be used as it is. Carries everything of a Problem but the place."""

    def __init__(self, kind: str, what: str, remedy: str, *, field: str | None = None, action: Action = "reject") -> None:
        super().__init__(what)
        self.kind, self.what, self.remedy, self.field, self.action = kind, what, remedy, field, action


def as_string(value: Any, field: str) -> str:
    """Text, or BadRow. Numbers are not turned into text: a column of the wrong kind must be seen."""
    if isinstance(value, str):
        return _whole(value, field)
    if value is None:
        raise BadRow("null", "the value is null", "Fill it in, or remove the row.", field=field)
    if isinstance(value, (int, float)):
        raise BadRow("not_text", f"text is wanted, got {value!r}", f'Write it as text: "{value}".', field=field)
    if isinstance(value, list):
        raise BadRow("not_text", f"one text is wanted, got a list of {len(value)}", "Give one text, or a list of messages.", field=field)
    raise BadRow("not_text", f"text is wanted, got {type(value).__name__}", "Give one text, or a list of messages.", field=field)


def as_text(value: Any, field: str) -> Text:
    """A string, or messages: a list of them, or a single one."""
    if isinstance(value, Mapping):
        return [as_message(value, field)]
    if isinstance(value, list) and (not value or any(isinstance(item, Mapping) for item in value)):
        return as_messages(value, field)
    return as_string(value, field)


def as_messages(value: Any, field: str) -> list[Message]:
    """A non-empty list of messages, in the dialect {role, content} or {from, value}."""
    if value is None:
        raise BadRow("null", "the value is null", "Fill it in, or remove the row.", field=field)
    if not isinstance(value, list):
        raise BadRow("not_messages", f"a list of messages is wanted, got {type(value).__name__}", MESSAGES_LOOK, field=field)
    if not value:
        raise BadRow("no_messages", "the list of messages is empty", "Fill it in, or remove the row.", field=field)
    return [as_message(item, f"{field}[{i}]") for i, item in enumerate(value)]


MESSAGES_LOOK = 'Messages look like [{"role": "user", "content": "..."}].'


def as_message(value: Any, field: str) -> Message:
    if not isinstance(value, Mapping):
        raise BadRow("not_messages", f"a message is wanted, got {value!r:.60}", MESSAGES_LOOK, field=field)
    shared = "from" in value and "value" in value
    role_key, content_key = ("from", "value") if shared else ("role", "content")
    for key in (role_key, content_key):
        if key not in value and not (key == "content" and value.get("tool_calls")):
            raise BadRow("not_messages", f"the message has no {key!r} (it has {', '.join(map(str, value))})", MESSAGES_LOOK, field=field)
    role = as_string(value[role_key], f"{field}.{role_key}").strip()
    if not role:
        raise BadRow("not_messages", "the role is empty", MESSAGES_LOOK, field=f"{field}.{role_key}")
    content = _content(value.get(content_key), f"{field}.{content_key}", tool_calls=bool(value.get("tool_calls")))
    others = {k: v for k, v in value.items() if k not in (role_key, content_key) and v is not None}
    return cast(Message, {"role": ROLES.get(role.lower(), role), "content": content, **others})


def _content(value: Any, field: str, *, tool_calls: bool) -> str:
    if value is None and tool_calls:
        return ""
    if isinstance(value, list):
        # Content parts, as multimodal APIs write them; only text can be trained on here.
        parts = []
        for i, part in enumerate(value):
            if not isinstance(part, Mapping) or part.get("type", "text") != "text":
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise BadRow("not_text", f"a content part of kind {kind!r} is not text", "Only text can be used.", field=f"{field}[{i}]")
            parts.append(as_string(part.get("text"), f"{field}[{i}].text"))
        return "".join(parts)
    return as_string(value, field)


def _whole(text: str, field: str) -> str:
    """Half of a surrogate pair ("\\ud83d" in JSON) is no character: tokenizers crash on it, far from the cause."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        words = f"half of a character (U+{ord(text[error.start]):04X}) at position {error.start + 1}"
        raise BadRow("half_character", words, "The text was cut inside an emoji; write it again.", field=field) from None
    return text


def user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def assistant(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]


def plain(text: Text) -> str:
    """The words alone, for comparing and measuring.

    >>> plain([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}])
    'Hi\\nYes?'
    """
    return text if isinstance(text, str) else "\n".join(m["content"] for m in text)


def is_blank(answer: Text) -> bool:
    """Nothing for a model to say: no text, or blanks only. A tool call is something to say."""
    if isinstance(answer, str):
        return not answer.strip()
    return all(not m["content"].strip() and not m.get("tool_calls") for m in answer if m["role"] == "assistant")


DIALOGUE = re.compile(r"\n\n(Human|Assistant):")


def split_dialogue(text: str) -> list[Message] | None:
    """The turns of a text written as "\\n\\nHuman: ...\\n\\nAssistant: ...", or None when it is not written so.

    >>> split_dialogue("\\n\\nHuman: Hi\\n\\nAssistant: Hello.")
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello.'}]
    """
    parts = DIALOGUE.split(text)
    if len(parts) < 5 or parts[0].strip() or parts[1] != "Human":
        return None
    return [
        {"role": "user" if who == "Human" else "assistant", "content": said.strip()}
        for who, said in zip(parts[1::2], parts[2::2], strict=True)
    ]


def shared_turns(one: list[Message], other: list[Message]) -> int:
    """How many leading messages two conversations share."""
    n = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        n += 1
    return n


def shared_text(one: str, other: str) -> int:
    """Length of the common start of two texts, moved back so that it never ends inside a word; the blank belongs to the answers.

    >>> shared_text("The sky is blue.", "The sky is black.")
    10
    """
    n = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        n += 1
    n = max(0, min(n, len(one) - 1, len(other) - 1))  # something is left of either
    while n and not (one[n : n + 1].isspace() or other[n : n + 1].isspace() or one[n - 1].isspace()):
        n -= 1
    while n and one[n - 1].isspace():
        n -= 1
    return n


def has_assistant(messages: Iterable[Message]) -> bool:
    return any(m["role"] == "assistant" for m in messages)
