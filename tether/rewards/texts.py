"""What ready rewards read: the answer as text, and the column of the data that they are judged by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tether.errors import UserError


def text_of(completion: Any) -> str:
    """A completion as text: it is text, or messages whose assistant turns are joined.

    >>> text_of([{"role": "assistant", "content": "4"}])
    '4'
    """
    if isinstance(completion, str):
        return completion
    return "\n".join(str(m["content"]) for m in completion if m.get("role") == "assistant")


def answer_texts(completions: Sequence[Any], opened: Sequence[str] | None) -> list[str]:
    """The whole answers: what the chat template opened ("<think>") and what the model wrote."""
    texts = [text_of(c) for c in completions]
    return texts if opened is None else [o + t for o, t in zip(opened, texts, strict=True)]


def gold_column(reward: str, wanted: str | None, columns: Mapping[str, Any], usual: Sequence[str]) -> Sequence[Any]:
    """The column `wanted`, or the first of the usual names that is there. UserError when there is none."""
    names = [wanted] if wanted is not None else list(usual)
    found = next((n for n in names if n in columns), None)
    if found is None:
        given = sorted(set(columns) - {"completion_ids", "raw_completions", "opened", "finish_reasons"})
        raise UserError(
            f"reward '{reward}' needs a column {' or '.join(repr(n) for n in names)} in the data, which has {', '.join(given) or 'no other'}",
            where="data",
            remedy="Rename the column, or name yours with the reward's setting `column`.",
        )
    values: Sequence[Any] = columns[found]
    return values
