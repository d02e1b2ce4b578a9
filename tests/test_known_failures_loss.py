"""Whole runs where other libraries lose their users: splits into micro-batches, NaN steps, half-precision weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import save_tiny, tiny_config, tiny_model, tiny_tokenizer
from tests.toy_text import case_file
from tests.whole_runs import rows_for, start, tokenizer_of, weights, words, write_rows
from tether import loop, step
from tether.algorithms import dpo, sft
from tether.cli import run as tether
from tether.models import load_model, save_model
from tether.run import Run
from tether.step import Diverged, Update


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


# -- the same update whatever the batching (transformers#24725) --------------------------------------------------------

LENGTH_ROWS = [json.loads(line) for line in case_file("sft_lengths").read_text().split("\n") if line.strip()]


@pytest.fixture(scope="module")
def counting_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its vocabulary holds the words of the handed rows, so that lengths count in words."""
    tokenizer = tokenizer_of([text for row in LENGTH_ROWS for text in row.values()])
    return save_tiny(tmp_path_factory.mktemp("counting") / "model", tiny_config(len(tokenizer)), tokenizer=tokenizer)


def gradients(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Every gradient that an optimiser step is given, float64, one dict a step."""
    seen: list[dict[str, torch.Tensor]] = []
    real = Update.apply

    def watching(self: Update, loss: Any = None) -> dict[str, Any]:
        seen.append({n: p.grad.double().clone() for n, p in self.parameters.items() if p.grad is not None})
        return real(self, loss)

    monkeypatch.setattr(step.Update, "apply", watching)
    return seen


def by_number(n: int) -> Callable[..., list[list[int]]]:
    """Micro-batches of n rows, in the order of the step's rows."""
    return lambda examples, budget: [list(range(i, min(i + n, len(examples)))) for i in range(0, len(examples), n)]


def far(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of two gradients, relative to the length of each tensor."""
    assert a.keys() == b.keys()
    return max(float((a[n] - b[n]).norm() / b[n].norm()) for n in a)


@pytest.mark.parametrize("batch_size", [len(LENGTH_ROWS), 3], ids=["all rows in one step", "the last step is incomplete"])
def test_any_split_of_a_step_gives_the_same_loss_and_gradient(
    counting_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int
) -> None:
    """Rows of very different lengths, trained as 8x1, 4x2, 2x4 and 1x8 (rows in a micro-batch x micro-batches), and by budget.

    The learning rate is next to nothing, so that later steps start from the same weights in every run.
    """
    data = write_rows(tmp_path / "rows.jsonl", LENGTH_ROWS)
    seen = gradients(monkeypatch)
    found: dict[str, tuple[list[float], list[dict[str, torch.Tensor]]]] = {}
    settings: dict[str, Any] = {"batch_size": batch_size, "learning_rate": 1e-12, "epochs": 1, "shuffle": True}
    whole = loop.own_parts
    parts: list[int] = []

    def counting(cut: Callable[..., list[list[int]]]) -> Callable[..., list[list[int]]]:
        def wrapped(*arguments: Any) -> list[list[int]]:
            made = cut(*arguments)
            parts.append(len(made))
            return made

        return wrapped

    splits = {f"{n} rows": (counting(by_number(n)), 10_000) for n in (8, 4, 2, 1)}
    splits |= {f"{budget} tokens": (counting(whole), budget) for budget in (1, 60, 130, 10_000)}
    counts = {}
    for name, (cut, budget) in splits.items():
        seen.clear()
        parts.clear()
        monkeypatch.setattr(loop, "own_parts", cut)
        run, _ = start("sft", counting_model, data, tmp_path / name.replace(" ", "-"), tokens_per_micro_batch=budget, **settings)
        found[name] = [m["loss"] for m in run.metrics()], [*seen]
        counts[name] = parts[0]
    assert len(set(counts.values())) >= 3, f"the splits must differ: {counts}"

    losses, grads = found["8 rows"]
    assert len(losses) == math.ceil(len(LENGTH_ROWS) / batch_size)
    for name, (other, theirs) in found.items():
        assert other == pytest.approx(losses, rel=1e-6), name
        assert max(far(a, b) for a, b in zip(theirs, grads, strict=True)) < 1e-6, name


def test_the_logged_loss_is_the_sum_over_tokens_by_their_number(counting_model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", LENGTH_ROWS)
    run, _ = start("sft", counting_model, data, tmp_path / "run", batch_size=len(LENGTH_ROWS), max_steps=1, tokens_per_micro_batch=1)
    net, tokenizer = load_model(counting_model)
    total, tokens, means = 0.0, 0, []
    for row in LENGTH_ROWS:
        asked, said = tokenizer(row["prompt"]).input_ids, [*tokenizer(row["completion"]).input_ids, tokenizer.eos_token_id]
        ids = torch.tensor([asked + said])
        with torch.no_grad():
            logps = net(ids).logits[0, len(asked) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(said)[:, None])
        total, tokens = total - float(logps.sum()), tokens + len(said)
        means.append(-float(logps.mean()))
    logged = run.metrics()[0]["loss"]
    assert logged == pytest.approx(total / tokens, rel=1e-6)
    assert abs(logged - sum(means) / len(means)) > 1e-3, "the mean of the rows' means is another number"


# -- a NaN step (trl#6702) ---------------------------------------------------------------------------------------------


def poison(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, at: int, value: float) -> None:
    """The loss function of an algorithm is multiplied by `value` in its step `at` (1-based; one micro-batch a step)."""
    real, calls = getattr(module, name), []

    def poisoned(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        made = real(*arguments, **options)
        if len(calls) != at:
            return made
        return (made[0] * value, made[1]) if isinstance(made, tuple) else made * value

    monkeypatch.setattr(module, name, poisoned)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_a_step_that_is_not_finite_is_not_applied_and_is_seen_in_log_and_report(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, value: float
) -> None:
    poison(monkeypatch, *{"sft": (sft, "sft_loss"), "dpo": (dpo, "preference_loss")}[command], at=3, value=value)
    data = write_rows(tmp_path / "rows.jsonl", rows_for(command))
    run, _ = start(command, model, data, tmp_path / "run", max_steps=6, save_steps=1, keep_checkpoints=10, learning_rate=1e-3)
    rows = run.metrics()
    assert [row["skipped"] for row in rows] == [0, 0, 1, 0, 0, 0]
    assert [math.isfinite(row["loss"]) for row in rows] == [True, True, False, True, True, True]
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert "NaN" in lines[2] or "Infinity" in lines[2], "written as it was, not smoothed"
    saved = [weights(folder) for folder in run.checkpoints()]
    assert all(torch.isfinite(t).all() for state in [*saved, weights(run.folder / "model")] for t in state.values())
    assert all(torch.equal(saved[1][n], saved[2][n]) for n in saved[1]), "step 3 moved nothing"
    assert any(not torch.equal(saved[2][n], saved[3][n]) for n in saved[2])

    assert tether(["report", str(run.folder)]) == 0
    page = (run.folder / "report.html").read_text()
    assert "1 step of 6 could not be applied, at 3" in page
    assert "The loss was not a finite number in 1 step, first at step 3" in page


def test_weights_that_are_not_finite_are_never_saved(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight row becomes infinite in step 3: the run stops, and the checkpoints before stay the newest."""
    real, calls = Update.apply, []

    def spoiling(self: Update, loss: Any = None) -> dict[str, Any]:
        out = real(self, loss)
        calls.append(1)
        if len(calls) == 3:
            with torch.no_grad():
                next(iter(self.parameters.values()))[0] = math.inf
        return out

    monkeypatch.setattr(step.Update, "apply", spoiling)
    data = write_rows(tmp_path / "rows.jsonl", rows_for("sft"))
    with pytest.raises(Diverged, match="not finite after step 3") as stopped:
        start("sft", model, data, tmp_path / "run", max_steps=6, save_steps=1, keep_checkpoints=2)
    run = Run.open(tmp_path / "run")
    assert [p.name for p in run.checkpoints()] == ["000001", "000002"]
    assert str(run.checkpoints()[-1]) in str(stopped.value)
    assert all(torch.isfinite(t).all() for t in weights(run.checkpoints()[-1]).values())
    assert not (run.folder / "model").exists()


def test_a_run_that_stays_broken_stops_and_keeps_its_last_good_checkpoint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = dpo.preference_loss, []

    def broken(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        loss, metrics = real(*arguments, **options)
        return (loss * math.nan if len(calls) > 2 else loss), metrics

    monkeypatch.setattr(dpo, "preference_loss", broken)
    data = write_rows(tmp_path / "rows.jsonl", rows_for("dpo"))
    with pytest.raises(Diverged, match="5 steps in a row"):
        start("dpo", model, data, tmp_path / "run", max_steps=40, save_steps=2, learning_rate=1e-3)
    run = Run.open(tmp_path / "run")
    assert all(torch.isfinite(t).all() for p in run.checkpoints() for t in weights(p).values())
    assert tether(["report", str(run.folder)]) == 0
    assert "could not be applied" in (run.folder / "report.html").read_text()


# -- half-precision weights at a small learning rate (AReaL#1634) ------------------------------------------------------


def test_half_precision_weights_train_in_float32_and_it_is_said_when_storing_takes_it_back(tmp_path: Path) -> None:
    base = save_model(tiny_model(), tiny_tokenizer(), tmp_path / "half", dtype=torch.bfloat16)
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": words(i, 3), "completion": words(i, 9)} for i in range(8)])
    run, _ = start("sft", base, data, tmp_path / "run", learning_rate=1e-6, max_steps=20, batch_size=8, lr_scheduler="constant")
    before, trained = load_file(base / "model.safetensors"), weights(run.checkpoints()[-1])
    changed = torch.cat([(trained[n] != before[n].float()).flatten() for n in trained if "embed" not in n])
    assert trained["model.norm.weight"].dtype == torch.float32
    assert changed.float().mean() > 0.95
    (notice,) = [n for n in run.notices() if n["kind"] == "rounded_away"]
    assert "bfloat16" in notice["text"]
    assert str(run.checkpoints()[-1]) in notice["text"], "where the float32 weights are"

    bold, _ = start("sft", base, data, tmp_path / "bold", learning_rate=1e-2, max_steps=5, batch_size=8, lr_scheduler="constant")
    assert not [n for n in bold.notices() if n["kind"] == "rounded_away"]
