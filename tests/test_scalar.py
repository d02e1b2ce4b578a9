"""The reward model: one number for an answer, the same alone and in company, now and after a reload, here and in transformers."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GPT2Config, GraniteConfig, Qwen2Config

from tests.test_models import fresh_process
from tests.tiny import move, save_tiny, some_examples, tiny_config, tiny_model, tiny_tokenizer
from tether.batch import Example
from tether.errors import UserError
from tether.models import load_model, save_model
from tether.packing import pack
from tether.recipe import LoraConfig
from tether.scalar import ScalarModel

EXAMPLES = some_examples(5)
PACKED = pack(EXAMPLES)
TEXTS = [(f"w{i} w{i + 1}", " ".join(f"w{j}" for j in range(i, i + 1 + 9 * (i % 7)))) for i in range(10, 20)]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "base")


def trained(base: Path, steps: int = 20, **options: Any) -> ScalarModel:
    """A reward model after some steps on pairs, its normalisation set."""
    model = ScalarModel.load(base, precision="fp32", fresh_head=True, **options)
    optimizer = torch.optim.AdamW(model.parameters().values(), lr=3e-3)
    for _ in range(steps):
        scores = model.scores(PACKED).view(5, 2, -1)
        (-torch.nn.functional.logsigmoid(scores[:, 0] - scores[:, 1]).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    scores = model.scores(PACKED).detach().view(5, 2, -1)
    assert (scores[:, 0] > scores[:, 1]).all(), "it learnt the pairs"
    model.set_normalisation(mean=0.25, std=1.75)
    return model


def refusal(act: Any) -> str:
    with pytest.raises(UserError) as caught:
        act()
    assert caught.value.remedy
    return str(caught.value)


# -- the head ----------------------------------------------------------------------------------------------------------


def test_a_fresh_head_is_small_without_bias_and_follows_its_seed(base: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    model = ScalarModel.load(base, precision="fp32", fresh_head=True, heads=200)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.model.score.bias is None
    assert float(model.model.score.weight.detach().std()) == pytest.approx(1 / math.sqrt(33), rel=0.05)
    again = ScalarModel.load(base, precision="fp32", fresh_head=True, heads=200)
    other = ScalarModel.load(base, precision="fp32", fresh_head=True, heads=200, seed=1)
    assert torch.equal(model.model.score.weight, again.model.score.weight)
    assert not torch.equal(model.model.score.weight, other.model.score.weight)


def test_the_score_is_the_head_at_the_answers_last_token(base: Path) -> None:
    model = ScalarModel.load(base, precision="fp32", fresh_head=True, heads=3)
    scores = model.scores(PACKED)
    assert scores.shape == (10, 3)
    assert scores.dtype == torch.float32
    row = 0
    for example in EXAMPLES:
        for answer in example.answers:
            hidden = model.model.model(torch.tensor([example.prompt + answer])).last_hidden_state[0, -1]
            torch.testing.assert_close(scores[row], model.model.score.weight @ hidden, rtol=1e-5, atol=1e-5)
            row += 1


def test_scores_are_float32_under_bf16(base: Path) -> None:
    model = ScalarModel.load(base, precision="bf16", fresh_head=True)
    exact = ScalarModel.load(base, precision="fp32", fresh_head=True)
    assert model.scores(PACKED).dtype == torch.float32
    torch.testing.assert_close(model.scores(PACKED), exact.scores(PACKED), rtol=0.1, atol=0.1)


def test_combining_heads_by_hand(base: Path) -> None:
    """Heads 1, 2, 6: mean 3, population spread sqrt((4 + 1 + 9) / 3); with lcb 0.5 the score is 3 - 0.5 * 2.160247."""
    model = ScalarModel.load(base, precision="fp32", fresh_head=True, heads=3, lcb=0.5)
    assert model.combine(torch.tensor([[1.0, 2.0, 6.0]])).item() == pytest.approx(3 - 0.5 * math.sqrt(14 / 3))
    assert model.combine(torch.tensor([[4.0]])).item() == 4.0


# -- B22: nothing depends on the company -------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [None, "</s>", "w7"], ids=["no pad mark", "pad is the end mark", "pad inside the text"])
def test_scores_do_not_depend_on_the_batch(tmp_path: Path, pad: str | None) -> None:
    base = save_tiny(tmp_path / "base", tokenizer=tiny_tokenizer(pad=pad))
    model = ScalarModel.load(base, precision="fp32", fresh_head=True)
    lengths = [3, 9, 17, 30, 44, 60]
    examples = [Example([7, 8, 7], [[*range(10, 10 + n - 1), 2]], [[True] * n]) for n in lengths]
    together = model.scores(pack(examples))
    backwards = model.scores(pack(examples[::-1])).flip(0)
    alone = torch.cat([model.scores(pack([e])) for e in examples])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(backwards, alone, rtol=0, atol=1e-5)
    texts = [("w7 w8", " ".join(f"w{10 + i}" for i in range(n))) for n in lengths]
    every = model.score_texts(texts)
    assert model.score_texts(texts, tokens_per_micro_batch=1) == pytest.approx(every, abs=1e-5)
    assert [model.score_texts([t])[0] for t in texts] == pytest.approx(every, abs=1e-5)
    # Several answers to one prompt share its computation, in whatever order prompts come.
    mixed = [("w7 w8", "w9"), *texts[:3], ("w9 w7", "w10 w11"), ("w9 w7", "w12"), *texts[3:]]
    assert model.score_texts(mixed) == pytest.approx([model.score_texts([t])[0] for t in mixed], abs=1e-5)


# -- B24: saved and loaded ---------------------------------------------------------------------------------------------

SCORE = """
import json
from tether.scalar import ScalarModel
for folder in sys.argv[2:]:
    model = ScalarModel.load(folder, precision="fp32")
    print(json.dumps([model.score_texts(json.loads(sys.argv[1])), model.score_texts([("w9", "w10")], normalised=True), model.mean, model.std, model.lcb, model.heads]))
"""


def test_saved_reward_models_score_the_same_in_a_fresh_process(base: Path, tmp_path: Path) -> None:
    models = {
        "full": trained(base),
        "lora": trained(base, steps=40, lora=LoraConfig(rank=4)),
        "heads": trained(base, heads=3, lcb=0.7),
        "smooth": trained(base, steps=40, lora=LoraConfig(rank=4, target_modules=["q_proj"]), heads=2),
    }
    for name, model in models.items():
        model.save(tmp_path / name)
    lines = fresh_process(SCORE, json.dumps(TEXTS), *(str(tmp_path / n) for n in models)).splitlines()
    for (name, model), line in zip(models.items(), lines, strict=True):
        scores, normalised, *rest = json.loads(line)
        assert scores == model.score_texts(TEXTS), name
        assert rest == [0.25, 1.75, model.lcb, model.heads], name
        assert normalised[0] == pytest.approx((model.score_texts([("w9", "w10")])[0] - 0.25) / 1.75)


def test_a_language_model_is_refused_where_a_reward_model_is_wanted(base: Path, tmp_path: Path) -> None:
    assert "no score head" in refusal(lambda: ScalarModel.load(base))
    from tether.policy import Policy

    policy = Policy.load(base, precision="fp32", lora=LoraConfig(rank=2))
    policy.save(tmp_path / "adapter")
    assert "no score head" in refusal(lambda: ScalarModel.load(tmp_path / "adapter"))


def test_a_head_that_was_lost_is_never_made_up(base: Path, tmp_path: Path) -> None:
    trained(base).save(tmp_path / "full")
    trained(base, steps=40, lora=LoraConfig(rank=4)).save(tmp_path / "lora")
    for name, file in (("full", "model.safetensors"), ("lora", "adapter_model.safetensors")):
        path = tmp_path / name / file
        kept = {k: v for k, v in load_file(path).items() if "score" not in k}
        save_file(kept, path, metadata={"format": "pt"})
        assert "no score head" in refusal(lambda name=name: ScalarModel.load(tmp_path / name))
        assert "no score head" in refusal(lambda name=name: ScalarModel.load(tmp_path / name, fresh_head=True, heads=1))
    # Under another library's name it is lost as well.
    tensors = load_file(tmp_path / "full" / "model.safetensors")
    save_file({**tensors, "v_head.summary.weight": torch.zeros(1, 32)}, tmp_path / "full" / "model.safetensors", metadata={"format": "pt"})
    assert "no score head" in refusal(lambda: ScalarModel.load(tmp_path / "full"))


def test_a_broken_normalisation_file_is_refused(base: Path, tmp_path: Path) -> None:
    folder = trained(base).save(tmp_path / "rm")
    (folder / "scalar.json").write_text("{}")
    assert "normalisation" in refusal(lambda: ScalarModel.load(folder))
    assert "cannot be normalised" in refusal(lambda: trained(base, steps=20).set_normalisation(mean=0.0, std=0.0))


def test_contradicting_heads_are_refused_and_stored_ones_kept(base: Path, tmp_path: Path) -> None:
    folder = trained(base, heads=3).save(tmp_path / "rm")
    assert ScalarModel.load(folder, precision="fp32").heads == 3
    assert "has 3 heads, not 1" in refusal(lambda: ScalarModel.load(folder, heads=1))
    kept = ScalarModel.load(folder, precision="fp32", fresh_head=True, heads=3)
    assert torch.equal(kept.model.score.weight, load_file(folder / "model.safetensors")["score.weight"])


def test_a_reward_adapter_can_be_trained_on_and_keeps_its_rank(base: Path, tmp_path: Path) -> None:
    folder = trained(base, steps=40, lora=LoraConfig(rank=4)).save(tmp_path / "rm")
    model = ScalarModel.load(folder, precision="fp32")
    assert any("score" in n for n in model.parameters())
    assert all("lora_" in n or "score" in n for n in model.parameters())
    assert "rank 4" in refusal(lambda: ScalarModel.load(folder, lora=LoraConfig(rank=8)))


# -- transformers' own scores ------------------------------------------------------------------------------------------


def small(kind: Any, **more: Any) -> Any:
    shared = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    values = tiny_config().to_dict()
    return kind(**{k: values[k] for k in shared}, bos_token_id=1, eos_token_id=2, pad_token_id=2, **more)


@pytest.mark.parametrize(
    "config",
    [
        tiny_config(),
        small(Qwen2Config),
        GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2),
    ],
    ids=["llama", "qwen2", "gpt2"],
)
def test_transformers_gives_the_same_scores_from_the_saved_folder(tmp_path: Path, config: Any) -> None:
    model = ScalarModel.load(save_tiny(tmp_path / "base", config), precision="fp32", fresh_head=True, heads=2)
    move(model.parameters(), 0.05)
    model.save(tmp_path / "rm")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "rm")
    assert tokenizer.pad_token_id == theirs.config.pad_token_id != tokenizer.eos_token_id
    rows = [e.prompt + a for e in EXAMPLES for a in e.answers]
    assert all(row[-1] == tokenizer.eos_token_id for row in rows)
    for side in ("right", "left"):
        batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt", padding_side=side)
        positions = (batch["attention_mask"].cumsum(-1) - 1).clamp_min(0)
        with torch.no_grad():
            found = theirs(**batch, position_ids=positions).logits
        torch.testing.assert_close(found, model.scores(PACKED), rtol=0, atol=1e-5)


def test_a_foreign_reward_model_scores_as_in_transformers(tmp_path: Path) -> None:
    config = tiny_config(num_labels=1, pad_token_id=0)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        theirs = AutoModelForSequenceClassification.from_config(config).eval()
    theirs.save_pretrained(tmp_path / "rm")
    tiny_tokenizer(pad="<unk>").save_pretrained(tmp_path / "rm")
    ours = ScalarModel.load(tmp_path / "rm", precision="fp32")
    assert (ours.mean, ours.std) == (0.0, 1.0)
    rows = [torch.tensor([e.prompt + a]) for e in EXAMPLES for a in e.answers]
    expected = torch.cat([theirs(r).logits for r in rows])
    torch.testing.assert_close(ours.scores(PACKED), expected, rtol=0, atol=1e-5)


def test_an_architecture_without_a_classifier_class_works_too(tmp_path: Path) -> None:
    config = small(GraniteConfig, logits_scaling=8.0, residual_multiplier=0.5)
    base = save_tiny(tmp_path / "base", config)
    model = ScalarModel.load(base, precision="fp32", fresh_head=True)
    assert model.engine.packed
    move(model.parameters(), 0.05)
    folder = model.save(tmp_path / "rm")
    assert torch.equal(ScalarModel.load(folder, precision="fp32").scores(PACKED), model.scores(PACKED))
    hidden = model.model.model(torch.tensor([EXAMPLES[0].prompt + EXAMPLES[0].answers[0]])).last_hidden_state[0, -1]
    torch.testing.assert_close(model.scores(PACKED)[0], model.model.score.weight @ hidden, rtol=0, atol=1e-5)


def test_an_sft_adapter_is_merged_under_a_fresh_head(base: Path, tmp_path: Path) -> None:
    from tether.policy import Policy

    policy = Policy.load(base, precision="fp32", lora=LoraConfig(rank=4))
    move(policy.parameters(), 0.03)
    policy.save(tmp_path / "sft")
    model = ScalarModel.load(tmp_path / "sft", precision="fp32", fresh_head=True)
    row = torch.tensor([EXAMPLES[0].prompt + EXAMPLES[0].answers[0]])
    expected = policy.model(row, output_hidden_states=True).hidden_states[-1][0, -1]
    torch.testing.assert_close(model.scores(PACKED)[0], model.model.score.weight @ expected, rtol=0, atol=1e-4)
    assert "Merge that one first" in refusal(lambda: ScalarModel.load(tmp_path / "sft", fresh_head=True, lora=LoraConfig(rank=2)))
    folder = model.save(tmp_path / "rm")
    assert torch.equal(ScalarModel.load(folder, precision="fp32").scores(PACKED), model.scores(PACKED))


# -- B25: text in, by its own tokenizer --------------------------------------------------------------------------------


def test_texts_are_scored_by_the_models_own_tokenizer_and_template(tmp_path: Path) -> None:
    """Policy with a vocabulary of 300, reward model with 500 words of other ids and another template."""
    policy_tokenizer = tiny_tokenizer(300)
    template = "{% for m in messages %}system {{ m['role'] }} {{ m['content'] }} </s> {% endfor %}{% if add_generation_prompt %}system assistant {% endif %}"
    own = tiny_tokenizer(500, template)
    save_model(tiny_model(tiny_config(500)), own, tmp_path / "base")
    model = ScalarModel.load(tmp_path / "base", precision="fp32", fresh_head=True)
    assert len(model.tokenizer) != len(policy_tokenizer)

    def by_hand(text: str) -> float:
        row = own(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        assert row[0, -1] == own.eos_token_id, "the score is read at the answer's end mark, not in the prompt"
        hidden = model.model.model(row).last_hidden_state[0, -1]
        return float(model.model.score.weight[0].detach() @ hidden.detach())

    asked, said = [{"role": "user", "content": "w450 w7"}], [{"role": "assistant", "content": "w8 w499"}]
    chat = by_hand(own.apply_chat_template([*asked, *said], tokenize=False).strip())
    plain = by_hand("w450 w7 w8 w499 </s>")
    found = model.score_texts([(asked, "w8 w499"), (asked, said), ("w450 w7", said), ("w450 w7", "w8 w499")])
    assert found == pytest.approx([chat, chat, chat, plain], abs=1e-5)
    with pytest.raises(TypeError, match="decode token ids first"):
        model.score_texts([([7, 8, 9], [10, 11])])
    with pytest.raises(TypeError, match="decode token ids first"):
        model.score_texts([("w7", torch.tensor([1, 2]))])


def test_a_model_without_weights_or_text_is_refused(base: Path, tmp_path: Path) -> None:
    folder = trained(base).save(tmp_path / "rm")
    (folder / "model.safetensors").unlink()
    assert "no weights" in refusal(lambda: ScalarModel.load(folder))
    shutil.rmtree(folder)
    assert "no such folder" in refusal(lambda: ScalarModel.load(folder))


def test_a_reward_model_is_refused_as_a_policy(base: Path, tmp_path: Path) -> None:
    trained(base).save(tmp_path / "full")
    trained(base, steps=40, lora=LoraConfig(rank=4)).save(tmp_path / "lora")
    assert "reward model" in refusal(lambda: load_model(tmp_path / "full"))
    assert "reward model" in refusal(lambda: load_model(tmp_path / "lora"))
