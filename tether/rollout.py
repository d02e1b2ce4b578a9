"""`Rollout`: one sampled attempt, its tokens and log-probabilities as they were sampled, and how it was scored.

Plain data, one line of JSON each. Nothing here is decoded and encoded again: `group_example` hands the sampled ids to the engine.

What a reward function is shown (`View`) is made here, once:

- `text`: what the model wrote, up to its first end mark. Control tokens other than end marks stay visible: a format tag may be
  one. A stop string that ended the attempt stays in the text: it was sampled and is trained.
- `raw_text`: every sampled token, end marks and what follows them included.
- `opened`: the part of the answer that the prompt had opened already, such as "<think>\\n" at the end of a chat template's
  generation prompt. The whole answer is `opened + text`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from tether.batch import Example
from tether.errors import UserError
from tether.files import Source
from tether.messages import Text

FinishReason = Literal["stop", "length", "stop_string"]
FILE = "rollouts.jsonl"


class Sampled(Protocol):
    """What an engine gives back for one continuation; `tether.engines.local.Completion` is one."""

    @property
    def sample(self) -> int: ...

    @property
    def tokens(self) -> list[int]: ...

    @property
    def logps(self) -> list[float]: ...

    @property
    def sampling_logps(self) -> list[float]: ...

    @property
    def finish_reason(self) -> Any: ...


@dataclass(frozen=True)
class View:
    """What a reward function sees of one attempt; the three parts are described at the top of this file."""

    text: str
    raw_text: str
    opened: str = ""

    @property
    def answer(self) -> str:
        return self.opened + self.text


def view(tokens: Sequence[int], prompt_ids: Sequence[int], decode: Callable[[Sequence[int]], str], end_ids: Collection[int]) -> View:
    """The view of sampled `tokens`. `decode` keeps control tokens: `lambda ids: codec.decode(ids, control=True)`."""
    first_end = next((i for i, t in enumerate(tokens) if t in end_ids), len(tokens))
    return View(decode(tokens[:first_end]), decode(tokens), opened_by(decode(prompt_ids)))


def opened_by(prompt: str) -> str:
    """The tag that the prompt leaves open at its very end, with the blanks after it; "" where it opens none.

    >>> opened_by("<|im_start|>assistant\\n<think>\\n")
    '<think>\\n'
    >>> opened_by("<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n")
    ''
    """
    found = re.search(r"<[A-Za-z_][\w-]*>\s*\Z", prompt)
    return found.group() if found else ""


@dataclass(frozen=True)
class Rollout:
    """One attempt at one prompt.

    `tokens`, `trained`, `logps` and `sampling_logps` are aligned: entry t describes token t. `logps` are under the training
    distribution softmax(logits / temperature), `sampling_logps` under the one drawn from (0 when greedy). `prompt_id` counts the
    prompts that are trained on (`source` names file and line); `group` is shared by the attempts that are compared with each other, so a prompt that comes again
    in a later step has another group. Raises ValueError when the lists do not fit or a log-probability is no number.
    """

    prompt_id: int
    group: int
    sample: int
    prompt: Text
    prompt_ids: list[int]
    tokens: list[int]
    trained: list[bool]  # which tokens the policy wrote (not a tool, say)
    logps: list[float]
    sampling_logps: list[float]
    finish_reason: FinishReason
    view: View
    policy_version: int  # optimiser steps that the sampling weights had seen
    rewards: dict[str, float | None] = field(default_factory=dict)  # by name; None: could not be scored
    total: float | None = None  # weighted sum of those
    advantage: float | None = None
    source: Source | None = None
    columns: dict[str, Any] = field(default_factory=dict)  # the data row's other columns: gold answers, tests, ...

    def __post_init__(self) -> None:
        sizes = {len(self.tokens), len(self.trained), len(self.logps), len(self.sampling_logps)}
        if len(sizes) > 1:
            raise ValueError(f"tokens, trained, logps and sampling_logps must be of one length, got {sorted(sizes)}")
        if not all(map(math.isfinite, self.logps)) or not all(map(math.isfinite, self.sampling_logps)):
            raise ValueError(f"a log-probability of prompt {self.prompt_id}, sample {self.sample} is not a finite number")

    @property
    def text(self) -> str:
        return self.view.text

    @property
    def finished(self) -> bool:
        """The model ended it; otherwise it was cut at the length limit."""
        return self.finish_reason != "length"

    @property
    def n_trained(self) -> int:
        return sum(self.trained)

    def scored(self, rewards: dict[str, float | None], total: float | None) -> Rollout:
        return replace(self, rewards=rewards, total=total)

    def with_advantage(self, advantage: float) -> Rollout:
        return replace(self, advantage=advantage)

    def row(self) -> dict[str, Any]:
        """As plain data for JSON. Log-probabilities are float32 numbers: nine digits keep them exactly."""
        out = asdict(self)
        for name in ("logps", "sampling_logps"):
            out[name] = [float(f"{x:.9g}") for x in out[name]]
        if self.sampling_logps == self.logps:
            out["sampling_logps"] = None  # the usual case: no filter, no penalty
        out["trained"] = None if all(self.trained) else [int(t) for t in self.trained]
        return out

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Rollout:
        """The inverse of `row`. A missing or unknown key is KeyError or TypeError."""
        row = {k: v for k, v in row.items() if k != "step"}
        row["view"] = View(**row["view"])
        row["source"] = Source(**row["source"]) if row.get("source") else None
        if row["sampling_logps"] is None:
            row["sampling_logps"] = list(row["logps"])
        row["trained"] = [True] * len(row["tokens"]) if row["trained"] is None else [bool(t) for t in row["trained"]]
        return cls(**row)


def from_sampled(
    sampled: Sampled,
    *,
    prompt: Text,
    prompt_ids: Sequence[int],
    prompt_id: int,
    group: int,
    codec: Any,
    policy_version: int,
    source: Source | None = None,
    columns: dict[str, Any] | None = None,
) -> Rollout:
    """An engine's continuation as a rollout. `codec` is a `tether.chat.Codec` (used for `decode` and `end_ids`).

    What an engine hands on after the first end mark is kept, but it is not the answer and is not trained.
    """
    end = next((t for t, token in enumerate(sampled.tokens) if token in codec.end_ids), len(sampled.tokens))
    return Rollout(
        prompt_id=prompt_id,
        group=group,
        sample=sampled.sample,
        prompt=prompt,
        prompt_ids=list(prompt_ids),
        tokens=list(sampled.tokens),
        trained=[t <= end for t in range(len(sampled.tokens))],
        logps=list(sampled.logps),
        sampling_logps=list(sampled.sampling_logps),
        finish_reason=sampled.finish_reason,
        view=view(sampled.tokens, prompt_ids, lambda ids: str(codec.decode(ids, control=True)), codec.end_ids),
        policy_version=policy_version,
        source=source,
        columns=dict(columns or {}),
    )


def groups(rollouts: Iterable[Rollout]) -> list[list[Rollout]]:
    """Rollouts by group, in order of first appearance. ValueError when one group mixes prompts."""
    out: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        out.setdefault(rollout.group, []).append(rollout)
    for number, members in out.items():
        if any(r.prompt_ids != members[0].prompt_ids for r in members):
            raise ValueError(f"group {number} mixes attempts at different prompts")
    return list(out.values())


def group_example(group: Sequence[Rollout]) -> Example:
    """The group as the engine eats it: its prompt once, the sampled ids of every attempt."""
    return Example(list(group[0].prompt_ids), [r.tokens for r in group], [r.trained for r in group], group[0].source)


def read(path: str | Path) -> Iterator[Rollout]:
    """Rollouts from such a file. UserError with file and line for a line that is not one."""
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield Rollout.from_row(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(
                    f"this line is not a rollout ({type(error).__name__}: {error})",
                    where=str(Source(str(path), number)),
                    remedy="Such files are written by Tether's own runs.",
                ) from error
