"""Adapters: loaded whole or refused by name, switched without a trace, merged only when the result computes the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.test_models import fresh_process
from tests.tiny import move, save_tiny, some_examples, tiny_config, tiny_model, tiny_tokenizer
from tether.adapters import as_reference
from tether.errors import UserError
from tether.merging import merge_adapter
from tether.models import load_model, save_model
from tether.packing import pack
from tether.policy import Policy
from tether.recipe import LoraConfig

IDS = torch.tensor([[1, 7, 8, 9, 50, 99]])
PACKED = pack(some_examples())


def trained_policy(base: Path, lora: LoraConfig | None = None, seed: int = 1) -> Policy:
    policy = Policy.load(base, precision="fp32", lora=lora or LoraConfig(rank=4))
    move(policy.parameters(), size=0.03, seed=seed)
    return policy


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "base")


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return trained_policy(base).save(tmp_path / "adapter")


def refusal(act: Any) -> str:
    with pytest.raises(UserError) as caught:
        act()
    assert caught.value.remedy
    return str(caught.value)


# -- in and out --------------------------------------------------------------------------------------------------------


def test_an_adapter_comes_back_bit_for_bit_and_plain_peft_reads_it(base: Path, tmp_path: Path) -> None:
    policy = trained_policy(base)
    policy.save(tmp_path / "adapter")
    again = Policy.load(tmp_path / "adapter", precision="fp32")
    assert torch.equal(again.logprobs(PACKED), policy.logprobs(PACKED))
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(theirs(IDS).logits, policy.model(IDS).logits)


def test_the_base_is_found_from_another_working_folder(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trained_policy(Path("base")).save("adapter")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_model(tmp_path / "adapter")[0].peft_config["default"].r == 4
    shutil.rmtree(base)
    assert "base model of this adapter is gone" in refusal(lambda: load_model(tmp_path / "adapter"))


def test_a_fresh_adapter_changes_nothing_and_follows_its_seed(base: Path) -> None:
    state = torch.get_rng_state()
    one, two, other = (Policy.load(base, precision="fp32", lora=LoraConfig(rank=4), seed=s) for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    plain = Policy.load(base, precision="fp32").logprobs(PACKED)
    for policy in (one, two, other):
        assert torch.equal(policy.logprobs(PACKED), plain)
    first, second, third = (torch.cat([p.detach().flatten() for p in x.parameters().values()]) for x in (one, two, other))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_target_modules_and_modules_to_save_are_followed(base: Path) -> None:
    policy = Policy.load(base, precision="fp32", lora=LoraConfig(rank=2, target_modules=["q_proj"], modules_to_save=["v_proj"]))
    assert all("q_proj.lora_" in n or "v_proj.modules_to_save" in n for n in policy.parameters())
    assert len(policy.parameters()) == 2 * 3
    assert "does not fit" in refusal(lambda: Policy.load(base, lora=LoraConfig(target_modules=["no_such_layer"])))


# -- B43: whole and fitting, or refused by name ------------------------------------------------------------------------


def test_a_broken_partial_or_foreign_adapter_is_refused_by_name(adapter: Path, tmp_path: Path) -> None:
    def copy(name: str) -> Path:
        shutil.copytree(adapter, tmp_path / name)
        return tmp_path / name

    weights = "adapter_model.safetensors"
    cut = copy("cut")
    (cut / weights).write_bytes((adapter / weights).read_bytes()[:-100])
    assert f"{weights}: is broken or cut off" in refusal(lambda: load_model(cut))

    garbage = copy("garbage")
    (garbage / weights).write_bytes(b"\0" * 50)
    assert "broken" in refusal(lambda: load_model(garbage))

    gone = copy("gone")
    (gone / weights).unlink()
    assert f"{weights} is missing" in refusal(lambda: load_model(gone))
    (gone / "adapter_model.bin").write_bytes(b"never opened")
    assert "pickle" in refusal(lambda: load_model(gone))

    partial = copy("partial")
    tensors = load_file(adapter / weights)
    lost = sorted(tensors)[3]
    save_file({k: v for k, v in tensors.items() if k != lost}, partial / weights)
    assert lost in refusal(lambda: load_model(partial))

    more = copy("more")
    save_file({**tensors, "base_model.model.other.lora_A.weight": torch.zeros(2, 2)}, more / weights)
    assert "other.lora_A.weight has no place" in refusal(lambda: load_model(more))

    config = json.loads((adapter / "adapter_config.json").read_text())
    rank = copy("rank")
    (rank / "adapter_config.json").write_text(json.dumps({**config, "r": 8}))
    assert "has rank 4, but rank 8 was asked for" in refusal(lambda: load_model(rank))
    (rank / "adapter_config.json").write_text("{half")
    assert "adapter_config.json: is broken" in refusal(lambda: load_model(rank))
    (rank / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "PREFIX_TUNING"}))
    assert "PREFIX_TUNING adapters are not supported" in refusal(lambda: load_model(rank))
    (rank / "adapter_config.json").write_text(json.dumps({**config, "bias": "all"}))
    assert "bias" in refusal(lambda: load_model(rank))


def test_starting_from_an_adapter_with_another_rank_is_refused(adapter: Path) -> None:
    assert "has rank 4 and alpha 32, not rank 8" in refusal(lambda: Policy.load(adapter, lora=LoraConfig(rank=8)))
    assert "not rank 4 and alpha 8" in refusal(lambda: Policy.load(adapter, lora=LoraConfig(rank=4, alpha=8)))
    assert len(Policy.load(adapter, precision="fp32", lora=LoraConfig(rank=4)).parameters()) == 28


def test_a_second_adapter_is_never_wrapped_around_the_first(adapter: Path) -> None:
    policy = Policy.load(adapter, precision="fp32")
    assert sorted(policy.model.peft_config) == ["default", "start"]
    layers = [m for m in policy.model.modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
    assert not any(isinstance(layer.get_base_layer(), peft.tuners.lora.LoraLayer) for layer in layers)
    folder = policy.save(adapter.parent / "next")
    assert sorted(load_file(folder / "adapter_model.safetensors")) == sorted(load_file(adapter / "adapter_model.safetensors"))
    assert not (folder / "start").exists()


# -- switching ---------------------------------------------------------------------------------------------------------


def test_switching_to_the_reference_leaves_no_trace(base: Path, adapter: Path) -> None:
    for name, lora in ((base, LoraConfig(rank=4)), (adapter, None)):
        policy = Policy.load(name, precision="fp32", lora=lora)
        move(policy.parameters())
        trainable = set(policy.parameters())
        policy.logprobs(PACKED).sum().backward()
        gradients = {n: p.grad.clone() for n, p in policy.parameters().items()}
        before = policy.logprobs(PACKED)
        with as_reference(policy.model):
            assert not torch.equal(policy.logprobs(PACKED), before)
        with pytest.raises(KeyError, match="in the block"), as_reference(policy.model):
            raise KeyError("in the block")
        assert set(policy.parameters()) == trainable
        assert all(torch.equal(p.grad, gradients[n]) for n, p in policy.parameters().items())
        assert torch.equal(policy.logprobs(PACKED), before)


# -- B39: merging ------------------------------------------------------------------------------------------------------

PROBE = """
from transformers import AutoModelForCausalLM, AutoTokenizer
from safetensors.torch import load_file
ids = load_file(sys.argv[1])["ids"]
for folder in sys.argv[2:]:
    expected = load_file(folder + ".expected")
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    print(float((found - expected["logits"]).abs().max()), len(AutoTokenizer.from_pretrained(folder)))
"""


def grown(base: Path, how: str) -> tuple[Any, Any]:
    """A tied model with two added tokens whose embeddings are trained, one of PEFT's ways."""
    model, tokenizer = load_model(base)
    tokenizer.add_tokens(["<tool>", "</tool>"])
    with torch.random.fork_rng():
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    options: dict[str, Any] = {
        "both": {"modules_to_save": ["embed_tokens", "lm_head"]},
        "tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        "rows": {"trainable_token_indices": {"embed_tokens": [100, 101]}},
    }[how]
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options)
    adapted = peft.get_peft_model(model, config)
    move({n: p for n, p in adapted.named_parameters() if p.requires_grad}, size=0.03)
    return adapted.eval(), tokenizer


def test_merged_models_compute_the_same_in_a_fresh_process(base: Path, tmp_path: Path) -> None:
    """Tied model: LoRA on attention only, on the output layer, on the input layer, and added tokens in three ways."""
    targets = {
        "attention": ["q_proj", "v_proj"],
        "output": ["q_proj", "lm_head"],
        "input": ["embed_tokens"],
        "ends": ["embed_tokens", "lm_head"],
    }
    cases: dict[str, tuple[Any, Any]] = {}
    for name, modules in targets.items():
        policy = trained_policy(base, LoraConfig(rank=4, target_modules=modules))
        policy.save(tmp_path / f"{name}-adapter")
        cases[name] = (policy.model, policy.tokenizer)
    for how in ("both", "tied", "rows"):
        model, tokenizer = cases[how] = grown(base, how)
        model.save_pretrained(tmp_path / f"{how}-adapter")
        tokenizer.save_pretrained(tmp_path / f"{how}-adapter")

    ids = torch.tensor([[1, 7, 8, 9, 50, 98, 99, 6]])
    save_file({"ids": ids}, tmp_path / "ids")
    for name, (model, tokenizer) in cases.items():
        here = torch.cat([ids[:, :-2], torch.tensor([[100, 101]])], 1) if len(tokenizer) > 100 else ids
        save_file({"ids": here}, tmp_path / f"{name}.ids")
        with torch.no_grad():
            save_file({"logits": model(ids).logits.contiguous(), "grown": model(here).logits.contiguous()}, tmp_path / f"{name}.expected")
        done = merge_adapter(tmp_path / f"{name}-adapter", tmp_path / name)
        assert done.difference < 1e-5
        assert done.untied == (name in ("output", "input", "ends", "both"))
        merged, _ = load_model(tmp_path / name)
        with torch.no_grad():
            assert (merged(here).logits - load_file(tmp_path / f"{name}.expected")["grown"]).abs().max() < 1e-5
    lines = fresh_process(PROBE, str(tmp_path / "ids"), *(str(tmp_path / n) for n in cases)).splitlines()
    for (name, (_, tokenizer)), line in zip(cases.items(), lines, strict=True):
        difference, tokens = line.split()
        assert float(difference) < 1e-5, name
        assert int(tokens) == len(tokenizer), name


def test_added_tokens_whose_output_rows_were_not_saved_are_refused_by_name(base: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(base)
    tokenizer.add_tokens(["<tool>"])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "a", save_embedding_layers=False)
    tokenizer.save_pretrained(tmp_path / "a")
    assert "does not hold their output embeddings" in refusal(lambda: merge_adapter(tmp_path / "a", tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_merge_that_would_change_the_scores_writes_nothing(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tether import merging

    honest = merging.merge

    def wrong(model: Any, *, where: str) -> Any:
        merged = honest(model, where=where)
        with torch.no_grad():
            merged.model.norm.weight[0] += 0.01
        return merged

    monkeypatch.setattr(merging, "merge", wrong)
    assert "changes what the model computes" in refusal(lambda: merge_adapter(adapter, tmp_path / "out"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base"]


def test_merging_keeps_the_bases_stored_type_and_says_what_rounding_did(tmp_path: Path) -> None:
    save_model(tiny_model().to(torch.bfloat16), tiny_tokenizer(), tmp_path / "base")
    trained_policy(tmp_path / "base").save(tmp_path / "adapter")
    done = merge_adapter(tmp_path / "adapter", tmp_path / "half")
    assert done.dtype == torch.bfloat16
    assert done.difference < 1e-5 < done.rounding
    wide = merge_adapter(tmp_path / "adapter", tmp_path / "wide", dtype=torch.float32)
    assert wide.rounding < 1e-5


def test_an_untied_base_stays_untied_and_a_plain_model_is_no_adapter(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", tiny_config(tie_word_embeddings=False))
    trained_policy(tmp_path / "base", LoraConfig(rank=4, target_modules=["lm_head", "embed_tokens"])).save(tmp_path / "adapter")
    done = merge_adapter(tmp_path / "adapter", tmp_path / "out")
    assert not done.untied
    assert "not an adapter folder" in refusal(lambda: merge_adapter(tmp_path / "base", tmp_path / "out"))


def test_merge_command_says_what_it_did(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tether.commands.merge import merge

    merge(adapter, tmp_path / "out")
    assert "scores agree within" in capsys.readouterr().out
    assert "unknown weight type" in refusal(lambda: merge(adapter, tmp_path / "out", dtype="int3"))
