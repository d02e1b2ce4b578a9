"""A step of sampling and learning: what users of other libraries have met, as whole steps and whole runs of `tether grpo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig

from tests.grpo_runs import Train, even, gradients, model, moved, rollout, train, weights
from tests.tiny import save_tiny, tiny_config
from tether import rollout as attempts
from tether.algorithms import grpo
from tether.errors import UserError
from tether.policy import Policy
from tether.recipe import RECIPES, GRPORecipe
from tether.reward import Rewards
from tether.rollouts import attempt_metrics
from tether.token_batch import mini_batches, parts, token_batch

__all__ = ["model", "train"]  # fixtures


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
    run, _ = train([even], mask_truncated=True, max_completion_length=1, max_steps=3, weight_decay=0.1)
    assert any(n["kind"] == "nothing_trained" for n in run.notices())
    for m in run.metrics():
        if m["completions/clipped_ratio"] == 1.0:
            assert m["skipped"] == 1
    if all(m["skipped"] for m in run.metrics()):
        assert moved(run, model) == 0.0


@pytest.mark.parametrize("junk", [9.0, float("nan"), float("inf")])
def test_what_stands_at_masked_places_changes_nothing(model: Path, junk: float) -> None:
    policy = Policy.load(model, precision="fp32")
    recipe = GRPORecipe(model="m", data="d", preset="reinforce_pp", beta=0.1, updates_per_batch=2, num_generations=2, batch_size=4)
    groups = [
        [rollout([10, 11, 12, 2], 1.0), rollout([10, 2], 0.0, sample=1)],
        [rollout([13, 2], 0.3, group=1), rollout([2], 0.9, group=1, sample=1)],
    ]
    results = []
    for fill in (0.0, junk):
        batch = token_batch(groups)
        old, ref = batch.sampled_logp.clone(), batch.sampled_logp - 0.1
        for matrix in (old, ref, batch.sampled_logp):
            matrix[~batch.mask] = fill
        advantages = grpo.advantages_of(recipe, batch, old, ref, 0.1, Rewards([even]))
        [mini] = mini_batches(batch, 1, "")
        [part] = parts(batch, mini.examples, 10**6)
        lp = torch.where(batch.mask, batch.sampled_logp + 0.05, fill).requires_grad_()
        loss, metrics = grpo.part_loss(recipe, batch, part, mini, lp, advantages, old, ref, None, 0.1)
        loss.backward()
        results.append((loss.detach(), lp.grad, advantages, *metrics.values()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    del policy


def test_answers_that_are_cut_off_are_warned_of_with_the_limit(train: Train) -> None:
    run, _ = train([even], max_completion_length=2, max_steps=1)
    text = next(n["text"] for n in run.notices() if n["kind"] == "cut_off")
    assert "max_completion_length 2" in text
    assert "%" in text


@pytest.mark.parametrize("temperature", [0.6, 1.4])
@pytest.mark.parametrize("preset", ["grpo", "rloo"])
def test_ratios_and_kl_begin_at_nothing_at_any_temperature(train: Train, temperature: float, preset: str) -> None:
    run, _ = train([even], preset=preset, temperature=temperature, max_steps=1, updates_per_batch=2, learning_rate=1e-12)
    m = run.metrics()[0]
    assert m["ratio/max"] == pytest.approx(1, abs=1e-5)
    assert m["ratio/min"] == pytest.approx(1, abs=1e-5)
    assert m["sampling/sampling_logp_difference/max"] < 1e-5
    assert m["kl"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("setting", ["top_k", "top_p", "repetition_penalty", "min_new_tokens"])
@pytest.mark.parametrize("command", ["grpo", "ppo"])
def test_settings_that_bend_the_sampling_are_refused_by_name(command: str, setting: str) -> None:
    with pytest.raises(UserError, match=f"{setting}.*no such setting"):
        RECIPES[command](model="m", data="d", **{setting: 5})


@pytest.mark.parametrize("command", ["grpo", "ppo"])
def test_dropout_in_the_model_changes_nothing(train: Train, tmp_path: Path, command: str) -> None:
    folder = save_tiny(tmp_path / "dropout", tiny_config(attention_dropout=0.1))
    run, _ = train([even], command=command, model=str(folder), beta=0.1, max_steps=1, learning_rate=1e-12, updates_per_batch=2)
    m = run.metrics()[0]
    assert m["ratio/max"] == pytest.approx(1, abs=1e-5)
    assert m["kl"] == pytest.approx(0, abs=1e-5)
    assert json.loads((run.folder / "model/config.json").read_text())["attention_dropout"] == 0.1
    with pytest.raises(UserError, match="dropout"):
        RECIPES[command](model="m", data="d", lora={"dropout": 0.1})


def test_both_of_two_end_marks_end_an_answer_and_are_trained(tmp_path: Path, model: Path) -> None:
    """A second end mark, known to the generation settings alone: both count as ended, and only the third is cut off."""
    policy = Policy.load(model, precision="fp32")
    policy.model.generation_config = GenerationConfig(eos_token_id=[2, 11])
    from tether.engines.local import LocalSampler, Request
    from tether.engines.sampling import Sampling

    sampler = LocalSampler(policy.model, policy.codec, precision="fp32")
    assert {2, 11} <= set(sampler.end_ids)
    with torch.no_grad():  # token 11 is as likely as all others together
        policy.model.lm_head.weight[11] += 0.6 * policy.model.lm_head.weight.abs().mean()
    made = sampler.sample([Request([7, 8], Sampling(max_new_tokens=8), 64, "ends")])
    ends = {c.tokens[-1] for c in made if c.finish_reason == "stop"}
    assert ends <= {2, 11}
    cut = [c for c in made if c.finish_reason == "length"]
    assert all(not {2, 11} & set(c.tokens) for c in cut)
    assert all(c.tokens.index(c.tokens[-1]) == len(c.tokens) - 1 for c in made if c.finish_reason == "stop")
    three = [rollout([10, 2], 1.0), rollout([10, 11], 0.0, sample=1), rollout([10, 12], 0.5, finish="length", sample=2)]
    assert attempt_metrics(three)["completions/clipped_ratio"] == pytest.approx(1 / 3)
    assert token_batch([three]).mask.sum(1).tolist() == [2, 2, 2], "the end mark is in the loss"


def test_the_sampled_ids_are_trained_though_their_text_would_be_encoded_otherwise(train: Train) -> None:
    """What is packed for the update is what the sampler drew, id by id; text is never encoded again."""
    seen: list[list[int]] = []
    real = parts

    def spying(batch: Any, examples: Any, *more: Any) -> Any:
        for part in real(batch, examples, *more):
            seen.extend(part.packed.targets[part.packed.answer == a].tolist() for a in range(part.packed.n_answers))
            yield part

    import tether.algorithms.grpo as module

    old, module.parts = module.parts, spying  # type: ignore[assignment]
    try:
        run, _ = train([even], max_steps=1)
    finally:
        module.parts = old  # type: ignore[assignment]
    drawn = [r["tokens"] for r in run.rows(attempts.FILE)]
    assert sorted(seen) == sorted(drawn)


def test_small_steps_move_half_precision_runs(train: Train, model: Path) -> None:
    """At a learning rate of 1e-6 a bfloat16 weight would stay where it is: trained weights are float32 whatever the matmuls run in."""
    run, _ = train([even], precision="bf16", learning_rate=1e-6, max_steps=3, lr_scheduler="constant")
    start, end = load_file(model / "model.safetensors"), weights(run)
    changed = [(end[n].float() != w.float()).float().mean() for n, w in start.items() if n in end]
    assert min(map(float, changed)) > 0.9
