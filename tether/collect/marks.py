"""Characters that deceive the eye or break a page, made visible: marks of direction, control characters, broken text."""

from __future__ import annotations

import re
import unicodedata

# Unicode's Bidi_Control property: they can make a line read otherwise than it is stored ("Trojan Source", CVE-2021-42574).
BIDI = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
# Tag characters show nothing at all and can carry a hidden message.
HIDDEN = "\U000e0000-\U000e007f"
ODD = re.compile(f"[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\ud800-\\udfff\ufffe\uffff{BIDI}{HIDDEN}]")


def visible(text: str) -> str:
    """The same text with every deceptive character replaced by a sign for it; nothing is left out.

    >>> visible("a\\x00b\\u202ec")
    'a[U+0000]b[U+202E]c'
    """
    return ODD.sub(_sign, text.replace("\r\n", "\n"))


def _sign(found: re.Match[str]) -> str:
    character = found.group()
    number = ord(character)
    if character == "\r":
        return "\n"
    if 0xD800 <= number <= 0xDFFF or number in (0xFFFE, 0xFFFF):
        return "\ufffd"
    return f"[U+{number:04X}]"


def one_line(text: str) -> str:
    """A name or another short text on one line, blanks collapsed, without control characters.

    >>> one_line("  Ana\\n\\x00 Maria ")
    'Ana Maria'
    """
    kept = "".join(" " if unicodedata.category(c) in ("Cc", "Zl", "Zp") else c for c in text)
    return " ".join(ODD.sub("", kept).split())
