"""Every proof that docs/guarantees.md names is a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs/guarantees.md").read_text(encoding="utf-8")


def test_every_named_proof_is_a_test() -> None:
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", PAGE)
    assert len(named) > 50
    for file, function in named:
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        assert function in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, f"{file}::{function}"


def test_every_row_names_a_symptom_an_answer_and_a_proof() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| What goes wrong")]
    assert len(rows) > 30
    for row in rows:
        symptom, answer, proof = (cell.strip() for cell in row.strip("|").split(" | "))
        assert symptom
        assert answer
        assert "::" in proof
