"""What users of PPO have reported elsewhere, as whole runs of `tether ppo` and through the loop's own functions.

Issue numbers are those of the public trackers; docs/guarantees.md has the table.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.ppo_runs import Train, batch_of, even, model, moved, rollout, timeless, train, weights
from tests.tiny import save_tiny, tiny_config
from tests.whole_runs import Killed, kill_in, start, words, write_rows
from tether import rollout as attempts
from tether.algorithms import ppo
from tether.critic import FOLDER, HEAD
from tether.models import load_model, save_model
from tether.policy import Policy
from tether.ppo_scores import RunningSpread, scores_of
from tether.recipe import PPORecipe
from tether.run import Run
from tether.token_batch import mini_batches, parts, token_batch

__all__ = ["model", "train"]  # fixtures


def recipe(**given: Any) -> PPORecipe:
    return PPORecipe(**{"model": "m", "data": "d", "batch_size": 4, **given})


# -- a split of a step changes nothing (transformers#24725) ----------------------------------------------------------------

SPLITS = {
    "defaults": {},
    "separate": {"critic": "separate"},
    "two mini-batches": {"mini_batches": 2, "dual_clip": 3.0, "whiten_rewards": True},
    "cut answers masked": {"mask_truncated": True, "max_completion_length": 40, "temperature": 4.0, "lam": 1.0, "whiten_advantages": False},
    "importance": {"importance": "token_truncate", "score_scaling": "running", "missing_end_penalty": 1.0},
}


@pytest.mark.parametrize("name", SPLITS)
def test_no_split_of_a_step_shows_in_any_number(train: Train, name: str) -> None:
    """Every metric of two steps, whatever is computed at once: one answer, a few, all."""
    given: dict[str, Any] = {"n_prompts": 8, "num_generations": 2, "updates_per_batch": 2, "max_steps": 2, "learning_rate": 1e-3}
    runs = [train([even], tokens_per_micro_batch=budget, **given, **SPLITS[name])[0] for budget in (1, 60, 10_000)]
    names = set(timeless(runs[0])[0])
    assert {"loss", "grad_norm", "kl", "entropy", "val/error", "val/explained_variance", "ratio/max", "objective/kl"} <= names
    for other in runs[1:]:
        for a, b in zip(timeless(runs[0]), timeless(other), strict=True):
            assert a.keys() == b.keys()
            for metric, value in a.items():
                if metric.startswith("sampling/sampling_logp_difference"):  # rounding itself
                    assert b[metric] < 1e-5
                else:
                    assert b[metric] == pytest.approx(value, rel=1e-3, abs=2e-5), metric


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_any_split_of_a_step_gives_the_same_gradient(model: Path, critic: str) -> None:
    """The first update of twelve answers of 1 to 7 tokens, at once, in pieces, and one by one: to 1e-5 of the largest."""
    made = recipe(model=str(model), critic=critic, num_generations=4, batch_size=12, updates_per_batch=1)
    groups = [[rollout([10 + k] * ((g + 2 * k) % 7) + [2], 0.1 * g - k, group=g, sample=k) for k in range(4)] for g in range(3)]
    found = [gradient(model, made.model_copy(update={"tokens_per_micro_batch": budget}), groups) for budget in (10_000, 40, 1)]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-5, atol=1e-5 * float(found[0].abs().max()))


class Caught:
    """Takes the gradient where the loop would take a step."""

    step = 0

    def __init__(self, parameters: dict[str, Any]) -> None:
        self.parameters = parameters
        self.gradient = torch.zeros(1)

    def apply(self, loss: float) -> None:
        self.gradient = torch.cat([p.grad.reshape(-1) for p in self.parameters.values()])


def gradient(model: Path, made: PPORecipe, groups: list[list[Any]]) -> Tensor:
    quiet: Any = type("Quiet", (), {"recorded": lambda self, key: None})()
    policy = Policy.load(model, precision="fp32")
    critic = ppo.make_critic(made, policy, quiet)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in critic.parameters().values():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    batch = token_batch(groups, mask_truncated=made.mask_truncated, least=1)
    before = ppo.look(made, policy, critic, None, batch)
    scores, *_ = scores_of(made, batch, RunningSpread())
    advantages, returns = ppo.advantages_of(made, batch, before, scores, made.beta)
    loop: Any = Caught({**policy.parameters(), **{f"critic.{n}": p for n, p in critic.parameters().items()}})
    ppo.updates(made, policy, critic, loop, batch, before, advantages.float(), returns.float())
    return loop.gradient


# -- masks (trl#6369, AReaL#1346, rlhf-book#216, OpenRLHF#1240) --------------------------------------------------------------


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_a_masked_answer_leaves_the_divisor_too(model: Path, critic: str) -> None:
    """Beside a cut and masked answer of 30 tokens the gradient is that of the others alone."""
    made = recipe(model=str(model), critic=critic, num_generations=1, updates_per_batch=1, mask_truncated=True, batch_size=3)
    whole = [[rollout([10 + t for t in range(n - 1)] + [2], float(n), group=n)] for n in (2, 3, 5)]
    cut = [rollout(list(range(10, 40)), 9.0, finish="length", group=30)]
    four, three = gradient(model, made, [*whole, cut]), gradient(model, made, whole)
    torch.testing.assert_close(four, three, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("junk", [9.0, float("nan"), float("inf")])
@pytest.mark.parametrize("settings", [{}, {"whiten_rewards": True, "importance": "token_truncate", "dual_clip": 3.0}], ids=["", "more"])
def test_what_stands_at_masked_places_changes_no_bit(junk: float, settings: dict[str, Any]) -> None:
    """Values, old and reference log-probs, and the policy's own: rewards per token, advantages, returns, loss, gradients, metrics."""
    made, results = recipe(**settings), []
    for fill in (0.0, junk):
        batch = batch_of(1.0, -0.5, 0.3, 2.0)
        old, ref = batch.sampled_logp.clone(), batch.sampled_logp - 0.1
        values = torch.linspace(-1, 1, old.numel()).view_as(old)
        for matrix in (old, ref, values, batch.sampled_logp):
            matrix[~batch.mask] = fill
        before = ppo.Before(old, values, ref)
        scores, *_ = scores_of(made, batch, RunningSpread())
        advantages, returns = ppo.advantages_of(made, batch, before, scores, made.beta)
        [mini] = mini_batches(batch, 1, "")
        [part] = parts(batch, mini.examples, 10**6)
        lp = torch.where(batch.mask, batch.sampled_logp + 0.05, fill).requires_grad_()
        v = torch.where(batch.mask, values + 0.3, fill).requires_grad_()
        w = ppo.mismatch_weights(old, batch.sampled_logp, batch.mask, "token_truncate") if settings else None
        loss, metrics = ppo.part_loss(made, batch, part, mini, lp, v, before, advantages, returns, w)
        loss.backward()
        shown = ppo.objective(batch, before, scores, returns, made.beta)
        results.append((advantages, returns, loss.detach(), lp.grad, v.grad, *metrics.values(), *map(torch.tensor, shown.values())))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_unscored_answers_stand_aside_and_a_step_without_any_score_moves_nothing(train: Train, model: Path) -> None:
    def some(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float | None]:
        return [None if i % 16 == 3 else v for i, v in enumerate(even(prompts, completions, completion_ids))]

    run, _ = train([some], max_steps=1, num_generations=2)
    rows = run.rows(attempts.FILE)
    assert [r["total"] is None for r in rows] == [i % 16 == 3 for i in range(len(rows))]
    assert all(r["advantage"] == 0 for r in rows if r["total"] is None)
    run, _ = train([even], mask_truncated=True, max_completion_length=1, max_steps=3, weight_decay=0.1)
    still = [m for m in run.metrics() if m["completions/clipped_ratio"] == 1.0]
    assert still
    assert all(m["skipped"] and m["grad_norm"] == 0 for m in still)
    assert len(still) < len(run.metrics()) or moved(run, model) == 0.0
    assert any(n["kind"] == "nothing_trained" for n in run.notices())


# -- the KL (trl#1017, LLaMA-Factory#664, trl#203) ---------------------------------------------------------------------------


def test_one_token_answers_give_finite_numbers(train: Train, tmp_path: Path) -> None:
    """From a policy that wants to stop at once: the end mark alone, a cut answer of one token, a batch of one."""
    net, tokenizer = load_model(save_tiny(tmp_path / "eager", tiny_config(tie_word_embeddings=False)))
    with torch.no_grad():
        net.lm_head.weight[2] = 3 * net.lm_head.weight.abs().max() * torch.sign(net.lm_head.weight[2])
    folder = save_model(net, tokenizer, tmp_path / "stops")

    def short(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float]:
        return [1.0 / len(ids) for ids in completion_ids]

    for more in (
        {"max_completion_length": 3, "temperature": 1.3},
        {"max_completion_length": 1},
        {"max_completion_length": 1, "batch_size": 1},
    ):
        run, _ = train([short], model=str(folder), max_steps=2, **more)
        assert [2] in [r["tokens"] for r in run.rows(attempts.FILE)] or more.get("batch_size") == 1
        for m in run.metrics():
            assert all(math.isfinite(v) for v in m.values() if isinstance(v, float)), more


def test_the_kl_is_that_of_the_policy_that_sampled_over_real_tokens(train: Train) -> None:
    """After several updates on a batch its tokens are no longer the policy's own: log pi - log ref on them is no KL, and falls below 0
    without anything being wrong. The logged number, and the alarm, are of the tokens as they were drawn."""
    given: dict[str, Any] = {"updates_per_batch": 30, "max_steps": 2, "learning_rate": 3e-2, "lr_scheduler": "constant", "beta": 0.01}
    run, _ = train([even], **given)
    first = run.metrics()[0]
    assert first["kl/k1"] == pytest.approx(0, abs=1e-5), "nothing was learnt yet when it was drawn"
    assert first["approx_kl_k1"] > 0.1, "though its updates went far"
    second = run.metrics()[1]
    assert second["kl/k1"] > 0.1
    rows = [r for r in run.rows(attempts.FILE) if r["step"] == 2]
    tokens = sum(len(r["tokens"]) for r in rows)
    assert second["kl/k1"] * tokens == pytest.approx(second["objective/kl"] * len(rows), rel=1e-4)
    assert not [n for n in run.notices() if n["kind"] == "negative_kl"]


def test_a_kl_far_below_zero_is_told_with_its_step(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = ppo.look, []

    def bent(*args: Any) -> ppo.Before:
        """From the second step on the sampled tokens are likelier under the reference than under the policy."""
        before = real(*args)
        seen.append(before.ref)
        return ppo.Before(before.logp, before.values, before.ref + 0.5 * (len(seen) > 1))  # type: ignore[operator]

    monkeypatch.setattr(ppo, "look", bent)
    run, _ = train([even], max_steps=2, updates_per_batch=1, learning_rate=1e-6)
    [notice] = [n for n in run.notices() if n["kind"] == "negative_kl"]
    assert notice["step"] == 2
    assert "in step 2" in notice["text"]


# -- scores ------------------------------------------------------------------------------------------------------------------


def test_scores_beyond_the_clip_are_counted_and_told(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """A reward of 0 to 100 under the default clip of 10: what is lost is said, once, with the remedies."""

    def percent(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float]:
        return [100 * v for v in even(prompts, completions, completion_ids)]

    run, _ = train([percent], max_steps=3, updates_per_batch=1)
    shares = [m["objective/scores_clipped"] for m in run.metrics()]
    rows = [r for r in run.rows(attempts.FILE) if r["step"] == 1]
    assert shares[0] == pytest.approx(sum(abs(r["total"]) > 10 for r in rows) / len(rows))
    assert shares[0] > 0.5
    [notice] = [n for n in run.notices() if n["kind"] == "scores_clipped"]
    assert "score_clip 10" in notice["text"]
    assert "score_scaling: running" in notice["text"]
    run, _ = train([percent], max_steps=3, updates_per_batch=1, score_scaling="running", score_clip=0.1)
    [notice] = [n for n in run.notices() if n["kind"] == "scores_clipped"]
    assert notice["text"].endswith("raise score_clip")
    run, _ = train([even], max_steps=1)
    assert run.metrics()[0]["objective/scores_clipped"] == 0
    assert not [n for n in run.notices() if n["kind"] == "scores_clipped"]


def test_the_end_that_counts_is_in_the_answer_and_a_missing_one_costs_once(train: Train) -> None:
    """The prompt's own end marks are none of the answer's: an answer of full length without one pays, whatever the template holds."""

    def constant(prompts: Any, completions: Any) -> list[float]:
        return [1.0] * len(prompts)

    given: dict[str, Any] = {"max_steps": 1, "updates_per_batch": 1, "beta": 0.0, "missing_end_penalty": 3.0, "score_clip": 2.0}
    run, _ = train([constant], **given)
    rows = run.rows(attempts.FILE)
    ended = [r["tokens"][-1] == 2 for r in rows]
    assert [r["finish_reason"] == "stop" for r in rows] == ended
    m = run.metrics()[0]
    assert m["val/num_eos_tokens"] == sum(ended)
    assert m["objective/scores"] == pytest.approx(1 - 3 * (1 - sum(ended) / len(rows)))


# -- an SFT adapter below (LLaMA-Factory#8459, torchtune#2272) -----------------------------------------------------------------


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_a_run_on_an_sft_adapter_is_tied_to_the_sft_model(train: Train, tmp_path: Path, critic: str) -> None:
    base = save_tiny(tmp_path / "base", tiny_config(pad_token_id=None, initializer_range=0.4))
    blue = write_rows(tmp_path / "blue.jsonl", [{"prompt": words(i, 2), "completion": "w42"} for i in range(8)])
    sft, _ = start("sft", base, blue, tmp_path / "sft", lora={"rank": 4}, max_steps=30, learning_rate=1e-2)
    adapter = sft.folder / "model"
    before = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in adapter.iterdir() if p.is_file()}
    run, _ = train([even], model=str(adapter), critic=critic, beta=0.1, max_steps=3, max_length=16, temperature=1.5)
    m = run.metrics()
    assert m[0]["objective/kl"] == pytest.approx(0, abs=1e-5)
    assert m[-1]["objective/kl"] != 0
    assert {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in adapter.iterdir() if p.is_file()} == before
    made = load_file(run.folder / "model/adapter_model.safetensors")
    assert made.keys() == load_file(adapter / "adapter_model.safetensors").keys(), "one adapter goes on"
    if critic == "separate":
        kept = load_file(run.folder / "checkpoints/000003" / FOLDER / "model.safetensors")
        assert "score.weight" in kept


# -- half precision (AReaL#1634) -------------------------------------------------------------------------------------------------


def test_small_steps_move_half_precision_runs_and_what_storing_takes_is_told(train: Train, tmp_path: Path, model: Path) -> None:
    run, _ = train([even], precision="bf16", learning_rate=1e-6, max_steps=2, lr_scheduler="constant")
    first, last = load_file(model / "model.safetensors"), weights(run)
    assert min(float((last[n].float() != w.float()).double().mean()) for n, w in first.items() if n in last) > 0.8
    half = tmp_path / "half"
    half.mkdir()
    for path in model.iterdir():
        (half / path.name).write_bytes(path.read_bytes())
    save_file({n: w.bfloat16() for n, w in first.items()}, half / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    run, _ = train([even], model=str(half), learning_rate=1e-6, max_steps=2)
    [notice] = [n for n in run.notices() if n["kind"] == "rounded_away"]
    assert "float32 weights are a model folder too" in notice["text"]


# -- one broken step (trl#6702) --------------------------------------------------------------------------------------------------


def test_a_step_that_is_not_finite_moves_neither_policy_nor_critic(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = ppo.part_loss, []

    def broken(*args: Any) -> Any:
        calls.append(1)
        loss, metrics = real(*args)
        return (loss * float("nan"), metrics) if len(calls) == 2 else (loss, metrics)

    monkeypatch.setattr(ppo, "part_loss", broken)
    run, _ = train([even], critic="separate", max_steps=3, save_steps=1, updates_per_batch=1, keep_checkpoints=10)
    assert [m["skipped"] for m in run.metrics()] == [0, 1, 0]
    assert math.isnan(run.metrics()[1]["loss"])
    for file in ("model.safetensors", f"{FOLDER}/model.safetensors"):
        one, two, three = (load_file(run.folder / f"checkpoints/00000{k}" / file) for k in (1, 2, 3))
        assert all(torch.equal(one[n], two[n]) for n in one)
        assert not all(torch.equal(two[n], three[n]) for n in one)


# -- resume (NeMo-RL#3171, trl#2657, OpenRLHF#1350) ------------------------------------------------------------------------------


RESUMED: dict[str, dict[str, Any]] = {
    "shared": {"score_scaling": "running", "kl_target": 0.5, "kl_horizon": 200, "eval_fraction": 0.2, "eval_steps": 2},
    "separate": {"critic": "separate", "critic_learning_rate": 1e-2, "reference_refresh_steps": 3, "mini_batches": 2},
    "separate, adapter": {"critic": "separate", "lora": {"rank": 4}, "max_approx_kl": 0.01},
}


@pytest.mark.parametrize("at", [1, 12], ids=["before the first checkpoint", "between two"])
@pytest.mark.parametrize("name", RESUMED)
def test_a_stopped_run_goes_on_bit_for_bit(train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, at: int) -> None:
    """Stopped inside an update, with policy and critic half-way through a batch: every number, every attempt, both models' weights and
    their optimiser end as in the run that was let be."""
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": words(5 * i, 2 + i % 4)} for i in range(11)])
    given = {"data": str(data), "batch_size": 4, "updates_per_batch": 2, "max_steps": 8, "save_steps": 3, **RESUMED[name]}
    (tmp_path / "even.py").write_text(
        "def even(prompts, completions, completion_ids):\n    return [sum(i % 2 == 0 for i in x) / len(x) for x in completion_ids]\n"
    )
    monkeypatch.chdir(tmp_path)
    named = {**given, "rewards": [f"{tmp_path / 'even.py'}:even"]}
    whole, summary = train(None, run=str(tmp_path / "whole"), **named)
    with monkeypatch.context() as patch:
        kill_in(patch, at)
        with pytest.raises(Killed):
            train(None, run=str(tmp_path / "stopped"), **named)
    torch.manual_seed(99)  # another process has another random state
    with Run.open(tmp_path / "stopped") as again:
        assert isinstance(again.recipe, PPORecipe)
        summary_again = ppo.train(again.recipe, again)

    assert timeless(again) == timeless(whole)
    assert again.rows(attempts.FILE) == whole.rows(attempts.FILE)
    assert {k: v for k, v in summary_again.items() if k not in ("seconds", "phases")} == {
        k: v for k, v in summary.items() if k not in ("seconds", "phases")
    }
    for part in ("model", "checkpoints/000008"):
        files = sorted(p.relative_to(whole.folder) for p in (whole.folder / part).rglob("*.safetensors"))
        assert files
        assert all((whole.folder / f).read_bytes() == (again.folder / f).read_bytes() for f in files), part
    critic = whole.folder / "checkpoints/000008"
    assert (critic / HEAD).is_file() or list((critic / FOLDER).glob("*.safetensors"))
