"""How cheerful an answer is, -1 to 1: VADER's compound score (Hutto & Gilbert 2014), a word list with rules and no model.

A toy reward that learns in minutes and is hacked as fast: it pays for words, not for answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tether.errors import UserError
from tether.rewards.texts import text_of


class VaderReward:
    """Needs the package vaderSentiment (extra `demo`)."""

    reward_name = "vader"

    def __init__(self) -> None:
        try:
            from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
        except ImportError as error:
            raise UserError("the vader reward needs the package vaderSentiment", remedy="pip install 'tether-lm[demo]'") from error
        self._analyzer = SentimentIntensityAnalyzer()

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        return [float(self._analyzer.polarity_scores(text_of(c))["compound"]) for c in completions]
