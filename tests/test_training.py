"""Whole runs on tiny models: what was learnt, that batching and interruption do not show, and what the run directory says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import save_tiny, tiny_config, tiny_tokenizer
from tether.algorithms import dpo, kto, reward_model, sft
from tether.errors import UserError
from tether.recipe import RECIPES
from tether.run import Run

ALGORITHMS: dict[str, Any] = {"sft": sft, "reward": reward_model, "dpo": dpo}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(start: int, n: int) -> str:
    return " ".join(f"w{6 + (start + 7 * i) % 90}" for i in range(n))


def pair_rows(n: int = 23) -> list[dict[str, Any]]:
    """Chosen answers say w10, rejected ones w20; lengths differ widely, so that a mean of means would show."""
    return [
        {"prompt": words(i, 2 + i % 5), "chosen": "w10 " + words(i, i % 7), "rejected": "w20 " + words(2 * i, (3 * i) % 11)}
        for i in range(n)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


Train = Callable[..., tuple[Run, dict[str, Any]]]


@pytest.fixture
def train(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))
    count = 0

    def go(command: str, rows: list[dict[str, Any]], **settings: Any) -> tuple[Run, dict[str, Any]]:
        nonlocal count
        count += 1
        data = write(tmp_path / f"rows{count}.jsonl", rows)
        given = {"model": str(model), "data": str(data), "run": str(tmp_path / f"run{count}"), "precision": "fp32", "trackers": []}
        recipe = RECIPES[command](**{**given, **settings})
        with Run.create(recipe.run or "", recipe) as run:
            return run, ALGORITHMS[command].train(recipe, run)

    return go


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "model/model.safetensors")


def test_dpo_learns_the_preference_and_says_which_half_moved(train: Train) -> None:
    run, summary = train("dpo", pair_rows(), learning_rate=1e-2, epochs=6, eval_fraction=0.2)
    steps = [m for m in run.metrics() if "loss" in m]
    assert steps[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert steps[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-5)
    assert steps[-1]["rewards/accuracies"] == 1.0
    assert summary["held_out"]["eval_rewards/accuracies"] >= 0.8
    last = steps[-1]
    assert last["rewards/margins"] == pytest.approx(0.1 * (last["displacement/chosen"] - last["displacement/rejected"]), rel=1e-4)
    pairs = run.rows("pairs.jsonl")
    assert {p["pair"] for p in pairs} == set(range(summary["pairs"]))
    assert all(0 <= p["similarity"] <= 1 for p in pairs)


def test_a_handful_of_pairs_trains_with_some_held_out(train: Train) -> None:
    """The check before the first step looks at eight pairs: where fewer are trained on, those held out are none of them."""
    _, summary = train("dpo", pair_rows()[:8], eval_fraction=0.25, max_steps=1)
    assert (summary["steps"], summary["pairs"]) == (1, 6)
    assert "eval_loss" in summary["held_out"]


@pytest.mark.parametrize("command", ["sft", "reward", "dpo"])
def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(train: Train, tmp_path: Path, command: str) -> None:
    """One row says w95, which the tokenizer has and a model of 90 tokens has not."""
    small = save_tiny(tmp_path / "small", tiny_config(90), tokenizer=tiny_tokenizer(100))
    rows = [{"prompt": "w10 w11", "completion": "w95"}] if command == "sft" else [{"prompt": "w10", "chosen": "w95", "rejected": "w20"}]
    with pytest.raises(UserError, match=r"token 95, and the model knows 90") as refused:
        train(command, rows, model=str(small), max_steps=1)
    assert "rows1.jsonl:1" in str(refused.value)


def test_dpo_with_the_sign_flipped_learns_the_opposite(train: Train) -> None:
    flipped = [{"prompt": r["prompt"], "chosen": r["rejected"], "rejected": r["chosen"]} for r in pair_rows()]
    forward, _ = train("dpo", pair_rows(), learning_rate=1e-2, epochs=3)
    backward, _ = train("dpo", flipped, learning_rate=1e-2, epochs=3)
    assert forward.metrics()[-1]["rewards/margins"] > 0.3
    assert backward.metrics()[-1]["rewards/margins"] > 0.3  # of the flipped pairs


@pytest.mark.parametrize("loss_type", ["dpo", "dpo_nll_token", "cpo", "orpo", "simpo", "ipo_avg"])
def test_micro_batches_do_not_show(train: Train, loss_type: str) -> None:
    """Plain sums over the step: one row at a time, a few, or all together give the same numbers and weights."""
    runs = [
        train("dpo", pair_rows(), learning_rate=1e-3, loss_type=loss_type, batch_size=8, tokens_per_micro_batch=budget)[0]
        for budget in (1, 40, 100_000)
    ]
    for other in runs[1:]:
        for a, b in zip(runs[0].metrics(), other.metrics(), strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        for name, value in weights(runs[0]).items():
            torch.testing.assert_close(value, weights(other)[name], rtol=1e-3, atol=2e-5)


def test_micro_batches_do_not_show_in_sft_kto_and_reward_models(train: Train) -> None:
    demonstrations = [{"prompt": r["prompt"], "completion": r["chosen"]} for r in pair_rows()]
    labelled = [{"prompt": r["prompt"], "completion": r["chosen"], "label": i % 2 == 0} for i, r in enumerate(pair_rows())]
    ranked = [
        {"prompt": words(i, 3), "answers": [words(i, 2), words(i + 1, 5), words(i + 2, 3)], "ranks": [1, 2, 2 + i % 2]} for i in range(9)
    ]
    for command, rows, more in (
        ("sft", demonstrations, {}),
        ("dpo", labelled, {"loss_type": "kto"}),
        ("reward", ranked, {"heads": 3}),
    ):
        one, _ = train(command, rows, learning_rate=1e-3, tokens_per_micro_batch=1, **more)
        many, _ = train(command, rows, learning_rate=1e-3, tokens_per_micro_batch=10_000, **more)
        for a, b in zip(one.metrics(), many.metrics(), strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_sft_logs_the_mean_over_all_trained_tokens_of_the_step(train: Train, model: Path) -> None:
    """The first loss is that of transformers on each row alone, summed, over the number of trained tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [{"prompt": "w7 w8", "completion": words(i, n)} for i, n in enumerate((1, 2, 3, 5, 8, 13, 40, 90))]
    run, _ = train("sft", rows, batch_size=8, max_steps=1)
    net, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    total, tokens = 0.0, 0
    for row in rows:
        prompt, answer = tokenizer(row["prompt"]).input_ids, [*tokenizer(row["completion"]).input_ids, tokenizer.eos_token_id]
        ids = torch.tensor([prompt + answer])
        logps = net(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])
        total, tokens = total - float(logps.sum()), tokens + len(answer)
    assert run.metrics()[0]["loss"] == pytest.approx(total / tokens, rel=1e-5)


def test_an_overfitted_model_ends_its_answers(train: Train) -> None:
    """Pad is the end mark in this tokenizer: masking labels by pad id would leave the end untrained."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [{"prompt": f"w{30 + i}", "completion": words(i, 1 + i % 4)} for i in range(8)]
    run, _ = train("sft", rows, learning_rate=1e-2, epochs=80, batch_size=8, lr_scheduler="constant")
    net, tokenizer = AutoModelForCausalLM.from_pretrained(run.folder / "model"), AutoTokenizer.from_pretrained(run.folder / "model")
    for row in rows:
        ids = tokenizer(row["prompt"], return_tensors="pt").input_ids
        made = net.generate(ids, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))[0, ids.shape[1] :].tolist()
        assert made == [*tokenizer(row["completion"]).input_ids, tokenizer.eos_token_id]


def test_reward_model_reports_held_out_accuracy_with_interval(train: Train) -> None:
    _, summary = train("reward", pair_rows(40), learning_rate=5e-3, epochs=4, eval_fraction=0.25)
    accuracy = summary["held_out"]["accuracy"]
    assert accuracy["n"] == 10
    assert 0 <= accuracy["low"] < accuracy["value"] <= accuracy["high"] <= 1
    assert accuracy["value"] >= 0.9
    assert summary["held_out"]["calibration"]
    assert -1 <= summary["held_out"]["length_correlation"] <= 1


@pytest.mark.parametrize("size", [2, 3, 5])
def test_kto_steps_of_any_size_are_finite_and_no_row_meets_its_own_answer(train: Train, size: int) -> None:
    rows = [{"prompt": words(i, 3), "completion": words(i, 1 + i % 5), "label": i % 3 == 0} for i in range(11)]
    run, _ = train("dpo", rows, loss_type="kto", batch_size=size, learning_rate=1e-3)
    assert all(m["loss"] == m["loss"] and abs(m["loss"]) < 10 for m in run.metrics())
    from tether.batch import Example

    examples = [Example([i], [[100 + i]], [[True]]) for i in range(5)]
    for rows_of_step in ([0, 1], [0, 1, 2], [0, 1, 2, 3, 4], [3]):
        for i, made in zip(rows_of_step, kto.mismatched(examples, rows_of_step), strict=True):
            assert made.prompt == examples[i].prompt
            assert made.answers != examples[i].answers


def test_kto_with_one_class_only_leaves_the_other_out_of_the_log(train: Train) -> None:
    rows = [{"prompt": words(i, 3), "completion": words(i, 1 + i % 5), "label": True} for i in range(6)]
    run, _ = train("dpo", rows, loss_type="kto", batch_size=6)
    assert "rewards/chosen" in run.metrics()[0]
    assert "rewards/rejected" not in run.metrics()[0]


def test_kto_refuses_a_batch_of_one_with_the_reason(train: Train) -> None:
    with pytest.raises(UserError, match="another row's answer"):
        train("dpo", [{"prompt": "w7", "completion": "w8", "label": True}] * 3, loss_type="kto", batch_size=1)


def test_displacement_is_warned_of_by_name_with_its_remedies(train: Train) -> None:
    """Pairs that share nearly all their tokens: the margin grows while the chosen side falls."""
    shared = words(3, 18)
    rows = [{"prompt": words(i, 3), "chosen": f"{shared} w10", "rejected": f"{shared} w11"} for i in range(16)]
    run, _ = train("dpo", rows, learning_rate=3e-3, epochs=12, batch_size=16, displacement_warn_steps=3, lr_scheduler="constant")
    last = run.metrics()[-1]
    assert last["rewards/margins"] > 0
    if last["displacement/chosen"] < 0:
        notices = [n for n in run.notices() if n["kind"] == "likelihood_displacement"]
        assert len(notices) == 1
        assert "dpo_nll_seq" in notices[0]["text"]
        assert "min_edit_distance" in notices[0]["text"]


def test_min_edit_distance_drops_the_pairs_that_are_too_alike_and_lists_them(train: Train) -> None:
    alike = [{"prompt": words(50 + i, 3), "chosen": words(3, 18) + " w10", "rejected": words(3, 18) + " w11"} for i in range(3)]
    run, summary = train("dpo", pair_rows() + alike, min_edit_distance=0.2, max_steps=1)
    assert summary["pairs"] == 23
    assert sum(n["kind"] == "too_alike" for n in run.notices()) == 3


def test_a_run_whose_reference_does_not_match_is_refused_before_step_0(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    real = dpo.reference_logps
    monkeypatch.setattr(dpo, "reference_logps", lambda *a, **k: real(*a, **k) - 3.0)
    with pytest.raises(UserError, match="differs from its reference"):
        train("dpo", pair_rows(), learning_rate=1e-3)


@pytest.mark.parametrize("limit", [40, 55, 64, 200])
def test_both_sides_obey_the_limit_and_keep_the_same_prompt(train: Train, limit: int) -> None:
    rows = [{"prompt": words(i, 50), "chosen": words(i, 10), "rejected": words(2 * i + 1, 80)} for i in range(4)]
    if limit == 40:
        with pytest.raises(UserError, match="no row is left"):
            train("dpo", rows, max_length=limit, max_steps=1)
        return
    run, summary = train("dpo", rows, max_length=limit, max_steps=1)
    cut = [n for n in run.notices() if n.get("action") == "truncate"]
    assert bool(cut) == (limit < 131)
    assert summary["pairs"] == 4


# -- interruption ------------------------------------------------------------------------------------------------------

LAUNCH = """
import sys, os
sys.path.insert(0, {root!r})
from tether.cli import main
main()
"""


def launch(arguments: list[str], cache: Path, **more: str) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "TETHER_CACHE": str(cache), "OMP_NUM_THREADS": "1", **more}
    command = [sys.executable, "-c", LAUNCH.format(root=root), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def comparable(run: Run) -> list[dict[str, Any]]:
    return [{k: v for k, v in m.items() if k not in ("step_time", "tokens_per_second")} for m in run.metrics()]


def settle(run: Path, wanted: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    limit = time.time() + 120
    while not wanted() and process.poll() is None and time.time() < limit:
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("extra", [[], ["lora={rank: 4}"]], ids=["full", "lora"])
def test_kill_9_in_any_phase_then_resume_gives_the_same_weights_bit_for_bit(model: Path, tmp_path: Path, extra: list[str]) -> None:
    data = write(tmp_path / "rows.jsonl", pair_rows())
    base = ["dpo", "--model", str(model), "--data", str(data), "precision=fp32", "threads=1", "learning_rate=1e-2", "batch_size=4"]
    base += ["epochs=3", "save_steps=3", *extra]
    straight = launch([*base, "--run", str(tmp_path / "straight")], tmp_path / "cache0")
    output, _ = straight.communicate(timeout=300)
    assert straight.returncode == 0, output
    file = "model/adapter_model.safetensors" if extra else "model/model.safetensors"
    want = load_file(tmp_path / "straight" / file)

    run = tmp_path / "killed"

    def steps() -> int:
        return len((run / "metrics.jsonl").read_text().splitlines()) if (run / "metrics.jsonl").exists() else 0

    # Each process is killed in another phase: just created, scoring the reference, mid-steps, at a checkpoint, at the end.
    phases: list[Callable[[], bool]] = [
        lambda: (run / "recipe.yaml").exists(),
        lambda: (tmp_path / "cache").exists() or (tmp_path / ".tether").exists(),
        lambda: steps() >= 2,
        lambda: (run / "checkpoints/000006").exists(),
        lambda: steps() >= 14,
        lambda: (run / "model").exists(),
    ]
    for phase in phases:
        process = launch(["resume", str(run)] if (run / "recipe.yaml").exists() else [*base, "--run", str(run)], tmp_path / "cache")
        settle(run, phase, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    last = launch(["resume", str(run)], tmp_path / "cache")
    output, _ = last.communicate(timeout=300)
    assert last.returncode == 0, output
    got = load_file(run / file)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert comparable(Run.open(run)) == comparable(Run.open(tmp_path / "straight"))


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(model: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", pair_rows())
    run = tmp_path / "run"
    arguments = ["sft", "--model", str(model), "--data", str(data), "precision=fp32", "epochs=500", "--run", str(run)]
    write(data, [{"prompt": r["prompt"], "completion": r["chosen"]} for r in pair_rows()])
    process = launch(arguments, tmp_path / "cache")
    settle(run, lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size > 0, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert f"tether resume {run}" in output
    assert Run.open(run).checkpoints()
