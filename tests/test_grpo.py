"""Whole runs of `tether grpo` on tiny models: what was learnt, what does not show, what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.grpo_runs import PRESETS, Train, even, model, moved, odd, timeless, train
from tether import rollout as attempts
from tether.algorithms import grpo
from tether.errors import UserError
from tether.recipe import GRPORecipe
from tether.rollout import Rollout
from tether.run import Run
from tether.stopwatch import Stopwatch

__all__ = ["model", "train"]  # fixtures


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_a_scripted_reward_rises_and_with_the_sign_flipped_falls(train: Train, preset: str | None) -> None:
    settings: dict[str, Any] = {"batch_size": 48, "num_generations": 8, "max_steps": 10, "lr_scheduler": "constant", "overlong_cache": None}
    ends = []
    for reward in (even, odd):
        run, _ = train([reward], **settings, **({"preset": preset} if preset else {}))
        made = [sum(i % 2 == 0 for i in r["tokens"]) / len(r["tokens"]) for r in run.rows(attempts.FILE) if r["step"] > 8]
        ends.append(sum(made) / len(made))
    first = run.metrics()[0]
    assert ends[0] > -first["reward"] + 0.04
    assert ends[1] < -first["reward"] - 0.04


def test_a_run_says_what_happened_under_the_usual_names(train: Train) -> None:
    run, summary = train([even], beta=0.1, updates_per_batch=2, eval_fraction=0.25, eval_steps=2)
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
    assert len(rows) == (4 + 4 + 1 + 4) * 4, "nine prompts, four a step: the epoch ends with a step of one"
    for row in rows[:20]:
        made = Rollout.from_row(row)
        assert made.total == pytest.approx(even([], [], [made.tokens])[0])
        assert made.advantage is not None
        assert made.source is not None
        assert made.columns == {"gold": made.source.line - 1}, "every column of the attempt's own row"


def test_a_loss_of_zero_is_no_stand_still(train: Train, model: Path) -> None:
    """With one update for a batch and a mean per answer the loss is 0 by construction; the gradient is not."""
    run, _ = train([even], preset="grpo", beta=0.0, max_steps=2)
    assert abs(run.metrics()[0]["loss"]) < 1e-6
    assert run.metrics()[0]["grad_norm"] > 0.01
    assert moved(run, model) > 1e-3


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
    runs = [train([even], max_steps=2, tokens_per_micro_batch=budget, learning_rate=1e-3, **settings)[0] for budget in (1, 60, 10_000)]
    for other in runs[1:]:
        for a, b in zip(runs[0].metrics(), other.metrics(), strict=True):
            for name in ("loss", "reward", "entropy", "grad_norm", "clip_ratio/region_mean", "ratio/max"):
                if name in a:
                    assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), name


def test_shared_prompts_do_not_show(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    from tether import token_batch as module

    shared, _ = train([even], max_steps=1)
    real = module.pack
    monkeypatch.setattr(module, "pack", lambda examples, **k: real(examples, share_prompts=False, **k))
    apart, _ = train([even], max_steps=1)
    assert shared.metrics()[0]["grad_norm"] == pytest.approx(apart.metrics()[0]["grad_norm"], rel=1e-5)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(train: Train) -> None:
    one, two, other = (train([even], max_steps=2, seed=seed)[0] for seed in (3, 3, 4))
    assert timeless(one) == timeless(two)
    assert [r["tokens"] for r in one.rows(attempts.FILE)] != [r["tokens"] for r in other.rows(attempts.FILE)]


def test_an_adaptive_tie_follows_the_kl_and_is_kept(train: Train) -> None:
    run, _ = train([even], beta=0.1, kl_target=0.01, kl_horizon=100, max_steps=4, learning_rate=1e-2)
    values = [m["kl_coef"] for m in run.metrics()]
    assert values[0] == 0.1
    assert values[-1] > values[1], "the KL is above its target"
    assert values[1] == pytest.approx(0.1 * (1 - 0.2 * 16 / 100)), "at first there is no KL at all"


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_watching_the_kl_changes_nothing_but_tells_it(train: Train, place: str) -> None:
    settings: dict[str, Any] = {"beta": 0.0, "kl_in": place, "max_steps": 4, "lr_scheduler": "constant"}
    plain, _ = train([even], **settings)
    watched, _ = train([even], **settings, watch_kl=True)
    assert moved(plain, watched.folder / "model") == 0
    assert not any("objective/kl" in m for m in plain.metrics())
    kl = [m["objective/kl"] for m in watched.metrics()]
    assert abs(kl[0]) < 1e-5
    # Of the tokens of each step, under the weights that sampled them and the weights of the start: what rollouts.jsonl can be asked for.
    assert kl[-1] > 0.01


def test_a_reference_that_is_refreshed_brings_the_kl_back_to_nothing(train: Train) -> None:
    run, _ = train([even], beta=0.1, reference_refresh_steps=2, max_steps=5, learning_rate=1e-2, lr_scheduler="constant")
    kl = [m["objective/kl"] for m in run.metrics()]
    assert kl[0] == pytest.approx(0, abs=1e-4)
    assert kl[1] > 1e-3
    assert kl[2] == pytest.approx(0, abs=1e-4)
    assert kl[4] == pytest.approx(0, abs=1e-4)


def test_importance_weights_are_one_where_sampler_and_trainer_agree(train: Train) -> None:
    plain, _ = train([even], updates_per_batch=2, max_steps=1)
    weighed, _ = train([even], updates_per_batch=2, max_steps=1, importance="token_truncate")
    assert weighed.metrics()[0]["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-5)
    assert plain.metrics()[0]["grad_norm"] == pytest.approx(weighed.metrics()[0]["grad_norm"], rel=1e-4)


def test_adapters_train_and_the_base_is_left_alone(train: Train) -> None:
    run, _ = train([even], beta=0.05, lora={"rank": 4}, max_steps=2, reference_refresh_steps=1)
    assert (run.folder / "model/adapter_model.safetensors").exists()
    assert run.metrics()[0]["kl"] == pytest.approx(0, abs=1e-5)


def test_without_a_reward_a_run_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    recipe = GRPORecipe(model=str(tmp_path / "none"), data="d.jsonl", run=str(tmp_path / "run"))
    with Run.create(recipe.run or "", recipe) as run, pytest.raises(UserError, match="no reward was given"):
        grpo.train(recipe, run)


def test_prompts_that_leave_no_room_are_dropped_and_listed(train: Train) -> None:
    run, summary = train([even], max_length=10, max_completion_length=6, max_steps=1)
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
        train([even], max_steps=1)


def test_the_stopwatch_adds_up_and_starts_anew() -> None:
    watch = Stopwatch()
    for _ in range(2):
        with watch("a"):
            pass
    assert watch.metrics()["time/a"] >= 0
    assert watch.metrics() == {}
