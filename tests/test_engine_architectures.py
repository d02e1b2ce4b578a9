"""The packed engine computes what the model's own forward pass computes: log-probabilities and gradients, in every architecture."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.architectures import CONFIGS, FUSED, NOT_PACKED, VOCABULARY, assert_same_gradients, build, gradients, plain, rows, small_tiles
from tether.batch import Example
from tether.engine import Engine
from tether.packing import pack

__all__ = ["small_tiles"]  # fixtures


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("name", [*CONFIGS, *NOT_PACKED])
def test_packed_and_shared_equals_plain_rows(name: str, checkpointing: bool) -> None:
    model = build((CONFIGS | NOT_PACKED)[name]())
    engine = Engine(model, precision="fp32", gradient_checkpointing=checkpointing)
    assert engine.packed == (name in CONFIGS), engine.notice
    assert (engine.notice is None) == engine.packed
    assert bool(engine._blocks) == (name in FUSED)
    found, expected = engine.logprobs(pack(rows())), plain(model, rows())
    torch.testing.assert_close(found, expected, atol=2e-5 if name == "mamba" else 1e-5, rtol=0)
    assert_same_gradients(gradients(model, found), gradients(model, expected))


@pytest.mark.parametrize("name", sorted(FUSED))
def test_without_fused_blocks_the_numbers_are_the_same(name: str) -> None:
    model = build(CONFIGS[name]())
    engine = Engine(model, precision="fp32")
    found = engine.logprobs(pack(rows()))
    fused = gradients(model, found)
    engine._blocks = {}
    generic = engine.logprobs(pack(rows()))
    torch.testing.assert_close(generic, found, atol=1e-5, rtol=0)
    assert_same_gradients(fused, gradients(model, generic))


@pytest.mark.parametrize("name", [*CONFIGS, *NOT_PACKED])
def test_a_shared_prompt_equals_repeated_prompts(name: str) -> None:
    model = build((CONFIGS | NOT_PACKED)[name]())
    engine = Engine(model, precision="fp32")
    shared, repeated = engine.logprobs(pack(rows())), engine.logprobs(pack(rows(), share_prompts=False))
    torch.testing.assert_close(shared, repeated, atol=1e-5, rtol=0)
    assert_same_gradients(gradients(model, shared), gradients(model, repeated))


@pytest.mark.parametrize("split", [[[0, 1, 2, 3]], [[3], [1], [0, 2]], [[2, 3], [1, 0]], [[0], [1], [2], [3]]])
def test_any_split_into_micro_batches_gives_the_same_gradient_sum(split: list[list[int]]) -> None:
    model, examples = build(CONFIGS["llama"]()), rows()
    engine = Engine(model, precision="fp32")
    whole = gradients(model, engine.logprobs(pack(examples)).square())
    model.zero_grad()
    weights = torch.linspace(-1.0, 1.0, len(pack(examples).targets))
    sizes = [len(pack([e]).targets) for e in examples]
    per_example = weights.split(sizes)
    for part in split:
        logp = engine.logprobs(pack([examples[i] for i in part]))
        (logp.square() * torch.cat([per_example[i] for i in part])).sum().backward()
    summed = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same_gradients(summed, whole, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mamba"])
def test_a_row_does_not_see_its_neighbours(name: str) -> None:
    """Rotary and learned positions, packed and padded: prompts of 3 and 25 tokens alone and together."""
    model = build((CONFIGS | NOT_PACKED)[name]())
    engine = Engine(model, precision="fp32")
    short, long = (Example(list(range(5, 5 + n)), [[7, 9, 11]], [[True] * 3]) for n in (3, 25))
    together = engine.logprobs(pack([short, long]))
    alone = torch.cat([engine.logprobs(pack([short])), engine.logprobs(pack([long]))])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_the_last_token_of_each_answer_is_read_whatever_the_padding_token(name: str) -> None:
    """Six texts of 3 to 60 tokens, with the padding and end tokens inside them: hidden states at `last` alone and together."""
    model = build((CONFIGS | NOT_PACKED)[name]())
    engine = Engine(model, precision="fp32")
    texts = [Example([], [[(7 * t + n) % VOCABULARY if t % 4 else 0 for t in range(n)]], [[True] * n]) for n in (3, 5, 8, 21, 40, 60)]
    packed = pack(texts)
    together = engine.hidden(packed)[packed.last]
    for text, state in zip(texts, together, strict=True):
        alone = engine.hidden(pack([text]))[-1]
        torch.testing.assert_close(state, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "bloom"])
def test_dropout_is_off_unless_asked_for(name: str) -> None:
    config = (CONFIGS | NOT_PACKED)[name]()
    for key in ("attention_dropout", "dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout"):
        if hasattr(config, key):
            setattr(config, key, 0.5)
    model = build(config).train()
    packed = pack(rows())
    engine = Engine(model, precision="fp32", gradient_checkpointing=True)
    first, second = engine.logprobs(packed), engine.logprobs(packed)
    assert torch.equal(first, second)
    assert model.training, "the model's own mode is put back"
    with_dropout = Engine(model, precision="fp32", train_dropout=True)
    assert not torch.equal(with_dropout.logprobs(packed), with_dropout.logprobs(packed))
    with torch.no_grad():
        torch.testing.assert_close(with_dropout.logprobs(packed), first, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_an_adapter_trains_and_its_dropout_is_off(name: str) -> None:
    model = build(CONFIGS[name]())
    targets = ["c_attn"] if name == "gpt2" else ["q_proj", "down_proj"]
    adapted = get_peft_model(model, LoraConfig(target_modules=targets, r=2, lora_dropout=0.5, fan_in_fan_out=name == "gpt2"))
    for key, parameter in adapted.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(parameter, std=0.3)
    adapted.train()
    engine = Engine(adapted, precision="fp32")
    found = engine.logprobs(pack(rows()))
    assert torch.equal(found, engine.logprobs(pack(rows())))
    ours = gradients(adapted, found)
    assert len(ours) == len([p for p in adapted.parameters() if p.requires_grad])
    adapted.eval()
    assert_same_gradients(ours, gradients(adapted, plain(adapted, rows())))
    with adapted.disable_adapter():
        torch.testing.assert_close(engine.logprobs(pack(rows())), plain(adapted, rows()), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2", "bloom"])
def test_bf16_stays_close_to_float32_and_has_float32_gradients(name: str) -> None:
    model = build((CONFIGS | NOT_PACKED)[name]())
    exact = Engine(model, precision="fp32").logprobs(pack(rows()))
    reference = gradients(model, exact)
    logp = Engine(model, precision="bf16").logprobs(pack(rows()))
    assert logp.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = plain(model, rows()).float()
    # No further from float32 than transformers under autocast is, give or take luck.
    assert float((logp - exact).abs().mean()) <= 1.5 * float((autocast - exact).abs().mean())
    found = gradients(model, logp)
    assert all(g.dtype == torch.float32 for g in found.values())
    flat = [torch.cat([g[name].flatten() for name in reference]) for g in (found, reference)]
    assert float(torch.nn.functional.cosine_similarity(flat[0], flat[1], dim=0)) > 0.995
