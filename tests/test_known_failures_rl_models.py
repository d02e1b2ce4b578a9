"""The model that a run of `tether grpo` starts from: dropout, adapters, half precision, and what users have met with them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import GPT2Config

from tests.grpo_runs import Train, even, model, train, weights
from tests.tiny import save_tiny, tiny_config
from tests.whole_runs import start, words, write_rows
from tests.whole_runs import weights as weights_in
from tether.cli import run as tether
from tether.errors import UserError
from tether.recipe import RECIPES

__all__ = ["model", "train"]  # fixtures

# -- nothing was learnt yet: ratio 1, KL 0 (trl#3500, #639) ------------------------------------------------------------

DROPOUT = {
    "llama": (tiny_config(attention_dropout=0.1), ("attention_dropout",)),
    "gpt2": (
        GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2),
        ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    ),
}


@pytest.mark.parametrize("name", DROPOUT)
@pytest.mark.parametrize("command", ["grpo", "ppo"])
def test_dropout_in_the_model_changes_nothing(train: Train, tmp_path: Path, command: str, name: str) -> None:
    config, keys = DROPOUT[name]
    folder = save_tiny(tmp_path / "dropout", config)
    settings: dict[str, Any] = {"beta": 0.1, "max_steps": 1, "learning_rate": 1e-12, "updates_per_batch": 2, "max_length": 32}
    run, _ = train([even], command=command, model=str(folder), **settings)
    [m] = run.metrics()
    assert m["ratio/max"] == pytest.approx(1, abs=1e-5)
    assert m["ratio/min"] == pytest.approx(1, abs=1e-5)
    assert m["kl"] == pytest.approx(0, abs=1e-5)
    kept = json.loads((run.folder / "model/config.json").read_text())
    assert all(kept[key] == 0.1 for key in keys), "the config on disk keeps its values"
    with pytest.raises(UserError, match="dropout"):
        RECIPES[command](model="m", data="d", lora={"dropout": 0.1})


def test_a_run_on_an_sft_adapter_is_tied_to_the_sft_model(train: Train, tmp_path: Path) -> None:
    """LLaMA-Factory#8459, torchtune#2272: not to the raw base, and the adapter on disk stays as it is."""
    base = save_tiny(tmp_path / "base", tiny_config(pad_token_id=None, initializer_range=0.4))
    blue = write_rows(tmp_path / "blue.jsonl", [{"prompt": words(i, 2), "completion": "w42"} for i in range(8)])
    sft, _ = start("sft", base, blue, tmp_path / "sft", lora={"rank": 4}, max_steps=30, learning_rate=1e-2)
    adapter = sft.folder / "model"
    before = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in adapter.iterdir() if p.is_file()}
    run, _ = train([even], model=str(adapter), preset="grpo", beta=0.1, max_steps=3, max_length=16, temperature=1.5)
    m = run.metrics()
    assert m[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert m[0]["objective/kl"] == pytest.approx(0, abs=1e-5)
    assert m[-1]["objective/kl"] != 0
    assert {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in adapter.iterdir() if p.is_file()} == before
    names = set(weights_in(run.folder / "model"))
    assert names == set(weights_in(adapter)), "one adapter goes on"


# -- half-precision weights at a small learning rate (AReaL#1634) ------------------------------------------------------


def test_small_steps_move_half_precision_runs(train: Train, model: Path) -> None:
    """At a learning rate of 1e-6 a bfloat16 weight would stay where it is: trained weights are float32 whatever the matmuls run in."""
    run, _ = train([even], precision="bf16", learning_rate=1e-6, max_steps=3, lr_scheduler="constant")
    start, end = load_file(model / "model.safetensors"), weights(run)
    changed = [(end[n].float() != w.float()).float().mean() for n, w in start.items() if n in end]
    assert min(map(float, changed)) > 0.9


# -- adapters and resuming (lerobot#3459, peft#574) --------------------------------------------------------------------


def test_a_run_with_another_rank_is_not_continued(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    run, _ = train([even], lora={"rank": 4}, max_steps=2, save_steps=1)
    (run.folder / "summary.json").unlink()
    path = run.folder / "recipe.yaml"
    recipe = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**recipe, "lora": {**recipe["lora"], "rank": 8}, "max_steps": 4, "rewards": ["format"]}))
    before = {p: p.read_bytes() for p in run.folder.rglob("*.safetensors")}
    assert tether(["resume", str(run.folder)]) == 2
    told = capsys.readouterr().err
    assert "rank 4" in told
    assert "rank 8" in told
    assert "Traceback" not in told
    assert before == {p: p.read_bytes() for p in run.folder.rglob("*.safetensors")}
