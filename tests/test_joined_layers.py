"""Sampling's joined layers give what the layers they stand for give, and are not used where they would not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.architectures import CONFIGS, build
from tether.engines import fitting, joined
from tether.engines.joined import JoinedLayer
from tether.engines.kv import IMPLEMENTATION
from tether.engines.linear import can_pack
from tether.engines.runners import SlotRunner
from tether.engines.working_copy import Kind, working_copy

ALIKE = ["llama", "qwen2", "qwen2 sliding", "qwen3", "mistral"]
packs = pytest.mark.skipif(not can_pack(torch.device("cpu")), reason="this processor has no bfloat16 matmuls to pack for")


def make(name: str) -> Any:
    return build(CONFIGS[name]())


def gap(model: Any, kind: Kind) -> float:
    """Largest difference of scores to the plain forward, prompts and single tokens, over the scores' spread."""
    prompts = fitting._probe_prompts(model.config.vocab_size)
    with torch.inference_mode():
        expected = fitting._plain_scores(working_copy(model, "shared", "eager"), prompts)
        runner = SlotRunner(working_copy(model, kind, IMPLEMENTATION), None if kind == "one_joined" else torch.bfloat16)
        found = fitting._slot_scores(runner, prompts)
    return float((found - expected).abs().max() / expected.std())


@pytest.mark.parametrize("name", ALIKE)
def test_a_joined_layer_in_float32_is_the_layer(name: str) -> None:
    model = make(name)
    copied = working_copy(model, "one_joined", IMPLEMENTATION)
    assert sum(isinstance(m, JoinedLayer) for m in copied.modules()) == 1
    assert gap(model, "one_joined") < 2e-5


@pytest.mark.parametrize("name", ALIKE)
def test_all_layers_joined_round_no_more_than_the_layers_cast_one_by_one(name: str) -> None:
    model = make(name)
    assert gap(model, "joined") < 1.5 * gap(model, "packed") + 0.01


@packs
def test_bfloat16_samples_through_joined_layers_where_the_pattern_fits() -> None:
    assert fitting.fit(make("qwen3"), "bf16")[0].kind == "joined"
    assert fitting.fit(make("llama with biases"), "bf16")[0].kind == "packed"
    assert fitting.fit(make("gemma2"), "bf16")[0].kind == "packed"


@packs
def test_a_layer_that_would_give_other_numbers_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slip of a thousandth in the norm, far below what bfloat16 hides."""
    norm = joined._norm
    monkeypatch.setattr(joined, "_norm", lambda x, module: norm(x, module) * 1.001)
    assert fitting.fit(make("llama"), "bf16")[0].kind == "packed"


def test_joined_layers_take_up_an_adapter() -> None:
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = get_peft_model(make("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.2)
    model.eval()
    prompts = fitting._probe_prompts(model.config.vocab_size)
    with torch.inference_mode():
        plain = model(input_ids=torch.tensor([prompts[0]])).logits[0, -1]
        runner = SlotRunner(working_copy(model, "one_joined", IMPLEMENTATION))
        assert any(isinstance(m, JoinedLayer) for m in runner.model.modules())
        runner.open(1)
        found, _ = runner.step([], [], [fitting.Entering(prompts[0], 0, 1, False)])
    # Only the joined layer has the adapter merged here; the other one keeps its own modules.
    torch.testing.assert_close(found[0], plain, atol=2e-4, rtol=0)
