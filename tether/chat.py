"""Messages <-> token ids: `encode_*` turn loaded rows into Examples of at most `max_length` tokens, and account for every row.

`max_length` counts the prompt and one answer together, for every answer alike. The prompt is never cut. A longer row is left
out (`truncation="drop"`), or its answers lose their ends ("keep_start"): a cut answer gets no end token, since its author had
not finished. A row whose prompt leaves no room for an answer token is dropped either way. Nothing is cached and no worker
process is started: encoding takes about a second per thousand rows or less, and a stale cache is a silent error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from tether.batch import Example
from tether.codec import Codec, Rendered, TrainOn
from tether.conversations import Conversation
from tether.errors import UserError
from tether.feedback import Feedback
from tether.files import LEAVE_OUT, Loaded, Problem, Source
from tether.preferences import Preference
from tether.prompts import Prompt
from tether.rankings import Ranking

__all__ = [
    "Codec",
    "Encoded",
    "Truncation",
    "encode_conversations",
    "encode_feedback",
    "encode_preferences",
    "encode_prompts",
    "encode_rankings",
]

Truncation = Literal["drop", "keep_start"]


@dataclass
class Encoded:
    """Examples, and what became of every other row."""

    examples: list[Example]
    problems: list[Problem]

    def counts(self) -> dict[str, int]:
        return dict(Counter(p.kind for p in self.problems))

    def enforce(self, policy: Literal["refuse", "drop"] = "refuse", loading: Sequence[Problem] = ()) -> None:
        """`refuse_untrained` for these rows; `loading`: what was found when they were read."""
        refuse_untrained([*loading, *self.problems], len({e.source for e in self.examples}), policy)


def refuse_untrained(problems: Sequence[Problem], n_kept: int, policy: Literal["refuse", "drop"], share: float = 0.05) -> None:
    """Raise UserError when more than this share of the rows has nothing to train on for a reason that no length limit mends.

    A template that does not suit the rows is refused under either policy: a run on what is left would be another run than was
    meant. Rows without an answer are refused under "refuse" only; under "drop" they stay counted and named.
    """
    kinds = UNSUITED if policy == "drop" else UNSUITED | UNANSWERED
    dropped = [p for p in problems if p.action in ("drop", "reject")]
    lost = {p.source: p for p in dropped if p.kind in kinds}
    n_rows = n_kept + len({p.source for p in dropped})
    if len(lost) > share * n_rows:
        first = list(lost.values())[:3]
        reasons = "".join(f"  {p}\n" for p in first) + (f"  ... and {len(lost) - len(first)} more\n" if len(lost) > len(first) else "")
        verb = "has" if len(lost) == 1 else "have"
        remedy = LEAVE_OUT if all(p.kind in UNANSWERED for p in lost.values()) else "Mend the rows, or pass another chat template."
        raise UserError(f"{len(lost)} of {n_rows} rows {verb} nothing to train on:\n{reasons}", remedy=remedy)


# Kinds of problems that say: the template and the rows do not go together; and: the row has no answer to learn from.
UNSUITED = frozenset({"template_refuses", "template_not_a_prefix", "turn_lost"})
UNANSWERED = frozenset({"no_answer", "empty"})


def encode_conversations(
    loaded: Loaded[Conversation],
    codec: Codec,
    *,
    max_length: int | None,
    truncation: Truncation = "keep_start",
    train_on: TrainOn = "assistant",
) -> Encoded:
    """Demonstrations: one answer per Example. `train_on`: every assistant turn, the last one, or all text but tool turns."""
    rendered = (codec.render_conversation(row, train_on) for row in loaded.rows)
    rows: list[Facts] = [(row.source, ["completion"], {}) for row in loaded.rows]
    return _encode(codec, rendered, rows, max_length, truncation)


def encode_preferences(
    loaded: Loaded[Preference], codec: Codec, *, max_length: int | None, truncation: Truncation = "keep_start"
) -> Encoded:
    """Pairs: answers = [chosen, rejected], extra["margin"] where the row has one."""
    rendered = (codec.render_answers(row.prompt, [row.chosen, row.rejected]) for row in loaded.rows)
    rows = [
        (row.source, ["chosen", "rejected"], row.extra if row.margin is None else {**row.extra, "margin": row.margin})
        for row in loaded.rows
    ]
    return _encode(codec, rendered, rows, max_length, truncation, _not_alike)


def encode_rankings(loaded: Loaded[Ranking], codec: Codec, *, max_length: int | None, truncation: Truncation = "keep_start") -> Encoded:
    """Groups: answers in the order of the row, extra["ranks"] beside them (1 is the best)."""
    rendered = (codec.render_answers(row.prompt, row.answers) for row in loaded.rows)
    rows = [(row.source, [f"answers[{i}]" for i in range(len(row.answers))], {**row.extra, "ranks": row.ranks}) for row in loaded.rows]
    return _encode(codec, rendered, rows, max_length, truncation, _group_differs)


def encode_feedback(loaded: Loaded[Feedback], codec: Codec, *, max_length: int | None, truncation: Truncation = "keep_start") -> Encoded:
    """Labelled answers: answers = [completion], extra["label"]."""
    rendered = (codec.render_answers(row.prompt, [row.completion]) for row in loaded.rows)
    rows = [(row.source, ["completion"], {**row.extra, "label": row.label}) for row in loaded.rows]
    return _encode(codec, rendered, rows, max_length, truncation)


def encode_prompts(loaded: Loaded[Prompt], codec: Codec, *, max_length: int | None) -> Encoded:
    """Prompts without answers, with the generation prompt; one that leaves no room for an answer token is dropped."""
    rendered = (codec.render_answers(row.prompt, []) for row in loaded.rows)
    rows: list[Facts] = [(row.source, [], row.extra) for row in loaded.rows]
    return _encode(codec, rendered, rows, max_length, "drop")


Facts = tuple[Source, list[str], dict[str, Any]]  # where a row stands, the names of its answers, what it carries along


def _encode(
    codec: Codec,
    rendered: Iterable[Rendered],
    rows: Sequence[Facts],
    max_length: int | None,
    truncation: Truncation,
    check: Callable[[Example], Problem | None] = lambda example: None,
) -> Encoded:
    if truncation not in ("drop", "keep_start"):
        raise UserError(f"there is no {truncation!r}", where="truncation", remedy="Use drop or keep_start.")
    if max_length is not None and max_length < 2:
        raise UserError("a row needs at least 2 tokens, one of prompt and one of answer", where=f"max_length: {max_length}")
    problems: list[Problem] = []
    kept: list[tuple[Rendered, Facts]] = []
    for row, facts in zip(rendered, rows, strict=True):
        problems += [Problem(facts[0], n.kind, n.what, n.remedy, n.action) for n in row.notes]
        if not any(n.action == "drop" for n in row.notes):
            kept.append((row, facts))
    examples = []
    for bare, (_, (source, names, extra)) in zip(codec.examples([r for r, _ in kept]), kept, strict=True):
        example = Example(bare.prompt, bare.answers, bare.trained, source, extra)
        fitted, found = _fit(example, names, max_length, truncation)
        problems += found
        if fitted is None:
            continue
        alike = check(fitted)
        if alike is not None:
            problems.append(alike)
        if alike is None or alike.action == "warn":
            examples.append(fitted)
    return Encoded(examples, problems)


def _fit(example: Example, names: Sequence[str], max_length: int | None, truncation: Truncation) -> tuple[Example | None, list[Problem]]:
    """The example within `max_length`, or None; and what was done to it."""
    assert example.source is not None
    source, n = example.source, len(example.prompt)
    longest = n + max(map(len, example.answers), default=1)
    if max_length is None or longest <= max_length:
        return example, []
    room = max_length - n
    if room < 1:
        words = f"the prompt alone has {n} tokens, max_length is {max_length}: no answer token would be left"
        return None, [Problem(source, "no_answer_token", words, "Raise max_length, or shorten the prompt.", "drop", "prompt")]
    if truncation == "drop":
        words = f"{longest} tokens, max_length is {max_length}"
        return None, [Problem(source, "too_long", words, "Raise max_length, or set truncation=keep_start.", "drop")]
    cut = {name: len(answer) for name, answer in zip(names, example.answers, strict=True) if len(answer) > room}
    # One problem per row, so that a count of problems is a count of rows.
    words = f"{' and '.join(f'{n} + {size}' for size in cut.values())} tokens cut to {max_length}"
    remedy = "Raise max_length to keep the whole; a cut answer has no end token."
    problems = [Problem(source, "cut", words, remedy, "truncate", ", ".join(cut))]
    trained = [t[:room] for t in example.trained]
    if not all(any(t) for t in trained):
        words = f"within max_length {max_length} no token that the model wrote is left"
        return None, [Problem(source, "no_answer_token", words, "Raise max_length, or shorten the prompt.", "drop", "prompt")]
    return Example(example.prompt, [a[:room] for a in example.answers], trained, source, example.extra), problems


ALIKE = "both answers are the same tokens (after the template and max_length): no preference"
ALIKE_REMEDY = "Remove the row, or raise max_length."


def _not_alike(example: Example) -> Problem | None:
    chosen, rejected = example.answers
    if chosen != rejected:
        return None
    assert example.source is not None
    return Problem(example.source, "identical_tokens", ALIKE, ALIKE_REMEDY, "drop", "chosen")


def _group_differs(example: Example) -> Problem | None:
    """A group is dropped when no two answers of different ranks differ in their tokens, and warned of when some do not."""
    ranked = list(zip(example.extra["ranks"], example.answers, strict=True))
    alike = [a == b for (r, a), (q, b) in combinations(ranked, 2) if r != q]
    if not any(alike):
        return None
    assert example.source is not None
    if all(alike):
        return Problem(example.source, "identical_tokens", ALIKE, ALIKE_REMEDY, "drop", "answers")
    words = f"{sum(alike)} of {len(alike)} comparisons are between the same tokens"
    return Problem(example.source, "identical_tokens", words, ALIKE_REMEDY, "warn", "answers")
