"""Whole runs for tests: rows into a file, a recipe, a run directory, all on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from tether.algorithms import dpo, reward_model, sft
from tether.recipe import RECIPES
from tether.run import Run

ALGORITHMS: dict[str, Any] = {"sft": sft, "reward": reward_model, "dpo": dpo}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(start: int, n: int) -> str:
    """n words of the tiny tokenizer (w6 to w95), each start its own."""
    return " ".join(f"w{6 + (start + 7 * i) % 90}" for i in range(n))


def rows_for(command: str, n: int = 23) -> list[dict[str, Any]]:
    """Rows whose lengths differ widely, so that a mean of means would show."""
    if command == "sft":
        return [{"prompt": words(i, 2 + i % 5), "completion": words(3 * i, 1 + (5 * i) % 17)} for i in range(n)]
    if command == "kto":
        return [{"prompt": words(i, 2 + i % 5), "completion": words(3 * i, 1 + (5 * i) % 17), "label": i % 2 == 0} for i in range(n)]
    return [
        {"prompt": words(i, 2 + i % 5), "chosen": "w10 " + words(i, i % 7), "rejected": "w20 " + words(2 * i, (3 * i) % 11)}
        for i in range(n)
    ]


def start(command: str, model: Path, data: Path, folder: Path, **settings: Any) -> tuple[Run, dict[str, Any]]:
    """Train to the end. "kto" is dpo with that loss. Returns the closed run (which can still be read) and its summary."""
    given: dict[str, Any] = {"model": str(model), "data": str(data), "run": str(folder), "precision": "fp32", "trackers": []}
    if command == "kto":
        command, given = "dpo", {**given, "loss_type": "kto"}
    recipe = RECIPES[command](**{**given, **settings})
    with Run.create(folder, recipe, command) as run:
        return run, ALGORITHMS[command].train(recipe, run)


def resume(folder: Path) -> tuple[Run, dict[str, Any]]:
    with Run.open(folder) as run:
        return run, ALGORITHMS[run.command].train(run.recipe, run)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The trained weights in a model or checkpoint folder, adapter or not."""
    found = [f for f in ("adapter_model.safetensors", "model.safetensors") if (folder / f).is_file()]
    return load_file(folder / found[0])


def tokenizer_of(texts: Sequence[str], template: str | None = None) -> Any:
    """One token a word, for the words of these texts; the pad mark is the end mark."""
    known = ["<unk>", "<s>", "</s>", *sorted({w for text in texts for w in text.split()})]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(known)}, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, chat_template=template, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
