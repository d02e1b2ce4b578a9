"""The plans in docs/scale.md are what `tether plan` prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tether import cli

PAGE = (Path(__file__).parents[1] / "docs/scale.md").read_text(encoding="utf-8")
PLANS = re.findall(r"```\n\$ tether (plan --parameters .*)\n([^`]*)```", PAGE)


def test_the_page_has_both_plans() -> None:
    assert {re.findall(r"--ranks (\d+)", words)[0] for words, _ in PLANS} == {"8", "64"}


@pytest.mark.parametrize("words, shown", PLANS, ids=[words for words, _ in PLANS])
def test_a_plan_on_the_page_is_what_the_command_prints(words: str, shown: str, capsys: Any) -> None:
    assert cli.run(words.split()) == 0
    assert capsys.readouterr().out == shown
