"""`Shape`: which columns make which kind of row; and the one loop that turns a file into good rows and problems."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, TypeVar

from tether.errors import UserError
from tether.files import Loaded, Problem, Source
from tether.messages import BadRow, Text, as_messages, as_string, as_text, assistant, plain, user
from tether.readers import Row, read_rows

T = TypeVar("T")

# Columns that hold what a user asks. A string under `prompt` is taken as it is; under the other names it is an instruction and
# becomes a user message, because that is what such data sets hold.
PROMPT = ("prompt", "instruction", "question", "problem", "input")
SYSTEM = ("system", "system_prompt")
# Columns with a meaning to some loader: they are no misspelling of another one's.
KNOWN = {
    *PROMPT,
    "chosen",
    "rejected",
    "messages",
    "conversations",
    "completion",
    "completions",
    "output",
    "answer",
    "answers",
    "solution",
    "response",
    "text",
    "label",
}


@dataclass
class Fields:
    """One row being read: typed access to its columns, and the warnings met on the way."""

    row: Row
    warnings: list[Problem] = field(default_factory=list)
    form: str = "standard"  # or "conversational"
    used: set[str] = field(default_factory=set)

    @property
    def source(self) -> Source:
        return self.row.source

    def get(self, name: str) -> Any:
        self.used.add(name)
        return self.row.data.get(name)

    def string(self, name: str) -> str:
        return as_string(self.get(name), name)

    def text(self, name: str) -> Text:
        value = as_text(self.get(name), name)
        if not isinstance(value, str):
            self.form = "conversational"
        return value

    def messages(self, name: str) -> list[Any]:
        self.form = "conversational"
        return as_messages(self.get(name), name)

    def number(self, name: str) -> float | None:
        """A finite number, or None when the column is absent or null."""
        value = self.get(name)
        if value is None or (self.row.textual and value == ""):
            return None
        try:
            number = float(value) if isinstance(value, (int, float)) or (self.row.textual and isinstance(value, str)) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if isinstance(value, bool) or not math.isfinite(number):
            raise BadRow("not_a_number", f"a finite number is wanted, got {value!r}", "Write it as a number, or leave it out.", field=name)
        return number

    def prompt(self, name: str) -> Text:
        """The prompt under one of the names of `PROMPT`, with an `input` and a system text where the row has them."""
        if name == "prompt":
            asked = self.text(name)
            if isinstance(asked, str):
                return asked if self.system() is None else [*self.system_turn(), *self.ask(asked)]
            return [*self.system_turn(), *asked]
        value = self.text(name)
        if not isinstance(value, str):
            return [*self.system_turn(), *value]
        for more in ("input", "context"):
            if name in ("instruction", "question") and more in self.row.data:
                added = self.get(more)
                value = value if added is None or added == "" else f"{value}\n\n{as_string(added, more)}"
        turns = self.system_turn()
        for i, pair in enumerate(self.get("history") or []):
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise BadRow("not_text", "each turn of the history is a [question, answer] pair", "Write it so.", field=f"history[{i}]")
            turns += user(as_string(pair[0], f"history[{i}][0]")) + assistant(as_string(pair[1], f"history[{i}][1]"))
        return [*turns, *self.ask(value)]

    def ask(self, words: str) -> list[Any]:
        self.form = "conversational"
        return user(words)

    def system(self) -> str | None:
        return next((as_string(self.get(s), s) for s in SYSTEM if self.row.data.get(s)), None)

    def system_turn(self) -> list[Any]:
        words = self.system()
        return [{"role": "system", "content": words}] if words else []

    def rest(self) -> dict[str, Any]:
        """Columns that were not read: carried along untouched."""
        return {k: v for k, v in self.row.data.items() if k not in self.used}

    def warn(self, kind: str, what: str, remedy: str, name: str | None = None) -> None:
        self.warnings.append(Problem(self.source, kind, what, remedy, "warn", name))


def same_form(fields: Fields, prompt_name: str, prompt: Text, *answers: Text) -> tuple[Text, list[Text]]:
    """Prompt and answers all as strings or all as messages.

    Where the prompt's own text became a user message (an instruction, or a system column beside it) string answers become
    assistant turns. Where the row itself mixes messages and strings they do too, and a warning says so.
    """
    if all(isinstance(t, str) for t in (prompt, *answers)):
        return prompt, list(answers)
    if len({isinstance(t, str) for t in (fields.row.data.get(prompt_name), *answers)}) > 1:
        words = "messages and plain text in one row: the text was read as a turn"
        fields.warn("mixed_forms", words, "Write all of them as messages.")
    asked = user(prompt) if isinstance(prompt, str) and prompt else prompt or []
    return asked, [assistant(a) if isinstance(a, str) else a for a in answers]


def nearly(names: Sequence[str], data: Mapping[str, Any]) -> str | None:
    """A column of the row that is none of ours, but almost one of `names`.

    >>> nearly(["prompt"], {"Prompt": 1, "prompt_id": 2})
    'Prompt'
    """
    return _nearly(tuple(names), tuple(str(k) for k in data if k not in KNOWN))


@lru_cache(maxsize=4096)  # rows of a file have the same columns, and comparing names is slow
def _nearly(names: tuple[str, ...], columns: tuple[str, ...]) -> str | None:
    others = {column.lower(): column for column in columns}
    near = [m for n in names for m in difflib.get_close_matches(n, others, n=1, cutoff=0.82)]
    return others[near[0]] if near else None


@dataclass(frozen=True)
class Shape(Generic[T]):
    """`needs`: one group of alternative column names per thing wanted. `read(fields, *names)` makes the rows."""

    name: str
    needs: tuple[tuple[str, ...], ...]
    read: Callable[..., list[T]]
    also: Callable[[Mapping[str, Any]], bool] = lambda data: True

    def names(self, data: Mapping[str, Any]) -> list[str] | None:
        """The columns that fill the needs, or None when one is missing."""
        found = [next((n for n in group if n in data), None) for group in self.needs]
        return None if None in found or not self.also(data) else [n for n in found if n is not None]

    def missing(self, data: Mapping[str, Any]) -> list[tuple[str, ...]]:
        return [group for group in self.needs if not any(n in data for n in group)]


def load_rows(
    paths: str | list[str], shapes: Sequence[Shape[T]], noun: str, check: Callable[[list[T], list[Problem]], None] | None = None
) -> Loaded[T]:
    """Rows of a file in any of the shapes, row by row, so that a file may mix them. Every row that is left out is a problem.

    An exact repeat of a row (every column) is kept once and counted. `check` sees all good rows at the end and may add warnings.
    Raises UserError when nothing in the file looks like `noun`.
    """
    read = read_rows(paths)
    rows: list[T] = []
    problems, unfit = list(read.problems), []
    kinds: Counter[str] = Counter()
    fits: Counter[int] = Counter()
    seen: dict[bytes, Source] = {}
    for row in read.rows:
        shape, names = next(((s, n) for s in shapes if (n := s.names(row.data)) is not None), (None, []))
        if shape is None:
            unfit.append(row)
            continue
        key = hashlib.blake2b(json.dumps(row.data, sort_keys=True, default=str).encode(), digest_size=16).digest()
        if key in seen:
            words = f"an exact repeat of {seen[key]}"
            problems.append(Problem(row.source, "duplicate", words, "It is kept once; weigh rows by epochs, not by copies.", "drop"))
            continue
        fits[shapes.index(shape)] += 1
        fields = Fields(row)
        try:
            made = shape.read(fields, *names)
        except BadRow as bad:
            problems.append(Problem(row.source, bad.kind, bad.what, bad.remedy, bad.action, bad.field))
            continue
        seen[key] = row.source  # a faulty row is no original: its repeats have the same fault
        problems += fields.warnings
        rows += made
        kinds[f"{shape.name}, {fields.form}"] += 1
    if unfit and not fits:
        _refuse_foreign(unfit[0], shapes, noun)
    usual = shapes[fits.most_common(1)[0][0]] if fits else None
    problems += [_what_is_missing(row, shapes, usual) for row in unfit]
    if check:
        check(rows, problems)
    problems.sort(key=lambda p: (read.files.index(p.source.file) if p.source.file in read.files else -1, p.source.line))
    return Loaded(rows, problems, _described(kinds), read.fingerprint, read.files)


def _described(kinds: Counter[str]) -> str:
    if not kinds:
        return "not recognised"
    if len(kinds) == 1:
        return next(iter(kinds))
    return "; ".join(f"{name} ({n} rows)" for name, n in kinds.most_common())


def _what_is_missing(row: Row, shapes: Sequence[Shape[Any]], usual: Shape[Any] | None) -> Problem:
    """The column that keeps this row from the file's usual shape, or from the nearest one; and the name it may be hiding under."""

    def distance(shape: Shape[Any]) -> tuple[int, int]:
        missing = shape.missing(row.data)
        hidden = sum(nearly(group, row.data) is not None for group in missing)
        return (len(missing) - hidden if missing else len(shape.needs)), len(missing) - len(shape.needs)

    shape = usual if usual is not None and usual.missing(row.data) else min(shapes, key=distance)
    missing = shape.missing(row.data) or [shape.needs[-1]]
    for group in missing:
        if near := nearly(group, row.data):
            name = next(n for n in group if nearly([n], row.data))
            remedy = f"Did you mean {name!r} by {near!r}? Rename it."
            return Problem(row.source, "missing_column", f"the column {name!r} is missing", remedy, "reject", name)
    names = " and ".join(repr(group[0]) for group in missing)
    return Problem(
        row.source,
        "missing_column",
        f"the column{'s' if len(missing) > 1 else ''} {names} {'are' if len(missing) > 1 else 'is'} missing",
        f"The row has: {', '.join(map(str, row.data)) or 'nothing'}.",
        "reject",
        missing[0][0],
    )


def kind_of(data: Mapping[str, Any]) -> str | None:
    """Which command wants rows with these columns."""
    if {"chosen", "rejected"} <= set(data):
        return "comparisons: tether dpo or tether reward"
    if "label" in data and {"completion", "messages", "conversations"} & set(data):
        return "answers labelled good or bad: tether dpo with loss_type=kto"
    if {"messages", "conversations", "completion", "output", "answer", "solution", "response", "text"} & set(data):
        return "demonstrations: tether sft"
    return None


def _refuse_foreign(row: Row, shapes: Sequence[Shape[Any]], noun: str) -> None:
    """UserError when the first row belongs to another kind of training, or to none: one sentence instead of thousands."""
    other = kind_of(row.data)
    hopeless = all(len(s.missing(row.data)) == len(s.needs) for s in shapes)
    columns = ", ".join(map(str, row.data)) or "none"
    # A column that is nearly one of ours is a misspelling, reported row by row with the name that was meant.
    misspelt = any(nearly(group, row.data) for s in shapes for group in s.missing(row.data))
    if other and not misspelt:
        raise UserError(f"these rows are not {noun} (columns: {columns})", where=str(row.source), remedy=f"They look like {other}.")
    if hopeless and not misspelt:
        forms = " | ".join(dict.fromkeys(" + ".join(group[0] for group in s.needs) for s in shapes[:5]))
        raise UserError(f"these rows are not {noun} (columns: {columns})", where=str(row.source), remedy=f"Wanted: {forms}.")


def contradictions(rows: Sequence[Any], key: Callable[[Any], tuple[Any, Any]], what: str, problems: list[Problem]) -> None:
    """Warn of rows with the same question and opposite verdicts. `key(row)` is (question, verdict)."""
    first: dict[Any, tuple[Any, Source]] = {}
    for row in rows:
        question, verdict = key(row)
        known, where = first.setdefault(question, (verdict, row.source))
        if known != verdict:
            words = f"{what} contradicts {where}"
            problems.append(Problem(row.source, "contradiction", words, "Both are kept and cancel out; remove one.", "warn"))


def comparable(text: Text) -> str:
    """A key under which equal texts are equal, whatever their form."""
    return plain(text)
