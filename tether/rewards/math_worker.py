"""The process in which answers are compared: it may be killed at any time, and may not take the machine's memory with it."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any

from tether.rewards.worker import serve

MAX_ANSWER = 3000  # characters
MAX_DEPTH = 60
MEMORY = 2 << 30  # bytes of address space; a power tower would take all there is


def main() -> None:
    sys.setrecursionlimit(3000)
    with contextlib.suppress(ImportError, ValueError, OSError):  # there are no such limits on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limit is off; ours is on
    problem = _missing()
    serve(lambda question: problem or answer(question))


def _missing() -> dict[str, Any] | None:
    try:
        import math_verify  # noqa: F401  # the slow part of starting
        from latex2sympy2_extended.latex2sympy2 import latex2sympy
    except ImportError as error:
        return {
            "error": f"the math reward needs the package math-verify ({error})",
            "remedy": "Install it with: pip install 'tether-lm[math]'",
        }
    latex2sympy("x+1")  # builds the grammar's tables
    return None


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """{"gold", "answer" or "completion", "rules", "percent", "tolerance"} -> {"equal", "answer", "gold"}."""
    from tether.rewards.math_extract import extract, gold_answer
    from tether.rewards.math_forms import Options, same
    from tether.rewards.math_text import clean

    if "ready" in question:
        return {"ready": True}
    found = question["answer"] if "answer" in question else extract(question["completion"], question["rules"], question["closers"])
    gold = gold_answer(question["gold"])  # out of a worked solution, which may be long
    gold = clean(gold) if reasonable(gold) else gold
    reply: dict[str, Any] = {"answer": found, "gold": gold, "equal": False}
    if not gold or found is None:
        return reply
    if not (reasonable(found) and reasonable(gold)):
        reply["equal"] = "".join(found.split()) == "".join(gold.split())
        return reply
    with contextlib.suppress(MemoryError, RecursionError):
        reply["equal"] = same(clean(found), gold, Options(question["percent"], question["tolerance"]))
    return reply


def reasonable(text: str) -> bool:
    """Short and shallow enough to be an answer; anything else is only compared letter by letter."""
    depth = deepest = 0
    for c in text:
        depth += (c in "({[") - (c in ")}]")
        deepest = max(deepest, depth)
    return len(text) <= MAX_ANSWER and deepest <= MAX_DEPTH
