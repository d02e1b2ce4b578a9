"""A run that is stopped anywhere and continued is the run that was never stopped; what does not fit is refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.tiny import save_tiny, tiny_config
from tests.whole_runs import Killed, kill_in, resume, rows_for, start, weights, words, write_rows
from tether.cli import run as tether
from tether.loop import Loop
from tether.run import Run


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


def watch_rows(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Which rows each step (1-based) was made of; of a step that was taken twice, the second time."""
    seen: dict[int, list[int]] = {}
    real = Loop.parts

    def watching(self: Loop, examples: Any) -> list[list[int]]:
        parts = real(self, examples)
        assert len(parts) >= 2 or len(self.rows()) < 3, "gradients are accumulated"
        seen[self.step + 1] = [i for part in parts for i in part]
        return parts

    monkeypatch.setattr(Loop, "parts", watching)
    return seen


def log_of(run: Run) -> list[dict[str, Any]]:
    return [{k: v for k, v in m.items() if k not in ("step_time", "tokens_per_second")} for m in run.metrics()]


# 23 rows in batches of 4 are 6 steps an epoch, the last of 3 rows; step 9 is inside epoch 2, and its checkpoint is of step 8.
SETTINGS: dict[str, Any] = {"batch_size": 4, "tokens_per_micro_batch": 15, "max_steps": 14, "save_steps": 4, "learning_rate": 1e-2}
METHODS = {
    "sft": ("sft", {"warmup_steps": 3}),
    "sft, adapter with dropout": ("sft", {"lora": {"rank": 4, "dropout": 0.2}}),
    "reward": ("reward", {"heads": 2}),
    "reward, adapter": ("reward", {"lora": {"rank": 4}}),
    "dpo": ("dpo", {"lr_scheduler": "cosine", "eval_fraction": 0.15, "eval_steps": 3}),
    "dpo, adapter": ("dpo", {"lora": {"rank": 4}}),
    "orpo": ("dpo", {"loss_type": "orpo"}),
    "kto": ("kto", {"eval_fraction": 0.15, "eval_steps": 3}),
}


@pytest.mark.parametrize(("name", "stop"), [("sft", 3), *((name, 9) for name in METHODS)])
def test_a_stopped_run_goes_on_bit_for_bit(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, stop: int) -> None:
    """Row ids, losses, learning rates, every logged number, and the final weights (NeMo-RL#3171, trl#2657, open-r1#450).

    Stopped before the first checkpoint (step 3), or inside epoch 2 (step 9).
    """
    command, more = METHODS[name]
    data = write_rows(tmp_path / "rows.jsonl", rows_for(command))
    whole_rows = watch_rows(monkeypatch)
    whole, _ = start(command, model, data, tmp_path / "whole", **SETTINGS, **more)
    whole_rows = dict(whole_rows)

    rows = watch_rows(monkeypatch)
    kill_in(monkeypatch, stop)
    with pytest.raises(Killed):
        start(command, model, data, tmp_path / "stopped", **SETTINGS, **more)
    torch.manual_seed(99)  # another process has another random state
    resumed, _ = resume(tmp_path / "stopped")

    assert rows == whole_rows
    assert len(rows) == 14
    if "eval_fraction" not in more:
        assert sorted(i for s in range(1, 7) for i in rows[s]) == list(range(23)), "an epoch is every row once"
    assert log_of(resumed) == log_of(whole)
    assert len({m["learning_rate"] for m in log_of(whole)}) > 5
    got, want = weights(tmp_path / "stopped/model"), weights(tmp_path / "whole/model")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[n], want[n]) for n in want)
    assert resumed.rows("pairs.jsonl") == whole.rows("pairs.jsonl")


# -- adapters (lerobot#3459, peft#574) ---------------------------------------------------------------------------------


def lora_rows() -> list[dict[str, Any]]:
    return [{"prompt": words(i, 2), "completion": "w10 w11 w12"} for i in range(7)]


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An adapter trained to a loss below 0.5, stopped in step 35 of 45, with checkpoints of steps 20 and 30."""
    # Embedding rows large enough that an adapter on the layers alone can make every word likely, the end mark included.
    model = save_tiny(tmp_path / "model", tiny_config(pad_token_id=None, initializer_range=0.4))
    data = write_rows(tmp_path / "rows.jsonl", lora_rows())
    with monkeypatch.context() as patch:
        kill_in(patch, 35)
        with pytest.raises(Killed):
            start(
                "sft", model, data, tmp_path / "run", lora={"rank": 8}, max_steps=45, save_steps=10, keep_checkpoints=2, learning_rate=1e-2
            )
    return tmp_path / "run"


def test_a_resumed_adapter_continues_its_curve_and_is_the_only_one(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = Run.open(stopped).metrics()
    assert before[-1]["loss"] < 0.5 < before[0]["loss"]
    assert tether(["resume", str(stopped)]) == 0
    after = Run.open(stopped).metrics()
    assert after[30]["loss"] == before[30]["loss"], "the first resumed loss is the one that the stopped run had"
    assert max(m["loss"] for m in after[30:]) < 0.5
    names = set(weights(stopped / "model"))
    assert names == set(weights(stopped / "checkpoints/000045"))
    assert all(name.count("lora_") == 1 and name.count("base_model.model") == 1 for name in names)


def test_another_rank_on_resume_is_refused_by_name(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = yaml.safe_load((stopped / "recipe.yaml").read_text())
    recipe["lora"]["rank"] = 4
    (stopped / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    before = {p: p.read_bytes() for p in stopped.rglob("*.safetensors")}
    assert tether(["resume", str(stopped)]) == 2
    told = capsys.readouterr().err
    assert "rank 4" in told
    assert "rank 8" in told
    assert "000030" in told
    assert "Traceback" not in told
    assert before == {p: p.read_bytes() for p in stopped.rglob("*.safetensors")}


@pytest.mark.parametrize("how", ["cut", "emptied", "missing", "another file"])
def test_a_broken_adapter_file_is_named_and_the_checkpoint_before_it_taken(
    stopped: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    spoil(stopped / "checkpoints/000030/adapter_model.safetensors", how)
    assert tether(["resume", str(stopped)]) == 0
    told = capsys.readouterr().err
    assert "checkpoint 000030 is broken" in told
    assert "adapter_model.safetensors" in told
    assert "going back to 000020" in told
    assert Run.open(stopped).finished


def test_without_a_whole_checkpoint_nothing_is_continued(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in Run.open(stopped).checkpoints():
        spoil(folder / "adapter_model.safetensors", "cut")
    assert tether(["resume", str(stopped)]) == 2
    told = capsys.readouterr().err
    assert "000020" in told
    assert "000030" in told
    assert "Traceback" not in told
    assert not Run.open(stopped).finished


def spoil(file: Path, how: str) -> None:
    if how == "missing":
        file.unlink()
    elif how == "another file":
        shutil.copy(file.parents[1] / "000020" / file.name, file)
    else:
        file.write_bytes(file.read_bytes()[:1000] if how == "cut" else b"")


# -- a recipe edited by hand -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slip", [{"learning_rte": 1e-5}, {"batch_size": 0}, {"lora": {"rank": 4, "aplha": 3}}])
def test_a_slip_in_the_recipe_of_a_stopped_run_is_refused_with_its_file(
    stopped: Path, capsys: pytest.CaptureFixture[str], slip: dict[str, Any]
) -> None:
    recipe = yaml.safe_load((stopped / "recipe.yaml").read_text())
    (stopped / "recipe.yaml").write_text(yaml.safe_dump({**recipe, **slip}))
    assert tether(["resume", str(stopped)]) == 2
    told = capsys.readouterr().err
    assert "recipe.yaml" in told
    assert next(iter(slip)) in told
    assert "Traceback" not in told


def test_changed_data_is_refused_on_resume(stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = lora_rows()
    write_rows(tmp_path / "rows.jsonl", [*rows[:-1], {**rows[-1], "completion": "w13"}])
    assert tether(["resume", str(stopped)]) == 2
    assert "the data has changed since this run began" in capsys.readouterr().err


def test_resume_works_from_another_folder(stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert tether(["resume", str(stopped)]) == 0


def test_relative_names_in_the_recipe_mean_what_they_meant_when_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "home/tiny")
    write_rows(tmp_path / "home/rows.jsonl", lora_rows())
    monkeypatch.chdir(tmp_path / "home")
    with monkeypatch.context() as patch:
        kill_in(patch, 3)
        with pytest.raises(Killed):
            start("sft", Path("tiny"), Path("rows.jsonl"), Path("run"), max_steps=4, save_steps=2)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert tether(["resume", "../home/run"]) == 0, capsys.readouterr().err
    assert (tmp_path / "home/run/model").is_dir()
    assert not any((tmp_path / "elsewhere").iterdir())
