"""Comparing two sides: pairing, shuffled sides, rates by hand, invalid apart; the command from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import save_tiny, tiny_config
from tether import stats
from tether.answers import Answer, read_answers, write_answers
from tether.cli import run
from tether.compare import Comparison, compare, pair_up
from tether.errors import UserError
from tether.judges import ScoreJudge, Verdict, make_judge


def answers(texts: list[str], prompts: list[Any] | None = None, **more: Any) -> list[Answer]:
    return [Answer(f"question {i}" if prompts is None else prompts[i], t, **more) for i, t in enumerate(texts)]


class Scripted:
    """Says what it is told about (a, b), whichever side it is shown first; remembers what it was shown."""

    name, person = "scripted", False

    def __init__(self, said: dict[tuple[str, str], str]) -> None:
        self.said, self.shown = said, []

    def __call__(self, prompts: Any, first: Any, second: Any) -> list[Verdict]:
        self.shown += list(zip(first, second, strict=True))
        return [
            Verdict(self.said[x, y]) if (x, y) in self.said else Verdict(self.said[y, x]).swapped()  # type: ignore[arg-type]
            for x, y in zip(first, second, strict=True)
        ]


def test_rates_by_hand() -> None:
    """5 won, 2 lost, 1 tied, 2 invalid: (5 + 0.5) / 8 = 68.75 %, Wilson over the 8 that were judged."""
    outcomes = ["a"] * 5 + ["b"] * 2 + ["tie"] + ["invalid"] * 2
    said = {(f"x{i}", f"y{i}"): o for i, o in enumerate(outcomes)}
    result = compare(Scripted(said), answers([f"x{i}" for i in range(10)]), answers([f"y{i}" for i in range(10)]))
    assert result.counts == {"a": 5, "b": 2, "tie": 1, "invalid": 2}
    assert result.win_rate is not None
    assert result.win_rate.value == pytest.approx(0.6875)
    assert (result.win_rate.low, result.win_rate.high) == pytest.approx(stats.wilson(5.5, 8))
    assert result.score_difference is None
    assert len(result.judged) == 8


@pytest.mark.parametrize("seed", range(4))
def test_exchanging_a_and_b_mirrors_the_result(seed: int) -> None:
    a, b = answers(["one two three", "one", "x y", "same"]), answers(["one", "one two", "p q", "same"])
    there, back = (compare(make_judge("longer"), *sides, seed=seed) for sides in ((a, b), (b, a)))
    assert there.win_rate is not None
    assert back.win_rate is not None
    assert there.win_rate.value == pytest.approx(1 - back.win_rate.value)
    assert there.score_difference is not None
    assert back.score_difference is not None
    assert there.score_difference.value == pytest.approx(-back.score_difference.value)
    assert there.counts["a"] == back.counts["b"]


def test_sides_are_shuffled_recorded_and_turned_back() -> None:
    """A judge that always takes the first place: about half for each side, and the bias is pointed out."""
    first = type("First", (), {"name": "first", "person": False, "__call__": lambda self, p, a, b: [Verdict("a")] * len(p)})()
    n = 200
    result = compare(first, answers([f"x{i}" for i in range(n)]), answers([f"y{i}" for i in range(n)]), seed=1)
    assert result.win_rate is not None
    assert 0.35 < result.win_rate.value < 0.65
    assert result.first_wins == (n, n)
    assert result.position_matters
    assert 60 < sum(p.swapped for p in result.pairs) < 140
    for row, pair in zip(result.rows(), result.pairs, strict=True):
        assert (row["winner"] == "b") == pair.swapped
        assert row["shown_first"] == ("b" if pair.swapped else "a")
    fair = compare(make_judge("longer"), answers(["w " * (i % 7) for i in range(n)]), answers(["w " * (i % 5) for i in range(n)]))
    assert not fair.position_matters


def test_several_answers_to_a_prompt_count_as_one_prompt() -> None:
    """Two prompts with 10 answers each are two independent values, however many pairs there are."""
    prompts = ["p"] * 10 + ["q"] * 10
    result = compare(make_judge("longer"), answers(["a b"] * 20, prompts), answers(["a"] * 10 + ["a b c"] * 10, prompts))
    assert result.win_rate is not None
    assert result.win_rate.n == 2
    assert result.win_rate.value == 0.5
    assert result.score_difference is not None
    assert result.score_difference.n == 2
    assert result.as_dict()["pairs"] == 20
    assert result.as_dict()["prompts"] == 2


def test_lengths_stand_beside_the_rate() -> None:
    a = [Answer("p", "one two three", "stop", 5, 4), Answer("q", "one", "length", 5, 2)]
    b = [Answer("p", "one", "stop", 5, 2), Answer("q", "one", "stop", 5, 2)]
    result = compare(make_judge("longer"), a, b)
    words, tokens = result.length(), result.length("tokens")
    assert words is not None
    assert tokens is not None
    assert (words[0], words[1], words[2].value) == (2.0, 1.0, 1.0)
    assert (tokens[0], tokens[1], tokens[2].value) == (3.0, 2.0, 1.0)
    assert result.longer_wins == (1, 1)
    assert (result.cut("a"), result.cut("b")) == (1, 0)
    assert compare(make_judge("longer"), answers(["x"]), answers(["y"])).length("tokens") is None


def test_one_prompt_has_no_interval_but_valid_json() -> None:
    result = compare(make_judge("longer"), answers(["a b"]), answers(["a"]))
    told = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert told["score"]["difference"]["low"] is None


def test_nothing_judged_is_no_rate() -> None:
    result = compare(ScoreJudge("none", lambda p, a: [None] * len(a)), answers(["x"]), answers(["y"]))
    assert result.win_rate is None
    assert result.counts["invalid"] == 1


# -- pairing -----------------------------------------------------------------------------------------------------------


def test_pairs_are_made_by_prompt_whatever_the_order_or_form() -> None:
    chat = [{"role": "user", "content": "p"}]
    pairs = pair_up(answers(["ap", "aq", "ap2"], ["p", "q", "p"]), answers(["bq", "bp", "bp2"], ["q", chat, "p"]))
    assert [(a.text, b.text) for _, a, b in pairs] == [("ap", "bp"), ("aq", "bq"), ("ap2", "bp2")]


def test_answers_without_prompts_pair_by_their_number() -> None:
    pairs = pair_up(answers(["a1", "a2"], [None, None]), answers(["b1", "b2"]))
    assert [(p, a.text, b.text) for p, a, b in pairs] == [("question 0", "a1", "b1"), ("question 1", "a2", "b2")]
    with pytest.raises(UserError, match="2 and 3 answers"):
        pair_up(answers(["1", "2"], [None, None]), answers(["1", "2", "3"]))


@pytest.mark.parametrize("a, b", [(["p", "q"], ["p"]), (["p"], ["p", "q"]), (["p", "p"], ["p", "q"])])
def test_answers_to_different_prompts_are_refused(a: list[str], b: list[str]) -> None:
    with pytest.raises(UserError, match="no partner"):
        pair_up(answers(a, a), answers(b, b))


# -- files and command -------------------------------------------------------------------------------------------------


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


def test_answers_survive_their_file(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "p"}]
    given = [Answer("p", "é\n\u2028x", "stop", 3, 4, 1), Answer(chat, "", "length", 1, 1)]
    write_answers(tmp_path / "a.jsonl", given)
    assert [a.as_row() for a in read_answers(str(tmp_path / "a.jsonl"))] == [a.as_row() for a in given]


@pytest.mark.parametrize("name", ["completion", "answer", "response", "output"])
def test_usual_column_names_are_read(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": "p", name: "x"}, {"prompt": "q", name: [{"role": "assistant", "content": "y"}]}]
    assert [a.text for a in read_answers(jsonl(tmp_path / "a.jsonl", rows))] == ["x", "y"]


def test_a_conversation_is_a_prompt_and_its_answer(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "x"}]
    assert read_answers(jsonl(tmp_path / "a.jsonl", [{"messages": turns}]))[0].prompt == turns[:1]


@pytest.mark.parametrize(
    "row, words",
    [
        ({"prompt": "p"}, "no answer"),
        ({"prompt": "p", "completion": 4}, "text"),
        ({"completion": "no prompt here"}, "no prompt, though others"),
        ('{"prompt": "p", "comp', "cannot be read"),
        ({"messages": [{"role": "user", "content": "p"}]}, "does not end with the assistant"),
    ],
)
def test_rows_that_are_no_answers_are_refused_with_their_line(tmp_path: Path, row: Any, words: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "completion": "fine"}, row])
    with pytest.raises(UserError, match=words) as error:
        read_answers(path)
    assert "a.jsonl:2" in str(error.value)


def test_two_files_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [f"q{i}" for i in range(12)]
    a = jsonl(tmp_path / "a.jsonl", [{"prompt": p, "completion": "so good, so fine"} for p in prompts])
    b = jsonl(tmp_path / "b.jsonl", [{"prompt": p, "completion": "bad"} for p in prompts])
    out = tmp_path / "pairs.jsonl"
    assert run(["compare", a, b, "--judge", "vader", "--json", "--out", str(out)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["counts"] == {"a": 12, "b": 0, "tie": 0, "invalid": 0}
    assert told["win_rate"]["value"] == 1.0
    assert told["win_rate"]["low"] > 0.7
    assert [json.loads(line)["winner"] for line in out.read_text().splitlines()] == ["a"] * 12
    assert run(["compare", a, b, "--judge", "longer", "--samples", "2"]) == 0
    shown = capsys.readouterr().out
    assert "A is better." in shown
    assert "so good, so fine" in shown
    assert "100.0%" in shown


def test_two_models_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same model on both sides and the same seed: the same answers, so every pair is a tie."""
    folder = str(save_tiny(tmp_path / "model"))
    prompts = jsonl(
        tmp_path / "prompts.jsonl", [{"prompt": "w10 w11"}, {"prompt": [{"role": "user", "content": "w12"}]}, {"prompt": "w13"}]
    )
    words = ["compare", folder, folder, "--prompts", prompts, "--judge", "longer", "--json", "--max-new-tokens", "8", "--precision", "fp32"]
    assert run(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["counts"]["tie"] == 3
    assert told["length"]["tokens"]["difference"]["value"] == 0
    other = str(save_tiny(tmp_path / "other", tiny_config(), seed=1))
    assert run(["compare", folder, other, *words[3:], "--n", "4", "--judge", "regex:w[1-4]", "--max-new-tokens", "2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["pairs"] == 12
    assert told["counts"]["tie"] < 12


def test_a_model_against_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save_tiny(tmp_path / "model"))
    prompts = jsonl(tmp_path / "p.jsonl", [{"prompt": "w10"}, {"prompt": "w11"}])
    file = jsonl(tmp_path / "a.jsonl", [{"prompt": f"w{i}", "completion": "w " * 30} for i in (9, 10, 11)])
    assert run(["compare", file, folder, "--prompts", prompts, "--judge", "longer", "--json", "--max-new-tokens", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"] == {"a": 2, "b": 0, "tie": 0, "invalid": 0}


def assert_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    """The words are refused with `told`, over two files of one answer each."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl"):
        jsonl(tmp_path / name, [{"prompt": "p", "completion": "x"}])
    assert run(words) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "words, told",
    [
        (["compare", "a.jsonl", "b.jsonl"], "no judge was named"),
        (["compare", "a.jsonl", "b.jsonl", "--judge", "nobody"], "there is no judge"),
        (["compare", "a.jsonl", "gone", "--judge", "longer"], "needs prompts"),
        (["compare", "a.jsonl", "b.jsonl", "--judge", "longer", "--margin", "-1"], "margin"),
        (["compare", "a.jsonl", "b.jsonl", "--judge", "longer", "--temperature", "-1"], "temperature"),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert_one_sentence(tmp_path, monkeypatch, capsys, words, told)


def test_a_judge_that_decides_nothing_ends_in_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "judge_of_nothing.py").write_text("def f(prompts, completions):\n    return [None] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "completion": "x"}])
    assert run(["compare", "a.jsonl", "a.jsonl", "--judge", "judge_of_nothing:f"]) == 2


def test_comparisons_hold_what_was_asked() -> None:
    result = compare(make_judge("longer"), answers(["x"]), answers(["y z"]), names=("old", "new"), seed=7)
    assert isinstance(result, Comparison)
    assert (result.name_a, result.name_b, result.judge, result.seed) == ("old", "new", "longer", 7)
