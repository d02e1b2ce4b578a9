"""The lines that an explanation is made of, and how it reads a recipe. Torch-free."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any


def get(recipe: Any, name: str, default: Any = None) -> Any:
    value = recipe.get(name) if isinstance(recipe, Mapping) else getattr(recipe, name, None)
    return default if value is None else value


def line(label: str, text: str) -> str:
    """One labelled entry; long ones are folded, a formula never."""
    if label == "minimise":
        return f"  {label:<9} {text}"
    return textwrap.fill(text, 118, initial_indent=f"  {label:<9} ", subsequent_indent=" " * 12, break_on_hyphens=False)


def step(recipe: Any, unit: str) -> Iterator[str]:
    rows, rate = get(recipe, "batch_size"), get(recipe, "learning_rate")
    if rows and rate:
        yield line("one step", f"{rows} {unit}, AdamW at learning rate {rate:g}; divided by the whole step's total, however it is split")
