"""grpo and ppo on two and four ranks: the same attempts, the same numbers, the same weights as on one, up to rounding in float32.

Every kind of run is made once for each number of ranks, all of them in one process each: `ranks_worker.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.grpo_runs import PRESETS
from tests.ppo_runs import batch_of, timeless
from tests.ranks_runs import finish, gap, start
from tests.tiny import save_tiny
from tests.whole_runs import words, write_rows
from tether import ranks
from tether import rollout as attempts
from tether.algorithms import grpo, ppo
from tether.critic import make_critic
from tether.engines.local import Completion, Request
from tether.engines.sampling import Sampling
from tether.engines.together import sample_together
from tether.loop import Tally
from tether.packing import pack
from tether.policy import Policy
from tether.recipe import GRPORecipe, PPORecipe
from tether.rl_metrics import row_metrics
from tether.run import Run
from tether.scalar import ScalarModel
from tether.token_batch import Part, mini_batches
from tether.token_rows import to_rows

STEPS, MIDDLE = 20, 10
# AdamW's first step is the sign of the gradient: an entry whose gradient is nothing but rounding would go either way. With an epsilon
# above rounding the step is a smooth function of the gradient.
SMALL = {"max_steps": STEPS, "save_steps": MIDDLE, "keep_checkpoints": 2, "batch_size": 12, "num_generations": 3, "max_completion_length": 6,
         "tokens_per_micro_batch": 80, "learning_rate": 5e-4, "adam_epsilon": 1e-6, "precision": "fp32", "threads": 1, "trackers": [],
         "log_every": 1000}  # fmt: skip
LORA = {"lora": {"rank": 4}}
FINE = {"tokens_per_micro_batch": 40}  # more parts than one on each rank, and not as many on both
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {"preset": "grpo", "reference_refresh_steps": 4, "updates_per_batch": 2, **FINE}),
    "grpo, adapter": ("grpo", {"preset": "grpo", "reference_refresh_steps": 4, **LORA}),
    "dr_grpo": ("grpo", {"preset": "dr_grpo"}),
    "dapo": ("grpo", {"preset": "dapo", "reward": "often_alike", "eval_fraction": 0.2, "eval_steps": 7, **FINE}),
    "gspo": ("grpo", {"preset": "gspo", "mini_batches": 2}),
    "cispo": ("grpo", {"preset": "cispo", "updates_per_batch": 2, "mini_batches": 3}),
    "rloo": ("grpo", {"preset": "rloo", "kl_target": 0.05, "kl_horizon": 200}),
    "reinforce": ("grpo", {"preset": "reinforce"}),
    "reinforce_pp": ("grpo", {"preset": "reinforce_pp"}),
    "a reward model": ("grpo", {"preset": "grpo", "rewards": True}),
    "ppo": (
        "ppo",
        {"num_generations": 2, "mini_batches": 2, "updates_per_batch": 2, "max_approx_kl": 0.001, "score_scaling": "running", **FINE},
    ),
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

    def run(self, name: str, n: int) -> Run:
        return Run.open(folder(self.root, name, n))


def spec(root: Path, name: str, n: int) -> dict[str, Any]:
    """What `ranks_worker.py` is told. A name may end in "again" (continued) or "fails" (its reward does)."""
    command, more = KINDS[name.removesuffix(" again").removesuffix(" fails")]
    settings = {**SMALL, "model": str(root / "model"), "data": str(root / "prompts.jsonl"), **more}
    reward = "failing" if name.endswith(" fails") else settings.pop("reward", "even")
    if settings.get("rewards"):
        settings["rewards"] = [{"reward": "model", "model": str(root / "judge"), "precision": "fp32"}]
    return {"name": name, "command": command, "folder": str(folder(root, name, n)), "settings": settings, "reward": reward}


def folder(root: Path, name: str, n: int) -> Path:
    return root / str(n) / name.replace(", ", "-").replace(" ", "-")


def prepare(root: Path) -> None:
    """The model, a reward model, prompts."""
    model = save_tiny(root / "model")
    judge = ScalarModel.load(model, fresh_head=True, precision="fp32", seed=3)
    judge.set_normalisation(mean=0.0, std=0.05)
    judge.save(root / "judge")
    write_rows(root / "prompts.jsonl", [{"prompt": words(5 * i, 2 + 3 * i % 8), "gold": i} for i in range(15)])


def copy_from_the_middle(root: Path, name: str, n: int) -> dict[str, Any]:
    """What two ranks had saved after half of the steps, for `n` ranks to go on with."""
    target = folder(root, name + " again", n)
    shutil.copytree(folder(root, name, 2), target)
    shutil.rmtree(target / "checkpoints" / f"{STEPS:06d}")
    (target / "summary.json").unlink()
    return spec(root, name + " again", n)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    root = tmp_path_factory.mktemp("ranks")
    prepare(root)
    two = finish(*start(2, [spec(root, name, 2) for name in (*KINDS, "dr_grpo fails")], root))
    again = {n: [copy_from_the_middle(root, name, n) for name, numbers in RESUMED.items() if n in numbers] for n in (1, 4)}
    alone = start(1, [spec(root, name, 1) for name in KINDS] + again[1], root)
    four = start(4, [spec(root, name, 4) for name in ON_FOUR] + again[4], root)
    finish(*alone)
    return Done(root, {2: two, 4: finish(*four)})


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
    assert gap(done.run("grpo", 2).folder / "model", done.run("dr_grpo", 2).folder / "model") > 1e-3
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


@pytest.mark.parametrize("preset", PRESETS)
def test_a_part_without_rows_adds_nothing_and_has_a_gradient(preset: str, tmp_path: Path) -> None:
    """A rank with fewer parts than the others goes through the rest with empty ones: loss 0, every metric 0, gradients of 0."""
    recipe = GRPORecipe(model="m", data="d", rewards=["math"], preset=preset, beta=0.1, batch_size=8, num_generations=4)
    policy = Policy.load(save_tiny(tmp_path / "tiny"), precision="fp32")
    batch = batch_of(1.0, 0.0)
    mini = mini_batches(batch, 1, "seed")[0]
    part = Part(pack([]), torch.empty(0, dtype=torch.long))
    logps, stats = policy.logprobs(part.packed, stats=True)
    assert stats["entropy"].shape == (0,)
    lp = to_rows(part.packed, logps, batch.width)
    assert lp.shape == (0, batch.width)
    old = torch.full_like(batch.sampled_logp, -1.0)
    loss, metrics = grpo.part_loss(recipe, batch, part, mini, lp, torch.tensor([1.0, -1.0]), old, old, None, 0.1)
    loss.backward()
    assert float(loss.detach()) == 0
    assert not any(map(float, metrics.values()))
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters().values())
    tally = Tally()
    row_metrics(tally, batch, part.rows, lp.detach(), old, old)
    assert tally.means() == {"loss": 0.0}


@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_a_part_without_rows_adds_nothing_to_the_critic(kind: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny")
    recipe = PPORecipe(model=str(model), data="d", rewards=["math"], critic=kind, precision="fp32", batch_size=2)
    policy = Policy.load(model, precision="fp32")
    with Run.create(tmp_path / "run", recipe) as run:
        critic = make_critic(recipe, policy, run)
    batch = batch_of(1.0, 0.0)
    part = Part(pack([]), torch.empty(0, dtype=torch.long))
    lp, values, _ = critic.judge(policy, part.packed, 1.0)
    lp, values = (to_rows(part.packed, x, batch.width) for x in (lp, values))
    table = torch.zeros_like(batch.sampled_logp)
    before = ppo.Before(table, table, table)
    loss, metrics = ppo.part_loss(recipe, batch, part, mini_batches(batch, 1, "seed")[0], lp, values, before, table, table, None)
    loss.backward()
    assert float(loss.detach()) == 0
    assert not any(map(float, metrics.values()))
    trained = [*policy.parameters().values(), *critic.parameters().values()]
    assert all(p.grad is not None and not p.grad.any() for p in trained)


def test_each_rank_samples_its_share_and_holds_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of 5, 9, 5 and 1 answers for two ranks: the dearest first, each to the rank that has least."""
    asked: list[list[int]] = []

    class Sampler:
        def sample(self, requests: Sequence[Request]) -> list[Completion]:
            asked.append([r.n for r in requests])
            return [Completion(i, k, [7], [-1.0], [-1.0], "stop", None) for i, r in enumerate(requests) for k in range(r.n)]

    requests = [Request([5], Sampling(max_new_tokens=10), n) for n in (5, 9, 5, 1)]
    alone = sample_together(Sampler(), requests)
    parts: list[Any] = []
    for rank in (0, 1):
        monkeypatch.setattr(ranks, "size", lambda: 2)
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(ranks, "gather", lambda mine: [*parts, parts.append(mine) or mine])
        made = sample_together(Sampler(), requests)
    assert asked[1:] == [[9, 1], [5, 5]]
    assert made == alone
