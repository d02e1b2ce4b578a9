"""Cuts the small files of public data that recipes train on: recipes/data/gsm8k*.jsonl and mbpp*.jsonl.

    python scripts/public_prompts.py --gsm8k train.jsonl --mbpp mbpp.jsonl

GSM8K: questions of the training split that take two calculations, unchanged rows. MBPP: problems of the training split, and for the held-out
file of the validation split, whose own solution passes its own tests in the sandbox; the prompt shows the first test, which names
the function, and all tests judge. The test splits of both are benchmarks and are not touched. The same files give the same rows.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from tether.rewards.code import CodeReward, read_tests

FOLDER = Path(__file__).parents[1] / "recipes" / "data"
N_GSM8K, N_GSM8K_HELD_OUT = 320, 64
N_MBPP, N_MBPP_HELD_OUT = 160, 32
CALCULATIONS = 2
MBPP_VALIDATION, MBPP_TRAIN = range(511, 601), range(601, 975)  # task_id, as the origin splits them
QUESTION = "{text}\nAnswer with one Python function. It has to pass tests such as:\n{test}"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def gsm8k(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training, held out): `question` and `answer` as they are, drawn from those with so many calculation marks."""
    short = [row for row in rows if row["answer"].count("<<") == CALCULATIONS]
    drawn = random.Random(0).sample(short, N_GSM8K + N_GSM8K_HELD_OUT)
    return drawn[:N_GSM8K], drawn[N_GSM8K:]


def mbpp(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(training, held out)."""
    judge = CodeReward()
    order = rows.copy()
    random.Random(0).shuffle(order)
    passing = (row for row in order if judge.judge(row["code"], read_tests(row["test_list"], row)).kind == "passed")
    good = [row for row in passing if not row["test_setup_code"]]
    train = [prompt_of(row) for row in good if row["task_id"] in MBPP_TRAIN]
    held_out = [prompt_of(row) for row in good if row["task_id"] in MBPP_VALIDATION]
    return train[:N_MBPP], held_out[:N_MBPP_HELD_OUT]


def prompt_of(row: dict[str, Any]) -> dict[str, Any]:
    asked = QUESTION.format(text=row["text"].strip(), test=row["test_list"][0])
    return {"prompt": [{"role": "user", "content": asked}], "test_list": row["test_list"], "task_id": row["task_id"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, help="train.jsonl of openai/grade-school-math")
    parser.add_argument("--mbpp", type=Path, help="mbpp.jsonl of google-research/google-research")
    given = parser.parse_args()
    parts = {}
    if given.gsm8k:
        parts["gsm8k"] = gsm8k(read(given.gsm8k))
    if given.mbpp:
        wanted = {*MBPP_VALIDATION, *MBPP_TRAIN}
        parts["mbpp"] = mbpp([row for row in read(given.mbpp) if row["task_id"] in wanted])
    for name, (train, held_out) in parts.items():
        for stem, rows in ((name, train), (f"{name}_held_out", held_out)):
            path = FOLDER / f"{stem}.jsonl"
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
            print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
