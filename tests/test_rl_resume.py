"""kill -9 while a run samples, judges, updates or saves; `tether resume` then ends where an undisturbed run ends, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny import save_tiny
from tests.whole_runs import words
from tests.whole_runs import write_rows as write
from tether import rollout as attempts
from tether.run import Run

ROOT = Path(__file__).parents[1]

REWARD = """
def even(prompts, completions, completion_ids):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
"""

# One process imports everything once and computes nothing; every run is a child of it, so forking is safe.
NURSERY = """
import os, signal, sys
sys.path.insert(0, {root!r})
import torch, transformers, peft
from tether import checkpoint, cli, reward, step
from tether.algorithms import grpo, ppo
from tether.engines import local

PLACES = {{
    "sampling": (local, "_forward"), "scoring": (reward.Rewards, "score"),
    "updating": (step.Update, "_step"), "saving": (checkpoint, "save_file"),
}}

def child(words, phase, at):
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        if phase:
            owner, name = PLACES[phase]
            real, calls = getattr(owner, name), [0]
            def dying(*a, **k):
                calls[0] += 1
                if calls[0] == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*a, **k)
            setattr(owner, name, dying)
        os._exit(cli.run(words))
    return os.waitpid(pid, 0)[1]

assert child({straight!r}, "", 0) == 0, "the undisturbed run failed"
for phase, at in {deaths!r}:
    words = ["resume", {run!r}] if os.path.exists(os.path.join({run!r}, "recipe.yaml")) else {killed!r}
    assert child(words, phase, at) == signal.SIGKILL, f"was not killed while {{phase}}"
assert child(["resume", {run!r}], "", 0) == 0, "the last resume failed"
"""
# Which call of the phase is the last: in the middle of a step, of a save, of a second batch.
DEATHS = [("sampling", 3), ("scoring", 3), ("updating", 2), ("saving", 3), ("sampling", 9), ("updating", 2), ("saving", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command, settings",
    [
        ("grpo", ["preset=grpo", "updates_per_batch=2", "mini_batches=2", "kl_target=0.5", "kl_horizon=200", "reference_refresh_steps=3"]),
        ("grpo", ["preset=dapo", "lora={rank: 4}", "eval_fraction=0.2", "eval_steps=2"]),
        ("ppo", ["num_generations=2", "updates_per_batch=2", "mini_batches=2", "score_scaling=running", "kl_target=0.5", "kl_horizon=200"]),
        ("ppo", ["critic=separate", "num_generations=1", "updates_per_batch=1", "lora={rank: 4}", "reference_refresh_steps=2"]),
    ],
    ids=["grpo", "dapo-lora", "ppo", "ppo-separate-lora"],
)
def test_kill_9_in_any_phase_then_resume_gives_the_same_run(tmp_path: Path, command: str, settings: list[str]) -> None:
    model = save_tiny(tmp_path / "tiny")
    data = write(tmp_path / "prompts.jsonl", [{"prompt": words(5 * i, 2 + i % 4)} for i in range(10)])
    (tmp_path / "even.py").write_text(REWARD)
    base = [command, "--model", str(model), "--data", str(data), "precision=fp32", "threads=1", "trackers=[]", "log_every=1000"]
    base += [
        f"rewards={tmp_path / 'even.py'}:even",
        "batch_size=8",
        *([] if any("num_gen" in s for s in settings) else ["num_generations=4"]),
    ]
    base += ["max_completion_length=6", "learning_rate=5e-3", "max_steps=7", "save_steps=2", *settings]
    straight, run = str(tmp_path / "straight"), str(tmp_path / "killed")
    script = NURSERY.format(root=str(ROOT), straight=[*base, "--run", straight], killed=[*base, "--run", run], run=run, deaths=DEATHS)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = Run.open(Path(straight)), Run.open(Path(run))
    file = "adapter_model.safetensors" if "lora={rank: 4}" in settings else "model.safetensors"
    want, got = (load_file(r.folder / "model" / file) for r in (one, two))
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert timeless(one) == timeless(two)
    assert one.rows(attempts.FILE) == two.rows(attempts.FILE)
    assert len(timeless(two)) >= 7


def timeless(run: Run) -> list[dict[str, Any]]:
    clock = ("step_time", "tokens_per_second")
    return [{k: v for k, v in m.items() if k not in clock and not k.startswith("time/")} for m in run.metrics()]
