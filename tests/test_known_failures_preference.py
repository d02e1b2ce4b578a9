"""Whole preference runs where other libraries lose their users: displacement, limits, KTO batches, stored reference scores."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import save_tiny, tiny_config, tiny_model, tiny_tokenizer
from tests.toy_text import CHATML, byte_tokenizer, case_file, case_lines
from tests.whole_runs import resume, start, words, write_rows
from tether.algorithms import kto
from tether.batch import Example
from tether.cli import run as tether
from tether.errors import UserError
from tether.loop import Loop
from tether.models import save_model
from tether.run import Run


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


# -- likelihood displacement (trl#800) ---------------------------------------------------------------------------------


def alike_model(folder: Path) -> Path:
    """The embedding of w11 points the same way as that of w10, only further: whatever makes w11 less likely than w10 makes
    both less likely (Razin et al. 2024)."""
    net = tiny_model(tiny_config(initializer_range=0.4))
    with torch.no_grad():
        net.get_input_embeddings().weight[11] = 1.8 * net.get_input_embeddings().weight[10]
    return save_model(net, tiny_tokenizer(), folder)


def similar_pairs() -> list[dict[str, Any]]:
    """40 pairs that share 18 of 19 words."""
    draw = random.Random(0)
    rows = []
    for i in range(40):
        shared = [f"w{draw.randrange(6, 96)}" for _ in range(18)]
        at = draw.randrange(4, 14)
        chosen, rejected = ([*shared[:at], word, *shared[at:]] for word in ("w10", "w11"))
        rows.append({"prompt": words(i, 3), "chosen": " ".join(chosen), "rejected": " ".join(rejected)})
    return rows


def test_falling_chosen_answers_are_logged_warned_of_and_told_in_the_report(tmp_path: Path) -> None:
    model = alike_model(tmp_path / "alike")
    data = write_rows(tmp_path / "rows.jsonl", similar_pairs())
    run, _ = start(
        "dpo", model, data, tmp_path / "run", learning_rate=1e-3, epochs=5, batch_size=8, displacement_warn_steps=3, lr_scheduler="constant"
    )
    rows = run.metrics()
    for row in rows:  # both sides stand in the log apart from the margin, and add up to it
        assert row["rewards/margins"] == pytest.approx(0.1 * (row["displacement/chosen"] - row["displacement/rejected"]), abs=1e-5)
        assert {"logps/chosen", "logps/rejected"} <= set(row)
    late = rows[-5:]
    assert sum(r["rewards/margins"] for r in late) > 5 * 0.05
    assert all(r["displacement/chosen"] < 0 for r in late), "the scenario is one of displacement"
    (notice,) = [n for n in run.notices() if n["kind"] == "likelihood_displacement"]
    for words_wanted in ("less likely", "dpo_nll_seq", "learning_rate"):
        assert words_wanted in notice["text"]

    assert tether(["report", str(run.folder)]) == 0
    page = (run.folder / "report.html").read_text()
    for words_wanted in ("Likelihood displacement", "less likely than under the reference", "loss_type=dpo_nll_seq", "lower learning_rate"):
        assert words_wanted in page


# -- the length limit (trl#5662, LLaMA-Factory#4402) -------------------------------------------------------------------


def long_rows() -> list[dict[str, Any]]:
    """Prompt 50 words, chosen 10, rejected 80; and one row whose prompt alone is 60."""
    rows = [{"prompt": words(i, 50), "chosen": words(i, 10), "rejected": words(2 * i + 1, 80)} for i in range(4)]
    return [*rows, {"prompt": words(5, 60), "chosen": "w10", "rejected": "w11"}]


@pytest.mark.parametrize(("limit", "cut", "dropped"), [(55, 4, 1), (64, 4, 0), (200, 0, 0)])
def test_the_limit_holds_for_both_sides_and_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], limit: int, cut: int, dropped: int
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", long_rows())
    seen: list[Example] = []
    real = Loop.parts
    monkeypatch.setattr(Loop, "parts", lambda self, examples: seen.extend(examples) or real(self, examples))
    run, summary = start("dpo", model, data, tmp_path / "run", max_length=limit, max_steps=1, batch_size=8)
    assert summary["pairs"] == 5 - dropped
    assert math.isfinite(run.metrics()[0]["loss"])
    for example in seen:
        assert len(example.prompt) in (50, 60)
        assert all(len(example.prompt) + len(answer) <= limit and any(trained) for answer, trained in zip(*sides(example), strict=True))
    longest = max(len(e.prompt) + max(map(len, e.answers)) for e in seen)
    assert longest == min(limit, 131), "nothing is cut below the limit that was set"
    actions = [n.get("action") for n in run.notices()]
    assert (actions.count("truncate"), actions.count("drop")) == (cut, dropped)
    told = capsys.readouterr().err
    assert (f"{cut} rows cut at max_length {limit}" in told) == bool(cut)

    assert tether(["report", str(run.folder)]) == 0
    page = (run.folder / "report.html").read_text()
    if cut:
        assert f"{cut} rows cut at max_length {limit}" in page
    if dropped:
        assert "1 row left out" in page
        assert f"{data}:5" in page


def sides(example: Example) -> tuple[list[list[int]], list[list[bool]]]:
    return example.answers, example.trained


def test_a_limit_that_leaves_no_row_is_refused(model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", long_rows())
    with pytest.raises(UserError, match="no row is left to train on out of 5"):
        start("dpo", model, data, tmp_path / "run", max_length=40, max_steps=1)
    assert sum(n.get("kind") == "no_answer_token" for n in Run.open(tmp_path / "run").notices()) == 5


# -- KTO (trl#1380, #1447, #2554, #1911) -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reads any text, byte by byte where it must."""
    tokenizer = byte_tokenizer(CHATML, eos="<|im_end|>")
    config = tiny_config(len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return save_tiny(tmp_path_factory.mktemp("text") / "model", config, tokenizer=tokenizer)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_handed_labels_train_in_any_batch_and_no_prompt_meets_its_own_answer(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Labels as text and numbers are converted and counted; odd batches, and a last batch of one, are served."""
    met: list[tuple[list[int], list[list[int]]]] = []
    own: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    real = kto.mismatched

    def watching(examples: Any, rows: Any) -> Any:
        made = real(examples, rows)
        for i, m in zip(rows, made, strict=True):
            assert m.prompt == examples[i].prompt
            assert m.answers is not examples[i].answers
        own.update((tuple(e.prompt), tuple(e.answers[0])) for e in examples)
        met.extend((m.prompt, m.answers) for m in made)
        return made

    monkeypatch.setattr(kto, "mismatched", watching)
    run, summary = start(
        "kto", text_model, case_file("kto_rows"), tmp_path / "run", batch_size=size, epochs=2, on_bad_rows="drop", learning_rate=1e-2
    )
    assert met
    assert all(math.isfinite(m[name]) for m in run.metrics() for name in ("loss", "kl", "kl/raw"))
    assert all((tuple(p), tuple(a[0])) not in own for p, a in met), "another prompt's answer, never one of its own"
    told = [n["text"] for n in run.notices()]
    for number, line in enumerate(case_lines("kto_rows"), 1):
        if line.strip() and type(json.loads(line).get("label")) is not bool:
            assert any(text.startswith(f"{case_file('kto_rows')}:{number}: ") for text in told), (
                f"line {number} is converted or left out, and told"
            )
    assert sum(m["count/chosen"] + m["count/rejected"] for m in run.metrics()) == 2 * summary["rows"]


def test_a_kto_step_of_wanted_rows_only_is_finite(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": words(i, 3), "completion": words(i, 1 + i % 5), "label": True} for i in range(5)]
    run, _ = start("kto", model, write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "run", batch_size=5, max_steps=3)
    assert all(math.isfinite(m["loss"]) and m["count/rejected"] == 0 for m in run.metrics())


@pytest.mark.parametrize(("settings", "words_wanted"), [({"batch_size": 1}, "another row's answer"), ({}, "two different prompts")])
def test_kto_without_another_answer_is_refused_with_the_reason(
    model: Path, tmp_path: Path, settings: dict[str, Any], words_wanted: str
) -> None:
    rows = [{"prompt": "w7" if not settings else f"w{7 + i}", "completion": f"w{i + 20}", "label": i > 1} for i in range(4)]
    with pytest.raises(UserError, match=words_wanted):
        start("kto", model, write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "run", **settings)


@pytest.mark.parametrize("label", ["yes please", 2, [], "tru"])
def test_a_label_that_is_none_is_refused_by_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], label: Any) -> None:
    data = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": f"w{i}", "completion": "w9", "label": label if i == 8 else True} for i in (7, 8)]
    )
    assert tether(["dpo", "--model", str(model), "--data", str(data), "--run", str(tmp_path / "run"), "loss_type=kto"]) == 2
    assert f"{data}:2: label" in capsys.readouterr().err


# -- reference scores worked out beforehand (trl#2423, #2337, #7083) ---------------------------------------------------


def uneven_pairs() -> list[dict[str, Any]]:
    """10 rows, answers of 1 to 61 words."""
    return [{"prompt": words(i, 3), "chosen": words(i, 1 + 6 * i), "rejected": words(i + 40, 1 + (23 * i) % 50)} for i in range(10)]


def dpo_curve(model: Path, data: Path, folder: Path, **settings: Any) -> tuple[list[float], list[int], list[str]]:
    """Losses, the ids of the rows in the order they were trained in, and what the run said of stored scores."""
    said: list[str] = []
    real = Run.say
    order: list[int] = []
    parts = Loop.parts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "say", lambda self, text: said.append(text) or real(self, text))
        patch.setattr(Loop, "parts", lambda self, examples: order.extend(self.rows()) or parts(self, examples))
        run, _ = start("dpo", model, data, folder, epochs=3, batch_size=4, shuffle=True, learning_rate=5e-3, **settings)
    rows = run.metrics()
    assert rows[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    return [m["loss"] for m in rows], order, [s for s in said if s.startswith("reference scores")]


def test_stored_reference_scores_change_neither_the_curve_nor_the_order_and_an_edited_row_is_scored_anew(
    model: Path, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", uneven_pairs())
    torch.manual_seed(1)
    plain, order, said = dpo_curve(model, data, tmp_path / "without", cache_reference=False)
    assert said == ["reference scores: 0 reused, 20 made new"]
    assert not (tmp_path / ".tether").exists()
    assert [sorted(order[10 * e : 10 * e + 10]) for e in range(3)] == [list(range(10))] * 3
    assert order[:10] != order[10:20], "shuffled anew each epoch"

    made, made_order, said = dpo_curve(model, data, tmp_path / "made", cache_reference=True)
    assert said == ["reference scores: 0 reused, 20 made new"]
    torch.manual_seed(2)
    random.seed(5)
    reused, reused_order, said = dpo_curve(model, data, tmp_path / "reused", cache_reference=True)
    assert said == ["reference scores: 20 reused, 0 made new"]
    small, _, _ = dpo_curve(model, data, tmp_path / "small", cache_reference=True, tokens_per_micro_batch=1)
    assert made_order == reused_order == order
    assert made == reused == plain
    assert small == pytest.approx(plain, abs=1e-5)
    assert plain[-1] < plain[0]

    # One row edited: its two answers are worked out again, and its margin starts at 0 like the others.
    rows = uneven_pairs()
    rows[6]["prompt"] += " w77"
    write_rows(data, rows)
    edited, _, said = dpo_curve(model, data, tmp_path / "edited", cache_reference=True)
    assert said == ["reference scores: 18 reused, 2 made new"]
    anew, _, _ = dpo_curve(model, data, tmp_path / "anew", cache_reference=False)
    assert edited == pytest.approx(anew, abs=1e-5)
    assert edited != made

    # Another limit or template gives other token ids, so nothing of the old is taken for them.
    _, _, said = dpo_curve(model, data, tmp_path / "limit", cache_reference=True, max_length=20)
    assert "20 reused" not in said[0]
    chats = [{k: [{"role": "user" if k == "prompt" else "assistant", "content": v}] for k, v in row.items()} for row in rows]
    write_rows(data, chats)
    other = tmp_path / "other.jinja"
    other.write_text(
        "{% for m in messages %}{{ 'w91' if m['role'] == 'assistant' else 'w90' }} {{ m['content'] }} </s> {% endfor %}"
        "{% if add_generation_prompt %}w91 {% endif %}"
    )
    for name, settings in (("first", {}), ("second", {"chat_template": str(other)})):
        _, _, said = dpo_curve(model, data, tmp_path / name, cache_reference=True, **settings)
        assert said == ["reference scores: 0 reused, 20 made new"], name


def test_scoring_and_resuming_move_no_global_random_state_but_the_seed(model: Path, tmp_path: Path) -> None:
    """The first pass neither shuffles the rows nor draws a number: two runs from different global states are one run."""
    data = write_rows(tmp_path / "rows.jsonl", uneven_pairs())
    curves = []
    for i in range(2):
        torch.manual_seed(i)
        random.seed(i)
        np.random.seed(i)
        curves.append(dpo_curve(model, data, tmp_path / f"run{i}", cache_reference=bool(i))[:2])
    assert curves[0] == curves[1]
    with pytest.raises(UserError, match="holds a run already"):
        start("dpo", model, data, tmp_path / "run0")
    resume(tmp_path / "run0")  # finished: nothing is trained again
    assert len(Run.open(tmp_path / "run0").metrics()) == len(curves[0][0])
