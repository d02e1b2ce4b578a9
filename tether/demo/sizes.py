"""How much of everything the demo takes, and how long that is known to last."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tether import progress


@dataclass(frozen=True)
class Size:
    """The whole story, its quick version, or the same road in seconds for a test machine."""

    pairs: int
    test_pairs: int
    reward_pairs: int
    prompts: int  # held out
    samples: int  # answers to each held-out prompt, of every model
    limit: int  # tokens that an answer may take
    batch: int
    reward_rate: float
    dpo_rate: float
    methods: tuple[str, ...]  # trained on the reward model, each once with the tether and once without
    steps: int
    batch_online: int  # answers a step, 8 to a prompt
    online_rate: float
    seconds: Mapping[str, float] = field(default_factory=dict)  # of each part, measured on two cores

    @property
    def minutes(self) -> int:
        return math.ceil(sum(self.seconds.values()) / 60)


# 400 pairs in batches of 8 are 50 steps, enough to see everything the page talks about.
FULL = Size(
    pairs=400,
    test_pairs=100,
    reward_pairs=400,
    prompts=128,
    samples=2,
    limit=64,
    batch=8,
    reward_rate=5e-5,
    dpo_rate=2e-5,
    methods=("grpo", "ppo"),
    steps=10,
    batch_online=40,
    online_rate=4e-5,
    seconds={
        "reward model": 130,
        "DPO": 135,
        "GRPO, no tether": 155,
        "GRPO, tethered": 155,
        "PPO, no tether": 165,
        "PPO, tethered": 155,
        "answers and scores": 255,
    },
)
QUICK = Size(
    pairs=320,
    test_pairs=100,
    reward_pairs=200,
    prompts=128,
    samples=1,
    limit=64,
    batch=8,
    reward_rate=5e-5,
    dpo_rate=2e-5,
    methods=("grpo",),
    steps=5,
    batch_online=40,
    online_rate=4e-5,
    seconds={"reward model": 73, "DPO": 108, "GRPO, no tether": 66, "GRPO, tethered": 64, "answers and scores": 95},
)
TINY = Size(
    pairs=48,
    test_pairs=24,
    reward_pairs=32,
    prompts=16,
    samples=2,
    limit=16,
    batch=8,
    reward_rate=1e-3,
    dpo_rate=1e-3,
    methods=("grpo", "ppo"),
    steps=2,
    batch_online=16,
    online_rate=1e-3,
    seconds={
        "reward model": 1,
        "DPO": 1,
        "GRPO, no tether": 1,
        "GRPO, tethered": 1,
        "PPO, no tether": 1,
        "PPO, tethered": 1,
        "answers and scores": 2,
    },
)


class Clock:
    """Seconds each part took, and how long the rest may take: as on the machine it was measured on, times how much slower this one is."""

    def __init__(self, planned: Mapping[str, float]) -> None:
        self.planned, self.took = dict(planned), dict[str, float]()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.took[name] = time.monotonic() - began

    def left(self) -> float:
        """Seconds that the parts not yet done may take.

        >>> clock = Clock({"a": 10, "b": 20}); clock.took["a"] = 15.0; clock.left()
        30.0
        """
        done = sum(self.planned[name] for name in self.took if name in self.planned)
        pace = sum(self.took[name] for name in self.took if name in self.planned) / done if done else 1.0
        return pace * sum(seconds for name, seconds in self.planned.items() if name not in self.took)

    def announce(self, number: int, of: int, text: str) -> None:
        progress.say(f"\n{number}/{of} {text}  (about {progress.duration(self.left())} left of the whole)")
