"""How long the rows of a recipe's data are in tokens, from a sample: what `tether plan` needs to know of the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tether import conversations, feedback, preferences, prompts
from tether.batch import Example
from tether.chat import Codec, encode_conversations, encode_feedback, encode_preferences, encode_prompts, encode_rankings
from tether.errors import UserError
from tether.files import Loaded
from tether.recipe import DPORecipe, RewardRecipe, SFTRecipe, TrainRecipe

SAMPLE = 256


@dataclass(frozen=True)
class RowLengths:
    """A prompt counts once for all its answers, as it is computed once."""

    count: int
    tokens: float  # mean of a row
    longest: int  # of the sample
    trained_share: float  # of the tokens

    def cut(self, max_length: int) -> RowLengths:
        """The rows as a lower limit would leave them, roughly."""
        return replace(self, tokens=min(self.tokens, max_length), longest=min(self.longest, 2 * max_length))


def sample(recipe: TrainRecipe, tokenizer: Any) -> RowLengths:
    """Read the data as the run would, and encode at most `SAMPLE` rows spread over it."""
    template = Path(recipe.chat_template).read_text(encoding="utf-8") if recipe.chat_template else None
    loaded = read(recipe)
    loaded.enforce(recipe.on_bad_rows)
    count = len(loaded.rows)
    loaded.rows = loaded.rows[:: max(1, count // SAMPLE)][:SAMPLE]
    examples = encode(recipe, loaded, Codec(tokenizer, template))
    if not examples:
        raise UserError(f"none of {len(loaded.rows)} sampled rows can be used", where=str(recipe.data), remedy="See `tether data FILE`.")
    return of(examples, count)


def of(examples: Sequence[Example], count: int) -> RowLengths:
    """
    >>> of([Example([1, 2], [[3], [4, 5]], [[True], [True, True]])], 10)
    RowLengths(count=10, tokens=5.0, longest=5, trained_share=0.6)
    """
    tokens = sum(e.n_tokens for e in examples)
    return RowLengths(count, tokens / len(examples), max(e.n_tokens for e in examples), sum(e.n_trained for e in examples) / tokens)


def read(recipe: TrainRecipe) -> Loaded[Any]:
    """The rows of `data`, read as the run reads them."""
    if isinstance(recipe, SFTRecipe):
        return conversations.load(recipe.data)
    if isinstance(recipe, RewardRecipe):
        return preferences.load_comparisons(recipe.data)
    if isinstance(recipe, DPORecipe):
        return feedback.load(recipe.data) if recipe.loss_type == "kto" else preferences.load(recipe.data)
    return prompts.load(recipe.data)


def encode(recipe: TrainRecipe, loaded: Loaded[Any], codec: Codec) -> list[Example]:
    """Rows as token ids, as the run encodes them."""
    limits: dict[str, Any] = {"max_length": recipe.max_length, "truncation": recipe.truncation}
    if isinstance(recipe, SFTRecipe):
        return encode_conversations(loaded, codec, train_on=recipe.train_on, **limits).examples
    if isinstance(recipe, RewardRecipe):
        return encode_rankings(loaded, codec, **limits).examples
    if isinstance(recipe, DPORecipe):
        pairs_or_labels = encode_feedback if recipe.loss_type == "kto" else encode_preferences
        return pairs_or_labels(loaded, codec, **limits).examples
    return encode_prompts(loaded, codec, max_length=recipe.max_length).examples
