"""Sampling by vLLM's server: the same tokens as here, the weights of each version, servers that fail, servers that are refused.

The server is a stand-in that speaks vLLM's wire format and samples from a tiny model (`tests/vllm_server.py`).
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import peft
import pytest

from tests.tiny import move, save_tiny
from tests.vllm_server import FakeVLLM, serving
from tether.engines import wire
from tether.engines.gate import Gate
from tether.engines.local import LocalSampler, Request
from tether.engines.sampling import Sampling
from tether.engines.server import Server
from tether.engines.starting import command
from tether.engines.vllm import VLLMSampler, in_threads
from tether.engines.weights import Weights, base_model
from tether.errors import UserError
from tether.policy import Policy
from tether.recipe import LoraConfig

PROMPTS = [[7, 8, 9, 10], [11, 12], [20, 21, 22, 23, 24]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


def sampler_of(policy: Policy, fakes: list[FakeVLLM], root: Path, **settings: Any) -> VLLMSampler:
    servers = [Server(fake.url, **{"timeout_s": 10.0, **settings}) for fake in fakes]
    for server in servers:
        server.meet(policy.tokenizer, PROMPTS[0], 1.0)
    return VLLMSampler(servers, policy.codec, Weights(policy, root), frozenset({2}), pause_s=0.01)


def requests(n: int = 3, **settings: Any) -> list[Request]:
    return [Request(p, Sampling(**{"max_new_tokens": 8, **settings}), n, f"1/{i}") for i, p in enumerate(PROMPTS)]


def directly(policy: Policy, asked: list[Request]) -> list[Any]:
    """What `LocalSampler` makes of the numbers that stand for the seeds."""
    model = copy.deepcopy(policy.model).merge_and_unload() if isinstance(policy.model, peft.PeftModel) else policy.model
    local = LocalSampler(model, policy.codec, precision="fp32")
    return local.sample([Request(r.prompt, r.sampling, r.n, wire.seed_of(r.seed), r.where) for r in asked])


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7}, {"temperature": 0.0}, {"ignore_end": True}, {"stop": ("w30", "w31", "w40")}]
)
def test_the_same_tokens_and_log_probs_through_a_server_as_directly(folder: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    policy = Policy.load(folder, precision="fp32")
    with serving(folder) as fakes:
        sampler = sampler_of(policy, fakes, tmp_path)
        sampler.refresh(0)
        asked, done = requests(**settings), []
        made = sampler.sample(asked, on_done=done.append)
        want = directly(policy, asked)
    assert made == done
    for got, true in zip(made, want, strict=True):
        assert (got.request, got.sample, got.tokens, got.finish_reason) == (true.request, true.sample, true.tokens, true.finish_reason)
        assert got.logps == pytest.approx(true.logps, abs=1e-5)
        assert got.sampling_logps == pytest.approx(true.sampling_logps, abs=1e-5)
        if true.finish_reason != "stop_string":
            assert got.text == true.text
    assert {c.finish_reason for c in made} >= ({"stop_string"} if "stop" in settings else set())
    assert sampler.positions == 64


def test_nothing_is_left_to_the_servers_own_defaults() -> None:
    """A vLLM server fills in what a request leaves out from the model's generation settings."""
    body = wire.question(Request([5], Sampling(max_new_tokens=3, temperature=0.5), 2, "s"), "m", {2, 9}, "v1")
    assert {k: body[k] for k in ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")} == {
        "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }  # fmt: skip
    assert (body["prompt"], body["n"], body["logprobs"], body["stop_token_ids"], body["cache_salt"]) == ([5], 2, 0, [2, 9], "v1")
    assert body["return_token_ids"] is True
    seeds = {wire.seed_of(f"0/{i}") for i in range(1000)}
    assert len(seeds) == 1000
    assert all(0 <= s < 2**62 for s in seeds), "a server adds up to n to it and takes 63 bits"


def test_an_adapter_is_loaded_beside_the_old_one_under_a_name_with_its_version(folder: Path, tmp_path: Path) -> None:
    policy = Policy.load(folder, precision="fp32", lora=LoraConfig(rank=4))
    with serving(folder, dev=False) as fakes:
        sampler = sampler_of(policy, fakes, tmp_path)
        sampler.refresh(0)
        first = sampler.sample(requests())
        sampler.refresh(0)
        move(policy.parameters(), 0.3)
        sampler.refresh(1)
        second = sampler.sample(requests())
        names = [body["lora_name"] for path, body in fakes[0].calls if path == "/v1/load_lora_adapter"]
        order = [p for p in fakes[0].paths() if p != "/v1/completions"]
        asked = fakes[0].asked()
        assert list(fakes[0].adapters) == names[1:]
    assert [name[-7:] for name in names] == ["-000000", "-000001"]
    assert order == ["/v1/models", "/tokenize", "/v1/load_lora_adapter", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
    assert [b["model"] for b in asked] == [names[0]] * 3 + [names[1]] * 3
    assert [b["cache_salt"] for b in asked] == [b["model"] for b in asked]
    assert [p.name for p in tmp_path.iterdir()] == names[1:], "only the newest is kept on disk"
    assert [c.tokens for c in first] != [c.tokens for c in second]
    for got, true in zip(second, directly(policy, requests()), strict=True):
        assert got.tokens == true.tokens
        assert got.logps == pytest.approx(true.logps, abs=1e-5)


def test_whole_weights_are_reloaded_and_the_prefix_cache_emptied(folder: Path, tmp_path: Path) -> None:
    policy = Policy.load(folder, precision="fp32")
    with serving(folder, 2, lora=False) as fakes:
        sampler = sampler_of(policy, fakes, tmp_path)
        sampler.refresh(0)
        move(policy.parameters(), 0.3)
        sampler.refresh(1)
        made = sampler.sample(requests())
        for fake in fakes:
            order = [p for p in fake.paths() if p not in ("/v1/completions", "/v1/models", "/tokenize")]
            assert order == ["/collective_rpc", "/reset_prefix_cache"] * 2
        assert sum(len(f.asked()) for f in fakes) == 3
        assert all(f.asked() for f in fakes), "dealt to both"
    assert [c.tokens for c in made] == [c.tokens for c in directly(policy, requests())]
    assert len(list(tmp_path.iterdir())) == 1


def test_whole_weights_wait_until_nothing_is_sampled(folder: Path, tmp_path: Path) -> None:
    policy = Policy.load(folder, precision="fp32")
    with serving(folder) as fakes:
        sampler = sampler_of(policy, fakes, tmp_path)
        sampler.refresh(0)
        fakes[0].delay_s = 0.1
        ask, answers = sampler.begin(requests()), []
        thread = threading.Thread(target=lambda: answers.append(ask()))
        thread.start()
        move(policy.parameters(), 0.3)
        sampler.refresh(1)
        assert answers, "the old weights' answers came first"
        thread.join()
        assert len({b["cache_salt"] for b in fakes[0].asked()}) == 1


def test_a_server_that_dies_is_tried_again_then_left_aside_with_a_message(folder: Path, tmp_path: Path) -> None:
    policy = Policy.load(folder, precision="fp32", lora=LoraConfig(rank=4))
    with serving(folder, 2) as fakes:
        sampler = sampler_of(policy, fakes, tmp_path)
        sampler.refresh(0)
        fakes[0].die_after = 1
        many = [Request(p, Sampling(max_new_tokens=8), 2, f"{k}/{i}") for k in range(4) for i, p in enumerate(PROMPTS)]
        made = sampler.sample(many)
        assert [c.tokens for c in made] == [c.tokens for c in directly(policy, many)], "every request is answered, in order"
        (message,) = sampler.told()
        assert fakes[0].url in message
        assert "3 times" in message
        assert "1 is left" in message
        assert sampler.told() == []
        before = len(fakes[0].calls)
        sampler.refresh(1)
        sampler.sample(many[:2])
        assert len(fakes[0].calls) == before, "it is not asked again"
        fakes[1].die_after = 0
        with pytest.raises(UserError, match="no vLLM server is left") as error:
            sampler.sample(many)
        assert fakes[0].url in str(error.value)
        assert fakes[1].url in str(error.value)
        assert "tether resume" in str(error.value)


def test_a_failure_that_passes_is_not_seen(folder: Path, tmp_path: Path) -> None:
    policy = Policy.load(folder, precision="fp32")
    with serving(folder) as fakes:
        sampler = sampler_of(policy, fakes, tmp_path)
        sampler.refresh(0)
        fakes[0].broken = 2
        made = sampler.sample(requests()[:1])
        assert [c.tokens for c in made] == [c.tokens for c in directly(policy, requests()[:1])]
        assert sampler.told() == []


@pytest.mark.parametrize("lora", [True, False])
def test_a_server_that_was_started_anew_gets_the_weights_again(folder: Path, tmp_path: Path, lora: bool) -> None:
    """Whoever answers after a failure may have the weights it was started with: sampling from them would be silently wrong."""
    policy = Policy.load(folder, precision="fp32", lora=LoraConfig(rank=4) if lora else None)
    with serving(folder) as fakes:
        move(policy.parameters(), 0.3)
        sampler = sampler_of(policy, fakes, tmp_path)
        sampler.refresh(5)
        fakes[0].forget()
        fakes[0].model = FakeVLLM.model_of(folder)
        fakes[0].broken = 1
        made = sampler.sample(requests()[:1])
        assert [c.tokens for c in made] == [c.tokens for c in directly(policy, requests()[:1])]


def test_a_slow_server_counts_as_failing(folder: Path, tmp_path: Path) -> None:
    policy = Policy.load(folder, precision="fp32")
    with serving(folder) as fakes:
        sampler = sampler_of(policy, fakes, tmp_path, timeout_s=0.5)
        sampler.refresh(0)
        fakes[0].delay_s = 1.0
        began = time.monotonic()
        with pytest.raises(UserError, match=r"no vLLM server is left.*(timed out|no answer in 0.5 s)"):
            sampler.sample(requests()[:1])
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"vocabulary": 1}, "another vocabulary"),
        ({"ids": False}, "does not return the ids"),
        ({"raw_logprobs": True}, "before temperature.*processed_logprobs"),
    ],
)
def test_an_unfit_server_is_refused_in_a_sentence(folder: Path, settings: dict[str, Any], told: str) -> None:
    policy = Policy.load(folder, precision="fp32")
    with serving(folder) as fakes:
        for name, value in settings.items():
            setattr(fakes[0], name, value)
        with pytest.raises(UserError, match=told) as error:
            Server(fakes[0].url).meet(policy.tokenizer, PROMPTS[0], 0.5)
        assert fakes[0].url in str(error.value)


def test_a_server_of_another_model_or_of_another_kind_is_refused(folder: Path) -> None:
    policy = Policy.load(folder, precision="fp32")
    with serving(folder) as fakes:
        with pytest.raises(UserError, match=r"no model 'large'.*It serves: tiny"):
            Server(fakes[0].url, model="large").meet(policy.tokenizer, PROMPTS[0], 1.0)
        fakes[0].answer = lambda path, body: (200, {"hello": 1})  # type: ignore[method-assign]
        with pytest.raises(UserError, match="not vLLM's server"):
            Server(fakes[0].url).meet(policy.tokenizer, PROMPTS[0], 1.0)


@pytest.mark.parametrize("lora, told", [(True, "enable-lora"), (False, "VLLM_SERVER_DEV_MODE=1")])
def test_a_server_that_takes_no_weights_is_refused_with_what_to_start_it_with(folder: Path, tmp_path: Path, lora: bool, told: str) -> None:
    policy = Policy.load(folder, precision="fp32", lora=LoraConfig(rank=4) if lora else None)
    with serving(folder, lora=False, dev=False) as fakes, pytest.raises(UserError, match=told):
        sampler_of(policy, fakes, tmp_path).refresh(0)


def test_what_a_server_cannot_say_the_log_probs_of_is_refused(folder: Path, tmp_path: Path) -> None:
    policy = Policy.load(folder, precision="fp32")
    with serving(folder) as fakes:
        sampler = sampler_of(policy, fakes, tmp_path)
        sampler.refresh(0)
        with pytest.raises(UserError, match="top_p"):
            sampler.sample(requests(top_p=0.9))
        with pytest.raises(UserError, match="64 positions"):
            sampler.sample([Request([7] * 60, Sampling(max_new_tokens=8))])
        with pytest.raises(UserError, match="no tokens"):
            sampler.sample([Request([])])
        fakes[0].end_ids = [2, *range(6, 60)]
        with pytest.raises(UserError, match="ends nothing for the model that is trained"):
            sampler.sample(requests())
        assert sampler.sample([]) == []


def test_log_probs_that_are_no_numbers_are_refused(folder: Path, tmp_path: Path) -> None:
    policy = Policy.load(folder, precision="fp32")
    with serving(folder) as fakes:
        sampler = sampler_of(policy, fakes, tmp_path)
        sampler.refresh(0)
        for value in (float("nan"), -1e6):
            fakes[0].shift = value
            with pytest.raises(UserError, match="no number"):
                sampler.sample(requests()[:1])


def test_a_gate_closes_when_all_have_left() -> None:
    gate, seen = Gate(), []
    gate.enter("a")
    gate.enter("b")
    assert gate.names() == {"a", "b"}

    def close() -> None:
        with gate.closed():
            seen.append(gate.names())

    thread = threading.Thread(target=close)
    thread.start()
    gate.leave("a")
    time.sleep(0.02)
    assert seen == []
    gate.leave("b")
    thread.join(5)
    assert seen == [set()]


def test_work_in_threads_keeps_its_order_and_raises_the_first_failure() -> None:
    assert in_threads(lambda x: x * x, [3, 1, 2]) == [9, 1, 4]

    def fails(x: int) -> int:
        raise ValueError(str(x))

    with pytest.raises(ValueError, match=r"[123]"):
        in_threads(fails, [3, 1, 2])


def test_a_started_server_is_told_all_that_sampling_needs(folder: Path, tmp_path: Path) -> None:
    words = command("py", "m", 8100, dtype="bfloat16", slots=64, positions=512, lora=20, adapters=2, cpu=True)
    pairs = list(itertools.pairwise(words))
    for pair in (
        ("--model", "m"), ("--port", "8100"), ("--host", "127.0.0.1"), ("--dtype", "bfloat16"), ("--max-num-seqs", "64"),
        ("--max-model-len", "512"), ("--max-lora-rank", "32"), ("--max-loras", "2"), ("--logprobs-mode", "processed_logprobs"),
        ("--generation-config", "vllm"),
    ):  # fmt: skip
        assert pair in pairs, pair
    assert "--no-enable-chunked-prefill" in words
    assert "--enable-lora" not in command("py", "m", 1, dtype="float32", slots=1, positions=8, lora=None, adapters=1, cpu=False)
    policy = Policy.load(folder, precision="fp32", lora=LoraConfig(rank=4))
    assert base_model(policy, tmp_path) == str(folder.resolve())
