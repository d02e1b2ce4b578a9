"""Recipes: defaults, settings of each loss, and mistakes told in words."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from tether.dpo_recipe import LOSS_NAMES, LossType, settings_of
from tether.errors import UserError
from tether.keys import FOREIGN
from tether.recipe import RECIPES, DPORecipe, GRPORecipe, LoraConfig, RewardRecipe, SFTRecipe, TrainRecipe

NEEDED: dict[str, Any] = {"model": "m", "data": "d.jsonl"}


def refusal(recipe: type[TrainRecipe], **given: Any) -> str:
    with pytest.raises(UserError) as caught:
        recipe(**{**NEEDED, **given})
    return str(caught.value)


def test_every_setting_has_a_description_that_fits_two_lines() -> None:
    for recipe in RECIPES.values():
        for key, info in recipe.paths().items():
            assert info.description, key
            assert info.description.endswith("."), key
            assert len(info.description) < 200, key


def test_the_loss_names_of_the_type_are_those_of_the_sheet() -> None:
    assert get_args(LossType) == LOSS_NAMES


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_a_loss_gets_its_own_defaults_and_only_its_settings(loss: str) -> None:
    recipe = DPORecipe(**NEEDED, loss_type=loss)
    assert recipe.loss_settings() == {"loss_type": loss, **settings_of(loss)}


@pytest.mark.parametrize("recipe", RECIPES.values())
def test_a_resolved_recipe_is_a_recipe_and_says_the_same(recipe: type[TrainRecipe]) -> None:
    made = recipe(**NEEDED, lora={"rank": 4}, max_steps=3)
    again = recipe(**made.resolved())
    assert again == made
    assert again.resolved() == made.resolved()


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_a_resolved_dpo_recipe_of_any_loss_is_a_recipe(loss: str) -> None:
    made = DPORecipe(**NEEDED, loss_type=loss)
    assert DPORecipe(**made.resolved()) == made


def test_a_resolved_recipe_with_features_is_a_recipe() -> None:
    made = RewardRecipe(data="d.jsonl", features=["a", "b"], feature_l2=0.1)
    assert RewardRecipe(**made.resolved()) == made
    assert "learning_rate" not in made.resolved()


def test_simpo_and_length_normalised_dpo_have_their_own_beta() -> None:
    assert DPORecipe(**NEEDED, loss_type="simpo").beta == 2.0
    assert DPORecipe(**NEEDED, loss_type="dpo_norm").beta == 5.0
    assert DPORecipe(**NEEDED, loss_type="simpo", beta=2.5).beta == 2.5


def test_an_alias_is_resolved_and_stated() -> None:
    recipe = DPORecipe(**NEEDED, loss_type="sigmoid")
    assert recipe.loss_type == "dpo"
    assert recipe.notes == ["loss_type sigmoid is called dpo here"]
    assert DPORecipe(**NEEDED).notes == []


def test_a_setting_that_the_loss_does_not_use_is_refused_with_the_losses_that_do() -> None:
    told = refusal(DPORecipe, gamma=0.5)
    assert "gamma: dpo does not use it" in told
    assert "simpo" in told
    assert "It acts in: slic" in refusal(DPORecipe, delta=2.0)
    assert "cdpo" in refusal(DPORecipe, loss_type="hinge", label_smoothing=0.1)
    assert "orpo does not use it" in refusal(DPORecipe, loss_type="orpo", beta=0.1)
    assert "simpo has no reference" in refusal(DPORecipe, loss_type="simpo", reference="other")


def test_numbers_without_meaning_are_refused() -> None:
    assert "must be above 0" in refusal(DPORecipe, beta=0)
    assert "must be above 0" in refusal(DPORecipe, beta=-0.1)
    assert "below 0.5" in refusal(DPORecipe, loss_type="robust_dpo", label_smoothing=0.5)
    assert "at least 2 rows" in refusal(DPORecipe, loss_type="kto", batch_size=1)
    assert "must be below 1" in refusal(GRPORecipe, eps_low=1.0)
    assert "finite" in refusal(DPORecipe, learning_rate=float("nan"))
    assert "is not a number" in refusal(DPORecipe, learning_rate=True)
    assert "true or false is wanted" in refusal(DPORecipe, shuffle=1)
    assert "longer than the run" in refusal(DPORecipe, warmup_steps=10, max_steps=5)


def test_a_whole_number_may_be_written_as_a_power_of_ten() -> None:
    assert DPORecipe(**NEEDED, max_steps=1e3).max_steps == 1000
    assert isinstance(DPORecipe(**NEEDED, max_steps=1e3).max_steps, int)


def test_text_that_reads_as_a_number_is_refused_with_the_way_to_write_it() -> None:
    assert "Write 10 without quotes" in refusal(DPORecipe, max_steps="10")
    assert "Write 0.1 with a decimal point" in refusal(DPORecipe, beta="0,1")


def test_evaluation_settings_must_agree() -> None:
    assert "no rows to evaluate on" in refusal(SFTRecipe, eval_steps=10)
    assert "asked for twice" in refusal(SFTRecipe, eval_data="e.jsonl", eval_fraction=0.1)
    assert SFTRecipe(**NEEDED, eval_fraction=0.1, eval_steps=10).eval_steps == 10


def test_adapter_dropout_is_refused_where_log_probs_are_compared() -> None:
    assert "lora.dropout" in refusal(DPORecipe, lora={"dropout": 0.1})
    recipe = SFTRecipe(**NEEDED, lora={"dropout": 0.1})
    assert recipe.lora is not None
    assert recipe.lora.dropout == 0.1


def test_names_of_other_libraries_are_translated() -> None:
    assert "It is called batch_size here" in refusal(DPORecipe, per_device_train_batch_size=8)
    assert "It is called lora.rank here" in refusal(DPORecipe, lora_r=8)
    assert "It is called lora.target_modules here" in refusal(DPORecipe, lora={"lora_target": "x"})
    assert "epochs" in refusal(SFTRecipe, num_train_epochs=3)
    assert "run" in refusal(SFTRecipe, output_dir="x")
    assert "belongs to `tether dpo`" in refusal(SFTRecipe, ref_model="x")
    assert "no such setting" in refusal(SFTRecipe, packing=True)


def test_every_translated_name_leads_to_a_setting_that_exists() -> None:
    known = {path for recipe in RECIPES.values() for path in recipe.paths()}
    assert {ours for ours, _ in FOREIGN.values() if ours} <= known
    assert not set(FOREIGN) & known


def test_a_key_of_another_command_is_named_with_its_command() -> None:
    assert "It belongs to `tether reward`." in refusal(DPORecipe, heads=3)
    assert "`tether dpo` and `tether grpo`" in refusal(SFTRecipe, beta=0.1)


def test_a_misplaced_key_is_told_its_place() -> None:
    assert "Its place is lora.rank." in refusal(DPORecipe, rank=8)
    assert "Its place is learning_rate." in refusal(DPORecipe, lora={"learning_rate": 1})
    assert "Write it as a block" in refusal(DPORecipe, **{"lora.rank": 8})


def test_several_mistakes_are_told_together_the_missing_last() -> None:
    with pytest.raises(UserError) as caught:
        DPORecipe(data="d", learning_rate=-1, seed=-1)  # type: ignore[call-arg]
    told = str(caught.value)
    assert told.index("learning_rate") < told.index("model")
    assert told.index("seed") < told.index("model")


def test_the_batch_of_grpo_must_hold_whole_groups() -> None:
    told = refusal(GRPORecipe, batch_size=6, num_generations=4)
    assert "batch_size 4 or 8" in told
    assert "num_generations 2, 3 or 6" in told
    assert GRPORecipe(**NEEDED, batch_size=8, num_generations=4).num_generations == 4


def test_the_readable_reward_model_needs_no_language_model_and_takes_no_setting_of_one() -> None:
    assert "model" not in RewardRecipe(data="d", features=["a"]).resolved()
    told = refusal(RewardRecipe, model=None, features=["a"], learning_rate=1e-3)
    assert "With features it is feature_learning_rate" in told
    assert "only acts together with features" in refusal(RewardRecipe, feature_l2=0.1)
    assert "is needed" in refusal(RewardRecipe, model=None)


def test_a_recipe_is_frozen_and_replace_checks_again() -> None:
    recipe = DPORecipe(**NEEDED, loss_type="simpo")
    with pytest.raises(Exception, match="frozen"):
        recipe.beta = 1.0  # type: ignore[misc]
    assert recipe.replace(beta=3.0).beta == 3.0
    with pytest.raises(UserError):
        recipe.replace(beta=-1)
    with pytest.raises(UserError):
        recipe.replace(bta=1)
    assert recipe.replace(loss_type="dpo").beta == 0.1, "a default of the old loss is not carried into the new one"


def test_total_steps_follow_epochs_unless_max_steps_is_given() -> None:
    assert SFTRecipe(**NEEDED, epochs=2).total_steps(5) == 10
    assert SFTRecipe(**NEEDED, epochs=0.5).total_steps(5) == 3
    assert SFTRecipe(**NEEDED, epochs=0.01).total_steps(5) == 1
    assert SFTRecipe(**NEEDED, max_steps=7).total_steps(5) == 7


def test_an_adapter_block_alone_takes_the_defaults() -> None:
    assert SFTRecipe(**NEEDED, lora={}).lora == LoraConfig()
    assert SFTRecipe(**NEEDED, lora=LoraConfig(rank=4)).lora == LoraConfig(rank=4)
    assert "a block of settings is wanted" in refusal(SFTRecipe, lora=True)
