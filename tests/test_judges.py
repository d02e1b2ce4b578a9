"""Judges: who wins, what is invalid, and that mistakes are told in a sentence."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from tether.errors import UserError
from tether.judges import PersonJudge, ScoreJudge, Verdict, make_judge, shuffled_sides


def winners(spec: str, a: list[str], b: list[str], **options: Any) -> list[str]:
    return [v.winner for v in make_judge(spec, **options)(["Hi"] * len(a), a, b)]


def test_length_judges_count_words() -> None:
    a, b = ["one two", "one", "one two"], ["one", "one two", "two one"]
    assert winners("longer", a, b) == ["a", "b", "tie"]
    assert winners("shorter", a, b) == ["b", "a", "tie"]
    assert winners("longer", ["w " * 9], ["w " * 7], margin=2.0) == ["tie"]


def test_vader_likes_cheer() -> None:
    assert winners("vader", ["This is wonderful, I love it!"], ["This is terrible, I hate it."]) == ["a"]


def test_vader_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    with pytest.raises(UserError, match=r"pip install 'tether-lm\[demo\]'"):
        make_judge("vader")


def test_a_pattern_is_a_judge() -> None:
    assert winners(r"regex:\d+", ["it is 4", "four", "44"], ["four", "it is 4", "5"]) == ["a", "b", "tie"]
    with pytest.raises(UserError, match="pattern cannot be read"):
        make_judge("regex:(")


RULES = """
def good(prompts, completions):
    return [1.0 if "yes" in c else 0.0 for c in completions]

async def later(prompts, completions):
    return [float(len(c)) for c in completions]

def chat(prompts, completions):
    return [float("yes" in c[0]["content"]) for c in completions]

def some(prompts, completions):
    return [None if "?" in c else float("nan") if "nan" in c else 1.0 for c in completions]

def one(prompts, completions):
    return 1.0

def word(prompts, completions):
    return ["best"] * len(completions)

number = 3
"""


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rules_for_judges.py").write_text(RULES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_rules_for_judges", raising=False)


@pytest.mark.usefixtures("rules")
def test_a_function_beside_the_data_is_a_judge() -> None:
    assert winners("my_rules_for_judges:good", ["yes", "no"], ["no", "no"]) == ["a", "tie"]
    assert winners("my_rules_for_judges:later", ["a"], ["bb"]) == ["b"]
    judge = make_judge("my_rules_for_judges:chat")
    assert judge([[{"role": "user", "content": "Hi"}]], ["yes"], ["no"])[0].winner == "a"


@pytest.mark.usefixtures("rules")
def test_what_cannot_be_scored_is_invalid_never_a_tie() -> None:
    """None on one side, NaN on one side, both: invalid; equal scores: a tie."""
    verdicts = make_judge("my_rules_for_judges:some")(["q"] * 4, ["?", "x", "nan", "x"], ["x", "nan", "?", "y"])
    assert [v.winner for v in verdicts] == ["invalid", "invalid", "invalid", "tie"]
    assert [(v.score_a, v.score_b) for v in verdicts] == [(None, 1.0), (1.0, None), (None, None), (1.0, 1.0)]
    assert verdicts[0].reason == "no score for one answer"
    assert verdicts[2].reason == "no score for either answer"


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize(
    "spec, words",
    [
        ("my_rules_for_judges:one", "a single value"),
        ("my_rules_for_judges:word", "not a number"),
        ("my_rules_for_judges:gone", "has no gone"),
        ("my_rules_for_judges:number", "cannot be called"),
        ("no_such_module_at_all:f", "cannot be imported"),
        ("nonsense", "there is no judge 'nonsense'"),
    ],
)
def test_judges_that_do_not_work_are_told_in_a_sentence(spec: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_judge(spec)(["q"], ["x"], ["y"])


def test_infinite_scores_are_invalid() -> None:
    judge = ScoreJudge("s", lambda p, a: [math.inf, 1.0, 2.0, -math.inf])
    assert [v.winner for v in judge(["q", "q"], ["", ""], ["", ""])] == ["invalid", "invalid"]


def test_the_wrong_number_of_scores_is_refused() -> None:
    with pytest.raises(UserError, match="3 scores for 2 answers"):
        ScoreJudge("s", lambda p, a: [1.0, 2.0, 3.0])(["q"], ["a"], ["b"])


def test_exchanging_sides_twice_changes_nothing() -> None:
    for verdict in (Verdict("a", 2.0, 1.0), Verdict("b"), Verdict("tie", 1.0, 1.0), Verdict("invalid", None, 3.0, "why")):
        assert verdict.swapped().swapped() == verdict
    assert Verdict("a", 2.0, 1.0).swapped() == Verdict("b", 1.0, 2.0)


def test_a_person_judges_by_keys_and_may_stop(capsys: pytest.CaptureFixture[str]) -> None:
    """1, 2, tie, a wrong key, skip, then the input ends: the rest is invalid, not tied; equal answers are not asked about."""
    keys = iter(["1", "2", "t", "x", "s"])

    def read(question: str) -> str:
        try:
            return next(keys)
        except StopIteration:
            raise EOFError from None

    judge = PersonJudge(read=read)
    a, b = ["a1", "a2", "same", "a4", "a5", "a6", "a7"], ["b1", "b2", "same", "b4", "b5", "b6", "b7"]
    verdicts = judge(["question"] * 7, a, b)
    assert [v.winner for v in verdicts] == ["a", "b", "tie", "tie", "invalid", "invalid", "invalid"]
    assert [v.reason for v in verdicts][4:] == ["skipped by the person", "not judged", "not judged"]
    shown = capsys.readouterr().out
    assert "Please type" in shown
    assert "-- 1 --\na1" in shown


def test_sides_are_shuffled_by_the_seed_alone() -> None:
    assert shuffled_sides(50, 3) == shuffled_sides(50, 3)
    assert shuffled_sides(60, 3)[:50] == shuffled_sides(50, 3)
    assert shuffled_sides(50, 3) != shuffled_sides(50, 4)
    assert 350 < sum(shuffled_sides(1000, 0)) < 650
