"""The prompts of the sampling rows as token ids, the same for every side."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any


def prompt_ids(path: str | Path, tokenizer: Any, first: int, n: int) -> list[list[int]]:
    """Rows `first` to `first + n`, rendered with the chat template up to where the answer begins."""
    with Path(path).open() as file:
        rows = [json.loads(line) for line in islice(file, first, first + n)]
    if len(rows) < n:
        raise SystemExit(f"{path} has no {n} prompts from row {first + 1} on")
    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
