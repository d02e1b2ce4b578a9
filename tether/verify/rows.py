"""At most eight rows of a recipe's data: read as the run reads them, encoded one by one, and written down again for the loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tether import row_lengths
from tether.batch import Example
from tether.codec import Codec
from tether.conversations import Conversation
from tether.errors import UserError
from tether.feedback import Feedback
from tether.files import Loaded, Source
from tether.preferences import Preference
from tether.prompts import Prompt
from tether.rankings import Ranking
from tether.recipe import DPORecipe, RewardRecipe, SFTRecipe, TrainRecipe

ROWS, LOOKED_AT = 8, 64
Row = Conversation | Preference | Ranking | Feedback | Prompt


@dataclass(frozen=True)
class Rows:
    """The rows that are verified with. `examples[i]` is `rows[i]` as token ids; a recipe that samples has prompts alone."""

    rows: list[Row]
    examples: list[Example]
    note: str


def present(paths: str | list[str]) -> bool:
    """Whether the data lies on this machine. Hub ids are never asked for."""
    return all(Path(p).expanduser().exists() for p in ([paths] if isinstance(paths, str) else paths))


def take(recipe: TrainRecipe, codec: Codec) -> Rows:
    """The shortest of the first rows, each of another prompt as far as there are such, in file order.

    Rows that cannot be used are treated as the run would treat them: UserError unless on_bad_rows is drop.
    """
    if present(recipe.data):
        loaded = row_lengths.read(recipe)
        loaded.enforce(recipe.on_bad_rows)
        note = f"{{n}} short rows of the first {min(LOOKED_AT, len(loaded.rows))} of {', '.join(loaded.files)}"
    else:
        loaded = Loaded(made_up(recipe), [], "made up", "", [])
        names = recipe.data if isinstance(recipe.data, str) else ", ".join(recipe.data)
        note = f"{{n}} made-up rows, because {names} is not on this machine"
    encoded: list[tuple[Row, Example]] = []
    for row in loaded.rows[:LOOKED_AT]:
        encoded += [(row, e) for e in row_lengths.encode(recipe, replace(loaded, rows=[row]), codec)]
    if isinstance(recipe, RewardRecipe):
        encoded = [(row, e) for row, e in encoded if len(set(e.extra["ranks"])) > 1]
    if not encoded:
        words = f"none of the first {min(LOOKED_AT, len(loaded.rows))} rows can be used"
        raise UserError(words, where=str(recipe.data), remedy="See `tether data FILE`.")
    chosen = _short_and_different(recipe, encoded)
    return Rows([encoded[i][0] for i in chosen], [encoded[i][1] for i in chosen], note.format(n=len(chosen)))


def _short_and_different(recipe: TrainRecipe, encoded: Sequence[tuple[Row, Example]]) -> list[int]:
    """Indices in order. Rows that fill max_length were perhaps cut, and come last."""

    def rank(i: int) -> tuple[bool, int, int]:
        example = encoded[i][1]
        longest = len(example.prompt) + max(map(len, example.answers), default=0)
        return longest >= recipe.max_length, example.n_tokens, i

    seen: set[tuple[int, ...]] = set()
    first: list[int] = []
    again: list[int] = []
    for i in sorted(range(len(encoded)), key=rank):
        key = tuple(encoded[i][1].prompt)
        (again if key in seen else first).append(i)
        seen.add(key)
    return sorted([*first, *again][:ROWS])


def write(rows: Rows, path: Path) -> Path:
    """The same rows as a file that the loop reads."""
    path.write_text("".join(json.dumps(_plain(row)) + "\n" for row in rows.rows), encoding="utf-8")
    return path


def _plain(row: Row) -> dict[str, Any]:
    if isinstance(row, Conversation):
        fields = {"messages": row.messages, "prompt": row.prompt, "completion": row.completion, "text": row.text}
        return {name: value for name, value in fields.items() if value is not None}
    if isinstance(row, Preference):
        return {
            "prompt": row.prompt,
            "chosen": row.chosen,
            "rejected": row.rejected,
            **({} if row.margin is None else {"margin": row.margin}),
        }
    if isinstance(row, Ranking):
        if len(row.answers) == 2:  # a pair keeps its margin
            better, worse = sorted((0, 1), key=lambda i: row.ranks[i])
            pair = {"prompt": row.prompt, "chosen": row.answers[better], "rejected": row.answers[worse]}
            return {**pair, **({"margin": row.extra["margin"]} if row.extra.get("margin") is not None else {})}
        return {"prompt": row.prompt, "answers": row.answers, "ranks": row.ranks}
    if isinstance(row, Feedback):
        return {"prompt": row.prompt, "completion": row.completion, "label": row.label}
    return {"prompt": row.prompt}


# -- made-up rows ------------------------------------------------------------------------------------------------------

QUESTIONS = ("Name a colour.", "What is 2 plus 3?", "Say hello to Ada.", "Which season is cold?", "Name a river.", "What do cats eat?")
GOOD = ("Blue.", "It is 5.", "Hello, Ada!", "Winter.", "The Nile is one.", "Mostly meat, and a little of what they steal.")
BAD = ("No.", "It is 6, or 7.", "Hello.", "Summer is.", "Water.", "Hay.")


def made_up(recipe: TrainRecipe) -> list[Any]:
    """Six rows of the kind that the recipe asks for, as messages, their answers of different lengths."""

    def turn(role: str, text: str) -> list[Any]:
        return [{"role": role, "content": text}]

    rows: list[Any] = []
    for i, (question, good, bad) in enumerate(zip(QUESTIONS, GOOD, BAD, strict=True)):
        prompt, yes, no = turn("user", question), turn("assistant", good), turn("assistant", bad)
        source = Source("made-up rows", i + 1)
        if isinstance(recipe, SFTRecipe):
            rows.append(Conversation([*prompt, *yes], None, None, None, source))
        elif isinstance(recipe, RewardRecipe):
            rows.append(Ranking(prompt, [yes, no], [1, 2], source, {}))
        elif isinstance(recipe, DPORecipe) and recipe.loss_type == "kto":
            rows.append(Feedback(prompt, yes if i % 2 else no, bool(i % 2), source, {}))
        elif isinstance(recipe, DPORecipe):
            rows.append(Preference(prompt, yes, no, None, source, {}))
        else:
            rows.append(Prompt(prompt, source, {}))
    return rows
