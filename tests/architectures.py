"""Tiny models of every kind of architecture, and the slow way to their log-probabilities: for the engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
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
