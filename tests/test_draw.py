"""Drawing a token: against transformers' own filters, frequencies, and inverse-distribution by hand."""

from __future__ import annotations

import math
import random

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tether.engines import sampling as module
from tether.engines.sampling import Sampling, draw
from tether.errors import UserError


def by_transformers(logits: torch.Tensor, s: Sampling, history: list[int]) -> torch.Tensor:
    """Probabilities (V,) that transformers' generate would draw from."""
    ids = torch.tensor([history])
    z = logits[None].clone()
    if s.repetition_penalty != 1:
        z = RepetitionPenaltyLogitsProcessor(s.repetition_penalty)(ids, z)
    z = TemperatureLogitsWarper(float(s.temperature))(ids, z)
    if s.top_k:
        z = TopKLogitsWarper(s.top_k)(ids, z)
    if s.top_p < 1:
        z = TopPLogitsWarper(s.top_p)(ids, z)
    if s.min_p:
        z = MinPLogitsWarper(s.min_p)(ids, z)
    return torch.softmax(z[0], -1)


SETTINGS = [
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(top_k=5),
    Sampling(top_p=0.6),
    Sampling(min_p=0.2),
    Sampling(repetition_penalty=1.7),
    Sampling(temperature=1.6, top_k=12, top_p=0.8, min_p=0.05, repetition_penalty=1.3),
    Sampling(top_p=0.999999),
    Sampling(top_k=1),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("vocabulary", [40, 256, 3000])
def test_the_distribution_is_that_of_transformers(setting: Sampling, vocabulary: int) -> None:
    """Uniform numbers 1/2n, 3/2n, ... pick each token in proportion to its probability, and its log-probability is told."""
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(3)) * 2.5
    history, n = [1, 7, 7, 30], 4000
    expected = by_transformers(logits, setting, history)
    drawn = draw(logits.expand(n, -1), [setting] * n, [history] * n, [(i + 0.5) / n for i in range(n)])
    share = torch.bincount(drawn.tokens, minlength=vocabulary) / n
    assert float((share - expected).abs().max()) <= 1.01 / n
    assert torch.allclose(drawn.sampling_logps, expected[drawn.tokens].log(), atol=2e-5)
    training = torch.log_softmax(logits / setting.temperature, -1)
    assert torch.allclose(drawn.logps, training[drawn.tokens], atol=1e-5)


def test_a_wide_nucleus_looks_beyond_the_best_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CANDIDATES", 4)
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0)) * 0.3
    for setting in (Sampling(top_p=0.9), Sampling(min_p=0.3), Sampling(top_k=50, top_p=0.7)):
        n = 3000
        expected = by_transformers(logits, setting, [1])
        drawn = draw(logits.expand(n, -1), [setting] * n, [[1]] * n, [(i + 0.5) / n for i in range(n)])
        share = torch.bincount(drawn.tokens, minlength=300) / n
        assert float((share - expected).abs().max()) <= 1.01 / n


def test_inverse_of_the_cumulative_distribution_by_hand() -> None:
    """p = (0.5, 0, 0.25, 0.25): u below 0.5 is token 0, below 0.75 token 2, else token 3; the impossible token never comes."""
    logits = torch.tensor([math.log(0.5), -math.inf, math.log(0.25), math.log(0.25)])
    uniforms = [0.0, 0.49, 0.51, 0.74, 0.76, 1 - 2**-53]
    drawn = draw(logits.expand(6, -1), [Sampling()] * 6, [()] * 6, uniforms)
    assert drawn.tokens.tolist() == [0, 0, 2, 2, 3, 3]
    assert torch.allclose(drawn.logps.exp(), torch.tensor([0.5, 0.5, 0.25, 0.25, 0.25, 0.25]))


def test_rows_of_one_batch_keep_their_own_settings() -> None:
    """Each row alone, all rows together, and in small chunks: the same tokens and log-probabilities."""
    generator, rng = torch.Generator().manual_seed(1), random.Random(0)
    settings = [*SETTINGS, Sampling(temperature=0), Sampling(temperature=0, repetition_penalty=3.0)]
    logits = torch.randn(len(settings), 500, generator=generator) * 3
    history = [[rng.randrange(500) for _ in range(9)] for _ in settings]
    uniforms = [rng.random() for _ in settings]
    together = draw(logits, settings, history, uniforms)
    for i, s in enumerate(settings):
        alone = draw(logits[i : i + 1], [s], [history[i]], [uniforms[i]])
        assert alone.tokens[0] == together.tokens[i]
        assert torch.allclose(alone.logps[0], together.logps[i])
        assert torch.allclose(alone.sampling_logps[0], together.sampling_logps[i])


def test_chunks_on_cpu_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 300, generator=torch.Generator().manual_seed(1))
    uniforms = [i / 7 for i in range(7)]
    whole = draw(logits, [Sampling()] * 7, [()] * 7, uniforms)
    monkeypatch.setattr(module, "CHUNK", 600)
    parts = draw(logits, [Sampling()] * 7, [()] * 7, uniforms)
    assert torch.equal(whole.tokens, parts.tokens)
    assert torch.equal(whole.logps, parts.logps)


def test_rounding_of_scores_does_not_swap_tokens_of_equal_weight() -> None:
    """Two candidates a rounding apart: whichever is ahead, the same uniform number gives the same token."""
    for top in (Sampling(top_k=2), Sampling(top_p=0.99)):
        a = draw(torch.tensor([[0.0, 1.0, 1.0 + 1e-6, -9.0]]), [top], [()], [0.3]).tokens
        b = draw(torch.tensor([[0.0, 1.0 + 1e-6, 1.0, -9.0]]), [top], [()], [0.3]).tokens
        assert a == b


def test_greedy_takes_the_likeliest_and_tells_the_models_own_log_probability() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    drawn = draw(logits, [Sampling(temperature=0)], [()], [0.99])
    assert drawn.tokens.tolist() == [1]
    assert torch.allclose(drawn.logps, torch.log_softmax(logits, -1)[:, 1])
    assert drawn.sampling_logps.tolist() == [0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_numbers_name_their_row(bad: float) -> None:
    logits = torch.zeros(5, 300)
    logits[3, 2] = bad
    with pytest.raises(FloatingPointError, match="3"):
        draw(logits, [Sampling()] * 5, [()] * 5, [0.5] * 5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"stop": ("",)},
    ],
)
def test_settings_out_of_range_are_refused_by_name(wrong: dict) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        Sampling(**wrong)
