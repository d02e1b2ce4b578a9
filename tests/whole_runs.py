"""Whole runs for tests: rows into a file, a recipe, a run directory, all on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from tether.algorithms import dpo, reward_model, sft
from tether.recipe import RECIPES
from tether.run import Run
from tether.step import Update

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


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


def kill_in(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The process ends inside optimiser step `at` (1-based), counted from here; later steps go through."""
    real, calls = Update.apply, []

    def killing(self: Update, loss: Any = None) -> dict[str, Any]:
        calls.append(1)
        if len(calls) == at:
            raise Killed
        return real(self, loss)

    monkeypatch.setattr(Update, "apply", killing)


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


# Ahead of a program that measures memory: its arguments, and `peak()`, the resident memory at most so far in MiB. `marks[0]` is that
# when the first policy was loaded.
PEAK_AFTER_LOADING = """
import json, resource, sys
sys.path.insert(0, {root!r})
import torch
torch.set_num_threads(1)
from pathlib import Path
from tether.policy import Policy

model, data, run_folder = map(Path, sys.argv[1:])
load, marks = Policy.load, []

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def loading(*arguments, **options):
    made = load(*arguments, **options)
    marks.append(peak())
    return made

Policy.load = loading
"""


def measured_alone(code: str, model: Path, data: Path, run_folder: Path, cache: Path) -> Any:
    """What the last line printed by `PEAK_AFTER_LOADING` + `code` holds, as JSON, from a process of its own."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            PEAK_AFTER_LOADING.format(root=str(Path(__file__).parents[1])) + code,
            str(model),
            str(data),
            str(run_folder),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "TETHER_CACHE": str(cache)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
