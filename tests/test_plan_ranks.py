"""Plans for several ranks: bytes and traffic by hand, the same from what ranks really hold and receive, times, JSON, mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks_runs import processes
from tests.tiny import save_tiny, tiny_config
from tether import cli, link, plan
from tether.cluster import Cluster
from tether.commands.plan_lines import plan_lines, rank_size_lines
from tether.layout import Count
from tether.link import Link
from tether.plan_size_ranks import Shape, layout_for, rank_needs, shape_of
from tether.plan_sizes import needs
from tether.plan_traffic import passes_of
from tether.recipe import DPORecipe, GRPORecipe, LoraConfig, PPORecipe, SFTRecipe
from tether.row_lengths import RowLengths

ROOT = Path(__file__).parents[1]
ROWS = RowLengths(count=100, tokens=20.0, longest=20, trained_share=0.5)
# vocabulary 100, hidden 32, intermediate 48, 2 layers, 4 heads of which 2 carry keys and values, tied embeddings
LAYER = 32 * 32 * 2 + 32 * 16 * 2 + 32 * 48 * 3 + 2 * 32
OUTER = 100 * 32 + 32
TOTAL = 2 * LAYER + OUTER
DOUBLE = Link(gathered=1000.0, summed=500.0, latency=2.0)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))
    return save_tiny(tmp_path / "tiny")


def planned(recipe: Any, ranks: int, rows: RowLengths | None = ROWS, **options: Any) -> plan.Plan:
    return plan.plan(recipe, rows, cluster=Cluster(ranks, **options), probe=False, say=lambda text: None)


def by_name(made: plan.Plan) -> dict[str, float]:
    return {part.name: part.bytes for part in made.memory}


# Where the numbers of a model lie ----------------------------------------------------------------------------------------


def test_the_fullest_of_three_ranks_has_every_tensors_first_third_rounded_up() -> None:
    """100 rows of the embedding: 34; 32 rows: 11; 16 rows: 6; 48 rows: 16. A norm's 32 numbers: 11."""
    layout = plan.size_of(tiny_config(), None, ranks=3).layout
    layer = 2 * 11 * 32 + 2 * 6 * 32 + 2 * 16 * 32 + 11 * 48 + 2 * 11
    assert layout.own_inner == Count(2 * layer, 2 * layer)
    assert layout.own_outer == Count(34 * 32 + 11, 34 * 32 + 11)
    assert layout.layer == Count(LAYER, LAYER)
    assert layout.whole == Count(TOTAL, TOTAL)
    assert (layout.layers, layout.groups, layout.tensors) == (2, 3, 2 * 9 + 2)


def test_one_rank_holds_all_and_gathers_nothing() -> None:
    layout = plan.size_of(tiny_config(), None).layout
    assert layout.own == layout.whole
    assert layout.gathered() == layout.gathered_beside() == layout.received(layout.own) == 0


def test_an_adapter_is_all_that_is_trained_and_lies_on_the_layers() -> None:
    layout = plan.size_of(tiny_config(), LoraConfig(rank=4), ranks=2).layout
    trained = 4 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
    assert layout.whole == Count(TOTAL + trained, trained)
    assert layout.outer == Count(OUTER, 0)
    assert layout.own.trained == trained // 2  # every dimension is even


# Memory ------------------------------------------------------------------------------------------------------------------


def test_two_ranks_halve_what_is_kept_and_gather_a_layer_and_what_lies_outside(tiny: Path) -> None:
    made = planned(SFTRecipe(model=str(tiny), data="d", precision="fp32"), 2)
    parts = by_name(made)
    assert parts["weights"] == parts["gradients"] == 4 * TOTAL / 2
    assert parts["optimiser"] == 8 * TOTAL / 2
    # whole: outside the layers weights and gradients; a layer twice as it arrives, its gradients twice as they are summed
    assert parts["gathered"] == 4 * (2 * OUTER + 4 * LAYER)
    assert parts["activations"] == 4 * 20 * 2 * 18 * 32 * 4  # four of the eight rows, 18 numbers of 32 a token and layer


def test_copies_in_bfloat16_wait_for_the_backward_pass_unless_layers_are_computed_again(tiny: Path) -> None:
    common = {"model": str(tiny), "data": "d", "precision": "bf16"}
    assert by_name(planned(SFTRecipe(**common), 2))["copies"] == 2 * 2 * LAYER
    assert by_name(planned(SFTRecipe(**common, gradient_checkpointing=True), 2))["copies"] == 2 * LAYER
    assert by_name(planned(SFTRecipe(**common), 1))["copies"] == 2 * TOTAL


def test_the_local_engine_needs_the_whole_model_on_every_rank_and_not_while_training(tiny: Path) -> None:
    common = {"model": str(tiny), "data": "d", "rewards": ["math"], "precision": "fp32", "max_completion_length": 8}
    made = planned(GRPORecipe(**common), 2)
    parts = by_name(made)
    assert parts["whole model"] == 4 * TOTAL
    kept = parts["weights"] + parts["optimiser"] + parts["process"]
    training = parts["gradients"] + parts["gathered"] + parts["activations"] + parts["logits"]
    assert made.bytes == kept + max(training, parts["whole model"] + parts["sampling"])
    assert "whole model" not in by_name(planned(GRPORecipe(**common), 1))
    elsewhere = by_name(planned(GRPORecipe(**common, engine="vllm"), 2))
    assert not {"whole model", "sampling"} & set(elsewhere)


def test_models_beside_the_policy_are_in_parts_too(tiny: Path) -> None:
    common = {"model": str(tiny), "data": "d", "precision": "fp32"}
    assert by_name(planned(GRPORecipe(**common, beta=0.1), 2))["reference"] == 4 * TOTAL / 2
    assert "reference" not in by_name(planned(GRPORecipe(**common, beta=0.1, lora={"rank": 2}), 2))
    assert by_name(planned(PPORecipe(**common, critic="separate"), 2))["critic"] == 16 * TOTAL / 2
    assert by_name(planned(DPORecipe(**common, reference="other"), 2))["reference"] == 4 * TOTAL / 2


def test_a_device_has_its_own_memory_and_this_machine_shares_its_own(tiny: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(plan, "free_memory", lambda: 1e9)
    recipe = SFTRecipe(model=str(tiny), data="d", precision="fp32")
    assert planned(recipe, 4).free_bytes == 1e9 / 4
    made = planned(recipe, 4, device_bytes=80e9)
    assert made.free_bytes == 80e9
    assert not {"process", "loaded"} & set(by_name(made))
    assert any("the whole model in main memory" in note for note in made.notes)
    assert by_name(planned(recipe, 4))["loaded"] == 4 * TOTAL


def test_what_does_not_fit_because_of_sampling_is_said_to_be_so(tiny: Path) -> None:
    common = {"model": str(tiny), "data": "d", "rewards": ["math"], "precision": "fp32", "max_completion_length": 500}
    recipe = GRPORecipe(**common, num_generations=2, batch_size=16384, tokens_per_micro_batch=16, sampling_slots=16384)
    made = planned(recipe, 2, device_bytes=200e6)
    assert not made.fits
    assert "engine=vllm" in "\n".join(plan_lines(made))
    made = planned(SFTRecipe(model=str(tiny), data="d"), 2, device_bytes=1e3)
    assert "take more ranks" in "\n".join(plan_lines(made))


def test_no_change_is_proposed_that_the_recipe_would_refuse(tiny: Path) -> None:
    """A shorter max_length must leave room for the answer."""
    common = {"model": str(tiny), "data": "d", "rewards": ["math"], "precision": "fp32"}
    made = planned(GRPORecipe(**common, max_length=512, max_completion_length=300), 1, device_bytes=1.0)
    assert not any(change.setting.startswith("max_length") for change in made.changes)


# Traffic -----------------------------------------------------------------------------------------------------------------


def test_a_step_gathers_all_twice_but_what_lies_outside_the_layers_and_sums_the_gradients(tiny: Path) -> None:
    """8 rows of 20 tokens, 40 tokens to a micro-batch: four rows a rank, two passes."""
    made = planned(DPORecipe(model=str(tiny), data="d", precision="fp32", batch_size=8, tokens_per_micro_batch=40), 2)
    flows = {flow.name: (flow.bytes, flow.meetings) for flow in made.traffic}
    assert flows == {
        "forward": (2 * 4 * TOTAL / 2, 2 * 3),
        "backward": (2 * 4 * (2 * LAYER) / 2, 2 * 2),
        "gradients": (2 * 4 * TOTAL / 2, 2 * 3),
    }


def test_four_ranks_receive_three_parts_each(tiny: Path) -> None:
    made = planned(SFTRecipe(model=str(tiny), data="d", precision="fp32"), 4)
    assert made.traffic[0].bytes == 3 * 4 * TOTAL / 4
    assert planned(SFTRecipe(model=str(tiny), data="d"), 1).traffic == []


def test_a_step_of_grpo_adds_scoring_reference_and_the_model_for_sampling(tiny: Path) -> None:
    common = {"model": str(tiny), "data": "d", "precision": "fp32", "max_completion_length": 10, "num_generations": 2, "batch_size": 8}
    recipe = GRPORecipe(**common, beta=0.1, updates_per_batch=3, tokens_per_micro_batch=80)
    made = planned(recipe, 2)  # groups of 20 + 2 x 10 tokens, two of them a rank in one pass
    every = 4 * TOTAL / 2
    flows = {flow.name: flow.bytes for flow in made.traffic}
    assert flows["forward"] == 3 * every
    assert flows["scoring"] == flows["reference"] == flows["sampling"] == every
    adapted = planned(recipe.replace(lora=LoraConfig(rank=2)), 2)
    size = adapted.size
    flows = {flow.name: (flow.bytes, flow.meetings) for flow in adapted.traffic}
    assert flows["reference"][0] == 4 * size.parameters / 2
    assert flows["gradients"] == (3 * 4 * size.trainable / 2, 3 * 2)  # nothing outside the layers is trained


def test_passes_count_what_each_method_computes() -> None:
    common: dict[str, Any] = {"model": "m", "data": "d", "max_completion_length": 10, "num_generations": 2, "batch_size": 8}
    common["tokens_per_micro_batch"] = 40
    one = passes_of(GRPORecipe(**common), ROWS, 2)
    assert (one.trained, one.looked, one.reference) == (2, 0, 0)
    assert passes_of(GRPORecipe(**common, mini_batches=2), ROWS, 2).trained == 2
    critic = passes_of(PPORecipe(**common, critic="separate", beta=0.1, updates_per_batch=1, mini_batches=1), ROWS, 2)
    assert (critic.trained, critic.looked, critic.reference, critic.critic, critic.critic_looked) == (2, 2, 2, 2, 2)
    assert passes_of(GRPORecipe(**common), ROWS, 64).trained == 1  # an empty micro-batch is a meeting too


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_hold_and_receive_what_is_planned(tiny: Path, tmp_path: Path, ranks: int) -> None:
    """Full training and LoRA of a model whose rows three ranks could not share evenly, as each rank counts its own bytes."""
    model = save_tiny(tmp_path / "odd", tiny_config(vocab=101, intermediate_size=50))
    watched = tmp_path / "watched"
    watched.mkdir()
    told = start(ranks, [sys.executable, "-m", "tests.held_by_ranks", str(model)], {"RANKS_WATCH": str(watched)})
    recipe = SFTRecipe(model=str(model), data="d", precision="fp32", batch_size=8, tokens_per_micro_batch=40)
    for number, lora in enumerate((None, LoraConfig(rank=4))):
        made = planned(recipe.replace(lora=lora), ranks)
        found = [json.loads(lines[number]) for lines in told]
        for name in ("weights", "gradients", "optimiser"):
            assert max(rank[name] for rank in found) == by_name(made)[name], name
        flows = {flow.name: flow.bytes for flow in made.traffic}
        for rank in found:
            assert rank["gathered"] == flows["forward"] + flows["backward"]
            assert rank["summed"] == flows["gradients"]
            assert rank["sampling"] == 4 * made.size.layout.received(made.size.layout.own)


def start(ranks: int, command: list[str], environment: dict[str, str]) -> list[list[str]]:
    """The lines that each rank prints."""
    workers = processes(ranks, command, subprocess.PIPE, PYTHONPATH=str(ROOT / "bench" / "ranks_watch"), **environment)
    try:
        told = [worker.communicate(timeout=100) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert not any(worker.returncode for worker in workers), told[0][1][-2000:]
    return [[line for line in out.splitlines() if line.startswith("{")] for out, _ in told]


# Time --------------------------------------------------------------------------------------------------------------------


def test_a_step_takes_its_operations_and_its_exchange(tiny: Path) -> None:
    recipe = SFTRecipe(model=str(tiny), data="d", precision="fp32", batch_size=8)
    made = planned(recipe, 2, flops=1e6, link=DOUBLE)
    assert made.compute_seconds == 8 * 20 * 6 * TOTAL / 2 / 1e6
    forward, backward, gradients = (flow.bytes for flow in made.traffic)
    assert made.exchange_seconds == pytest.approx((forward + backward) / 1000 + gradients / 500 + (3 + 2 + 3) * 2.0)
    assert made.seconds_per_step == made.compute_seconds + made.exchange_seconds
    again = planned(recipe.replace(gradient_checkpointing=True), 2, flops=1e6)
    assert again.compute_seconds == 8 * 20 * 8 * TOTAL / 2 / 1e6
    adapted = planned(recipe.replace(lora=LoraConfig(rank=2)), 2, flops=1e6)
    assert adapted.compute_seconds == 8 * 20 * 4 * adapted.size.parameters / 2 / 1e6


def test_devices_elsewhere_are_not_timed_by_this_machine(tiny: Path) -> None:
    made = planned(SFTRecipe(model=str(tiny), data="d"), 2, device_bytes=80e9)
    assert made.seconds_per_step is None
    assert any("--flops" in note for note in made.notes)
    assert any("--bandwidth" in note for note in made.notes)


def test_ranks_without_a_row_are_told_of(tiny: Path) -> None:
    made = planned(SFTRecipe(model=str(tiny), data="d", batch_size=2), 4)
    assert any("2 rows" in note and "compute nothing" in note for note in made.notes)


def test_the_exchange_between_two_processes_is_measured() -> None:
    found = link.measure(2, threads=1)
    assert found.gathered > 1e6
    assert found.summed > 1e6
    assert 0 <= found.latency < 1


# A size by numbers alone -------------------------------------------------------------------------------------------------


def test_one_rank_keeps_what_the_table_of_sizes_says() -> None:
    """But for the frozen copies' embeddings and heads, which are float32 in parts."""
    shape = shape_of(1e9)
    kept = {(n.method.name, n.adapter): n.kept for n in rank_needs(shape, Cluster(1))}
    for need in needs(1e9):
        assert kept[need.method.name, False] - 2 * shape.outer * need.method.frozen == pytest.approx(need.full, rel=1e-6)
        frozen = need.method.name.startswith("ppo")
        assert kept[need.method.name, True] - 2 * shape.outer * frozen == pytest.approx(need.lora, rel=1e-6)


def test_a_size_over_ranks_by_hand() -> None:
    """8 layers of 1000 numbers, 2000 outside, 4 ranks, 100 tokens in one pass of full SFT."""
    shape = Shape(10_000, 8, 4, 10_000)
    assert shape.outer == 5_000  # embedding and head are never more than half
    layout = layout_for(shape, 4, adapter=False)
    assert layout.own == Count(2_500, 2_500)
    sft = next(rank_needs(shape, Cluster(4, flops=1e3, link=DOUBLE), 100))
    assert sft.kept == 16 * 2_500
    assert sft.received == 3 * 4 * (2_500 + 1_250 + 2_500)
    assert sft.compute_seconds == 100 * 10_000 * 8 / 1e3
    assert sft.exchange_seconds == 3 * 4 * 3_750 / 1000 + 3 * 4 * 2_500 / 500 + (9 + 8 + 9) * 2.0
    assert sft.sampling is None
    grpo = {n.method.name: n for n in rank_needs(shape, Cluster(4), 100)}
    assert {name: need.adapter for name, need in grpo.items()}["grpo"], "LoRA comes last"


@pytest.mark.parametrize("size, ranks", [("7b", 8), ("70b", 64), ("671b", 64)])
def test_large_models_are_planned_by_their_size(size: str, ranks: int, capsys: Any) -> None:
    words = ["plan", "--parameters", size, "--ranks", str(ranks), "--device-gb", "80", "--flops", "4e14", "--bandwidth", "50GB"]
    assert cli.run(words) == 0
    told = capsys.readouterr().out
    assert f"over {ranks} ranks" in told
    assert told.count("ppo") == 4
    assert cli.run([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    sft = found["methods"][0]
    assert sft["kept"] == pytest.approx(16 * found["shape"]["parameters"] / ranks, rel=1e-6)
    assert sft["fits"] == (size != "671b")
    assert found["cluster"]["link"]["gathered"] == 50e9


def test_a_mixture_of_experts_computes_with_some_of_its_parameters() -> None:
    dense = next(rank_needs(shape_of(671e9, 61, 7168), Cluster(64, flops=4e14)))
    sparse = next(rank_needs(shape_of(671e9, 61, 7168, 37e9), Cluster(64, flops=4e14)))
    assert dense.compute_seconds is not None
    assert sparse.compute_seconds == pytest.approx(dense.compute_seconds * 37 / 671)
    assert sparse.kept == dense.kept
    assert "37,000,000,000 of them active" in "\n".join(rank_size_lines(shape_of(671e9, 61, 7168, 37e9), Cluster(64), 10, [sparse]))


# The command -------------------------------------------------------------------------------------------------------------


def test_the_command_plans_ranks_and_speaks_json(tiny: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "w6 w7", "chosen": "w8 w9 w10", "rejected": "w11"}) + "\n")
    words = ["plan", "dpo", "--model", str(tiny), "--data", str(path), "precision=fp32", "--ranks", "2", "--no-probe"]
    assert cli.run([*words, "--flops", "1e9", "--bandwidth", "1GB"]) == 0
    told = capsys.readouterr().out
    for text in ("fullest of 2 ranks", "gathered", "What a rank receives in a step", "3 meetings", "computing", "exchanging"):
        assert text in told
    assert cli.run([*words, "--flops", "1e9", "--bandwidth", "1GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    phases = {part["phase"]: 0.0 for part in found["memory"]}
    for part in found["memory"]:
        phases[part["phase"]] += part["bytes"]
    assert set(phases) == {"always", "starting", "training"}
    assert found["bytes"] == phases["always"] + max(phases["starting"], phases["training"])
    assert found["received_bytes"] == sum(flow["bytes"] for flow in found["traffic"])
    assert found["seconds_per_step"] == found["compute_seconds"] + found["exchange_seconds"]
    assert found["cluster"] == {"ranks": 2, "device_bytes": None, "flops": 1e9, "link": {"gathered": 1e9, "summed": 1e9, "latency": 0.0}}
    assert cli.run(["plan", "--parameters", "7e9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["methods"][0]["full_bytes"] == 16 * 7e9


@pytest.mark.parametrize(
    "words, told",
    [
        (["--ranks", "0"], "at least one rank"),
        (["--ranks", "-3"], "at least one rank"),
        (["--ranks", "2", "--flops", "fast"], "--flops"),
        (["--ranks", "2", "--bandwidth", "0"], "--bandwidth"),
        (["--bandwidth", "1GB"], "only acts with several ranks"),
        (["--ranks", "2", "--device-gb", "-1"], "--device-gb"),
        (["--ranks", "2", "--tokens", "100"], "only acts with --parameters"),
    ],
)
def test_mistakes_are_told_before_anything_is_read(words: list[str], told: str, capsys: Any) -> None:
    assert cli.run(["plan", "sft", "--model", "nowhere", *words]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, told",
    [
        (["--ranks", "0"], "at least one rank"),
        (["--device-gb", "80"], "only acts with --ranks"),
        (["--ranks", "2", "--tokens", "0"], "at least one token"),
        (["--ranks", "2", "--active", "8e9"], "cannot be active"),
        (["--ranks", "2", "--active", "many"], "--active"),
        (["--ranks", "2", "--layers", "0"], "--layers"),
    ],
)
def test_mistakes_about_a_size_are_told(words: list[str], told: str, capsys: Any) -> None:
    assert cli.run(["plan", "--parameters", "7e9", *words]) == 2
    assert told in capsys.readouterr().err
