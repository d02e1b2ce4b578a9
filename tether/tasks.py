"""`Task`: a question with what its answers are judged by; read from the layouts that benchmarks have."""

from __future__ import annotations

import builtins
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tether import prompts
from tether.errors import UserError
from tether.files import Loaded, Source
from tether.keys import nearest
from tether.messages import BadRow, Text, as_string, plain, user
from tether.pass_rates import binned
from tether.prompts import Prompt
from tether.readers import read_rows
from tether.reward import Reward
from tether.rewards.code import COLUMNS as TESTS
from tether.rewards.code import CodeReward, CodeTests, read_tests
from tether.rewards.functions import reward
from tether.rewards.math import GOLD, MathReward
from tether.rewards.math_extract import gold_answer
from tether.shapes import Fields, Shape, load_rows
from tether.yaml_file import load_scalar

PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")  # a column's place in a question; other braces are text
WITH_GOLD = ("math", "code")


@dataclass(frozen=True)
class Task:
    prompt: Text  # what the model is asked
    columns: dict[str, Any]  # what the reward is given beside it
    source: Source
    category: str | None = None

    @property
    def shown(self) -> Text:
        """What a code reward takes for the prompt: the code that a bare function body continues, however the model was asked."""
        code = self.columns.get("prompt")
        return code if isinstance(code, str) and self.columns.get("entry_point") else self.prompt


@dataclass
class Tasks:
    rows: list[Task]
    fingerprint: str  # of the files and of the questions made of them
    files: list[str]
    notices: list[str]


def make_reward(spec: str, gold: str | None = None) -> Reward:
    """The reward that `--reward` names: a name, a function, or a block as recipes have it: {reward: math, column: target}."""
    value: Any = load_scalar(spec, "--reward") if spec.lstrip().startswith("{") else spec
    block: dict[str, Any] = dict(value) if isinstance(value, dict) else {"reward": str(value)}
    name = block.pop("reward", None)
    if not isinstance(name, str):
        raise UserError("a reward's block needs its name", where="--reward", remedy="Write {reward: math, column: target}.")
    if gold is not None:
        if name not in WITH_GOLD:
            raise UserError(
                f"reward {name!r} looks for its columns itself", where="--gold", remedy=f"Only {' and '.join(WITH_GOLD)} take it."
            )
        block["column"] = gold
    return reward(name, **block)


def load_tasks(
    path: str,
    judged_by: Reward,
    *,
    ask: str | None = None,
    system: str | None = None,
    category: str | None = None,
    bins: int | None = None,
    limit: int | None = None,
    on_bad_rows: Literal["refuse", "drop"] = "refuse",
) -> Tasks:
    """The tasks of a data file. `ask` is the question as text with columns in braces, put as a user's message.

    UserError with file, line and column for a row that holds no question or nothing to judge its answers by; under "drop" such
    rows are left out and counted.
    """
    loaded = prompts.load(path) if ask is None else _asked(path, ask, judged_by)
    loaded.enforce(on_bad_rows)
    notices = [f"{n} rows left out: {kind}" for kind, n in _dropped(loaded).items()]
    rows = [Task(_with_system(p.prompt, system), p.extra, p.source) for p in loaded.rows]
    rows, gone = _with_gold(rows, judged_by, on_bad_rows)
    if gone:
        notices.append(f"{len(gone)} rows left out: no gold answer (the first: {gone[0].source})")
    if category is not None:
        rows = _categories(rows, category, bins)
    rows = rows[:limit]
    if isinstance(judged_by.function, CodeReward):
        notices += _unnamed(rows, judged_by.function)
    questions = json.dumps([(str(t.source), t.prompt) for t in rows], ensure_ascii=False)
    return Tasks(rows, hashlib.sha256(f"{loaded.fingerprint}{questions}".encode()).hexdigest()[:16], loaded.files, notices)


def _dropped(loaded: Loaded[Prompt]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for problem in loaded.problems:
        if problem.action in ("reject", "drop"):
            counts[problem.kind] = counts.get(problem.kind, 0) + 1
    return counts


def _with_system(prompt: Text, system: str | None) -> Text:
    if system is None:
        return prompt
    return [{"role": "system", "content": system}, *(user(prompt) if isinstance(prompt, str) else prompt)]


# -- the question ------------------------------------------------------------------------------------------------------


def _asked(path: str, ask: str, judged_by: Reward) -> Loaded[Prompt]:
    """Rows whose columns are put into the question, which may lie in a file of its own."""
    if "{" not in ask and Path(ask).expanduser().is_file():
        ask = Path(ask).expanduser().read_text(encoding="utf-8").strip()
    names = list(dict.fromkeys(PLACE.findall(ask)))
    if not names:
        raise UserError("the question names no column", where="--ask", remedy="Put columns in braces, such as '{question} Think first.'")
    if isinstance(judged_by.function, MathReward) and (told := set(names) & {judged_by.function.column, *GOLD}):
        raise UserError(f"{{{sorted(told)[0]}}} would show the model the gold answer", where="--ask", remedy="Leave it out.")
    given = sorted({str(c) for row in read_rows(path).rows for c in row.data})
    if absent := [n for n in names if n not in given]:
        near = nearest(absent[0], given)
        raise UserError(
            f"there is no column {absent[0]!r}",
            where="--ask",
            remedy=f"{f'Did you mean {near}? ' if near else ''}{path} has: {', '.join(given) or 'no row that can be read'}.",
        )

    def read(fields: Fields, *found: str) -> list[Prompt]:
        row = fields.row.data
        filled = PLACE.sub(lambda place: _words(row[place[1]], place[1]), ask)
        return [Prompt(user(filled), fields.source, dict(row))]

    return load_rows(path, [Shape("question from columns", tuple((n,) for n in names), read)], "tasks")


def _words(value: Any, column: str) -> str:
    """A column in a question: a list of texts (tests) takes a line for each."""
    if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        return "\n".join(as_string(v, column) for v in value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(int(value)) if float(value).is_integer() else repr(value)
    text = as_string(value, column)
    if not text.strip():
        raise BadRow("empty", "the column is empty", "Fill it in, or remove the row.", field=column)
    return text


# -- what answers are judged by ----------------------------------------------------------------------------------------


def _with_gold(tasks: list[Task], judged_by: Reward, on_bad_rows: str) -> tuple[list[Task], list[Task]]:
    """(tasks that can be judged, tasks left out). Rewards other than math and code say themselves what they need."""
    function = judged_by.function
    if not isinstance(function, (MathReward, CodeReward)) or not tasks:
        return tasks, []
    noun = "gold answer" if isinstance(function, MathReward) else "tests"
    names, column = _judging_column(tasks, function)
    if column is None:
        given = sorted({c for t in tasks for c in t.columns})
        near = nearest(names[0], given)
        raise UserError(
            f"the row has no {noun}: no column {' or '.join(map(repr, names))} (there {'are' if given else 'is'} {', '.join(given) or 'no other'})",
            where=f"{tasks[0].source}: {names[0]}",
            remedy=f"{f'Did you mean {near}? ' if near else ''}Add the column, or name yours with --gold.",
        )
    good: list[Task] = []
    bad: list[Task] = []
    for task in tasks:
        (good if _judgeable(task, column, function) else bad).append(task)
    if bad and (on_bad_rows == "refuse" or not good):
        others = f"; so have {len(bad) - 1} more" if len(bad) > 1 else ""
        raise UserError(
            f"the row has no {noun}{others}",
            where=f"{bad[0].source}: {column}",
            remedy="Fill it in, or leave such rows out with --on-bad-rows drop.",
        )
    return good, bad


def _judging_column(tasks: Sequence[Task], function: MathReward | CodeReward) -> tuple[list[str], str | None]:
    """Where gold answers or tests may stand, and where the tasks have them."""
    usual = GOLD if isinstance(function, MathReward) else TESTS
    names = list(usual) if function.column is None else [function.column]
    return names, next((n for n in names if any(n in t.columns for t in tasks)), None)


def _judgeable(task: Task, column: str, function: MathReward | CodeReward) -> bool:
    value = task.columns.get(column)
    if isinstance(function, MathReward):
        return value is not None and bool(gold_answer(str(value)))
    return bool(len(_tests(task, value, column)))


def _tests(task: Task, value: Any, column: str) -> CodeTests:
    try:
        return read_tests(value, task.columns)
    except UserError as error:
        raise UserError(error.what, where=f"{task.source}: {column}", remedy=error.remedy) from None


def _unnamed(tasks: Sequence[Task], function: CodeReward) -> list[str]:
    """A notice when most questions do not tell the name of the function that their tests call: nobody could guess it."""
    _, column = _judging_column(tasks, function)
    silent = 0
    for task in tasks:
        tests = _tests(task, task.columns.get(column or ""), column or "")
        code = " ".join(t.get("call") or t.get("code") or "" for t in tests.calls)
        called = {tests.entry} if tests.entry else set(re.findall(r"(?<![.\w])([A-Za-z_]\w*)\s*\(", code)) - set(dir(builtins))
        asked = plain(task.prompt)
        silent += bool(called) and not any(re.search(rf"\b{re.escape(n)}\b", asked) for n in called)
    if silent <= len(tasks) / 2:
        return []
    return [
        f"{silent} of {len(tasks)} questions do not name the function that their tests call; show the tests with "
        f"--ask $'{{text}}\\nYour code should pass these tests:\\n{{{column}}}' (with the columns of your file)"
    ]


# -- categories --------------------------------------------------------------------------------------------------------


def _categories(tasks: list[Task], column: str, bins: int | None) -> list[Task]:
    given = sorted({c for t in tasks for c in t.columns})
    if column not in given:
        near = nearest(column, given)
        raise UserError(
            f"there is no column {column!r}",
            where="--category",
            remedy=f"{f'Did you mean {near}? ' if near else ''}There are: {', '.join(given) or 'none'}.",
        )
    values = [t.columns.get(column) for t in tasks]
    if bins is None:
        return [replace(t, category=None if v is None else str(v)) for t, v in zip(tasks, values, strict=True)]
    if bad := [t for t, v in zip(tasks, values, strict=True) if v is not None and (isinstance(v, bool) or not isinstance(v, (int, float)))]:
        raise UserError(
            f"{bad[0].columns[column]!r} is not a number, and bins are made of numbers",
            where=f"{bad[0].source}: {column}",
            remedy="Leave --bins out: each value is a category.",
        )
    names = iter(binned([float(v) for v in values if v is not None], bins))
    return [replace(t, category=None if v is None else next(names)) for t, v in zip(tasks, values, strict=True)]
