"""Calling one reward function: which arguments it takes, what it may return, and what to say when it goes wrong.

The signature is TRL's: `f(prompts, completions, **columns) -> list[float]`, plain or async. A function is given the arguments
it names, or all of them when it takes `**kwargs`. What it returns decides whether it is awaited, not what kind of callable it
is, so bound methods, partials, lambdas and callable objects need no special case.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import numbers
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether import ranks
from tether.errors import UserError
from tether.keys import nearest

if TYPE_CHECKING:
    from tether.reward import Reward

UNSCORED = math.nan
WANTED = "Return a list with one number per completion; None where a completion cannot be judged."


@dataclass(frozen=True)
class Returned:
    """Checked values of one function: one float per completion, NaN where it could not score."""

    values: list[float]
    parts: dict[str, list[float]] = field(default_factory=dict)  # by name, when the function returned named parts
    null: list[int] = field(default_factory=list)  # rows it gave None for
    broken: list[int] = field(default_factory=list)  # rows it gave NaN or inf for


def name_of(function: Any) -> str:
    """What to call a function in logs and errors.

    >>> name_of(functools.partial(max, 1)), name_of("text".upper)
    ('max', 'str.upper')
    """
    if isinstance(function, functools.partial):
        return name_of(function.func)
    given = getattr(function, "reward_name", None)
    if isinstance(given, str):
        return given
    if inspect.ismethod(function) or inspect.isbuiltin(function):
        owner = getattr(function, "__self__", None)
        if owner is not None and not inspect.ismodule(owner):
            owner_name = owner.__name__ if inspect.isclass(owner) else type(owner).__name__
            return f"{owner_name}.{function.__name__}"
    name = getattr(function, "__name__", None) or type(function).__name__
    return "lambda" if name == "<lambda>" else str(name)


def arguments(function: Callable[..., Any], name: str, offered: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """(positional, keyword) arguments for the function out of what is offered: prompts, completions and the columns.

    A first and second parameter under other names, as in `lambda p, c: ...`, take prompts and completions. UserError when it
    needs something that is not there.
    """
    pair = [offered["prompts"], offered["completions"]]
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return pair, {}
    names = {p.name for p in parameters}
    ordered = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    renamed = len(ordered) >= 2 and all(p.default is p.empty and p.name not in offered for p in ordered[:2])
    only_star = not ordered and any(p.kind is p.VAR_POSITIONAL for p in parameters) and "completions" not in names
    by_position = (renamed and "completions" not in names) or only_star or any(p.kind is p.POSITIONAL_ONLY for p in ordered[:2])
    positional = pair if by_position else []
    if by_position and len(ordered) == 1:
        raise UserError(f"reward '{name}' takes no completions", remedy="Its signature is f(prompts, completions, **columns).")
    left = {k: v for k, v in offered.items() if not (by_position and k in ("prompts", "completions"))}
    keyword: dict[str, Any] = {}
    for p in parameters:
        if p in ordered[: len(positional)] or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
            continue
        if p.name in left:
            keyword[p.name] = left[p.name]
        elif p.default is p.empty:
            near = nearest(p.name, list(offered))
            raise UserError(
                f"reward '{name}' needs '{p.name}', which is not a column of the data",
                remedy=f"{f'Did you mean {near}? ' if near else ''}There are: {', '.join(sorted(offered))}.",
            )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        keyword |= {k: v for k, v in left.items() if k not in names}
    return positional, keyword


async def awaited(value: Awaitable[Any]) -> Any:
    return await value


def checked(name: str, n: int, returned: Any) -> Returned:
    """One finite number per completion, or UserError naming the function, the count wanted and the count given.

    None (cannot judge) and NaN or inf (broken) become unscored rows, each counted. Booleans are 1 and 0. A dict of such lists
    gives named parts; the function's value is their sum.
    """
    if isinstance(returned, Mapping):
        return _checked_parts(name, n, returned)
    wanted = f"{n} number{'s' if n != 1 else ''}"
    if inspect.isawaitable(returned) or inspect.isgenerator(returned) or inspect.isasyncgen(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise UserError(f"reward '{name}' returned a {type(returned).__name__} where {wanted} were wanted", remedy=WANTED)
    if not isinstance(returned, (list, tuple)) and hasattr(returned, "tolist") and getattr(returned, "ndim", 0) > 0:
        returned = returned.tolist()  # arrays and tensors
    if not isinstance(returned, (list, tuple)):
        shown = (
            "nothing (None)" if returned is None else f"{_shown(returned)}, a single value," if _is_number(returned) else _shown(returned)
        )
        raise UserError(f"reward '{name}' returned {shown} where {wanted} were wanted, one for each completion", remedy=WANTED)
    if len(returned) != n:
        raise UserError(f"reward '{name}' returned {len(returned)} values for {n} completions", remedy=WANTED)
    values, null, broken = [], [], []
    for row, value in enumerate(returned):
        number = _number(value)
        if number is None and value is not None:
            for other in returned:
                if inspect.iscoroutine(other):
                    other.close()  # it is refused, and Python need not complain about it as well
            raise UserError(f"reward '{name}' returned {_shown(value)} for row {row}, which is not a number", remedy=WANTED)
        if number is None:
            null.append(row)
        elif not math.isfinite(number):
            broken.append(row)
        values.append(UNSCORED if number is None or not math.isfinite(number) else number)
    return Returned(values, {}, null, broken)


def _checked_parts(name: str, n: int, returned: Mapping[Any, Any]) -> Returned:
    if not returned or not all(isinstance(k, str) for k in returned):
        raise UserError(f"reward '{name}' returned {_shown(returned)}: parts need names", remedy="Return {name: list of numbers, ...}.")
    parts = {part: checked(f"{name}/{part}", n, values) for part, values in returned.items()}
    columns = [p.values for p in parts.values()]
    values = [_sum_scored(column[i] for column in columns) for i in range(n)]
    broken = sorted({i for p in parts.values() for i in p.broken})
    null = [i for i in range(n) if math.isnan(values[i]) and i not in broken]
    return Returned(values, {part: p.values for part, p in parts.items()}, null, broken)


def _sum_scored(values: Iterable[float]) -> float:
    scored = [v for v in values if not math.isnan(v)]
    return sum(scored) if scored else UNSCORED


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, numbers.Real)) or (hasattr(value, "item") and getattr(value, "ndim", None) == 0)


def _number(value: Any) -> float | None:
    """A float, or None for anything that is not a number. Single values of numpy and torch are numbers."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, (bool, numbers.Real)):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def failed(name: str, error: BaseException, row: int | None, places: Sequence[str], n: int, *, looked: bool = True) -> UserError:
    """What to say about an exception: the function, the error, the first row it comes from (if that was `looked` for) and the line it was
    raised on."""
    reason = f"{type(error).__name__}: {error}".rstrip(": ")
    if row is not None:
        on = f"row {row}" + (f" ({places[row]})" if row < len(places) and places[row] else "")
    else:
        alone = "; each alone works" if looked else ""
        on = f"all {n} rows together (rows 0 to {n - 1}{alone})" if n > 1 else "row 0"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent != Path(__file__).parent]
    at = f", at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return UserError(
        f"reward '{name}' raised {reason} on {on}{at}",
        remedy="An error is never scored as 0. Mend the function, or return None for completions that it cannot judge.",
    )


class Call:
    """One function on one batch, in a thread of its own that never holds up the end of the process."""

    def __init__(
        self, reward: Reward, offered: dict[str, Any], n: int, places: Sequence[str], loop: Callable[[], asyncio.AbstractEventLoop]
    ) -> None:
        self.reward, self.offered, self.n, self.places, self._loop = reward, offered, n, places, loop
        self.done = threading.Event()
        self.returned: Returned | None = None
        self.error: BaseException | None = None
        self.seconds = 0.0

    def start(self) -> None:
        threading.Thread(target=self.run, name=f"reward {self.reward.name}", daemon=True).start()

    def run(self) -> None:
        start = time.monotonic()
        try:
            self.returned = checked(self.reward.name, self.n, self._ask(self.offered))
        except UserError as error:
            self.error = error
        except BaseException as error:
            # A function that all ranks run together cannot be asked again by one of them.
            looked = ranks.size() == 1 or not getattr(self.reward.function, "computes", False)
            self.error = failed(self.reward.name, error, self._first_failing_row() if looked else None, self.places, self.n, looked=looked)
            self.error.__cause__ = error
        finally:
            self.seconds = time.monotonic() - start
            self.done.set()

    def _ask(self, offered: Mapping[str, Any]) -> Any:
        positional, keyword = arguments(self.reward.function, self.reward.name, offered)
        value = self.reward.function(*positional, **keyword)
        if inspect.isawaitable(value):
            return asyncio.run_coroutine_threadsafe(awaited(value), self._loop()).result(self.reward.timeout_s + 60)
        return value

    def _first_failing_row(self) -> int | None:
        """The function saw all rows at once: ask again, one at a time, to name the row for whoever must mend it."""
        for i in range(self.n):
            try:
                self._ask({k: v[i : i + 1] for k, v in self.offered.items()})
            except BaseException:
                return i
        return None


class EventLoop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="reward event loop", daemon=True).start()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
