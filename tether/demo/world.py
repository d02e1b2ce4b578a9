"""The demo's world: what its people like, how they choose, and the shipped data.

The people truly like cheerful answers (VADER's compound sentiment, -1..1) and dislike answers beyond 40 tokens. When they choose between
two answers they follow the sentiment with noise, forget the length cost, and even lean a little to the longer one. Whatever learns from
their choices therefore learns something slightly wrong, and this world can measure it: it knows the true taste.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from tether.errors import UserError
from tether.files import json_lines

SENTIMENT_LOGIT = 4.0  # choice logit for one unit of VADER difference
LENGTH_LOGIT = 0.05  # choice logit for each token that an answer is longer: the people's mistake
FREE_TOKENS = 40  # answers up to this length cost nothing
TOKEN_COST = 0.04  # true taste lost for every token beyond


@cache
def _vader() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError as error:
        raise UserError("the demo needs the package vaderSentiment", remedy="Install it with: pip install 'tether-lm[demo]'") from error
    return SentimentIntensityAnalyzer()


def sentiment(answer: str) -> float:
    """How cheerful an answer is, -1..1 (VADER's compound score, Hutto & Gilbert 2014: a word list with rules, no model)."""
    return float(_vader().polarity_scores(answer)["compound"])


def length_cost(n_tokens: int) -> float:
    return TOKEN_COST * max(0, n_tokens - FREE_TOKENS)


def true_taste(answer: str, n_tokens: int) -> float:
    """What the people would really say on reflection: sentiment, less the cost of every token beyond 40."""
    return sentiment(answer) - length_cost(n_tokens)


def choice_probability(sentiment_a: float, tokens_a: int, sentiment_b: float, tokens_b: int) -> float:
    """Probability that the people take a over b (Bradley-Terry); the length cost is forgotten, longer looks better.

    >>> round(choice_probability(0.5, 20, 0.0, 20), 4)  # logit 4 x 0.5
    0.8808
    >>> choice_probability(0.2, 30, 0.2, 30)
    0.5
    >>> round(choice_probability(0.0, 40, 0.0, 20), 4)  # 20 tokens longer: logit 0.05 x 20
    0.7311
    """
    logit = SENTIMENT_LOGIT * (sentiment_a - sentiment_b) + LENGTH_LOGIT * (tokens_a - tokens_b)
    return 1 / (1 + math.exp(-logit))


@dataclass(frozen=True)
class DemoData:
    """Paths of the shipped files: 400 pairs to learn from, 100 to test a reward model on, 128 prompts to sample on."""

    pairs_train: Path
    pairs_test: Path
    prompts_test: Path

    @classmethod
    def shipped(cls) -> DemoData:
        folder = Path(str(resources.files("tether.demo"))) / "data"
        return cls(folder / "pairs_train.jsonl", folder / "pairs_test.jsonl", folder / "prompts_test.jsonl")


def read_rows(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    return list(islice(json_lines(path), limit))
