"""LaTeX -> MathML that a browser shows by itself, made of a list of known harmless elements.

latex2mathml carries `href`, `style` and `class` over from the formula, so nothing of its output is trusted: every element and every
attribute is looked up here, and text is escaped here. A formula that cannot be read is shown as it was written.
"""

from __future__ import annotations

import html
import re
from typing import Any

from tether.collect.marks import visible

# fmt: off
ELEMENTS = frozenset({
    "math", "mrow", "mi", "mn", "mo", "mtext", "mspace", "ms", "msub", "msup", "msubsup", "munder", "mover", "munderover",
    "mmultiscripts", "mprescripts", "none", "mfrac", "msqrt", "mroot", "mtable", "mtr", "mtd", "mlabeledtr", "mpadded",
    "mphantom", "menclose", "mstyle", "mfenced"
})
WORDS = frozenset({
    "mathvariant", "stretchy", "fence", "form", "separator", "displaystyle", "scriptlevel", "accent", "accentunder",
    "symmetric", "movablelimits", "largeop", "columnalign", "rowalign", "columnlines", "rowlines", "notation", "open",
    "close", "separators", "linebreak"
})
LENGTHS = frozenset({
    "width", "height", "depth", "lspace", "rspace", "linethickness", "rowspacing", "columnspacing", "minsize", "maxsize",
    "voffset"
})
# fmt: on
PARTS = {"mfrac": 2, "mroot": 2, "msub": 2, "msup": 2, "munder": 2, "mover": 2, "msubsup": 3, "munderover": 3}
WORD = re.compile(r"[\w .,|()\[\]{}+-]{0,60}")
LENGTH = re.compile(r"([+-]?\d{0,4}(?:\.\d{1,6})?)(em|ex|pt|px|mu)?")
# A longer shift could push a formula over its neighbours.
LONGEST = {"em": 6.0, "ex": 12.0, "pt": 72.0, "px": 96.0, "mu": 108.0, "": 6.0}
LONGEST_FORMULA = 2000  # characters; longer ones are shown as written
DEEPEST = 60
ENTITY = re.compile(r"&#x([0-9A-Fa-f]{2,6});")


def formula(latex: str, *, block: bool) -> str:
    """HTML of one formula: MathML, or the formula's own text in <code> where it cannot be read.

    >>> formula("x^2", block=False)
    '<math display="inline"><mrow><msup><mi>x</mi><mn>2</mn></msup></mrow></math>'
    >>> formula("x^", block=False)
    '<code class="formula">x^</code>'
    """
    made = _mathml(latex, "block" if block else "inline")
    return made if made is not None else f'<code class="formula">{html.escape(visible(latex))}</code>'


def _mathml(latex: str, display: str) -> str | None:
    if not latex.strip() or len(latex) > LONGEST_FORMULA:
        return None
    from latex2mathml.converter import convert_to_element

    try:
        root = convert_to_element(latex, display=display)
        return _written(root, 0)
    except Exception:
        # Anybody may have written the formula, and the reader raises whatever comes (IndexError, RecursionError, its own errors).
        # The text itself is shown then, so nothing is lost.
        return None


def _written(element: Any, depth: int) -> str:
    name = element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""
    if name not in ELEMENTS or depth > DEEPEST:
        raise ValueError(f"no element of a formula: {name}")
    if len(element) != PARTS.get(name, len(element)):
        raise ValueError(f"{name} with {len(element)} parts")  # a formula that was cut off
    inner = _text(element.text) + "".join(_written(child, depth + 1) + _text(child.tail) for child in element)
    return f"<{name}{_attributes(element.attrib, depth)}>{inner}</{name}>"


def _attributes(given: dict[str, str], depth: int) -> str:
    kept = []
    for name, value in given.items():
        if (depth == 0 and name == "display") or (name in WORDS and WORD.fullmatch(value)) or (name in LENGTHS and _short(value)):
            kept.append(f' {name}="{html.escape(value)}"')
    return "".join(kept)


def _short(value: str) -> bool:
    found = LENGTH.fullmatch(value)
    if found is None or found.group(1) in ("", "+", "-"):
        return False
    return abs(float(found.group(1))) <= LONGEST[found.group(2) or ""]


def _text(text: str | None) -> str:
    """latex2mathml writes characters as &#x...; inside of its text; they are turned into themselves first."""
    if not text:
        return ""
    return html.escape(visible(ENTITY.sub(_character, text)))


def _character(found: re.Match[str]) -> str:
    number = int(found.group(1), 16)
    return chr(number) if number <= 0x10FFFF else "\ufffd"
