"""An update on sampled answers: what users of other libraries have met, as whole steps and whole runs of `tether grpo`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.grpo_runs import PRESETS, Train, even, finite, gradients, model, moved, rollout, train, weights
from tests.tiny import save_tiny, tiny_config
from tests.whole_runs import measured_alone, tokenizer_of, write_rows
from tests.whole_runs import weights as weights_in
from tether import rollout as attempts
from tether.algorithms import grpo
from tether.cli import run as tether
from tether.errors import UserError
from tether.policy import Policy
from tether.recipe import GRPORecipe
from tether.reward import Rewards
from tether.rollout import Rollout
from tether.token_batch import mini_batches, parts, token_batch

__all__ = ["model", "train"]  # fixtures

# -- splits of a step (transformers#24725) -----------------------------------------------------------------------------


def mixed_groups() -> list[list[Rollout]]:
    """Three groups with answers of 1 to 40 tokens: one answer is cut off, one is unscored, one group agrees."""
    lengths = [[2, 40, 7, 3], [1, 25, 9, 4], [6, 6, 2, 11]]
    groups = []
    for g, row in enumerate(lengths):
        made = [rollout([10 + (7 * t + g) % 80 for t in range(n - 1)] + [2], (n * 3 % 5) / 4, group=g, sample=i) for i, n in enumerate(row)]
        groups.append(made)
    groups[0][1] = rollout(groups[0][1].tokens, 0.2, finish="length", sample=1)
    groups[1][2] = rollout(groups[1][2].tokens, None, group=1, sample=2)
    groups[2] = [rollout(r.tokens, 0.5, group=2, sample=i) for i, r in enumerate(groups[2])]
    return groups


@pytest.mark.parametrize("masked", [False, True], ids=["", "cut answers masked"])
@pytest.mark.parametrize("preset", PRESETS)
def test_any_split_of_a_step_gives_the_same_gradient(model: Path, preset: str, masked: bool) -> None:
    """One prompt at a time, two, or all at once; with a tie where the method has one, and off policy."""
    policy = Policy.load(model, precision="fp32")
    policy.model.double()
    beta = 0.1 if preset in ("grpo", "rloo", "reinforce", "reinforce_pp") else 0.0
    off: dict[str, Any] = {"overlong_cache": None} if preset == "dapo" else {}
    found = []
    for budget in (1, 90, 10_000):
        settings: dict[str, Any] = {
            "mask_truncated": masked,
            "num_generations": 4,
            "batch_size": 12,
            "tokens_per_micro_batch": budget,
            "beta": beta,
            **off,
        }
        recipe = GRPORecipe(model="m", data="d", preset=preset, updates_per_batch=2, **settings)
        batch = token_batch(mixed_groups(), mask_truncated=masked)
        old, ref = batch.sampled_logp.double(), batch.sampled_logp.double() - 0.05
        advantages = grpo.advantages_of(recipe, batch, old, ref if beta else None, beta, Rewards([even])).double()
        found.append(gradients(policy, recipe, batch, advantages, old=old, ref=ref if beta else None, beta=beta))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert float(one.norm()) > 0
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6 * float(one.abs().max()))


# -- masking of cut-off answers (trl#6369) -----------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_a_masked_answer_leaves_the_divisor_too(model: Path, aggregation: str) -> None:
    """Answers of 2, 3, 5 and 30 tokens, the last cut off and masked: the gradient of a batch of the first three."""
    policy = Policy.load(model, precision="fp32")
    recipe = GRPORecipe(model="m", data="d", aggregation=aggregation, mask_truncated=True, num_generations=4, batch_size=4)
    whole = [rollout([10 + t for t in range(n - 1)] + [2], float(n), sample=n) for n in (2, 3, 5)]
    cut = rollout(list(range(10, 40)), 0.0, finish="length", sample=30)
    advantages = torch.tensor([1.0, -0.5, 0.7, 9.0])
    four = gradients(policy, recipe, token_batch([[*whole, cut]], mask_truncated=True), advantages)
    three = gradients(policy, recipe, token_batch([whole], mask_truncated=True), advantages[:3])
    torch.testing.assert_close(four, three, rtol=1e-5, atol=1e-7)


def test_the_reward_of_a_masked_answer_stays_in_the_group() -> None:
    batch = token_batch([[rollout([10, 2], 1.0), rollout([10, 11], 0.0, finish="length", sample=1)]], mask_truncated=True)
    recipe = GRPORecipe(model="m", data="d", advantage="group_mean", num_generations=2, batch_size=2)
    assert grpo.advantages_of(recipe, batch, None, None, 0.0, Rewards([even])).tolist() == [0.5, -0.5]
    assert batch.active.tolist() == [True, False]


def test_a_step_with_everything_masked_moves_nothing_and_is_warned_of(train: Train, model: Path) -> None:
    run, _ = train([even], mask_truncated=True, max_completion_length=1, max_steps=3, weight_decay=0.1, learning_rate=1e-4)
    silent = [m for m in run.metrics() if m["completions/clipped_ratio"] == 1.0]
    assert silent, "one token is seldom the end mark"
    assert all(m["skipped"] == 1 and m["grad_norm"] == 0.0 and "no token" in m["skip_reason"] for m in silent)
    assert [n["step"] for n in run.notices() if n["kind"] == "nothing_trained"] == [m["step"] for m in silent]
    assert finite(run)
    if len(silent) == 3:
        assert moved(run, model) == 0.0


# -- numbers at masked places (AReaL#1346, OpenRLHF#1240) --------------------------------------------------------------


@pytest.mark.parametrize("junk", [9.0, float("nan"), float("inf")])
@pytest.mark.parametrize("preset", PRESETS)
def test_what_stands_at_masked_places_changes_nothing(preset: str, junk: float) -> None:
    """Behind the ends, and at an answer that no reward could judge: loss, gradient, advantages and metrics, bit for bit."""
    beta = 0.1 if preset in ("grpo", "rloo", "reinforce", "reinforce_pp") else 0.0
    off: dict[str, Any] = {"overlong_cache": None} if preset == "dapo" else {}
    settings: dict[str, Any] = {"updates_per_batch": 2, "num_generations": 3, "batch_size": 6, "importance": "token_truncate", **off}
    recipe = GRPORecipe(model="m", data="d", preset=preset, beta=beta, **settings)
    groups = [
        [rollout([10, 11, 12, 2], 1.0), rollout([10, 2], 0.0, sample=1), rollout([10, 12, 2], None, sample=2)],
        [rollout([13, 2], 0.3, group=1), rollout([2], 0.9, group=1, sample=1), rollout([14, 2], 0.1, group=1, sample=2)],
    ]
    results = []
    for fill in (0.0, junk):
        batch = token_batch(groups)
        old, ref = batch.sampled_logp.clone() + 0.02, batch.sampled_logp - 0.1
        for matrix in (old, ref, batch.sampled_logp):
            matrix[~batch.mask] = fill
        advantages = grpo.advantages_of(recipe, batch, old, ref if beta else None, beta, Rewards([even]))
        weigh = grpo.mismatch_weights(old, batch.sampled_logp, batch.mask, recipe.importance)
        [mini] = mini_batches(batch, 1, "")
        [part] = parts(batch, mini.examples, 10**6)
        lp = torch.where(batch.mask, batch.sampled_logp + 0.05, fill)[part.rows].requires_grad_()
        loss, metrics = grpo.part_loss(recipe, batch, part, mini, lp, advantages, old, ref if beta else None, weigh, beta)
        loss.backward()
        results.append((loss.detach(), lp.grad, advantages, *metrics.values()))
    assert bool(torch.isfinite(results[0][0]))
    assert float(results[0][1].abs().sum()) > 0  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# -- a step that is not finite (trl#6702) ------------------------------------------------------------------------------


def test_a_step_that_is_not_finite_is_not_applied_and_is_seen(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = grpo.part_loss, []

    def poisoned(*arguments: Any) -> Any:
        calls.append(1)
        loss, metrics = real(*arguments)
        return (loss * math.nan if len(calls) == 3 else loss), metrics

    monkeypatch.setattr(grpo, "part_loss", poisoned)
    run, _ = train([even], max_steps=6, save_steps=1, keep_checkpoints=10, learning_rate=1e-3, n_prompts=24)
    assert [m["skipped"] for m in run.metrics()] == [0, 0, 1, 0, 0, 0]
    assert math.isnan(run.metrics()[2]["loss"])
    saved = [weights_in(folder) for folder in run.checkpoints()]
    assert all(torch.isfinite(t).all() for state in [*saved, weights(run)] for t in state.values())
    assert all(torch.equal(saved[1][n], saved[2][n]) for n in saved[1]), "step 3 moved nothing"
    assert tether(["report", str(run.folder)]) == 0
    assert "1 step of 6 could not be applied, at 3" in (run.folder / "report.html").read_text()


def test_an_infinite_reward_is_unscored_and_many_of_them_stop_the_run(train: Train) -> None:
    def infinite(share: int) -> Any:
        def some(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float]:
            return [math.inf if i < share else v for i, v in enumerate(even(prompts, completions, completion_ids))]

        return some

    run, _ = train([infinite(1)], max_steps=2)
    assert finite(run)
    assert all(r["total"] is None for r in run.rows(attempts.FILE) if r["sample"] == 0 and r["group"] % 8 == 0)
    assert any("gave NaN or inf for 1 of 16" in n["text"] for n in run.notices())
    with pytest.raises(UserError, match=r"reward 'some' gave NaN or inf for 4 of 16.*stops the run"):
        train([infinite(4)], max_steps=2)


# -- memory (trl#3678, OpenRLHF#718) -----------------------------------------------------------------------------------

MEMORY = """
from tether.algorithms import grpo
from tether.recipe import GRPORecipe
from tether.run import Run
recipe = GRPORecipe(model=str(model), data=str(data), run=str(run_folder), precision="fp32", trackers=[], batch_size=2, num_generations=2, max_steps=1,
    max_completion_length=512, max_length=1024, tokens_per_micro_batch=10_000, beta=0.1, updates_per_batch=2, log_every=1000)
with Run.create(run_folder, recipe) as run:
    grpo.train(recipe, run, [lambda prompts, completions, completion_ids: [float(len(i)) + i[0] for i in completion_ids]])
row = run.metrics()[0]
print(json.dumps([peak() - marks[0], row["completions/mean_length"], row["grad_norm"], row["kl"]]))
"""


@pytest.mark.slow
def test_a_whole_run_with_a_large_vocabulary_never_holds_the_table_of_scores(tmp_path: Path) -> None:
    """Vocabulary 150,000, width 64, two answers of 512 tokens, sampled, scored by policy and reference, and learnt from twice: a
    float32 table is 586 MiB, and the plain way keeps three to four. The run stays below 1.5 of them over the loaded model."""
    tokenizer = tokenizer_of([f"v{i}" for i in range(149_997)])
    config = tiny_config(150_000, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128, initializer_range=0.02)
    folder = save_tiny(tmp_path / "model", config, tokenizer=tokenizer)
    data = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "v1 v2 v3"}])
    extra, length, norm, kl = measured_alone(MEMORY, folder, data, tmp_path / "run", tmp_path / "cache")
    assert length > 500
    assert norm > 0
    assert math.isfinite(kl)
    # Gradients, moments and the reference's copy of the weights (4 x 37 MiB), keys and values, and the checkpoint's copy are in it.
    assert extra < 1.5 * 586, f"{extra:.0f} MiB"
