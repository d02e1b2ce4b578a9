"""Running ahead: what is under way while a step learns, how old its weights are, and whole runs through a server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.grpo_runs import Train, even, model, timeless, train, weights
from tests.tiny import save_tiny
from tests.vllm_server import serving
from tether import rollout as attempts
from tether.ahead import Plan, Source
from tether.algorithms import grpo
from tether.batch import Example
from tether.engines.local import Completion, Request
from tether.engines.sampling import Sampling
from tether.errors import UserError
from tether.files import Source as Place
from tether.recipe import GRPORecipe
from tether.run import Run
from tether.stopwatch import Stopwatch

__all__ = ["model", "train"]  # fixtures


class Records:
    """A sampler that keeps what happened, in order; an answer names the weights that gave it."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.events: list[str] = []

    def refresh(self, version: int | None = None) -> None:
        self.version = version
        self.events.append(f"weights {version}")

    def begin(self, requests: Any) -> Any:
        version = self.version
        self.events.append(f"{requests[0].seed} from {version}")
        return lambda: [Completion(i, 0, [version], [0.0], [0.0], "stop", None) for i in range(len(requests))]

    def told(self) -> list[str]:
        return []


def source(ahead: int, steps: int = 5) -> tuple[Source, Records]:
    recipe = GRPORecipe(
        model="m", data="d", rewards=["math"], engine="vllm", ahead_steps=ahead, batch_size=4, num_generations=2, max_steps=steps
    )
    data = [Example([5 + i], [], [], Place("d", i)) for i in range(8)]
    records = Records()
    plan = Plan(recipe, data, Sampling(max_new_tokens=4))
    return Source(records, plan, ahead=ahead, positions=None, watch=Stopwatch(), tell=print), records


@pytest.mark.parametrize("ahead, ages", [(0, [0, 0, 0, 0, 0]), (1, [0, 1, 1, 1, 1]), (2, [0, 1, 2, 2, 2]), (9, [0, 1, 2, 3, 4])])
def test_attempts_are_as_old_as_sampling_runs_ahead(ahead: int, ages: list[int]) -> None:
    made, records = source(ahead)
    found = []
    for step in range(5):
        completions, version = made.sample(made.plan.requests(step), step)
        assert [c.tokens for c in completions] == [[version]] * 2
        found.append(step - version)
    assert found == ages
    assert len([e for e in records.events if "from" in e]) == 5, "every step is asked once, and none beyond the last"


def test_weights_are_handed_over_once_a_step_after_its_answers_are_there() -> None:
    made, records = source(1)
    for step in range(3):
        made.sample(made.plan.requests(step), step)
        made.sample([Request([9], Sampling(), 1, f"held out {step}")], step)  # such as an evaluation, or more prompts for this step
    assert records.events == [
        "weights 0", "0/0/0/0 from 0", "0/1/0/0 from 0", "held out 0 from 0",
        "weights 1", "0/2/0/0 from 1", "held out 1 from 1",
        "weights 2", "0/3/0/0 from 2", "held out 2 from 2",
    ]  # fmt: skip


def test_a_resumed_run_begins_afresh_from_its_weights() -> None:
    made, records = source(2)
    assert made.sample(made.plan.requests(3), 3)[1] == 3
    assert records.events == ["weights 3", "0/3/0/0 from 3", "0/4/0/0 from 3"]


def test_what_failed_while_it_was_ahead_is_told_at_its_turn() -> None:
    made, records = source(1)
    made.sample(made.plan.requests(0), 0)

    def fails() -> list[Completion]:
        raise UserError("no vLLM server is left")

    records.begin = lambda requests: fails  # type: ignore[method-assign]
    made.sample(made.plan.requests(1), 1)
    with pytest.raises(UserError, match="no vLLM server is left"):
        made.sample(made.plan.requests(2), 2)


# -- whole runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_through_a_server_learns_and_says_how_old_its_attempts_are(train: Train, model: Path, ahead: int) -> None:
    settings: dict[str, Any] = {"batch_size": 48, "num_generations": 8, "max_steps": 10, "lr_scheduler": "constant"}
    with serving(model) as (fake,):
        run, summary = train(
            [even], engine={"urls": [fake.url]}, ahead_steps=ahead, lora={"rank": 8}, **{**settings, "learning_rate": 3e-2}, n_prompts=24
        )
        loaded = [body["lora_name"][-6:] for path, body in fake.calls if path == "/v1/load_lora_adapter"]
    assert summary["steps"] == 10
    assert loaded == [f"{i:06d}" for i in range(10)]
    metrics = run.metrics()
    assert metrics[-1]["reward"] > metrics[0]["reward"] + 0.1
    assert [m["staleness/max"] for m in metrics] == [0.0] + [float(ahead)] * 9
    assert [m["staleness/mean"] for m in metrics] == [0.0] + [float(ahead)] * 9
    versions = {r["step"]: r["policy_version"] for r in run.rows(attempts.FILE)}
    assert versions == {step + 1: max(0, step - ahead) for step in range(10)}
    assert metrics[0]["sampling/sampling_logp_difference/mean"] < 1e-5
    gaps = [m["sampling/sampling_logp_difference/mean"] for m in metrics[1:]]
    assert max(gaps) < 1e-5 if ahead == 0 else min(gaps) > 1e-4, "one step behind is another distribution; the weights correct for it"
    assert run.recipe.importance == "token_truncate"  # type: ignore[attr-defined]
    assert all("sampling/importance_sampling_ratio/mean" in m and "time/hand_over" in m for m in metrics)
    checks = [n["text"] for n in run.notices() if n["kind"] == "startup_check"]
    assert "ratio 1.00000" in checks[0]


def test_with_a_server_and_without_whole_weights_learn_the_same(train: Train, model: Path) -> None:
    """Sampled by a server with other random numbers, the same method: evaluation and shape of the run agree."""
    with serving(model, 2) as fakes:
        run, summary = train([even], engine={"urls": [f.url for f in fakes]}, max_steps=3, eval_fraction=0.25, eval_steps=2)
        reloads = [sum(path == "/collective_rpc" for path in f.paths()) for f in fakes]
    assert reloads == [4, 4], "once for each version: before the three steps, and for the evaluation after the last"
    assert summary["held_out"]["n"] == 3
    assert not list((run.folder / "server").iterdir()), "no weights are left on their way"
    assert weights(run)


def test_a_server_with_other_weights_under_an_adapter_is_refused_at_the_start(train: Train, model: Path, tmp_path: Path) -> None:
    with (
        serving(save_tiny(tmp_path / "other", seed=7)) as (fake,),
        pytest.raises(UserError, match="other weights than the model that the adapter is trained on"),
    ):
        train([even], engine={"urls": [fake.url]}, lora={"rank": 4}, max_steps=2)


def test_a_difference_that_rounding_explains_is_reported_and_corrected(train: Train, model: Path) -> None:
    with serving(model) as (fake,):
        fake.shift = 0.2
        with pytest.raises(UserError, match=r"differ by 2.00e-01 nats per token.*another model, or in fewer bits"):
            train([even], engine={"urls": [fake.url]}, max_steps=2)
        fake.shift = 0.03
        run, _ = train([even], engine={"urls": [fake.url]}, max_steps=2)
    assert run.metrics()[0]["sampling/sampling_logp_difference/mean"] == pytest.approx(0.03, rel=1e-3)
    assert run.metrics()[0]["sampling/importance_sampling_ratio/mean"] == pytest.approx(2.718281828**-0.03, rel=1e-3)


def test_a_run_whose_servers_die_says_so_and_can_be_resumed(train: Train, model: Path) -> None:
    with serving(model, 2) as fakes:
        fakes[0].die_after = 3
        run, _ = train([even], engine={"urls": [f.url for f in fakes]}, max_steps=3)
        told = [n["text"] for n in run.notices() if n["kind"] == "server"]
        assert len(told) == 1
        assert fakes[0].url in told[0]
    with serving(model) as fakes:
        fakes[0].die_after = 9
        with pytest.raises(UserError, match="no vLLM server is left"):
            train([even], engine={"urls": [fakes[0].url], "timeout_s": 5.0}, ahead_steps=1, max_steps=4, save_steps=1)
        folder = sorted(run.folder.parent.glob("run*"))[-1]
        fakes[0].die_after = None
        with Run.open(folder) as again:
            summary = grpo.train(again.recipe, again, [even])  # type: ignore[arg-type]
        assert summary["steps"] == 4
        assert [m["staleness/max"] for m in again.metrics()] == [0.0, 1.0, 0.0, 1.0]


def test_two_ranks_ask_once_and_learn_as_one_does(train: Train, model: Path, tmp_path: Path) -> None:
    """The first rank asks; the weights it hands over are gathered from both."""
    reward = tmp_path / "r.py"
    reward.write_text(
        "def even(prompts, completions, completion_ids):\n    return [sum(i % 2 == 0 for i in x) / len(x) for x in completion_ids]\n"
    )
    settings: dict[str, Any] = {"ahead_steps": 1, "max_steps": 3, "batch_size": 16, "num_generations": 4}
    with serving(model, lora=False) as (fake,):
        one, _ = train([f"{reward}:even"], engine={"urls": [fake.url]}, **settings)
        asked = len(fake.asked())
    with serving(model, lora=False) as (fake,):
        given = {
            **one.settings,
            "run": str(tmp_path / "two"),
            "engine.urls": f"[{fake.url}]",
            "rewards": f"[{reward}:even]",
            "trackers": "[]",
        }
        words = [f"{k}={v}" for k, v in given.items() if k in (*settings, "model", "data", "run", "engine.urls", "rewards", "trackers")]
        words += ["precision=fp32", "max_completion_length=6", "learning_rate=5e-3", "--ranks", "2"]
        done = subprocess.run([sys.executable, "-m", "tether", "grpo", *words], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert len(fake.asked()) == asked
    two = Run.open(tmp_path / "two")
    for a, b in zip(timeless(one), timeless(two), strict=True):
        for name in ("reward", "loss", "grad_norm", "staleness/max", "sampling/sampling_logp_difference/mean"):
            assert b[name] == pytest.approx(a[name], abs=1e-5), name
    for name, weight in weights(one).items():
        assert torch.allclose(weights(two)[name], weight, atol=1e-5)


def test_nothing_is_told_of_servers_without_one(train: Train) -> None:
    run, _ = train([even], max_steps=2)
    assert not any(name.startswith("staleness") or name == "time/hand_over" for m in timeless(run) for name in m)
    assert not (run.folder / "server").exists()
