"""Log-probabilities in tiles: equal to the plain table of scores, in values and gradients, without ever making it."""

from __future__ import annotations

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import tether.head
from tether.batch import Example
from tether.casts import Casts
from tether.engine import Engine
from tether.head import Scores, token_logprobs
from tether.packing import pack


@pytest.fixture(params=["one tile", "many tiles"], autouse=True)
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many tiles":
        monkeypatch.setattr(tether.head, "TILE_BYTES", 1024)
        monkeypatch.setattr(tether.head, "ROWS", 5)


def plain(hidden: Tensor, head: nn.Linear, targets: Tensor, scores: Scores) -> Tensor:
    """The obvious way: the whole table."""
    z = head(hidden) * scores.scale
    if scores.softcap:
        z = torch.tanh(z / scores.softcap) * scores.softcap
    return torch.log_softmax(z / scores.temperature, -1).gather(1, targets[:, None])[:, 0]


def case(rows: int = 13, width: int = 8, vocabulary: int = 300, bias: bool = False) -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(width, vocabulary, bias=bias)
    targets = torch.randint(0, vocabulary, (rows,))
    targets[:3] = 7  # the same token more than once in a tile
    return torch.randn(rows, width, requires_grad=True), head, targets


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scores", [Scores(), Scores(scale=3.0), Scores(softcap=0.7), Scores(0.5, 2.0, 0.6), Scores(temperature=1.7)])
def test_values_and_gradients_equal_the_whole_table(scores: Scores, bias: bool) -> None:
    hidden, head, targets = case(bias=bias)
    weights = torch.linspace(-1, 1, len(targets))
    leaves = [hidden, *head.parameters()]
    expected = plain(hidden, head, targets, scores)
    found = token_logprobs(hidden, head, targets, scores, compute=torch.float32).logprobs
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    for ours, theirs in zip(
        torch.autograd.grad((found * weights).sum(), leaves), torch.autograd.grad((expected * weights).sum(), leaves), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_gradient_equals_finite_differences_in_float64() -> None:
    hidden, head, targets = case(rows=4, width=3, vocabulary=11, bias=True)
    head = head.double()

    def f(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
        probe = nn.Linear(3, 11)
        probe.weight, probe.bias = nn.Parameter(w), nn.Parameter(b)
        scores, narrow = Scores(0.8, 3.0, 1.3), w.detach()
        return tether.head._LinearHead.apply(h, w, b, targets % 11, scores, narrow, tether.head.TokenLogprobs(h.new_zeros(0)))

    inputs = (hidden.detach().double().requires_grad_(), head.weight, head.bias)
    assert torch.autograd.gradcheck(f, inputs)


def test_worked_by_hand() -> None:
    """Scores (0, ln 3) give probabilities 1/4 and 3/4; at temperature 1/2 they are 1/10 and 9/10."""
    head = nn.Linear(1, 2, bias=False)
    head.weight.data = torch.tensor([[0.0], [math.log(3.0)]])
    hidden, targets = torch.ones(2, 1), torch.tensor([0, 1])
    at = {t: token_logprobs(hidden, head, targets, Scores(temperature=t), compute=torch.float32, stats=True) for t in (1.0, 0.5)}
    torch.testing.assert_close(at[1.0].logprobs.exp(), torch.tensor([0.25, 0.75]))
    torch.testing.assert_close(at[0.5].logprobs.exp(), torch.tensor([0.1, 0.9]))
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    torch.testing.assert_close(at[1.0].entropy, torch.full((2,), entropy))
    assert at[1.0].correct is not None
    assert at[1.0].correct.tolist() == [False, True]


def test_entropy_and_correct_equal_the_whole_table() -> None:
    hidden, head, targets = case()
    logp = torch.log_softmax(head(hidden) / 0.7, -1)
    targets[5] = logp[5].argmax()
    found = token_logprobs(hidden, head, targets, Scores(temperature=0.7), compute=torch.float32, stats=True)
    torch.testing.assert_close(found.entropy, -(logp.exp() * logp).sum(-1).detach())
    assert found.correct is not None
    assert torch.equal(found.correct, logp.argmax(-1) == targets)


def test_no_log_probability_is_above_nothing_in_bfloat16() -> None:
    """The target's own score is exact, so a sure token has 0 and never more."""
    hidden, head, _ = case(rows=40)
    with torch.no_grad():
        head.weight.mul_(40)
    sure = head(hidden).argmax(-1)
    found = token_logprobs(hidden, head, sure, Scores(), compute=torch.bfloat16).logprobs
    assert found.dtype == torch.float32
    assert float(found.detach().max()) <= 0.0


def test_bfloat16_matmuls_stay_close() -> None:
    hidden, head, targets = case(rows=64, width=32)
    found = token_logprobs(hidden, head, targets, Scores(), compute=torch.bfloat16).logprobs
    torch.testing.assert_close(found, plain(hidden, head, targets, Scores()), atol=2e-2, rtol=0)
    found.sum().backward()
    assert head.weight.grad is not None
    assert head.weight.grad.dtype == torch.float32


def test_no_trained_token_gives_an_empty_result_with_zero_gradients() -> None:
    hidden, head, _ = case(rows=0)
    found = token_logprobs(hidden, head, torch.zeros(0, dtype=torch.int64), Scores(), compute=torch.float32).logprobs
    assert found.shape == (0,)
    found.sum().backward()
    assert head.weight.grad is not None
    assert not head.weight.grad.any()


def tiny(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = dict(vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))


def test_an_adapter_on_the_head_is_heard() -> None:
    model = get_peft_model(tiny(), LoraConfig(target_modules=["lm_head", "q_proj"], r=2, lora_dropout=0.5))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    rows = [Example([1, 2, 3], [[4, 5], [6, 7, 8]], [[True] * 2, [True] * 3])]
    engine = Engine(model, precision="fp32")
    found, stats = engine.logprobs(pack(rows), temperature=0.8, stats=True)
    model.eval()
    expected = []
    for answer in rows[0].answers:
        logits = model(input_ids=torch.tensor([[1, 2, 3, *answer]])).logits[0, 2:-1]
        expected.append(torch.log_softmax(logits / 0.8, -1).gather(1, torch.tensor(answer)[:, None])[:, 0])
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=0)
    assert stats["entropy"].shape == found.shape
    leaves = [p for p in model.parameters() if p.requires_grad]
    weights = torch.linspace(-1, 1, len(found))
    ours = torch.autograd.grad((found * weights).sum(), leaves)
    theirs = torch.autograd.grad((torch.cat(expected) * weights).sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_weight_copies_follow_the_weights() -> None:
    """By an optimiser's in-place step, by `.data` as merging an adapter does, and by a new tensor."""
    casts, weight = Casts(), nn.Parameter(torch.zeros(4, 3))
    first = casts([weight], torch.bfloat16)
    assert casts([weight], torch.bfloat16) is first
    with torch.no_grad():
        weight.add_(1.0)
    assert float(casts([weight], torch.bfloat16).float().sum()) == 12.0
    weight.data += 1.0
    assert float(casts([weight], torch.bfloat16).float().sum()) == 24.0
    weight.data = torch.full((4, 3), 5.0)
    assert float(casts([weight], torch.bfloat16).float().sum()) == 60.0
    assert not first.any(), "a copy that a graph may still hold was written over"
