"""`Attempt`: one answer to one task; asked of a model, each on disk as soon as it ends, or read from a file."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tether import atomic
from tether.answers import Speaker, read_answers, same_question
from tether.codec import Codec
from tether.engines.local import Completion, Request
from tether.engines.sampling import Sampling
from tether.errors import UserError
from tether.progress import Progress
from tether.readers import read_rows
from tether.rollout import view
from tether.tasks import Task

SAMPLES, SETTINGS, RESULT = "samples.jsonl", "settings.json", "evaluation.json"


@dataclass(frozen=True)
class Attempt:
    """One answer to one task. `text` is what the reward sees: up to the end mark, without a stop string that ended it."""

    task: int
    sample: int
    greedy: bool
    text: str
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    tokens: list[int] | None = None  # ids; None for answers of a file
    n_tokens: int | None = None
    opened: str = ""
    raw_text: str = ""
    reward: float | None = None
    extracted: str | None = None  # the answer that the math reward found
    why: str | None = None  # why there is no reward

    def as_row(self, task: Task) -> dict[str, Any]:
        """A line of the file of samples; `tether compare` and `tether evaluate` read it as an answer."""
        out: dict[str, Any] = {"task": self.task, "sample": self.sample, "greedy": self.greedy, "source": str(task.source)}
        out |= {"prompt": task.prompt, "completion": self.text, "opened": self.opened, "finish_reason": self.finish_reason}
        out |= {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.n_tokens, "completion_ids": self.tokens}
        if self.reward is not None or self.why is not None:
            out |= {"reward": self.reward, "extracted": self.extracted, "unscored_because": self.why}
        return out


# -- from a model ---------------------------------------------------------------------------------------------------------


def sample(
    speaker: Speaker,
    tasks: Sequence[Task],
    sampling: Sampling,
    *,
    n: int,
    greedy: bool = True,
    seed: int = 0,
    made: Sequence[Attempt] = (),
    keep: Callable[[Attempt], None] = lambda attempt: None,
) -> list[Attempt]:
    """`n` answers to each task and a greedy one, in the order of the tasks. `keep` gets each as it ends.

    Answer i of task j depends on the prompt, the settings, the seed, i and j alone. Tasks whose answers are all in `made` are not
    asked again.
    """
    finished = complete(made, n, greedy)
    requests, whose = [], []
    for j, task in enumerate(tasks):
        if j in finished:
            continue
        place = str(task.source)
        ids = speaker.codec.prompt_ids(task.prompt, place)
        requests.append(Request(ids, sampling, n, f"{seed}/{j}", place))
        whose.append((j, False))
        if greedy:
            requests.append(Request(ids, replace(sampling, temperature=0.0), 1, f"{seed}/{j}", place))
            whose.append((j, True))
    out: list[Attempt] = []
    with Progress(sum(r.n for r in requests), f"answers of {speaker.name}") as progress:

        def on_done(completion: Completion) -> None:
            j, is_greedy = whose[completion.request]
            out.append(_attempt(completion, requests[completion.request], j, is_greedy, speaker.codec))
            keep(out[-1])
            progress.update(len(out))

        speaker.sampler.sample(requests, on_done=on_done)
    return sorted([*(a for a in made if a.task in finished), *out], key=order)


def complete(made: Sequence[Attempt], n: int, greedy: bool) -> set[int]:
    """Tasks of which every answer is there."""
    counts = Counter(a.task for a in made)
    return {task for task, count in counts.items() if count == n + greedy}


def order(a: Attempt) -> tuple[int, bool, int]:
    """Tasks as they come; of each its samples, then the greedy answer."""
    return a.task, a.greedy, a.sample


def _attempt(completion: Completion, request: Request, task: int, greedy: bool, codec: Codec) -> Attempt:
    seen = view(completion.tokens, request.prompt, lambda ids: codec.decode(ids, control=True), codec.end_ids)
    text = seen.text
    if completion.finish_reason == "stop_string":  # a program that goes on into "\ndef" is none
        text = text[: min(at for stop in request.sampling.stop if (at := text.find(stop)) >= 0)]
    return Attempt(
        task, completion.sample, greedy, text, completion.finish_reason, len(request.prompt), list(completion.tokens),
        len(completion.tokens), seen.opened, seen.raw_text,
    )  # fmt: skip


def read_attempts(path: str, tasks: Sequence[Task]) -> tuple[list[Attempt], list[str]]:
    """Answers of a file (`answers.read_answers`), put to their tasks by the question; and what to say about it.

    Tasks with fewer answers than others are left out: of an unfinished run they hold those answers that ended first, the short ones.
    """
    answers, rows = read_answers(path), read_rows(path).rows
    by_question: defaultdict[str, list[int]] = defaultdict(list)
    for j, task in enumerate(tasks):
        by_question[same_question(task.prompt)].append(j)
    if answers[0].prompt is None and len(answers) != len(tasks):
        raise UserError(
            f"{len(answers)} answers without prompts cannot be put to {len(tasks)} tasks", where=path, remedy="Add a prompt to each row."
        )
    out: list[Attempt] = []
    foreign = []
    for i, (answer, row) in enumerate(zip(answers, rows, strict=True)):
        found = [i] if answer.prompt is None else by_question.get(same_question(answer.prompt), [])
        if not found:
            foreign.append(answer)
        for j in found:
            ids = row.data.get("completion_ids")
            out.append(
                Attempt(
                    j, answer.sample, row.data.get("greedy") is True, answer.text, answer.finish_reason, answer.prompt_tokens,
                    ids if isinstance(ids, list) else None, answer.completion_tokens, str(row.data.get("opened") or ""), answer.text,
                )
            )  # fmt: skip
    if not out:
        raise UserError(
            "none of the answers is to one of the tasks",
            where=path,
            remedy="Prompts must be the same in both files; give the --ask and --system that they were made with.",
        )
    notices = [f"{len(foreign)} answers are to no task (the first: {foreign[0].source}) and are left out"] if foreign else []
    counts = {greedy: Counter(a.task for a in out if a.greedy == greedy) for greedy in (False, True)}
    most = max(counts[False].values(), default=0)
    short = {j for j, _ in enumerate(tasks) if counts[False][j] < most or (counts[True] and not counts[True][j])}
    if short:
        notices.append(
            f"{len(short)} of {len(tasks)} tasks have fewer than {most} answers and are left out; what is left may not be a fair choice"
        )
    return sorted((a for a in out if a.task not in short), key=order), notices


# -- the folder --------------------------------------------------------------------------------------------------------


def refuse_used(path: Path) -> None:
    """UserError for a folder that an evaluation can neither begin in nor go on with."""
    if path.exists() and not path.is_dir():
        raise UserError("this is a file", where=str(path), remedy="Name a folder.")
    if (path / RESULT).exists():
        raise UserError(
            "the folder holds a finished evaluation",
            where=str(path),
            remedy=f"Name another; to judge its samples anew: tether evaluate {path / SAMPLES} TASKS --reward ...",
        )
    if path.exists() and any(path.iterdir()) and not (path / SETTINGS).exists():
        raise UserError("the folder is not empty", where=str(path), remedy="Name a new one.")


class Folder:
    """Where an evaluation is kept: `samples.jsonl`, `settings.json` while it is being made, `evaluation.json` when it is done.

    A folder whose settings are the same and that is not finished is gone on with; any other that is not empty is refused.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, json.loads(json.dumps(settings))
        refuse_used(path)
        self.goes_on = (path / SETTINGS).exists()
        if self.goes_on:
            before = json.loads((path / SETTINGS).read_text(encoding="utf-8"))
            if other := [k for k in {**before, **self.settings} if before.get(k) != self.settings.get(k)]:
                raise UserError(
                    f"the folder holds an unfinished evaluation with another {other[0]}: {before.get(other[0])!r}, "
                    f"not {self.settings.get(other[0])!r}",
                    where=str(path),
                    remedy="Name another folder, or go on with the same settings.",
                )
        path.mkdir(parents=True, exist_ok=True)
        atomic.write_file(path / SETTINGS, json.dumps(self.settings, indent=2, ensure_ascii=False) + "\n")

    def made(self, tasks: Sequence[Task], codec: Codec, n: int, greedy: bool) -> list[Attempt]:
        """Answers that an earlier start left, of tasks that it finished. The rest is asked again."""
        if not (self.path / SAMPLES).exists():
            return []
        found = list(self._rows(codec, len(tasks)))
        kept = [a for a in found if a.task in complete(found, n, greedy)]
        self.write(kept, tasks)
        return kept

    def _rows(self, codec: Codec, n_tasks: int) -> Iterator[Attempt]:
        for line in (self.path / SAMPLES).read_text(encoding="utf-8").split("\n"):
            try:
                row = json.loads(line)
            except ValueError:  # the line that was being written when the power went
                continue
            if row["task"] < n_tasks:
                yield Attempt(
                    row["task"], row["sample"], row["greedy"], row["completion"], row["finish_reason"], row["prompt_tokens"],
                    row["completion_ids"], row["completion_tokens"], row["opened"], codec.decode(row["completion_ids"], control=True),
                )  # fmt: skip

    def count(self) -> int:
        """Answers that are on disk."""
        path = self.path / SAMPLES
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def add(self, attempt: Attempt, task: Task) -> None:
        with open(self.path / SAMPLES, "a", encoding="utf-8") as file:
            file.write(json.dumps(attempt.as_row(task), ensure_ascii=False) + "\n")

    def write(self, attempts: Sequence[Attempt], tasks: Sequence[Task]) -> None:
        lines = (json.dumps(a.as_row(tasks[a.task]), ensure_ascii=False) + "\n" for a in attempts)
        atomic.write_file(self.path / SAMPLES, "".join(lines))

    def finish(self, result: dict[str, Any]) -> None:
        atomic.write_file(self.path / RESULT, json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
