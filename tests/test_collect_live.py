"""Answers sampled while people vote, and the command around the desk."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests import desks
from tests.tiny import save_tiny
from tether import cli
from tether.answers import Speaker
from tether.collect.desk import Desk
from tether.collect.live import LiveAnswers
from tether.engines.sampling import Sampling
from tether.errors import UserError
from tether.files import Source
from tether.messages import user

SAMPLING = Sampling(max_new_tokens=6)


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [str(save_tiny(folder / f"tiny{i}", seed=i)) for i in range(2)]


def prompts(n: int) -> list[Any]:
    return [(user(f"w{10 + i} w{20 + i}"), Source("prompts.jsonl", i + 1)) for i in range(n)]


def load(name: str) -> Speaker:
    return Speaker(name, precision="fp32")


def until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "waited for half a minute"
        time.sleep(0.02)


def test_pairs_are_made_ahead_and_no_further(tmp_path: Path, models: list[str]) -> None:
    desk = desks.desk(tmp_path / "desk", [])
    live = LiveAnswers(desk, prompts(6), models[:1], SAMPLING, load, ahead=2)
    live.start()
    until(lambda: live.state().ready == 2)
    time.sleep(0.2)
    assert live.state().ready == 2, "nobody has looked yet"
    me = desk.annotator("me").id
    live.wanted(desk.progress(me).left)
    until(lambda: live.state().ready == 3)  # one in front of them, two more
    live.wanted(0)
    until(lambda: live.state().ready == 5)
    live.stop()
    assert not live.state().finished or live.state().ready < 6
    items = list(desk.items().values())
    assert len(items) == 5
    for item in items:
        assert item.source == f"sampled from {models[0]}"
        assert [a.model for a in item.answers] == models[:1] * 2
        assert item.answers[0].text != item.answers[1].text
        assert item.extra["prompt_source"].startswith("prompts.jsonl:")


def test_two_models_are_compared_and_all_of_torch_runs_in_one_thread(tmp_path: Path, models: list[str]) -> None:
    desk = desks.desk(tmp_path / "desk", [])
    threads: set[str] = set()

    def watched(name: str) -> Speaker:
        threads.add(threading.current_thread().name)
        speaker = load(name)
        sample = speaker.sampler.sample

        def sampled(*args: Any, **more: Any) -> Any:
            threads.add(threading.current_thread().name)
            return sample(*args, **more)

        speaker.sampler.sample = sampled  # type: ignore[method-assign]
        return speaker

    live = LiveAnswers(desk, prompts(2), models, SAMPLING, watched)
    live.start()
    until(lambda: live.state().finished)
    assert threads == {"answers"}
    assert all([a.model for a in item.answers] == models for item in desk.items().values())
    assert len(desk.items()) == 2


def test_a_desk_that_is_opened_again_asks_only_what_is_missing_and_the_same_seed_says_the_same(tmp_path: Path, models: list[str]) -> None:
    texts = []
    for name, n in (("one", 2), ("one", 3), ("two", 3)):
        folder = tmp_path / name
        desk = Desk.open(folder) if folder.exists() else desks.desk(folder, [])
        live = LiveAnswers(desk, prompts(n), models, SAMPLING, load)
        live.start()
        until(lambda live=live: live.state().finished)
        texts.append([[a.text for a in item.answers] for item in desk.items().values()])
    assert [len(t) for t in texts] == [2, 3, 3]
    assert texts[1] == texts[2]


def test_answers_that_are_always_the_same_are_left_out_and_told(tmp_path: Path, models: list[str], capsys: Any) -> None:
    desk = desks.desk(tmp_path / "desk", [])
    live = LiveAnswers(desk, prompts(2), models[:1], Sampling(max_new_tokens=3, temperature=0.0), load)
    live.start()
    until(lambda: live.state().finished)
    assert desk.items() == {}
    assert live.state().ready == 2
    assert "prompts.jsonl:1: both answers were the same" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    live = LiveAnswers(desks.desk(tmp_path / "desk", []), prompts(1), [str(tmp_path / "none")], SAMPLING, load)
    with pytest.raises(UserError, match="none"):
        live.start()


def test_a_sampler_that_breaks_leaves_what_was_made(tmp_path: Path, models: list[str], capsys: Any) -> None:
    desk = desks.desk(tmp_path / "desk", [])

    def broken(name: str) -> Speaker:
        speaker = load(name)
        sample, calls = speaker.sampler.sample, []

        def sampled(*args: Any, **more: Any) -> Any:
            calls.append(1)
            if len(calls) > 1:
                raise MemoryError("no room")
            return sample(*args, **more)

        speaker.sampler.sample = sampled  # type: ignore[method-assign]
        return speaker

    live = LiveAnswers(desk, prompts(3), models[:1], SAMPLING, broken)
    live.start()
    until(lambda: live.state().finished)
    assert "no room" in live.state().failed
    assert len(desk.items()) == 1
    assert "no more answers are made" in capsys.readouterr().err


def test_stopping_lets_a_long_answer_go(tmp_path: Path, models: list[str]) -> None:
    desk = desks.desk(tmp_path / "desk", [])
    live = LiveAnswers(desk, prompts(1), models[:1], Sampling(max_new_tokens=1500, ignore_end=True), load)
    live.start()
    time.sleep(0.1)
    live.stop()
    assert live.state().finished
    assert desk.items() == {}


# -- the command ---------------------------------------------------------------------------------------------------------


def test_a_model_answers_and_a_person_votes_at_the_terminal(tmp_path: Path, models: list[str], monkeypatch: Any, capsys: Any) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"w{i} w{i + 1}"}) + "\n" for i in range(10, 15)), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n" * 5))
    words = [
        "collect",
        str(file),
        "--model",
        models[0],
        "--model",
        models[1],
        "--desk",
        str(tmp_path / "d"),
        "--terminal",
        "--annotator",
        "Ada",
    ]
    assert cli.run([*words, "--max-new-tokens", "4", "--repeats", "0", "--precision", "fp32"]) == 0
    said = capsys.readouterr().err
    assert "5 votes of 1 person" in said
    assert f"tether export {tmp_path / 'd'}" in said
    votes = Desk.open(tmp_path / "d").votes()
    assert [v.annotator for v in votes] == ["Ada"] * 5


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing.jsonl"], "nothing.jsonl"),
        (["pairs.jsonl", "--votes", "0"], "votes_per_item"),
        (["pairs.jsonl", "--repeats", "2"], "repeat_share"),
        (["pairs.jsonl", "--guidelines", "none.md"], "guidelines cannot be read"),
        (["pairs.jsonl", "--model", "a", "--model", "b", "--model", "c"], "two models"),
        (["prompts.jsonl"], "prompts.jsonl"),
        (["pairs.jsonl", "--host", "203.0.113.7"], "--host"),
        (["pairs.jsonl", "--port", "99999"], "port"),
        (["there.desk", "--desk", "other"], "a desk was named already"),
        (["there.desk", "--model", "x"], "no prompts to ask"),
        (["pairs.jsonl", "--import", "none.jsonl"], "none.jsonl"),
        (["pairs.jsonl", "--terminal", "--annotator", ""], "1 to 80"),
        (["pairs.jsonl", "--on-bad-rows", "keep"], "refuse or drop"),
        (["broken.jsonl"], "broken.jsonl:2"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(words: list[str], told: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text('{"prompt": "q", "chosen": "a", "rejected": "b"}\n', encoding="utf-8")
    Path("prompts.jsonl").write_text('{"prompt": "q"}\n', encoding="utf-8")
    Path("broken.jsonl").write_bytes(b'{"prompt": "q", "chosen": "a", "rejected": "b"}\n\xff\xfe\n')
    desks.desk(Path("there.desk"), [desks.item(0)])
    assert cli.run(["collect", *words, *([] if "--terminal" in words else ["--no-open"])]) == 2
    assert told in capsys.readouterr().err


def test_broken_rows_are_left_out_where_that_is_asked(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.jsonl").write_bytes(b'{"prompt": "q", "chosen": "a", "rejected": "b"}\n\xff\xfe\n')
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n"))
    assert cli.run(["collect", "broken.jsonl", "--terminal", "--on-bad-rows", "drop"]) == 0
    said = capsys.readouterr().err
    assert "1 rows hold nothing to compare" in said
    assert "broken.jsonl:2" in said
    assert len(Desk.open("broken.desk").votes()) == 1


def test_a_desk_opened_again_keeps_its_settings_and_takes_those_that_are_given(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text('{"prompt": "q", "chosen": "a", "rejected": "b"}\n', encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("q\n"))
    assert cli.run(["collect", "pairs.jsonl", "--terminal", "--votes", "3", "--reason", "short", "--seed", "7"]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO("t\n"))
    assert cli.run(["collect", "pairs.desk", "--terminal", "--reason", "kind"]) == 0
    desk = Desk.open("pairs.desk")
    assert (desk.settings.votes_per_item, desk.settings.seed, desk.settings.reasons) == (3, 7, ("kind",))
    assert desk.settings.guidelines.startswith("# Which answer is better?")
    assert "1 vote of 1 person in pairs.desk" in capsys.readouterr().err
