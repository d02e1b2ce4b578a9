"""`Ranking`: several answers to one prompt, ordered by people, by scores or by verdicts. Rank 1 is the best; equal ranks are a tie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tether.files import Loaded, Source
from tether.messages import BadRow, Text, as_text, assistant
from tether.shapes import PROMPT, Fields, Shape, load_rows


@dataclass(frozen=True)
class Ranking:
    prompt: Text
    answers: list[Text]
    ranks: list[int]
    source: Source
    extra: dict[str, Any]


def load(path: str | list[str]) -> Loaded[Ranking]:
    """Ranked or scored answers. A row whose answers are all tied is dropped and counted."""
    return load_rows(path, SHAPES, "rankings")


ANSWERS = ("answers", "completions", "responses", "samples", "candidates")
RANKS = ("ranks", "rank", "ranking")
SCORES = ("scores", "rewards", "ratings", "correct", "rm_score")
TEXTS = ("text", "content", "completion", "response", "answer", "output", "solution", "value")
RANK_OF_ONE = ("rank",)
SCORE_OF_ONE = ("score", "rating", "overall_score", "reward", "is_correct", "correct")


def ranks_of_scores(scores: Sequence[float | None]) -> list[int | None]:
    """Higher is better; equal scores share a rank.

    >>> ranks_of_scores([0.2, 0.9, 0.2, None])
    [2, 1, 2, None]
    """
    levels = sorted({s for s in scores if s is not None}, reverse=True)
    return [None if s is None else levels.index(s) + 1 for s in scores]


def _make(fields: Fields, prompt: Text, answers: list[Text], ranks: Sequence[int | None], name: str) -> list[Ranking]:
    if not isinstance(prompt, str):
        answers = [assistant(a) if isinstance(a, str) else a for a in answers]
    kept = [(a, r) for a, r in zip(answers, ranks, strict=True) if r is not None]
    if len(kept) < len(answers):
        fields.warn("no_rank", f"{len(answers) - len(kept)} answers have no rank and are left out", "Rank them, or ignore this.", name)
    if len({r for _, r in kept}) < 2:
        raise BadRow("tie", "all answers are tied: no preference", "Nothing to do.", field=name, action="drop")
    return [Ranking(prompt, [a for a, _ in kept], [r for _, r in kept], fields.source, fields.rest())]


def _number(value: Any, field: str) -> float | None:
    if value is None:
        return None
    if not isinstance(value, (int, float)) or value != value:
        raise BadRow("not_a_number", f"a number is wanted, got {value!r}", "Write it as a number.", field=field)
    return float(value)


def _rank(value: Any, field: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise BadRow("not_a_rank", f"a whole rank is wanted, got {value!r}", "1 is the best; equal ranks are a tie.", field=field)
    return int(value)


def _beside(fields: Fields, prompt_name: str, answers_name: str, order_name: str) -> list[Ranking]:
    """Two lists side by side: answers, and their ranks or scores."""
    prompt = fields.prompt(prompt_name)
    answers, order = fields.get(answers_name), fields.get(order_name)
    for name, value in ((answers_name, answers), (order_name, order)):
        if not isinstance(value, list):
            raise BadRow("not_a_list", f"a list is wanted, got {type(value).__name__}", "Give one entry per answer.", field=name)
    if len(answers) != len(order):
        words = f"{len(order)} {order_name} for {len(answers)} answers"
        raise BadRow("ranks_missing", words, "Give one for each answer.", field=order_name)
    texts = [as_text(a, f"{answers_name}[{i}]") for i, a in enumerate(answers)]
    named = [f"{order_name}[{i}]" for i in range(len(order))]
    if order_name in RANKS:
        ranks = [_rank(v, f) for v, f in zip(order, named, strict=True)]
    else:
        ranks = ranks_of_scores([_number(v, f) for v, f in zip(order, named, strict=True)])
    return _make(fields, prompt, texts, ranks, order_name)


def _text_key(item: Any) -> str | None:
    return next((k for k in TEXTS if k in item), None) if isinstance(item, Mapping) else None


def _order_key(item: Any) -> str | None:
    return next((k for k in (*RANK_OF_ONE, *SCORE_OF_ONE) if k in item), None) if isinstance(item, Mapping) else None


def _judged(item: Any) -> bool:
    return _text_key(item) is not None and _order_key(item) is not None


def _from_objects(fields: Fields, prompt: Text, items: dict[str, Mapping[str, Any]], name: str) -> list[Ranking]:
    texts, numbers, by_rank = [], [], False
    for place, item in items.items():
        text, order = _text_key(item), _order_key(item)
        if text is None or order is None:
            words = "an answer is an object with its text and a rank or a score"
            raise BadRow("not_text", words, 'Such as {"text": "...", "rank": 1}.', field=place)
        texts.append(as_text(item[text], f"{place}.{text}"))
        by_rank = order in RANK_OF_ONE
        numbers.append(_rank(item[order], f"{place}.{order}") if by_rank else _number(item[order], f"{place}.{order}"))
    ranks = [None if n is None else int(n) for n in numbers] if by_rank else ranks_of_scores(numbers)
    return _make(fields, prompt, texts, ranks, name)


def _inside(fields: Fields, prompt_name: str, answers_name: str) -> list[Ranking]:
    """A list of objects, each with the text and its rank or score."""
    prompt, answers = fields.prompt(prompt_name), fields.get(answers_name)
    return _from_objects(fields, prompt, {f"{answers_name}[{i}]": a for i, a in enumerate(answers)}, answers_name)


def _columns(fields: Fields, prompt_name: str) -> list[Ranking]:
    """One column per answer, each an object with the text and a verdict."""
    prompt = fields.prompt(prompt_name)
    items = {name: fields.get(name) for name, value in fields.row.data.items() if _judged(value)}
    return _from_objects(fields, prompt, items, ", ".join(items))


SHAPES: list[Shape[Ranking]] = [
    Shape("ranking", (PROMPT, ANSWERS, RANKS), _beside),
    Shape("scored answers", (PROMPT, ANSWERS, SCORES), _beside),
    Shape(
        "ranking",
        (PROMPT, ANSWERS),
        _inside,
        lambda data: any(isinstance(v, list) and v and _judged(v[0]) for k, v in data.items() if k in ANSWERS),
    ),
    Shape("judged answers, one column each", (PROMPT,), _columns, lambda data: sum(map(_judged, data.values())) >= 2),
]
