"""The benchmark's own arithmetic: medians, ratios per token, counts of equal tokens. Nothing is measured here."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return __import__("online")


def measurement(seconds: list[float], tokens: list[int], sampling: list[float], mib: int = 100) -> dict[str, Any]:
    return {"seconds": seconds, "tokens": tokens, "phases": {"sampling": sampling}, "rss_mib": mib}


def test_a_side_with_twice_the_tokens_in_the_same_time_is_twice_as_fast_per_token(online: ModuleType) -> None:
    theirs = [measurement([10.0], [100], [4.0], mib=400)]
    ours = [measurement([10.0], [200], [4.0], mib=100)]
    row = online.row("grpo", 3.0, ("trl", theirs), ("tether", ours))
    assert row["ratio"] == pytest.approx(2.0)
    assert row["plain_ratio"] == pytest.approx(1.0)
    assert row["memory_ratio"] == pytest.approx(0.25)
    assert (row["trl_tokens_per_s"], row["tether_tokens_per_s"]) == (10.0, 20.0)


def test_figures_are_medians_over_all_processes_and_steps(online: ModuleType) -> None:
    results = [measurement([1.0, 9.0], [10, 30], [0.5, 3.0]), measurement([2.0], [10], [1.0])]
    found = online.summary(results)
    assert (found["s"], found["tokens"], found["phases"]) == (2.0, 10, {"sampling": 1.0})
    assert found["s_per_token"] == pytest.approx(0.2)  # of 0.1, 0.3, 0.2
    assert online.sampling_rate(results) == pytest.approx(10.0)  # of 20, 10, 10


def test_sides_take_turns(online: ModuleType) -> None:
    order: list[str] = []

    def side(name: str) -> dict[str, Any]:
        order.append(name)
        return {"side": name}

    a, b = online.by_turns(2, lambda: side("a"), lambda: side("b"))
    assert order == ["a", "b", "a", "b"]
    assert [r["side"] for r in (*a, *b)] == ["a", "a", "b", "b"]


def test_log_probs_are_compared_up_to_the_first_other_token(online: ModuleType) -> None:
    found = online.equal_tokens([[5, 6, 7], [1, 2, 3]], [[5, 9, 7], [1, 2, 3]], [[-1.0, -1.0, -1.0]] * 2, [[-1.5, -9.0, -9.0], [-1.0] * 3])
    assert found == {"equal": 5, "unequal": 1, "compared": 4, "logp_gap": pytest.approx(0.125)}


def test_every_printed_row_names_its_phases_and_what_is_left_over(online: ModuleType) -> None:
    side = [measurement([10.0], [100], [4.0])]
    text = online.lines(online.row("ppo", 0.6, ("grpo", side), ("ppo", side)) | {"same": {"equal": 72}})
    assert len(text) == 4
    assert text[1].split() == ["grpo", "sampling", "4.00", "s", "other", "6.00", "s"]
    assert text[3].endswith('{"equal": 72}')


def test_the_reward_is_the_share_of_different_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    different_words = __import__("rule").different_words
    answers = [[{"role": "assistant", "content": text}] for text in ("the river and the road", "", "one")]
    assert different_words(answers) == [0.8, 0.0, 1.0]
