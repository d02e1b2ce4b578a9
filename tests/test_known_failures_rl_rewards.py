"""Rewards inside a whole run of `tether grpo`: what others score wrongly, wait for without end, or pay for nothing."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

from tests.grpo_runs import Train, even, model, timeless, train
from tests.test_sampler import forced
from tests.tiny import TEMPLATE, save_tiny, tiny_config, tiny_model
from tests.whole_runs import words, write_rows
from tether import rollout as attempts
from tether.cli import run as tether
from tether.models import save_model
from tether.rewards.functions import reward
from tether.run import Run

__all__ = ["model", "train"]  # fixtures


def speaker(folder: Path, texts: list[str], template: str | None = None) -> Path:
    """A policy whose every token after the first four is one whole text, each as likely as the others."""
    known = ["<unk>", "ask", "</s>", "assistant", *texts]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(known)}, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.decoder = tokenizers.decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>", chat_template=template)
    config = tiny_config(len(known), initializer_range=0.02, tie_word_embeddings=False, pad_token_id=None)
    net = tiny_model(config)
    with torch.no_grad():
        net.lm_head.weight[:4] = 0
    return save_model(net, tokenizer, folder)


# -- what a reward function returns (trl#6533, trl#4130) ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("return 1.0", "'score' returned 1.0, a single value, where 16 numbers were wanted"),
        ("return [1.0]", "'score' returned 1 values for 16 completions"),
        ("return [1.0] * (len(completions) + 1)", "'score' returned 17 values for 16 completions"),
        ("return ['good'] * len(completions)", "'score' returned 'good' for row 0, which is not a number"),
        ("pass", "'score' returned nothing (None) where 16 numbers were wanted"),
        ("raise KeyError('gold')", "'score' raised KeyError"),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_reward_that_does_not_answer_for_each_completion_stops_the_command(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, body: str, told: str
) -> None:
    (tmp_path / "mine.py").write_text(f"{kind} score(prompts, completions):\n    {body}\n")
    data = write_rows(tmp_path / "prompts.jsonl", [{"prompt": words(i, 3)} for i in range(8)])
    arguments = ["--model", str(model), "--data", str(data), "--run", str(tmp_path / "run"), "precision=fp32", "trackers=[]"]
    settings = ["batch_size=16", "num_generations=4", "max_completion_length=4", f"rewards={tmp_path / 'mine.py'}:score"]
    assert tether(["grpo", *arguments, *settings]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error
    assert Run.open(tmp_path / "run").metrics() == []


def test_an_async_reward_is_awaited_and_gives_the_same_run(train: Train) -> None:
    class Judge:
        async def judge(self, prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float]:
            return even(prompts, completions, completion_ids)

    one, _ = train([even], max_steps=2)
    two, _ = train([Judge().judge], max_steps=2)
    assert [r["total"] for r in one.rows(attempts.FILE)] == [r["total"] for r in two.rows(attempts.FILE)]
    assert [m["grad_norm"] for m in timeless(one)] == [m["grad_norm"] for m in timeless(two)]


# -- what a format reward is shown (trl#6966, trl#2897) ----------------------------------------------------------------


@pytest.mark.parametrize("opened", [False, True], ids=["opened by the policy", "opened by the template"])
def test_a_format_reward_sees_the_answer_from_the_opening_tag_to_the_first_end_mark(train: Train, tmp_path: Path, opened: bool) -> None:
    """The tags are single tokens, the template may have opened the first, and the end mark is not part of the text."""
    texts = ["<think>", "so it is", "</think>", "<answer>", "7", "</answer>"]
    tag, so, closed, ask, seven, end = range(4, 10)
    net = forced({3: so if opened else tag, tag: so, so: closed, closed: ask, ask: seven, seven: end, end: 2}, vocabulary=10)
    if opened:
        net.lm_head.weight.data[so, tag] = 10.0
    template = (
        "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}assistant "
        + ("<think>" if opened else "")
        + "{% endif %}"
    )
    speaker(tmp_path / "words", texts, template)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "words")
    folder = save_model(net, tokenizer, tmp_path / "policy")
    data = write_rows(tmp_path / "chat.jsonl", [{"prompt": [{"role": "user", "content": "ask"}]}])
    seen: list[Any] = []

    def spy(prompts: Any, completions: Any, opened: list[str], raw_completions: list[str]) -> list[float]:
        seen.extend(zip((c[0]["content"] for c in completions), opened, raw_completions, strict=True))
        return [float(i) for i in range(len(prompts))]

    format_reward = reward("format", tags=["think", "answer"])
    run, _ = train([format_reward, spy], model=str(folder), data=str(data), max_completion_length=8, max_steps=1)
    text = ("" if opened else "<think>") + "so it is</think><answer>7</answer>"
    assert set(seen) == {(text, "<think>" if opened else "", text + "</s>")}
    assert run.metrics()[0]["rewards/format/mean"] == 1.0
    assert run.metrics()[0]["completions/clipped_ratio"] == 0.0


def test_a_format_reward_of_zero_in_the_first_steps_is_warned_about(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = train([reward("format"), even], max_steps=4)
    told = [n["text"] for n in run.notices() if n["kind"] == "reward"]
    assert len(told) == 1
    assert "reward 'format' was 0 for every completion of the first 3 steps" in told[0]
    assert "reward 'format' was 0" in capsys.readouterr().err


# -- math (Math-Verify#1, #34; trl#5281) -------------------------------------------------------------------------------


@pytest.mark.parametrize("thread", [False, True], ids=["main thread", "another thread"])
def test_the_math_reward_pays_for_the_value_in_any_thread(train: Train, tmp_path: Path, thread: bool) -> None:
    right = ["\\boxed{\\frac{1}{2}}", "0.5", "**1/2**", "so \\boxed{\\dfrac{1}{2}}.", "The answer is 2/4."]
    wrong = ["2", "1", "\\boxed{\\frac{2}{1}}", "0.05", "I do not know"]
    folder = speaker(tmp_path / "policy", [*right, *wrong])
    data = write_rows(tmp_path / "q.jsonl", [{"prompt": "ask", "answer": "\\frac{1}{2}"}] * 2)
    done: list[Run] = []

    def go() -> None:
        settings: dict[str, Any] = {
            "batch_size": 64,
            "num_generations": 32,
            "max_completion_length": 1,
            "max_steps": 12,
            "learning_rate": 1e-2,
        }
        done.append(train([reward("math")], model=str(folder), data=str(data), lr_scheduler="constant", **settings)[0])

    worker = threading.Thread(target=go)
    worker.start() if thread else go()
    if thread:
        worker.join(250)
    [run] = done
    for row in run.rows(attempts.FILE):
        text = row["view"]["text"]
        if text in right + wrong:
            assert row["total"] == float(text in right), text
    assert {r["view"]["text"] for r in run.rows(attempts.FILE)} >= {*right, *wrong}
    assert run.metrics()[-1]["reward"] > run.metrics()[0]["reward"] + 0.2, "it learns to say the value, in whichever form"


# -- code (verl#288, #3290; human-eval#67, evalplus#306) ---------------------------------------------------------------

PROGRAMS = {
    "right": ("def add(a, b):\n    return a + b\n", 1.0),
    "wrong": ("def add(a, b):\n    return a - b\n", 0.0),
    "endless": ("def add(a, b):\n    while True:\n        pass\n", 0.0),
    "asleep": ("import time\ntime.sleep(3600)\ndef add(a, b):\n    return a + b\n", 0.0),
    "equal to all": (
        "class Same:\n    def __eq__(self, other):\n        return True\n    def __repr__(self):\n        return '5'\n"
        "def add(a, b):\n    return Same()\n",
        0.0,
    ),
    "leaves": ("import sys\nsys.exit(0)\n", 0.0),
    "leaves late": ("import os\ndef add(a, b):\n    os._exit(0)\n", 0.0),
    "says passed": ("print('PASSED')\nprint('1 passed')\n", 0.0),
}


def test_a_run_on_programs_ends_in_time_and_pays_for_the_right_one_alone(train: Train, tmp_path: Path) -> None:
    """Stuck programs end with their processes and hold up nobody; what solves nothing earns nothing, and is unlearnt."""
    texts = [text for text, _ in PROGRAMS.values()]
    folder = speaker(tmp_path / "policy", texts)
    tests = [{"call": "add(2, 3)", "expected": "5"}, {"call": "add(1, 1)", "expected": "2"}]
    data = write_rows(tmp_path / "tasks.jsonl", [{"prompt": "ask", "tests": tests}])
    began = time.monotonic()
    settings: dict[str, Any] = {"batch_size": 24, "num_generations": 24, "max_completion_length": 1, "max_steps": 3, "learning_rate": 2e-2}
    run, _ = train([reward("code", timeout_s=1.0, workers=8)], model=str(folder), data=str(data), lr_scheduler="constant", **settings)
    stuck = sum(r["view"]["text"] in (PROGRAMS["endless"][0], PROGRAMS["asleep"][0]) for r in run.rows(attempts.FILE))
    took = time.monotonic() - began
    worth = dict(PROGRAMS.values())
    seen = set()
    for row in run.rows(attempts.FILE):
        text = row["view"]["text"]
        if text in worth:
            seen.add(text)
            assert row["total"] == worth[text], text
    assert seen == set(texts), "every program was tried"
    assert stuck > 2
    assert took < 60 + stuck * 3, f"{took:.0f} s for {stuck} stuck programs"
    assert run.metrics()[-1]["reward"] > run.metrics()[0]["reward"]


def test_the_limit_of_a_recipe_is_for_one_program_and_not_for_all_of_a_step(train: Train, tmp_path: Path) -> None:
    """Eight programs of which each may take a second are not given one second together."""
    folder = speaker(tmp_path / "policy", [PROGRAMS["endless"][0]])
    data = write_rows(tmp_path / "tasks.jsonl", [{"prompt": "ask", "tests": [{"call": "add(2, 3)", "expected": "5"}]}])
    settings: dict[str, Any] = {"batch_size": 8, "num_generations": 8, "max_completion_length": 1, "max_steps": 1}
    block = {"reward": "code", "timeout_s": 1, "workers": 4}
    run, _ = train([block], model=str(folder), data=str(data), **settings)
    assert {r["total"] for r in run.rows(attempts.FILE)} == {0.0}


def test_a_task_without_tests_is_no_pass(train: Train, tmp_path: Path) -> None:
    folder = speaker(tmp_path / "policy", [PROGRAMS["right"][0], PROGRAMS["wrong"][0]])
    data = write_rows(tmp_path / "tasks.jsonl", [{"prompt": "ask", "tests": []}])
    settings: dict[str, Any] = {"batch_size": 8, "num_generations": 8, "max_completion_length": 1, "max_steps": 2}
    run, _ = train([reward("code", timeout_s=2.0)], model=str(folder), data=str(data), **settings)
    assert all(r["total"] is None for r in run.rows(attempts.FILE))
    assert all(m["rewards/code/unscored"] == 1.0 and "reward" not in m and m["grad_norm"] == 0.0 for m in run.metrics())
    assert any(n["kind"] == "nothing_trained" for n in run.notices())


# -- columns belong to their own completions ---------------------------------------------------------------------------


def test_every_reward_gets_the_columns_of_the_rows_own_prompt(train: Train, tmp_path: Path) -> None:
    """Also with resampling, when prompts come in another order than in the file and several rounds are judged."""
    rows = [{"prompt": words(i, 3), "gold": i, "note": {"id": i}} for i in range(20)]
    owner = {row["prompt"]: row for row in rows}
    data = write_rows(tmp_path / "prompts.jsonl", rows)

    def check(prompts: list[str], completions: Any, gold: list[int], note: list[Any], **more: Any) -> list[float]:
        assert len(gold) == len(note) == len(prompts) == len(completions)
        assert all(owner[p]["gold"] == g and owner[p]["note"] == n for p, g, n in zip(prompts, gold, note, strict=True))
        return [1.0 if g % 2 else v for g, v in zip(gold, even(prompts, completions, more["completion_ids"]), strict=True)]

    run, _ = train([check], data=str(data), preset="dapo", max_steps=4, max_sampling_rounds=4)
    assert max(m["dynamic_sampling/prompts"] for m in run.metrics()) > 4
    for row in run.rows(attempts.FILE):
        assert owner[row["prompt"]]["gold"] == row["columns"]["gold"]
        assert json.loads(data.read_text().splitlines()[row["source"]["line"] - 1])["prompt"] == row["prompt"]


def test_messages_and_texts_are_handed_on_in_the_shape_that_the_data_has(train: Train, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "policy")
    assert TEMPLATE
    chats = write_rows(tmp_path / "chats.jsonl", [{"prompt": [{"role": "user", "content": words(i, 2)}]} for i in range(4)])

    def check(prompts: list[Any], completions: list[Any], completion_ids: list[list[int]]) -> list[float]:
        assert all(p[0]["role"] == "user" for p in prompts)
        assert all([m["role"] for m in c] == ["assistant"] for c in completions)
        return even(prompts, completions, completion_ids)

    train([check], model=str(folder), data=str(chats), max_steps=1)
