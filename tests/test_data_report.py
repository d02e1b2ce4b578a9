"""`tether data`: the figures are right, and the exit code says whether a run would take the file."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import toy_text as toy
from tests.toy_text import case_file, case_lines, expectations
from tether.cli import run
from tether.codec import Codec
from tether.data_report import LengthBias, Spread, length_bias, make_report
from tether.errors import UserError

PAIRS = [
    {"prompt": "w1 w2", "chosen": "w3 w4 w5", "rejected": "w6"},
    {"prompt": "w1", "chosen": "w3 w4", "rejected": "w6 w7 w8 w9"},
    {"prompt": "w1 w2 w3", "chosen": "w3 w4 w5 w6 w7 w8", "rejected": "w6 w7"},
]


def write(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def test_lengths_and_their_bond_with_the_label_by_hand(tmp_path: Path) -> None:
    """In tokens with the end token: chosen 4, 3, 7, rejected 2, 5, 3; 2 of 3 chosen are longer.

    Labels 1 1 1 0 0 0, lengths 4 3 7 2 5 3: mean 4, covariance sum 0.5 x (0 - 1 + 3) - 0.5 x (-2 + 1 - 1) = 2,
    label sum of squares 1.5, length sum of squares 0 + 1 + 9 + 4 + 1 + 1 = 16; r = 2 / sqrt(24).
    """
    report, _ = make_report(write(tmp_path, PAIRS), codec=Codec(toy.word_tokenizer()))
    assert (report.kind, report.unit, report.rows_in_file, report.rows_usable) == ("preference", "tokens", 3, 3)
    assert report.lengths == {"prompt": Spread(1, 2, 2.9, 3), "chosen": Spread(3, 4, 6.7, 7), "rejected": Spread(2, 3, 4.8, 5)}
    bias = report.length_bias
    assert bias is not None
    assert bias.better_longer == pytest.approx(2 / 3)
    assert bias.worse_longer == pytest.approx(1 / 3)
    assert bias.correlation == pytest.approx(2 / math.sqrt(24))


def test_a_label_that_length_gives_away_is_said(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "chosen": "long " * (20 + i), "rejected": "short"} for i in range(5)]
    report, _ = make_report(write(tmp_path, rows))
    assert report.unit == "characters"
    assert report.length_bias is not None
    assert report.length_bias.strong
    assert any("length" in note for note in report.notes)
    assert not length_bias([3, 4], [4, 3], paired=True).strong
    assert length_bias([1, 2], [1, 2], paired=False) == LengthBias(None, None, 1.5, 1.5, 0.0)


def test_what_a_limit_would_do_is_counted(tmp_path: Path) -> None:
    path = write(tmp_path, PAIRS)
    codec = Codec(toy.word_tokenizer())
    kept, _ = make_report(path, codec=codec, max_length=5)
    assert (kept.too_long, kept.rows_usable) == (3, 3)
    assert kept.counts() == {("truncate", "cut"): 3}
    dropped, _ = make_report(path, codec=codec, max_length=5, truncation="drop")
    assert dropped.rows_usable == 0
    assert dropped.counts() == {("drop", "too_long"): 3}
    with pytest.raises(UserError, match="max_length"):
        make_report(path, max_length=5)


KINDS = [
    ("preference", {"prompt": "q", "chosen": "a", "rejected": "b"}),
    ("preference", {"prompt": "q", "answers": ["a", "b"], "ranks": [1, 2]}),
    ("feedback", {"prompt": "q", "completion": "a", "label": True}),
    ("sft", {"prompt": "q", "completion": "a"}),
    ("sft", {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}),
    ("sft", {"text": "a document"}),
    ("prompt", {"prompt": "q", "answer_key": 4}),
]


@pytest.mark.parametrize("kind, row", KINDS)
def test_the_kind_is_seen_from_the_columns_or_given(tmp_path: Path, kind: str, row: dict[str, Any]) -> None:
    for codec in (None, Codec(toy.byte_tokenizer(toy.CHATML))):
        report, _ = make_report(write(tmp_path, [row]), codec=codec)
        assert (report.kind, report.rows_usable) == (kind, 1)
    assert make_report(write(tmp_path, [row]), kind="prompt" if "prompt" in row else None)[0].rows_loaded == 1
    with pytest.raises(UserError, match="no kind"):
        make_report(write(tmp_path, [row]), kind="pairs")


def test_plain_text_for_a_chat_model_is_noted(tmp_path: Path) -> None:
    path = write(tmp_path, PAIRS)
    chat, _ = make_report(path, codec=Codec(toy.byte_tokenizer(toy.CHATML)))
    assert any("chat template" in note for note in chat.notes)
    base, _ = make_report(path, codec=Codec(toy.byte_tokenizer()))
    assert not any("chat template" in note for note in base.notes)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    toy.byte_tokenizer(toy.CHATML).save_pretrained(folder)
    return str(folder)


def test_the_command_shows_what_is_in_a_file(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, [*PAIRS, PAIRS[0], {**PAIRS[0], "rejected": PAIRS[0]["chosen"]}])
    assert run(["data", path, "--model", model, "--max-length", "12"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "5 rows read as preference data",
        "prompt (5)",
        "length in tokens",
        "p95",
        "duplicate",
        "identical",
        f"{path}:4",
        f"{path}:5",
        "correlation",
    ):
        assert words in shown, shown


def test_the_command_as_json_is_json_and_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(case_file("prefs_weird"))
    assert run(["data", path, "--json", "--on-bad-rows", "drop"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["files"] == [path]
    named = {(p["line"], p["action"]) for p in report["problems"]}
    for case in expectations("prefs_weird"):
        if case["expect"] == "reject_with_line_number":
            assert (case["line"], "reject") in named
    assert sum(c["rows"] for c in report["counts"]) == len({(p["line"], p["action"], p["kind"]) for p in report["problems"]})
    assert report["rows_in_file"] == sum(bool(line.strip()) for line in case_lines("prefs_weird"))


def test_the_exit_code_is_2_for_what_a_run_would_refuse(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    bad = write(tmp_path, [*PAIRS, {"prompt": "q", "chosen": "a"}], "bad.jsonl")
    useless = write(tmp_path, [{"prompt": "q", "chosen": "a", "rejected": "a"}], "useless.jsonl")
    for words in (
        ["data", str(empty)],
        ["data", str(tmp_path / "nothing.jsonl")],
        ["data", bad],
        ["data", useless],
        ["data", write(tmp_path, PAIRS), "--model", model, "--max-length", "3"],
        ["data", write(tmp_path, PAIRS), "--truncation", "middle", "--model", model, "--max-length", "9"],
        ["data", write(tmp_path, PAIRS), "--on-bad-rows", "ignore"],
        ["data", write(tmp_path, PAIRS), "--model", str(tmp_path / "nowhere.gguf")],
    ):
        assert run(words) == 2, words
        assert "error: " in capsys.readouterr().err
    assert run(["data", bad, "--on-bad-rows", "drop"]) == 0


def test_looking_at_a_file_needs_no_torch(tmp_path: Path) -> None:
    code = (
        f"import sys; from tether.cli import run; assert run(['data', {write(tmp_path, PAIRS)!r}]) == 0; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.smollm2
def test_a_real_tokenizer_counts_and_trains_what_it_should(tmp_path: Path) -> None:
    from tether import conversations
    from tether.chat import encode_conversations
    from tether.models import fetch_smollm2, load_tokenizer

    codec = Codec(load_tokenizer(fetch_smollm2()))
    report, _ = make_report(str(case_file("prefs_weird")), codec=codec, max_length=1024)
    assert ("drop", "no_answer_token") in report.counts() or ("truncate", "cut") in report.counts()
    encoded = encode_conversations(conversations.load(str(case_file("sft_chats"))), codec, max_length=1024)
    first = encoded.examples[0]
    assert codec.decode(first.answers[0], control=True).endswith("<|im_end|>")
    assert first.answers[0][-1] == codec.tokenizer.eos_token_id
    assert codec.decode(first.prompt, control=True).endswith("<|im_start|>assistant\n")
