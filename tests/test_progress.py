"""Progress lines, Ctrl-C, and the curves that trackers keep."""

from __future__ import annotations

import io
import math
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tether.errors import UserError
from tether.interrupt import Interrupt
from tether.progress import Progress, say
from tether.recipe import SFTRecipe
from tether.run import Run
from tether.trackers import Trackers


def test_plain_lines_show_step_numbers_and_time_left() -> None:
    out = io.StringIO()
    with Progress(10, "dpo", stream=out, interval_s=0) as progress:
        progress.update(1, {"loss": 0.6931, "rewards/margins": 0.25, "step_time": 1.0})
        time.sleep(0.01)
        progress.update(2, {"loss": math.nan})
        progress.update(10, {"loss": 0.5})
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("dpo 1/10  loss 0.6931  margin 0.25")
    assert lines[0].endswith("left")
    assert "loss nan" in lines[1], "what is not a number is shown as it is"
    assert lines[2] == "dpo 10/10  loss 0.5"


def test_plain_lines_are_throttled_and_the_last_state_is_always_printed() -> None:
    out = io.StringIO()
    with Progress(1000, "sft", stream=out, interval_s=3600) as progress:
        for step in range(1, 701):
            progress.update(step, {"loss": 1.0})
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/1000", "700/1000"]


def test_log_every_spaces_the_lines() -> None:
    out = io.StringIO()
    with Progress(10, "sft", stream=out, every=4, interval_s=0) as progress:
        for step in range(1, 11):
            progress.update(step)
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1/10", "4/10", "8/10", "10/10"]


def test_a_resumed_job_judges_the_time_left_by_its_own_steps() -> None:
    out = io.StringIO()
    with Progress(100, "dpo", start=90, stream=out, interval_s=0) as progress:
        progress._began -= 10.0  # as if one step had taken ten seconds
        progress.update(91)
    assert out.getvalue().split() == ["dpo", "91/100", "1", "min", "30", "s", "left"]


def test_a_bar_on_a_terminal_lets_other_lines_through() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with Progress(3, "dpo", stream=out) as progress:
        progress.update(1, {"loss": 0.5})
        say("a warning in between")
        with Progress(2, "scoring", stream=out, interval_s=0) as inner:
            inner.update(1)
    assert "a warning in between" in out.getvalue()


def test_the_first_interrupt_asks_and_the_second_stops(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        assert not interrupt.requested
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert "press Ctrl-C again" in capsys.readouterr().err


def test_a_job_scheduler_asks_too() -> None:
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.requested


def test_outside_the_main_thread_nothing_is_installed() -> None:
    found: list[bool] = []

    def work() -> None:
        with Interrupt() as interrupt:
            found.append(interrupt.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]


def test_curves_go_to_tensorboard_without_torch(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import sys
        from tether.recipe import SFTRecipe
        from tether.run import Run
        from tether.trackers import Trackers
        run = Run.create(sys.argv[1], SFTRecipe(model="m", data="d"))
        trackers = Trackers(["tensorboard"], run)
        trackers.log(1, {"loss": 0.5, "ok": True}); trackers.log(2, {"loss": float("nan")}); trackers.close()
        assert "torch" not in sys.modules and "tensorflow" not in sys.modules
    """)
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "r")], check=True)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    curves.Reload()
    assert curves.Tags()["scalars"] == ["loss"]
    values = [event.value for event in curves.Scalars("loss")]
    assert values[0] == 0.5
    assert math.isnan(values[1])


def test_a_resumed_curve_replaces_the_steps_that_are_taken_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Run.create(tmp_path / "r", SFTRecipe(model="m", data="d")) as run:
        for first, value in ((1, 1.0), (3, 2.0)):
            trackers = Trackers(["tensorboard"], run)
            for step in range(first, first + 4):
                trackers.log(step, {"loss": value})
            trackers.close()
            time.sleep(1.1)  # event files are told apart by the second
    curves = EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    curves.Reload()
    assert [(event.step, event.value) for event in curves.Scalars("loss")] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2), (6, 2)]


def test_a_tracker_that_is_not_installed_is_refused_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with Run.create(tmp_path / "r", SFTRecipe(model="m", data="d")) as run, pytest.raises(UserError, match=r"tether-lm\[wandb\]"):
        Trackers(["wandb"], run)


def test_a_run_without_steps_leaves_no_curve(tmp_path: Path) -> None:
    with Run.create(tmp_path / "r", SFTRecipe(model="m", data="d")) as run:
        Trackers(["tensorboard"], run).close()
        assert not (run.folder / "tensorboard").exists()


def test_services_get_every_number_and_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackio.py").write_text(
        "seen = []\n"
        "def init(**options): seen.append(('init', options['name'], options['config']['learning_rate']))\n"
        "def log(metrics, step): seen.append((step, metrics))\n"
        "def finish(): seen.append('finish')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with Run.create(tmp_path / "r", SFTRecipe(model="m", data="d")) as run:
        trackers = Trackers(["trackio"], run)
        trackers.log(1, {"loss": 0.5, "note": "text"})
        trackers.close()
    import trackio

    assert trackio.seen == [("init", "r", 2e-5), (1, {"loss": 0.5}), "finish"]
