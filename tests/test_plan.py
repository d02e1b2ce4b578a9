"""Planning a run: counts by closed form, measured activations, and settings to turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import save_tiny, tiny_config
from tether import cli, plan, row_lengths
from tether.commands.plan_lines import plan_lines, size_lines
from tether.engine import Engine
from tether.errors import UserError
from tether.plan_sizes import lora_share, needs, parse_parameters
from tether.probe import Linear, kept_bytes, measure, random_model
from tether.recipe import DPORecipe, GRPORecipe, LoraConfig, RewardRecipe, SFTRecipe
from tether.row_lengths import RowLengths

ROWS = RowLengths(count=100, tokens=20.0, longest=40, trained_share=0.5)
# vocabulary 100, hidden 32, intermediate 48, 2 layers, 4 heads of which 2 carry keys and values, tied embeddings
LAYER = 32 * 32 * 2 + 32 * 16 * 2 + 32 * 48 * 3 + 2 * 32
TOTAL = 100 * 32 + 2 * LAYER + 32


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))
    return save_tiny(tmp_path / "tiny")


def test_parameters_are_counted_without_loading_weights() -> None:
    size = plan.size_of(tiny_config(), None)
    assert (size.parameters, size.trainable) == (TOTAL, TOTAL)
    assert size.kv_bytes_per_token == 2 * 2 * (2 * 8) * 2  # keys and values, layers, kv heads x head width, bfloat16


def test_an_adapter_trains_rank_times_the_sides_of_each_linear_layer() -> None:
    size = plan.size_of(tiny_config(), LoraConfig(rank=4))
    sides = 2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48)
    assert size.trainable == 2 * 4 * sides
    assert size.parameters == TOTAL + size.trainable


def test_a_reward_model_has_no_vocabulary_head() -> None:
    untied = tiny_config(tie_word_embeddings=False)
    assert plan.size_of(untied, None).parameters == TOTAL + 3200
    assert plan.size_of(untied, None, scores_only=True).parameters == TOTAL


def test_memory_of_full_training_is_sixteen_bytes_a_parameter_and_the_rest(tiny: Path) -> None:
    made = plan.plan(SFTRecipe(model=str(tiny), data="d", precision="fp32"), ROWS, probe=False, say=lambda text: None)
    parts = {part.name: part.bytes for part in made.memory}
    assert parts["weights"] + parts["gradients"] + parts["optimiser"] == 16 * TOTAL
    assert made.fits
    assert made.changes == []
    assert made.steps == 13  # 100 rows in steps of 8


def test_a_probe_measures_what_the_backward_pass_keeps() -> None:
    cost = measure(tiny_config(), precision="fp32", patience_s=1.0)
    # At the least each layer keeps its input and what its linear layers read: 3 x 32 + 48 numbers of 4 bytes.
    assert cost.activation_bytes.layer_slope > 4 * (3 * 32 + 48)
    assert cost.activation_bytes.layer_slope < 4 * 40 * 32
    assert cost.seconds.at(2, 1000) > 0
    assert 0 < cost.forward_share <= 1
    assert cost.packed


def test_the_line_through_two_depths_gives_what_a_deeper_model_keeps() -> None:
    """One and four layers predict eight, at another number of tokens."""
    few, many = 128, 512
    values = {}
    for layers in (1, 4, 8):
        model = random_model(tiny_config(), layers)
        engine = Engine(model, precision="fp32")
        for tokens in (few, many, 256):
            from tether.probe import _step

            values[layers, tokens] = kept_bytes(_step(engine, tokens, False), model)
    line = Linear.through((values[1, few], values[1, many]), (values[4, few], values[4, many]), 3, few, many)
    assert line.at(8, 256) == pytest.approx(values[8, 256], rel=0.02)


def test_the_probe_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    measure(tiny_config(), precision="fp32", patience_s=0.1)
    assert torch.equal(before, torch.get_rng_state())


def test_settings_are_turned_in_order_until_the_run_fits(tiny: Path, monkeypatch: Any) -> None:
    recipe = DPORecipe(model=str(tiny), data="d", precision="fp32", tokens_per_micro_batch=8192, batch_size=4096)
    whole = plan.plan(recipe, ROWS, probe=False, say=lambda text: None)
    parts = {part.name: part.bytes for part in whole.memory}
    monkeypatch.setattr(plan, "free_memory", lambda: whole.bytes - parts["activations"] / 4)
    made = plan.plan(recipe, ROWS, probe=False, say=lambda text: None)
    assert not made.fits
    assert [change.setting for change in made.changes] == ["tokens_per_micro_batch=4096"]
    monkeypatch.setattr(plan, "free_memory", lambda: 1.0)
    made = plan.plan(recipe, ROWS, probe=False, say=lambda text: None)
    names = [change.setting.split("=")[0] for change in made.changes]
    order = ["tokens_per_micro_batch", "gradient_checkpointing", "lora", "precision", "max_length"]
    assert names == [name for name in order if name in names]
    assert {"tokens_per_micro_batch", "gradient_checkpointing"} <= set(names)
    needed = [change.bytes for change in made.changes]
    assert needed == sorted(needed, reverse=True)
    assert "No setting makes this model fit here" in "\n".join(plan_lines(made))


def test_a_reference_costs_a_copy_only_where_one_is_kept(tiny: Path) -> None:
    def reference(recipe: Any) -> float:
        made = plan.plan(recipe, ROWS, probe=False, say=lambda text: None)
        return sum(part.bytes for part in made.memory if part.name == "reference")

    common = {"model": str(tiny), "data": "d", "precision": "fp32"}
    assert reference(DPORecipe(**common)) == 2 * 4 * 100
    assert reference(DPORecipe(**common, loss_type="simpo")) == 0
    assert reference(DPORecipe(**common, reference="other")) == 4 * TOTAL
    assert reference(GRPORecipe(**common)) == 0
    assert reference(GRPORecipe(**common, beta=0.1)) == 4 * TOTAL
    assert reference(GRPORecipe(**common, beta=0.1, lora={"rank": 2})) == 0


def test_models_that_only_judge_are_counted(tiny: Path, tmp_path: Path) -> None:
    """A reward model twice, and a copy of the policy that votes: float32, and under bf16 a copy for the matmuls."""
    rewards = ["length", {"reward": "model", "model": [str(tiny), str(tiny)]}, {"reward": "principles", "local": {}, "principles": ["x"]}]
    for precision, bytes_each in (("fp32", 4), ("bf16", 6)):
        made = plan.plan(GRPORecipe(model=str(tiny), data="d", precision=precision, rewards=rewards), ROWS, probe=False)
        judges = [part for part in made.memory if part.name == "judge"]
        assert [part.bytes for part in judges] == 3 * [bytes_each * TOTAL]
        assert "for the reward principles" in judges[2].why
    nowhere = GRPORecipe(model=str(tiny), data="d", rewards=[{"reward": "model", "model": str(tmp_path / "none")}])
    made = plan.plan(nowhere, ROWS, probe=False)
    assert not [part for part in made.memory if part.name == "judge"]
    assert f"the memory of {tmp_path / 'none'}, which judges for the reward model, is not counted" in "\n".join(made.notes)


def test_rows_are_sampled_from_the_data(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    texts = [("w6 w7", "w8 w9 w10", "w11"), ("w6", "w8", "w11"), ("w7", "w8", "w11"), ("w9", "w8", "w11")]
    lines = [json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}) for prompt, chosen, rejected in texts]
    path.write_text("\n".join(lines))
    found = row_lengths.sample(DPORecipe(model=str(tiny), data=str(path)), plan.load_tokenizer(str(tiny)))
    assert found.count == 4
    assert found.longest == 2 + (3 + 1) + (1 + 1) or found.longest == 3 + (3 + 1) + (1 + 1)  # with or without a start mark
    assert 0 < found.trained_share < 1


def test_the_command_plans_a_recipe(tiny: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "w6 w7", "chosen": "w8 w9 w10", "rejected": "w11"}) + "\n")
    assert cli.run(["plan", "dpo", "--model", str(tiny), "--data", str(path), "precision=fp32"]) == 0
    told = capsys.readouterr().out
    for words in ("Memory", "optimiser", "it fits", "a step", "the run", "keys and values"):
        assert words in told
    assert cli.run(["plan", "sft", "--model", str(tiny), "--no-probe", "precision=fp32"]) == 0
    assert "rows are taken to be half of max_length" in capsys.readouterr().out


def test_nothing_is_planned_without_a_language_model() -> None:
    with pytest.raises(UserError, match="nothing to plan"):
        plan.plan(RewardRecipe(data="d", features=["a"]), None)


def test_methods_by_size_hold_the_models_they_are_known_for() -> None:
    held = {need.method.name: need for need in needs(1e9)}
    assert held["dpo, reference kept"].method.models == 2
    assert held["grpo"].method.models == 2
    assert (held["ppo, shared critic"].method.models, held["ppo"].method.models) == (3, 4)
    assert held["sft"].full == 16e9
    assert held["dpo"].full == held["sft"].full, "cached scores need no second model"
    assert held["ppo"].full == 2 * 16e9 + 2 * 2e9
    assert "\n".join(size_lines(1e9)).count("GiB") == 2 * len(held)
    assert 0.004 < lora_share(7e9) < 0.008


def test_a_size_is_a_number() -> None:
    assert parse_parameters("1.7B") == 1.7e9
    for wrong in ("big", "", "-7e9", "7 B B"):
        with pytest.raises(UserError, match="--parameters"):
            parse_parameters(wrong)


def test_parameters_stand_alone(capsys: Any) -> None:
    assert cli.run(["plan", "--parameters", "7e9"]) == 0
    assert "104.3 GiB" in capsys.readouterr().out
    assert cli.run(["plan", "dpo", "--parameters", "7e9"]) == 2
