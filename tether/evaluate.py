"""Attempts judged by a reward, as figures with intervals.

1. the reward judges them; what it cannot judge stays unscored, with the reason
2. answers that are equal by the math reward's own rule are one vote
3. rates over prompts (`pass_rates`)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tether import pass_rates
from tether.attempts import Attempt, order
from tether.errors import UserError
from tether.messages import Text, assistant
from tether.pass_rates import Measure, Tried
from tether.progress import Progress
from tether.reward import Reward, Rewards, data_columns
from tether.rewards.code import CodeReward
from tether.rewards.math import MathReward
from tether.tasks import Task

PIECE = 64  # answers that a reward is given at a time, whole tasks; its time limit is for a piece


# -- 1. judging --------------------------------------------------------------------------------------------------------


@dataclass
class Judged:
    attempts: list[Attempt]
    notices: list[str] = field(default_factory=list)
    report: dict[str, float] = field(default_factory=dict)  # what the reward counted


def judge(tasks: Sequence[Task], attempts: Sequence[Attempt], judged_by: Reward, say: Callable[[str], None] | None = None) -> Judged:
    """Every attempt with its reward. A task that makes the reward fail stays unscored, with the reason; if all do it is an error."""
    extracted: list[str | None] = []
    function = judged_by.function
    if isinstance(function, MathReward):

        def noting(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
            found = function.verdicts(completions, **columns)
            extracted.extend(v.answer for v in found)
            return [None if v.equal is None else float(v.equal) for v in found]

        judged_by = replace(judged_by, function=noting)
    given = data_columns([task.columns for task in tasks], where="data")
    rewards = Rewards([replace(judged_by, weight=1.0)], max_broken=1.0, zero_steps=-1, say=say)
    out: list[Attempt] = []

    def score(piece: Sequence[Attempt]) -> list[Attempt]:
        extracted.clear()
        columns = _columns(tasks, given, piece)
        asked = [_shown(tasks[a.task], function) for a in piece]
        places = [str(tasks[a.task].source) for a in piece]
        scored = rewards.score(asked, columns.pop("completions"), columns, places=places)
        found = extracted or [None] * len(piece)
        values = [scored.total(i) for i in range(len(piece))]
        why = "the reward gave no number (None, NaN or inf)"
        return [replace(a, reward=v, extracted=x, why=why if v is None else None) for a, v, x in zip(piece, values, found, strict=True)]

    try:
        with Progress(len(attempts), f"judged by {judged_by.name}") as progress:
            for piece in _pieces(attempts):
                try:
                    done = score(piece)
                except UserError as error:
                    done = []
                    for one in by_task(piece):
                        try:
                            done += score(one)
                        except UserError as own:
                            done += [replace(a, why=str(own)) for a in one]
                    if all(a.reward is None for a in [*done, *out]):
                        raise error from None
                out += done
                progress.update(len(out))
    finally:
        rewards.close()
    report = {k: float(v) for k, v in (getattr(function, "counters", None) or {}).items()}
    shares: Any = getattr(function, "report", None)
    report |= shares() if callable(shares) else {}
    return Judged(sorted(out, key=order), _judging_notices(tasks, out, judged_by.name, function, report), report)


def _judging_notices(tasks: Sequence[Task], attempts: Sequence[Attempt], name: str, function: Any, report: dict[str, float]) -> list[str]:
    notices = []
    unscored = [a for a in attempts if a.reward is None]
    if unscored:
        reason, n = Counter(a.why or "" for a in unscored).most_common(1)[0]
        first = next(a for a in unscored if a.why == reason)
        notices.append(
            f"{len(unscored)} of {len(attempts)} samples are unscored and left out of every rate; {n} of them because: {reason} "
            f"(the first: {tasks[first.task].source})"
        )
    if isinstance(function, MathReward) and (late := int(report.get("time", 0) + report.get("memory", 0))):
        notices.append(f"{name}: {late} answers could not be compared within {function.limit_s:g} s or 2 GiB and count as wrong")
    return notices


def _shown(task: Task, function: Any) -> Text:
    return task.shown if isinstance(function, CodeReward) else task.prompt


def _columns(tasks: Sequence[Task], given: Mapping[str, list[Any]], piece: Sequence[Attempt]) -> dict[str, list[Any]]:
    """What reward functions are given, as in training (`tether.reward`); `given` are the data's columns, aligned with the tasks."""
    out = {name: [values[a.task] for a in piece] for name, values in given.items()}
    out["completions"] = [a.text if isinstance(tasks[a.task].prompt, str) else assistant(a.text) for a in piece]
    out["opened"] = [a.opened for a in piece]
    out["finish_reasons"] = [a.finish_reason for a in piece]
    out["raw_completions"] = [a.raw_text for a in piece]
    if all(a.tokens is not None for a in piece):
        out["completion_ids"] = [a.tokens for a in piece]
    return out


def by_task(attempts: Sequence[Attempt]) -> list[list[Attempt]]:
    """The attempts of each task."""
    groups: defaultdict[int, list[Attempt]] = defaultdict(list)
    for a in attempts:
        groups[a.task].append(a)
    return list(groups.values())


def _pieces(attempts: Sequence[Attempt]) -> Iterator[list[Attempt]]:
    """Whole tasks, about `PIECE` answers at a time; greedy answers apart, because some rewards compare those of one prompt."""
    for greedy in (False, True):
        piece: list[Attempt] = []
        for group in by_task([a for a in attempts if a.greedy == greedy]):
            if piece and len(piece) + len(group) > PIECE:
                yield piece
                piece = []
            piece += group
        if piece:
            yield piece


# -- 2. votes, 3. rates ------------------------------------------------------------------------------------------------


@dataclass
class Evaluation:
    """`measures` over all prompts, `categories` by category; `unscored` samples are in none of them."""

    measures: list[Measure]
    categories: dict[str, list[Measure]]
    spread: dict[str, int]
    prompts: int
    samples: int
    unscored: int

    def as_dict(self) -> dict[str, Any]:
        out = {k: v for k, v in asdict(self).items() if k not in ("measures", "categories")}
        out["measures"] = {m.name: m.as_dict() for m in self.measures}
        return out | {"categories": {name: {m.name: m.as_dict() for m in ms} for name, ms in self.categories.items()}}


def evaluate(
    tasks: Sequence[Task], judged: Judged, judged_by: Reward, ks: Sequence[int], *, threshold: float | None = None, seed: int = 0
) -> Evaluation:
    """The figures of judged attempts. Votes are counted for the math reward, whose answers can be compared."""
    function = judged_by.function
    math = function if isinstance(function, MathReward) else None
    before = math.counters["time"] if math else 0
    tried = [_tried(tasks[group[0].task], group, math) for group in by_task(judged.attempts)]
    if math and (late := math.counters["time"] - before):
        judged.notices.append(f"{late} pairs of answers could not be compared in time and count as two votes")
    named = pass_rates.by_category(tried) if any(t.category for t in tried) else {}
    return Evaluation(
        pass_rates.measure(tried, ks, threshold=threshold, seed=seed),
        {name: pass_rates.measure(group, ks, threshold=threshold, seed=seed) for name, group in named.items()},
        pass_rates.spread(tried, 1.0 if threshold is None else threshold)
        if threshold is not None or pass_rates.is_pass_or_fail(tried)
        else {},
        len(tried),
        len(judged.attempts),
        sum(a.reward is None for a in judged.attempts),
    )


def _tried(task: Task, group: Sequence[Attempt], math: MathReward | None) -> Tried:
    samples, greedy = [a for a in group if not a.greedy], next((a for a in group if a.greedy), None)
    scored = [a for a in samples if a.reward is not None]
    votes, right = _votes(scored, math) if math is not None else (None, [])
    return Tried(
        rewards=[a.reward for a in scored if a.reward is not None],
        lengths=[a.n_tokens for a in samples if a.n_tokens is not None],
        cut=[a.finish_reason == "length" for a in samples if a.finish_reason is not None],
        votes=votes,
        right=right,
        silent=sum(a.extracted is None for a in scored),
        greedy=greedy.reward if greedy else None,
        greedy_length=greedy.n_tokens if greedy else None,
        greedy_cut=greedy.finish_reason == "length" if greedy and greedy.finish_reason is not None else None,
        category=task.category,
    )


def _votes(scored: Sequence[Attempt], math: MathReward) -> tuple[list[int], list[bool]]:
    """Votes for each answer, by the math reward's own equality. Answers that equal the gold answer are one; so are equal texts."""
    answers = [a for a in scored if a.extracted is not None]
    n_right = sum(a.reward == 1.0 for a in answers)
    votes, right = ([n_right], [True]) if n_right else ([], [])
    wrong: list[list[str]] = []  # spellings of each wrong answer
    counts: list[int] = []
    for text in (" ".join((a.extracted or "").split()) for a in answers if a.reward != 1.0):
        place = next((i for i, texts in enumerate(wrong) if text in texts), None)
        if place is None:
            place = next((i for i, texts in enumerate(wrong) if math.verify(text, texts[0]).equal), None)
            if place is None:
                place = len(wrong)
                wrong.append([])
                counts.append(0)
            wrong[place].append(text)
        counts[place] += 1
    return votes + counts, right + [False] * len(counts)
