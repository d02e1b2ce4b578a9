"""One-digit sums, a transformer of two layers made from nothing, and the runs that train it: `tether sft`, then `tether grpo`.

The runs are the real ones, with run folders, files of rows and the local sampler; only the model is small. Rewards are functions:
the math reward by gold answers, or by the answer that most of a question's own attempts gave.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tether import attempts, evaluate
from tether.algorithms import grpo, sft
from tether.answers import Speaker
from tether.attempts import Attempt
from tether.engines.sampling import Sampling
from tether.models import save_model
from tether.recipe import GRPORecipe, SFTRecipe
from tether.reward import Reward
from tether.rewards.math import MathReward
from tether.rewards.math_extract import extract
from tether.run import Run
from tether.stats import Interval
from tether.tasks import load_tasks

MARKS = ["<unk>", "<s>", "</s>", "+", "="]
WORDS = [*MARKS, *(str(n) for n in range(19))]  # one token each: the digits, and every sum of two
LONGEST = 3  # tokens of an answer: its number, the end, and one more that should not be there
PEOPLE = 16  # who answered each question
SAMPLES = 16  # answers to a question when accuracy is measured
Slip = Literal["anything", "one more"]


@dataclass(frozen=True)
class Question:
    a: int
    b: int

    @property
    def text(self) -> str:
        return f"{self.a} + {self.b} ="

    @property
    def answer(self) -> str:
        return str(self.a + self.b)


def questions(held_out: int = 20, seed: int = 0) -> tuple[list[Question], list[Question]]:
    """All hundred in two parts: to train on, and to be asked alone."""
    every = [Question(a, b) for a in range(10) for b in range(10)]
    random.Random(seed).shuffle(every)
    return every[held_out:], every[:held_out]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_questions(path: Path, asked: Sequence[Question]) -> str:
    return write_rows(path, [{"prompt": q.text, "answer": q.answer} for q in asked])


def write_demonstrations(path: Path, asked: Sequence[Question], wrong: float, slip: Slip, seed: int = 0) -> str:
    """`PEOPLE` answers to each question; a share of them is wrong: any other number, or one more than is right."""
    draw = random.Random(seed)
    rows = []
    for q in asked:
        for person in range(PEOPLE):
            given = q.a + q.b
            if draw.random() < wrong:
                given = draw.choice([n for n in range(19) if n != given]) if slip == "anything" else (given + 1) % 19
            rows.append({"prompt": q.text, "completion": str(given), "person": person})
    return write_rows(path, rows)


def save_untrained(folder: Path, seed: int = 0) -> Path:
    """Random weights: 2 layers, width 64, 24 words."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>")
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.07,  # at the usual 0.02 so small a model takes ten times as long to tell two numbers apart
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return save_model(model, tokenizer, folder)


# Training --------------------------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"precision": "fp32", "trackers": [], "keep_checkpoints": 0, "log_every": 1000, "max_length": 16}


def tune(model: Path, data: str, folder: Path, steps: int = 150) -> Path:
    """Supervised fine-tuning. Returns the folder of the model."""
    recipe = SFTRecipe(model=str(model), data=data, run=str(folder), batch_size=64, max_steps=steps, learning_rate=3e-3, **SMALL)
    with Run.create(folder, recipe) as run:
        sft.train(recipe, run)
    return folder / "model"


def reinforce(model: Path, data: str, folder: Path, rewards: Sequence[Reward], steps: int = 40) -> tuple[Path, Run]:
    """GRPO without a tether, 16 questions of 8 answers a step. Returns the folder of the model, and the closed run to read."""
    recipe = GRPORecipe(
        model=str(model),
        data=data,
        run=str(folder),
        batch_size=128,
        num_generations=8,
        max_completion_length=LONGEST,
        max_steps=steps,
        learning_rate=1e-3,
        **SMALL,
    )
    with Run.create(folder, recipe) as run:
        grpo.train(recipe, run, rewards)
    return folder / "model", run


# Rewards ---------------------------------------------------------------------------------------------------------------------------


def majority(prompts: Sequence[Any], completions: Sequence[str]) -> list[str]:
    """For each completion the answer that most attempts at its prompt gave; of equals the one given first. "" where none was given.

    >>> majority(["a"] * 3 + ["b"], ["7", "8", "so 7", "x"])
    ['7', '7', '7', '']
    """
    votes: dict[str, Counter[str]] = {}
    for prompt, completion in zip(prompts, completions, strict=True):
        counted = votes.setdefault(str(prompt), Counter())
        given = extract(completion)
        if given is not None:
            counted[given] += 1
    return [next((answer for answer, _ in votes[str(p)].most_common(1)), "") for p in prompts]


def by_gold(math: MathReward, weight: float = 1.0) -> Reward:
    """1 where the answer is the gold answer, 0 where it is not. With weight 0 it is only watched."""

    def gold(prompts: list[Any], completions: list[str], answer: list[str]) -> list[float | None]:
        return math(prompts, completions, answer=answer)

    return Reward(gold, weight=weight)


def by_vote(math: MathReward) -> Reward:
    """1 where the answer is that of the majority of the question's own attempts. Nobody says what is right."""

    def vote(prompts: list[Any], completions: list[str]) -> list[float | None]:
        return math(prompts, completions, answer=majority(prompts, completions))

    return Reward(vote)


# Measuring -------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """One question's answers: the share that is right, and whether the answer given most often is."""

    right: float
    majority_right: bool


@dataclass(frozen=True)
class Accuracy:
    """Shares of right answers: sampled at temperature 1, the likeliest, and the winner of a vote among `SAMPLES`."""

    sampled: Interval
    greedy: float
    vote: float
    questions: list[Asked]


def accuracy(model: Path, data: str, math: MathReward, seed: int = 0) -> Accuracy:
    """Asks every question of `data` as `tether evaluate` does."""
    judged_by = Reward(math, name="math")
    tasks = load_tasks(data, judged_by).rows
    speaker = Speaker(str(model), precision="fp32")
    made = attempts.sample(speaker, tasks, Sampling(max_new_tokens=LONGEST), n=SAMPLES, seed=seed)
    judged = evaluate.judge(tasks, made, judged_by)
    values = {m.name: m.value for m in evaluate.evaluate(tasks, judged, judged_by, [1, SAMPLES]).measures}
    asked = [_asked([a for a in group if not a.greedy]) for group in evaluate.by_task(judged.attempts)]
    return Accuracy(values["pass@1"], values["greedy"].value, values[f"maj@{SAMPLES}"].value, asked)


def _asked(group: Sequence[Attempt]) -> Asked:
    most = Counter(a.extracted for a in group if a.extracted is not None).most_common(1)
    won = {answer for answer, _ in most}
    right = [a.reward == 1 for a in group]
    return Asked(sum(right) / len(group), any(r for a, r in zip(group, right, strict=True) if a.extracted in won))
