"""Whole runs around models: reward models saved and loaded, dropout, adapters on adapters."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BloomConfig, GPT2Config

from tests.tiny import save_tiny, tiny_config, tiny_model, tiny_tokenizer
from tests.whole_runs import rows_for, start, weights, words, write_rows
from tether.batch import Example
from tether.errors import UserError
from tether.models import save_model
from tether.packing import pack
from tether.policy import Policy
from tether.scalar import ScalarModel


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


# -- the score of a text does not depend on its batch (trl#937, reward-bench#137) --------------------------------------

PADDED = BloomConfig(vocab_size=100, hidden_size=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2, pad_token_id=2)


@pytest.mark.parametrize("pad", [None, "</s>", "w7"], ids=["no pad mark", "pad is the end mark", "pad inside the text"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("config", [tiny_config(), PADDED], ids=["packed", "padded"])
def test_scores_alone_and_in_any_batch_agree(tmp_path: Path, config: Any, side: str, pad: str | None) -> None:
    """Six texts of 3 to 60 tokens, with packing and on the padded path, whatever pad mark and side the tokenizer's file says."""
    tokenizer = tiny_tokenizer(pad=pad)
    tokenizer.padding_side = side
    reward = ScalarModel.load(save_model(tiny_model(config), tokenizer, tmp_path / "base"), precision="fp32", fresh_head=True)
    assert reward.engine.packed == (config is not PADDED)
    lengths = [3, 9, 17, 30, 44, 60]
    rows = [Example([7, 8, 7], [[*range(10, 9 + n), 2]], [[True] * n]) for n in lengths]
    alone = torch.cat([reward.scores(pack([r])) for r in rows]).detach()
    assert float(alone.std()) > 1e-3, "the scores differ from each other"
    for some in (rows, rows[::-1], [rows[0], rows[5]], rows[2:4]):
        together = reward.scores(pack(some)).detach()
        wanted = torch.stack([alone[rows.index(r)] for r in some])
        torch.testing.assert_close(together, wanted, rtol=0, atol=1e-5)


# -- reward models saved and loaded (trl#1650, LLaMA-Factory#9369) -----------------------------------------------------

TEXTS = [(words(i, 3), words(5 * i, 1 + i)) for i in range(10)]

SCORE = """
import json, sys
sys.path.insert(0, {root!r})
import torch
torch.set_num_threads(1)
from tether.scalar import ScalarModel
for folder in sys.argv[2:]:
    model = ScalarModel.load(folder, precision="fp32")
    print(json.dumps([model.score_texts([tuple(t) for t in json.loads(sys.argv[1])]), model.mean, model.std]))
"""


def test_trained_reward_models_score_the_same_in_a_fresh_process(model: Path, tmp_path: Path) -> None:
    """20 steps, every weight or an adapter: scores to the last digit, and the normalisation that the run measured."""
    data = write_rows(tmp_path / "rows.jsonl", rows_for("reward"))
    folders, wanted = [], []
    for name, more in {"full": {}, "lora": {"lora": {"rank": 4}}, "heads": {"heads": 3, "lora": {"rank": 4}}}.items():
        run, _ = start("reward", model, data, tmp_path / name, max_steps=20, learning_rate=5e-3, **more)
        folders.append(str(run.folder / "model"))
        loaded = ScalarModel.load(run.folder / "model", precision="fp32")
        assert (loaded.mean, loaded.std) != (0.0, 1.0)
        wanted.append([loaded.score_texts(TEXTS), loaded.mean, loaded.std])
    code = SCORE.format(root=str(Path(__file__).parents[1]))
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(TEXTS), *folders], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == wanted
    assert len({round(s[0], 6) for scores, *_ in wanted for s in [scores]}) == 3


def test_a_language_model_is_refused_where_a_reward_model_is_wanted(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        ScalarModel.load(model, precision="fp32")
    data = write_rows(tmp_path / "rows.jsonl", rows_for("sft"))
    run, _ = start("sft", model, data, tmp_path / "sft", max_steps=1, lora={"rank": 2})
    with pytest.raises(UserError):
        ScalarModel.load(run.folder / "model", precision="fp32")


# -- dropout (trl#3500, PR #639) ---------------------------------------------------------------------------------------


def test_a_model_with_dropout_starts_at_margin_zero_and_keeps_its_config(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.1
    base = save_model(tiny_model(config), tiny_tokenizer(), tmp_path / "base")
    assert json.loads((base / "config.json").read_text())["resid_pdrop"] == 0.1
    data = write_rows(tmp_path / "rows.jsonl", rows_for("dpo"))
    for name, more in {"full": {}, "lora": {"lora": {"rank": 4, "target_modules": ["c_attn"]}}}.items():
        run, _ = start("dpo", base, data, tmp_path / name, max_steps=3, learning_rate=1e-12, **more)
        rows = run.metrics()
        assert all(abs(m["rewards/margins"]) < 1e-5 and abs(m["loss"] - 0.693147) < 1e-5 for m in rows)
        (notice,) = [n for n in run.notices() if n["kind"] == "startup_check"]
        assert "ratio 1.00000" in notice["text"]
        if not more:
            saved = json.loads((run.folder / "model/config.json").read_text())
            assert [saved[k] for k in ("resid_pdrop", "embd_pdrop", "attn_pdrop")] == [0.1] * 3


def test_adapter_dropout_is_refused_by_name_where_log_probabilities_are_compared(model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", rows_for("dpo"))
    with pytest.raises(UserError, match=r"lora\.dropout"):
        start("dpo", model, data, tmp_path / "run", lora={"rank": 4, "dropout": 0.1})


# -- preference training on top of an SFT adapter (LLaMA-Factory#8459, torchtune#2272) ---------------------------------


def digest(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_dpo_on_an_sft_adapter_is_tied_to_the_sft_model(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", tiny_config(pad_token_id=None, initializer_range=0.4))
    blue = write_rows(tmp_path / "blue.jsonl", [{"prompt": words(i, 2), "completion": "w42"} for i in range(8)])
    sft, _ = start("sft", base, blue, tmp_path / "sft", lora={"rank": 4}, max_steps=30, learning_rate=1e-2)
    assert sft.metrics()[-1]["loss"] < 0.3
    adapter, before = sft.folder / "model", digest(sft.folder / "model")

    data = write_rows(tmp_path / "rows.jsonl", rows_for("dpo", 8))
    still, _ = start("dpo", adapter, data, tmp_path / "still", max_steps=1, learning_rate=1e-12)
    first = still.metrics()[0]
    # Rounding: the reference's pass holds other rows side by side. Tied to the base, the difference would be whole nats.
    assert abs(first["rewards/margins"]) < 1e-5
    assert abs(first["displacement/chosen"]) < 1e-5, "KL is 0: the reference is the model that training starts from"
    raw = Policy.load(base, precision="fp32")
    trained = Policy.load(adapter, precision="fp32")
    packed = pack([Example([7, 8], [[42, 2]], [[True, True]])])
    assert float((raw.logprobs(packed) - trained.logprobs(packed)).detach().abs().max()) > 1, "the raw base is far away"

    moved, _ = start("dpo", adapter, data, tmp_path / "moved", max_steps=5, learning_rate=1e-2)
    assert moved.metrics()[-1]["rewards/margins"] > 0.01
    assert digest(adapter) == before, "the SFT adapter on disk is as it was"
    names = set(weights(moved.folder / "model"))
    assert names == set(weights(adapter)), "one adapter goes on, no second one is wrapped around it"
    assert any(not torch.equal(weights(adapter)[n], weights(moved.folder / "model")[n]) for n in names)
