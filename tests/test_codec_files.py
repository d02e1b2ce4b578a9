"""Files of chats through the codec: each row's own answers, made anew each time, in this process alone."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import toy_text as toy
from tests.codec_cases import CASES, CHATML_CODEC, chat_row, encode, said, same, trained_text, user, whole_text
from tests.toy_text import case_file, case_lines
from tether import conversations, preferences
from tether.chat import Codec, encode_conversations, encode_preferences

# -- nothing is cached, nothing is forked ------------------------------------------------------------------------------


def test_a_changed_template_tokenizer_limit_or_row_gives_fresh_tokens() -> None:
    """There is no token cache: what is encoded follows from what is given, at each call."""
    rows = [chat_row(user("A"), said("the sea was grey"))]

    def ids(codec: Codec, rows: list[Any] = rows, limit: int | None = None) -> Any:
        return [(e.prompt, e.answers) for e in encode(codec, *rows, max_length=limit).examples]

    first = Codec(toy.byte_tokenizer(toy.CHATML))
    same = Codec(toy.byte_tokenizer(toy.CHATML))
    assert ids(first) == ids(same)
    assert first.fingerprint == same.fingerprint
    other_template = Codec(toy.byte_tokenizer(toy.CHATML.replace("assistant", "answerer")))
    more_tokens = toy.byte_tokenizer(toy.CHATML)
    more_tokens.add_tokens(["grey"])
    other_tokenizer = Codec(more_tokens)
    for other in (other_template, other_tokenizer):
        assert ids(other) != ids(first)
        assert other.fingerprint != first.fingerprint
    assert Codec(toy.byte_tokenizer(toy.CHATML), control_text="parse").fingerprint != first.fingerprint
    assert ids(first, limit=16) != ids(first)
    assert ids(first, [chat_row(user("A"), said("the sea was calm"))]) != ids(first)


def test_reading_and_encoding_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(multiprocessing.Process, "start", refuse)
    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start", refuse)
    loaded = preferences.load(str(case_file("prefs_weird")))
    assert encode_preferences(loaded, CHATML_CODEC, max_length=200).examples


@pytest.mark.slow
def test_a_script_without_a_main_guard_works_under_spawn(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\n"
        "multiprocessing.set_start_method('spawn')\n"
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from tests.toy_text import CHATML, byte_tokenizer\n"
        "from tether import preferences\n"
        "from tether.chat import Codec, encode_preferences\n"
        f"loaded = preferences.load({str(case_file('prefs_weird').resolve())!r})\n"
        "encoded = encode_preferences(loaded, Codec(byte_tokenizer(CHATML)), max_length=200)\n"
        "print('examples', len(encoded.examples))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("examples") == 1


# -- the handed chats --------------------------------------------------------------------------------------------------


def chat_cases() -> list[tuple[int, dict[str, Any]]]:
    return [(i, json.loads(line)) for i, line in enumerate(case_lines("sft_chats"), 1) if line.strip()]


@pytest.mark.parametrize("line, row", chat_cases(), ids=lambda v: f"line {v}" if isinstance(v, int) else v["expect"][:30])
@pytest.mark.parametrize("name", ["chatml", "headers", "no marks", "sentencepiece, built in"])
def test_each_handed_chat_is_trained_on_its_answers_and_nothing_else(line: int, row: dict[str, Any], name: str) -> None:
    """The answers of a row are its non-empty assistant turns; a row without one is not used, and named."""
    make, (before, after), end = CASES[name]
    codec = Codec(make())
    loaded = conversations.load(str(case_file("sft_chats")))
    answers = [m["content"] for m in row["messages"] if m["role"] == "assistant" and (m["content"] or "").strip()]
    for train_on in ("assistant", "last"):
        encoded = encode_conversations(loaded, codec, max_length=None, train_on=train_on)  # type: ignore[arg-type]
        made = [e for e in encoded.examples if e.source is not None and e.source.line == line]
        about = [p for p in [*loaded.problems, *encoded.problems] if p.source.line == line]
        if not answers:
            assert made == []
            assert [p.action for p in about if p.action in ("drop", "reject")]
            continue
        wanted = answers if train_on == "assistant" else answers[-1:]
        if "trim" in str(codec.tokenizer.chat_template):
            wanted = [a.strip() for a in wanted]
        assert len(made) == 1
        assert same(codec, trained_text(codec, made[0]), "".join(before + a + after + end for a in wanted))
        shown = "".join(whole_text(codec, made[0]).split())
        last = max(i for i, m in enumerate(row["messages"]) if m["role"] == "assistant" and m["content"] in answers)
        assert all("".join((m["content"] or "").split()) in shown for m in row["messages"][: last + 1])  # no turn is lost
        if row["expect"].startswith("train on: "):
            said_text = row["expect"].removeprefix("train on: ").rpartition(" + end mark")[0]
            assert same(codec, trained_text(codec, made[0]), before + said_text + after + end)


def test_the_handed_lengths_train_every_answer_token_and_the_end() -> None:
    loaded = conversations.load(str(case_file("sft_lengths")))
    assert loaded.problems == []
    raw = [json.loads(line) for line in case_lines("sft_lengths") if line.strip()]
    for name in ("chatml", "built in", "sentencepiece"):
        codec = Codec(CASES[name][0]())
        encoded = encode_conversations(loaded, codec, max_length=None)
        assert encoded.problems == []
        for example, row in zip(encoded.examples, raw, strict=True):
            assert codec.decode(example.answers[0][:-1]).strip() == row["completion"]
            assert example.answers[0][-1] == codec.tokenizer.eos_token_id
            assert all(example.trained[0])
