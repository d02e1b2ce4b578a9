"""Which groups say something, and what a step does when none does: rewards that agree, groups of one, resampling, no score."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.grpo_runs import PRESETS, Train, even, model, moved, rollout, train, weights
from tether import rollout as attempts
from tether.errors import UserError
from tether.recipe import GRPORecipe
from tether.rollouts import alike, make_rewards
from tether.token_batch import token_batch

__all__ = ["model", "train"]  # fixtures


@pytest.mark.parametrize("preset", PRESETS)
def test_rewards_that_agree_up_to_rounding_move_nothing(train: Train, model: Path, preset: str) -> None:
    def same(prompts: Any, completions: Any) -> list[float]:
        return [0.1 + 1e-9 * i for i in range(len(prompts))]

    run, _ = train([same], preset=preset, beta=0.0, weight_decay=0.1, max_steps=2, **({"overlong_cache": None} if preset == "dapo" else {}))
    assert moved(run, model) == 0.0
    assert all(m["frac_reward_zero_std"] == 1.0 and m["grad_norm"] == 0.0 for m in run.metrics())
    assert all(m["frac_reward_zero_std/all_right"] == 1.0 for m in run.metrics())
    notice = next(n for n in run.notices() if n["kind"] == "no_signal")
    assert "frac_reward_zero_std" in notice["text"]


@pytest.mark.parametrize("preset", ["grpo", "rloo", "reinforce_pp", "dr_grpo"])
def test_where_rewards_agree_a_tie_to_the_reference_moves_nothing_either(train: Train, model: Path, preset: str) -> None:
    """At the start the policy is its reference, and what a tie's gradient holds is rounding: AdamW would make whole steps of it."""

    def same(prompts: Any, completions: Any) -> list[float]:
        return [0.5] * len(prompts)

    run, _ = train([same], preset=preset, beta=0.1, mini_batches=2, weight_decay=0.1, max_steps=3)
    assert moved(run, model) == 0.0
    assert all(m["grad_norm"] == 0.0 for m in run.metrics())


def in_the_first_step() -> Callable[..., list[float]]:
    """A reward that differs among answers in the first step of a run, and never again."""
    asked = 0

    def first_only(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float]:
        nonlocal asked
        asked += 1
        return even(prompts, completions, completion_ids) if asked == 1 else [1.0] * len(prompts)

    return first_only


def test_a_tie_pulls_once_the_policy_has_left_its_reference(train: Train) -> None:
    """Rewards of the first step alone; what follows is the pull, until the reference is made anew."""
    run, _ = train([in_the_first_step()], beta=0.5, max_steps=4, reference_refresh_steps=2, lr_scheduler="constant", learning_rate=1e-2)
    assert [m["grad_norm"] > 0 for m in run.metrics()] == [True, True, False, False]


def test_a_group_without_a_spread_after_one_with_it_gets_no_push_from_momentum(train: Train) -> None:
    """AdamW moves weights whose gradient is 0; a step without a direction must not be a step."""
    one, _ = train([in_the_first_step()], max_steps=1, lr_scheduler="constant")
    three, _ = train([in_the_first_step()], max_steps=3, lr_scheduler="constant")
    assert all(torch.equal(a, weights(three)[n]) for n, a in weights(one).items())


def test_a_group_of_one_is_refused_with_the_reason_and_of_two_works(train: Train) -> None:
    with pytest.raises(UserError, match="neither better nor worse"):
        train([even], num_generations=1)
    run, _ = train([even], preset="reinforce", num_generations=1, max_steps=1)
    assert run.metrics()[0]["grad_norm"] > 0

    def rarely(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float]:
        return [float(ids[0] % 10 == 0) for ids in completion_ids]

    run, _ = train([rarely], num_generations=2, max_steps=2)
    assert 0 < run.metrics()[0]["frac_reward_zero_std"] <= 1


def test_unscored_answers_stand_aside(train: Train) -> None:
    def some(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float | None]:
        return [None if i % 4 == 0 else v for i, v in enumerate(even(prompts, completions, completion_ids))]

    run, _ = train([some], max_steps=1)
    assert run.metrics()[0]["rewards/some/unscored"] == 0.25
    rows = run.rows(attempts.FILE)
    assert [r["total"] is None for r in rows] == [i % 4 == 0 for i in range(16)]
    assert all(r["advantage"] == 0 for r in rows if r["total"] is None)
    batch = token_batch([[rollout([10, 2], 1.0), rollout([10, 2], None, sample=1)]])
    assert not bool(batch.mask.any()), "one scored answer has nothing to be compared with"


def test_dynamic_sampling_asks_each_prompt_once_while_there_are_others(train: Train) -> None:
    """Four rounds over twelve prompts, four a step, none of which teaches until the last: none comes twice in a step."""
    asked: list[str] = []

    def late(prompts: list[str], completions: Any, completion_ids: list[list[int]]) -> list[float]:
        fresh = list(dict.fromkeys(prompts))
        assert len(prompts) == 4 * len(fresh)
        asked.extend(fresh)
        return even(prompts, completions, completion_ids) if len(asked) >= 12 else [1.0] * len(prompts)

    run, _ = train([late], dynamic_sampling=True, max_sampling_rounds=4, max_steps=1)
    assert len(asked) == len(set(asked)) == 12
    [m] = run.metrics()
    assert m["dynamic_sampling/prompts"] == 12
    assert 0 < m["dynamic_sampling/acceptance"] <= 4 / 12


def test_a_step_without_any_group_to_learn_from_rests(train: Train, model: Path) -> None:
    """All prompts of all rounds are alike: no update, no made-up mean, and the reader is told. More prompts than there are are asked."""

    def never(prompts: Any, completions: Any) -> list[float]:
        return [0.0] * len(prompts)

    for more in ({}, {"beta": 0.1}, {"preset": "dapo"}, {"advantage": "reinforce_pp"}, {"reward_mixture": "normalize_then_sum"}):
        run, _ = train([never], n_prompts=5, dynamic_sampling=True, weight_decay=0.1, max_steps=2, updates_per_batch=2, **more)
        assert moved(run, model) == 0.0
        for m in run.metrics():
            assert all(math.isfinite(v) for v in m.values() if isinstance(v, float))
            assert (m["skipped"], m["grad_norm"], m["frac_reward_zero_std"]) == (0, 0.0, 1.0)
            assert "advantage/abs_mean" not in m
        assert any(n["kind"] == "no_signal" for n in run.notices())
        assert not any(n["kind"] == "nothing_trained" for n in run.notices())


def test_the_check_before_anything_is_learnt_waits_for_the_first_step_with_a_token(train: Train) -> None:
    def later(prompts: list[str], completions: Any, completion_ids: list[list[int]]) -> list[float]:
        later.calls += 1  # type: ignore[attr-defined]
        return even(prompts, completions, completion_ids) if later.calls > 2 else [0.0] * len(prompts)  # type: ignore[attr-defined]

    later.calls = 0  # type: ignore[attr-defined]
    run, _ = train([later], dynamic_sampling=True, max_sampling_rounds=1, beta=0.1, max_steps=4)
    assert [m["grad_norm"] > 0 for m in run.metrics()] == [False, False, True, True]
    assert sum(n["kind"] == "startup_check" for n in run.notices()) == 2


def test_dynamic_sampling_replaces_what_teaches_nothing(train: Train) -> None:
    def mostly_flat(prompts: list[str], completions: Any, completion_ids: list[list[int]]) -> list[float]:
        values = even(prompts, completions, completion_ids)
        return [v if sum(map(ord, p)) % 3 == 0 else 1.0 for p, v in zip(prompts, values, strict=True)]

    run, _ = train([mostly_flat], n_prompts=40, dynamic_sampling=True, max_sampling_rounds=5, max_steps=2)
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


def test_several_rewards_are_mixed_as_asked(train: Train) -> None:
    def long(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float]:
        return [100.0 * len(ids) for ids in completion_ids]

    summed, _ = train([even, long], max_steps=1)
    apart, _ = train([even, long], reward_mixture="normalize_then_sum", max_steps=1)
    assert summed.metrics()[0]["rewards/long/mean"] == apart.metrics()[0]["rewards/long/mean"]
    assert [r["advantage"] for r in summed.rows(attempts.FILE)] != [r["advantage"] for r in apart.rows(attempts.FILE)]
