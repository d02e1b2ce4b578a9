"""The code reward: 1 if a program passes all its tests, 0 if not (or the share that it passes), None where nothing can be judged.

The program is taken from the completion (the last code block that defines what the tests call), and run in a sandbox (`sandbox`):
hard limits, no network, no files but a scratch folder, ended from outside. Tests run in a second sandboxed process and see only plain
values, so a program cannot forge its verdict. Rows of these kinds are understood:

    tests: [{"call": "add(2, 3)", "expected": "5"}]        compared by value and kind: True is not 1, a tuple is no list
    tests or test_list: ["assert add(2, 3) == 5"]          each text is one test; test_setup_code, test_imports, test_setup run first
    test: "def check(candidate): ..." + entry_point        as in HumanEval; the prompt's own code stands before a bare function body
    tests: [{"input": "2 3", "output": "5"}]               a script: standard input and output, trailing blanks aside
    input_output: {"inputs": [...], "outputs": [...]}      the same in columns, with "fn_name" calls of that function

No tests is no pass: such a row is unscored and counted.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

from tether.errors import UserError
from tether.rewards.math_extract import after_reasoning
from tether.rewards.sandbox import Limits, Outcome, Sandbox, SandboxBroken
from tether.rewards.texts import answer_texts, gold_column

FENCE = re.compile(r"^[ \t]*(?:```|~~~)[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*(?:```|~~~)[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
COLUMNS = ("tests", "test_list", "test", "test_cases", "input_output")


@dataclass(frozen=True)
class CodeTests:
    """The tests of one row. Either `calls` (texts for the tests' process) or `scripts` ((stdin, stdout) pairs)."""

    calls: tuple[dict[str, str], ...] = ()
    scripts: tuple[tuple[str, str], ...] = ()
    setup: str = ""
    entry: str | None = None

    def __len__(self) -> int:
        return len(self.calls) + len(self.scripts)


class CodeReward:
    """Callable as a reward; `judge` runs one program, from any thread.

    `column` names the tests (None finds one of the usual names). `mode`: "all" or "fraction". `timeout_s` and `memory_mb` are for
    one program. `workers`: programs at a time, the number of processors if None. `isolation`: "auto" takes the strongest that
    the machine allows and refuses where there is none. `packages` lets programs import what is installed beside Tether.
    """

    reward_name = "code"

    def __init__(
        self,
        *,
        column: str | None = None,
        mode: Literal["all", "fraction"] = "all",
        timeout_s: float = 6.0,
        memory_mb: int = 1024,
        workers: int | None = None,
        isolation: str = "auto",
        packages: bool = False,
    ) -> None:
        if mode not in ("all", "fraction"):
            raise UserError(f"mode is 'all' or 'fraction', got {mode!r}", where="mode")
        if workers is not None and workers < 1:
            raise UserError(f"at least one worker is needed, got {workers}", where="workers")
        # The clock decides and says so; processor time, a second more, is what ends a program that the clock could not reach.
        limits = replace(Limits(), seconds=timeout_s, cpu_s=math.ceil(timeout_s) + 1, memory=memory_mb << 20)
        self.column, self.mode, self.workers = column, mode, workers or os.cpu_count() or 1
        self.sandbox = Sandbox(isolation, limits, packages=packages)
        self.counters: Counter[str] = Counter()

    def judge(self, completion: str, tests: CodeTests, *, prompt: str = "") -> Outcome:
        """Run the program in a completion against its tests. "broken" when there are none or they cannot be run."""
        if not len(tests):
            return self._counted(Outcome("broken", 0, 0, "no tests", 0.0))
        program = program_of(completion, tests, prompt)
        if not program.strip():
            return self._counted(Outcome("failed", 0, len(tests), "no program", 0.0))
        if tests.scripts:
            return self._counted(self._scripts(program, tests))
        return self._counted(self.sandbox.test(program, tests.calls, setup=tests.setup, entry=tests.entry, all_needed=self.mode == "all"))

    def _scripts(self, program: str, tests: CodeTests) -> Outcome:
        passed, seconds, why, kind = 0, 0.0, "", "failed"
        for stdin, wanted in tests.scripts:
            try:
                said, wrong = self.sandbox.script(program, stdin)
            except SandboxBroken as error:
                return Outcome("broken", 0, len(tests), str(error), seconds)
            if said is not None and _trimmed(said) == _trimmed(wanted):
                passed += 1
                continue
            why = why or wrong or f"it printed {said!r}, not {wanted!r}"[:300]
            kind = "time" if wrong.startswith("no end") or wrong.startswith("still") else kind
            if self.mode == "all":
                break
        if passed == len(tests):
            return Outcome("passed", passed, passed, "", seconds)
        return Outcome("time" if kind == "time" else "failed", passed, len(tests), why, seconds)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        rows = gold_column(self.reward_name, self.column, columns, COLUMNS)
        texts = answer_texts(completions, columns.get("opened"))
        tests = [read_tests(value, {k: v[i] for k, v in columns.items()}) for i, value in enumerate(rows)]
        asked = [p if isinstance(p, str) else "" for p in prompts]
        with ThreadPoolExecutor(self.workers) as pool:
            outcomes = list(pool.map(lambda t, c, p: self.judge(t, c, prompt=p), texts, tests, asked))
        return [self.value(o) for o in outcomes]

    def value(self, outcome: Outcome) -> float | None:
        if outcome.kind == "broken":
            return None
        return float(outcome.kind == "passed") if self.mode == "all" else outcome.passed / outcome.total

    def _counted(self, outcome: Outcome) -> Outcome:
        with _COUNT:
            self.counters["no tests" if outcome.why == "no tests" else outcome.kind] += 1
        return outcome


_COUNT = threading.Lock()


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def program_of(completion: str, tests: CodeTests, prompt: str = "") -> str:
    """The program in a completion: after the reasoning, the last code block that defines what the tests call, else the last block,
    else the whole text. A bare function body continues the code of its prompt.

    >>> program_of("Here:\\n```python\\ndef f():\\n    return 1\\n```\\nDone.", CodeTests())
    'def f():\\n    return 1\\n'
    """
    text = after_reasoning(completion)
    if text is None:
        return ""
    blocks = [body for language, body in FENCE.findall(text) if language.lower() in ("", "python", "py", "python3")]
    names = {tests.entry} if tests.entry else _called(tests)
    defining = [b for b in blocks if names & _defined(b)]
    program = (defining or blocks or [text])[-1]
    if tests.entry and prompt and tests.entry not in _defined(program) and tests.entry in _defined(prompt + "\n    pass\n"):
        return prompt + program if program.startswith((" ", "\t", "\n")) or not blocks else f"{prompt.rstrip()}\n{program}"
    if tests.entry and prompt and not defining and f"def {tests.entry}" not in program:
        return prompt + program
    if tests.entry and prompt and f"def {tests.entry}" in prompt:
        return f"{_header(prompt, tests.entry)}\n{program}"  # imports and helpers that the prompt gave
    return program


def _header(prompt: str, entry: str) -> str:
    """The prompt's code before the function to be written."""
    return prompt[: prompt.rindex(f"def {entry}")].rstrip()


def _defined(code: str) -> set[str]:
    return set(re.findall(r"^(?:async\s+)?(?:def|class)\s+(\w+)", code, re.MULTILINE)) | set(
        re.findall(r"^(\w+)\s*=[^=]", code, re.MULTILINE)
    )


def _called(tests: CodeTests) -> set[str]:
    return {name for t in tests.calls for name in re.findall(r"\b([A-Za-z_]\w*)\s*\(", t.get("call") or t.get("code") or "")}


# -- rows of data ------------------------------------------------------------------------------------------------------


def read_tests(value: Any, row: Mapping[str, Any]) -> CodeTests:
    """The tests of one row, from its tests column and its other columns. UserError for a kind that is not known."""
    entry = row.get("entry_point") or None
    setup = "\n".join(_lines(row.get("test_imports")) + _lines(row.get("test_setup_code")) + _lines(row.get("test_setup")))
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            value = json.loads(value)
        except ValueError:
            try:
                value = ast.literal_eval(value)
            except (ValueError, SyntaxError) as error:
                raise _unknown(value) from error
    if isinstance(value, Mapping) and "inputs" in value and "outputs" in value:
        value = _from_columns(value)
    if isinstance(value, str):
        code = value if entry is None or "def check" not in value else f"{value}\ncheck({entry})\n"
        value = [code] if value.strip() else []
    if value is None:
        value = []
    if not isinstance(value, (list, tuple)):
        raise _unknown(value)
    calls: list[dict[str, str]] = []
    scripts: list[tuple[str, str]] = []
    for test in value:
        if isinstance(test, str):
            if test.strip():
                calls.append({"code": test})
        elif isinstance(test, Mapping) and "call" in test and "expected" in test:
            expected = test["expected"]
            calls.append({"call": str(test["call"]), "expected": expected if isinstance(expected, str) else repr(expected)})
        elif isinstance(test, Mapping) and "input" in test and "output" in test:
            if str(test["output"]).strip():  # a program that prints nothing must not pass
                scripts.append((_joined(test["input"]), _joined(test["output"])))
        else:
            raise _unknown(test)
    if calls and scripts:
        raise UserError("a row mixes tests that call and tests that read standard output", remedy="Use one kind in a row.", where="data")
    return CodeTests(tuple(calls), tuple(scripts), setup, entry)


def _from_columns(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    pairs = list(zip(value["inputs"], value["outputs"], strict=False))
    if name := value.get("fn_name"):
        return [{"call": f"{name}({', '.join(map(repr, args))})", "expected": repr(out)} for args, out in pairs]
    return [{"input": given, "output": wanted} for given, wanted in pairs]


def _joined(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _lines(value: Any) -> list[str]:
    return [] if not value else [value] if isinstance(value, str) else [str(v) for v in value]


def _unknown(value: Any) -> UserError:
    return UserError(
        f"this is no test that can be run: {str(value)[:80]!r}",
        where="data",
        remedy='Use {"call": ..., "expected": ...}, {"input": ..., "output": ...} or the text of an assert.',
    )
