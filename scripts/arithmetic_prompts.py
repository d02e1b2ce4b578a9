"""Writes recipes/data/arithmetic.jsonl and arithmetic_held_out.jsonl: one-digit sums and small products, in digits and in words.

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


def write() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, part in zip(("arithmetic.jsonl", "arithmetic_held_out.jsonl"), rows(), strict=True):
        (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
        print(f"{FOLDER / name}: {len(part)} questions")


if __name__ == "__main__":
    write()
