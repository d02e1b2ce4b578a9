"""What an annotator types, by single keys at a terminal and by lines from a pipe; and what it means on a desk."""

from __future__ import annotations

import contextlib
import os
import re
import select
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from tether.collect.ballots import BadBallot

END = "\x04"  # Ctrl-D
ESCAPE = "\x1b"
ARROWS = {"[D": "left", "OD": "left", "[C": "right", "OC": "right"}
WAIT_S = 0.05  # for the rest of an arrow's sequence: terminals send it in one piece


class Keyboard:
    """Reads single keys where `stdin` is a terminal that can give them, else whole lines."""

    def __init__(self, stdin: TextIO, stdout: TextIO) -> None:
        self.stdin, self.stdout = stdin, stdout
        if hasattr(stdin, "reconfigure"):
            stdin.reconfigure(errors="replace")  # bytes that are no text must not end the session
        self.terminal = _modes(stdin)

    @property
    def single(self) -> bool:
        """Whether a key counts at once, without Enter."""
        return self.terminal is not None

    def line(self, question: str = "") -> str | None:
        """A line without its end, None at the end of the input."""
        if question:
            self.stdout.write(question)
            self.stdout.flush()
        text = self.stdin.readline()
        return text.strip() if text else None

    def key(self, question: str = "") -> str | None:
        """One key by its name ("left" for an arrow), or a line where there are no single keys. None at the end of the input."""
        if self.terminal is None:
            return self.line(question)
        self.stdout.write(question)
        self.stdout.flush()
        with self._pressed():
            key = self._read()
        self.stdout.write("\n")
        return None if key in ("", END) else key

    @contextlib.contextmanager
    def _pressed(self) -> Iterator[None]:
        """Keys come one by one, unechoed; Ctrl-C still stops. The terminal is left as it was found."""
        termios, before = self.terminal
        raw = list(before)
        raw[3] &= ~(termios.ICANON | termios.ECHO)
        raw[6] = [*before[6]]
        raw[6][termios.VMIN], raw[6][termios.VTIME] = 1, 0
        termios.tcsetattr(self.stdin.fileno(), termios.TCSADRAIN, raw)
        try:
            yield
        finally:
            termios.tcsetattr(self.stdin.fileno(), termios.TCSADRAIN, before)

    def _read(self) -> str:
        first = self._character()
        if first != ESCAPE:
            return first
        rest = ""
        while len(rest) < 2 and select.select([self.stdin.fileno()], [], [], WAIT_S)[0]:
            rest += self._character()
        return ARROWS.get(rest, "escape")

    def _character(self) -> str:
        """One character of the terminal, whose bytes may be several. Read past the buffer of `stdin`, which waits for a line's end."""
        read = os.read(self.stdin.fileno(), 1)
        while read and len(read) < 4:
            try:
                return read.decode("utf-8")
            except UnicodeDecodeError:
                read += os.read(self.stdin.fileno(), 1)
        return read.decode("utf-8", "replace")


def _modes(stdin: TextIO) -> Any:
    """(termios, the terminal's modes), None where there is no such terminal."""
    try:
        import termios
    except ImportError:  # not on Windows
        return None
    try:
        return termios, termios.tcgetattr(stdin.fileno())
    except (termios.error, OSError, ValueError, AttributeError):
        return None


def ranks_of(text: str, n: int) -> tuple[int | None, ...]:
    """An order from best to worst as ranks by the place shown: "2 1=3" or "21=3"; "-3" leaves the third unranked. BadBallot otherwise.

    >>> ranks_of("3 1=2", 3), ranks_of("231", 3), ranks_of("2 1 -3", 3)
    ((2, 2, 1), (3, 1, 2), (2, 1, None))
    """
    example = "Best first, such as 2 1=3; = is a tie, -3 leaves the third out."
    ranks: list[int | None] = [None] * n
    named: set[int] = set()
    rank = 0
    for level in _levels(text, n):
        out = level.startswith("-")
        rank += not out
        for word in level.removeprefix("-").split("="):
            if not word.isdecimal() or not 1 <= int(word) <= n:
                raise BadBallot(f"there is no answer {word!r:.40}", remedy=example)
            place = int(word) - 1
            if place in named:
                raise BadBallot(f"answer {word} is named twice", remedy=example)
            named.add(place)
            ranks[place] = None if out else rank
    if missing := [str(i + 1) for i in range(n) if i not in named]:
        raise BadBallot(f"no rank was given for {', '.join(missing)}", remedy=example)
    return tuple(ranks)


def _levels(text: str, n: int) -> Sequence[str]:
    """Words of an order; below ten answers digits may stand without blanks."""
    words = re.sub(r"\s*=\s*", "=", text.strip())
    if n < 10:
        words = re.sub(r"(?<=\d)(?=[\d-])", " ", words)
    return [w for w in re.split(r"[\s,>]+", words) if w]
