"""`Item`: a prompt and the answers to be compared, out of any file that Tether reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tether import preferences, rankings
from tether.errors import UserError
from tether.files import Loaded, Problem, Source
from tether.messages import BadRow, Message, Text, as_text, assistant
from tether.shapes import PROMPT, Fields, Shape, load_rows, same_form


@dataclass(frozen=True)
class Candidate:
    """One answer. `id` names it within its item; `turns` is set where it is more than one plain assistant turn."""

    id: str
    text: str
    model: str | None = None
    turns: tuple[Message, ...] | None = None


@dataclass(frozen=True)
class Item:
    """A prompt with two or more answers. The id depends on prompt, answers and models, and not on the order of the answers."""

    id: str
    prompt: Text
    answers: tuple[Candidate, ...]
    source: str
    extra: dict[str, Any]

    def answer(self, place: int) -> Text:
        """An answer as training data has it: text beside a prompt of text, messages beside messages."""
        candidate = self.answers[place]
        if isinstance(self.prompt, str):
            return candidate.text
        return assistant(candidate.text) if candidate.turns is None else list(candidate.turns)

    def place(self, candidate: str) -> int:
        return next(i for i, a in enumerate(self.answers) if a.id == candidate)

    def as_row(self) -> dict[str, Any]:
        answers = [{"id": a.id, "text": a.text, "model": a.model, **({"turns": list(a.turns)} if a.turns else {})} for a in self.answers]
        return {"id": self.id, "prompt": self.prompt, "answers": answers, "source": self.source, "extra": self.extra}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Item:
        answers = tuple(Candidate(a["id"], a["text"], a["model"], tuple(a["turns"]) if "turns" in a else None) for a in row["answers"])
        return cls(row["id"], row["prompt"], answers, row["source"], row["extra"])


def make_item(
    prompt: Text,
    answers: Sequence[Text],
    *,
    models: Sequence[str | None] | None = None,
    ids: Sequence[str] | None = None,
    source: str = "",
    extra: Mapping[str, Any] | None = None,
    item_id: str | None = None,
) -> Item:
    """An item with ids made from what it holds. BadRow when fewer than two answers can be told apart.

    >>> item = make_item("Name a planet.", ["Mars.", "Soup."])
    >>> item.id == make_item("Name a planet.", ["Soup.", "Mars."]).id
    True
    """
    names = list(models) if models is not None else [None] * len(answers)
    made = [_candidate(prompt, a, m, None if ids is None else ids[i]) for i, (a, m) in enumerate(zip(answers, names, strict=True))]
    if len(made) < 2:
        raise BadRow("one_answer", "one answer: nothing to compare it with", "Give two or more answers.", action="drop")
    if len({c.id for c in made}) < len(made):
        raise BadRow("identical", "two of the answers are the same", "Remove one of them.", action="drop")
    content = sorted([c.id, c.text, c.model or ""] for c in made)
    return Item(item_id or digest("i", [prompt, content]), prompt, tuple(made), source, dict(extra or {}))


def _candidate(prompt: Text, answer: Text, model: str | None, given: str | None) -> Candidate:
    single = not isinstance(answer, str) and len(answer) == 1 and set(answer[0]) == {"role", "content"} and answer[0]["role"] == "assistant"
    if isinstance(answer, str) or single:
        text, turns = answer if isinstance(answer, str) else answer[0]["content"], None
    else:
        text, turns = "\n\n".join(f"{m['role']}: {m['content']}" for m in answer), tuple(answer)
    return Candidate(given or digest("a", [prompt, text, model]), text, model, turns)


def digest(kind: str, content: Any) -> str:
    """A short name for some content, the same on every machine; `kind` is its first letter."""
    return kind + hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()


def load_items(path: str | list[str]) -> Loaded[Item]:
    """Pairs (chosen and rejected, or two outputs with or without a verdict), rankings, and prompts with a list of answers.

    Verdicts, ranks and scores of the file are kept in `extra` and shown to nobody. Dropped and counted: a row whose answers are all
    the same text, or that has only one; a repeat of an item, with its answers in whatever order. Raises UserError when no row has
    answers at all.
    """
    loaded = load_rows(path, SHAPES, "answers to compare", _each_once)
    if not loaded.rows and set(loaded.counts()) == {"missing_column"}:
        first = loaded.problems[0]
        words = f"no row holds two answers to compare ({first.what[0].lower()}{first.what[1:]})"
        remedy = f"{first.remedy} Let models answer its prompts with --model, or add answers: prompt + answer_a + answer_b."
        raise UserError(words, where=str(first.source), remedy=remedy)
    return loaded


def _each_once(items: list[Item], problems: list[Problem]) -> None:
    first: dict[str, Item] = {}
    for item in items:
        known = first.setdefault(item.id, item)
        if known is not item:
            file, _, line = item.source.rpartition(":")
            words = f"the same answers to the same prompt as {known.source}"
            problems.append(Problem(Source(file, int(line)), "repeat", words, "It is kept once; ask for more votes by --votes.", "drop"))
    items[:] = first.values()


# -- shapes ----------------------------------------------------------------------------------------------------------

MODEL_COLUMNS = {
    "chosen": ("chosen_model", "model_chosen"),
    "rejected": ("rejected_model", "model_rejected"),
    "1": ("model_1", "model1", "generator_1"),
    "2": ("model_2", "model2", "generator_2"),
    "a": ("model_a",),
    "b": ("model_b",),
}


def models_of(fields: Fields, *answers: str) -> list[str | None]:
    """Who wrote the answers, where the row says so: `model_a` beside `completion_a`, or PandaLM's `cmp_key` "first_second"."""
    found: list[str | None] = []
    for name in answers:
        columns = MODEL_COLUMNS[name if name in MODEL_COLUMNS else name[-1]]
        found.append(next((v for c in columns if c in fields.row.data and isinstance(v := fields.get(c), str) and v), None))
    both = fields.row.data.get("cmp_key")
    if not any(found) and isinstance(both, str) and both.count("_") == 1:
        return list(both.split("_"))
    return found


def differ(fields: Fields, item: Item) -> list[Item]:
    """The item, unless its answers all read the same."""
    if len({a.text for a in item.answers}) == 1:
        raise BadRow("identical", "all answers are the same: nothing to compare", "Remove the row.", action="drop")
    return [item]


def _chosen(shape: Shape[preferences.Preference]) -> Shape[Item]:
    def read(fields: Fields, *names: str) -> list[Item]:
        models, found = models_of(fields, "chosen", "rejected"), []
        for p in shape.read(fields, *names):
            extra = p.extra if p.margin is None else {**p.extra, "margin": p.margin}
            item = make_item(p.prompt, [p.chosen, p.rejected], models=models, source=str(p.source), extra=extra)
            found.append(item)
        return found

    return Shape(shape.name, shape.needs, read, shape.also)


def sides(fields: Fields, prompt_name: str, one: str, other: str) -> Item:
    """Two answers in columns of their own, and nothing said about which is better."""
    models = models_of(fields, one, other)
    asked = fields.prompt(prompt_name)
    prompt, answers = same_form(fields, prompt_name, asked, fields.text(one), fields.text(other))
    return make_item(prompt, answers, models=models, source=str(fields.source), extra=fields.rest())


def _sides(fields: Fields, *names: str) -> list[Item]:
    return differ(fields, sides(fields, *names))


def listed(fields: Fields, prompt_name: str, answers_name: str) -> Item:
    """A list of answers, each a text or messages, or an object with its text and perhaps `model` and `id`."""
    prompt, answers = fields.prompt(prompt_name), fields.get(answers_name)
    if not isinstance(answers, list):
        raise BadRow("not_a_list", f"a list is wanted, got {type(answers).__name__}", "List the answers.", field=answers_name)
    read = [_one(a, f"{answers_name}[{i}]") for i, a in enumerate(answers)]
    given = [i for _, _, i in read]
    ids = [i for i in given if i is not None] if None not in given and len(set(given)) == len(given) else None
    prompt, texts = same_form(fields, prompt_name, prompt, *(t for t, _, _ in read))
    return make_item(prompt, texts, models=[m for _, m, _ in read], ids=ids, source=str(fields.source), extra=fields.rest())


def _one(value: Any, place: str) -> tuple[Text, str | None, str | None]:
    """(text, model, id) of one answer in a list."""
    if isinstance(value, Mapping) and "role" not in value and "from" not in value:
        key = next((k for k in rankings.TEXTS if k in value), None)
        if key is None:
            words = f"the answer has no text (it has {', '.join(map(str, value)) or 'nothing'})"
            raise BadRow("not_text", words, 'Such as {"text": "...", "model": "..."}.', field=place)
        model, given = value.get("model"), value.get("id")
        return as_text(value[key], f"{place}.{key}"), _word(model), _word(given)
    return as_text(value, place), None, None


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) and value else str(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _listed(fields: Fields, *names: str) -> list[Item]:
    return differ(fields, listed(fields, *names))


def _columns(fields: Fields, prompt_name: str) -> list[Item]:
    """One column per answer, each an object with its text; the column's name is who wrote it."""
    prompt = fields.prompt(prompt_name)
    names = [n for n, value in fields.row.data.items() if _is_answer(value)]
    read = [_one(fields.get(n), n)[0] for n in names]
    prompt, texts = same_form(fields, prompt_name, prompt, *read)
    return differ(fields, make_item(prompt, texts, models=list(names), source=str(fields.source), extra=fields.rest()))


def _is_answer(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" not in value and any(isinstance(value.get(k), str) for k in rankings.TEXTS)


SHAPES: list[Shape[Item]] = [
    *(_chosen(shape) for shape in preferences.PAIRS if preferences.BETTER in shape.needs),
    *(Shape("two answers", (PROMPT, (a,), (b,)), _sides) for a, b in preferences.SIDES),
    Shape("a list of answers", (PROMPT, rankings.ANSWERS), _listed),
    Shape("answers, one column each", (PROMPT,), _columns, lambda data: sum(map(_is_answer, data.values())) >= 2),
]
