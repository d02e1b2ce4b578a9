"""grpo and ppo on two and four ranks: the same attempts, the same numbers, the same weights as on one, up to rounding in float32.

Every kind of run is made once for each number of ranks, all of them in one process each: `ranks_worker.py`.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.ppo_runs import timeless
from tests.ranks_runs import finish, gap, start
from tests.tiny import save_tiny
from tests.whole_runs import words, write_rows
from tether import rollout as attempts
from tether.run import Run
from tether.scalar import ScalarModel

STEPS, MIDDLE = 20, 10
# AdamW's first step is the sign of the gradient: an entry whose gradient is nothing but rounding would go either way. With an epsilon
# above rounding the step is a smooth function of the gradient.
SMALL = {"max_steps": STEPS, "save_steps": MIDDLE, "keep_checkpoints": 2, "batch_size": 12, "num_generations": 3, "max_completion_length": 6,
         "tokens_per_micro_batch": 40, "learning_rate": 1e-3, "adam_epsilon": 1e-6, "precision": "fp32", "threads": 1, "trackers": [],
         "log_every": 1000}  # fmt: skip
LORA = {"lora": {"rank": 4}}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {"preset": "grpo", "reference_refresh_steps": 4, "updates_per_batch": 2}),
    "grpo, adapter": ("grpo", {"preset": "grpo", "reference_refresh_steps": 4, **LORA}),
    "dr_grpo": ("grpo", {"preset": "dr_grpo"}),
    "dapo": ("grpo", {"preset": "dapo", "reward": "often_alike", "eval_fraction": 0.2, "eval_steps": 7}),
    "gspo": ("grpo", {"preset": "gspo", "mini_batches": 2}),
    "cispo": ("grpo", {"preset": "cispo", "updates_per_batch": 2, "mini_batches": 3}),
    "rloo": ("grpo", {"preset": "rloo", "kl_target": 0.05, "kl_horizon": 200}),
    "reinforce": ("grpo", {"preset": "reinforce"}),
    "reinforce_pp": ("grpo", {"preset": "reinforce_pp"}),
    "a reward model": ("grpo", {"preset": "grpo", "rewards": True}),
    "ppo": ("ppo", {"num_generations": 2, "mini_batches": 2, "updates_per_batch": 2, "max_approx_kl": 0.001, "score_scaling": "running"}),
    "ppo, adapter": ("ppo", {"num_generations": 1, "updates_per_batch": 2, **LORA}),
    "ppo, critic apart": ("ppo", {"num_generations": 1, "critic": "separate", "updates_per_batch": 1, "reference_refresh_steps": 4}),
    "ppo, critic apart, adapter": ("ppo", {"num_generations": 1, "critic": "separate", "updates_per_batch": 1, **LORA}),
}
ON_FOUR = ["grpo", "ppo, critic apart"]
RESUMED = {"grpo": (1, 4), "grpo, adapter": (1,), "ppo": (1,), "ppo, critic apart": (1, 4)}


@dataclass
class Done:
    root: Path
    seen: dict[int, list[dict[str, Any]]]  # by number of ranks, of each rank

    def folder(self, name: str, n: int) -> Path:
        return self.root / str(n) / name.replace(", ", "-").replace(" ", "-")

    def run(self, name: str, n: int) -> Run:
        return Run.open(self.folder(name, n))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    root = tmp_path_factory.mktemp("ranks")
    out = Done(root, {})
    model = save_tiny(root / "model")
    judge = ScalarModel.load(model, fresh_head=True, precision="fp32", seed=3)
    judge.set_normalisation(mean=0.0, std=0.05)
    judge.save(root / "judge")
    data = write_rows(root / "prompts.jsonl", [{"prompt": words(5 * i, 2 + 3 * i % 8), "gold": i} for i in range(15)])

    def spec(name: str, n: int, reward: str = "even") -> dict[str, Any]:
        command, more = KINDS[name.removesuffix(" again").removesuffix(" fails")]
        settings = {**SMALL, "model": str(model), "data": str(data), **more}
        reward = settings.pop("reward", reward)
        if settings.get("rewards"):
            settings["rewards"] = [{"reward": "model", "model": str(root / "judge"), "precision": "fp32"}]
        return {"name": name, "command": command, "folder": str(out.folder(name, n)), "settings": settings, "reward": reward}

    two = [spec(name, 2) for name in KINDS] + [spec("dr_grpo fails", 2, "failing")]
    out.seen[2] = finish(*start(2, two, root))
    for name, numbers in RESUMED.items():  # what two ranks had saved in the middle
        for n in numbers:
            target = out.folder(name + " again", n)
            shutil.copytree(out.folder(name, 2), target)
            shutil.rmtree(target / "checkpoints" / f"{STEPS:06d}")
            (target / "summary.json").unlink()
    again = {n: [spec(name + " again", n) for name, numbers in RESUMED.items() if n in numbers] for n in (1, 4)}
    alone = start(1, [spec(name, 1) for name in KINDS] + again[1], root)
    four = start(4, [spec(name, 4) for name in ON_FOUR] + again[4], root)
    out.seen[1], out.seen[4] = finish(*alone), finish(*four)
    return out


def assert_alike(one: Run, other: Run, *, since: int = 0) -> None:
    """Attempts to the token, numbers and weights up to rounding."""
    rows = [[r for r in run.rows(attempts.FILE) if r["step"] > since] for run in (one, other)]
    assert rows[0]
    assert [(r["group"], r["tokens"]) for r in rows[0]] == [(r["group"], r["tokens"]) for r in rows[1]]
    metrics = [[m for m in timeless(run) if m["step"] > since] for run in (one, other)]
    assert len(metrics[0]) == STEPS - since + (0 if since else "eval_reward" in metrics[0][0])
    for a, b in zip(*metrics, strict=True):
        assert a == pytest.approx(b, rel=1e-5, abs=1e-5)
    assert gap(one.folder / "model", other.folder / "model") <= 1e-5


@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_learn_as_one(done: Done, name: str) -> None:
    assert_alike(done.run(name, 1), done.run(name, 2))


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_learn_as_one(done: Done, name: str) -> None:
    assert_alike(done.run(name, 1), done.run(name, 4))


@pytest.mark.parametrize(("name", "n"), [(name, n) for name, numbers in RESUMED.items() for n in numbers])
def test_what_two_ranks_saved_goes_on_elsewhere(done: Done, name: str, n: int) -> None:
    """The critic and the reference that has moved are in it."""
    again = done.run(name + " again", n)
    assert any(note["kind"] == "resumed" for note in again.notices())
    assert_alike(done.run(name, 1), again, since=MIDDLE)


def test_the_runs_are_no_standstill(done: Done) -> None:
    """Weights move by far more than the tolerance; all parts of what is compared took part."""
    assert gap(done.folder("grpo", 2) / "model", done.folder("dr_grpo", 2) / "model") > 1e-3
    critics = [load_file(p / "critic/model.safetensors") for p in done.run("ppo, critic apart", 2).checkpoints()]
    assert any(not torch.equal(critics[0][name], critics[1][name]) for name in critics[0])
    assert "dynamic_sampling/acceptance" in done.run("dapo", 2).metrics()[1]
    assert any("policy/passes" in m for m in done.run("ppo", 2).metrics())
    assert (done.run("grpo", 2).checkpoints()[-1] / "reference.safetensors").is_file()


def test_plain_rewards_are_asked_on_the_first_rank_alone(done: Done) -> None:
    for n in (2, 4):
        first, *others = [seen["calls"] for seen in done.seen[n]]
        assert first > 0
        assert not any(others)


def test_a_reward_that_fails_ends_all_ranks_with_the_same_words(done: Done) -> None:
    errors = [seen["errors"] for seen in done.seen[2]]
    assert errors[0] == errors[1]
    assert "'failing' raised RuntimeError: out of paper" in errors[0]["dr_grpo fails"]
