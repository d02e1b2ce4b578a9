"""The demo's world keeps its own rules, and the whole story runs from choices to the page."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest

from tether import cli
from tether.demo import online, story
from tether.demo.lessons import from_choices, from_practice
from tether.demo.online import Trial
from tether.demo.sampled import Answered, Measure, Side, answers_to, by_side, measure
from tether.demo.sizes import QUICK, TINY, Clock
from tether.demo.world import DemoData, choice_probability, length_cost, read_rows, sentiment, true_taste
from tether.errors import UserError
from tether.report import report_html
from tether.stats import Interval

DATA = DemoData.shipped()
PAIRS = [*read_rows(DATA.pairs_train), *read_rows(DATA.pairs_test)]


# The world --------------------------------------------------------------------------------------------------------------------


def test_length_costs_beyond_forty_tokens() -> None:
    """45 tokens are 5 too many: 5 x 0.04 = 0.2."""
    assert [length_cost(n) for n in (1, 40)] == [0, 0]
    assert math.isclose(length_cost(45), 0.2)
    assert math.isclose(true_taste("", 65), -1.0)


def test_people_follow_sentiment_and_lean_to_length() -> None:
    """4 x 0.3 + 0.05 x 6 = 1.5; the length cost of 50 tokens plays no part."""
    assert math.isclose(choice_probability(0.4, 50, 0.1, 44), 1 / (1 + math.exp(-1.5)))
    assert math.isclose(choice_probability(0.4, 50, 0.1, 44) + choice_probability(0.1, 44, 0.4, 50), 1.0)


def test_sentiment_tells_cheerful_from_gloomy() -> None:
    assert sentiment("What a wonderful, happy day!") > 0.7
    assert sentiment("It was horrible and sad.") < -0.5
    assert sentiment("The table has four legs.") == 0


# The shipped data -------------------------------------------------------------------------------------------------------------


def test_shipped_data_has_its_size() -> None:
    assert [len(read_rows(p)) for p in (DATA.pairs_train, DATA.pairs_test, DATA.prompts_test)] == [400, 100, 128]
    assert sum(p.stat().st_size for p in (DATA.pairs_train, DATA.pairs_test, DATA.prompts_test)) < 600_000


def test_training_and_held_out_prompts_are_apart() -> None:
    def asked(path: Path) -> set[str]:
        return {row["prompt"][0]["content"] for row in read_rows(path)}

    assert len(asked(DATA.pairs_train)) == 400
    assert len(asked(DATA.prompts_test)) == 128
    assert not asked(DATA.pairs_train) & (asked(DATA.pairs_test) | asked(DATA.prompts_test))
    assert all(p.endswith("Answer in one short sentence.") for p in asked(DATA.pairs_train) | asked(DATA.prompts_test))


def test_shipped_choices_follow_the_worlds_rule() -> None:
    for row in PAIRS:
        for side in ("chosen", "rejected"):
            assert math.isclose(row[f"{side}_sentiment"], sentiment(row[side][0]["content"]), abs_tol=1e-4)
            assert 10 <= row[f"{side}_tokens"] <= 48
        p = choice_probability(row["chosen_sentiment"], row["chosen_tokens"], row["rejected_sentiment"], row["rejected_tokens"])
        assert math.isclose(p, row["choice_probability"], abs_tol=1e-4)


def test_people_also_chose_between_answers_that_were_cut() -> None:
    """Of all answers sampled 15 % were cut at 48 tokens. A reward model that never saw one marks down whatever is cut."""
    lengths = [row[f"{side}_tokens"] for row in PAIRS for side in ("chosen", "rejected")]
    assert 0.10 < sum(n == 48 for n in lengths) / len(lengths) < 0.20


def test_shipped_choices_are_as_noisy_as_the_rule_says() -> None:
    """Of 500 choices, sum max(p, 1-p) are expected on the likelier side, give or take 3 standard deviations."""
    likelier = sum(row["choice_probability"] > 0.5 for row in PAIRS)
    best = [max(row["choice_probability"], 1 - row["choice_probability"]) for row in PAIRS]
    assert abs(likelier - sum(best)) < 3 * math.sqrt(sum(p * (1 - p) for p in best))


def test_shipped_answers_are_fit_to_print() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
    try:
        from make_demo_pairs import READABLE, UNWANTED  # type: ignore[import-not-found,unused-ignore]
    finally:
        sys.path.pop(0)
    for row in PAIRS:
        for side in ("chosen", "rejected"):
            text = row[side][0]["content"]
            assert not UNWANTED.search(text)
            assert READABLE.match(text)


# The measurement --------------------------------------------------------------------------------------------------------------


def test_true_score_is_sentiment_less_the_cost_of_length() -> None:
    """One answer 'good' (VADER 0.4404) of 10 tokens becomes one of 50: the true score falls by 10 x 0.04."""
    before = Side([Answered("good", 10, True)] * 3, scores=[0.0] * 3)
    found = measure(before, Side([Answered("good", 50, False)] * 3, scores=[1.0] * 3))
    assert math.isclose(found["true"].before.value, 0.4404)
    assert math.isclose(found["true"].gain.value, -0.4)
    assert found["sentiment"].gain[:3] == (0, 0, 0)
    assert found["length"].gain.value == 40
    assert found["reward"].gain.value == 1


def test_a_gain_is_paired_over_prompts() -> None:
    """Prompts differ by 10, the gain by 0.1 at most: the interval knows the second only."""
    before = [float(10 * i) for i in range(20)]
    gain = Measure.of("m", "u", before, [x + 1 + 0.1 * (i % 2) for i, x in enumerate(before)]).gain
    assert 0.99 < gain.low < gain.value < gain.high < 1.11


def made(value: float, low: float, high: float) -> Measure:
    one = Interval(0.0, 0.0, 0.0, 9)
    return Measure("m", "u", one, one, Interval(value, low, high, 9))


@pytest.mark.parametrize(
    "felt, length, true, said, unsaid",
    [
        ((0.2, 0.1, 0.3), (20, 15, 25), (-0.4, -0.5, -0.3), "more cheerful.*longer.*got worse.*stand-in rises", "the people would agree"),
        ((0.2, 0.1, 0.3), (0, -1, 1), (0.2, 0.1, 0.3), "more cheerful.*the people would agree", "longer|worse"),
        ((0.2, 0.1, 0.3), (20, 15, 25), (-0.1, -0.2, 0.1), "more cheerful.*longer.*did not rise with", "got worse|no clear change"),
        ((0.1, -0.1, 0.3), (0, -1, 1), (0.1, -0.1, 0.3), "no change that stands out.*no clear change", "cheerful|longer"),
        ((-0.2, -0.3, -0.1), (20, 15, 25), (-0.4, -0.5, -0.3), "it fell.*longer.*got worse", "cheerful"),
    ],
)
def test_the_result_is_told_whatever_it_is(
    felt: tuple[float, float, float], length: tuple[float, float, float], true: tuple[float, float, float], said: str, unsaid: str
) -> None:
    measures = {"sentiment": made(*felt), "length": made(*length), "true": made(*true), "reward": made(1, 0.5, 1.5)}
    words = " ".join(f["text"] for f in from_choices(measures, (0.1, 0.6), 128))
    assert re.search(said, words)
    assert not re.search(unsaid, words)


def test_answers_to_one_prompt_count_as_one() -> None:
    """Two prompts with two answers each: (1, 3) and (5, 7) are the means 2 and 6."""
    side = Side([Answered("", n, True) for n in (1, 3, 5, 7)], 2, scores=[0.0, 1.0, 2.0, 3.0])
    assert side.values("length") == [2, 6]
    assert side.values("reward") == [0.5, 2.5]


def side(reward: float, tokens: int, kl: float) -> Side:
    """20 prompts whose values differ a little, so that intervals have a width."""
    return Side([Answered("good", tokens + i % 2, True) for i in range(20)], 1, [reward + 0.01 * (i % 3) for i in range(20)], [kl] * 20)


@pytest.mark.parametrize(
    "free, tied, said, unsaid",
    [
        ((1.0, 62, 9.0), (0.6, 38, 2.0), "no tether.*reward hacking.*kept it from", "cost more"),
        ((1.0, 38, 9.0), (0.6, 62, 2.0), "tethered.*reward hacking.*cost more than it kept", "kept it from"),
        ((1.0, 38, 9.0), (0.6, 38, 2.0), "No difference that stands out", "hacking|kept it from|cost more"),
    ],
)
def test_what_the_tether_did_is_told_whatever_it_is(
    free: tuple[float, int, float], tied: tuple[float, int, float], said: str, unsaid: str
) -> None:
    sides = {Trial("grpo", False): side(*free), Trial("grpo", True): side(*tied)}
    words = " ".join(f["text"] for f in from_practice(side(0.0, 30, 0.0), sides))
    assert re.search(said, words)
    assert not re.search(unsaid, words)


def test_the_trials_differ_in_the_tether_alone(tmp_path: Path) -> None:
    free, tied = (online.settings(Trial("grpo", t), tmp_path, tmp_path, tmp_path, QUICK, 0) for t in (False, True))
    assert {k for k in free | tied if free.get(k) != tied.get(k)} == {"beta", "watch_kl"}
    assert (free["beta"], tied["beta"]) == (0, online.TETHER)


def test_time_left_follows_the_pace_of_this_machine() -> None:
    clock = Clock({"a": 10.0, "b": 20.0, "c": 30.0})
    assert clock.left() == 60
    clock.took |= {"fetching": 500.0, "a": 20.0}
    assert clock.left() == 100


# The story --------------------------------------------------------------------------------------------------------------------


def test_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not an empty folder"):
        story.free_folder(str(tmp_path))


def test_next_free_folder_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert story.free_folder(None) == Path("runs/demo")
    for name in ("demo", "demo-2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "x").touch()
    assert story.free_folder(None) == Path("runs/demo-3")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("told") / "demo"
    assert cli.run(["demo", "--tiny", "--run", str(folder)]) == 0
    return folder


def test_tiny_demo_goes_the_whole_road(told: Path) -> None:
    comparison = json.loads((told / "comparison.json").read_text())
    assert [m["name"] for m in comparison["measures"]] == ["Sentiment", "True score", "Length", "Reward model's score"]
    for run in ("reward", "dpo"):
        assert (told / run / "summary.json").is_file()
        assert (told / run / "model" / "model.safetensors").is_file()
        assert not (told / run / "checkpoints").exists()
    held_out = json.loads((told / "reward" / "summary.json").read_text())["held_out"]
    assert held_out["accuracy"]["n"] == TINY.test_pairs
    assert json.loads((told / "reward" / "summary.json").read_text())["prompts"] == TINY.reward_pairs
    assert json.loads((told / "dpo" / "summary.json").read_text())["pairs"] == TINY.pairs
    for trial in online.trials(TINY.methods):
        assert json.loads((told / trial.folder / "summary.json").read_text())["steps"] == TINY.steps
        metrics = [json.loads(line) for line in (told / trial.folder / "metrics.jsonl").read_text().splitlines()]
        assert all({"rewards/model/mean", "rewards/true_score/mean", "objective/kl"} <= set(row) for row in metrics)
        assert all(math.isclose(row["reward"], row["rewards/model/mean"]) for row in metrics)  # the true score only watches


def test_tiny_demos_numbers_follow_from_its_samples(told: Path) -> None:
    comparison = json.loads((told / "comparison.json").read_text())
    rows = [json.loads(line) for line in (told / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == TINY.prompts * TINY.samples
    names = {"Sentiment": "sentiment", "True score": "true score", "Length": "tokens", "Reward model's score": "reward model"}
    for m in comparison["measures"]:
        before, after = ([row[side]["numbers"][names[m["name"]]] for row in rows] for side in ("before", "after"))
        assert math.isclose(m["before"][0], sum(before) / len(before), abs_tol=1e-3)
        assert math.isclose(m["gain"][0], sum(after) / len(after) - sum(before) / len(before), abs_tol=1e-3)
        assert m["gain"][1] <= m["gain"][0] <= m["gain"][2]
    ends = {m["name"]: m["values"] for m in comparison["practice"]["measures"]}
    for trial in online.trials(TINY.methods):
        lengths = [row[trial.name]["numbers"]["tokens"] for row in rows]
        assert math.isclose(ends["Length"][trial.name][0], sum(lengths) / len(lengths), abs_tol=1e-3)
        far = sum(row[trial.name]["numbers"]["nats from the start"] for row in rows) / len(rows)
        assert math.isclose(ends["Distance from the start"][trial.name][0], math.sqrt(max(far, 0)), abs_tol=2e-3)
    assert sum(row["before"]["numbers"]["nats from the start"] for row in rows) == pytest.approx(0, abs=1e-2)


def test_tiny_demos_page_tells_all_three_parts(told: Path) -> None:
    page = (told / "report.html").read_text()
    for part in (
        "Learning from the choices: DPO",
        "with and without a tether",
        "PPO, tethered",
        "Where the margin comes from",
        "On the way there",
    ):
        assert part in page
    assert page == report_html(told)


def test_demo_writes_nothing_beside_the_package(told: Path) -> None:
    assert {p.suffix for p in DATA.pairs_train.parent.iterdir()} == {".jsonl"}
    assert (told / "data" / "pairs_train.jsonl").is_file()


def test_answers_read_prompt_by_prompt_come_back_to_their_sides() -> None:
    a, b = ([Answered(f"{name}{i}", i + 1, True) for i in range(n)] for name, n in (("a", 4), ("b", 2)))
    in_a_row = [x.text for i in range(2) for x in answers_to(i, ["p", "q"], [a, b])]
    assert in_a_row == ["a0", "a1", "b0", "a2", "a3", "b1"]
    values = dict(zip(in_a_row, range(6), strict=True))
    assert by_side([values[t] for t in in_a_row], ["p", "q"], [a, b]) == [[values[x.text] for x in side] for side in (a, b)]
