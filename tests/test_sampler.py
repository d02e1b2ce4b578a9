"""The sampler against transformers' generate and plain forwards, for several architectures, whatever shares the batch."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    Qwen2Config,
)

from tests.toy_text import byte_tokenizer
from tether.engines.local import Completion, LocalSampler, Request
from tether.engines.sampling import Sampling
from tether.errors import UserError

SIZES: dict[str, Any] = {
    "vocab_size": 150,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "gpt_neox": GPTNeoXConfig(**{**SIZES, "num_key_value_heads": None}),
    "gpt2": GPT2Config(vocab_size=150, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2),
    "gemma2": Gemma2Config(**SIZES, **WINDOW),
    "gemma3": Gemma3TextConfig(**SIZES, **WINDOW, layer_types=["sliding_attention", "full_attention"]),
}
PLAIN = {
    "bloom": BloomConfig(vocab_size=150, hidden_size=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2),
    "mamba": MambaConfig(vocab_size=150, hidden_size=32, num_hidden_layers=2, state_size=4, bos_token_id=1, eos_token_id=2),
}


def make(config: Any) -> Any:
    """Random weights large enough that scores differ and attention matters; every architecture has dropout off afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        for p in model.parameters():
            if p.dim() > 1:
                torch.nn.init.normal_(p, std=0.2)
    return model.eval()


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: make(config) for name, config in {**CONFIGS, **PLAIN}.items()}


def prompts(lengths: tuple[int, ...] = (3, 25, 11, 1, 40)) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 150) for _ in range(n)] for n in lengths]


@torch.no_grad()
def plain_logps(model: Any, prompt: list[int], tokens: list[int], temperature: float) -> torch.Tensor:
    logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize("name", [*CONFIGS, *PLAIN])
def test_greedy_equals_transformers_generate(models: dict[str, Any], name: str) -> None:
    """Prompts of 1 to 40 tokens in one batch against each alone in transformers: learned, rotary, windowed, recurrent."""
    model = models[name]
    sampler = LocalSampler(model, [2], precision="fp32", slots=3)
    assert (sampler.notice is None) == (name in CONFIGS)
    got = sampler.sample([Request(p, Sampling(max_new_tokens=40, temperature=0)) for p in prompts()])
    for prompt, completion in zip(prompts(), got, strict=True):
        ids = torch.tensor([prompt])
        wanted = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, eos_token_id=2, pad_token_id=0
        )
        assert completion.tokens == wanted[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", [*CONFIGS, *PLAIN])
def test_log_probabilities_equal_a_plain_forward(models: dict[str, Any], name: str) -> None:
    model = models[name]
    sampler = LocalSampler(model, [2], precision="fp32", slots=4)
    for setting in (Sampling(20), Sampling(20, temperature=0.7), Sampling(20, temperature=0.7, top_k=9, repetition_penalty=1.5)):
        for c in sampler.sample([Request(p, setting, n=3, seed=i) for i, p in enumerate(prompts())]):
            wanted = plain_logps(model, prompts()[c.request], c.tokens, setting.temperature)
            assert torch.allclose(torch.tensor(c.logps), wanted, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_completion_does_not_depend_on_its_neighbours(models: dict[str, Any], name: str) -> None:
    """Alone, with others before and behind, few slots or many, little memory, small prefills: the same tokens."""
    setting = Sampling(max_new_tokens=24, temperature=0.9)
    requests = [Request(p, setting, n=3, seed=i) for i, p in enumerate(prompts())]

    def tokens(completions: list[Completion]) -> list[list[int]]:
        return [c.tokens for c in completions]

    alone = [LocalSampler(models[name], [2], precision="fp32", slots=1).sample([r]) for r in requests]
    wanted = [t for group in alone for t in tokens(group)]
    for options in ({"slots": 64}, {"slots": 4}, {"slots": 7, "prefill_tokens": 10}, {"slots": 9, "cache_tokens": 300}):
        assert tokens(LocalSampler(models[name], [2], precision="fp32", **options).sample(requests)) == wanted
    backwards = LocalSampler(models[name], [2], precision="fp32", slots=5).sample(requests[::-1])
    assert [t for i in reversed(range(5)) for t in tokens(backwards[3 * i : 3 * i + 3])] == wanted


def test_order_and_numbers_of_completions(models: dict[str, Any]) -> None:
    sampler = LocalSampler(models["llama"], [2], precision="fp32", slots=2)
    got = sampler.sample([Request([5], Sampling(4), n=2), Request([6, 7], Sampling(9), n=0), Request([8], Sampling(2), n=3)])
    assert [(c.request, c.sample) for c in got] == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]
    assert sampler.sample([]) == []


def test_a_group_is_prefilled_once(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven completions over three slots: the prompt goes through the model one time."""
    from tether.engines.runners import SlotRunner

    seen: list[int] = []
    real = SlotRunner.step

    def counting(self: Any, last: Any, lengths: Any, entering: Any) -> Any:
        seen.extend(len(e.tokens) for e in entering)
        return real(self, last, lengths, entering)

    sampler = LocalSampler(models["qwen2"], [2], precision="fp32", slots=3)
    monkeypatch.setattr(SlotRunner, "step", counting)
    got = sampler.sample([Request(list(range(3, 33)), Sampling(8), n=7)])
    assert len(got) == 7
    assert seen == [30]


def test_seeds_decide(models: dict[str, Any]) -> None:
    """Other seeds, other samples; the same seed, the same; the global random state plays no part and is left alone."""
    sampler = LocalSampler(models["llama"], [2], precision="fp32")
    state = torch.random.get_rng_state()
    a, b, c, d = (sampler.sample([Request([5, 6], Sampling(16), n=2, seed=s)]) for s in (0, 0, 1, "0"))
    assert [x.tokens for x in a] == [x.tokens for x in b] == [x.tokens for x in d]
    assert a[0].tokens != a[1].tokens
    assert a[0].tokens != c[0].tokens
    assert torch.equal(state, torch.random.get_rng_state())


def test_frequencies_follow_the_model(models: dict[str, Any]) -> None:
    """First tokens of 4,000 completions against softmax(logits / 0.8): total variation within sampling noise."""
    model, n = models["llama"], 4000
    got = LocalSampler(model, [2], precision="fp32", slots=512).sample([Request([9, 4], Sampling(1, temperature=0.8), n=n)])
    share = torch.bincount(torch.tensor([c.tokens[0] for c in got]), minlength=150) / n
    with torch.no_grad():
        p = torch.softmax(model(torch.tensor([[9, 4]])).logits[0, -1] / 0.8, -1)
    noise = (p * (1 - p) / n).sqrt().sum() / 2
    assert float((share - p).abs().sum() / 2) < 1.3 * float(noise)


# -- how completions end -----------------------------------------------------------------------------------------------


def forced(follow: dict[int, int], vocabulary: int = 150) -> Any:
    """A tiny Llama whose layers do nothing, so that the next token is a function of the last."""
    width = vocabulary + vocabulary % 2
    sizes = {"vocab_size": vocabulary, "hidden_size": width, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = make(LlamaConfig(**{**SIZES, **sizes, "tie_word_embeddings": False}))
    with torch.no_grad():
        for p in model.model.layers.parameters():
            p.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocabulary, width))
        model.lm_head.weight.zero_()
        for last, following in follow.items():
            model.lm_head.weight[following, last] = 10.0
    return model


@pytest.mark.parametrize("as_tokenizer", [False, True])
def test_every_end_token_ends_and_is_part_of_the_completion(as_tokenizer: bool) -> None:
    """Two end ids: one completion ends with each, one runs into the limit; finished share 2 of 3."""
    model = forced({10: 11, 11: 2, 20: 21, 21: 77, 30: 30})
    ends: Any = [2, 77]
    if as_tokenizer:  # the tokenizer knows one of them, the generation settings both
        ends = byte_tokenizer()
        model.generation_config.eos_token_id = [2, 77]
    got = LocalSampler(model, ends, precision="fp32").sample([Request([p], Sampling(5, temperature=0)) for p in (10, 20, 30)])
    assert [c.tokens for c in got] == [[11, 2], [21, 77], [30] * 5]
    assert [c.finish_reason for c in got] == ["stop", "stop", "length"]
    assert all(len(c.tokens) == len(c.logps) == len(c.sampling_logps) for c in got)


def test_end_tokens_in_the_prompt_end_nothing_and_an_end_at_the_limit_is_a_stop() -> None:
    model = forced({10: 11, 11: 2, 2: 10})
    sampler = LocalSampler(model, [2], precision="fp32")
    got = sampler.sample([Request([2, 10, 2], Sampling(3, temperature=0)), Request([2], Sampling(2, temperature=0))])
    assert [(c.tokens, c.finish_reason) for c in got] == [([10, 11, 2], "stop"), ([10, 11], "length")]
    on = sampler.sample([Request([2], Sampling(7, temperature=0, ignore_end=True))])
    assert on[0].tokens == [10, 11, 2, 10, 11, 2, 10]


def test_sampled_ids_stay_ids() -> None:
    """The model writes 'he' and 'llo' as two tokens where the tokenizer would write 'hello' as one: the ids stay two."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {"he": 3, "llo": 4, "hello": 5, "</s>": 2, "<unk>": 0, "x": 1}
    inner = Tokenizer(models.WordPiece(words, unk_token="<unk>", continuing_subword_prefix=""))
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")
    assert tokenizer.encode("hello", add_special_tokens=False) == [5]
    model = forced({1: 3, 3: 4, 4: 2})
    c = LocalSampler(model, tokenizer, precision="fp32").sample([Request([1], Sampling(5, temperature=0))])[0]
    assert (c.tokens, c.text) == ([3, 4, 2], "hello")
    assert torch.allclose(torch.tensor(c.logps), plain_logps(model, [1], c.tokens, 1.0), atol=1e-5)


def test_stop_strings_end_where_they_appear_and_all_tokens_are_kept() -> None:
    """Text 'abcabc...' one byte a token; stop 'ca' ends after the fourth token; the text is cut before it, the ids are not."""
    tokenizer = byte_tokenizer()
    a, b, c = (tokenizer.encode(x, add_special_tokens=False)[0] for x in "abc")
    model = forced({a: b, b: c, c: a}, len(tokenizer))
    sampler = LocalSampler(model, tokenizer, precision="fp32", slots=2)
    got = sampler.sample(
        [
            Request([c], Sampling(9, temperature=0, stop=("ca",))),
            Request([c], Sampling(9, temperature=0, stop=("zz", "b"))),
            Request([c], Sampling(6, temperature=0, stop=("zz",))),
        ]
    )
    assert [(x.tokens, x.text, x.finish_reason) for x in got] == [
        ([a, b, c, a], "ab", "stop_string"),
        ([a, b], "a", "stop_string"),
        ([a, b, c] * 2, "abcabc", "length"),
    ]


def test_tokens_are_told_as_they_are_drawn(models: dict[str, Any]) -> None:
    heard: dict[tuple[int, int], list[int]] = {}
    sampler = LocalSampler(models["llama"], [2], precision="fp32", slots=2)
    got = sampler.sample(
        [Request([5], Sampling(6), n=2), Request([6], Sampling(4))], lambda r, s, t: heard.setdefault((r, s), []).append(t)
    )
    assert {(c.request, c.sample): c.tokens for c in got} == heard


# -- the model is not touched ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_model_is_left_as_it_was(precision: Any) -> None:
    model = make(CONFIGS["gemma2"]).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    implementation = model.config._attn_implementation
    LocalSampler(model, [2], precision=precision).sample([Request([4, 5, 6], Sampling(12), n=2)])
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model.config._attn_implementation == implementation
    assert all(m.training for m in model.modules())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_dropout_is_off_whatever_the_mode() -> None:
    config = GPT2Config(
        vocab_size=150, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5, eos_token_id=2
    )
    model = make(config).train()
    a, b = (LocalSampler(model, [2], precision="fp32").sample([Request([5, 6], Sampling(10), seed=3)])[0] for _ in range(2))
    assert a == b
    assert torch.allclose(torch.tensor(a.logps), plain_logps(model.eval(), [5, 6], a.tokens, 1.0), atol=1e-4)


def test_new_weights_are_taken_up() -> None:
    """In float32 at once, as they are shared; in bfloat16 after refresh()."""
    model = make(CONFIGS["llama"])
    request = [Request([5, 6, 7], Sampling(10, temperature=0))]
    shared, cast = LocalSampler(model, [2], precision="fp32"), LocalSampler(model, [2], precision="bf16")
    old = shared.sample(request)[0].tokens
    cast.sample(request)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(4)) * 0.2)
    new = shared.sample(request)[0].tokens
    assert new != old
    assert new == LocalSampler(model, [2], precision="fp32").sample(request)[0].tokens
    cast.refresh()
    assert cast.sample(request) == LocalSampler(model, [2], precision="bf16").sample(request)


@pytest.mark.parametrize("name", [*CONFIGS, *PLAIN])
def test_bfloat16_stays_near_float32(models: dict[str, Any], name: str) -> None:
    """Log-probabilities of what bfloat16 sampled, by float32: near on average."""
    model = models[name]
    gaps = []
    for c in LocalSampler(model, [2], precision="bf16").sample([Request(p, Sampling(12), n=2) for p in prompts()]):
        gaps.append((torch.tensor(c.logps) - plain_logps(model, prompts()[c.request], c.tokens, 1.0)).abs().mean())
    assert float(torch.stack(gaps).mean()) < 0.1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_adapter_is_sampled_with_its_model(precision: Any) -> None:
    from peft import LoraConfig, get_peft_model

    base = make(CONFIGS["llama"])
    model: Any = get_peft_model(base, LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    got = LocalSampler(model, [2], precision=precision).sample([Request([5, 6, 7], Sampling(20))])[0]
    gap = (torch.tensor(got.logps) - plain_logps(model, [5, 6, 7], got.tokens, 1.0)).abs()
    with model.disable_adapter():
        without = (torch.tensor(got.logps) - plain_logps(model, [5, 6, 7], got.tokens, 1.0)).abs()
    assert float(gap.max()) < (1e-4 if precision == "fp32" else 0.3)
    assert float(without.max()) > 1.0
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_frequencies_that_move_with_length_take_the_plain_way_beyond_it() -> None:
    """Long-rope: beyond the original length a neighbour would change everyone's rotation, so sequences go alone."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "rope_theta": 10000.0}
    config = Phi3Config(
        **{**SIZES, "num_key_value_heads": 4},
        original_max_position_embeddings=32,
        rope_parameters={**rope, "original_max_position_embeddings": 32},
    )
    model = make(config)
    sampler = LocalSampler(model, [2], precision="fp32")
    assert sampler.notice is None
    short, long = [5, 6, 7], prompts((30,))[0]
    together = sampler.sample([Request(short, Sampling(8), seed=1), Request(long, Sampling(8), seed=2)])
    alone = sampler.sample([Request(short, Sampling(8), seed=1)])
    assert together[0].tokens == alone[0].tokens
    assert torch.allclose(torch.tensor(alone[0].logps), plain_logps(model, short, alone[0].tokens, 1.0), atol=1e-4)


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_, words",
    [
        (Request([]), "no tokens"),
        (Request([5], Sampling(256)), "256 positions"),
        (Request([500]), "vocabulary of 150"),
        (Request([-1]), "vocabulary of 150"),
        (Request([5], Sampling(5, stop=("x",))), "tokenizer"),
        (Request([5], n=-1), "n must be"),
    ],
)
def test_requests_that_cannot_work_are_refused_before_the_start(models: dict[str, Any], request_: Request, words: str) -> None:
    sampler = LocalSampler(models["llama"], [2], precision="fp32")
    with pytest.raises(UserError, match=words) as error:
        sampler.sample([Request([5], Sampling(2)), request_])
    assert "request 1" in str(error.value)


def test_a_cache_too_small_for_one_sequence_is_refused(models: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="do not fit the cache of 64 tokens"):
        LocalSampler(models["llama"], [2], precision="fp32", cache_tokens=64).sample([Request([5] * 50, Sampling(50))])


def test_broken_weights_are_told_not_sampled() -> None:
    model = make(CONFIGS["llama"])
    sampler = LocalSampler(model, [2], precision="fp32")
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    with pytest.raises(UserError, match="not numbers"):
        sampler.sample([Request([5], Sampling(3))])
    # The next call works again: nothing is left over from the one that failed.
    with torch.no_grad():
        model.lm_head.weight[7] = 0.0
    assert len(sampler.sample([Request([5], Sampling(3, ignore_end=True))])[0].tokens) == 3
