"""Where in a completion is the answer? Found by rule, always the last one, never "appears anywhere".

What the writer marked as the answer goes before what merely looks like one, wherever either stands:

1. `box`, `tag`, `hash`, in this order: marks that say nothing else than "this is the answer".
2. `phrase`: "the answer is", "Answer:", a heading "Final answer", a last line "A: 26". The last of them, unless it opens a derivation.
3. `bold`, `math`, `number`: no mark at all. These have no order among them: the one that stands last is the answer. A number counts as
   standing behind mathematics only in a later sentence or line, since "$x = 5$ after 3 steps" is not 3.

A missing answer is None, which earns 0: the model was asked for one. Boxes are read by counting braces. A dollar sign before an amount
is money, not mathematics.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

Rule = Literal["box", "tag", "hash", "phrase", "bold", "math", "number"]
RULES: tuple[Rule, ...] = ("box", "tag", "hash", "phrase", "bold", "math", "number")
UNMARKED: tuple[Rule, ...] = ("bold", "math", "number")
CLOSERS = ("</think>", "</thinking>", "</thought>", "</reasoning>", "[/THINK]", "<|end_of_thought|>")
OPENERS = {"</think>": "<think>", "</thinking>": "<thinking>", "</thought>": "<thought>", "</reasoning>": "<reasoning>"}
OPENERS |= {"[/THINK]": "[THINK]", "<|end_of_thought|>": "<|begin_of_thought|>"}

BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?:\{|(?=[\w-]))")
HASH = re.compile(r"^[ \t]*####[ \t]*(.+?)[ \t]*$", re.MULTILINE)
# The noun, what it is the answer to, the link, a filler, the emphasis around either.
PHRASE = re.compile(
    r"(?:\banswers?\b[*_]*(?:,?\s+(?:to|for|in|after|rounded|expressed)\b[^.!?:=\n$\\]{0,60}?,?)??|\bresult\b[*_]*|\bans\b\.?[*_]*)"
    r"(?:\s*[:=]|\s+[-–—](?=\s)|(?<=ans\.)(?=\s)|\s+as\s*[:=]|\s+of(?=\s+[-+−$\\*\d])"
    r"|,?\s+(?:is|are|was|(?:will|would|should|must|to)\s+be|equals|comes\s+(?:out\s+)?to)\b)"
    r"(?:,?\s+(?:therefore|thus|hence|then|so|simply|just|now|indeed|clearly|also)\b,?)?(?:\s*[:=])?\s*[*_]*\s*",
    re.IGNORECASE,
)
HEADING = re.compile(r"^[ \t#*_]*(?:the\s+)?(?:final\s+|correct\s+)?answer[ \t*_]*\n\s*[*_]*", re.IGNORECASE | re.MULTILINE)
LABEL = re.compile(r"(?:^|(?<=[^\w\s]\s)|(?<=\d\s))[ \t#>*_]{0,9}A[*_]*:[*_]*\s*", re.MULTILINE)
OTHER_LABEL = re.compile(r"\b[B-E][*_]*[:)]")  # then A is one of several choices
OPENS = re.compile(r"(?:let|first|we|to|start|begin|given|since|step|found|calculated|obtained|as follows)\b\S*\s+\S", re.IGNORECASE)
BOLD = re.compile(r"\*\*([^*\n]+?)\*\*")
TITLE = re.compile(r"(?:step|part|case)\b", re.IGNORECASE)
# Single dollars as pandoc reads them, less what is money: "$5 for a pen and $" and "$17/$8.50".
MATH = re.compile(
    r"\$\$(.+?)\$\$|\$(?![\s\d][^$\n]*\s\$)(?!\d[^${}\\\n]*\b[A-Za-z]{2,}\s+[A-Za-z]{2,}\b)([^$\n]+?)(?<![-+*/=<(])\$(?!\d)"
    r"|\\\((.+?)\\\)|\\\[(.+?)\\\]",
    re.DOTALL,
)
SAID_END = re.compile(
    r"[.!?](?:\s|$)|,\s+(?=(?:so|since|because|which|as)\b)|\s+(?=(?:since|because)\b)|(?<=\S)\s+(?=\((?!mod\b)[A-Za-z]{3,}\s)"
)
DRAWING = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)  # as MATH has them; the numbers in it are coordinates
SENTENCE_END = re.compile(r"[.!?](?:\s|$)|\n")
# A number behind one of these is a part of the answer.
MATH_WORDS = {"sqrt", "root", "log", "ln", "sin", "cos", "tan", "exp", "pi", "over", "minus", "negative", "plus", "times", "half"}
NUMBER = re.compile(
    r"(?<![\w.])(?:[-+−])?(?:\d+(?::\d+)+|\d+\s+\d+/\d+|(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?:[eE][-+]?\d+)?(?:\s?/\s?\d+)?)(?:\s?\\?%)?(?!\d)"
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
    """The answer of a completion by the first of `rules` that applies, or None. An empty box or tag is no answer.

    `bold`, `math` and `number` are one rule, at the place of the first of them: of those that are named the one that stands last.
    Boxes joined only by "and", "or" or a comma are one answer of several values, so naming two guesses never scores as one.

    >>> extract("15 boxes.\\n#### 1,250"), extract("The number is **73**."), extract("None")
    ('1,250', '73', None)
    >>> extract(r"It is \\boxed{3} or \\boxed{4}")
    '3, 4'
    >>> extract(r"We get $3 \\times 4 = 12$ and so on. A: 26"), extract(r"First $3 \\times 4 = 12$. She has 26 left.")
    ('26', '26')
    """
    rest = after_reasoning(text, closers)
    if rest is None:
        return None
    unmarked = [rule for rule in rules if rule in UNMARKED]
    for rule in rules:
        found = _unmarked(rest, unmarked) if rule in UNMARKED else _FIND[rule](rest)
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
    """What the last phrase, heading or label says the answer is. One that opens a derivation says nothing."""
    starts = {m.end() for pattern in (PHRASE, HEADING) for m in pattern.finditer(text)}
    labels = [] if OTHER_LABEL.search(text) else [m.end() for m in LABEL.finditer(text)]
    starts |= {end for end in labels if "\n" not in text[end:].strip()}
    for start in sorted(starts, reverse=True):
        found = _said(text[start:].strip())
        if found is not None:
            return found
    return None


def _said(rest: str) -> str | None:
    """Up to the end of the sentence; mathematics or a number in it if it goes on in words. None where it opens a derivation."""
    display = MATH.match(rest)
    if display and "\n" in display.group():
        return _content(display)
    line = rest.split("\n", 1)[0]
    said = SAID_END.split(line, maxsplit=1)[0]
    sentence = re.sub(r"(?<!\w)\*\*|\*\*(?!\w)", "", said).strip().strip("*_").strip()
    if not sentence:
        return None
    goes_on = re.search(r"\d", rest[len(said) :]) is not None
    if goes_on and (OPENS.match(sentence) or not _few_words(MATH.sub(" ", sentence))):
        return None
    inner = MATH.search(sentence)
    several = list(MATH.finditer(sentence))
    if len(several) > 1 and _few_words(MATH.sub(" ", sentence)):
        return sentence[several[0].start() : several[-1].end()]
    if inner and len(inner.group()) < len(sentence):
        return _content(inner) if _few_words(sentence[: inner.start()]) else _number(sentence)
    if not re.search(r"[\\=^]", sentence) and (len(sentence.split()) > 6 or _told_in_words(sentence)):
        return _number(sentence)
    return sentence


def _told_in_words(sentence: str) -> bool:
    """Whether words lead to the only number, as in "she has 18 apples"; "15 apples" and "May 5" are answers as they stand."""
    numbers = [m for m in NUMBER.finditer(sentence) if re.search(r"\d", m.group())]
    if len(numbers) != 1:
        return False
    words = set(re.findall(r"\b[a-z]{2,}\b", sentence[: numbers[0].start()]))
    return bool(words) and not words & MATH_WORDS


def _content(math: re.Match[str]) -> str:
    return next(group for group in math.groups() if group is not None)


def _few_words(text: str) -> bool:
    return len(text.split()) <= 6


def _unmarked(text: str, kinds: Sequence[Rule]) -> str | None:
    """The last of what the text shows without calling it the answer: bold with a value in it, mathematics, a number."""
    text = DRAWING.sub(" ", text)
    spans: list[tuple[int, str]] = []  # (end, content)
    if "bold" in kinds:
        bold = [m for m in BOLD.finditer(text) if re.search(r"\d|\\|^[A-Z]$", m[1]) and not TITLE.match(m[1])]
        spans += [(m.end(), m[1].rstrip(":").strip()) for m in bold]
    if "math" in kinds:
        spans += [(m.end(), _content(m)) for m in MATH.finditer(text)]
    if "number" not in kinds or not spans:
        return max(spans)[1] if spans else _number(text) if "number" in kinds else None
    end, content = max(spans)
    after = text[end:]
    stop = SENTENCE_END.search(after)
    if re.fullmatch(r"[a-z]", content):  # "the value of $x$ is 5": the name of what is asked for
        return _number(after) or content
    return (_number(after[stop.end() :]) if stop else None) or content


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


_FIND = {"box": _box, "tag": _tag, "hash": _hash, "phrase": _phrase}


def gold_answer(gold: str) -> str:
    """A gold column may hold a worked solution that ends in a box or a "#### x" line; otherwise it is the answer itself."""
    for rule in ("box", "hash"):
        found = _FIND[rule](gold)
        if found:
            return found.strip()
    return gold.strip()
