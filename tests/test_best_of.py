"""Best of n: who is chosen, by listing every choice; the bound; and the comparison from the command line by hand."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_compare import assert_one_sentence, jsonl
from tests.tiny import save_tiny
from tether import stats
from tether.answers import Answer
from tether.best_of import Remembered, best_of, chances, kl_bound, make_scorer
from tether.cli import run
from tether.compare import compare, cross
from tether.errors import UserError
from tether.judges import PersonJudge, ScoreJudge

SCORES = st.lists(st.one_of(st.none(), st.sampled_from([-1.0, 0.0, 0.5, 2.0])), min_size=1, max_size=7)


def first_of_the_best(scores: list[float | None], chosen: tuple[int, ...]) -> int:
    """Ties go to the sample that was generated first; no score loses to any; none at all: the first."""
    return max(chosen, key=lambda i: (-math.inf if scores[i] is None else scores[i], scores[i] is not None, -i))


@given(scores=SCORES, data=st.data())
@settings(max_examples=60, deadline=None)
def test_chances_are_those_of_every_choice(scores: list[float | None], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(scores)))
    draws = list(itertools.combinations(range(len(scores)), n))
    counted = [sum(first_of_the_best(scores, d) == i for d in draws) / len(draws) for i in range(len(scores))]
    assert chances(scores, n) == pytest.approx(counted)
    assert sum(chances(scores, n)) == pytest.approx(1)
    scored = [s for s in scores if s is not None]
    if len(scored) == len(scores):
        assert sum(c * s for c, s in zip(chances(scores, n), scored, strict=True)) == pytest.approx(stats.best_of_n(scored, n), abs=1e-12)


def test_the_estimate_from_more_samples_is_without_bias() -> None:
    """Policy (0.5, 0.3, 0.2) with rewards 1, 0, 3: P(best of 2 = k) = F_k^2 - (F_k - q_k)^2, F summed in the order of rewards.

    0: 0.3^2 = 0.09; 1: 0.8^2 - 0.3^2 = 0.55; 3: 1 - 0.8^2 = 0.36. The mean of the chances over all draws of four is the same.
    """
    policy, rewards = (0.5, 0.3, 0.2), (1.0, 0.0, 3.0)
    exact = (0.55, 0.09, 0.36)
    found = [0.0] * 3
    for draw in itertools.product(range(3), repeat=4):
        probability = math.prod(policy[k] for k in draw)
        for k, c in zip(draw, chances([rewards[k] for k in draw], 2), strict=True):
            found[k] += probability * c
    assert found == pytest.approx(exact)
    kl = sum(p * math.log(p / q) for p, q in zip(exact, policy, strict=True))
    assert kl < kl_bound(2) == pytest.approx(math.log(2) - 0.5)


def test_the_bound_is_met_where_no_two_samples_are_alike() -> None:
    """Continuous rewards: the density of the best of n is n F^(n-1), whose KL is the integral of n u^(n-1) log(n u^(n-1))."""
    for n in (2, 4, 16):
        steps = 20000
        u = [(i + 0.5) / steps for i in range(steps)]
        assert sum(n * x ** (n - 1) * math.log(n * x ** (n - 1)) for x in u) / steps == pytest.approx(kl_bound(n), abs=1e-4)
    assert kl_bound(1) == 0
    with pytest.raises(ValueError, match="at least 1"):
        kl_bound(0)


def longer(prompts: Any, answers: Any) -> list[float]:
    return [float(len(a.split())) for a in answers]


def said(texts: dict[str, list[str]]) -> list[Answer]:
    return [Answer(p, t, sample=i) for p, group in texts.items() for i, t in enumerate(group)]


def test_a_comparison_against_the_best_by_hand() -> None:
    """B's best of 2 of 3 by length: lengths 1, 3, 2 are chosen with chances 0, 2/3, 1/3. The judge likes short answers.

    A says two words. Against 3 words A wins (2/3), against 2 words it is a tie (1/3): 2/3 + 1/6 = 5/6.
    """
    b = said({"p": ["x", "x y z", "x y"]})
    by, judge = ScoreJudge("longer", longer), ScoreJudge("shorter", lambda p, a: [-s for s in longer(p, a)])
    side = best_of(b, 2, by, judge)
    assert side.chances == pytest.approx([0, 2 / 3, 1 / 3])
    assert [s.n for s in side.steps] == [1, 2]
    assert [s.chosen_by.value for s in side.steps if s.chosen_by] == pytest.approx([2, 8 / 3])
    assert [s.judged.value for s in side.steps if s.judged] == pytest.approx([-2, -8 / 3])
    result = compare(judge, said({"p": ["a b"]}), b, chances=(None, side.chances))
    assert result.win_rate is not None
    assert result.win_rate.value == pytest.approx(5 / 6)
    assert result.win_rate.n == 1
    assert result.mean_score("b") == pytest.approx(-8 / 3)
    assert (result.length() or (0, 0))[1] == pytest.approx(8 / 3)
    assert len(result.pairs) == 2  # who is never chosen is not judged
    assert sum(p.weight for p in result.pairs) == pytest.approx(1)


def test_both_sides_choose_independently() -> None:
    a, b = said({"p": ["a", "a b"], "q": ["a", "a b"]}), said({"p": ["x", "x y z"], "q": ["x", "x y"]})
    pairs = cross(a, b, ([0.25, 0.75] * 2, [0.5, 0.5] * 2))
    assert [round(w, 4) for _, _, _, w in pairs] == [0.125, 0.125, 0.375, 0.375] * 2
    assert {p for p, _, _, _ in pairs} == {"p", "q"}
    with pytest.raises(UserError, match=r"1 prompts are answered by one side alone; the first is 'q', which b does not"):
        cross(a, b[:2], (None, None))


def test_samples_without_a_score_never_win_and_are_counted() -> None:
    by = ScoreJudge("fussy", lambda p, a: [None if "?" in x else float(len(x)) for x in a])
    side = best_of(said({"p": ["???", "a"], "q": ["?", "??"]}), 2, by)
    assert side.chances == [0.0, 1.0, 1.0, 0.0]
    assert (side.unscored, side.undecided) == (3, 1)


def test_scores_are_asked_for_once() -> None:
    asked: list[str] = []

    def scores(prompts: Any, answers: Any) -> list[float]:
        asked.extend(answers)
        return longer(prompts, answers)

    remembered = Remembered(scores)
    assert remembered(["p", "p", "q", "p"], ["a", "a b", "a", "a"]) == [1, 2, 1, 1]
    assert remembered(["p", "q"], ["a b", "c d e"]) == [2, 3]
    assert asked == ["a", "a b", "a", "c d e"]


def test_rewards_choose_and_judge_with_the_datas_columns() -> None:
    scorer = make_scorer("math", {"p": {"answer": "12"}, "q": {"answer": "1/2"}})
    assert isinstance(scorer, ScoreJudge)
    assert scorer.scores(["p", "q", "q"], ["It is 12.", "It is 12.", "\\boxed{0.5}"]) == [1.0, 0.0, 1.0]
    assert isinstance(make_scorer("longer"), ScoreJudge)


@pytest.mark.parametrize(
    "answers, by, told",
    [
        ({"p": ["a", "b"], "q": ["a"]}, ScoreJudge("longer", longer), "1 answers to 'q' are too few for the best of 2"),
        ({"p": ["a", "b"]}, PersonJudge(), "human gives no scores"),
    ],
)
def test_what_cannot_be_chosen_from_is_refused(answers: Any, by: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        best_of(said(answers), 2, by)


# -- the command -------------------------------------------------------------------------------------------------------


def test_best_of_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [f"q{i}" for i in range(6)]
    a = jsonl(tmp_path / "a.jsonl", [{"prompt": p, "completion": "one two"} for p in prompts])
    b = jsonl(tmp_path / "b.jsonl", [{"prompt": p, "completion": t} for p in prompts for t in ("x", "x y z", "x y")])
    words = ["compare", a, b, "--best-of", "2", "--by", "longer"]
    assert run([*words, "--judge", "shorter", "--json", "--out", str(tmp_path / "pairs.jsonl")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["win_rate"]["value"] == pytest.approx(5 / 6)
    assert told["win_rate"]["n"] == 6
    assert told["best_of"]["b"]["kl_upper_bound"] == pytest.approx(math.log(2) - 0.5)
    assert told["best_of"]["b"]["samples"] == [3, 3]
    assert [s["score_judge"]["value"] for s in told["best_of"]["b"]["steps"]] == pytest.approx([-2, -8 / 3])
    assert sum(json.loads(line)["weight"] for line in (tmp_path / "pairs.jsonl").read_text().splitlines()) == pytest.approx(6)
    assert run(words) == 0
    shown = capsys.readouterr().out
    for piece in ("at most 0.193 nats", "upper bound", "the scorer that chooses is also the judge", "weigh each pair"):
        assert piece in " ".join(shown.split())


def test_models_answer_with_the_best_of_their_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same model on both sides, one of them with a choice: its answers are longer by the very rule that chooses."""
    folder = str(save_tiny(tmp_path / "model"))
    prompts = jsonl(tmp_path / "p.jsonl", [{"prompt": f"w{i}"} for i in range(10, 18)])
    words = ["compare", folder, folder, "--prompts", prompts, "--max-new-tokens", "8", "--precision", "fp32", "--by", "regex:w1", "--json"]
    assert run([*words, "--best-of", "4", "--draw", "6"]) == 0
    told = json.loads(capsys.readouterr().out)
    steps = told["best_of"]["b"]["steps"]
    assert [s["n"] for s in steps] == [1, 2, 4]
    assert steps[0]["score_by"]["value"] <= steps[1]["score_by"]["value"] <= steps[2]["score_by"]["value"]
    assert told["score"]["b"] == pytest.approx(steps[2]["score_by"]["value"])
    assert run([*words, "--best-of", "2", "--best-of-side", "both", "--judge", "longer"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert set(both["best_of"]) == {"a", "b"}
    assert both["pairs"] == 8


@pytest.mark.parametrize(
    "words, told",
    [
        (["--by", "longer"], "only acts with --best-of"),
        (["--best-of", "1", "--by", "longer"], "at least 2"),
        (["--best-of", "2"], "who chooses"),
        (["--best-of", "2", "--by", "longer", "--best-of-side", "c"], "no side 'c'"),
        (["--best-of", "4", "--by", "longer", "--draw", "3"], "best of 4 cannot be taken of 3"),
        (["--best-of", "2", "--by", "human"], "gives no scores"),
        (["--best-of", "2", "--by", "longer", "--best-of-side", "both", "--n", "2"], "--n: both sides"),
        (["--best-of", "2", "--by", "longer", "--judge", "shorter"], "b.jsonl: 1 answers to 'p' are too few"),
        (["--best-of", "2", "--by", "longer", "--temperature", "0"], "temperature 0"),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert_one_sentence(tmp_path, monkeypatch, capsys, ["compare", "a.jsonl", "b.jsonl", *words], told)
