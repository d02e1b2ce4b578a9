"""The reward of the sampling rows, one for both sides: the share of different words. Cheap, and it differs within every group."""

from __future__ import annotations


def different_words(completions: list[list[dict[str, str]]], **columns: object) -> list[float]:
    """Between 0 and 1; completions as messages, as both sides hand them over.

    >>> different_words([[{"role": "assistant", "content": "the river and the road"}]])
    [0.8]
    """
    texts = [message["content"].split() for (message,) in completions]
    return [len(set(words)) / max(1, len(words)) for words in texts]
