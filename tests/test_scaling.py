"""The scaling benchmark's own arithmetic: which rows there are, medians over steps, shares. Nothing is measured here."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return __import__("scaling")


def rank(waited: float, peak: int) -> list[dict[str, Any]]:
    """Five steps of two seconds; the first, which is left out, gathers ten times as much."""
    out = []
    for i in range(5):
        received = {"gathered": 1000 + 100 * i, "summed": 50 * i}
        out.append({"time": 10.0 + 2 * i, "waited": waited * i, "received": received, "loopback": 400 * i, "peak": peak + i})
    return out


def test_weak_rows_grow_with_the_ranks_and_strong_ones_do_not(scaling: ModuleType) -> None:
    rows = scaling.rows_of(["sft"], [1, 2, 4], 3, strong=True)
    assert [(r.kind, r.ranks, r.rows) for r in rows] == [
        ("weak", 1, 3), ("weak", 2, 6), ("weak", 4, 12), ("strong", 1, 6), ("strong", 2, 6), ("strong", 4, 6),
    ]  # fmt: skip
    assert len(scaling.rows_of(["sft", "dpo"], [1, 2], 3, strong=False)) == 4


def test_figures_are_of_single_steps_after_the_first(scaling: ModuleType) -> None:
    logged = [{"num_tokens": 500 + 100 * i} for i in range(5)]
    found = scaling.figures([rank(0.5, 70), rank(1.0, 90)], logged, 1)
    assert found["seconds"] == 2.0
    assert (found["tokens"], found["tokens_per_second"]) == (100, 50.0)
    assert (found["waiting"], found["waiting_least"]) == (0.375, 0.25)
    assert found["received"] == {"gathered": 100, "summed": 50}
    assert found["loopback"] == 200.0  # of one of two ranks
    assert found["peak"] == 94


def test_the_table_holds_efficiency_against_one_rank_and_the_plan(scaling: ModuleType) -> None:
    plan = {"received": {"gathered": 2 * 2**20, "summed": 0.0, "sampling": 0.0}, "bytes": 5 * 2**20, "seconds_per_step": 3.0}
    common = {
        "method": "sft",
        "kind": "weak",
        "threads": 1,
        "rows": 4,
        "seconds": 2.0,
        "waiting": 0.3,
        "waiting_least": 0.1,
        "planned": plan,
    }
    common |= {"loopback": 4 * 2**20, "peak": 6 * 2**20}
    one = {**common, "ranks": 1, "tokens_per_second": 100.0, "received": {}}
    two = {**common, "ranks": 2, "tokens_per_second": 80.0, "received": {"gathered": 2 * 2**20}}
    lines = scaling.table([one, two])
    assert len(lines) == 4
    for words in ("2 x 1", "2.00 (3.0)", "| 80 |", "| 0.80 |", "30% (10%)", "2 (2)", "| 4 |", "6 (5)"):
        assert words in lines[-1]
    assert "| 1.00 |" in lines[-2]


def test_a_recipe_of_the_benchmark_is_one_that_the_command_line_takes(scaling: ModuleType, tmp_path: Path) -> None:
    from tether.config import configure

    setting = scaling.Setting("smollm2", tmp_path, tmp_path, 4, 1, "bf16", 4, 48, False)
    for row in scaling.rows_of(list(scaling.METHODS), [2], 4, strong=False):
        recipe = configure(None, setting.words(row), command=row.method, flags={}).recipe
        assert recipe.batch_size == (32 if row.method == "grpo" else 8)
        assert recipe.max_steps == 5
