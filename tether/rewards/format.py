"""Format rewards: does the answer have the shape that was asked for? 1 or 0; small weight beside correctness.

They read `opened + completion`: what the chat template had opened already and what the model wrote, up to the first end mark. Blanks
around the whole are ignored, so a last line end more or less changes nothing. A shape without content earns nothing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import regex

from tether.errors import UserError
from tether.rewards.texts import answer_texts

LIMIT_S = 1.0  # for one pattern on one answer


class PatternReward:
    """1 if the whole answer matches the regular expression (a dot matches line ends too), else 0.

    >>> PatternReward(r"<think>.+</think>\\s*<answer>.+</answer>")(["q"], ["<think>a</think><answer>4</answer>\\n"])
    [1.0]
    """

    reward_name = "format"

    def __init__(self, pattern: str, *, limit_s: float = LIMIT_S) -> None:
        try:
            self._pattern = regex.compile(pattern, regex.DOTALL)
        except regex.error as error:
            raise UserError(f"the pattern {pattern!r} is no regular expression: {error}", where="pattern") from error
        if self._pattern.fullmatch(""):
            raise UserError(f"the pattern {pattern!r} matches the empty answer", where="pattern", remedy="Ask for content, as in .+")
        self.limit_s = limit_s

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], opened: Sequence[str] | None = None, **_: Any) -> list[float]:
        return [float(self._matches(text)) for text in answer_texts(completions, opened)]

    def _matches(self, text: str) -> bool:
        try:
            return self._pattern.fullmatch(text.strip(), timeout=self.limit_s) is not None
        except TimeoutError:
            raise UserError(
                f"the pattern {self._pattern.pattern!r} took longer than {self.limit_s:g} s on one answer",
                where="pattern",
                remedy="Nested repeats such as (a+)+ take for ever; write it without.",
            ) from None


class TagsReward:
    """1 if the answer is these tags in this order, each once, each with content, with only blanks between and around.

    `loose` allows text before, between and after. `partial` gives the share of tags that are right instead of all or nothing.

    >>> TagsReward(["think", "answer"])(["q"], ["thought</think> <answer>4</answer>"], opened=["<think>"])
    [1.0]
    """

    reward_name = "format"

    def __init__(self, tags: Sequence[str] = ("think", "answer"), *, loose: bool = False, partial: bool = False) -> None:
        if isinstance(tags, str):
            tags = (tags,)
        if not tags or not all(isinstance(t, str) and regex.fullmatch(r"[A-Za-z_][\w-]*", t) for t in tags):
            raise UserError(f"tags must be names such as think and answer, got {tags!r}", where="tags")
        if len(set(tags)) < len(tags):
            raise UserError(f"each tag may be named once, got {tags!r}", where="tags")
        self.tags, self.loose, self.partial = tuple(tags), loose, partial

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], opened: Sequence[str] | None = None, **_: Any) -> list[float]:
        return [self.score(text) for text in answer_texts(completions, opened)]

    def score(self, text: str) -> float:
        spans: list[tuple[int, int] | None] = []
        for tag in self.tags:
            starts, ends = _places(text, f"<{tag}>"), _places(text, f"</{tag}>")
            once = len(starts) == 1 and len(ends) == 1 and text[starts[0] + len(tag) + 2 : ends[0]].strip()
            spans.append((starts[0], ends[0] + len(tag) + 3) if once else None)
        whole = [s for s in spans if s is not None]
        ordered = all(a[1] <= b[0] for a, b in itertools.pairwise(whole))
        if self.partial:
            return len(whole) / len(spans) if ordered else 0.0
        if len(whole) < len(spans) or not ordered:
            return 0.0
        edges = [0, *[x for s in whole for x in s], len(text)]
        between = [text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
        return float(self.loose or not any(b.strip() for b in between))


def _places(text: str, mark: str) -> list[int]:
    return [m.start() for m in regex.finditer(regex.escape(mark), text)]


class JsonReward:
    """1 if the answer (or its last ``` block) is JSON of this shape, else 0.

    `schema` is a small part of JSON Schema: type, properties, required, additionalProperties (false), items, enum, const, minimum,
    maximum, minLength, maxLength, minItems, maxItems, pattern. Anything else in it is refused, never ignored. None: any JSON.

    >>> JsonReward({"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}})(["q", "q"], ['{"a": 1}', '{"a": "1"}'])
    [1.0, 0.0]
    """

    reward_name = "json"

    def __init__(self, schema: Mapping[str, Any] | None = None) -> None:
        self.schema = dict(schema or {})
        _check_schema(self.schema, "schema")

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], opened: Sequence[str] | None = None, **_: Any) -> list[float]:
        return [float(self._fits(text)) for text in answer_texts(completions, opened)]

    def _fits(self, text: str) -> bool:
        blocks = regex.findall(r"```(?:json)?\s*\n(.*?)```", text, regex.DOTALL)
        try:
            value = json.loads(blocks[-1] if blocks else text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return False
        return fits(value, self.schema)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "number": (int, float), "integer": (int,), "boolean": (bool,), "null": (type(None),),
}  # fmt: skip
KEYS = {
    "type", "properties", "required", "additionalProperties", "items", "enum", "const", "minimum", "maximum", "minLength", "maxLength",
    "minItems", "maxItems", "pattern", "title", "description", "$schema",
}  # fmt: skip


def _check_schema(schema: Any, where: str) -> None:
    if not isinstance(schema, Mapping):
        raise UserError(f"a schema is an object, got {schema!r}", where=where)
    for key, value in schema.items():
        if key not in KEYS or (key == "additionalProperties" and not isinstance(value, bool)):
            raise UserError(f"{key!r} is not understood here", where=where, remedy=f"Use {', '.join(sorted(KEYS))}.")
    for name in _types(schema):
        if name not in TYPES:
            raise UserError(f"there is no type {name!r}", where=where, remedy=f"Use {', '.join(TYPES)}.")
    for name, inner in schema.get("properties", {}).items():
        _check_schema(inner, f"{where}.properties.{name}")
    if "items" in schema:
        _check_schema(schema["items"], f"{where}.items")


def _types(schema: Mapping[str, Any]) -> list[str]:
    named = schema.get("type", [])
    return [named] if isinstance(named, str) else list(named)


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a JSON value has the shape of a schema that `JsonReward` understands."""
    types = _types(schema)
    if types and not any(isinstance(value, TYPES[t]) and (t == "boolean" or not isinstance(value, bool)) for t in types):
        return False
    if "enum" in schema and not any(_same(value, v) for v in schema["enum"]):
        return False
    if "const" in schema and not _same(value, schema["const"]):
        return False
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return schema.get("minimum", value) <= value <= schema.get("maximum", value)
    if isinstance(value, str):
        sized = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
        return sized and ("pattern" not in schema or regex.search(schema["pattern"], value, timeout=LIMIT_S) is not None)
    if isinstance(value, list):
        sized = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return sized and all(fits(v, schema.get("items", {})) for v in value)
    if isinstance(value, dict):
        known = schema.get("properties", {})
        if any(name not in value for name in schema.get("required", [])):
            return False
        if schema.get("additionalProperties") is False and any(name not in known for name in value):
            return False
        return all(fits(v, known[name]) for name, v in value.items() if name in known)
    return True


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)
