"""Makes the benchmark's rows: synthetic plain English with fixed lengths in tokens and a fixed seed.

    python bench/data.py MODEL_FOLDER OUT_FOLDER

`mixed.jsonl`: prompts of about 126 tokens, answers of 32 to 256. `long.jsonl`: prompts of about 510, answers of about 64.
`prompts.jsonl`: prompts of about 100 tokens alone, to be answered by sampling.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

NOUNS = [
    "river",
    "garden",
    "teacher",
    "engine",
    "market",
    "window",
    "letter",
    "village",
    "doctor",
    "winter",
    "captain",
    "bridge",
    "kitchen",
    "forest",
    "machine",
    "story",
]
ADJECTIVES = [
    "quiet",
    "old",
    "bright",
    "careful",
    "small",
    "heavy",
    "early",
    "distant",
    "simple",
    "broken",
    "honest",
    "busy",
    "narrow",
    "warm",
    "curious",
    "steady",
]
VERBS = [
    "follows",
    "repairs",
    "describes",
    "watches",
    "carries",
    "remembers",
    "paints",
    "measures",
    "visits",
    "explains",
    "builds",
    "crosses",
    "answers",
    "protects",
]
ADVERBS = ["slowly", "often", "carefully", "quietly", "every day", "in the morning", "after lunch", "without help", "near the harbor"]
JOINS = ["because", "although", "while", "and", "but", "so", "when", "whenever", "unless", "since"]
REQUESTS = [
    "Please explain what happens next and why.",
    "Summarize the passage in your own words.",
    "What should the reader learn from this?",
    "List the main points and give your opinion.",
]


def clause(r: random.Random) -> str:
    return (
        f"the {r.choice(ADJECTIVES)} {r.choice(NOUNS)} {r.choice(VERBS)} the {r.choice(ADJECTIVES)} {r.choice(NOUNS)} {r.choice(ADVERBS)}"
    )


def sentence(r: random.Random) -> str:
    words = clause(r)
    if r.random() < 0.6:
        words += f", {r.choice(JOINS)} {clause(r)}"
    return words[0].upper() + words[1:] + r.choice([".", ".", ".", "!", "?"])


def text(r: random.Random, tokenizer, n_tokens: int) -> str:
    words = ""
    while True:
        words += (" " if words else "") + sentence(r)
        ids = tokenizer(words).input_ids
        if len(ids) >= n_tokens:
            return tokenizer.decode(ids[:n_tokens]).strip()


def write(path: Path, tokenizer, seed: int, prompt: tuple[int, int], answer: tuple[int, int] | None, rows: int = 256) -> None:
    r = random.Random(seed)
    with path.open("w") as file:
        for _ in range(rows):
            request = r.choice(REQUESTS)
            # 33 tokens are the template's own: the system text and the chat marks.
            n = max(8, r.randint(*prompt) - len(tokenizer(request).input_ids) - 33)
            question = text(r, tokenizer, n) + "\n" + request
            row = {"prompt": [{"role": "user", "content": question}]}
            for side in ("chosen", "rejected") if answer else ():
                row[side] = [{"role": "assistant", "content": text(r, tokenizer, r.randint(*answer))}]
            file.write(json.dumps(row) + "\n")


def main(model: str, out: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "mixed.jsonl", tokenizer, 1, (96, 160), (32, 256))
    write(folder / "long.jsonl", tokenizer, 2, (480, 544), (48, 80))
    write(folder / "prompts.jsonl", tokenizer, 3, (84, 116), None)


if __name__ == "__main__":
    main(*sys.argv[1:3])
