"""`tether ppo` on tiny models: scores, rewards per token, the critic, and whole runs."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.golden_variants import CASES, Batch
from tests.ppo_runs import Train, batch_of, even, model, moved, odd, rollout, timeless, train, weights
from tether import rollout as attempts
from tether.algorithms import grpo, ppo
from tether.errors import UserError
from tether.losses.policy_gradient import policy_loss
from tether.masked import masked_whiten
from tether.ppo_scores import RunningSpread, scores_of
from tether.recipe import GRPORecipe, PPORecipe, TrainRecipe
from tether.reward import Rewards
from tether.run import Run
from tether.scalar import ScalarModel
from tether.token_batch import MiniBatch, TokenBatch, mini_batches, parts, token_batch

__all__ = ["model", "train"]  # fixtures


def recipe(**given: Any) -> PPORecipe:
    return PPORecipe(**{"model": "m", "data": "d", "batch_size": 4, "num_generations": 1, **given})


# --- scores and rewards per token -----------------------------------------------------------------------------------------------


def test_the_penalty_for_a_missing_end_comes_after_the_clip() -> None:
    scores, *_ = scores_of(recipe(score_clip=2.0, missing_end_penalty=1.5), batch_of(5.0, -5.0, finished=False), RunningSpread())
    assert scores.tolist() == [0.5, -3.5]
    scores, *_ = scores_of(recipe(score_clip=2.0, missing_end_penalty=1.5), batch_of(5.0, -5.0), RunningSpread())
    assert scores.tolist() == [2.0, -2.0]


def test_a_running_spread_divides_and_does_not_shift() -> None:
    scores, state, _ = scores_of(recipe(score_scaling="running", score_clip=None), batch_of(1.0, 3.0), RunningSpread())
    assert scores.tolist() == pytest.approx([1 / math.sqrt(2), 3 / math.sqrt(2)])
    again, *_ = scores_of(recipe(score_scaling="running", score_clip=None), batch_of(5.0, 7.0), RunningSpread.from_state(state))
    std = torch.tensor([1.0, 3.0, 5.0, 7.0]).std().item()
    assert again.tolist() == pytest.approx([5 / std, 7 / std])


def test_rewards_of_a_row_sum_to_its_score_less_the_kl_and_the_score_stands_once_at_the_end() -> None:
    batch = batch_of(1.0, 2.0, 3.0)
    logp = batch.sampled_logp
    before = ppo.Before(logp, torch.zeros_like(logp), torch.where(batch.mask, logp - 0.2, 0.0))
    shaped = ppo.rewards_of(recipe(), batch, before, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), 0.5)
    counts = batch.mask.sum(1)
    torch.testing.assert_close(shaped.sum(1), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) - 0.5 * 0.2 * counts, rtol=1e-5, atol=1e-6)
    last = counts - 1
    for row in range(3):
        others = [t for t in range(int(counts[row])) if t != int(last[row])]
        assert all(abs(float(shaped[row, t]) + 0.1) < 1e-6 for t in others)


def test_settings_of_which_one_undoes_the_other_are_refused() -> None:
    with pytest.raises(UserError, match="penalised and left out"):
        recipe(missing_end_penalty=1.0, mask_truncated=True)
    assert "std" in recipe().resolved()
    assert "std" not in recipe(whiten_advantages=False).resolved()


# --- the loop computes what the formulas say ------------------------------------------------------------------------------------

GOLDEN = [
    case
    for case in CASES
    if case["params"].get("aggregation") == "token-mean"
    and (case["variant"] == "value_loss" or case["params"].get("advantage") == "gae")
    and case["params"].get("kl_kind_reward", "k1") == "k1"
]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"{c['variant']}-{c['batch']}-{c['params'].get('lam')}")
def test_the_loops_own_rewards_advantages_and_losses_are_the_worked_cases(case: dict[str, Any]) -> None:
    """Score at the last token, tie in the reward, GAE, whitening, both clipped losses: by the functions that `train` calls."""
    b, given, want = Batch(case["batch"], torch.float64, None), case["params"], case["expected"]
    names = {"gamma": "gamma", "lam": "lam", "value_clip": "value_clip", "dual_clip": "dual_clip", "whiten": "std"}
    settings = {ours: given[theirs] for theirs, ours in names.items() if theirs in given and (theirs != "whiten" or given[theirs])}
    settings |= {"beta": given["kl_coef"], "whiten_advantages": bool(given.get("whiten")), "score_clip": None}
    made, mask, n = recipe(**settings), b["mask"].bool(), len(b["mask"])
    rollouts = [rollout([10, 2], float(x), group=i) for i, x in enumerate(b["rewards"])]
    batch = TokenBatch(rollouts, [], [], [], mask, b["old_logps"], b["rewards"], torch.arange(n))
    before = ppo.Before(b["old_logps"], b["old_values"], b["ref_logps"])
    scores, *_ = scores_of(made, batch, RunningSpread())
    advantages, returns = ppo.advantages_of(made, batch, before, scores, made.beta)
    torch.testing.assert_close(advantages, torch.tensor(want["advantages"], dtype=torch.float64), rtol=1e-9, atol=1e-9)

    whole: Any = None
    part, mini = ppo.Part(whole, torch.arange(n)), ppo.MiniBatch([], int(mask.sum()), n, n)
    leaf, values = b.leaf("policy_logps"), b.leaf("values")
    loss, metrics = ppo.part_loss(made, batch, part, mini, leaf, values, before, advantages, returns, None)
    on_policy, on_values = torch.autograd.grad(loss, (leaf, values))
    if case["variant"] == "value_loss":
        shaped = ppo.rewards_of(made, batch, before, scores, made.beta)
        torch.testing.assert_close(shaped, torch.tensor(want["shaped_rewards"], dtype=torch.float64), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(returns, torch.tensor(want["returns"], dtype=torch.float64), rtol=1e-9, atol=1e-9)
        assert float(metrics["loss/value_avg"]) == pytest.approx(want["loss"], rel=1e-9)
        expected = made.vf_coef * torch.tensor(want["grad_values"], dtype=torch.float64)
        torch.testing.assert_close(on_values, expected, rtol=1e-9, atol=1e-12)
    else:
        assert float(metrics["loss/policy_avg"]) == pytest.approx(want["loss"], rel=1e-9)
        expected = torch.tensor(want["grad_policy_logps"], dtype=torch.float64)
        torch.testing.assert_close(on_policy, expected, rtol=1e-9, atol=1e-12)


def test_there_are_worked_cases_of_both_kinds() -> None:
    assert {"value_loss"} < {c["variant"] for c in GOLDEN}


# --- the identities of the family, through the loop's own functions ---------------------------------------------------------------


def one_part(batch: TokenBatch) -> tuple[MiniBatch, Any]:
    [mini] = mini_batches(batch, 1, "")
    [part] = parts(batch, mini.examples, 10**6)
    return mini, part


def coefficient(loss_of: Any, lp: Tensor) -> Tensor:
    lp = lp.clone().requires_grad_()
    loss = loss_of(lp)
    return torch.autograd.grad(loss, lp)[0]


def groups_of(*rows: tuple[list[int], float], size: int = 2) -> TokenBatch:
    made = [rollout(tokens, r, group=i // size, sample=i % size) for i, (tokens, r) in enumerate(rows)]
    return token_batch([made[i : i + size] for i in range(0, len(made), size)])


def test_grpo_is_ppo_whose_advantage_is_one_number_for_a_row() -> None:
    """The policy part of ppo's loss and grpo's loss, off policy, are the same function of the advantages."""
    batch = groups_of(([10, 11, 2], 1.0), ([12, 2], 0.0), ([13, 14, 15, 2], 0.2), ([16, 2], 0.9))
    settings = grpo_settings(aggregation="token-mean")
    old = batch.sampled_logp
    advantages = grpo.advantages_of(settings, batch, None, None, 0.0, Rewards([even]))
    mini, part = one_part(batch)
    lp = torch.where(batch.mask, old + torch.linspace(-0.5, 0.5, old.numel()).view_as(old), 0.0)
    ours = coefficient(lambda x: grpo.part_loss(settings, batch, part, mini, x, advantages, old, None, None, 0.0)[0], lp)
    before = ppo.Before(old, torch.zeros_like(old), None)
    per_token = advantages[:, None].expand_as(old)
    zeros = torch.zeros_like(old)
    theirs = coefficient(lambda x: ppo.part_loss(recipe(), batch, part, mini, x, zeros, before, per_token, zeros, None)[0], lp)
    torch.testing.assert_close(ours, theirs)


def grpo_settings(**given: Any) -> GRPORecipe:
    return GRPORecipe(model="m", data="d", **{"num_generations": 2, "batch_size": 4, **given})


def test_at_ratio_one_ppo_is_reinforce_and_its_loss_is_minus_the_mean_advantage() -> None:
    batch = groups_of(([10, 11, 2], 1.0), ([12, 2], 0.0), ([13, 14, 15, 2], 0.2), ([16, 2], 0.9))
    advantages = torch.tensor([0.3, -1.0, 0.5, 2.0])
    mini, part = one_part(batch)
    old = batch.sampled_logp
    for surrogate in ("ppo", "cispo", "reinforce"):
        made = grpo_settings(surrogate=surrogate, aggregation="token-mean")
        c = coefficient(lambda x, made=made: grpo.part_loss(made, batch, part, mini, x, advantages, old, None, None, 0.0)[0], old)
        torch.testing.assert_close(c, -advantages[:, None] * batch.mask / int(batch.mask.sum()))
    loss, _ = grpo.part_loss(grpo_settings(), batch, part, mini, old, advantages, old, None, None, 0.0)
    assert float(loss) == pytest.approx(-float((advantages[:, None] * batch.mask).sum() / batch.mask.sum()), rel=1e-6)


def test_dapo_with_equal_bounds_and_lengths_is_grpo_without_its_tie_and_gspo_token_is_gspo() -> None:
    batch = groups_of(([10, 11, 2], 1.0), ([12, 13, 2], 0.0), ([13, 14, 2], 0.2), ([16, 17, 2], 0.9))
    mini, part = one_part(batch)
    old = batch.sampled_logp
    lp = old + torch.linspace(-0.4, 0.4, 12).view(4, 3)

    def c(**given: Any) -> Tensor:
        made = grpo_settings(**given)
        advantages = grpo.advantages_of(made, batch, None, None, 0.0, Rewards([even]))
        return coefficient(lambda x: grpo.part_loss(made, batch, part, mini, x, advantages, old, None, None, 0.0)[0], lp)

    plain = {"dynamic_sampling": False, "overlong_cache": None}
    torch.testing.assert_close(c(preset="dapo", eps_high=0.2, **plain), c(preset="grpo", beta=0.0))
    torch.testing.assert_close(c(preset="gspo", surrogate="gspo_token"), c(preset="gspo"))
    wide = {"eps_low": 0.999, "eps_high": 1e6}
    free = coefficient(
        lambda x: policy_loss(
            x, old, grpo.advantages_of(grpo_settings(), batch, None, None, 0.0, Rewards([even])), batch.mask, eps_low=0.999, eps_high=1e6
        )[0],
        lp,
    )
    torch.testing.assert_close(c(aggregation="token-mean", **wide), free)


def test_with_a_perfect_critic_of_nothing_lam_one_gives_reward_to_go() -> None:
    from tether.advantage import gae

    batch = batch_of(1.0, 2.0, 3.0)
    rewards = torch.where(batch.mask, 0.5, 0.0).double()
    values = torch.where(batch.mask, 0.25, 0.0)
    advantages, returns = gae(rewards, values, batch.mask, 1.0, 1.0)
    for row, n in enumerate(batch.mask.sum(1).tolist()):
        assert returns[row, :n].tolist() == pytest.approx([0.5 * (n - t) for t in range(n)])
        assert advantages[row, :n].tolist() == pytest.approx([0.5 * (n - t) - 0.25 for t in range(n)])
    assert float(masked_whiten(advantages, batch.mask)[batch.mask].mean()) == pytest.approx(0, abs=1e-12)


# --- whole runs -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_ppo_learns_a_scripted_reward_and_with_the_sign_flipped_the_opposite(train: Train, critic: str) -> None:
    settings = {"critic": critic, "batch_size": 48, "num_generations": 1, "n_prompts": 48, "max_steps": 10, "beta": 0.0}
    ends = []
    for reward in (even, odd):
        run, _ = train([reward], **settings, updates_per_batch=2, vf_coef=0.5, lr_scheduler="constant")
        made = [sum(i % 2 == 0 for i in r["tokens"]) / len(r["tokens"]) for r in run.rows(attempts.FILE) if r["step"] > 8]
        ends.append(sum(made) / len(made))
    assert ends[0] - ends[1] > 0.1


def test_a_run_says_what_happened_under_the_names_of_ppo(train: Train) -> None:
    run, summary = train([even], n_prompts=16, num_generations=1, eval_fraction=0.25, mini_batches=2, max_steps=3)
    last = run.metrics()[-1]
    for name in (
        *("objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward", "objective/scores", "kl_coef"),
        *("policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg", "loss/policy_avg", "loss/value_avg", "val/clipfrac"),
        *("val/ratio", "val/ratio_var", "val/explained_variance", "val/num_eos_tokens", "reward", "completions/clipped_ratio"),
        *("ratio/min", "ratio/max", "clip_ratio/low_mean", "clip_ratio/high_mean", "kl", "kl/k1", "entropy", "time/update"),
    ):
        assert name in last, name
    assert last["objective/rlhf_reward"] == pytest.approx(last["objective/scores"] + last["objective/non_score_reward"])
    assert last["loss"] == pytest.approx(last["loss/policy_avg"] + 0.1 * last["loss/value_avg"], abs=1e-6)
    assert run.metrics()[1]["objective/kl"] == pytest.approx(0, abs=1e-4)
    assert summary["held_out"]["n"] == 4


def test_every_setting_and_every_metric_is_on_the_page(train: Train) -> None:
    """docs/ppo.md names it in code marks; metrics that both methods have may stand in docs/grpo.md."""
    docs = Path(__file__).parents[1] / "docs"
    page, other = (re.findall(r"`([^`\n]+)`", (docs / name).read_text(encoding="utf-8")) for name in ("ppo.md", "grpo.md"))
    words = {word for text in page for word in re.findall(r"\w+", text)}
    own = set(PPORecipe.model_fields) - set(TrainRecipe.model_fields)
    formula = set(re.findall(r"\w+", (docs / "ppo.md").read_text(encoding="utf-8").split("```")[3]))
    shared = {"rewards", "batch_size", "temperature", "sampling_slots", "importance_max", "importance_min"}  # docs/recipes.md
    assert own - words - formula <= shared

    run, _ = train(
        [even], mini_batches=2, num_generations=2, max_approx_kl=1e-5, updates_per_batch=3, importance="token_truncate", max_steps=2
    )
    known, stem = set(), ""
    for text in [*page, *other]:
        stem = stem if text.startswith("/") else text.rpartition("/")[0] or text
        known |= {text, stem + text, stem.rpartition("/")[0] + text}
    common = {"step", "loss", "grad_norm", "learning_rate", "skipped", "epoch", "num_tokens", "step_time", "tokens_per_second"}
    parts = {name for name in run.metrics()[-1] if name.startswith("rewards/")}
    assert set(run.metrics()[-1]) - known - common - parts == set()


def test_the_critic_learns_what_comes(train: Train) -> None:
    """Rewards that the prompt decides alone: after some steps the critic foresees most of them."""

    def by_prompt(prompts: list[str], completions: Any) -> list[float]:
        return [float(int(p.split()[0][1:]) % 2) for p in prompts]

    given = {"critic": "separate", "n_prompts": 16, "batch_size": 32, "num_generations": 2, "beta": 0.0, "lr_scheduler": "constant"}
    run, _ = train([by_prompt], max_steps=14, learning_rate=1e-4, critic_learning_rate=1e-2, vf_coef=1.0, value_clip=None, **given)
    assert run.metrics()[-1]["val/explained_variance"] > 0.5


def test_passes_end_early_once_the_update_has_moved_far(train: Train) -> None:
    run, _ = train([even], num_generations=1, learning_rate=3e-2, updates_per_batch=6, max_approx_kl=0.001, max_steps=2)
    assert any(m.get("policy/passes", 6) < 6 for m in run.metrics())


def test_watching_the_kl_without_a_tie_changes_no_bit(train: Train) -> None:
    one, two = (train([even], beta=0.0, max_steps=2, watch_kl=watch)[0] for watch in (False, True))
    assert all(torch.equal(a, weights(two)[n]) for n, a in weights(one).items())
    assert "objective/kl" not in one.metrics()[1]
    assert two.metrics()[1]["objective/kl"] > 0
    assert two.metrics()[1]["objective/rlhf_reward"] == two.metrics()[1]["objective/scores"]


def test_the_same_seed_gives_the_same_run(train: Train, model: Path) -> None:
    one, two = (train([even], num_generations=1, mini_batches=2, max_steps=2)[0] for _ in range(2))
    assert timeless(one) == timeless(two)
    assert all(torch.equal(a, weights(two)[n]) for n, a in weights(one).items())
    assert moved(one, model) > 0


def test_a_reward_model_judges_ppo_as_any_other_reward(train: Train, model: Path, tmp_path: Path) -> None:
    ScalarModel.load(model, fresh_head=True, precision="fp32", seed=1).save(tmp_path / "rm")
    recipe_ = PPORecipe(
        model=str(model),
        data=str(save_prompts(tmp_path)),
        run=str(tmp_path / "run"),
        precision="fp32",
        trackers=[],
        rewards=[{"reward": "model", "model": str(tmp_path / "rm")}],
        batch_size=8,
        num_generations=2,
        max_completion_length=6,
        max_steps=2,
    )
    with Run.create(recipe_.run or "", recipe_) as run:
        ppo.train(recipe_, run)
    assert "rewards/model/mean" in run.metrics()[0]


def save_prompts(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "w{7 + i} w{8 + i}"}}\n' for i in range(6)))
    return path
