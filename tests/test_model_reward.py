"""Reward models as rewards: their own tokenizer, ensembles, and any sequence classifier."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from tests.tiny import save_tiny
from tether.errors import UserError
from tether.rewards.model import ModelReward, load
from tether.scalar import ScalarModel


def test_a_reward_model_scores_by_its_own_tokenizer(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "base")
    model = ScalarModel.load(folder, fresh_head=True, precision="fp32")
    model.set_normalisation(mean=0.5, std=2.0)
    kept = model.save(tmp_path / "reward")
    texts = [("w6 w7", "w8"), ("w6 w7", "w9 w10 w11")]
    plain = model.score_texts(texts)
    scored = ModelReward(kept, normalised=False, precision="fp32")([p for p, _ in texts], [a for _, a in texts])
    assert scored == pytest.approx(plain, abs=1e-5)
    assert ModelReward(model)([p for p, _ in texts], [a for _, a in texts]) == pytest.approx([(s - 0.5) / 2 for s in plain], abs=1e-5)
    chat = [[{"role": "user", "content": "w6 w7"}]]
    said = ModelReward(model, normalised=False)(chat, [[{"role": "assistant", "content": "w8"}]])
    assert said == pytest.approx(model.score_texts([(chat[0], [{"role": "assistant", "content": "w8"}])]))
    with pytest.raises(UserError, match="no score head"):
        ModelReward(folder)
    with pytest.raises(UserError, match="label"):
        ModelReward(kept, label=1)


def test_an_ensemble_takes_the_lower_bound() -> None:
    """Scores 1 and 3: mean 2, spread 1; with lcb 0.5 that is 1.5. Clipped at 1 it is 1."""
    models = [SimpleNamespace(score_texts=lambda texts, normalised, v=v: [v] * len(texts)) for v in (1.0, 3.0)]
    assert ModelReward(models, lcb=0.5)(["q"], ["a"]) == [1.5]
    assert ModelReward(models, lcb=0.5, clip=1.0)(["q"], ["a"]) == [1.0]


def test_any_sequence_classifier_is_a_reward_model(tmp_path: Path) -> None:
    words = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")
    config = BertConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, max_position_embeddings=12,
        num_labels=3, id2label={0: "bad", 1: "fair", 2: "good"},
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).eval()
    folder = tmp_path / "bert"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    scores = ModelReward(folder, label="good", normalised=False)(["a b", "a b"], ["c", "d d"])
    with torch.no_grad():
        logits = model(**tokenizer("a b", "c", return_tensors="pt")).logits[0].double()
    assert scores[0] == pytest.approx(float(logits[2] - torch.logsumexp(logits[:2], 0)), abs=1e-5)
    assert scores[0] != scores[1]
    with pytest.raises(UserError, match="3 classes: bad, fair, good"):
        load(folder)
    with pytest.raises(UserError, match="no class 'best'"):
        load(folder, label="best")
    with pytest.raises(UserError, match="reads at most 12 tokens"):
        ModelReward(folder, label=2)(["a b"], ["c " * 20])
