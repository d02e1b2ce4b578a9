"""kill -9 while a run samples, judges, scores, updates, logs or saves; `tether resume` then ends where an undisturbed run ends.

Bit for bit: weights, optimiser, every logged number, every attempt, every notice. Another method is one more row of `METHODS`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ppo_runs import timeless
from tests.tiny import save_tiny
from tests.whole_runs import words, write_rows
from tether import rollout as attempts
from tether.run import Run

ROOT = Path(__file__).parents[1]

REWARD = """
def even(prompts, completions, completion_ids):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
"""
METHODS = {
    "grpo": ("grpo", "preset=grpo updates_per_batch=2 mini_batches=2 kl_target=0.5 kl_horizon=200 reference_refresh_steps=3"),
    "dapo, adapter": ("grpo", "preset=dapo lora.rank=4 eval_fraction=0.2 eval_steps=2"),
    "ppo": ("ppo", "num_generations=2 updates_per_batch=2 mini_batches=2 score_scaling=running kl_target=0.5 kl_horizon=200"),
    "ppo, critic apart, adapter": ("ppo", "critic=separate updates_per_batch=1 lora.rank=4 reference_refresh_steps=2"),
}

# One process imports everything once and computes nothing; every run is a child of it, so forking is safe.
NURSERY = """
import os, signal, sys
sys.path.insert(0, {root!r})
import torch, transformers, peft
from pathlib import Path
from tether import checkpoint, cli, policy, reward, run, step
from tether.algorithms import grpo, ppo
from tether.engines import local

PLACES = {{
    "sampling": (local, "_forward"), "judging": (reward.Rewards, "score"),
    "scoring": {{"grpo": (grpo, "constants"), "ppo": (ppo, "look")}}[{command!r}],
    "updating": (step.Update, "_step"), "logging": (run.Run, "log"),
    "saving": (checkpoint, "save_file"), "hashing": (checkpoint, "sha256"), "ending": (policy.Policy, "save"),
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

straight, killed = Path({straight!r}), Path({killed!r})
assert child([*{base!r}, "--run", str(straight)], "", 0) == 0, "the undisturbed run failed"
for phase, at in {deaths!r}:
    words = ["resume", str(killed)] if (killed / "recipe.yaml").exists() else [*{base!r}, "--run", str(killed)]
    assert child(words, phase, at) == signal.SIGKILL, f"was not killed while {{phase}}"
    for path in killed.glob("*.jsonl"):  # a line that was being written when the machine went down
        with path.open("a") as file:
            file.write('{{"step": 99, "los')
assert child(["resume", str(killed)], "", 0) == 0, "the last resume failed"
"""
# Which call of the phase is the last: in the middle of a step, of a save, of a second batch, of the result.
DEATHS = [
    *(("sampling", 3), ("judging", 3), ("scoring", 2), ("updating", 2), ("logging", 3), ("saving", 3)),
    *(("sampling", 9), ("hashing", 2), ("ending", 1)),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_kill_9_in_any_phase_then_resume_gives_the_same_run(tmp_path: Path, name: str) -> None:
    command, settings = METHODS[name]
    model = save_tiny(tmp_path / "tiny")
    data = write_rows(tmp_path / "prompts.jsonl", [{"prompt": words(5 * i, 2 + i % 4)} for i in range(10)])
    (tmp_path / "even.py").write_text(REWARD)
    groups = "" if "num_generations" in settings or command == "ppo" else "num_generations=4"
    base = [command, "--model", str(model), "--data", str(data), f"rewards={tmp_path / 'even.py'}:even", *groups.split()]
    base += ["precision=fp32", "threads=1", "trackers=[]", "log_every=1000", "batch_size=8", "max_completion_length=6"]
    base += ["learning_rate=5e-3", "max_steps=11", "save_steps=2", *settings.split()]
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    given = {"root": str(ROOT), "command": command, "base": base, "deaths": DEATHS, "straight": str(straight), "killed": str(killed)}
    done = subprocess.run([sys.executable, "-c", NURSERY.format(**given)], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]

    one, two = Run.open(straight), Run.open(killed)
    assert timeless(one) == timeless(two)
    assert len(timeless(two)) >= 11
    assert one.rows(attempts.FILE) == two.rows(attempts.FILE)
    assert without_clock(one.summary()) == without_clock(two.summary())
    assert told(one) == told(two)
    for part in ("model", "checkpoints/000011"):
        files = sorted(p.name for p in (straight / part).glob("*.safetensors"))
        assert files
        assert files == sorted(p.name for p in (killed / part).glob("*.safetensors"))
        assert all((straight / part / f).read_bytes() == (killed / part / f).read_bytes() for f in files), part


def without_clock(summary: dict[str, Any] | None) -> dict[str, Any]:
    assert summary is not None
    return {k: v for k, v in summary.items() if k not in ("seconds", "phases")}


def told(run: Run) -> list[str]:
    return sorted(n["text"] for n in run.notices() if n["kind"] != "resumed")
