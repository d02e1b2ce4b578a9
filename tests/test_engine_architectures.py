"""The engine against plain transformers: the same log-probabilities and gradients for every architecture and batching."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    LlamaModel,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

import tether.fused
import tether.head
import tether.tiles
from tether.batch import Example
from tether.engine import Engine
from tether.packing import pack

VOCABULARY = 131
SIZE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
ALIKE: dict[str, Any] = {k: v for k, v in SIZE.items() if k != "num_key_value_heads"}
WINDOW = 6  # shorter than every prompt with its answer below

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZE),
    "llama with biases": lambda: LlamaConfig(**SIZE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SIZE),
    "qwen2 sliding": lambda: Qwen2Config(**SIZE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**SIZE, head_dim=8),
    "mistral": lambda: MistralConfig(**SIZE, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(
        **SIZE, head_dim=8, sliding_window=WINDOW, final_logit_softcapping=5.0, attn_logit_softcapping=2.0, query_pre_attn_scalar=8
    ),
    "gemma3": lambda: Gemma3TextConfig(**SIZE, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8),
    "smollm3": lambda: SmolLM3Config(**SIZE),
    "gpt_neox": lambda: GPTNeoXConfig(**ALIKE),
    "phi3": lambda: Phi3Config(**SIZE, sliding_window=WINDOW),
    "gpt2": lambda: GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2),
    "opt": lambda: OPTConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, max_position_embeddings=128,
        word_embed_proj_dim=16,
    ),
    "olmo2": lambda: Olmo2Config(**SIZE),
    "granite": lambda: GraniteConfig(**SIZE, logits_scaling=3.0, attention_multiplier=0.3, residual_multiplier=0.5, embedding_multiplier=2.0),
    "cohere": lambda: CohereConfig(**SIZE, logit_scale=0.5),
    "mixtral": lambda: MixtralConfig(**SIZE, num_local_experts=4),
    "gpt_oss with sinks": lambda: GptOssConfig(**SIZE, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW),
}  # fmt: skip
NOT_PACKED: dict[str, Callable[[], PreTrainedConfig]] = {
    "bloom": lambda: BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    "mamba": lambda: MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4),
}
FUSED = {"llama", "llama with biases", "qwen2", "qwen2 sliding", "qwen3", "mistral"}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that long rows are cut into several, and short ones are joined, some of them."""
    monkeypatch.setattr(tether.tiles, "QUERIES_PER_TILE", 4)
    monkeypatch.setattr(tether.tiles, "JOINED_QUERIES", 12)
    monkeypatch.setattr(tether.fused, "ROWS", 7)
    monkeypatch.setattr(tether.head, "TILE_BYTES", 8192)


def build(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # far enough from nothing that attention matters
            parameter.mul_(3.0) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def rows() -> list[Example]:
    """A pair, a single answer, a group without a prompt, and masks with holes."""
    generator = torch.Generator().manual_seed(3)

    def tokens(n: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()

    return [
        Example(tokens(9), [tokens(7), tokens(11)], [[True] * 7, [t % 3 > 0 for t in range(11)]]),
        Example(tokens(4), [tokens(5)], [[True] * 5]),
        Example([], [tokens(4), tokens(3)], [[True] * 4, [True] * 3]),
        Example(tokens(25), [tokens(1), tokens(2), tokens(9)], [[True], [True] * 2, [True] * 9]),
    ]


def plain(model: nn.Module, examples: list[Example], temperature: float = 1.0) -> Tensor:
    """Log-probabilities a row at a time by the model's own forward: no packing, no sharing, no chunks."""
    parts = []
    for example in examples:
        for answer, trained in zip(example.answers, example.trained, strict=True):
            row = torch.tensor([example.prompt + answer])
            logits = model(input_ids=row, use_cache=False).logits[0]
            logp = torch.log_softmax(logits / temperature, -1)
            for t, wanted in enumerate(trained):
                before = len(example.prompt) + t - 1
                if wanted and before >= 0:
                    parts.append(logp[before, answer[t]])
    return torch.stack(parts)


def gradients(model: nn.Module, logp: Tensor) -> dict[str, Tensor]:
    """Of a sum in which every trained token has a weight of its own."""
    model.zero_grad()
    (logp * torch.linspace(-1.0, 1.0, len(logp), dtype=logp.dtype)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-4) -> None:
    """Relative to the largest entry of each parameter's gradient."""
    largest = max(float(g.abs().max()) for g in expected.values())
    for name in found.keys() | expected.keys():
        if name not in found or name not in expected:
            present = found.get(name, expected.get(name))
            assert present is not None
            assert not present.any(), name
            continue
        gap = float((found[name] - expected[name]).abs().max())
        assert gap <= rtol * max(float(expected[name].abs().max()), 1e-3 * largest), (name, gap)


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


def test_temperature_divides_the_scores() -> None:
    model = build(CONFIGS["gemma2"]())
    engine = Engine(model, precision="fp32")
    torch.testing.assert_close(engine.logprobs(pack(rows()), temperature=0.6), plain(model, rows(), 0.6), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="temperature"):
        engine.logprobs(pack(rows()), temperature=0.0)


@pytest.mark.parametrize("poison", [9.0, float("nan"), float("inf")])
def test_numbers_at_untrained_places_change_nothing(poison: float) -> None:
    """Values per token live at trained places only: what an untrained place holds cannot reach loss or gradient."""
    model = build(CONFIGS["llama"]())
    engine = Engine(model, precision="fp32")
    packed = pack(rows())
    logp = engine.logprobs(packed)
    clean = gradients(model, logp)
    hidden_gradient = torch.full((len(packed.tokens),), poison)
    hidden_gradient[packed.predict] = 1.0
    picked = torch.linspace(-1.0, 1.0, len(logp)) * hidden_gradient[packed.predict]
    model.zero_grad()
    (engine.logprobs(packed) * picked).sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, clean[name]), name


def test_gradient_equals_finite_differences_in_float64() -> None:
    model = build(CONFIGS["llama"](), torch.float64)
    # transformers' own norm, which the last one is, drops to float32 inside.
    last, model.model.norm = model.model.norm, nn.RMSNorm(32, eps=model.config.rms_norm_eps, dtype=torch.float64)
    model.model.norm.weight.data.copy_(last.weight)
    engine = Engine(model, precision="fp32")
    assert engine._blocks
    packed = pack(rows())
    weights = torch.linspace(-1.0, 1.0, len(packed.targets), dtype=torch.float64)

    def loss() -> Tensor:
        return (engine.logprobs(packed) * weights).sum()

    loss().backward()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        step = 1e-6
        with torch.no_grad():
            parameter.add_(direction, alpha=step)
            up = float(loss())
            parameter.add_(direction, alpha=-2 * step)
            down = float(loss())
            parameter.add_(direction, alpha=step)
        slope = float((parameter.grad * direction).sum())
        assert abs((up - down) / (2 * step) - slope) <= 1e-6 * max(1.0, abs(slope)), name


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


def test_an_update_of_the_weights_is_seen() -> None:
    model = build(CONFIGS["llama"]())
    engine = Engine(model, precision="bf16")
    before = engine.logprobs(pack(rows()))
    before.sum().backward()
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    after = engine.logprobs(pack(rows()))
    torch.testing.assert_close(after, Engine(model, precision="bf16").logprobs(pack(rows())))
    assert not torch.equal(before, after)


def test_the_model_is_left_as_it_was() -> None:
    config = CONFIGS["llama"]()
    config._attn_implementation = "eager"
    first, second = build(config), build(config)
    engine = Engine(first, precision="fp32", gradient_checkpointing=True)
    engine.logprobs(pack(rows())).sum().backward()
    assert first.config._attn_implementation == second.config._attn_implementation == "eager"
    assert first.config is not second.config
    assert all("forward" not in vars(module) for module in first.modules())
    torch.testing.assert_close(plain(first, rows()), plain(second, rows()))
    copied = copy.deepcopy(first)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    torch.testing.assert_close(Engine(copied, precision="fp32").logprobs(pack(rows())), plain(second, rows()), atol=1e-5, rtol=0)


def test_building_an_engine_leaves_the_random_state_alone() -> None:
    model = build(CONFIGS["llama"]())
    state = torch.get_rng_state()
    Engine(model, precision="bf16")
    assert torch.equal(state, torch.get_rng_state())


def test_a_model_without_a_vocabulary_head_has_hidden_states() -> None:
    torch.manual_seed(0)
    engine = Engine(LlamaModel(CONFIGS["llama"]()), precision="fp32")
    assert engine.packed
    assert engine.notice is None
    assert engine.hidden(pack(rows())).shape == (len(pack(rows()).tokens), 32)
    with pytest.raises(TypeError, match="no vocabulary head"):
        engine.logprobs(pack(rows()))


def test_a_model_that_bends_its_scores_in_an_unknown_way_is_noticed() -> None:
    model = build(CONFIGS["llama"]())
    inner = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        out.logits = out.logits * 0.5 + torch.linspace(0, 1, VOCABULARY)
        return out

    model.forward = forward
    engine = Engine(model, precision="fp32")
    assert not engine.packed
    assert engine.notice is not None
    found = engine.logprobs(pack(rows()))
    torch.testing.assert_close(found, plain(model, rows()), atol=1e-5, rtol=0)


def test_a_fused_block_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(CONFIGS["llama"]())
    monkeypatch.setattr("tether.block.ResidualSwiGLU", tether.fused.ResidualSwiGLU)
    original = tether.fused.ResidualSwiGLU.backward

    def wrong(ctx: Any, dy: Tensor) -> Any:
        grads = original(ctx, dy)
        return (grads[0], grads[1] * 1.01, *grads[2:])

    monkeypatch.setattr(tether.fused.ResidualSwiGLU, "backward", staticmethod(wrong))
    engine = Engine(model, precision="fp32")
    assert engine.packed
    assert not engine._blocks
    assert engine.notice is not None
    assert "gradients differ" in engine.notice


def test_metrics_come_without_gradient_and_change_nothing() -> None:
    engine = Engine(build(CONFIGS["llama"]()), precision="fp32")
    packed = pack(rows())
    logp, stats = engine.logprobs(packed, stats=True)
    torch.testing.assert_close(logp, engine.logprobs(packed))
    assert not stats["entropy"].requires_grad
    assert stats["entropy"].shape == stats["correct"].shape == packed.targets.shape
    assert 0.0 < float(stats["entropy"].mean()) < float(torch.tensor(VOCABULARY).log())


_PEAK = """
import resource, torch
torch.set_num_threads(1)
from transformers import LlamaConfig, LlamaForCausalLM
from tether.batch import Example
from tether.engine import Engine
from tether.packing import pack
config = LlamaConfig(vocab_size=150_000, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128)
engine = Engine(LlamaForCausalLM(config), precision="fp32")
rows = [Example([], [torch.randint(1, 150_000, (512,)).tolist()], [[True] * 512]) for _ in range(2)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
reference = engine.logprobs(pack(rows)).detach()
logp = engine.logprobs(pack(rows))
(torch.exp(logp - reference) * logp).sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_peak_memory_stays_far_below_one_table_of_scores() -> None:
    """Vocabulary 150,000, width 64, 2 rows of 512 tokens: one float32 table is 586 MiB and 1.5 of them would be the limit."""
    run = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True)
    # The gradients themselves take 73 MiB (embedding and head).
    assert float(run.stdout) < 0.6 * 586, f"{run.stdout} MiB"
