"""The command line as a user meets it: fast help, one sentence for a mistake, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import save_tiny
from tether import cli
from tether.errors import UserError
from tether.run import Run

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "pydantic", "numpy", "pyarrow")


def loaded_by(code: str) -> list[str]:
    """Which of the heavy packages a piece of code has imported."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print([m for m in {HEAVY} if m in sys.modules])"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return list(eval(done.stdout.splitlines()[-1]))


def test_importing_tether_loads_nothing_heavy() -> None:
    assert loaded_by("import tether") == []


def test_help_loads_nothing_heavy() -> None:
    assert loaded_by("from tether.cli import run; run(['--help'])") == []


def test_help_of_a_training_command_lists_its_settings_without_torch(capsys: Any) -> None:
    assert "torch" not in loaded_by("from tether.cli import run; run(['dpo', '--help'])")
    assert cli.run(["dpo", "--help"]) == 0
    told = capsys.readouterr().out
    for words in ("--model", "loss_type", "lora.rank", "min_edit_distance", "0.1; 5 in dpo_norm; 2 in simpo"):
        assert words in told


def test_help_is_quick() -> None:
    """Processor time, best of three: the clock on the wall also counts what else the machine does."""

    def seconds(*words: str) -> float:
        def spent() -> float:
            times = os.times()
            return times.children_user + times.children_system

        best = 9.0
        for _ in range(3):
            before = spent()
            subprocess.run([sys.executable, *words], capture_output=True, check=True, cwd=ROOT)
            best = min(best, spent() - before)
        return best

    assert seconds("-c", "import tether") < 0.3
    assert seconds("-m", "tether", "--help") < 0.5


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_can_be_loaded_and_shows_its_help(command: str, capsys: Any) -> None:
    assert cli.run([command, "--help"]) == 0
    assert "Usage" in capsys.readouterr().out


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_and_option_is_in_the_documentation(command: str) -> None:
    page = (ROOT / "docs/cli.md").read_text()
    section = re.search(rf"^## `tether {command}`.*?(?=^## |\Z)", page, re.M | re.S)
    assert section, f"docs/cli.md has no section on tether {command}"
    for parameter in cli.load(command).params:
        for option in parameter.opts:
            if option.startswith("--") and option != "--help":
                assert option in section[0], f"docs/cli.md does not mention {option} of tether {command}"


def test_a_users_mistake_is_one_sentence_and_exit_code_2(capsys: Any) -> None:
    assert cli.run(["resume", "nowhere"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: nowhere: no such folder")
    assert "Traceback" not in told.err


def test_an_unknown_command_is_exit_code_2() -> None:
    assert cli.run(["drpo"]) == 2


def test_an_option_that_is_a_setting_is_refused_with_the_right_spelling(capsys: Any) -> None:
    assert cli.run(["dpo", "--model", "m", "--learning-rate", "1e-6"]) == 2
    assert "learning_rate=" in capsys.readouterr().err


def test_an_unexpected_fault_leaves_its_traceback_in_a_file(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    def broken(*words: Any, **flags: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(cli, "app", broken)
    assert cli.run(["dpo"]) == 1
    told = capsys.readouterr().err
    path = Path(re.search(r"The traceback is in (\S+)", told)[1])  # type: ignore[index]
    assert "out of luck" in path.read_text()
    assert "Traceback" not in told


def test_the_version_is_told(capsys: Any) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tether 0.")


# A run from the command line, interrupted and resumed --------------------------------------------------------------------


def write_pairs(path: Path, n: int = 14) -> Path:
    def row(i: int) -> dict[str, Any]:
        prompt = [{"role": "user", "content": f"w{6 + i} w{7 + i}"}]
        chosen, rejected = [{"role": "assistant", "content": text} for text in ("w10 w11 w12", f"w{20 + i} w21")]
        return {"prompt": prompt, "chosen": [chosen], "rejected": [rejected]}

    path.write_text("".join(json.dumps(row(i)) + "\n" for i in range(n)))
    return path


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))
    save_tiny(tmp_path / "tiny")
    write_pairs(tmp_path / "pairs.jsonl")
    return tmp_path


SMALL = ["--model", "tiny", "--data", "pairs.jsonl", "precision=fp32", "batch_size=4", "learning_rate=1e-3", "threads=1"]


def test_a_run_from_the_command_line_is_whole(workplace: Path, capsys: Any) -> None:
    assert cli.run(["dpo", *SMALL, "--run", "r", "--steps", "3"]) == 0
    told = capsys.readouterr()
    assert told.out.strip() == "r/model"
    run = Run.open("r")
    assert run.finished
    assert [row["step"] for row in run.metrics()] == [1, 2, 3]
    assert run.recorded("data")[0]["files"] == ["pairs.jsonl"]
    assert run.recipe.max_steps == 3
    assert cli.run(["dpo", *SMALL, "--run", "r", "--steps", "3"]) == 2
    assert "tether resume r" in capsys.readouterr().err
    assert cli.run(["resume", "r"]) == 0, "a finished run is told to be so"


def test_a_mistake_in_the_data_leaves_a_run_that_can_be_begun_again(workplace: Path, capsys: Any) -> None:
    (workplace / "bad.jsonl").write_text('{"prompt": "a", "chosen": "b"}\n')
    assert cli.run(["dpo", "--model", "tiny", "--data", "bad.jsonl", "--run", "r", "precision=fp32"]) == 2
    assert "bad.jsonl" in capsys.readouterr().err
    assert cli.run(["dpo", *SMALL, "--run", "r", "--steps", "1"]) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent to a POSIX process")
def test_ctrl_c_saves_and_resume_gives_the_run_that_was_not_stopped(workplace: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [*SMALL, "--steps", "400", "lr_scheduler=constant"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tether", "dpo", *words, "--run", "r"], stderr=subprocess.PIPE, text=True, env=environment, cwd=workplace
    )
    assert process.stderr is not None
    metrics = workplace / "r/metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    told = process.stderr.read()
    assert process.wait(60) == 130
    assert "tether resume r" in told
    stopped = Run.open(workplace / "r")
    assert not stopped.finished
    done = len(stopped.metrics())
    assert 3 <= done < 400
    assert stopped.checkpoints()[-1].name == f"{done:06d}"
    # As if the plan had been a few steps more: both runs are brought to the same end.
    end = done + 3
    recipe = workplace / "r/recipe.yaml"
    recipe.write_text(re.sub(r"max_steps: 400", f"max_steps: {end}", recipe.read_text()))
    assert cli.run(["resume", "r"]) == 0
    assert cli.run(["dpo", *SMALL, "--steps", str(end), "lr_scheduler=constant", "--run", "whole"]) == 0
    resumed, whole = Run.open("r").metrics(), Run.open("whole").metrics()
    assert [row["step"] for row in resumed] == list(range(1, end + 1))
    assert [(row["step"], row["loss"]) for row in resumed] == [(row["step"], row["loss"]) for row in whole], "to the last bit"


def test_python_callers_get_the_exception_itself() -> None:
    with pytest.raises(UserError):
        Run.open("nowhere")
