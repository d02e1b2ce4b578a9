"""What did the judge say? Verdicts are read strictly: whatever is not clearly one is invalid, never a tie and never a win.

The last verdict of a reply counts, since judges think aloud before they decide. `[[C]]` is a tie, as in MT-Bench's prompt.
"""

from __future__ import annotations

import json
import re
from typing import Literal

Verdict = Literal["A", "B", "tie", "invalid"]
WORDS: dict[str, Verdict] = {"a": "A", "b": "B", "c": "tie", "tie": "tie", "draw": "tie", "equal": "tie", "neither": "tie", "both": "tie"}
MARKED = re.compile(r"\[\[\s*(A|B|C|tie)\s*\]\]", re.IGNORECASE)
SAID = re.compile(
    r"(?:final\s+)?(?:verdict|winner|choice|decision|my answer|better(?:\s+(?:answer|response|one))?)\s*(?:is|:|=)\s*"
    r"(?:\**|\"|')?\s*(?:answer|response|assistant|option)?\s*\(?\[?(A|B|tie)\]?\)?(?=[\"'*]*(?:[.!,;)\]\n]|$|\s+(?:because|since|as|for)\b))",
    re.IGNORECASE,
)
BARE = re.compile(r"[\s\"'*(\[]*(?:(?:[Aa]nswer|[Rr]esponse|[Aa]ssistant|[Oo]ption) )?(A|B|[Tt]ie|TIE)[\s\"'*)\].!]*")


def parse_verdict(raw: str) -> Verdict:
    """A, B, tie or invalid.

    >>> [parse_verdict(t) for t in ("[[A]] is wrong, so [[B]].", "A good answer names the river.", "HTTP 503", '{"winner": "A"}', "")]
    ['B', 'invalid', 'invalid', 'A', 'invalid']
    """
    text = raw.strip()
    if not text:
        return "invalid"
    named = _from_json(text)
    if named is not None:
        return named
    if marked := MARKED.findall(text):
        return WORDS[marked[-1].lower()]
    if bare := BARE.fullmatch(text):  # a small "a" alone may be an article
        return WORDS[bare.group(1).lower()]
    if said := SAID.findall(text):
        return WORDS[said[-1].lower()]
    return "invalid"


def _from_json(text: str) -> Verdict | None:
    """The verdict of a JSON object, alone or in a code block; None when the text is none."""
    body = re.sub(r"^```(?:json)?\s*|\s*```$", "", text)
    if not body.startswith("{"):
        return None
    try:
        found = json.loads(body)
    except ValueError:
        return None
    for key in ("winner", "verdict", "choice", "preference", "better"):
        if key in found:
            value = found[key]
            return WORDS.get(value.strip().lower(), "invalid") if isinstance(value, str) else "invalid"
    return "invalid"


def parse_vote(raw: str) -> int | None:
    """1 (yes), 0 (no) or None (invalid), for votes on one principle. The last marked vote counts.

    >>> [parse_vote(t) for t in ("yes", "[[0]]", "It does. Vote: 1", "It depends.", "")]
    [1, 0, 1, None, None]
    """
    text = raw.strip()
    marked = re.findall(r"\[\[\s*(yes|no|1|0)\s*\]\]", text, re.IGNORECASE)
    said = marked or re.findall(r"\b(?:vote|verdict|answer)\s*(?:is|:|=)\s*\**\s*(yes|no|1|0)\b", text, re.IGNORECASE)
    bare = re.fullmatch(r"[\s\"'*(\[]*(yes|no|1|0)[\s\"'*)\].!]*", text, re.IGNORECASE)
    word = said[-1] if said else bare.group(1) if bare else None
    return None if word is None else int(word.lower() in ("yes", "1"))
