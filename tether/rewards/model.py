"""A reward model as a reward: it reads text, by its own tokenizer and its own chat template, never the policy's token ids.

A Tether reward model, its adapter folder, or any folder of a sequence classifier for transformers (decoder or encoder). Several models
score as one: mean - lcb x spread, so an answer that only one of them likes earns little. Over several ranks each scores its share of
the texts and all hold the scores; a Tether reward model is sharded, a classifier is whole on each.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from tether import models, ranks
from tether.errors import UserError
from tether.messages import Message, Text
from tether.rewards.texts import text_of
from tether.scalar import ScalarModel


class Scorer(Protocol):
    def score_texts(self, texts: Sequence[tuple[Any, Any]], *, normalised: bool = False) -> list[float]: ...


class ModelReward:
    """`model`: a folder or loaded model, or several of them. `normalised` subtracts the model's stored mean and divides by its stored
    spread, so that models trained apart can be mixed. `label`: which class of a classifier with several counts; its log-odds against
    the rest are the score. `clip` bounds scores on both sides: a far outlier is the model's mistake more often than the answer's merit.
    """

    reward_name = "model"
    computes = True  # with torch, so it is called on the thread that trains: see `tether.reward.Rewards`

    def __init__(
        self,
        model: str | Path | Scorer | Sequence[str | Path | Scorer],
        *,
        normalised: bool = True,
        lcb: float = 1.0,
        label: int | str | None = None,
        clip: float | None = None,
        precision: str = "auto",
        trust_remote_code: bool = False,
    ) -> None:
        given: Sequence[Any] = list(model) if isinstance(model, (list, tuple)) else [model]
        if not given:
            raise UserError("no reward model was given", where="model")
        if clip is not None and not clip > 0:
            raise UserError(f"must be above 0, got {clip!r}", where="clip")
        self.scorers: list[Scorer] = [
            m if hasattr(m, "score_texts") else load(m, label=label, precision=precision, trust_remote_code=trust_remote_code)
            for m in given
        ]
        self.normalised, self.lcb, self.clip = normalised, lcb, clip
        self._lock = threading.Lock()  # one forward pass at a time

    def __call__(self, prompts: Sequence[Text], completions: Sequence[Any], opened: Sequence[str] | None = None, **_: Any) -> list[float]:
        texts = [(p, _answer(p, c, o)) for p, c, o in zip(prompts, completions, opened or [""] * len(prompts), strict=True)]
        with self._lock, torch.no_grad():
            scores = [s.score_texts(texts, normalised=self.normalised) for s in self.scorers]
        return [self._combined([column[i] for column in scores]) for i in range(len(texts))]

    def _combined(self, values: list[float]) -> float:
        mean = sum(values) / len(values)
        spread = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
        score = mean - self.lcb * spread
        return score if self.clip is None else max(-self.clip, min(self.clip, score))


def _answer(prompt: Text, completion: Any, opened: str) -> Text:
    text = opened + text_of(completion)
    return text if isinstance(prompt, str) else [Message(role="assistant", content=text)]


def load(name: str | Path, *, label: int | str | None = None, precision: str = "auto", trust_remote_code: bool = False) -> Scorer:
    """A reward model of ours or a decoder with a score head as `ScalarModel`; other sequence classifiers as `Classifier`."""
    path = Path(name).expanduser()
    if path.is_dir() and (path / "config.json").exists() and not (path / "adapter_config.json").exists():
        config = models.load_config(str(path), trust_remote_code=trust_remote_code, local_only=True)
        classifies = any("SequenceClassification" in a for a in config.architectures or ())
        if classifies and (not _has_score_head(path) or config.num_labels > 1):
            ours = (path / "scalar.json").exists()
            if not ours:
                return Classifier(path, config, label=label, trust_remote_code=trust_remote_code)
    if label is not None:
        raise UserError("only a classifier with several classes has labels", where="label", remedy="Leave it out.")
    scalar = ScalarModel.load(name, precision=precision, trust_remote_code=trust_remote_code)
    if ranks.size() > 1:
        scalar.shard()
    return scalar


def _has_score_head(path: Path) -> bool:
    """Whether the weights hold `score.weight`: a linear head on the last token, as decoders have."""
    from safetensors import safe_open

    for file in path.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            if any(name.endswith("score.weight") for name in tensors.keys()):  # noqa: SIM118  # not a dict
                return True
    return False


class Classifier:
    """Any sequence classifier of transformers. One output: its score. Several: log-odds of `label` (a name or an index)."""

    def __init__(self, path: Path, config: Any, *, label: int | str | None, trust_remote_code: bool) -> None:
        from transformers import AutoModelForSequenceClassification

        self.tokenizer = models.load_tokenizer(str(path), trust_remote_code=trust_remote_code, local_only=True)
        loaded, _ = models.load_weights(
            AutoModelForSequenceClassification, str(path), torch.float32, trust_remote_code=trust_remote_code, local_only=True
        )
        self.model = loaded.eval().to("cuda" if torch.cuda.is_available() else "cpu")
        self.label = _label(config, label, str(path))

    @torch.no_grad()
    def score_texts(self, texts: Sequence[tuple[Any, Any]], *, normalised: bool = False) -> list[float]:
        """One number for each (prompt, answer). Rows are scored one by one: padding could change them."""
        encoded = [self._encoded(prompt, answer) for prompt, answer in texts]
        out = torch.zeros(len(texts), dtype=torch.float64)
        for i in ranks.own([e["input_ids"].shape[1] for e in encoded])[ranks.rank()]:
            logits = self.model(**encoded[i]).logits[0].float()  # (labels,)
            if self.label is None:
                out[i] = float(logits[0])
            else:
                rest = torch.cat([logits[: self.label], logits[self.label + 1 :]])
                out[i] = float(logits[self.label] - torch.logsumexp(rest, 0))
        scores: list[float] = ranks.summed(out).tolist()
        return scores

    def _encoded(self, prompt: Any, answer: Any) -> dict[str, Any]:
        if isinstance(prompt, str) or not self.tokenizer.chat_template:
            first = prompt if isinstance(prompt, str) else "\n".join(str(m["content"]) for m in prompt)
            encoded = self.tokenizer(first, text_of(answer), return_tensors="pt")
        else:
            text = self.tokenizer.apply_chat_template([*prompt, *answer], tokenize=False)
            encoded = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")
        limit = getattr(self.model.config, "max_position_embeddings", None)
        n = encoded["input_ids"].shape[1]
        if limit and n > limit:
            raise UserError(
                f"the reward model reads at most {limit} tokens, an answer with its prompt has {n}", remedy="Use shorter answers."
            )
        return {k: v.to(self.model.device) for k, v in encoded.items()}


def _label(config: Any, label: int | str | None, where: str) -> int | None:
    names = {str(name): int(i) for i, name in (config.id2label or {}).items()}
    if config.num_labels == 1:
        return None
    if label is None:
        raise UserError(
            f"the classifier has {config.num_labels} classes: {', '.join(names)}", where=where, remedy="Say which one with label."
        )
    index = names.get(label) if isinstance(label, str) else label
    if index is None or not 0 <= index < config.num_labels:
        raise UserError(f"there is no class {label!r}; there are {', '.join(names)}", where="label")
    return index
