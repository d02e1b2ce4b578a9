"""`Reward`: one named part of what an attempt earns; `Rewards`: all parts of a run, called side by side and checked.

Any function of TRL's signature is a part as it is: `f(prompts, completions, **columns) -> list[float]`, plain or async.
What functions are given, beside the data's own columns (repeated for every completion):

    prompts            text, or messages where the data holds messages
    completions        text up to the first end mark, or `[{"role": "assistant", "content": text}]` beside message prompts
    completion_ids     every sampled token id
    raw_completions    the text of those, control tokens included
    opened             the part of the answer that the chat template had opened, such as "<think>\\n"; the answer is opened + text
    finish_reasons     "stop", "length" or "stop_string"

Threads run the functions, so a script needs no main guard and lambdas are fine; one with `computes = True` is called directly.
Over several ranks the first one runs them for all. One with `computes = True` is called on every rank with all attempts and must give
the same values on each: `ModelReward` and a judge in this process share the work out among the ranks.
Whatever cannot be scored is unscored (NaN in `Scored.matrix`, null in files) and counted; it is never a zero.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tether import ranks
from tether.errors import UserError
from tether.reward_call import UNSCORED, Call, EventLoop, Returned, name_of
from tether.rollout import Rollout

RewardFunction = Callable[..., Any]
Mixture = Literal["sum_then_normalize", "normalize_then_sum"]
VIEW_COLUMNS = ("prompts", "completions", "completion_ids", "raw_completions", "opened", "finish_reasons")
MAX_BROKEN = 0.1  # share of NaN and inf values in a step above which the run stops
SLOW_S = 30.0  # seconds after which somebody is told that a reward is still running
ZERO_STEPS = 3  # first steps in which a reward that is 0 everywhere is warned about


@dataclass(frozen=True)
class Reward:
    """A reward function with its name, its weight and how long one call may take.

    Weight 0 watches: the values are recorded and do not act. `timeout_s` is for the whole batch of one step.

    >>> Reward(lambda prompts, completions: [len(c) for c in completions], name="length", weight=0.1).name
    'length'
    """

    function: RewardFunction
    name: str = ""
    weight: float = 1.0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not callable(self.function):
            if inspect.iscoroutine(self.function):
                self.function.close()
                raise UserError("a reward is a coroutine: the async function was called", remedy="Pass the function itself, without ().")
            raise UserError(
                f"a reward must be a function, got {type(self.function).__name__}", remedy="f(prompts, completions, **columns)."
            )
        if not self.name:
            object.__setattr__(self, "name", name_of(self.function))
        if isinstance(self.weight, bool) or not math.isfinite(self.weight):
            raise UserError(f"the weight of reward '{self.name}' must be a finite number, got {self.weight!r}")
        if not self.timeout_s > 0:
            raise UserError(f"timeout_s of reward '{self.name}' must be above 0, got {self.timeout_s!r}")


@dataclass(frozen=True)
class Scored:
    """The rewards of one step: N completions, K parts. NaN: unscored."""

    names: list[str]
    weights: list[float]
    matrix: list[list[float]]  # N rows of K
    totals: list[float]  # weighted sum of what was scored; NaN where no part with a weight scored
    parts: dict[str, list[float]]  # "reward/part" -> (N,) of functions that return named parts
    counters: dict[str, int]  # "reward/null" and "reward/broken": rows of this step
    seconds: dict[str, float]
    mixture: Mixture = "sum_then_normalize"
    notices: list[str] = field(default_factory=list)  # what to tell the user, once each

    def row(self, i: int) -> dict[str, float | None]:
        """Named rewards of completion i, parts included; None where unscored."""
        values = dict(zip(self.names, self.matrix[i], strict=True)) | {k: v[i] for k, v in self.parts.items()}
        return {k: None if math.isnan(v) else v for k, v in values.items()}

    def total(self, i: int) -> float | None:
        return None if math.isnan(self.totals[i]) else self.totals[i]

    def metrics(self) -> dict[str, float]:
        """Mean and (population) spread of the total and of every part over what was scored, shares of what was not, seconds."""
        columns = {name: [row[k] for row in self.matrix] for k, name in enumerate(self.names)} | self.parts
        out = _moments("reward", self.totals)
        for name, values in columns.items():
            out |= _moments(f"reward/{name}", values)
        n = max(len(self.totals), 1)
        out |= {f"reward/{key}": count / n for key, count in self.counters.items()}
        return out | {f"reward/{name}/seconds": s for name, s in self.seconds.items()}

    def advantages(self, groups: Sequence[int], std_kind: Literal["sample", "population"] = "sample") -> list[float]:
        """How much better each completion did than its group, by the chosen mixture (`tether.advantage.MIXTURES`).

        `sum_then_normalize`: the part with the widest spread decides. `normalize_then_sum`: weights are relative influence.
        """
        import torch

        from tether.advantage import MIXTURES

        acting = [k for k, weight in enumerate(self.weights) if weight != 0]
        matrix = torch.tensor([[row[k] for k in acting] for row in self.matrix], dtype=torch.float64)  # (N, K)
        weights = torch.tensor([self.weights[k] for k in acting], dtype=torch.float64)
        result: list[float] = MIXTURES[self.mixture](matrix, weights, torch.tensor(groups), std_kind).tolist()
        return result


def _moments(name: str, values: Sequence[float]) -> dict[str, float]:
    scored = [v for v in values if not math.isnan(v)]
    if not scored:
        return {}  # absent rather than 0
    mean = sum(scored) / len(scored)
    return {f"{name}/mean": mean, f"{name}/std": math.sqrt(sum((v - mean) ** 2 for v in scored) / len(scored))}


class Rewards:
    """All rewards of a run.

    `say` is told when a function is slow. `counters[name]` counts calls, rows, null, broken, errors and timeouts over the run.

    >>> rewards = Rewards([lambda prompts, completions: [float(len(c)) for c in completions]])
    >>> rewards.score(["a", "a"], ["xy", "xyz"]).totals
    [2.0, 3.0]
    """

    def __init__(
        self,
        rewards: Iterable[Reward | RewardFunction],
        *,
        mixture: Mixture = "sum_then_normalize",
        max_broken: float = MAX_BROKEN,
        slow_s: float = SLOW_S,
        zero_steps: int = ZERO_STEPS,
        say: Callable[[str], None] | None = None,
    ) -> None:
        from tether.keys import nearest

        self.rewards = _named([r if isinstance(r, Reward) else Reward(r) for r in rewards])
        if not self.rewards or all(r.weight == 0 for r in self.rewards):
            raise UserError("no reward with a weight was given", where="rewards", remedy="Give at least one, such as math or format.")
        allowed = ("sum_then_normalize", "normalize_then_sum")
        if mixture not in allowed:
            near = nearest(mixture, allowed)
            raise UserError(f"there is no mixture {mixture!r}", remedy=f"Use {near or ' or '.join(allowed)}.", where="reward_mixture")
        self.mixture: Mixture = mixture
        self.max_broken, self.slow_s, self.zero_steps = max_broken, slow_s, zero_steps
        self.say = say or (lambda text: None)
        self.counters: dict[str, Counter[str]] = {r.name: Counter() for r in self.rewards}
        self._zero = {r.name: 0 for r in self.rewards}  # first steps that were 0 everywhere; -1: seen something else
        self._loop: EventLoop | None = None

    @property
    def names(self) -> list[str]:
        return [r.name for r in self.rewards]

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: Mapping[str, Sequence[Any]] | None = None,
        *,
        places: Sequence[str] = (),
    ) -> Scored:
        """Call every function on all N completions. `places` names rows in errors ("data.jsonl:7").

        UserError for an exception, a time-out, a wrong shape or a value that is no number, each naming the function; and when
        more than `max_broken` of a function's values are NaN or inf.
        """
        n, columns = len(completions), dict(columns or {})
        for column, values in [("prompts", prompts), *columns.items()]:
            if len(values) != n:
                raise ValueError(f"{column} has {len(values)} entries for {n} completions")
        offered = {**columns, "prompts": list(prompts), "completions": list(completions)}
        calls = [Call(r, offered, n, places, self._event_loop) for r in self.rewards]
        # A function that computes with torch runs here: from a second thread it would start processor threads of its own beside those
        # of training, and with more of them than processors every operation's end is a sleep and not a spin, for the rest of the run.
        here = [c for c in calls if getattr(c.reward.function, "computes", False)]
        elsewhere = [c for c in calls if c not in here]
        if ranks.first():
            for call in elsewhere:
                call.start()
        for call in here:
            call.run()
        self._end(calls if ranks.first() else here, elsewhere)
        notices: list[str] = []
        for call in calls:
            assert call.returned is not None
            notices += self._count(call.reward.name, call.returned, n, places)
        matrix = [[call.returned.values[i] for call in calls if call.returned] for i in range(n)]
        return Scored(
            names=self.names,
            weights=[r.weight for r in self.rewards],
            matrix=matrix,
            totals=[_weighted([r.weight for r in self.rewards], row) for row in matrix],
            parts={f"{c.reward.name}/{part}": v for c in calls if c.returned for part, v in c.returned.parts.items()},
            counters={f"{c.reward.name}/{kind}": len(rows) for c in calls if c.returned
                      for kind, rows in (("null", c.returned.null), ("broken", c.returned.broken))},
            seconds={c.reward.name: c.seconds for c in calls},
            mixture=self.mixture,
            notices=notices,
        )  # fmt: skip

    def score_rollouts(self, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], Scored]:
        """The same rollouts with their rewards and total filled in, and the step's table."""
        offered = columns_of(rollouts)
        prompts, completions = offered.pop("prompts"), offered.pop("completions")
        scored = self.score(prompts, completions, offered, places=[str(r.source) if r.source else "" for r in rollouts])
        return [r.scored(scored.row(i), scored.total(i)) for i, r in enumerate(rollouts)], scored

    def report(self) -> dict[str, float]:
        """Counts over the run, `counters` and what ready rewards count for themselves: "reward/math/count/time", say."""
        out = {f"reward/{name}/count/{k}": float(v) for name, counter in self.counters.items() for k, v in counter.items()}
        for reward in self.rewards:
            own = getattr(reward.function, "counters", None) or {}
            shares = reward.function.report() if callable(getattr(reward.function, "report", None)) else {}  # type: ignore[attr-defined]
            out |= {f"reward/{reward.name}/count/{k}": float(v) for k, v in own.items()}
            out |= {f"reward/{reward.name}/{k}": float(v) for k, v in shares.items()}
        return out

    def close(self) -> None:
        """Stop what functions keep running, such as workers and the event loop. Safe to call twice."""
        for reward in self.rewards:
            close = getattr(reward.function, "close", None)
            if callable(close):
                close()
        if self._loop is not None:
            self._loop.stop()
            self._loop = None

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        """One loop for all steps: clients that async functions keep belong to the loop they were made in."""
        with _LOOP_LOCK:
            if self._loop is None:
                self._loop = EventLoop()
            return self._loop.loop

    def _end(self, mine: list[Call], elsewhere: list[Call]) -> None:
        """Wait for `mine`. Over several ranks: what one cannot score ends all, and what the first has run `elsewhere` all are told."""
        error: UserError | None = None
        try:
            self._wait(mine)
        except UserError as raised:
            error = raised
        problems = [p for p in ranks.gather(error and (error.what, error.where, error.remedy)) if p]
        if problems and error is None:
            what, where, remedy = problems[0]
            error = UserError(what, where=where, remedy=remedy)
        if error is not None:
            raise error
        for call, (returned, seconds) in zip(elsewhere, ranks.share([(c.returned, c.seconds) for c in elsewhere]), strict=True):
            call.returned, call.seconds = returned, seconds

    def _wait(self, calls: list[Call]) -> None:
        told: set[str] = set()
        start = time.monotonic()
        while running := [c for c in calls if not c.done.is_set()]:
            running[0].done.wait(0.05)
            waited = time.monotonic() - start
            for call in calls:
                name = call.reward.name
                if call.done.is_set():
                    if call.error is not None:
                        self.counters[name]["errors"] += 1
                        raise call.error
                elif waited > call.reward.timeout_s:
                    self.counters[name]["timeouts"] += 1
                    if self._loop is not None:
                        self._loop.stop()  # a coroutine that blocks its loop must not block the next step's
                        self._loop = None
                    raise UserError(
                        f"reward '{name}' gave no answer within {call.reward.timeout_s:g} s for {call.n} completions",
                        remedy="Mend what it waits for, or raise its timeout_s.",
                    )
                elif waited > self.slow_s and name not in told:
                    told.add(name)
                    self.say(f"reward '{name}' is still running after {waited:.0f} s (it is given {call.reward.timeout_s:g} s)")
        for call in calls:
            if call.error is not None:
                self.counters[call.reward.name]["errors"] += 1
                raise call.error

    def _count(self, name: str, returned: Returned, n: int, places: Sequence[str]) -> list[str]:
        """Count what could not be scored, stop at too much of it, and say what looks wrong."""
        self.counters[name].update(calls=1, rows=n, null=len(returned.null), broken=len(returned.broken))
        notices = []
        if returned.broken:
            first = ", ".join(f"{i} ({places[i]})" if i < len(places) and places[i] else str(i) for i in returned.broken[:5])
            what = f"reward '{name}' gave NaN or inf for {len(returned.broken)} of {n} completions (rows {first}); they are unscored"
            if len(returned.broken) > self.max_broken * n:
                self.counters[name]["errors"] += 1
                raise UserError(
                    f"{what}; more than {self.max_broken:.0%} of a step stops the run", remedy="Return None where it cannot judge."
                )
            notices.append(what)
        if n and len(returned.null) == n:
            notices.append(f"reward '{name}' scored none of {n} completions (None for all): they count for nothing")
        if self._zero[name] >= 0:
            scored = [v for v in returned.values if not math.isnan(v)]
            self._zero[name] = -1 if any(scored) else self._zero[name] + bool(scored)
            if self._zero[name] == self.zero_steps:
                self._zero[name] = -1
                notices.append(
                    f"reward '{name}' was 0 for every completion of the first {self.zero_steps} steps: nothing is learnt from it. Look at a "
                    "few completions: is the format asked for in the prompt, opened by the template, or cut off?"
                )
        return notices


_LOOP_LOCK = threading.Lock()


def _weighted(weights: Sequence[float], row: Sequence[float]) -> float:
    """Weighted sum of what was scored; a part without weight does not make a row scored."""
    scored = [w * v for w, v in zip(weights, row, strict=True) if w != 0 and not math.isnan(v)]
    return sum(scored) if scored else UNSCORED


def _named(rewards: list[Reward]) -> list[Reward]:
    """Two rewards of one name get numbers: name, name_2, ..."""
    seen: Counter[str] = Counter()
    out = []
    for reward in rewards:
        seen[reward.name] += 1
        name = reward.name if seen[reward.name] == 1 else f"{reward.name}_{seen[reward.name]}"
        out.append(Reward(reward.function, name, reward.weight, reward.timeout_s))
    return out


def data_columns(rows: Sequence[Mapping[str, Any]], *, where: str | None = None) -> dict[str, list[Any]]:
    """The data's columns, None where a row has not got one. UserError for a column of a name that functions are given beside them."""
    names = sorted({name for row in rows for name in row})
    if taken := [name for name in names if name in VIEW_COLUMNS]:
        what = f"the data has a column named {taken[0]!r}, a name that reward functions are given"
        raise UserError(what, where=where, remedy="Rename the column.")
    return {name: [row.get(name) for row in rows] for name in names}


def columns_of(rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    """What reward functions are given for these rollouts; see the top of this file. UserError for a column of the same name."""
    out = data_columns([r.columns for r in rollouts])
    out["prompts"] = [r.prompt for r in rollouts]
    out["completions"] = [r.text if isinstance(r.prompt, str) else [{"role": "assistant", "content": r.text}] for r in rollouts]
    out["completion_ids"] = [r.tokens for r in rollouts]
    out["raw_completions"] = [r.view.raw_text for r in rollouts]
    out["opened"] = [r.view.opened for r in rollouts]
    out["finish_reasons"] = [r.finish_reason for r in rollouts]
    return out
