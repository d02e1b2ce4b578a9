"""Bad rows through the real commands, settings through every door, scripts without a main guard, memory of a whole run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_config_slips import ROWS as SLIPS
from tests.test_config_slips import as_words, command_for
from tests.tiny import save_tiny, tiny_config
from tests.toy_text import CHATML, byte_tokenizer, case_file, case_lines, expectations
from tests.whole_runs import start, words, write_rows
from tether.cli import run as tether
from tether.run import Run

ROOT = str(Path(__file__).parents[1])


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reads any text, byte by byte where it must."""
    tokenizer = byte_tokenizer(CHATML, eos="<|im_end|>")
    config = tiny_config(len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return save_tiny(tmp_path_factory.mktemp("text") / "model", config, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


# -- bad rows are found before training (axolotl#290, trl#1073) --------------------------------------------------------

FILES = {"prefs_weird": ["dpo"], "jsonl_broken": ["dpo"], "kto_rows": ["dpo", "loss_type=kto"]}


def arguments(text_model: Path, data: Path, folder: Path, *more: str) -> list[str]:
    return ["--model", str(text_model), "--data", str(data), "--run", str(folder), "--steps", "1", "precision=fp32", "trackers=[]", *more]


@pytest.mark.parametrize("name", FILES)
def test_every_bad_row_of_a_file_is_named_before_training_or_counted_and_left_out(
    text_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    command, *settings = FILES[name]
    path = case_file(name)
    bad = [c["line"] for c in expectations(name) if c["expect"] == "reject_with_line_number"]
    assert tether([command, *arguments(text_model, path, tmp_path / "strict", *settings)]) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert "cannot be used" in told
    assert all(f"{path}:{line}: " in told for line in bad[:3])
    strict = Run.open(tmp_path / "strict")
    assert strict.metrics() == []
    named = [n["text"] for n in strict.notices()]
    assert all(any(text.startswith(f"{path}:{line}: ") for text in named) for line in bad), "the run's notices name them all"

    assert tether([command, *arguments(text_model, path, tmp_path / "lenient", *settings, "on_bad_rows=drop", "max_length=1024")]) == 0
    lenient = Run.open(tmp_path / "lenient")
    notices = [(n["text"], n.get("action")) for n in lenient.notices()]
    for case in expectations(name):
        about = {action for text, action in notices if text.startswith(f"{path}:{case['line']}: ")}
        if case["expect"] in ("reject_with_line_number", "drop_counted", "reject_or_drop_counted", "accept_once_report_duplicate"):
            assert about & {"reject", "drop"}, case
        if case["expect"] == "warn":
            assert about == {"warn"}, case
    lost = len({t.split(": ")[0] for t, action in notices if action in ("reject", "drop")})
    read = sum(bool(line.strip()) for line in case_lines(name))
    summary = lenient.summary() or {}
    assert summary.get("pairs", summary.get("rows")) == read - lost, "every line is trained on or counted as lost"
    assert tether(["report", str(lenient.folder)]) == 0
    assert f"{lost} row{'s' if lost > 1 else ''} left out" in (lenient.folder / "report.html").read_text()


@pytest.mark.parametrize("name", ["prefs_weird", "jsonl_broken", "kto_rows", "sft_chats"])
def test_each_line_alone_gives_a_report_or_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    for number, line in enumerate(case_file(name).read_bytes().split(b"\n"), 1):
        alone = tmp_path / f"line{number}.jsonl"
        alone.write_bytes(line)
        for policy in ("refuse", "drop"):
            code = tether(["data", str(alone), "--on-bad-rows", policy])
            shown = capsys.readouterr()
            assert code in (0, 2), (number, shown)
            assert "Traceback" not in shown.err
            assert (code == 2) == shown.err.startswith("error: ")
            assert code == 0 or str(alone) in shown.err


def test_an_empty_file_a_folder_and_a_missing_file_are_told(text_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, folder = tmp_path / "empty.jsonl", tmp_path / "folder"
    empty.write_text("\n\n")
    folder.mkdir()
    for data, said in ((empty, "holds no row"), (folder, "folder"), (tmp_path / "emty.jsonl", "no such file")):
        assert tether(["dpo", *arguments(text_model, data, tmp_path / "run")]) == 2
        told = capsys.readouterr().err
        assert said in told
        assert str(data) in told
        assert "Traceback" not in told
    good = write_rows(folder / "rows.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    assert tether(["dpo", *arguments(text_model, folder, tmp_path / "run")]) == 0, "a folder is its data files"
    assert good.exists()


# -- settings (unsloth#10452, cruijff_kit#505) -------------------------------------------------------------------------

COMMANDS = {"sft", "reward", "dpo"}


@pytest.mark.parametrize("row", SLIPS, ids=lambda row: json.dumps(row["given"]))
def test_a_slip_stops_the_training_command_itself_by_file_and_by_word(
    row: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = command_for(row["given"], row["expect"])
    if command not in COMMANDS:
        command = "dpo"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"model": "m", "data": "d.jsonl", **row["given"]}))
    for words_given in ([str(recipe)], ["model=m", "data=d.jsonl", *as_words(row["given"])]):
        assert tether([command, *words_given]) == 2
        told = capsys.readouterr().err
        assert "Traceback" not in told
        assert any(key in told for key in row["given"]), told
        assert ("recipe.yaml:" in told) == (words_given[0] == str(recipe))
    assert [p.name for p in tmp_path.iterdir()] == ["recipe.yaml"], "nothing was started"


def test_the_whole_effective_recipe_is_saved_with_the_run(model: Path, tmp_path: Path) -> None:
    from tether.recipe import RECIPES

    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": words(i, 2), "completion": words(i, 2)} for i in range(4)])
    run, _ = start("sft", model, data, tmp_path / "run", max_steps=1, lora={"rank": 2})
    kept = yaml.safe_load((run.folder / "recipe.yaml").read_text())
    flat = {path for key, value in kept.items() for path in ([f"{key}.{k}" for k in value] if isinstance(value, dict) else [key])}
    missing = {p for p in RECIPES["sft"].paths() if p not in flat and p not in kept}
    assert not missing
    assert RECIPES["sft"](**run.settings) == run.recipe


# -- scripts without a main guard (unsloth#3999, #4490) ----------------------------------------------------------------

SCRIPT = """
import multiprocessing, sys
multiprocessing.set_start_method("spawn")
sys.path.insert(0, {root!r})
print("started")
import torch
torch.set_num_threads(1)
from tests.whole_runs import start
from pathlib import Path
from tether.reward import Rewards
from tether.rewards.functions import reward

run, summary = start("dpo", Path({model!r}), Path({data!r}), Path({run!r}), max_steps=2)

def make():
    def brevity(completions, **columns):
        return [-float(len(c)) for c in completions]
    return brevity

rewards = Rewards([reward(lambda completions, **columns: [1.0] * len(completions), name="one"), reward(make()), reward("math", workers=2)])
scored = rewards.score(["q", "q"], ["ab", "so \\\\boxed{{4}}"], {{"answer": ["4", "4"]}})
print("scored", scored.names, scored.matrix)
rewards.close()
print("finished", summary["steps"])
"""


def test_a_script_without_a_main_guard_trains_and_scores_under_spawn(model: Path, tmp_path: Path) -> None:
    """Reading, training, and rewards given as a lambda, as a local function and with workers: the script runs once."""
    from tests.whole_runs import rows_for

    data = write_rows(tmp_path / "rows.jsonl", rows_for("dpo", 8))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=ROOT, model=str(model), data=str(data), run=str(tmp_path / "run")))
    environment = {**os.environ, "TETHER_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["started", "scored", "finished"]
    assert "one" in done.stdout
    assert "brevity" in done.stdout


def test_a_number_of_workers_is_kept_or_refused_with_the_reason() -> None:
    from tether.errors import UserError
    from tether.rewards.functions import reward

    made = reward("math", workers=3)
    assert made.function._workers.n == 3  # type: ignore[attr-defined]
    for name in ("math", "code"):
        with pytest.raises(UserError, match="at least one worker"):
            reward(name, workers=0)


# -- memory (trl#3678, OpenRLHF#718) -----------------------------------------------------------------------------------

MEMORY = """
from tests.whole_runs import start
made, _ = start("dpo", model, data, run_folder, max_steps=1, batch_size=1, tokens_per_micro_batch=10_000)
row = made.metrics()[0]
print(json.dumps([peak() - marks[0], row["loss"], row["grad_norm"]]))
"""


@pytest.mark.slow
def test_a_whole_dpo_run_with_a_large_vocabulary_never_holds_the_table_of_scores(tmp_path: Path) -> None:
    """Vocabulary 150,000, width 64, one pair of 512 tokens a side: a float32 table is 586 MiB, and the plain way keeps three to
    four. The whole run, reference scores and the start-up check included, stays below 1.5 of them over the loaded model."""
    from tests.whole_runs import measured_alone, tokenizer_of

    tokenizer = tokenizer_of([f"v{i}" for i in range(149_997)])
    config = tiny_config(150_000, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128)
    folder = save_tiny(tmp_path / "model", config, tokenizer=tokenizer)

    def text(start_at: int, n: int) -> str:
        return " ".join(f"v{(start_at + 7919 * i) % 149_997}" for i in range(n))

    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": text(1, 256), "chosen": text(2, 255), "rejected": text(3, 255)}])
    extra, loss, norm = measured_alone(MEMORY, folder, data, tmp_path / "run", tmp_path / "cache")
    assert loss == pytest.approx(0.693147, abs=1e-5)
    assert norm > 0
    # Gradients and moments of the weights (3 x 37 MiB) and the checkpoint's copy are in it.
    assert extra < 1.5 * 586, f"{extra:.0f} MiB"
