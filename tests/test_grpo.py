"""Whole runs of `tether grpo` on tiny models: what was learnt, what does not show, and what happens at the edges."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig

from tests.test_training import words, write
from tests.tiny import save_tiny, tiny_config
from tether import rollout as attempts
from tether.algorithms import grpo, ppo
from tether.errors import UserError
from tether.policy import Policy
from tether.recipe import RECIPES, GRPORecipe
from tether.reward import Rewards
from tether.rollout import Rollout, View
from tether.rollouts import alike, attempt_metrics, make_rewards
from tether.run import Run
from tether.stopwatch import Stopwatch
from tether.token_batch import mini_batches, parts, token_batch

ALGORITHMS: dict[str, Any] = {"grpo": grpo, "ppo": ppo}
PRESETS = ("reinforce", "rloo", "reinforce_pp", "grpo", "dr_grpo", "dapo", "gspo", "cispo")


def even(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float]:
    """Share of tokens with an even id."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def odd(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float]:
    return [-value for value in even(prompts, completions, completion_ids)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


Train = Callable[..., tuple[Run, dict[str, Any]]]


@pytest.fixture
def train(model: Path, tmp_path: Path) -> Train:
    count = 0

    def go(command: str, rewards: list[Any], n_prompts: int = 12, **settings: Any) -> tuple[Run, dict[str, Any]]:
        nonlocal count
        count += 1
        data = write(tmp_path / f"prompts{count}.jsonl", [{"prompt": words(5 * i, 2 + i % 4), "gold": i} for i in range(n_prompts)])
        given = {"model": str(model), "data": str(data), "run": str(tmp_path / f"run{count}"), "precision": "fp32", "trackers": []}
        small = {"batch_size": 16, "num_generations": 4, "max_completion_length": 6, "learning_rate": 5e-3, "max_steps": 4}
        recipe = RECIPES[command](**{**given, **small, "log_every": 1000, **settings})
        with Run.create(recipe.run or "", recipe) as run:
            return run, ALGORITHMS[command].train(recipe, run, rewards)

    return go


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "model/model.safetensors")


def timeless(run: Run) -> list[dict[str, Any]]:
    clock = ("step_time", "tokens_per_second")
    return [{k: v for k, v in m.items() if k not in clock and not k.startswith("time/")} for m in run.metrics()]


def moved(run: Run, model: Path) -> float:
    start = load_file(model / "model.safetensors")
    return max(float((w - start[n]).abs().max()) for n, w in weights(run).items() if n in start)


# --- learning -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_a_scripted_reward_rises_and_with_the_sign_flipped_falls(train: Train, preset: str | None) -> None:
    settings: dict[str, Any] = {"batch_size": 48, "num_generations": 8, "max_steps": 10, "lr_scheduler": "constant", "overlong_cache": None}
    ends = []
    for reward in (even, odd):
        run, _ = train("grpo", [reward], **settings, **({"preset": preset} if preset else {}))
        made = [sum(i % 2 == 0 for i in r["tokens"]) / len(r["tokens"]) for r in run.rows(attempts.FILE) if r["step"] > 8]
        ends.append(sum(made) / len(made))
    first = run.metrics()[0]
    assert ends[0] > -first["reward"] + 0.04
    assert ends[1] < -first["reward"] - 0.04


def test_a_run_says_what_happened_under_the_usual_names(train: Train) -> None:
    run, summary = train("grpo", [even], beta=0.1, updates_per_batch=2, eval_fraction=0.25, eval_steps=2)
    last = run.metrics()[-1]
    for name in (
        *("reward", "reward_std", "rewards/even/mean", "rewards/even/std", "frac_reward_zero_std", "frac_reward_zero_std/all_right"),
        *("completions/mean_length", "completions/min_length", "completions/max_length", "completions/clipped_ratio"),
        *("kl", "kl/k1", "objective/kl", "kl_coef", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"),
        *("ratio/mean", "ratio/min", "ratio/max", "policy_loss", "num_tokens", "advantage/abs_mean", "grad_norm", "learning_rate"),
        *("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max", "eval_reward", "eval_greedy_reward"),
        *("time/sampling", "time/reward", "time/scoring", "time/update"),
    ):
        assert name in last, name
    assert last["ratio/min"] < 1 < last["ratio/max"]
    assert last["kl"] >= 0
    assert summary["held_out"]["n"] == 3
    first = run.metrics()[1]
    assert first["sampling/sampling_logp_difference/max"] < 1e-5
    checks = [n["text"] for n in run.notices() if n["kind"] == "startup_check"]
    assert len(checks) == 2
    assert all("ratio 1.00000" in text for text in checks)
    rows = run.rows(attempts.FILE)
    assert len(rows) == 4 * 16
    for row in rows[:20]:
        made = Rollout.from_row(row)
        assert made.total == pytest.approx(even([], [], [made.tokens])[0])
        assert made.advantage is not None
        assert made.columns == {"gold": made.prompt_id}


def test_a_loss_of_zero_is_no_stand_still(train: Train, model: Path) -> None:
    """With one update for a batch and a mean per answer the loss is 0 by construction; the gradient is not."""
    run, _ = train("grpo", [even], preset="grpo", beta=0.0, max_steps=2)
    assert abs(run.metrics()[0]["loss"]) < 1e-6
    assert run.metrics()[0]["grad_norm"] > 0.01
    assert moved(run, model) > 1e-3


# --- what does not show ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"preset": "grpo"},
        {"preset": "dr_grpo", "mask_truncated": True},
        {"preset": "reinforce_pp", "updates_per_batch": 2, "mini_batches": 2},
        {"preset": "dapo", "importance": "token_truncate", "updates_per_batch": 2},
        {"preset": "gspo", "updates_per_batch": 2},
    ],
    ids=lambda s: s["preset"],
)
def test_micro_batches_do_not_show(train: Train, settings: dict[str, Any]) -> None:
    """SGD-like comparison: metrics of the first step, and of the second, which already depends on the first update."""
    runs = [
        train("grpo", [even], max_steps=2, tokens_per_micro_batch=budget, learning_rate=1e-3, **settings)[0] for budget in (1, 60, 10_000)
    ]
    for other in runs[1:]:
        for a, b in zip(runs[0].metrics(), other.metrics(), strict=True):
            for name in ("loss", "reward", "entropy", "grad_norm", "clip_ratio/region_mean", "ratio/max"):
                if name in a:
                    assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), name


def test_shared_prompts_do_not_show(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    from tether import token_batch as module

    shared, _ = train("grpo", [even], max_steps=1)
    real = module.pack
    monkeypatch.setattr(module, "pack", lambda examples, **k: real(examples, share_prompts=False, **k))
    apart, _ = train("grpo", [even], max_steps=1)
    assert shared.metrics()[0]["grad_norm"] == pytest.approx(apart.metrics()[0]["grad_norm"], rel=1e-5)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(train: Train) -> None:
    one, two, other = (train("grpo", [even], max_steps=2, seed=seed)[0] for seed in (3, 3, 4))
    assert timeless(one) == timeless(two)
    assert [r["tokens"] for r in one.rows(attempts.FILE)] != [r["tokens"] for r in other.rows(attempts.FILE)]


# --- masks and edges ------------------------------------------------------------------------------------------------------------


def rollout(tokens: list[int], reward: float | None, *, finish: Any = "stop", group: int = 0, sample: int = 0) -> Rollout:
    logps = [-1.0 - 0.01 * t for t in range(len(tokens))]
    return Rollout(
        0, group, sample, "p", [7, 8, 9], tokens, [True] * len(tokens), logps, logps, finish, View("", ""), 0, {"r": reward}, reward
    )


def gradient(policy: Policy, recipe: GRPORecipe, batch: Any, advantages: torch.Tensor) -> torch.Tensor:
    class Loop:
        step = 0
        gradient = torch.zeros(1)

        def apply(self, loss: float) -> None:
            self.gradient = torch.cat([p.grad.reshape(-1) for p in policy.parameters().values()])  # type: ignore[union-attr]
            for p in policy.parameters().values():
                p.grad = None

        def rest(self) -> None:
            self.gradient = torch.zeros(1)

    loop: Any = Loop()
    grpo.updates(recipe, policy, loop, batch, advantages, None, None, 0.0)
    return loop.gradient


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_a_masked_answer_leaves_the_divisor_too(model: Path, aggregation: str) -> None:
    """Answers of 2, 3, 5 and 30 tokens, the last cut off and masked: the gradient of a batch of the first three."""
    policy = Policy.load(model, precision="fp32")
    recipe = GRPORecipe(model="m", data="d", aggregation=aggregation, mask_truncated=True, num_generations=4, batch_size=4)
    whole = [rollout([10 + t for t in range(n - 1)] + [2], float(n), sample=n) for n in (2, 3, 5)]
    cut = rollout(list(range(10, 40)), 0.0, finish="length", sample=30)
    advantages = torch.tensor([1.0, -0.5, 0.7, 9.0])
    four = gradient(policy, recipe, token_batch([[*whole, cut]], mask_truncated=True), advantages)
    three = gradient(policy, recipe, token_batch([whole], mask_truncated=True), advantages[:3])
    torch.testing.assert_close(four, three, rtol=1e-5, atol=1e-7)


def test_the_reward_of_a_masked_answer_stays_in_the_group() -> None:
    batch = token_batch([[rollout([10, 2], 1.0), rollout([10, 11], 0.0, finish="length", sample=1)]], mask_truncated=True)
    recipe = GRPORecipe(model="m", data="d", advantage="group_mean", num_generations=2, batch_size=2)
    assert grpo.advantages_of(recipe, batch, None, None, 0.0, Rewards([even])).tolist() == [0.5, -0.5]
    assert batch.active.tolist() == [True, False]


def test_a_step_with_everything_masked_moves_nothing_and_is_warned_of(train: Train, model: Path) -> None:
    run, _ = train("grpo", [even], mask_truncated=True, max_completion_length=1, max_steps=3, weight_decay=0.1)
    assert any(n["kind"] == "nothing_trained" for n in run.notices())
    for m in run.metrics():
        if m["completions/clipped_ratio"] == 1.0:
            assert m["skipped"] == 1
    if all(m["skipped"] for m in run.metrics()):
        assert moved(run, model) == 0.0


@pytest.mark.parametrize("preset", PRESETS)
def test_rewards_that_agree_up_to_rounding_move_nothing(train: Train, model: Path, preset: str) -> None:
    def same(prompts: Any, completions: Any) -> list[float]:
        return [0.1 + 1e-9 * i for i in range(len(prompts))]

    run, _ = train(
        "grpo", [same], preset=preset, beta=0.0, weight_decay=0.1, max_steps=2, **({"overlong_cache": None} if preset == "dapo" else {})
    )
    assert moved(run, model) == 0.0
    assert all(m["frac_reward_zero_std"] == 1.0 and m["grad_norm"] == 0.0 for m in run.metrics())
    assert all(m["frac_reward_zero_std/all_right"] == 1.0 for m in run.metrics())
    notice = next(n for n in run.notices() if n["kind"] == "no_signal")
    assert "frac_reward_zero_std" in notice["text"]


def test_a_group_without_a_spread_after_one_with_it_gets_no_push_from_momentum(train: Train) -> None:
    """AdamW moves weights whose gradient is 0; a step without a direction must not be a step."""
    asked = 0

    def first_only(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float]:
        nonlocal asked
        asked += 1
        return even(prompts, completions, completion_ids) if asked == 1 else [1.0] * len(prompts)

    one, _ = train("grpo", [first_only], max_steps=1, lr_scheduler="constant")
    asked = 0
    three, _ = train("grpo", [first_only], max_steps=3, lr_scheduler="constant")
    assert all(torch.equal(a, weights(three)[n]) for n, a in weights(one).items())


def test_a_group_of_one_is_refused_with_the_reason_and_of_two_works(train: Train) -> None:
    with pytest.raises(UserError, match="neither better nor worse"):
        train("grpo", [even], num_generations=1)
    run, _ = train("grpo", [even], preset="reinforce", num_generations=1, max_steps=1)
    assert run.metrics()[0]["grad_norm"] > 0

    def rarely(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float]:
        return [float(ids[0] % 10 == 0) for ids in completion_ids]

    run, _ = train("grpo", [rarely], num_generations=2, max_steps=2)
    assert 0 < run.metrics()[0]["frac_reward_zero_std"] <= 1


def test_answers_that_are_cut_off_are_warned_of_with_the_limit(train: Train) -> None:
    run, _ = train("grpo", [even], max_completion_length=2, max_steps=1)
    text = next(n["text"] for n in run.notices() if n["kind"] == "cut_off")
    assert "max_completion_length 2" in text
    assert "%" in text


@pytest.mark.parametrize("temperature", [0.6, 1.4])
@pytest.mark.parametrize("preset", ["grpo", "rloo"])
def test_ratios_and_kl_begin_at_nothing_at_any_temperature(train: Train, temperature: float, preset: str) -> None:
    run, _ = train("grpo", [even], preset=preset, temperature=temperature, max_steps=1, updates_per_batch=2, learning_rate=1e-12)
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
    run, _ = train(command, [even], model=str(folder), beta=0.1, max_steps=1, learning_rate=1e-12, updates_per_batch=2)
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
        run, _ = train("grpo", [even], max_steps=1)
    finally:
        module.parts = old  # type: ignore[assignment]
    drawn = [r["tokens"] for r in run.rows(attempts.FILE)]
    assert sorted(seen) == sorted(drawn)


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


def test_unscored_answers_stand_aside(train: Train) -> None:
    def some(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float | None]:
        return [None if i % 4 == 0 else v for i, v in enumerate(even(prompts, completions, completion_ids))]

    run, _ = train("grpo", [some], max_steps=1)
    assert run.metrics()[0]["rewards/some/unscored"] == 0.25
    rows = run.rows(attempts.FILE)
    assert [r["total"] is None for r in rows] == [i % 4 == 0 for i in range(16)]
    assert all(r["advantage"] == 0 for r in rows if r["total"] is None)
    batch = token_batch([[rollout([10, 2], 1.0), rollout([10, 2], None, sample=1)]])
    assert not bool(batch.mask.any()), "one scored answer has nothing to be compared with"


# --- what may be turned on ------------------------------------------------------------------------------------------------------


def test_dynamic_sampling_replaces_what_teaches_nothing(train: Train) -> None:
    def mostly_flat(prompts: list[str], completions: Any, completion_ids: list[list[int]]) -> list[float]:
        values = even(prompts, completions, completion_ids)
        return [v if sum(map(ord, p)) % 3 == 0 else 1.0 for p, v in zip(prompts, values, strict=True)]

    run, _ = train("grpo", [mostly_flat], n_prompts=40, dynamic_sampling=True, max_sampling_rounds=5, max_steps=2)
    for m in run.metrics():
        assert 0 < m["dynamic_sampling/acceptance"] < 1
        assert m["dynamic_sampling/prompts"] > 4
        assert m["frac_reward_zero_std"] > 0, "measured over all that was sampled"
    learnt = [r for r in run.rows(attempts.FILE) if r["advantage"] is not None]
    assert len(learnt) <= 2 * 16
    assert len({r["group"] for r in run.rows(attempts.FILE)}) > len({r["group"] for r in learnt})
    for m in run.metrics():
        assert m["advantage/abs_mean"] > 0.5


def test_equal_answers_of_different_length_are_still_equal(model: Path, tmp_path: Path) -> None:
    """The filter looks at the task's reward, before the penalty for length."""
    group = [rollout([10, 2], 1.0), rollout([10] * 9, 0.5, sample=1)]
    group = [group[0].scored({"r": 1.0, "overlong": 0.0}, 1.0), group[1].scored({"r": 1.0, "overlong": -0.5}, 0.5)]
    assert alike(group)
    recipe = GRPORecipe(model="m", data="d", preset="dapo", max_completion_length=10)
    run: Any = type("R", (), {"say": print})()
    assert make_rewards(recipe, run, [even]).names == ["even", "overlong"]
    with pytest.raises(UserError, match="penalised and left out"):
        GRPORecipe(model="m", data="d", overlong_cache=5, mask_truncated=True)


def test_an_adaptive_tie_follows_the_kl_and_is_kept(train: Train) -> None:
    run, _ = train("grpo", [even], beta=0.1, kl_target=0.01, kl_horizon=100, max_steps=4, learning_rate=1e-2)
    values = [m["kl_coef"] for m in run.metrics()]
    assert values[0] == 0.1
    assert values[-1] > values[1], "the KL is above its target"
    assert values[1] == pytest.approx(0.1 * (1 - 0.2 * 16 / 100)), "at first there is no KL at all"


def test_a_reference_that_is_refreshed_brings_the_kl_back_to_nothing(train: Train) -> None:
    run, _ = train("grpo", [even], beta=0.1, reference_refresh_steps=2, max_steps=5, learning_rate=1e-2, lr_scheduler="constant")
    kl = [m["objective/kl"] for m in run.metrics()]
    assert kl[0] == pytest.approx(0, abs=1e-4)
    assert kl[1] > 1e-3
    assert kl[2] == pytest.approx(0, abs=1e-4)
    assert kl[4] == pytest.approx(0, abs=1e-4)


def test_importance_weights_are_one_where_sampler_and_trainer_agree(train: Train) -> None:
    plain, _ = train("grpo", [even], updates_per_batch=2, max_steps=1)
    weighed, _ = train("grpo", [even], updates_per_batch=2, max_steps=1, importance="token_truncate")
    assert weighed.metrics()[0]["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-5)
    assert plain.metrics()[0]["grad_norm"] == pytest.approx(weighed.metrics()[0]["grad_norm"], rel=1e-4)


def test_several_rewards_are_mixed_as_asked(train: Train) -> None:
    def long(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float]:
        return [100.0 * len(ids) for ids in completion_ids]

    summed, _ = train("grpo", [even, long], max_steps=1)
    apart, _ = train("grpo", [even, long], reward_mixture="normalize_then_sum", max_steps=1)
    assert summed.metrics()[0]["rewards/long/mean"] == apart.metrics()[0]["rewards/long/mean"]
    assert [r["advantage"] for r in summed.rows(attempts.FILE)] != [r["advantage"] for r in apart.rows(attempts.FILE)]


def test_adapters_train_and_the_base_is_left_alone(train: Train) -> None:
    run, _ = train("grpo", [even], beta=0.05, lora={"rank": 4}, max_steps=2, reference_refresh_steps=1)
    assert (run.folder / "model/adapter_model.safetensors").exists()
    assert run.metrics()[0]["kl"] == pytest.approx(0, abs=1e-5)


def test_small_steps_move_half_precision_runs(train: Train, model: Path) -> None:
    """At a learning rate of 1e-6 a bfloat16 weight would stay where it is: trained weights are float32 whatever the matmuls run in."""
    run, _ = train("grpo", [even], precision="bf16", learning_rate=1e-6, max_steps=3, lr_scheduler="constant")
    start, end = load_file(model / "model.safetensors"), weights(run)
    changed = [(end[n].float() != w.float()).float().mean() for n, w in start.items() if n in end]
    assert min(map(float, changed)) > 0.9


def test_without_a_reward_a_run_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    recipe = GRPORecipe(model=str(tmp_path / "none"), data="d.jsonl", run=str(tmp_path / "run"))
    with Run.create(recipe.run or "", recipe) as run, pytest.raises(UserError, match="no reward was given"):
        grpo.train(recipe, run)


def test_prompts_that_leave_no_room_are_dropped_and_listed(train: Train) -> None:
    run, summary = train("grpo", [even], max_length=10, max_completion_length=6, max_steps=1)
    dropped = [n for n in run.notices() if n["kind"] == "prompt_too_long"]
    assert len(dropped) == 12 - summary["prompts"] == 3
    assert "jsonl:" in dropped[0]["text"]


def test_sampling_that_disagrees_with_training_is_refused_at_the_start(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    from tether import rollouts as module

    real = module.from_sampled

    def shifted(sampled: Any, **more: Any) -> Any:
        moved = copy.copy(sampled)
        object.__setattr__(moved, "logps", [x - 0.5 for x in sampled.logps])
        return real(moved, **more)

    monkeypatch.setattr(module, "from_sampled", shifted)
    with pytest.raises(UserError, match="sampling and of training differ by 5"):
        train("grpo", [even], max_steps=1)


def test_the_stopwatch_adds_up_and_starts_anew() -> None:
    watch = Stopwatch()
    for _ in range(2):
        with watch("a"):
            pass
    assert watch.metrics()["time/a"] >= 0
    assert watch.metrics() == {}
