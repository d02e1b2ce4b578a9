"""What runs inside the two sandboxed processes of a code test. Standard library only; sent over as text.

The program lives in one process, the tests in another. The tests hold expected values and decide; the program is asked for values
over a pipe and never sees a test. What comes back are plain values, rebuilt from JSON: numbers, text, lists, tuples, dicts, sets,
bytes, None. An object of any other kind stays in the program's process and is equal to nothing.

A program that leaves early, writes to standard output, patches its own builtins or answers with odd objects changes what it says
about itself, never how that is judged.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tether.rewards.sandbox_values import Pipe, ProgramFailed, Unplain, decode, encode

PASSED_AS_LISTS: tuple[type[Iterable[Any]], ...] = (
    map,
    filter,
    zip,
    enumerate,
    reversed,
    types.GeneratorType,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)

# -- the program's side ------------------------------------------------------------------------------------------------


def serve_program(source: str, pipe: Pipe) -> None:
    """Run the program's text, then answer what the tests ask of it."""
    module = types.ModuleType("program")
    sys.modules["program"] = module
    kept: list[Any] = []

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    def find(target: int | str, _: str) -> Any:
        return module.__dict__[target] if isinstance(target, str) else kept[target]

    first = pipe.receive()
    try:
        exec(compile(source, "<program>", "exec"), module.__dict__)
        names = [n for n in module.__dict__ if not n.startswith("__")]
        pipe.send({"id": first["id"], "names": names})
    except BaseException as error:
        pipe.send({"id": first["id"], "error": [type(error).__name__, str(error)[:300]]})
        return
    while True:
        try:
            asked = pipe.receive()
        except EOFError:
            return
        reply: dict[str, Any] = {"id": asked["id"]}
        try:
            args = [decode(a, find) for a in asked["args"]]
            named = {k: decode(v, find) for k, v in asked["named"].items()}
            before = json.dumps(asked["args"])
            reply["value"] = encode(_do(asked["do"], find(asked["target"], ""), args, named), keep)
            if asked["do"] == "call":
                after = [encode(a, keep) for a in args]
                if json.dumps(after) != before:  # arguments changed in place: the caller's change too
                    reply["args"] = after
        except StopIteration:
            reply["stop"] = True
        except BaseException as error:
            reply["error"] = [type(error).__name__, str(error)[:300]]
        pipe.send(reply)


def _do(what: str, target: Any, args: list[Any], named: dict[str, Any]) -> Any:
    return {
        "call": lambda: target(*args, **named),
        "attribute": lambda: getattr(target, args[0]),
        "assign": lambda: setattr(target, args[0], args[1]),
        "item": lambda: target[args[0]],
        "contains": lambda: args[0] in target,
        "length": lambda: len(target),
        "iterate": lambda: iter(target),
        "next": lambda: next(target),
        "text": lambda: "".join(str(target)),
        "repr": lambda: "".join(repr(target)),
    }[what]()


# -- the tests' side ---------------------------------------------------------------------------------------------------


class Remote:
    """Something in the program's process: a function, a class, an object. Equal to itself alone."""

    _link: Link
    _target: int | str
    _kind: str

    def __init__(self, link: Link, target: str | int, kind: str) -> None:
        for name, value in (("_link", link), ("_target", target), ("_kind", kind)):
            object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._link.ask("call", self._target, args, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask("attribute", self._target, (name,))

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("assign", self._target, (name, value))

    def __getitem__(self, key: Any) -> Any:
        return self._link.ask("item", self._target, (key,))

    def __contains__(self, key: Any) -> bool:
        return self._link.ask("contains", self._target, (key,)) is True

    def __len__(self) -> int:
        return int(self._link.ask("length", self._target))

    def __iter__(self) -> Iterator[Any]:
        source = self._link.ask("iterate", self._target)
        if not isinstance(source, Remote):
            return iter(source)
        return _stream(source)

    def __next__(self) -> Any:
        return self._link.ask("next", self._target)

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return str(self._link.ask("text", self._target))

    def __repr__(self) -> str:
        return str(self._link.ask("repr", self._target))


def _stream(source: Remote) -> Iterator[Any]:
    while True:
        try:
            yield source.__next__()
        except StopIteration:
            return


class Link:
    """Questions to the program. Each has a number of its own that the answer must carry."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe, self.asked = pipe, 0

    def start(self) -> list[str]:
        reply = self._talk({})
        if not isinstance(reply.get("names"), list):
            raise ProgramFailed("it did not load")
        return [str(n) for n in reply["names"]]

    def ask(self, what: str, target: int | str, args: Sequence[Any] = (), named: dict[str, Any] | None = None) -> Any:
        self.asked += 1
        given = [list(a) if isinstance(a, PASSED_AS_LISTS) else a for a in args]
        sent = [encode(a, _own) for a in given]
        reply = self._talk({"do": what, "target": target, "args": sent, "named": {k: encode(v, _own) for k, v in (named or {}).items()}})
        if reply.get("stop"):
            raise StopIteration
        for old, new in zip(given, reply.get("args") or [], strict=False):
            _change(old, decode(new, self._remote))
        if "value" not in reply:
            raise ProgramFailed("no value")
        return decode(reply["value"], self._remote)

    def _remote(self, number: int, kind: str) -> Remote:
        return Remote(self, number, kind)

    def _talk(self, message: dict[str, Any]) -> dict[str, Any]:
        number = int.from_bytes(os.urandom(8), "big")
        try:
            self.pipe.send({"id": number, **message})
            reply = self.pipe.receive()
        except (EOFError, OSError) as error:
            raise ProgramFailed("it ended before it answered") from error
        except (ValueError, RecursionError) as error:
            raise ProgramFailed("its answer cannot be read") from error
        if not isinstance(reply, dict) or reply.get("id") != number:
            raise ProgramFailed("it answered what was not asked")
        if "error" in reply:
            name, text = (str(x) for x in reply["error"][:2])
            kind = getattr(builtins, name, None)
            if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, (StopIteration, AssertionError)):
                try:
                    same_kind = kind(text)
                except TypeError:  # some need more than a message
                    same_kind = ProgramFailed(f"{name}: {text}")
                raise same_kind
            raise ProgramFailed(f"{name}: {text}")
        return reply


def _own(value: Any) -> int | str:
    if isinstance(value, Remote):
        return value._target
    raise Unplain(f"a test hands over a value of type {type(value).__name__}")


def _change(old: Any, new: Any) -> None:
    """An argument that the program changed in place."""
    if type(old) is not type(new) or old == new:
        return
    if isinstance(old, (list, bytearray)):
        old[:] = new
    elif isinstance(old, (dict, set)):
        old.clear()
        old.update(new)


def run_tests(
    tests: list[dict[str, Any]], setup: str, entry: str | None, all_needed: bool, pipe: Pipe, report: Callable[[dict[str, Any]], None]
) -> None:
    """Every test in order. A test passes when its text runs to the end and asked the program something.

    A test is {"code": text} (asserts, or a function `check(candidate)`), or {"call": expression, "expected": expression}.
    """
    link = Link(pipe)
    try:
        trees = [ast.parse(_text(t)) for t in tests]
        before = ast.parse(setup)
    except (SyntaxError, ValueError) as error:
        report({"broken": f"a test is not Python: {error}"[:300]})
        return
    try:
        defined = link.start()
    except Exception as error:
        report({"load": f"{type(error).__name__}: {error}"[:300]})
        return
    space: dict[str, Any] = {"__name__": "tests"}
    for name in wanted_names([before, *trees], defined, entry):
        space[name] = Remote(link, name, "name")
    if entry:
        space["candidate"] = Remote(link, entry, "name")
    try:
        exec(compile(before, "<setup>", "exec"), space)
    except BaseException as error:
        why = f"the tests' set-up raised {type(error).__name__}: {error}"[:300]
        lacking = isinstance(error, NameError)  # a class, say, that the program should have defined
        report({"load": why} if link.asked or lacking else {"broken": why})
        return
    for i, (test, tree) in enumerate(zip(tests, trees, strict=True)):
        asked = link.asked
        outcome = {"test": i, "ok": False, "why": ""}
        try:
            if "call" in test:
                expected = eval(compile(test["expected"], f"<expected {i}>", "eval"), dict(space))
                value = eval(compile(ast.parse(test["call"].strip(), mode="eval"), f"<test {i}>", "eval"), space)
                if not alike(value, expected):
                    outcome["why"] = f"{test['call']} gave {value!r}, not {expected!r}"[:300]
            else:
                exec(compile(tree, f"<test {i}>", "exec"), space)
            if not outcome["why"]:
                outcome["ok"] = link.asked > asked
                outcome["why"] = "" if outcome["ok"] else "the test asked nothing of the program"
        except Unplain as error:
            report({"broken": str(error)[:300]})
            return
        except AssertionError as error:
            outcome["why"] = f"assertion failed {error}".strip()[:300]
        except BaseException as error:
            outcome["why"] = f"{type(error).__name__}: {error}"[:300]
        report(outcome)
        if all_needed and not outcome["ok"]:
            return
    report({"done": len(tests)})


def _text(test: dict[str, Any]) -> str:
    return str(test["code"]) if "code" in test else f"{test['call']}"


def wanted_names(trees: list[ast.Module], defined: list[str], entry: str | None) -> list[str]:
    """Names in the tests that mean the program's. A builtin keeps its meaning, or a program could redefine what compares it;
    unless it is the entry point, or nothing but builtins is called."""
    loaded = {n.id for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    bound = {n.id for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    bound |= {n.name for tree in trees for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    bound |= {
        (a.asname or a.name).split(".")[0]
        for tree in trees
        for n in ast.walk(tree)
        if isinstance(n, (ast.Import, ast.ImportFrom))
        for a in n.names
    }
    bound |= {
        a.arg for tree in trees for n in ast.walk(tree) if isinstance(n, ast.arguments) for a in [*n.args, *n.kwonlyargs, *n.posonlyargs]
    }
    names = [n for n in defined if n in loaded - bound]
    own = [n for n in names if not hasattr(builtins, n)]
    if entry and entry in defined:
        return sorted({*own, entry})
    return own or [n for n in names if n in _first_called(trees)]


def _first_called(trees: list[ast.Module]) -> set[str]:
    """The outermost function of each test's left side."""
    out = set()
    for tree in trees:
        for node in tree.body:
            test = node.test if isinstance(node, ast.Assert) else node.value if isinstance(node, ast.Expr) else None
            left = test.left if isinstance(test, ast.Compare) else test
            if isinstance(left, ast.Call) and isinstance(left.func, ast.Name):
                out.add(left.func.id)
    return out


def alike(value: Any, expected: Any) -> bool:
    """Equal in value and in kind: True is not 1, a tuple is no list; 5.0 is 5."""
    if isinstance(value, Remote) or isinstance(expected, Remote):
        return False
    numbers = (int, float, complex)
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, numbers) and isinstance(expected, numbers):
        return value == expected or (value != value and expected != expected)
    if type(value) is not type(expected):
        return False
    if isinstance(value, (list, tuple)):
        return len(value) == len(expected) and all(alike(x, y) for x, y in zip(value, expected, strict=True))
    if isinstance(value, dict):
        return value.keys() == expected.keys() and all(alike(value[k], expected[k]) for k in value)
    return bool(value == expected)


# -- the door ----------------------------------------------------------------------------------------------------------


def start(config: dict[str, Any]) -> None:
    """Called by the launcher when everything is shut."""
    sys.setrecursionlimit(5000 if config["role"] == "tests" else 1000)
    if config["role"] == "script":
        space = {"__name__": "__main__", "__builtins__": builtins}
        exec(compile(config["program"], "<program>", "exec"), space)
        sys.stdout.flush()
        return
    pipe = Pipe(config["read_fd"], config["write_fd"])
    if config["role"] == "program":
        serve_program(config["program"], pipe)
        return
    verdict = config["verdict_fd"]

    def report(message: dict[str, Any]) -> None:
        os.write(verdict, json.dumps(message).encode() + b"\n")

    run_tests(config["tests"], config["setup"], config["entry"], config["all_needed"], pipe, report)
