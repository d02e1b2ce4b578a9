"""What the votes of a desk are worth: figures by hand, habits that were put in are found, and the command from end to end."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.desks import Votes, desk, item
from tether import stats
from tether.cli import run
from tether.collect.ballots import Ballot, Vote
from tether.collect.items import Item, make_item
from tether.collect.quality import Quality, assess, pair_outcomes
from tether.collect.quality_findings import findings
from tether.collect.quality_page import quality_page
from tether.report.html import render


def by_id(*items: Item) -> dict[str, Item]:
    return {i.id: i for i in items}


def person(q: Quality, name: str) -> Any:
    return next(p for p in q.people if p.name == name)


# -- by hand -------------------------------------------------------------------------------------------------------------


def test_agreement_by_hand() -> None:
    """Three items, two votes each: first/first, second/second, first/second. Each counted both ways round, so 12 ratings, 6 of each:
    disagreement 1/3 over 2 x 6 x 6 / (12 x 11) = 6/11, alpha = 1 - 11/18."""
    items, vote = [item(i) for i in range(3)], Votes()
    given = [("first", "first"), ("second", "second"), ("first", "second")]
    votes = [vote(i, name, o) for i, both in zip(items, given, strict=True) for name, o in zip("AB", both, strict=True)]
    q = assess(by_id(*items), votes)
    assert q.percent.value == pytest.approx(2 / 3)
    assert q.alpha.value == pytest.approx(7 / 18)
    assert (q.alpha.items, q.alpha.ratings) == (3, 6)
    assert q.fleiss.value == pytest.approx(1 / 3)  # (2/3 - 1/2) / (1 - 1/2)
    assert person(q, "A").agreement.value == pytest.approx(2 / 3)
    assert (q.items, q.voted_items, q.votes, q.repeats) == (3, 3, 6, 0)


def test_the_ordered_alpha_calls_a_tie_half_way() -> None:
    """Swapping one clear disagreement for a disagreement with a tie raises the ordered alpha more than the nominal one."""
    items = [item(i) for i in range(12)]

    def both(last: str) -> Quality:
        vote = Votes()
        votes = [vote(i, "A", "first" if n % 2 else "second") for n, i in enumerate(items)]
        return assess(
            by_id(*items), votes + [vote(i, "B", last if n == 0 else "first" if n % 2 else "second") for n, i in enumerate(items)]
        )

    clear, near = both("first"), both("tie")
    assert clear.ordinal_alpha.value is not None
    assert near.ordinal_alpha.value is not None
    assert near.ordinal_alpha.value > clear.ordinal_alpha.value
    assert near.ordinal_alpha.value > near.alpha.value  # type: ignore[operator]
    assert both("bad").ordinal_alpha.value == near.ordinal_alpha.value


def test_undone_votes_skips_and_repeats_are_no_opinions() -> None:
    one, vote = item(0), Votes()
    votes = [
        vote(one, "A", "first"),
        vote(one, "B", "first"),
        vote(one, "B", "second", undone=True),
        vote(one, "C", "skip"),
        vote(one, "A", "second", repeat=True),
    ]
    q = assess(by_id(one), votes)
    assert (q.percent.value, q.percent.ratings) == (1.0, 2)
    assert (q.votes, q.repeats) == (4, 1)
    assert person(q, "C").skips == 1
    assert person(q, "A").consistent.value == 0.0  # first, then second


def test_one_vote_an_item_has_no_agreement_and_is_told() -> None:
    items, vote = [item(i) for i in range(4)], Votes()
    q = assess(by_id(*items), [vote(i, "A", "first") for i in items])
    assert q.percent.value is None
    assert any("not known: no item has two ratings" in f.text and "--votes 2" in f.remedy for f in findings(q))
    assert json.loads(json.dumps(q.as_dict(), allow_nan=False))["agreement"]["alpha"]["why"] == "no item has two ratings"


def test_a_ranking_is_its_pairs() -> None:
    """1, 3, 2 against 1, 2, 2: of three pairs (0, 1) and (0, 2) agree, (1, 2) is second against tie."""
    three, vote = make_item("q", ["a", "b", "c"]), Votes()
    votes = [vote(three, "A", "ranking", ranks=(1, 3, 2), order=(2, 0, 1)), vote(three, "B", "ranking", ranks=(1, 2, 2), order=(0, 1, 2))]
    assert pair_outcomes(votes[0], 3) == {(0, 1): "first", (0, 2): "first", (1, 2): "second"}
    q = assess(by_id(three), votes)
    assert q.percent.value == pytest.approx(2 / 3)
    assert q.percent.items == 3
    assert q.alpha.low is None  # one prompt: no interval, however many pairs it has


def test_an_answer_without_a_rank_is_in_no_pair() -> None:
    vote = Votes()
    assert pair_outcomes(vote("x", "A", "ranking", ranks=(2, None, 1)), 3) == {(0, 2): "second"}
    assert pair_outcomes(vote("x", "A", "bad"), 3) == dict.fromkeys([(0, 1), (0, 2), (1, 2)], "bad")
    assert pair_outcomes(vote("x", "A", "skip"), 2) == {}


def test_the_side_shown_first_is_counted_by_the_order_shown() -> None:
    """first with order (0, 1) and second with order (1, 0) both chose the left side; a ranking counts its first against its last."""
    items, vote = [item(i) for i in range(4)], Votes()
    three = make_item("q", ["a", "b", "c"])
    votes = [
        vote(items[0], "A", "first", order=(0, 1)),
        vote(items[1], "A", "second", order=(1, 0)),
        vote(items[2], "A", "first", order=(1, 0)),
        vote(items[3], "A", "tie"),
        vote(three, "A", "ranking", ranks=(3, 2, 1), order=(2, 1, 0)),
        vote(three, "A", "ranking", ranks=(1, 1, 1), order=(2, 1, 0), repeat=True),
    ]
    q = assess(by_id(*items, three), votes)
    assert (q.position.first, q.position.n) == (3, 4)


def test_imported_votes_without_order_or_time_are_left_out_of_side_and_speed() -> None:
    items, vote = [item(i) for i in range(3)], Votes()
    q = assess(by_id(*items), [vote(i, "A", "first", order=(), seconds=None, shown_at=None, chosen_by="imported") for i in items])
    assert q.position.share is None
    assert person(q, "A").speed.median_s is None
    assert render(quality_page(q, None, desk="d")).count("<h3>") > 2


# -- models --------------------------------------------------------------------------------------------------------------


def test_models_have_the_closed_form_of_two() -> None:
    """Ten prompts, model a wins 7, b 2, one tie, whichever place their answers have: log(7.5 / 2.5)."""
    vote, items, votes = Votes(), [], []
    for i in range(10):
        swapped = i % 2 == 1
        models = ["b", "a"] if swapped else ["a", "b"]
        one = item(i, models=models)
        items.append(one)
        a_wins = "second" if swapped else "first"
        votes.append(vote(one, "A", "tie" if i == 9 else a_wins if i < 7 else {"first": "second", "second": "first"}[a_wins]))
    found = assess(by_id(*items), votes).models
    assert found is not None
    difference = found.difference("a", "b")
    assert difference is not None
    assert difference[0] == pytest.approx(math.log(3))
    more = assess(by_id(*items), [*votes] + [Votes()(v.item, "B", v.outcome) for v in votes]).models
    assert more is not None
    assert more.difference("a", "b") == pytest.approx(difference)  # a second vote on the same prompts is no new prompt


def test_items_without_models_have_no_strengths() -> None:
    one = item(0)
    assert assess(by_id(one), [Votes()(one, "A", "first")]).models is None


# -- habits that were put in are found -----------------------------------------------------------------------------------


def simulated(n: int = 120, seed: int = 0) -> tuple[dict[str, Item], list[Vote]]:
    """Four careful people (right with chance 0.9), one who always chooses left, one who guesses in a second."""
    rng, vote = random.Random(seed), Votes()
    items = [item(i, models=["good", "poor"]) for i in range(n)]
    votes = []
    for one in items:
        for name in ("Ana", "Ben", "Cem", "Dia", "Left", "Hasty"):
            order = (0, 1) if rng.random() < 0.5 else (1, 0)
            right = rng.random() < 0.9
            outcome = "first" if right else "second"
            seconds = rng.lognormvariate(3, 0.4)
            if name == "Left":
                outcome = ("first", "second")[order[0]]
            elif name == "Hasty":
                outcome, seconds = rng.choice(["first", "second"]), rng.lognormvariate(-2.5, 0.3)
            votes.append(vote(one, name, outcome, order=order, seconds=seconds))
    return by_id(*items), votes


def test_habits_are_found_and_nobody_else_is_accused() -> None:
    items, votes = simulated()
    q = assess(items, votes)
    told = [f.text for f in findings(q)]
    assert sum("Left chose the answer shown first in 100 %" in t for t in told) == 1
    assert sum("Hasty" in t and "not read" in t for t in told) == 1
    assert sum("Hasty gives the others' verdict in" in t for t in told) == 1
    for careful in ("Ana", "Ben", "Cem", "Dia"):
        assert not [t for t in told if t.startswith(careful) or f"of {careful}'s" in t]
    assert any("good is the strongest" in t for t in told)
    assert set(person(q, "Hasty").hasty_votes) <= {v.id for v in votes if v.annotator == "Hasty"}
    assert len(person(q, "Hasty").hasty_votes) > 100


def test_careful_people_alone_agree_as_their_accuracy_says() -> None:
    """Right with chance 0.9 each, two agree with chance 0.82: alpha is 1 - 0.18 / 0.5, though the right answer always stands first."""
    items, votes = simulated(400)
    q = assess(items, [v for v in votes if v.annotator in ("Ana", "Ben", "Cem", "Dia")])
    assert q.percent.value == pytest.approx(0.82, abs=0.03)
    assert q.alpha.value == pytest.approx(0.64, abs=0.05)
    assert q.fleiss.value == pytest.approx(0.64, abs=0.05)
    assert all(k.value == pytest.approx(0.64, abs=0.12) for k in q.cohen.values())


def test_the_order_in_which_answers_are_stored_does_not_matter() -> None:
    """Exchanging the two answers of every other item, and every vote on them, leaves all coefficients and intervals as they were."""
    items, votes = simulated(60)
    turned = set(list(items)[::2])
    other_items = {k: replace(v, answers=v.answers[::-1]) if k in turned else v for k, v in items.items()}
    other_votes = [replace(v, outcome={"first": "second", "second": "first"}[v.outcome]) if v.item in turned else v for v in votes]
    one, other = assess(items, votes), assess(other_items, other_votes)
    for name in ("percent", "alpha", "ordinal_alpha", "fleiss"):
        a, b = getattr(one, name), getattr(other, name)
        assert (a.value, a.low, a.high) == pytest.approx((b.value, b.low, b.high))
    for pair, kappa in one.cohen.items():
        assert kappa.value == pytest.approx(other.cohen[pair].value)


def test_the_coefficients_of_three_careful_people_are_near_each_other() -> None:
    """Alpha, Fleiss' kappa and the mean of Cohen's kappas are one number up to the sample's size."""
    rng, vote = np.random.default_rng(0), Votes()
    items = [item(i) for i in range(300)]
    votes = []
    for one in items:
        truth = rng.integers(0, 2)
        votes += [vote(one, n, ("first", "second")[truth if rng.random() < 0.9 else 1 - truth]) for n in "ABC"]
    q = assess(by_id(*items), votes)
    cohen = float(np.mean([k.value for k in q.cohen.values()]))  # type: ignore[misc]
    assert len(q.cohen) == 3
    assert q.alpha.value == pytest.approx(q.fleiss.value, abs=2e-3)
    assert q.alpha.value == pytest.approx(cohen, abs=5e-3)
    assert q.alpha.value == pytest.approx(0.64, abs=0.08)


# -- the command ---------------------------------------------------------------------------------------------------------


def voted(folder: Path, n: int = 24) -> list[Item]:
    """A desk of pairs from two models on which two people voted, always for the answer that says "right"; one differs on a few."""
    items = [item(i, models=["new", "old"]) for i in range(n)]
    made = desk(folder, items, votes_per_item=2, repeat_share=0.2)
    for name in ("Ana", "Ben"):
        annotator = made.annotator(name)
        while (shown := made.next(annotator.id)) is not None:
            left_is_right = shown.item.answers[shown.order[0]].text.startswith("right")
            number = int(shown.item.prompt.split()[-1])  # type: ignore[union-attr]
            if name == "Ben" and number % 6 == 0:
                left_is_right = not left_is_right
            made.vote(annotator.id, Ballot(shown.assignment, "left" if left_is_right else "right"))
    made.close()
    return items


def test_the_command_tells_of_people_models_and_a_judge(tmp_path: Path, capsys: Any) -> None:
    voted(tmp_path / "desk")
    page = tmp_path / "trust.html"
    code = run(["agreement", str(tmp_path / "desk"), "--judge", "shorter", "--out", str(page)])
    said = capsys.readouterr().out
    assert code == 0
    for words in ("Ana", "Ben", "Krippendorff", "new", "old", "judge shorter", "shorter chooses as most people do"):
        assert words in said
    html = page.read_text()
    for words in ("How far the votes can be trusted", "Annotators", "The models", "The judge shorter", "Calibration"):
        assert words in html
    assert "<script" not in html


def test_the_command_as_json_has_no_gaps_in_place_of_reasons(tmp_path: Path, capsys: Any) -> None:
    voted(tmp_path / "desk")
    assert run(["agreement", str(tmp_path / "desk"), "--json", "--judge", "longer"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["agreement"]["percent"]["value"] == pytest.approx(20 / 24)
    assert told["self_consistency"]["value"] == 1.0
    assert [a["name"] for a in told["annotators"]] == ["Ana", "Ben"]
    assert told["judge"]["counts"] == {"agree": 0, "differ": 20, "tie": 0, "undecided": 4, "invalid": 0}
    assert len(told["judge"]["worst"]) == 10
    assert {m["name"] for m in told["models"]} == {"new", "old"}


def test_mistakes_are_told(tmp_path: Path, capsys: Any) -> None:
    desk(tmp_path / "empty", [item(0)]).close()
    assert run(["agreement", str(tmp_path / "empty")]) == 2
    assert "nobody has voted yet" in capsys.readouterr().err
    assert run(["agreement", str(tmp_path / "nowhere")]) == 2
    assert "no desk" in capsys.readouterr().err
    voted(tmp_path / "desk", 3)
    assert run(["agreement", str(tmp_path / "desk"), "--judge", "nobody"]) == 2
    assert "there is no judge 'nobody'" in capsys.readouterr().err
    assert run(["agreement", str(tmp_path / "desk"), "--worst", "-1"]) == 2


def test_names_and_prompts_are_text_on_the_page() -> None:
    vote = Votes()
    one = make_item("<img src=x onerror=alert(1)>", ["<b>bold</b>", "plain"], models=["<i>m</i>", "n"])
    q = assess(by_id(one), [vote(one, "<script>alert(1)</script>", "first"), vote(one, "B", "second")])
    html = render(quality_page(q, None, desk="<d>"))
    assert "<script>alert" not in html
    assert "&lt;script&gt;" in html


def test_agreement_is_a_share_with_an_interval_over_prompts() -> None:
    items, votes = simulated(60)
    found = person(assess(items, votes), "Ana").agreement
    assert isinstance(found, stats.Interval)
    assert found.n == 60
    assert found.low < found.value < found.high
