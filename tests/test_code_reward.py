"""The code reward: right programs pass, and nothing else does, whatever it tries; nothing is left behind."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cheating_programs import CHEATS, ESCAPES, TRUE
from tether.errors import UserError
from tether.rewards import sandbox
from tether.rewards.code import CodeReward, CodeTests, program_of, read_tests
from tether.rewards.sandbox import Limits, Sandbox, probe

HERE = Path(__file__).parent
FILE = Path(os.environ.get("TETHER_CASES_CODE") or HERE / "cases/code_programs.jsonl")
CASES = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines() if line.strip()]
BENCHMARK = [json.loads(line) for line in (HERE / "cases/benchmark_programs.jsonl").read_text().splitlines()]
TIMEOUT_S = 4.0
SLACK_S = 20.0  # starting and stopping processes on a busy machine
KINDS = ["namespaces", "landlock"]
ADD = [{"call": "add(2, 3)", "expected": "5"}]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process and no file outlives a test."""
    folder = tmp_path / "sandboxes"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before = set(psutil.pids())
    yield
    assert list(folder.iterdir()) == []
    left = [p for p in set(psutil.pids()) - before if _in_sandbox(p) and not _somebody_elses(p)]
    assert left == []


def _in_sandbox(pid: int) -> bool:
    return "sandbox_child" in " ".join(_command(pid))


def _somebody_elses(pid: int) -> bool:
    """Whether a test process beside this one keeps it. One that was left behind belongs to nobody: its parent is the first process."""
    ours = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    try:
        above = [p.pid for p in psutil.Process(pid).parents()]
    except psutil.Error:
        return not psutil.pid_exists(pid)
    return any(p not in ours and not _in_sandbox(p) for p in above)


def _command(pid: int) -> list[str]:
    try:
        return list(psutil.Process(pid).cmdline())
    except psutil.Error:
        return []


def reward_for(kind: str, **settings: Any) -> CodeReward | None:
    """The reward under one kind of isolation; where the machine lacks it, that must be said."""
    if probe(kind) is not None:  # type: ignore[arg-type]
        with pytest.raises(UserError, match="does not let programs be isolated"):
            CodeReward(isolation=kind)
        return None
    return CodeReward(isolation=kind, **{"timeout_s": TIMEOUT_S, **settings})


# -- the handed programs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_handed_programs_get_their_verdicts_in_time(kind: str) -> None:
    reward = reward_for(kind, workers=4)
    if reward is None:
        return
    start = time.monotonic()
    values = reward(["q"] * len(CASES), [c["program"] for c in CASES], tests=[c["tests"] for c in CASES])
    assert time.monotonic() - start < len(CASES) * TIMEOUT_S / 2 + SLACK_S
    for case, value in zip(CASES, values, strict=True):
        if case["expect"] == "pass":
            assert value == 1.0, case["why"]
        elif "error" in case["expect"]:
            assert value in (0.0, None), case["why"]
        else:
            assert value == 0.0, case["why"]


def test_stuck_programs_do_not_stop_the_others() -> None:
    """32 at once, stuck ones among good ones: total time bounded by programs x limit / workers."""
    stuck = [c for c in CASES if c["expect"] in ("fail_in_time", "fail_in_limits")] or [
        {"program": "while True: pass", "tests": ADD, "expect": "fail_in_time"}
    ]
    good = [c for c in CASES if c["expect"] == "pass"]
    batch = [(stuck if i % 3 == 0 else good)[i // 3 % len(stuck if i % 3 == 0 else good)] for i in range(32)]
    reward = CodeReward(timeout_s=1.5, workers=8)
    start = time.monotonic()
    values = reward(["q"] * 32, [c["program"] for c in batch], tests=[c["tests"] for c in batch])
    assert time.monotonic() - start < 32 * 1.5 / 8 + 2 * SLACK_S
    assert values == [1.0 if c["expect"] == "pass" else 0.0 for c in batch]


# -- programs that cheat -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_no_cheat_passes(kind: str) -> None:
    reward = reward_for(kind, timeout_s=1.5)
    if reward is None:
        return
    both = [CodeTests(tuple(TRUE)), CodeTests(({"call": "add(2, 3)", "expected": "5"}, {"call": "add(1, 1)", "expected": "2"}))]
    jobs = [(name, program, tests) for name, program in CHEATS.items() for tests in both]
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda job: (job[0], reward.judge(job[1], job[2])), jobs))
    assert [(name, o) for name, o in outcomes if o.kind not in ("failed", "time")] == []


@pytest.mark.parametrize("kind", KINDS)
def test_programs_are_shut_in(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = reward_for(kind, timeout_s=10)
    if reward is None:
        return
    monkeypatch.setenv("TETHER_TEST_SECRET", "kept")
    secret, outside = tmp_path / "secret", tmp_path / "outside"
    secret.write_text("kept")
    os.chmod(tmp_path, 0o777)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        call = f"attempts({port}, {str(secret)!r}, {str(outside)!r}, {os.getpid()})"
        outcome = reward.judge(ESCAPES, CodeTests(({"call": call, "expected": "([], 'allowed')"},)))
        assert outcome.kind == "passed", outcome.why
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
    assert secret.read_text() == "kept"
    assert not outside.exists()


@pytest.mark.parametrize(
    "program, why",
    [
        ("x = bytearray(8 << 30)", "MemoryError"),
        ("xs = []\nwhile True: xs.append(bytearray(1 << 24))", "MemoryError"),
        ("open('big', 'wb').write(b'x' * (200 << 20))", ""),
        ("fs = [open(f'f{i}', 'w') for i in range(500)]", "Too many open files"),
        ("import threading, time\nfor _ in range(5000): threading.Thread(target=time.sleep, args=(50,), daemon=True).start()", ""),
        ("import sys\nwhile True: sys.stdout.write('x' * 100000)", "no verdict"),
        ("import signal, time\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\ntime.sleep(60)", "no verdict"),
        ("import ctypes\nctypes.string_at(0)", ""),
        ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()", ""),
    ],
)  # fmt: skip
def test_limits_hold(program: str, why: str) -> None:
    """Memory, file size, open files, threads, output, signals that are ignored, crashes: each fails in time."""
    start = time.monotonic()
    outcome = CodeReward(timeout_s=2.0, memory_mb=512).judge(program + "\ndef add(a, b): return a + b", CodeTests(tuple(ADD)))
    assert time.monotonic() - start < 2.0 + SLACK_S
    assert outcome.kind in ("failed", "time")
    assert why in outcome.why


# -- what passes -------------------------------------------------------------------------------------------------------

GOOD = {
    "prints": ("def f(x):\n    print('working', x)\n    return x * 2", ["assert f(2) == 4"]),
    "changes its argument": ("def f(x):\n    x.sort()\n    x.append(9)", ["a = [2, 1]\nf(a)\nassert a == [1, 2, 9]"]),
    "classes": ("class C:\n    n = 3\n    def add(self, x):\n        self.n += x\n        return self", ["c = C().add(4)\nassert c.n == 7\nc.n = 1\nassert c.add(1).n == 2"]),
    "generators": ("def f(n):\n    yield from range(n)", ["assert list(f(3)) == [0, 1, 2]", "assert sum(f(4)) == 6"]),
    "exceptions": (
        "def f(x):\n    if x < 0: raise ValueError('no')\n    return x",
        ["try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False"],
    ),
    "kinds of values": (
        "import collections, fractions\nP = collections.namedtuple('P', 'x y')\ndef f(): return [P(1, 2), {3}, {'a': None}, b'x', 1.5, 2**100, True, 1j, frozenset([1])]\n"
        "def g(): return collections.OrderedDict(a=1)\ndef h(): return fractions.Fraction(1, 3)\ndef d():\n    x = collections.defaultdict(int); x['k'] += 1\n    return x",
        [
            "assert f() == [(1, 2), {3}, {'a': None}, b'x', 1.5, 2**100, True, 1j, frozenset([1])]",
            "from fractions import Fraction\nassert g() == {'a': 1} and h() == Fraction(1, 3) and d() == {'k': 1}",
        ],
    ),
    "a builtin's name": ("def sum(a, b):\n    return a + b", ["assert sum(2, 3) == 5"]),
    "the program's own objects": ("class N:\n    def __init__(self, v): self.v = v\ndef f(n): return n.v", ["assert f(N(3)) == 3"]),
    "text of an object": ("class M:\n    def __repr__(self): return 'M!'\ndef f(): return M()", ["assert str(f()) == 'M!'"]),
    "types as arguments": ("def f(xs, kind): return [x for x in xs if type(x) is kind]", ["assert f([1, 'a', 2], int) == [1, 2]"]),
    "main guard": ("def f(): return 1\nif __name__ == '__main__':\n    input()", ["assert f() == 1"]),
    "threads": (
        "import threading\ndef f():\n    out = []\n    ts = [threading.Thread(target=out.append, args=(i,)) for i in range(4)]\n"
        "    [t.start() for t in ts]; [t.join() for t in ts]\n    return sorted(out)",
        ["assert f() == [0, 1, 2, 3]"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_ordinary_programs_pass(name: str) -> None:
    program, tests = GOOD[name]
    outcome = CodeReward().judge(program, read_tests(tests, {}))
    assert outcome.kind == "passed", outcome.why


def test_rows_of_public_benchmarks_pass_with_their_own_solutions_and_no_others() -> None:
    reward = CodeReward(timeout_s=8, workers=2)
    right = [b["program"] for b in BENCHMARK]
    columns = {k: [b.get(k) for b in BENCHMARK] for k in ("test_setup_code", "entry_point")}
    tests = [b.get("test") or b["test_list"] for b in BENCHMARK]
    prompts = [b.get("prompt", "Write it.") for b in BENCHMARK]
    assert reward(prompts, right, tests=tests, **columns) == [1.0] * len(right)
    fenced = [f"```python\n{b.get('prompt', '')}{b['program']}\n```" for b in BENCHMARK]
    assert reward(prompts, fenced, tests=tests, **columns) == [1.0] * len(right)
    empty = ["    return None\n" if b["origin"] == "humaneval" else "pass" for b in BENCHMARK]
    assert reward(prompts, empty, tests=tests, **columns) == [0.0] * len(right)


def test_scripts_are_judged_by_what_they_print() -> None:
    reward = CodeReward(timeout_s=2.0)
    tests = read_tests([{"input": "2 3\n", "output": "5\n"}, {"input": "1 1\n", "output": "2"}], {})
    right = "a, b = map(int, input().split())\nprint(a + b, ' ')"
    assert reward.judge(right, tests).kind == "passed"
    assert reward.judge(right + "\nraise SystemExit(3)", tests).kind == "failed"
    assert reward.judge(right + "\nimport sys\nsys.exit(0)", tests).kind == "passed"
    assert reward.judge("import os\nos._exit(0)", tests).kind == "failed"
    assert reward.judge("while True: print('x' * 1000)", tests).kind == "failed"
    assert reward.judge("while True: pass", tests).kind == "time"
    half = CodeReward(mode="fraction").judge("print(5)", tests)
    assert (half.kind, half.passed, CodeReward(mode="fraction").value(half)) == ("failed", 1, 0.5)
    columns = read_tests({"inputs": ["2 3"], "outputs": ["5"]}, {})
    assert reward.judge(right, columns).kind == "passed"
    named = read_tests(json.dumps({"fn_name": "add", "inputs": [[2, 3]], "outputs": [5]}), {})
    assert reward.judge("def add(a, b): return a + b", named).kind == "passed"


def test_fractions_and_values_by_kind() -> None:
    reward = CodeReward(mode="fraction")
    tests = [{"call": f"f({k})", "expected": expected} for k, expected in enumerate(["0", "1", "[1, 2]", "(1,)", "{'a': 1}", "None"])]
    program = "def f(k): return [False, 1.0, [1, 2.0], [1], {'a': True}, None][k]"
    outcome = reward.judge(program, read_tests(tests, {}))
    assert (outcome.passed, outcome.total) == (3, 6)  # 1.0 is 1; False is not 0, a list is no tuple, True is not 1


# -- tests that prove nothing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tests", [[], None, "", [""], [{"input": "1", "output": ""}]])
def test_no_tests_is_no_pass(tests: Any) -> None:
    reward = CodeReward()
    assert reward(["q"], ["def add(a, b): return a + b"], tests=[tests]) == [None]
    assert reward.counters == {"no tests": 1}


@pytest.mark.parametrize("test", ["assert True", "pass", "assert 1 + 1 == 2", "x = add"])
def test_a_test_that_asks_the_program_nothing_is_no_pass(test: str) -> None:
    assert CodeReward().judge("def add(a, b): return a + b", read_tests([test], {})).kind == "failed"


@pytest.mark.parametrize("tests", [["assert add(2, ="], [{"code": "assert add(lambda: 1, 2)"}], ["assert add(2, 3) == 5"]])
def test_broken_tests_are_nobodys_fault(tests: list[Any]) -> None:
    setup = "import a_module_that_is_not_there" if tests == ["assert add(2, 3) == 5"] else ""
    row = read_tests([t if isinstance(t, str) else t["code"] for t in tests], {"test_setup_code": setup})
    outcome = CodeReward().judge("def add(a, b): return a + b", row)
    assert outcome.kind == "broken"
    assert CodeReward().value(outcome) is None


@pytest.mark.parametrize("value", [[3], [{"call": "f()"}], 7, "{broken", [{"call": "f()", "expected": "1"}, {"input": "1", "output": "2"}]])
def test_unknown_rows_are_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"no test that can be run|mixes"):
        read_tests(value, {})


# -- finding the program -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "completion, program",
    [
        ("def f(): pass", "def f(): pass"),
        ("Text\n```python\ndef f(): pass\n```\nmore", "def f(): pass\n"),
        ("```py\ndef f(): pass\n```\nUse it:\n```python\nprint(f())\n```", "def f(): pass\n"),
        ("```python\ndef f(): old\n```\nBetter:\n```python\ndef f(): new\n```", "def f(): new\n"),
        ("```bash\npip install x\n```\n```\ndef f(): pass\n```", "def f(): pass\n"),
        ("```python\ndef f(): pass\n", "def f(): pass\n"),
        ("<think>```python\ndef f(): no\n```</think>\n```python\ndef f(): yes\n```", "def f(): yes\n"),
        ("<think>```python\ndef f(): no\n```", ""),
    ],
)
def test_the_program_is_found(completion: str, program: str) -> None:
    assert program_of(completion, CodeTests(({"code": "assert f() == 1"},))) == program


# -- where nothing can be isolated -------------------------------------------------------------------------------------


def test_without_isolation_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "probe", lambda kind: "not allowed here")
    with pytest.raises(UserError, match=r"namespaces: not allowed here; landlock: not allowed here.*Nothing was run"):
        CodeReward()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match="Linux"):
        CodeReward()


def test_the_probe_notices_an_open_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox that lets everything through must not be taken for one: the launcher's isolation is replaced by nothing."""
    text = (sandbox.FOLDER / "sandbox_child.py").read_text().replace("        isolate(config)\n", "        pass\n")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sandbox_child.py").write_text(text)
        monkeypatch.setattr(sandbox, "FOLDER", Path(folder))
        found = probe.__wrapped__("namespaces")
    assert found is not None
    assert "fork" in found


@pytest.mark.parametrize("settings", [{"mode": "some"}, {"workers": 0}, {"isolation": "trust"}, {"timeout_s": 0}, {"memory_mb": 0}])
def test_mistaken_settings_are_told(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        CodeReward(**settings)


def test_a_sandbox_that_cannot_start_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    box = Sandbox(limits=Limits(seconds=2.0))
    monkeypatch.setattr(sandbox, "readable", lambda packages: ("/nowhere/at/all",))
    outcome = box.test("def add(a, b): return a + b", [{"code": "assert add(2, 3) == 5"}])
    assert outcome.kind in ("broken", "failed")
    assert outcome.passed == 0
