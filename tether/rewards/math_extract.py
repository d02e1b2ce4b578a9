"""Where in a completion is the answer? Found by rule, always the last one, never "appears anywhere".

A missing answer is None, which earns 0: the model was asked for one. Boxes are read by counting braces.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

Rule = Literal["box", "tag", "hash", "phrase", "bold", "math", "number"]
RULES: tuple[Rule, ...] = ("box", "tag", "hash", "phrase", "bold", "math", "number")
CLOSERS = ("</think>", "</thinking>", "</thought>", "</reasoning>", "[/THINK]", "<|end_of_thought|>")
OPENERS = {"</think>": "<think>", "</thinking>": "<thinking>", "</thought>": "<thought>", "</reasoning>": "<reasoning>"}
OPENERS |= {"[/THINK]": "[THINK]", "<|end_of_thought|>": "<|begin_of_thought|>"}

BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?:\{|(?=[\w-]))")
HASH = re.compile(r"^[ \t]*####[ \t]*(.+?)[ \t]*$", re.MULTILINE)
PHRASE = re.compile(r"\b(?:answer|result)\b(?:\s+(?:is|equals|to be|as))?\s*(?::|=|\bis\b|(?<=is))\s*(?:\*\*)?\s*", re.IGNORECASE)
BOLD = re.compile(r"\*\*([^*\n]+?)\*\*")
MATH = re.compile(r"\$\$(.+?)\$\$|\$(?![\s\d][^$\n]*\s\$)([^$\n]+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
NUMBER = re.compile(
    r"(?<![\w.])(?:[-+−])?(?:\d+\s+\d+/\d+|(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?:[eE][-+]?\d+)?(?:\s?/\s?\d+)?)(?:\s?\\?%)?(?!\d)"
)


def after_reasoning(text: str, closers: Sequence[str] = CLOSERS) -> str | None:
    """What follows the last reasoning delimiter; None when reasoning was opened and never closed.

    >>> after_reasoning("<think>perhaps 7</think> It is 8.")
    ' It is 8.'
    >>> after_reasoning("<think>perhaps 7, or") is None
    True
    """
    ends = [(text.rfind(c) + len(c), c) for c in closers if c in text]
    rest = text[max(ends)[0] :] if ends else text
    if any(OPENERS[c] in rest for c in closers if c in OPENERS):
        return None
    return rest


def boxes(text: str) -> list[tuple[int, int, str]]:
    """Outermost balanced boxes as (start, end, content). A box that is never closed is left out.

    >>> [c for _, _, c in boxes(r"Try \\boxed{9}; no, \\boxed{\\frac{3}{4}}.")]
    ['9', '\\\\frac{3}{4}']
    """
    found: list[tuple[int, int, str]] = []
    at = 0
    while match := BOX.search(text, at):
        at = match.end()
        if not match.group().endswith("{"):
            token = re.compile(r"-?[\w.]+").match(text, at)
            if token:
                found.append((match.start(), token.end(), token.group()))
                at = token.end()
            continue
        end = closing(text, at)
        if end is not None:
            found.append((match.start(), end + 1, text[at:end]))
            at = end + 1
    return found


def closing(text: str, start: int) -> int | None:
    """Index of the brace that closes the one opened just before `start`; escaped braces are text."""
    depth, i = 1, start
    while i < len(text):
        c = text[i]
        if c == "\\":
            i += 2
            continue
        depth += (c == "{") - (c == "}")
        if depth == 0:
            return i
        i += 1
    return None


def extract(text: str, rules: Sequence[Rule] = RULES, closers: Sequence[str] = CLOSERS) -> str | None:
    """The answer of a completion by the first rule that applies, or None. An empty box or tag is no answer.

    Boxes joined only by "and", "or" or a comma are one answer of several values, so naming two guesses never scores as one.

    >>> extract("15 boxes.\\n#### 1,250"), extract("The number is **73**."), extract("None")
    ('1,250', '73', None)
    >>> extract(r"It is \\boxed{3} or \\boxed{4}")
    '3, 4'
    """
    rest = after_reasoning(text, closers)
    if rest is None:
        return None
    for rule in rules:
        found = _FIND[rule](rest)
        if found is not None:
            return found.strip() or None
    return None


def _box(text: str) -> str | None:
    found = boxes(text)
    if not found:
        return None
    joined = [found[-1]]
    for earlier in reversed(found[:-1]):
        between = text[earlier[1] : joined[0][0]].replace("$", " ").replace("\\", " ")
        if not re.fullmatch(r"[\s,;]*(?:and|or|text\{\s*(?:and|or)\s*\})?[\s,;]*", between) or not re.search(r"[,;]|and|or", between):
            break
        joined.insert(0, earlier)
    if any(not content.strip() for _, _, content in joined):
        return ""
    return ", ".join(content for _, _, content in joined)


def _tag(text: str) -> str | None:
    lowered = text.lower()
    end = lowered.rfind("</answer>")
    start = lowered.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end]


def _hash(text: str) -> str | None:
    found = HASH.findall(text)
    return found[-1] if found else None


def _phrase(text: str) -> str | None:
    """After the last "answer is", "answer:", up to the end of its sentence; mathematics or a number in it if it goes on in words."""
    starts = [m.end() for m in PHRASE.finditer(text)]
    if not starts:
        return None
    line = text[starts[-1] :].strip().split("\n", 1)[0]
    sentence = re.split(r"[.!?](?:\s|$)|,\s+(?=(?:so|since|because|which|as)\b)", line, maxsplit=1)[0].strip().strip("*").strip()
    if not sentence:
        return None
    inner = MATH.search(sentence)
    several = list(MATH.finditer(sentence))
    if len(several) > 1 and _few_words(MATH.sub(" ", sentence)):
        return sentence[several[0].start() : several[-1].end()]
    if inner and len(inner.group()) < len(sentence):
        return next(g for g in inner.groups() if g is not None) if _few_words(sentence[: inner.start()]) else _number(sentence)
    if len(sentence.split()) > 6 and not re.search(r"[\\=^]", sentence):
        return _number(sentence)
    return sentence


def _few_words(text: str) -> bool:
    return len(text.split()) <= 6


def _bold(text: str) -> str | None:
    found = [b for b in BOLD.findall(text) if re.search(r"\d|\\|^[A-Z]$", b)]
    return found[-1].rstrip(":").strip() or None if found else None


def _math(text: str) -> str | None:
    found = [next(g for g in m.groups() if g is not None) for m in MATH.finditer(text)]
    return found[-1] if found else None


def _number(text: str) -> str | None:
    found = [m for m in NUMBER.finditer(text) if re.search(r"\d", m.group())]
    if not found:
        return None
    last = found[-1]
    if text[last.start() - 1 : last.start()] in ("{", "^", "_") or text[last.end() : last.end() + 1] == "}":
        # A number inside bare LaTeX is a piece of an answer: take the whole of what follows the last "=" or "is".
        before = text[: last.start()]
        start = max((m.end() for m in re.finditer(r"=|\bis\b|:|\n|(?<=[a-z])\s(?=[-+(\\\d])", before)), default=0)
        piece = text[start:].split("\n", 1)[0]
        return re.split(r"\.(?:\s|$)|,\s|\s(?=[a-z]{2,})", piece, maxsplit=1)[0].strip()
    return last.group()


_FIND = {"box": _box, "tag": _tag, "hash": _hash, "phrase": _phrase, "bold": _bold, "math": _math, "number": _number}


def gold_answer(gold: str) -> str:
    """A gold column may hold a worked solution that ends in a box or a "#### x" line; otherwise it is the answer itself."""
    for rule in ("box", "hash"):
        found = _FIND[rule](gold)
        if found:
            return found.strip()
    return gold.strip()
