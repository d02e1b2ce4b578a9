"""A judge against people: figures by hand, failures as an outcome of their own, calibration of a judge that is right about itself."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.desks import Votes, desk, item
from tests.tiny import save_tiny
from tether.cli import run
from tether.collect.ballots import Ballot, Vote
from tether.collect.calibration import Calibration, calibrate
from tether.collect.items import Item, make_item
from tether.collect.quality_findings import judge_findings
from tether.collect.quality_page import judge_tables
from tether.errors import UserError
from tether.judges import ScoreJudge, Verdict, make_judge
from tether.messages import Text
from tether.scalar import ScalarModel


def pairs(*given: tuple[str, ...]) -> tuple[dict[str, Item], list[Vote]]:
    """One item for each tuple of outcomes, by as many people."""
    vote, items = Votes(), [item(i) for i in range(len(given))]
    votes = [vote(one, f"P{k}", outcome) for one, outcomes in zip(items, given, strict=True) for k, outcome in enumerate(outcomes)]
    return {i.id: i for i in items}, votes


class Scripted:
    """Says of question i what it is told about its first and second answer, whichever side it sees them on."""

    name, person = "scripted", False

    def __init__(self, said: Sequence[Verdict], fails_when_swapped: bool = False) -> None:
        self.said, self.fails_when_swapped, self.seen = said, fails_when_swapped, []

    def __call__(self, prompts: Sequence[Text], a: Sequence[str], b: Sequence[str]) -> list[Verdict]:
        out = []
        for prompt, first in zip(prompts, a, strict=True):
            swapped = first.startswith("wrong")
            self.seen.append(swapped)
            verdict = self.said[int(str(prompt).split()[-1])]
            if swapped and self.fails_when_swapped:
                out.append(Verdict("invalid", reason="HTTP 503"))
            else:
                out.append(verdict.swapped() if swapped else verdict)
        return out


A, B, TIE, DOWN = Verdict("a"), Verdict("b"), Verdict("tie"), Verdict("invalid", reason="HTTP 503")


def test_figures_by_hand() -> None:
    """Agrees on 0 and 1, differs on 2, ties on 3, people are even on 4, fails on 5: (1 + 1 + 0 + 0.5) / 4 = 62.5 %."""
    items, votes = pairs(("first", "first", "second"), ("second",), ("first", "tie"), ("first",), ("first", "second"), ("first", "first"))
    c = calibrate(Scripted([A, B, B, TIE, A, DOWN]), items, votes)
    assert c.counts == {"agree": 2, "differ": 1, "tie": 1, "undecided": 1, "invalid": 1}
    assert c.accuracy is not None
    assert (c.accuracy.value, c.accuracy.n) == (0.625, 4)
    # Single votes: 2/3, 1, 0 (the tie is no choice), 0.5, 0.5.
    assert c.with_one_person is not None
    assert c.with_one_person.value == pytest.approx((2 / 3 + 1 + 0 + 0.5 + 0.5) / 5)
    # Two people: (1/3, even 0, both of the failed one 1) over items with two choices.
    assert c.two_people.value == pytest.approx((1 / 3 + 0 + 1) / 3)
    assert [round(x.people, 4) for x in c.cases] == [0.6667, 0.0, 0.75, 1.0, 0.5, 1.0]


def test_sides_are_shuffled_and_verdicts_turned_back() -> None:
    items, votes = pairs(*[("first",)] * 40)
    judge = Scripted([A] * 40)
    c = calibrate(judge, items, votes)
    assert {True, False} == set(judge.seen)
    assert c.counts["agree"] == 40
    other = Scripted([A] * 40)
    assert calibrate(other, items, votes, seed=1).counts["agree"] == 40
    assert other.seen != judge.seen


def test_a_judge_that_is_down_is_invalid_and_never_a_tie() -> None:
    items, votes = pairs(*[("first",)] * 10)
    c = calibrate(Scripted([DOWN] * 10), items, votes)
    assert c.counts == {"agree": 0, "differ": 0, "tie": 0, "undecided": 0, "invalid": 10}
    assert c.accuracy is None
    assert c.as_dict()["accuracy"] is None
    told = judge_findings(c)
    assert "could not decide 10 of 10 pairs (HTTP 503)" in told[0].text
    assert told[0].tone == "bad"
    assert "cannot be measured" in told[1].text


def test_a_judge_that_fails_in_one_order_is_judged_by_the_rest() -> None:
    """A failure counts neither for nor against: with and without it the accuracy is 1, over fewer prompts."""
    items, votes = pairs(*[("first",)] * 40)
    judge = Scripted([A] * 40, fails_when_swapped=True)
    c = calibrate(judge, items, votes)
    assert c.counts["invalid"] == sum(judge.seen) > 10
    assert c.accuracy is not None
    assert (c.accuracy.value, c.accuracy.n) == (1.0, 40 - sum(judge.seen))
    assert any("HTTP 503" in cell for t in judge_tables(c, 5) for row in t.rows for cell in row)


def test_scores_that_are_not_finite_are_invalid() -> None:
    items, votes = pairs(("first",), ("first",), ("first",))
    scores = {"right answer 0": math.nan, "right answer 1": 2.0, "right answer 2": 1.0, "wrong answer here 2": 0.0}
    c = calibrate(ScoreJudge("odd", lambda p, a: [scores.get(x) for x in a]), items, votes)
    assert c.counts["invalid"] == 2
    assert c.counts["agree"] == 1


def test_confidence_by_hand() -> None:
    """Scores 2 against 0 for the first: sure to 0.8808; two of three people agree."""
    items, votes = pairs(("first", "first", "second"))
    c = calibrate(ScoreJudge("two", lambda p, a: [2.0 if x.startswith("right") else 0.0 for x in a]), items, votes)
    (only,) = c.bins
    assert only["predicted"] == pytest.approx(1 / (1 + math.exp(-2)))
    assert only["frequency"] == pytest.approx(2 / 3)
    assert c.error == pytest.approx(1 / (1 + math.exp(-2)) - 2 / 3)
    assert c.worst(1)[0].gap == pytest.approx(1 / (1 + math.exp(-2)) - 2 / 3)


def simulated(scale: float, n: int = 800) -> Calibration:
    """People choose by a true score difference; the judge knows it, times `scale`."""
    rng, vote = np.random.default_rng(1), Votes()
    items, votes, truth = {}, [], {}
    for i, gap in enumerate(rng.normal(0, 1.5, n)):
        one = item(i)
        items[one.id] = one
        truth[f"right answer {i}"], truth[f"wrong answer here {i}"] = gap * scale, 0.0
        votes.append(vote(one, "A", "first" if rng.random() < 1 / (1 + math.exp(-gap)) else "second"))
    return calibrate(ScoreJudge("knows", lambda p, a: [truth[x] for x in a]), items, votes)


def test_a_judge_that_knows_the_chances_is_calibrated_and_one_that_shouts_is_not() -> None:
    right, shouts, whispers = simulated(1.0), simulated(4.0), simulated(0.25)
    assert right.accuracy == shouts.accuracy == whispers.accuracy
    for c, low, high in ((right, -0.05, 0.05), (shouts, 0.1, 0.4), (whispers, -0.4, -0.1)):
        assert c.too_sure is not None
        assert low < c.too_sure.value < high
    assert right.error is not None
    assert shouts.error is not None
    assert right.error < 0.05 < 0.1 < shouts.error
    assert any("too sure of itself" in f.text for f in judge_findings(shouts))
    assert any("less sure than it could be" in f.text for f in judge_findings(whispers))
    assert any("confidence is what it should be" in f.text for f in judge_findings(right))


def test_the_worst_rows_are_those_furthest_apart_and_named() -> None:
    """Sure of the first answer by different scores, while people all chose the second."""
    items, votes = pairs(*[("second", "second")] * 5)
    c = calibrate(ScoreJudge("wrong", lambda p, a: [float(x.split()[-1]) if x.startswith("right") else 0.0 for x in a]), items, votes)
    worst = c.worst(3)
    assert [x.prompt for x in worst] == ["question 4", "question 3", "question 2"]
    assert worst[0].item in items
    assert worst[0].source == "pairs.jsonl:5"
    shown = next(t for t in judge_tables(c, 3) if t.title.startswith("Where judge and people differ"))
    assert [row[0] for row in shown.rows] == [x.item for x in worst]


def test_a_judge_without_scores_has_no_confidence_to_check() -> None:
    items, votes = pairs(("first",), ("second",))
    c = calibrate(Scripted([A, B]), items, votes)
    assert (c.bins, c.error, c.too_sure) == ([], None, None)
    assert any("no confidence to check" in f.text for f in judge_findings(c))


def test_every_pair_of_a_ranking_is_asked_about() -> None:
    three, vote = make_item("question 0", ["short", "a longer one", "the longest of them all"]), Votes()
    c = calibrate(make_judge("longer"), {three.id: three}, [vote(three, "A", "ranking", ranks=(2, 1, None), order=(0, 1, 2))])
    assert len(c.cases) == 1  # the unranked answer is in no pair
    c = calibrate(make_judge("longer"), {three.id: three}, [vote(three, "A", "ranking", ranks=(1, 2, 3), order=(0, 1, 2))])
    assert c.counts["differ"] == 3
    assert c.accuracy is not None
    assert c.accuracy.n == 1  # one prompt


def test_nobody_voted_or_the_judge_miscounts() -> None:
    items, votes = pairs(("skip",))
    with pytest.raises(UserError, match="no vote to hold the judge against"):
        calibrate(Scripted([A]), items, votes)
    items, votes = pairs(("first",), ("first",))

    class Short:
        name, person = "short", False

        def __call__(self, *_: Any) -> list[Verdict]:
            return [A]

    with pytest.raises(UserError, match="1 verdicts for 2 pairs"):
        calibrate(Short(), items, votes)


def vote_first(folder: Path, items: Sequence[Item]) -> None:
    """One person who chooses the first answer of every item, wherever it stands."""
    made = desk(folder, items)
    person = made.annotator("Ana")
    while (shown := made.next(person.id)) is not None:
        made.vote(person.id, Ballot(shown.assignment, "left" if shown.order == (0, 1) else "right"))
    made.close()


def test_a_judge_that_decides_nothing_ends_in_an_error(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    vote_first(tmp_path / "desk", [item(i) for i in range(4)])
    (tmp_path / "broken_judge.py").write_text("def score(prompts, completions):\n    return [None] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    assert run(["agreement", "desk", "--judge", "broken_judge:score"]) == 2
    seen = capsys.readouterr()
    assert "the judge decided none of 4 pairs" in seen.err
    assert "could not decide 4 of 4 pairs" in seen.out


def test_a_reward_is_given_the_columns_of_the_items(tmp_path: Path, capsys: Any) -> None:
    """The reward "math" needs the gold answer, which stands in the file that the items came from."""
    items = [make_item(f"What is {i} + 1?", [f"It is {i + 1}.", f"It is {i}."], extra={"answer": str(i + 1)}) for i in range(6)]
    vote_first(tmp_path / "desk", items)
    assert run(["agreement", str(tmp_path / "desk"), "--judge", "math", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["judge"]["counts"]["agree"] == 6


def test_a_reward_model_is_held_against_people(tmp_path: Path, capsys: Any) -> None:
    """A tiny model whose score head is not trained: it agrees as often as its own scores say."""
    ScalarModel.load(str(save_tiny(tmp_path / "model")), fresh_head=True, precision="fp32").save(tmp_path / "rm")
    items = [make_item(f"w{10 + i}", [f"w{20 + i} w{40 + i}", f"w{60 + i}"]) for i in range(12)]
    vote_first(tmp_path / "desk", items)
    assert run(["agreement", str(tmp_path / "desk"), "--judge", str(tmp_path / "rm"), "--json", "--precision", "fp32"]) == 0
    told = json.loads(capsys.readouterr().out)["judge"]
    scores = ScalarModel.load(str(tmp_path / "rm"), precision="fp32").score_texts([(i.prompt, a.text) for i in items for a in i.answers])
    first = sum(scores[2 * i] > scores[2 * i + 1] for i in range(12))
    assert 0 < first < 12
    assert told["counts"] == {"agree": first, "differ": 12 - first, "tie": 0, "undecided": 0, "invalid": 0}
    assert told["accuracy"]["value"] == pytest.approx(first / 12)
