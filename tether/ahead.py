"""Sampling by servers, in step with training or ahead of it: a property of where attempts come from, not of the loop.

With `ahead` n the requests of steps t+1 .. t+n are under way while step t learns: they are sampled from the newest weights that had been
handed over when they were sent, which at their turn are up to n steps old. How old is recorded with every attempt; the loss corrects for
it by importance weights, as for any difference between the distribution that sampled and the one that trains. A thread waits for the
answers; scoring and learning stay where they are. What is under way is not kept: a resumed run begins afresh from its weights.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from tether import ranks
from tether.batch import DataOrder, Example
from tether.engines.local import Completion, Request
from tether.engines.sampling import Sampling
from tether.rl_recipe import SamplingRecipe
from tether.rollout import Rollout
from tether.stopwatch import Stopwatch


class Remote(Protocol):
    """`tether.engines.vllm.VLLMSampler` on the first rank, `Listener` on the others."""

    def refresh(self, version: int | None = None) -> None: ...
    def begin(self, requests: Sequence[Request]) -> Callable[[], list[Completion]]: ...
    def told(self) -> list[str]: ...


class Listener:
    """A rank that asks no server: it takes part in gathering the weights, and hears what the first rank was answered."""

    def __init__(self, write: Callable[[int], object]) -> None:
        self._write = write

    def refresh(self, version: int | None = None) -> None:
        self._write(version or 0)

    def begin(self, requests: Sequence[Request]) -> Callable[[], list[Completion]]:
        raise RuntimeError("only the first rank asks servers")

    def told(self) -> list[str]:
        return []


def seeds_of(recipe: SamplingRecipe, step: int, number: int, n: int) -> list[str]:
    """Seeds of the `n` prompts of a step's round `number`."""
    return [f"{recipe.seed}/{step}/{number}/{k}" for k in range(n)]


def requests_of(examples: Sequence[Example], seeds: Sequence[str], sampling: Sampling, n: int) -> list[Request]:
    """`n` completions of every example's prompt."""
    return [Request(e.prompt, sampling, n, seed, str(e.source)) for e, seed in zip(examples, seeds, strict=True)]


class Plan:
    """What each step of a run will ask first: known in advance, as the order of the data and the seeds are."""

    def __init__(self, recipe: SamplingRecipe, data: Sequence[Example], sampling: Sampling) -> None:
        self.recipe, self.data, self.sampling = recipe, data, sampling
        self.order = DataOrder(len(data), recipe.groups_per_step, recipe.seed, recipe.shuffle)
        self.steps = recipe.total_steps(self.order.steps_per_epoch)

    def requests(self, step: int) -> list[Request]:
        rows = self.order.batch(step)
        return requests_of(
            [self.data[i] for i in rows], seeds_of(self.recipe, step, 0, len(rows)), self.sampling, self.recipe.num_generations
        )


class Source:
    """Completions and the version of the weights that made them. Every rank asks it the same and gets the same.

    `positions` and `notice` as a sampler's; `tell` hears what happens to servers.
    """

    def __init__(
        self, sampler: Remote, plan: Plan, *, ahead: int, positions: int | None, watch: Stopwatch, tell: Callable[[str], None]
    ) -> None:
        self.sampler, self.plan, self.ahead, self.positions, self.watch, self.tell = sampler, plan, ahead, positions, watch, tell
        self.notice: str | None = None
        self.version: int | None = None  # of the weights that were handed over last
        self._pending: dict[int, Pending] = {}

    def sample(self, requests: Sequence[Request], version: int) -> tuple[list[Completion], int]:
        """Answers to `requests`, which belong to step `version` (or measure the weights after so many), and which weights gave them."""
        if not ranks.first():
            self._hand_over(version)
            return ranks.share(([], 0))
        main = self.ahead > 0 and version < self.plan.steps and list(requests) == self.plan.requests(version)
        pending = self._pending.pop(version, None) if main else None
        if pending is None:
            self._hand_over(version)
            completions, made_by = self.sampler.begin(requests)(), version
        else:
            # The answers first: whole weights are handed over only when nothing is under way.
            completions, made_by = pending.answers(), pending.version
            self._hand_over(version)
        if main:
            for step in range(version + 1, min(version + self.ahead, self.plan.steps - 1) + 1):
                if step not in self._pending:
                    self._pending[step] = Pending(self.sampler, self.plan.requests(step), version)
        for text in self.sampler.told():
            self.tell(text)
        return ranks.share((completions, made_by))

    def _hand_over(self, version: int) -> None:
        if version != self.version:
            with self.watch("hand_over"):
                self.sampler.refresh(version)
            self.version = version


class Pending:
    """Requests under way, sampled with the weights of `version`."""

    def __init__(self, sampler: Remote, requests: Sequence[Request], version: int) -> None:
        self.version = version
        self._done: queue.SimpleQueue[tuple[list[Completion], BaseException | None]] = queue.SimpleQueue()
        ask = sampler.begin(requests)  # here, so that weights which are handed over next are not taken for these

        def wait() -> None:
            try:
                self._done.put((ask(), None))
            except BaseException as error:
                self._done.put(([], error))

        threading.Thread(target=wait, daemon=True).start()

    def answers(self) -> list[Completion]:
        completions, error = self._done.get()
        if error is not None:
            raise error
        return completions


def staleness(rollouts: Sequence[Rollout], step: int) -> dict[str, float]:
    """By how many steps the weights that sampled are behind those that learn."""
    ages = [step - r.policy_version for r in rollouts]
    return {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))} if ages else {}
