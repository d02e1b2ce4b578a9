"""Rows in the layouts of the usual benchmarks, tasks, and a tiny model to be asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import save_tiny
from tether.files import Source
from tether.tasks import Task

GSM8K = [
    {"question": "Ann has 3 boxes of 4 pens. How many pens?", "answer": "3 * 4 = <<3*4=12>>12 pens.\n#### 12"},
    {"question": "Half of 10?", "answer": "10 / 2 = <<10/2=5>>5\n#### 5"},
]
MATH = [
    {
        "problem": "What is $1/2$ as a fraction?",
        "solution": "It is $\\boxed{\\frac12}$.",
        "answer": "\\frac{1}{2}",
        "subject": "Prealgebra",
        "level": 1,
    }
]
SVAMP = [{"Body": "There are 4 birds", "Question": "How many wings?", "Answer": 8.0, "ID": "x"}]
TARGET = [{"input": "Tom had 5 pears and ate 2. How many are left?", "target": 3.0}]
MBPP = [
    {
        "text": "Write a function to add two numbers.",
        "code": "def plus(a, b): return a + b",
        "task_id": 1,
        "test_setup_code": "",
        "test_list": ["assert plus(1, 2) == 3", "assert plus(0, 0) == 0"],
    }
]
SANITIZED = [
    {
        "prompt": "Write a function to add two numbers.",
        "task_id": 2,
        "code": "...",
        "test_imports": ["import math"],
        "test_list": ["assert math.isclose(plus(1, 2), 3)"],
    }
]
HUMANEVAL = [{"task_id": "X/0", "prompt": "from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    \"\"\" The sum. \"\"\"\n", "entry_point": "total", "canonical_solution": "    return sum(xs)\n", "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n"}]  # fmt: skip


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def some_tasks(n: int, answer: str = "12") -> list[Task]:
    return [Task(f"question {i}", {"answer": answer}, Source("t.jsonl", i + 1)) for i in range(n)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("m") / "model"))
