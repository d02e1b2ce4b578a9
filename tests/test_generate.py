"""`tether generate` and `tether chat` from end to end on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import save_tiny, tiny_config, tiny_tokenizer
from tether.answers import Speaker
from tether.cli import run
from tether.commands.generate import Chat
from tether.engines.sampling import Sampling
from tether.train_recipe import LoraConfig

FAST = ["--max-new-tokens", "6", "--precision", "fp32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("m") / "model"))


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_answers_to_a_file(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plain prompts and messages; every row has its prompt, its text, why it ended and how long it is."""
    prompts = tmp_path / "p.jsonl"
    chat = [{"role": "user", "content": "w9"}]
    prompts.write_text(json.dumps({"prompt": "w10 w11"}) + "\n" + json.dumps({"prompt": chat, "gold": 4}) + "\n")
    out = tmp_path / "out.jsonl"
    assert run(["generate", folder, str(prompts), "--out", str(out), "-n", "2", *FAST]) == 0
    got = rows(out.read_text())
    assert [r["prompt"] for r in got] == ["w10 w11"] * 2 + [chat] * 2
    assert [r["sample"] for r in got] == [0, 1, 0, 1]
    assert [r["prompt_tokens"] for r in got] == [2, 2, 4, 4]
    for r in got:
        assert r["finish_reason"] in ("stop", "length")
        assert 1 <= r["completion_tokens"] <= 6
        assert len(r["completion"].split()) == r["completion_tokens"] - (r["finish_reason"] == "stop")
    assert "4 answers" in capsys.readouterr().err


def test_the_same_seed_gives_the_same_file_whatever_the_slots(folder: str, tmp_path: Path) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("w10 w11\n\nw12\nw13 w14 w15\n")
    files = []
    for i, slots in enumerate(("1", "64")):
        files.append(tmp_path / f"{i}.jsonl")
        assert run(["generate", folder, str(prompts), "--out", str(files[-1]), "-n", "3", "--slots", slots, *FAST]) == 0
    assert files[0].read_text() == files[1].read_text()
    assert len(rows(files[0].read_text())) == 9


def test_words_on_the_command_line_are_asked_as_messages_unless_raw(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", folder, "--prompt", "w10", "--prompt", "w11", "--system", "w8", *FAST]) == 0
    got = rows(capsys.readouterr().out)
    assert got[0]["prompt"] == [{"role": "system", "content": "w8"}, {"role": "user", "content": "w10"}]
    assert run(["generate", folder, "--prompt", "w10", "--raw", *FAST]) == 0
    assert rows(capsys.readouterr().out)[0]["prompt"] == "w10"


def test_a_model_without_a_template_continues_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = str(save_tiny(tmp_path / "bare", tokenizer=tiny_tokenizer(template=None)))
    assert run(["generate", bare, "--prompt", "w10", *FAST]) == 0
    assert rows(capsys.readouterr().out)[0]["prompt"] == "w10"


def test_the_tokenizers_padding_side_plays_no_part(folder: str, tmp_path: Path) -> None:
    """Both sides written into the tokenizer file: the same answers to prompts of different length."""
    prompts = tmp_path / "p.txt"
    prompts.write_text("w10\nw11 w12 w13 w14 w15 w16 w17\n")
    found = []
    for side in ("left", "right"):
        tokenizer = tiny_tokenizer()
        tokenizer.padding_side = side
        model = save_tiny(tmp_path / side, tokenizer=tokenizer)
        out = tmp_path / f"{side}.jsonl"
        assert run(["generate", str(model), str(prompts), "--out", str(out), *FAST]) == 0
        found.append(out.read_text())
    assert found[0] == found[1]


def test_an_adapter_folder_answers(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tether.policy import Policy

    policy = Policy.load(folder, precision="fp32", lora=LoraConfig(rank=2))
    adapter = policy.save(tmp_path / "adapter")
    assert run(["generate", str(adapter), "--prompt", "w10", *FAST]) == 0
    assert len(rows(capsys.readouterr().out)) == 1


@pytest.mark.parametrize(
    "words, told",
    [
        ([], "either a file of prompts or --prompt"),
        (["gone.jsonl"], "there is no such file"),
        (["--prompt", "w10", "--temperature", "-1"], "temperature"),
        (["--prompt", "w10", "--top-p", "0"], "top_p"),
        (["--prompt", "w10", "-n", "0"], "n must be at least 1"),
        (["--prompt", "w10", "--max-new-tokens", "5000"], "positions"),
        (["--prompt", "w10", "--on-bad-rows", "ignore"], "no 'ignore'"),
        (["bad.jsonl"], "bad.jsonl:2"),
        (["empty.txt"], "no prompt"),
        (["long.jsonl"], "long.jsonl:2"),
        (["--prompt", "w10", "--out", "."], "folder"),
    ],
)
def test_mistakes_are_one_sentence(
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "w10"}\n{"prompt": null}\n')
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "long.jsonl").write_text('{"prompt": "w10"}\n' + json.dumps({"prompt": "w10 " * 2100}) + "\n")
    assert run(["generate", folder, *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) <= 6


def test_a_model_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "./gone", "--prompt", "x"]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_bad_rows_may_be_dropped_and_are_counted(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "w10"}\n{"prompt": null}\n')
    assert run(["generate", folder, str(path), "--on-bad-rows", "drop", *FAST]) == 0
    told = capsys.readouterr()
    assert len(rows(told.out)) == 1
    assert "1 rows of" in told.err


# -- chat --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def speaker(folder: str) -> Speaker:
    return Speaker(folder, precision="fp32", slots=1)


def talk(speaker: Speaker, lines: list[Any], **options: Any) -> tuple[Chat, str]:
    """A conversation from scripted lines; an exception among them is raised in place of a line."""
    script: Iterator[Any] = iter(lines)
    written: list[str] = []

    def read(prompt: str) -> str:
        line = next(script, EOFError())
        if isinstance(line, BaseException):
            raise line
        return str(line)

    chat = Chat(speaker, Sampling(max_new_tokens=5, temperature=0.7), read=read, write=written.append, **options)
    chat.run(interactive=True)
    return chat, "".join(written)


def test_a_conversation_has_a_history(speaker: Speaker) -> None:
    chat, written = talk(speaker, ["w10", "", "w11 w12"], system="w9")
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    for message in chat.messages[2::2]:
        assert message["content"] in written


def test_reset_exit_and_unknown_commands(speaker: Speaker, capsys: pytest.CaptureFixture[str]) -> None:
    chat, _ = talk(speaker, ["w10", "/reset", "/what", "w11", "/exit", "w12"], system="w9")
    assert [m["content"] for m in chat.messages if m["role"] != "assistant"] == ["w9", "w11"]
    assert "no command /what" in capsys.readouterr().err


def test_a_conversation_is_saved_as_a_row_to_train_on(speaker: Speaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "talk.jsonl"
    chat, _ = talk(speaker, ["/save", f"/save {path}", "w10", f"/save {path}", "/reset", "w11", f"/save {path}", f"/save {tmp_path}"])
    saved = rows(path.read_text())
    assert [r["messages"][0]["content"] for r in saved] == ["w10", "w11"]
    assert saved[1]["messages"] == chat.messages
    told = capsys.readouterr().err
    assert "name a file" in told
    assert "no reply yet" in told
    assert "cannot be written" in told


def test_ctrl_c_stops_a_reply_and_keeps_what_was_said(speaker: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    from tether.engines.local import LocalSampler

    real = LocalSampler.sample

    def interrupted(self: Any, requests: Any, on_token: Any = None) -> Any:
        heard = 0

        def hear(*token: int) -> None:
            nonlocal heard
            on_token(*token)
            heard += 1
            if heard == 2:
                raise KeyboardInterrupt

        return real(self, requests, hear)

    monkeypatch.setattr(LocalSampler, "sample", interrupted)
    chat, written = talk(speaker, ["w10", KeyboardInterrupt()])
    assert chat.messages[-1]["role"] == "assistant"
    if len(chat.messages[-1]["content"].split()) == 2:
        assert "[stopped]" in written
    monkeypatch.setattr(LocalSampler, "sample", real)
    assert len(talk(speaker, ["w10"])[0].messages) == 2  # the sampler works on


def test_a_full_conversation_is_told_and_can_be_started_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = Speaker(str(save_tiny(tmp_path / "small", tiny_config(max_position_embeddings=24))), precision="fp32", slots=1)
    chat, _ = talk(small, ["w10 " * 40, "/reset", "w11"])
    assert "/reset" in capsys.readouterr().err
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]


def test_replies_are_reproducible(speaker: Speaker) -> None:
    assert talk(speaker, ["w10", "w11"], seed=3)[1] == talk(speaker, ["w10", "w11"], seed=3)[1]
    assert talk(speaker, ["w10", "w11"], seed=3)[1] != talk(speaker, ["w10", "w11"], seed=4)[1]


def test_piped_input_works(folder: str) -> None:
    """The whole program with a pipe: replies on standard output, one a line, no prompt signs; the end of input leaves."""
    words = [sys.executable, "-m", "tether", "chat", folder, "--max-new-tokens", "4", "--precision", "fp32"]
    done = subprocess.run(words, input="w10\nw11\n", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    assert ">" not in done.stdout
