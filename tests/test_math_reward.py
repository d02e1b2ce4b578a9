"""The math reward: right answers score, wrong and odd ones do not, within a time limit and wherever it is called from."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import psutil
import pytest

from tether.errors import UserError
from tether.rewards import math_worker
from tether.rewards.math import MathReward
from tether.rewards.math_exact import NotExact, TooBig, exact
from tether.rewards.math_extract import extract
from tether.rewards.math_sets import same_set
from tether.rewards.math_text import clean
from tether.rewards.worker import Worker, WorkerDied, WorkerLate

HERE = Path(__file__).parent
FILE = Path(os.environ.get("TETHER_CASES_MATH_PAIRS") or HERE / "cases/math_pairs.jsonl")
OWN = HERE / "cases/math_pairs_more.jsonl"
MAX_S = 5.0


def load(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


@pytest.fixture(scope="module")
def math() -> Iterator[MathReward]:
    reward = MathReward()
    reward.verify("1", "1")  # starting the helper is not part of a pair's time
    yield reward
    reward.close()


def verdict(math: MathReward, case: dict[str, Any], swapped: bool) -> bool | None:
    start = time.monotonic()
    answer, gold = (case["gold"], case["answer"]) if swapped else (case["answer"], case["gold"])
    found = math.verify(answer, gold, completion=case["form"] == "completion")
    assert time.monotonic() - start < MAX_S, case["id"]
    return found.equal


@pytest.mark.parametrize("path", [FILE, OWN], ids=["handed", "own"])
def test_every_firm_pair_gets_its_verdict_in_both_orders(math: MathReward, path: Path) -> None:
    """Two answers are compared alike whichever is the gold; a completion has only one order. An empty gold cannot be judged."""
    wrong = []
    for case in load(path):
        orders = [False] if case["form"] == "completion" else [False, True]
        for swapped in orders:
            found = verdict(math, case, swapped)
            if case["firm"] and bool(found) != case["equal"]:
                wrong.append((case["id"], "swapped" if swapped else "as given", case["answer"][:80], case["gold"][:80], found))
    assert not wrong


def test_hostile_answers_cost_seconds_not_the_run(math: MathReward) -> None:
    for answer in (
        r"\sqrt{2}^{10^{10}}",
        "9^{9^{9^9}}",
        r"\sum_{k=1}^{10^{12}} \sin(k^k)",
        "(" * 5000 + "1",
        r"\boxed{" * 300,
        "x" * 20000,
    ):
        start = time.monotonic()
        assert math.verify(answer, "4").equal is False
        assert time.monotonic() - start < MAX_S
    assert math.verify("2+2", "4").equal is True


# -- extraction --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"First \boxed{9}, then \boxed{\frac{3}{\sqrt{4}}}.", r"\frac{3}{\sqrt{4}}"),
        (r"\boxed{3", r"\boxed{3"),
        (r"\boxed{7} and the rest is cut \boxed{3", "7"),
        (r"\boxed{\text{a \} brace}}", r"\text{a \} brace}"),
        (r"<think>\boxed{1}</think> so \boxed{2}", "2"),
        (r"<think>\boxed{1}", None),
        (r"<think>a</think><think>\boxed{1}", None),
        ("no number here", None),
        (r"\boxed{ }", None),
        ("<answer>5</answer> or <answer>6</answer>", "6"),
        ("12 apples\n#### 1,250\n", "1,250"),
        ("We add 3 and 4, which makes 7 apples.", "7"),
        ("It is 11 5/6 m", "11 5/6"),
        (r"Hence x = \frac{3}{4}.", r"\frac{3}{4}"),
        ("The answer is x = 3.", "x = 3"),
        ("", None),
    ],
)
def test_the_answer_is_found_by_rule(text: str, answer: str | None) -> None:
    assert extract(text) == answer


CHAIN = r"We get $3 \times 4 = 12$ and so on."


@pytest.mark.parametrize(
    "ending, answer",
    [
        (" A: 26", "26"), ("\nA: 26", "26"), ("\n**A:** 26", "26"), ("\nAnswer: 26", "26"), ("\n**Answer**: 26", "26"), (" answer is 26", "26"),
        ("\n### Final Answer\n26", "26"), ("\nAns. 26", "26"), (" The answer should be 26.", "26"), (" The final answer is therefore 26.", "26"),
        (" The answer to the question is **26** apples.", "26 apples"), (" This gives an answer of 26.", "26"), ("\nFinal Answer - 26", "26"),
        (" The answers are 2 and 3.", "2 and 3"), (" The answer is:\n$$\n26\n$$", "26"), ("\nA: She has 26 apples left.", "26"),
        (" The answer is 26 because $2 \\cdot 13 = 26$.", "26"), ("\nA: 12\nB: 26\nAnswer: B", "B"), (" The answer is pi over 2.", "pi over 2"),
    ],
)  # fmt: skip
def test_a_marked_answer_goes_before_mathematics_bold_and_numbers_wherever_they_stand(ending: str, answer: str) -> None:
    for before in (CHAIN, CHAIN + " **Step 2: add 14.**", "He pays $5 for 2, and $17/$8.50 is 2.", "Answer: Let us see, 3 + 4 is 7."):
        assert extract(before + ending) == answer
    for after in (r" (Here $5 + 6 = 11$.)", "\nIt took 3 steps, see **4**."):
        if not ending.lstrip("\n *").startswith("A:"):  # a label is one at the end alone
            assert extract(CHAIN + ending + after) == answer


@pytest.mark.parametrize(
    "text, answer",
    [
        (CHAIN + " Then she has 26 left.", "26"),
        (CHAIN + "\nSo it is **26**.", "26"),
        ("**Step 2:** add 14.\n" + CHAIN, r"3 \times 4 = 12"),
        ("It is **26**, and $x = 5$.", "x = 5"),
        ("So $x = 5$ after 3 steps.", "x = 5"),
        ("The value of $x$ is 5.", "5"),
        ("A ratio of 2:3.", "2:3"),
        ("A: 12\nB: 26\n" + CHAIN, r"3 \times 4 = 12"),
        ("It costs $5125-$8096 or $4.00 each, so she needs $2", "2"),
        ("Answer: First we see that $3 + 4 = 7$. Then she has 26.", "26"),
        ("The side is $8$. [asy] draw((0,0)--(3,5)); [/asy]", "8"),
    ],
)
def test_without_a_mark_what_stands_last_is_the_answer(text: str, answer: str) -> None:
    assert extract(text) == answer


def test_only_the_named_rules_look() -> None:
    text = CHAIN + " **14** more. She has 26."
    assert [extract(text, [rule]) for rule in ("math", "bold", "number", "phrase")] == [r"3 \times 4 = 12", "14", "26", None]  # type: ignore[list-item]
    assert extract(text, ["number", "math"]) == "26"
    assert extract(CHAIN, ["bold", "math"]) == r"3 \times 4 = 12"


def test_rules_can_be_chosen(math: MathReward) -> None:
    strict = MathReward(rules=["box"])
    assert strict.verify("It is 4.", "4", completion=True).how == "no answer"
    assert strict.verify(r"It is \boxed{4}.", "4", completion=True).equal is True
    assert math.verify("It is 4.", "4", completion=True).equal is True
    with pytest.raises(UserError, match="there is no rule 'boxes'"):
        MathReward(rules=["boxes"])  # type: ignore[list-item]
    strict.close()


# -- exact numbers and notation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, value",
    [("1/2", "1/2"), ("0.125", "1/8"), ("45%", "9/20"), ("-2^{2}", "-4"), ("2^{-3}", "1/8"), (r"\frac{1}{2}^{2}", "1/4"), ("2(3+4)", "14"),
     (r"\binom{5}{2}", "10"), ("3!", "6"), (r"\sqrt{49}", "7"), ("4^{1/2}", "2"), ("--3", "3"), ("1/2/2", "1/4"), ("5" * 5000, "5" * 5000)],
)  # fmt: skip
def test_exact_values(text: str, value: str) -> None:
    if len(value) < 4000:
        assert exact(text) == Fraction(value)
    else:  # more digits than int() reads at once
        assert exact(text) == 5 * (10**5000 - 1) // 9


@pytest.mark.parametrize(
    "text", ["", "x", "1/0", "2 3", "(1", "1)", r"\sqrt{2}", "0^{0}", "1,2", "(-4)^{1/2}", "(" * 200 + "1" + ")" * 200]
)
def test_what_is_no_rational_number(text: str) -> None:
    with pytest.raises(NotExact):
        exact(text)


@pytest.mark.parametrize("text", ["10^{10^{8}}", "9999!", r"\binom{9999}{5}", "2^{1000000}"])
def test_what_is_too_big_to_write(text: str) -> None:
    with pytest.raises(TooBig):
        exact(text)


def test_cleaning_twice_is_cleaning_once() -> None:
    for case in [*load(FILE), *load(OWN)]:
        for text in (case["answer"], case["gold"]):
            assert clean(clean(text)) == clean(text)


@pytest.mark.parametrize(
    "a, b, same",
    [
        (r"(0,1)\cup(1,2)", r"(0,2)\setminus\{1\}", True),
        ("x<1", "1>x", True),
        ("x<1", "y<1", False),
        (r"0<x\le 1", "(0,1]", True),
        (r"x\ne 0", r"(-\infty,0)\cup(0,\infty)", True),
        (r"[0,1]\cap[1,2]", r"\{1\}", True),
        ("[1,0]", r"\emptyset", True),
        (r"(-\sqrt{2},\sqrt{2})", r"x>-\sqrt{2} and x<\frac{2}{\sqrt{2}}", True),
        ("(a,b)", "[a,b]", None),
    ],
)
def test_sets_of_numbers(a: str, b: str, same: bool | None) -> None:
    assert same_set(a, b) is same


def test_settings(math: MathReward) -> None:
    assert math.verify("3.1416", r"\pi").equal is False
    near = MathReward(tolerance=1e-3, percent="unit")
    assert near.verify("0.3333", "1/3").equal is True
    assert near.verify("0.33", "1/3").equal is False
    assert near.verify("45%", "45").equal is True
    assert near.verify("45%", "0.45").equal is False
    near.close()


# -- as a reward -------------------------------------------------------------------------------------------------------


def test_it_scores_completions_against_a_column(math: MathReward) -> None:
    golds = ["4", "So 2+2.\n#### 4", r"\boxed{4}", None, "", 4]
    values = math(["q"] * 6, ["It is 4"] * 6, answer=golds)
    assert values == [1.0, 1.0, 1.0, None, None, 1.0]
    chat = [[{"role": "assistant", "content": r"\boxed{5}"}]]
    assert math(["q"], chat, solution=["4"]) == [0.0]
    assert math(["q"], [r"so</think> \boxed{4}"], answer=["4"], opened=["<think>"]) == [1.0]
    assert math(["q"], [r"never closed \boxed{4}"], answer=["4"], opened=["<think>"]) == [0.0]
    with pytest.raises(UserError, match="needs a column 'answer' or 'solution'"):
        math(["q"], ["4"], level=[1])
    with pytest.raises(UserError, match="needs a column 'wanted'"):
        MathReward(column="wanted")(["q"], ["4"], answer=["4"])


# -- from anywhere -----------------------------------------------------------------------------------------------------

TWENTY = [(str(k), str(k if k % 2 else k + 1)) for k in range(20)]
WANTED = [k % 2 == 1 for k in range(20)]


def verify_all(reward: MathReward) -> list[bool | None]:
    return [reward.verify(a, g).equal for a, g in TWENTY]


def test_threads_loops_and_processes_give_the_same_verdicts(math: MathReward, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("alarm", "setitimer", "SIGALRM"):
        monkeypatch.delattr(signal, name)  # as on Windows
    with ThreadPoolExecutor(5) as threads:
        assert list(threads.map(lambda pair: math.verify(*pair).equal, TWENTY)) == WANTED

    async def in_loop() -> list[bool | None]:
        return [v.equal for v in await asyncio.gather(*(asyncio.to_thread(math.verify, a, g) for a, g in TWENTY))]

    async def blocking_the_loop() -> list[bool | None]:
        return verify_all(math)

    assert asyncio.run(in_loop()) == WANTED
    assert asyncio.run(blocking_the_loop()) == WANTED
    asked = {"percent": "value", "tolerance": None, "answer": "x+1", "gold": "1+x"}
    assert math_worker.answer(asked)["equal"] is True  # the helper needs no alarm either


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_process_pools(math: MathReward, method: str) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        assert pool.submit(verify_all, math).result(timeout=120) == WANTED


def test_a_late_or_dead_helper_is_replaced() -> None:
    worker = Worker("tether.rewards.math_worker")
    ask = {"percent": "value", "tolerance": None, "gold": "4"}
    assert worker.ask({**ask, "answer": "4"}, 10)["equal"] is True
    assert worker._process is not None
    first = worker._process.pid
    with pytest.raises(WorkerLate):
        worker.ask({**ask, "answer": r"\sqrt{2}^{10^{10}}"}, 0.3)
    assert not psutil.pid_exists(first)
    assert worker.ask({**ask, "answer": "5"}, 10)["equal"] is False  # the replacement
    threading.Timer(0.3, worker._process.kill).start()
    with pytest.raises(WorkerDied):
        worker.ask({**ask, "answer": r"\sqrt{2}^{10^{10}}"}, 20)
    assert worker.ask({**ask, "answer": "4"}, 10)["equal"] is True
    worker.close()
    assert not [c for c in psutil.Process().children() if c.pid == first]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    problem = math_worker._missing()
    assert problem is not None
    assert "math-verify" in problem["error"]
    assert "tether-lm[math]" in problem["remedy"]
