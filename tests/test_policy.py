"""The policy: what it trains, what it is tied to, and that both are the same before training."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import move, save_tiny, some_examples, tiny_config, tiny_model, tiny_tokenizer
from tether import precision
from tether.models import save_model
from tether.packing import pack
from tether.policy import Policy
from tether.recipe import LoraConfig

EXAMPLES = some_examples(6)
PACKED = pack(EXAMPLES)
LORA = LoraConfig(rank=4)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "base")


def disk(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def margin_and_kl(policy: Policy) -> tuple[float, float]:
    """Of pairs: the largest DPO margin, and the largest log-ratio of a token, policy against reference."""
    ours = policy.logprobs(PACKED)
    with policy.reference() as reference:
        theirs = reference.logprobs(PACKED)
    gap = PACKED.sum_by_answer((ours - theirs).detach()).view(-1, 2)
    return float((gap[:, 0] - gap[:, 1]).abs().max()), float((ours - theirs).detach().abs().max())


# -- what is trainable -------------------------------------------------------------------------------------------------


def test_full_fine_tuning_trains_every_weight_once(base: Path) -> None:
    policy = Policy.load(base, precision="fp32")
    assert "lm_head.weight" not in policy.parameters()
    assert sum(p.numel() for p in policy.parameters().values()) == sum(p.numel() for p in policy.model.parameters())


def test_with_an_adapter_only_the_adapter_has_gradients(base: Path) -> None:
    policy = Policy.load(base, precision="fp32", lora=LORA)
    policy.logprobs(PACKED).sum().backward()
    for name, parameter in policy.model.named_parameters():
        assert (parameter.grad is not None) == ("lora_" in name), name


def test_weights_are_float32_whatever_they_are_stored_in(tmp_path: Path) -> None:
    save_model(tiny_model().to(torch.bfloat16), tiny_tokenizer(), tmp_path / "half")
    for lora in (None, LORA):
        policy = Policy.load(tmp_path / "half", precision="bf16", lora=lora)
        assert {p.dtype for p in policy.parameters().values()} == {torch.float32}


# -- B27, B37: before training the policy is its reference -------------------------------------------------------------


@pytest.mark.parametrize("arithmetic", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["full", "fresh adapter", "from adapter"])
def test_margin_and_kl_are_zero_before_training(base: Path, tmp_path: Path, arithmetic: str, kind: str) -> None:
    name, lora = base, LORA if kind == "fresh adapter" else None
    if kind == "from adapter":
        first = Policy.load(base, precision="fp32", lora=LORA)
        move(first.parameters())
        name = first.save(tmp_path / "adapter")
    margin, ratio = margin_and_kl(Policy.load(name, precision=arithmetic, lora=lora))
    assert margin == 0.0
    assert ratio == 0.0


def test_dropout_is_off_in_policy_and_reference_and_stays_in_the_config_on_disk(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", tiny_config(attention_dropout=0.1))
    for lora in (None, LoraConfig(rank=4, dropout=0.1)):
        policy = Policy.load(base, precision="fp32", lora=lora)
        if lora is not None:
            move(policy.parameters())
        policy.model.train()  # what another library's loop would do
        first, second = policy.logprobs(PACKED), policy.logprobs(PACKED)
        assert torch.equal(first, second)
        if lora is None:
            assert margin_and_kl(policy) == (0.0, 0.0)
        policy.save(tmp_path / f"out-{lora is None}")
    assert json.loads((tmp_path / "out-True" / "config.json").read_text())["attention_dropout"] == 0.1
    assert json.loads((tmp_path / "out-False" / "adapter_config.json").read_text())["lora_dropout"] == 0.1


def test_dropout_acts_when_it_is_asked_for(base: Path) -> None:
    policy = Policy.load(base, precision="fp32", lora=LoraConfig(rank=4, dropout=0.5), train_dropout=True)
    move(policy.parameters())
    assert not torch.equal(policy.logprobs(PACKED), policy.logprobs(PACKED))
    with torch.no_grad():
        assert torch.equal(policy.logprobs(PACKED), policy.logprobs(PACKED))


def sft_blue(base: Path, folder: Path) -> Path:
    """An SFT adapter that has learnt to answer w42, whatever is asked."""
    from tether.batch import Example

    policy = Policy.load(base, precision="fp32", lora=LORA)
    optimizer = torch.optim.AdamW(policy.parameters().values(), lr=1e-2)
    rows = pack([Example(e.prompt, [[42, 2]], [[True, False]]) for e in EXAMPLES])
    for _ in range(60):
        (-policy.logprobs(rows).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert policy.logprobs(rows).mean() > -0.2
    return policy.save(folder)


def test_a_policy_that_starts_from_an_adapter_is_tied_to_that_adapter(base: Path, tmp_path: Path) -> None:
    """The SFT adapter answers blue; the reference must be it, not the raw base, and neither it nor its file may move."""
    adapter = sft_blue(base, tmp_path / "sft")
    before = disk(adapter)
    policy = Policy.load(adapter, precision="fp32")
    assert margin_and_kl(policy) == (0.0, 0.0)
    with policy.reference() as reference:
        at_start = reference.logprobs(PACKED)
    frozen = {n: p.clone() for n, p in policy.model.named_parameters() if not p.requires_grad}
    assert any(".start." in n for n in frozen)

    optimizer = torch.optim.AdamW(policy.parameters().values(), lr=1e-2)
    for _ in range(5):
        gap = PACKED.sum_by_answer(policy.logprobs(PACKED)).view(-1, 2)
        with policy.reference() as reference:
            tied = PACKED.sum_by_answer(reference.logprobs(PACKED)).view(-1, 2)
        difference = (gap - tied)[:, 0] - (gap - tied)[:, 1]
        (-torch.nn.functional.logsigmoid(0.1 * difference).mean()).backward()
        assert all(p.grad is None for n, p in policy.model.named_parameters() if n in frozen)
        optimizer.step()
        optimizer.zero_grad()

    assert margin_and_kl(policy)[0] > 0.1, "training moved the policy"
    with policy.reference() as reference:
        assert torch.equal(reference.logprobs(PACKED), at_start)
    assert all(torch.equal(p, frozen[n]) for n, p in policy.model.named_parameters() if n in frozen)
    policy.save(tmp_path / "dpo")
    assert disk(adapter) == before
    raw = Policy.load(base, precision="fp32").logprobs(PACKED)
    assert not torch.allclose(at_start, raw, atol=0.1), "the adapter differs from the base, so the test can tell them apart"


# -- the frozen copy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arithmetic", ["fp32", "bf16"])
def test_the_frozen_copy_shares_nothing_and_has_no_gradient(base: Path, arithmetic: str) -> None:
    policy = Policy.load(base, precision=arithmetic)
    with policy.reference() as reference:
        before = reference.logprobs(PACKED)
        assert not before.requires_grad
    assert policy._reference is not None
    copy = policy._reference.model
    assert not any(p.requires_grad for p in copy.parameters())
    assert not {p.data_ptr() for p in copy.parameters()} & {p.data_ptr() for p in policy.model.parameters()}
    move(policy.parameters())
    with policy.reference() as reference:
        assert torch.equal(reference.logprobs(PACKED), before)
    assert not torch.equal(policy.logprobs(PACKED), before)


def test_a_policy_that_has_moved_finds_its_start_again_on_disk(base: Path) -> None:
    """A resumed run loads its trained weights first and asks for the reference afterwards."""
    at_start = Policy.load(base, precision="fp32").logprobs(PACKED)
    policy = Policy.load(base, precision="fp32")
    state = torch.get_rng_state()
    move(policy.parameters())
    with policy.reference() as reference:
        assert torch.equal(reference.logprobs(PACKED), at_start)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_start_model_that_changed_on_disk_is_not_taken_for_the_reference(base: Path) -> None:
    from tether.errors import UserError

    policy = Policy.load(base, precision="fp32")
    policy.reference_fingerprint()
    move(policy.parameters())
    save_tiny(base, seed=5)
    with pytest.raises(UserError, match="changed on disk"), policy.reference():
        pass


def test_an_optimiser_step_is_seen_by_untouched(base: Path) -> None:
    """Fused optimisers do not count up tensor versions, so the weights themselves are looked at."""
    for lora in (None, LORA):
        policy = Policy.load(base, precision="fp32", lora=lora)
        assert policy.untouched()
        policy.logprobs(PACKED).sum().backward()
        torch.optim.AdamW(policy.parameters().values(), lr=1e-6, fused=True).step()
        assert not policy.untouched()


def test_the_reference_is_known_by_content_with_or_without_a_fresh_adapter(base: Path, tmp_path: Path) -> None:
    plain = Policy.load(base, precision="fp32")
    fresh = Policy.load(base, precision="fp32", lora=LORA)
    assert plain.reference_fingerprint() == fresh.reference_fingerprint()
    move(fresh.parameters())
    adapter = fresh.save(tmp_path / "adapter")
    assert fresh.reference_fingerprint() == plain.reference_fingerprint()
    started = Policy.load(adapter, precision="fp32")
    assert started.reference_fingerprint() != plain.reference_fingerprint()
    known = started.reference_fingerprint()
    move(started.parameters())
    started._reference_fingerprint = None
    assert started.reference_fingerprint() == known


def test_gradients_are_the_same_under_checkpointing(base: Path) -> None:
    found = []
    for checkpointing in (False, True):
        policy = Policy.load(base, precision="fp32", gradient_checkpointing=checkpointing)
        policy.logprobs(PACKED).sum().backward()
        found.append({n: p.grad for n, p in policy.parameters().items()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-6)


# -- precision ---------------------------------------------------------------------------------------------------------


def test_precision_is_decided_by_measuring_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path))
    measured: list[float] = []
    for ratio, expected in ((4.0, "bf16"), (1.2, "fp32"), (0.3, "fp32")):
        monkeypatch.setattr(precision, "speedup", lambda ratio=ratio: measured.append(ratio) or ratio)
        monkeypatch.setattr(precision, "machine", lambda ratio=ratio: f"machine {ratio}")
        assert precision.choose() == expected
        assert precision.choose("auto") == expected
    assert measured == [4.0, 1.2, 0.3], "each machine is measured once"
    assert precision.choose("bf16") == "bf16"
    assert precision.choose("fp32") == "fp32"
    with pytest.raises(ValueError, match="fp16"):
        precision.choose("fp16")


def test_a_broken_or_unwritable_precision_cache_only_costs_a_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "speedup", lambda: 2.0)
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path))
    (tmp_path / "precision.json").write_text("{half")
    assert precision.choose() == "bf16"
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("TETHER_CACHE", str(blocked))
    assert precision.choose() == "bf16"


def test_the_probe_measures_something() -> None:
    state = torch.get_rng_state()
    assert precision.speedup() > 0
    assert torch.equal(torch.get_rng_state(), state)


# -- saving ------------------------------------------------------------------------------------------------------------


def test_a_replaced_chat_template_is_used_and_saved(base: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    policy = Policy.load(base, precision="fp32", chat_template=template)
    policy.save(tmp_path / "out")
    again: Any = Policy.load(tmp_path / "out", precision="fp32")
    assert again.tokenizer.chat_template == template


def test_a_saved_policy_is_the_policy(base: Path, tmp_path: Path) -> None:
    policy = Policy.load(base, precision="fp32")
    move(policy.parameters())
    policy.save(tmp_path / "out")
    assert torch.equal(Policy.load(tmp_path / "out", precision="fp32").logprobs(PACKED), policy.logprobs(PACKED))


# -- from a recipe -----------------------------------------------------------------------------------------------------


def test_a_recipe_decides_how_policy_and_reward_model_are_loaded_and_the_run_keeps_the_precision(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tether.errors import UserError
    from tether.recipe import DPORecipe, RewardRecipe, SFTRecipe
    from tether.run import Run
    from tether.scalar import ScalarModel

    monkeypatch.setattr(precision, "choose", lambda asked="auto": {"auto": "bf16"}.get(asked, asked))
    (tmp_path / "t.jinja").write_text("{{ messages[0]['content'] }}")
    common: dict[str, Any] = {"model": str(base), "data": "rows.jsonl", "trackers": []}
    recipe = DPORecipe(**common, lora={"rank": 2}, chat_template=str(tmp_path / "t.jinja"))
    with Run.create(tmp_path / "dpo", recipe) as run:
        policy = Policy.from_recipe(recipe, run)
        assert run.recorded("precision") == policy.precision == "bf16"
        assert len(policy.parameters()) == 28
        assert policy.tokenizer.chat_template == "{{ messages[0]['content'] }}"
        assert not policy.engine.train_dropout
        # The same run on a machine where the probe says otherwise goes on as it began.
        monkeypatch.setattr(precision, "choose", lambda asked="auto": {"auto": "fp32"}.get(asked, asked))
        assert Policy.from_recipe(recipe, run).precision == "bf16"
    sft = SFTRecipe(**common, lora={"dropout": 0.1})
    with Run.create(tmp_path / "sft", sft) as run:
        assert Policy.from_recipe(sft, run).engine.train_dropout
    missing = SFTRecipe(**common, chat_template="nowhere.jinja")
    with Run.create(tmp_path / "missing", missing) as run, pytest.raises(UserError, match=r"nowhere\.jinja"):
        Policy.from_recipe(missing, run)
    reward = RewardRecipe(**common, heads=3, lcb=0.5)
    with Run.create(tmp_path / "reward", reward) as run:
        model = ScalarModel.from_recipe(reward, run)
        assert (model.heads, model.lcb) == (3, 0.5)
        assert run.recorded("precision") == model.precision
