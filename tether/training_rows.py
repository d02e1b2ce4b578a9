"""From files to the rows of a run: read, refuse or leave out what cannot be used, encode, hold some out, record what was lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tether.batch import Example, split_by_prompt
from tether.chat import Encoded
from tether.errors import UserError
from tether.files import Loaded, Problem
from tether.recipe import TrainRecipe
from tether.run import Run
from tether.startup import check_ids, check_rows, note_problems, record_problems

Refine = Callable[[list[Example]], tuple[list[Example], list[Problem]]]


@dataclass(frozen=True)
class Rows:
    """What is trained on and what is only evaluated on, in file order."""

    train: list[Example]
    held_out: list[Example]

    @property
    def all(self) -> list[Example]:
        return [*self.train, *self.held_out]


def training_rows(
    recipe: TrainRecipe,
    run: Run,
    load: Callable[[str | list[str]], Loaded[Any]],
    encode: Callable[[Loaded[Any]], Encoded],
    *,
    what: str,
    model: Any,
    refine: Refine | None = None,
) -> Rows:
    """The rows of `recipe.data`, with `eval_data` or a share of the prompts held out.

    Every row that is dropped or cut is in the run's notices with file and line. `refine` may leave out more. Raises UserError
    when rows cannot be used (and on_bad_rows is refuse), when the template does not suit them, when `model` does not know one of their
    tokens, or when nothing is left.
    """

    def read(paths: str | list[str]) -> tuple[list[Example], int]:
        loaded = load(paths)
        count = len(loaded.rows)
        run.say(f"read {count} row{'' if count == 1 else 's'} from {', '.join(loaded.files)}: {loaded.shape}")
        try:
            loaded.enforce(recipe.on_bad_rows)
        except UserError:
            note_problems(run, loaded.problems)  # the message names the first few, the run's notices all
            raise
        encoded = encode(loaded)
        kept, more = refine(encoded.examples) if refine else (encoded.examples, [])
        record_problems(run, [*loaded.problems, *encoded.problems, *more], max_length=recipe.max_length)
        encoded.enforce(recipe.on_bad_rows, loaded.problems)
        check_ids(encoded.examples, model)
        run.fingerprint(loaded.files, loaded.fingerprint)
        return kept, len(loaded.rows)

    examples, n_read = read(recipe.data)
    if recipe.eval_data:
        rows = Rows(examples, read(recipe.eval_data)[0])
    else:
        rows = Rows(*split_by_prompt(examples, recipe.eval_fraction, recipe.seed))
        n_read -= len(rows.held_out)
    check_rows(run, rows.train, n_read, what=what)
    return rows
