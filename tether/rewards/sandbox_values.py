"""Values and messages between the two sandboxed processes of a code test. Standard library only; sent over as text.

JSON for plain values, by their exact content. An object of any other kind is a number: it stays where it is.
"""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import Callable
from typing import Any

MAX_MESSAGE = 8 << 20
MAX_DEPTH = 60


class Unplain(Exception):
    """A value that has no plain form."""


class ProgramFailed(Exception):
    """The program's process ended, sent something unreadable, or raised what is no ordinary exception."""


# -- values ------------------------------------------------------------------------------------------------------------


def encode(value: Any, keep: Callable[[Any], int | str] | None, depth: int = 0) -> Any:
    """JSON for a plain value, by its exact content: a subclass is read as the type it is based on. `keep` stores other objects."""
    if depth > MAX_DEPTH:
        raise Unplain("nested too deeply")

    def inner(x: Any) -> Any:
        return encode(x, keep, depth + 1)

    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        return {"i": hex(int.__index__(value))}
    if isinstance(value, float):
        return {"f": float.hex(float.__float__(value))}
    if isinstance(value, str):
        return {"s": str.__str__(value) if type(value) is str else "".join(str.__iter__(value))}
    if isinstance(value, complex):
        return (
            {"c": [float.hex(complex.__complex__(value).real), float.hex(complex.__complex__(value).imag)]}
            if type(value) is complex
            else _kept(value, keep)
        )
    if isinstance(value, (bytes, bytearray)):
        return {"b" if isinstance(value, bytes) else "ba": [int(x) for x in memoryview(value)]}
    if isinstance(value, list):
        return {"l": [inner(x) for x in list.__iter__(value)]}
    if isinstance(value, tuple):
        return {"t": [inner(x) for x in tuple.__iter__(value)]}
    if isinstance(value, dict):
        return {"d": [[inner(k), inner(v)] for k, v in dict.items(value)]}
    if isinstance(value, set):
        return {"S": [inner(x) for x in set.__iter__(value)]}
    if isinstance(value, frozenset):
        return {"F": [inner(x) for x in frozenset.__iter__(value)]}
    if isinstance(value, range):
        return {"r": [value.start, value.stop, value.step]}
    kind: type = type(value)
    name = getattr(value, "__name__", "") if kind is type else ""
    if name and getattr(builtins, name, None) is value:
        return {"T": name}
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        return inner(value.tolist())
    if kind.__module__ in ("fractions", "decimal") and kind.__name__ in ("Fraction", "Decimal"):
        return {"n": [kind.__name__, str(value)]}
    return _kept(value, keep)


def _kept(value: Any, keep: Callable[[Any], int | str] | None) -> Any:
    if keep is None:
        raise Unplain(f"a value of type {type(value).__name__} cannot be handed over")
    return {"h": keep(value), "k": type(value).__name__}


def decode(data: Any, handle: Callable[[Any, str], Any], depth: int = 0) -> Any:
    """The inverse. `handle` makes something of a kept object's number. ProgramFailed for anything else."""
    if depth > MAX_DEPTH:
        raise ProgramFailed("nested too deeply")

    def inner(x: Any) -> Any:
        return decode(x, handle, depth + 1)

    if data is None or data is True or data is False:
        return data
    if not isinstance(data, dict):
        raise ProgramFailed("no plain value")
    if set(data) == {"h", "k"}:
        return handle(data["h"], str(data["k"]))
    if len(data) != 1:
        raise ProgramFailed("no plain value")
    tag, body = next(iter(data.items()))
    make: dict[str, Callable[[], Any]] = {
        "i": lambda: int(body, 16),
        "f": lambda: float.fromhex(body),
        "s": lambda: str(body),
        "c": lambda: complex(float.fromhex(body[0]), float.fromhex(body[1])),
        "b": lambda: bytes(body),
        "ba": lambda: bytearray(body),
        "l": lambda: [inner(x) for x in body],
        "t": lambda: tuple([inner(x) for x in body]),
        "d": lambda: {inner(k): inner(v) for k, v in body},
        "S": lambda: {inner(x) for x in body},
        "F": lambda: frozenset([inner(x) for x in body]),
        "r": lambda: range(*body),
        "T": lambda: _builtin_type(body),
        "n": lambda: _number(body),
    }
    if tag not in make:
        raise ProgramFailed("no plain value")
    return make[tag]()


def _builtin_type(name: str) -> type:
    found = getattr(builtins, name, None)
    if not isinstance(found, type):
        raise ProgramFailed("no plain value")
    return found


def _number(body: list[str]) -> Any:
    import decimal
    import fractions

    if body[0] == "Fraction":
        return fractions.Fraction(body[1])
    return decimal.Decimal(body[1])


# -- messages ----------------------------------------------------------------------------------------------------------


class Pipe:
    """JSON messages, one a line, over two file descriptors."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self.read_fd, self.write_fd, self.left = read_fd, write_fd, b""

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self.write_fd, data) :]

    def receive(self) -> Any:
        """The next message; EOFError when the other side is gone, ProgramFailed when it sends too much."""
        parts = [self.left]
        size = len(self.left)
        while b"\n" not in parts[-1]:
            chunk = os.read(self.read_fd, 1 << 16)
            if not chunk:
                raise EOFError
            parts.append(chunk)
            size += len(chunk)
            if size > MAX_MESSAGE:
                raise ProgramFailed("more data than a value may have")
        line, _, self.left = b"".join(parts).partition(b"\n")
        return json.loads(line)
