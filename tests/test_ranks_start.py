"""Ranks as a user starts and loses them: `--ranks`, torchrun, Ctrl-C, a mistake, a rank that is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from tests.ranks_runs import gap
from tests.tiny import save_tiny
from tests.whole_runs import rows_for, write_rows
from tether.errors import RankLost, UserError
from tether.launch import Stop, launch
from tether.peers import Peers
from tether.run import Run

ROOT = Path(__file__).parents[1]
LIMIT_S = 120.0  # for processes to start on a busy machine
ENDED_S = 30.0  # for all ranks to end when one is gone


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    settings = {
        "command": "sft", "model": str(save_tiny(root / "model")), "data": str(write_rows(root / "rows.jsonl", rows_for("sft"))),
        "max_steps": 6, "save_steps": 2, "batch_size": 6, "learning_rate": 3e-4, "precision": "fp32", "trackers": [], "log_every": 1,
    }  # fmt: skip
    path = root / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def in_the_background() -> None:
    """As a job that a script starts with &."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Command:
    """`tether WORDS` in a process of its own, in a session of its own."""

    def __init__(self, *words: str, launcher: tuple[str, ...] = (), preexec: Callable[[], object] | None = None) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *launcher, *(() if launcher else ("tether",)), *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True, preexec_fn=preexec,
        )  # fmt: skip

    def end(self, within: float = LIMIT_S) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=within)
        return self.process.returncode, out, err

    def ranks(self) -> list[psutil.Process]:
        """The workers, by process id: the first was started first."""
        found = [
            p for p in psutil.Process(self.process.pid).children(recursive=True) if "--ranks" not in p.cmdline() and "sft" in p.cmdline()
        ]
        return sorted(found, key=lambda p: p.pid)

    def wait_for(self, run: Path, steps: int) -> None:
        """Until so many steps are done."""
        deadline = time.monotonic() + LIMIT_S
        while not ((run / "metrics.jsonl").exists() and len((run / "metrics.jsonl").read_text().splitlines()) >= steps):
            assert self.process.poll() is None, self.end()
            assert time.monotonic() < deadline, "no step was made"
            time.sleep(0.1)


def ongoing(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def sentences(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("error:")]


def test_two_ranks_make_one_run_and_speak_once(recipe: Path, tmp_path: Path) -> None:
    """The same by `--ranks`, by torchrun and with one process."""
    started = {
        "ranks": Command("sft", str(recipe), "--run", str(tmp_path / "ranks"), "--ranks", "2"),
        "torchrun": Command(
            "--nproc-per-node", "2", "--standalone", "-m", "tether", "sft", str(recipe), f"run={tmp_path / 'torchrun'}",
            launcher=("torch.distributed.run",),
        ),
        "one": Command("sft", str(recipe), "--run", str(tmp_path / "one")),
    }  # fmt: skip
    for name, command in started.items():
        code, out, err = command.end()
        assert (code, out.split()) == (0, [str(tmp_path / name / "model")]), err
        assert err.count("sft 6/6") == 1
        assert not any(word in err for word in ("Traceback", "Warning"))
        run = Run.open(tmp_path / name)
        assert [m["step"] for m in run.metrics()] == [1, 2, 3, 4, 5, 6]
        assert run.finished
    assert gap(tmp_path / "ranks/model", tmp_path / "one/model") <= 1e-5
    assert gap(tmp_path / "torchrun/model", tmp_path / "one/model") <= 1e-5


def test_a_mistake_is_told_once_with_exit_code_2(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("mine")
    (tmp_path / "rows.jsonl").write_text('{"prompt": 1}\n')
    wrong = [
        (("--run", str(tmp_path / "taken")), "is not empty"),  # the first rank alone notices
        (("--run", str(tmp_path / "rows"), f"data={tmp_path / 'rows.jsonl'}"), "rows.jsonl"),  # all do
    ]
    started = [(Command("sft", str(recipe), *words, "--ranks", "2"), told) for words, told in wrong]
    for command, told in started:
        code, out, err = command.end()
        assert (code, out) == (2, ""), err
        assert len(sentences(err)) == 1
        assert told in err
        assert "Traceback" not in err
    assert (tmp_path / "taken/file").read_text() == "mine"


def test_settings_are_checked_before_any_rank_is_started(recipe: Path) -> None:
    code, _, err = Command("sft", str(recipe), "batchsize=3", "--ranks", "2").end()
    assert (code, len(sentences(err))) == (2, 1)
    code, _, err = Command("sft", str(recipe), "--ranks", "0").end()
    assert code == 2
    assert "--ranks" in err


def test_an_interrupt_is_taken_where_it_was_ignored_and_the_end_of_the_terminal_is_not() -> None:
    """A job that a script starts with & finds SIGINT ignored, one under nohup SIGHUP."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        with Stop():
            assert callable(signal.getsignal(signal.SIGINT))
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_interrupt_stops_all_at_one_step_and_the_run_goes_on(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = Command("sft", str(recipe), "--run", str(run), "--ranks", "2", "max_steps=2000", preexec=in_the_background)
    command.wait_for(run, 2)
    command.process.send_signal(signal.SIGINT)
    code, _, err = command.end()
    assert code == 130, err
    assert err.count(f"continue with: tether resume {run}") == 1
    done = len(Run.open(run).metrics())
    assert [int(p.name) for p in Run.open(run).checkpoints()][-1] == done
    (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text().replace("max_steps: 2000", f"max_steps: {done + 3}"))
    code, _, err = Command("resume", str(run)).end()  # on one rank
    assert code == 0, err
    assert len(Run.open(run).metrics()) == done + 3


def test_ranks_save_and_end_when_the_command_that_started_them_is_killed(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = Command("sft", str(recipe), "--run", str(run), "--ranks", "2", "max_steps=2000")
    command.wait_for(run, 2)
    workers = command.ranks()
    command.process.kill()
    psutil.wait_procs(workers, timeout=ENDED_S)
    assert not any(ongoing(p) for p in workers)
    done = len(Run.open(run).metrics())
    assert [int(p.name) for p in Run.open(run).checkpoints()][-1] == done < 2000


def test_a_second_interrupt_ends_ranks_that_cannot_finish_their_step(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = Command("sft", str(recipe), "--run", str(run), "--ranks", "2", "max_steps=2000")
    command.wait_for(run, 2)
    workers = command.ranks()
    workers[1].suspend()
    command.process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert command.process.poll() is None
    command.process.send_signal(signal.SIGINT)
    code, _, err = command.end(ENDED_S)
    assert (code, err.splitlines()[-1]) == (130, "stopped")
    assert not any(ongoing(p) for p in workers)


def test_a_rank_that_is_killed_before_the_ranks_have_met_is_named(recipe: Path, tmp_path: Path) -> None:
    command = Command("sft", str(recipe), "--run", str(tmp_path / "run"), "--ranks", "2")
    deadline = time.monotonic() + LIMIT_S
    while len(workers := command.ranks()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    workers[1].kill()
    code, out, err = command.end(ENDED_S)
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert err.startswith(f"error: rank 1 of 2 (process {workers[1].pid}) is gone: killed by SIGKILL"), err


def test_a_connection_to_another_machine_that_breaks_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sees how a process of another machine ended; gloo's error says only that the connection is closed."""
    monkeypatch.setattr("tether.peers.PAUSE_S", 0.05)
    here = socket.gethostname()
    closed = RuntimeError("[/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4711")
    for others, told in [([(0, here, os.getpid()), (1, "another", 1)], RankLost), ([(0, here, os.getpid())], RuntimeError)]:
        peers = Peers(0, others, store=None)
        peers.found_run(Path("runs/large"))
        with pytest.raises(told) as raised, peers.watched():
            raise closed
        assert ("torchrun ... -m tether resume runs/large" in str(raised.value)) == (told is RankLost)


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(UserError, match="3 ranks need a CUDA device each, and this machine has 2"):
        launch(["sft"], 3)


@pytest.mark.parametrize(("killed", "n"), [(0, 4), (1, 2)])
def test_a_rank_that_is_killed_ends_all_with_one_sentence(recipe: Path, tmp_path: Path, killed: int, n: int) -> None:
    run = tmp_path / "run"
    command = Command("sft", str(recipe), "--run", str(run), "--ranks", str(n), "max_steps=2000")
    command.wait_for(run, 3)
    workers = command.ranks()
    assert len(workers) == n
    workers[killed].kill()
    began = time.monotonic()
    code, out, err = command.end(ENDED_S)
    assert time.monotonic() - began < ENDED_S
    assert not any(ongoing(p) for p in workers)
    assert (code, out) == (1, "")
    assert len(sentences(err)) == 1, err
    assert f"rank {killed} of {n} (process {workers[killed].pid}) is gone: killed by SIGKILL" in err
    assert f"tether resume {run} --ranks {n}" in err
    assert not any(word in err for word in ("Traceback", "RuntimeError"))
    if killed == 1:
        steps = len(Run.open(run).metrics()) + 3
        (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text().replace("max_steps: 2000", f"max_steps: {steps}"))
        code, _, err = Command("resume", str(run), "--ranks", "2").end()
        assert code == 0, err
        assert [m["step"] for m in Run.open(run).metrics()] == list(range(1, steps + 1))
