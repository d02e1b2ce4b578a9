"""Checked types for settings: what a value may be, and the sentence that says so when it is not.

Text is never turned into a number in silence, `true` is not 1, and a null where there is a default is a mistake, not a wish.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator, Field


def _shown(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"the text {value!r}" if isinstance(value, str) else repr(value)


def _no_null(value: object, wanted: str) -> None:
    if value is None:
        raise ValueError(f"null is not {wanted}; leave the line out for the default")


def number(value: Any) -> float:
    """A finite number, as a float."""
    _no_null(value, "a number")
    if isinstance(value, str):
        if re.fullmatch(r"\s*[+-]?\d+,\d+\s*", value):
            raise ValueError(f"{_shown(value)} is not a number; write {value.strip().replace(',', '.')} with a decimal point")
        if _reads_as_number(value):
            raise ValueError(f"{_shown(value)} is not a number; write {value.strip()} without quotes")
        raise ValueError(f"{_shown(value)} is not a number")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{_shown(value)} is not a number")
    if not math.isfinite(value):
        raise ValueError(f"a finite number is wanted, got {value}")
    return float(value)


def whole(value: Any) -> int:
    """A whole number. 1e3 and 20.0 are whole; 10.5 is not."""
    _no_null(value, "a whole number")
    if isinstance(value, (str, bool)) or not isinstance(value, (int, float)):
        number(value)
    if not math.isfinite(value) or value != int(value):
        raise ValueError(f"a whole number is wanted, got {value}")
    return int(value)


def flag(value: Any) -> bool:
    """true or false, nothing else."""
    _no_null(value, "true or false")
    if not isinstance(value, bool):
        raise ValueError(f"true or false is wanted, got {_shown(value)}")
    return value


def text(value: Any) -> str:
    """A text that is not empty."""
    _no_null(value, "a text")
    if not isinstance(value, str):
        raise ValueError(f"a text is wanted, got {_shown(value)}")
    if not value.strip():
        raise ValueError("the text is empty")
    return value


def text_or_list(value: Any) -> str | list[str]:
    """One text, or a list of texts with at least one."""
    if isinstance(value, (list, tuple)):
        if not value:
            raise ValueError("the list is empty")
        return [text(item) for item in value]
    return text(value)


def texts(value: Any) -> list[str]:
    """A list of texts; one text alone counts as a list of one."""
    _no_null(value, "a list")
    if isinstance(value, str):
        return [text(value)]
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"a list such as [a, b] is wanted, got {_shown(value)}")
    return [text(item) for item in value]


def _reads_as_number(value: str) -> bool:
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False


def optional(check: Callable[[Any], Any]) -> BeforeValidator:
    """null or what `check` lets through."""
    return BeforeValidator(lambda value: None if value is None else check(value))


Positive = Annotated[float, Field(gt=0), BeforeValidator(number)]
NotNegative = Annotated[float, Field(ge=0), BeforeValidator(number)]
Share = Annotated[float, Field(ge=0, lt=1), BeforeValidator(number)]
Whole = Annotated[int, Field(ge=0), BeforeValidator(whole)]
Count = Annotated[int, Field(ge=1), BeforeValidator(whole)]
OptionalCount = Annotated[Annotated[int, Field(ge=1)] | None, optional(whole)]
Flag = Annotated[bool, BeforeValidator(flag)]
Text = Annotated[str, BeforeValidator(text)]
OptionalText = Annotated[str | None, optional(text)]
TextOrList = Annotated[str | list[str], BeforeValidator(text_or_list)]
OptionalTextOrList = Annotated[str | list[str] | None, optional(text_or_list)]
Texts = Annotated[list[str], BeforeValidator(texts)]
OptionalTexts = Annotated[list[str] | None, optional(texts)]
