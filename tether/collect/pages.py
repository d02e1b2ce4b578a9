"""What the desk's pages show. Blind: of an answer a page holds the text, and neither its model, its id nor where it came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tether.collect.desk import DeskSettings, Shown
from tether.collect.marks import one_line, visible
from tether.collect.render import render
from tether.messages import Text

HERE = Path(__file__).parent
STATIC = {"style.css": "text/css; charset=utf-8", "desk.js": "text/javascript; charset=utf-8", "icon.svg": "image/svg+xml"}
WHO = {"user": "Asked", "assistant": "Answered", "system": "Told beforehand", "tool": "Tool"}
STRENGTHS = (("", "not said"), ("1", "slightly"), ("2", "clearly"), ("3", "much"))
START_CHARACTERS = 120  # of an answer, in the list that is put in order


@dataclass(frozen=True)
class Turn:
    who: str  # "" where there is only one
    html: Markup


@dataclass(frozen=True)
class Card:
    """An answer, or the prompt (number 0), ready to be shown."""

    number: int
    turns: list[Turn]
    written: list[str]  # the texts themselves, where formatting hides marks of theirs
    start: str = ""


@dataclass(frozen=True)
class Entered:
    """What was filled in on a page that could not be saved, so that it is not lost."""

    strength: str = ""
    reason: str = ""
    tags: frozenset[int] = frozenset()
    ranks: Mapping[int, int] = field(default_factory=dict)  # by the number on the page


@dataclass(frozen=True)
class Notice:
    text: str
    tone: str = "good"  # good, watch or bad


def card(text: Text, number: int) -> Card:
    messages: Sequence[Mapping[str, Any]] = [{"role": "", "content": text}] if isinstance(text, str) else text
    turns, written = [], []
    for message in messages:
        role, content = str(message["role"]), str(message["content"])
        calls = message.get("tool_calls")
        if content or not calls:
            made = render(content)
            turns.append(Turn(WHO.get(role, visible(role)), made.html))
            written += [made.written] if made.written is not None else []
        if calls:
            turns.append(Turn("Call of a tool", _code(json.dumps(calls, ensure_ascii=False, indent=1))))
    if len(turns) == 1:
        turns = [Turn("", turns[0].html)]
    start = visible(" ".join(" ".join(str(m["content"]) for m in messages).split()))
    return Card(number, turns, written, start[:START_CHARACTERS] + ("…" if len(start) > START_CHARACTERS else ""))


def _code(text: str) -> Markup:
    return Markup('<div class="code"><pre><code>{}</code></pre></div>').format(visible(text))


def ballot_page(shown: Shown, settings: DeskSettings, entered: Entered) -> tuple[str, dict[str, Any]]:
    """(template, its values) of an item: a pair, or answers to be put in order."""
    cards = [card(shown.item.answer(place), number) for number, place in enumerate(shown.order, 1)]
    values: dict[str, Any] = {
        "assignment": shown.assignment,
        "prompt": card(shown.item.prompt, 0),
        "cards": cards,
        "reasons": [one_line(r) for r in settings.reasons],
        "entered": entered,
        "ranking": len(cards) > 2,
    }
    if len(cards) > 2:
        return "ranking.html", {**values, "places": range(1, len(cards) + 1)}
    return "pair.html", {**values, "strength": settings.strength, "strengths": STRENGTHS}


# -- templates and files -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _templates() -> Environment:
    loader = FileSystemLoader(HERE / "templates")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def page(template: str, **values: Any) -> str:
    return _templates().get_template(template).render(version=version(), **values)


@lru_cache(maxsize=1)
def static_files() -> dict[str, bytes]:
    return {name: (HERE / "static" / name).read_bytes() for name in STATIC}


@lru_cache(maxsize=1)
def version() -> str:
    """Changes with the files, so that a browser may keep them."""
    return hashlib.sha256(b"".join(static_files().values())).hexdigest()[:12]
