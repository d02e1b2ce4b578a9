"""Writes the questions of the arithmetic recipes into recipes/data.

arithmetic.jsonl and arithmetic_held_out.jsonl: one-digit sums and small products, in digits and in words. two_digit_worked.jsonl: sums of
two-digit numbers with worked answers; two_digit.jsonl and two_digit_held_out.jsonl: such sums with the number alone to check by.
Held-out questions are disjoint from the others as unordered pairs: 3 + 8 is held out together with 8 + 3, in digits and in words.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "recipes" / "data"
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
HELD_OUT = 0.25
PRODUCT_LIMIT = 5  # factors up to this


def questions(operation: str, a: int, b: int) -> Iterator[dict[str, Any]]:
    """The same question in digits and in words, both ways round."""
    for x, y in sorted({(a, b), (b, a)}):
        gold = str(x + y if operation == "plus" else x * y)
        for left, right in ((str(x), str(y)), (WORDS[x], WORDS[y])):
            text = f"What is {left} {operation} {right}? Answer with the number only."
            yield {"prompt": [{"role": "user", "content": text}], "answer": gold}


def rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training, held out)."""
    pairs = [("plus", a, b) for a in range(10) for b in range(a, 10)]
    pairs += [("times", a, b) for a in range(1, PRODUCT_LIMIT + 1) for b in range(a, PRODUCT_LIMIT + 1)]
    random.Random(0).shuffle(pairs)
    n = round(len(pairs) * HELD_OUT)
    return [q for p in sorted(pairs[n:]) for q in questions(*p)], [q for p in sorted(pairs[:n]) for q in questions(*p)]


def worked(a: int, b: int) -> str:
    """The tens, the ones, and both together.

    >>> worked(47, 38)
    '40 + 30 = 70. 7 + 8 = 15. 70 + 15 = 85.'
    """
    tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
    return f"{a // 10 * 10} + {b // 10 * 10} = {tens}. {a % 10} + {b % 10} = {ones}. {tens} + {ones} = {a + b}."


def two_digit_rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """(worked, training, held out): 300, 400 and 100 sums, no pair of numbers in two of them."""
    rng = random.Random(0)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    asked = [rng.sample(pair, 2) for pair in rng.sample(pairs, 800)]
    told = [
        {"prompt": [{"role": "user", "content": f"What is {a} plus {b}? Work it out."}], "answer": str(a + b), "worked": worked(a, b)}
        for a, b in asked
    ]
    shown = [{"prompt": r["prompt"], "completion": [{"role": "assistant", "content": r["worked"]}]} for r in told[:300]]
    checked = [{"prompt": r["prompt"], "answer": r["answer"]} for r in told[300:]]
    return shown, checked[:400], checked[400:]


def write() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    names = ("arithmetic.jsonl", "arithmetic_held_out.jsonl", "two_digit_worked.jsonl", "two_digit.jsonl", "two_digit_held_out.jsonl")
    for name, part in zip(names, (*rows(), *two_digit_rows()), strict=True):
        (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        print(f"{FOLDER / name}: {len(part)} questions")


if __name__ == "__main__":
    write()
