"""One row or a few through a loader, for the tests of shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def loaded(tmp_path: Path, module: Any, *rows: dict[str, Any], how: str = "load") -> Any:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return getattr(module, how)(str(path))


def one(tmp_path: Path, module: Any, row: dict[str, Any]) -> Any:
    found = loaded(tmp_path, module, row)
    assert found.problems == [], found.problems
    assert len(found.rows) == 1
    return found.rows[0]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


DIALOGUE = "\n\nHuman: How do tides work?\n\nAssistant: The moon pulls.\n\nHuman: Only the moon?\n\nAssistant:"
