"""Taking a cleaned answer apart: members of a list, brackets, relations, labels, units, words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

OPEN = ("\\langle", "\\{", "(", "[", "{", "\\lfloor", "\\lceil", "\\begin")
CLOSE = ("\\rangle", "\\}", ")", "]", "}", "\\rfloor", "\\rceil", "\\end")
STEP = re.compile(r"\\(?:begin|end)\{[a-zA-Z*]+\}|\\[a-zA-Z]+|\\.|.", re.DOTALL)
AND_OR = re.compile(r"\\text\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])")
OPERATORS = ("\\le", "\\ge", "\\ne", "\\approx", "\\in", "<", ">", "=")
FACTORS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
UNITS = {
    "centimeter": "cm", "centimetre": "cm", "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km", "millimeter": "mm",
    "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi", "gram": "g", "kilogram": "kg", "pound": "lb", "lb": "lb",
    "ounce": "oz", "liter": "l", "litre": "l", "milliliter": "ml", "hour": "h", "hr": "h", "minute": "min", "second": "s", "sec": "s",
    "day": "day", "week": "week", "month": "month", "year": "year", "dollar": "$", "usd": "$", "buck": "$", "euro": "€", "cent": "cent",
    "degree": "deg", "deg": "deg", "unit": "unit",
}  # fmt: skip
ADJACENT = [
    "cm",
    "mm",
    "km",
    "kg",
    "mg",
    "ml",
    "mph",
    "km/h",
    "m/s",
    "kph",
    "lb",
    "lbs",
    "oz",
    "ft",
    "in",
    "mi",
    "yd",
    "min",
    "hr",
    "hrs",
    "sec",
    "am",
    "pm",
    "deg",
]
SYNONYMS = {
    "dne": "does not exist", "undefined": "undefined", "no solution": "\\emptyset", "no solutions": "\\emptyset", "no real solution": "\\emptyset",
    "no real solutions": "\\emptyset", "empty set": "\\emptyset", "the empty set": "\\emptyset", "all real numbers": "\\mathbb{r}", "all reals": "\\mathbb{r}",
    "positive infinity": "\\infty",
}  # fmt: skip


def squeezed(text: str) -> str:
    """Without blanks that mean nothing; a leading plus goes too."""
    text = re.sub(r"\\text\{([^{}]*)\}", lambda m: "\\text{" + " ".join(m.group(1).split()).rstrip(".") + "}", text)
    text = re.sub(r"(?<=\d)\s+(?=\d)", "\\ ", text)  # 1 2 is not 12
    return re.sub(r"(?<!\\)\s+", "", text).removeprefix("+")


def split_top(text: str, separators: Sequence[str]) -> list[tuple[str, str]]:
    """(piece, the separator behind it) at the top level of all brackets; the last separator is ""."""
    out: list[tuple[str, str]] = []
    depth, start, i = 0, 0, 0
    while i < len(text):
        token = STEP.match(text, i)
        assert token is not None
        word = token.group()
        depth += word.startswith(OPEN) and word != "\\in" and not word.startswith("\\le")
        depth -= word.startswith(CLOSE)
        if depth == 0 and word in separators:
            out.append((text[start:i], word))
            start = token.end()
        i = token.end()
    return [*out, (text[start:], "")]


def items(text: str) -> list[str]:
    """Members of a list without brackets: split at commas, semicolons, "and" and "or". A label before the first goes for all."""
    marked = AND_OR.sub(" ; ", text)
    parts = [p.strip() for p, _ in split_top(marked, (",", ";"))]
    parts = [p for p in parts if p] if len(parts) > 1 else parts
    if len(parts) < 2:
        return [text]
    labels = [label_of(p) for p in parts]
    names = {re.sub(r"_\{?\w+\}?$", "", label[0].strip()) for label in labels if label}
    if labels[0] and len(names) == 1:
        return [label[1] if label else p for label, p in zip(labels, parts, strict=True)]
    return parts


@dataclass(frozen=True)
class Bracketed:
    kind: str  # "()", "[]", "[)", "(]" or "set"
    members: list[str]


def bracketed(text: str) -> Bracketed | None:
    """Brackets around the whole of it, and the members between."""
    text = text.strip()
    pairs = (("\\{", ("\\}",)), ("{", ("}",)), ("\\langle", ("\\rangle",)), ("(", (")", "]")), ("[", ("]", ")")))
    for opened, closers in pairs:
        closed = next((c for c in closers if text.endswith(c)), None)
        if not text.startswith(opened) or closed is None or len(text) < len(opened) + len(closed) + 1:
            continue
        inner = text[len(opened) : len(text) - len(closed)]
        if not _balanced(inner):
            return None
        members = [p.strip() for p, _ in split_top(inner, (",", ";"))]
        kind = "set" if opened in ("\\{", "{") else "()" if opened == "\\langle" else opened + closed
        if opened == "{" and len(members) == 1:
            return None
        return Bracketed("()" if kind == "[]" and len(members) > 2 else kind, members)
    return None


def _balanced(text: str) -> bool:
    depth, i = 0, 0
    while i < len(text):
        token = STEP.match(text, i)
        assert token is not None
        word = token.group()
        depth += (word in ("(", "[", "{", "\\{", "\\langle")) - (word in (")", "]", "}", "\\}", "\\rangle"))
        if depth < 0:
            return False
        i = token.end()
    return depth == 0


def matrix_rows(text: str) -> list[list[str]] | None:
    found = re.fullmatch(r"\\begin\{([a-zA-Z]*matrix|array)\}(?:\{[^}]*\})?(.*)\\end\{\1\}", text.strip(), re.DOTALL)
    if found is None:
        return None
    rows = [r for r, _ in split_top(found.group(2), ("\\\\",))]
    return [[c.strip() for c, _ in split_top(r, ("&",))] for r in rows if r.strip()]


def relation(text: str) -> list[tuple[str, str]] | None:
    """(side, the operator behind it) of an equation, an inequality or a chain of them; None when there is no operator."""
    parts = [(p.strip(), "=" if op == "\\approx" else op) for p, op in split_top(text, OPERATORS)]
    return parts if len(parts) > 1 and all(p for p, _ in parts) else None


def label_of(text: str) -> tuple[str, str] | None:
    """(name, value) of x=7, a_n=2n-1, f(x)=x^2, x\\in[0,1], or a chain that starts so; the value is the last side."""
    parts = relation(text)
    if parts is None or any(op not in ("=", "\\in") for _, op in parts[:-1]):
        return None
    name = parts[0][0]
    if re.fullmatch(r"(?:\\?[A-Za-z]+|\\text\{[^{}]*\})'?(?:_\{?\w+\}?)?(?:\([\w, ]*\))?|\\(?:angle|overline|triangle)\{?\s*\w+\}?", name):
        return name, parts[-1][0]
    return None


def plus_minus(text: str) -> list[str]:
    """The two values of an expression with \\pm (and \\mp)."""
    if "\\pm" not in text and "\\mp" not in text:
        return [text]
    if len(items(text)) > 1:
        return [v for item in items(text) for v in plus_minus(item)]
    plus = re.sub(r"\\mp(?![a-zA-Z])", "-", re.sub(r"\\pm(?![a-zA-Z])", "+", text))
    minus = re.sub(r"\\mp(?![a-zA-Z])", "+", re.sub(r"\\pm(?![a-zA-Z])", "-", text))
    return [label[1] if (label := label_of(side)) else side for side in (plus, minus)]


NUMBERISH = r"[-+]?[\d.,/^{}()\\+ ]*(?:frac|cdot|sqrt|[\d.,/^{}()\\+ ])*[\d})%]"


def split_unit(text: str) -> tuple[str, str | None]:
    """(value, unit) of a quantity; unit None where there is none. Factors such as "million" go into the value."""
    text = text.strip()
    money = re.fullmatch(r"([-+]?)\s*([$€£¥])\s*(.+)", text) or re.fullmatch(r"([-+]?)(?=.*[$€£¥]$)()(.+)", text)
    if money and re.search(r"\d", money.group(3)):
        sign = money.group(2) or text[-1]
        value, unit = split_unit(money.group(1) + (money.group(3) if money.group(2) else money.group(3)[:-1].strip()))
        return value, sign if unit in (None, sign) else unit
    degrees = re.fullmatch(r"(.+?)\s*\^\\circ\s*(?:\\text\{)?\s*([CF]?)\s*\}?", text)
    if degrees and not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        return degrees.group(1), "deg" + degrees.group(2)
    found = re.fullmatch(r"(.*?[\d)}\]a-zA-Z%])\s*\\text\{([^{}]+)\}\s*(?:\^\{?(\d)\}?)?", text)
    if found is None:
        found = re.fullmatch(rf"({NUMBERISH})\s+([A-Za-z][A-Za-z/. -]*?)\s*(?:\^\{{?(\d)\}}?)?", text)
    if found is None:
        found = re.fullmatch(rf"({NUMBERISH})({'|'.join(ADJACENT)})\s*(?:\^\{{?(\d)\}}?)?", text)
    if found is None or len(found.group(2).split()) > 4:
        return text, None
    value, unit = found.group(1).strip(), found.group(2).strip().lower()
    if not re.search(r"\d|\\", value) and len(value) > 2:
        return text, None
    words = unit.replace("-", " ").split()
    if words and words[0] in FACTORS:
        value, words = f"({value})\\cdot 10^{{{FACTORS[words[0]]}}}", words[1:]
    elif words and words[0] in ("percent", "per") and (words[0] == "percent" or words[1:2] == ["cent"]):
        return f"{value}%", None
    elif words and words[0] == "dozen":
        value, words = f"({value})\\cdot 12", words[1:]
    name = _unit_name(words) + (f"^{found.group(3)}" if found.group(3) else "")
    return value, name or None


def _unit_name(words: list[str]) -> str:
    power = ""
    if words and words[0] in ("square", "sq", "sq.", "cubic", "cu"):
        power, words = "^2" if words[0].startswith("sq") else "^3", words[1:]
    joined = " ".join(words).replace(" per ", "/").replace(" / ", "/").replace(".", "")
    return "/".join(_one_unit(w) for w in joined.split("/")) + power


def _one_unit(word: str) -> str:
    word = word.strip()
    if word in UNITS:
        return UNITS[word]
    singular = word[:-1] if word.endswith("s") and len(word) > 2 else word
    return UNITS.get(singular, singular)


def choice_of(text: str) -> tuple[str, str] | None:
    """(letter, what it stands for) of "(B) 12 cm" or "B. 12 cm"."""
    found = re.fullmatch(r"(?:\\text\{\s*)?\(?([A-H])\s*[).:]\s*\}?\s*(\S.*)", text.strip())
    return (found.group(1), found.group(2)) if found else None


def words_of(text: str) -> str | None:
    """The text as plain words, for comparison: lower case, without punctuation; None when it is not words."""
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip().strip("()").strip()
    lowered = " ".join(plain.lower().split()).rstrip(".!")
    if lowered in SYNONYMS:
        return SYNONYMS[lowered]
    if lowered == "\\emptyset":
        return lowered
    if re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[ '\-&.,])*", plain) and len(plain) > 1:
        return re.sub(r"^(?:the|an?) (?=\w{3})", "", lowered.replace(",", "").replace(".", ""))
    return None
