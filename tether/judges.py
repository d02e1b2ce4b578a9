"""Judges: who decides which of two answers is better. Free of torch until a reward model is asked.

A judge is called with prompts and the two answers to each, and returns one `Verdict` for each pair. A judge that cannot decide
says "invalid", which is an outcome of its own: never a tie, never a win.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

from tether.errors import UserError
from tether.messages import Text, plain

Winner = Literal["a", "b", "tie", "invalid"]
KINDS = "a reward model (folder or hub id), vader, longer, shorter, human, regex:PATTERN or module:function"
Scores = Callable[[Sequence[Text], Sequence[str]], Sequence[float | None]]


@dataclass(frozen=True)
class Verdict:
    """Who won, with the two scores where the judge gives scores, and why where it is invalid."""

    winner: Winner
    score_a: float | None = None
    score_b: float | None = None
    reason: str | None = None

    def swapped(self) -> Verdict:
        """The same verdict with the sides exchanged."""
        names: dict[Winner, Winner] = {"a": "b", "b": "a"}
        return Verdict(names.get(self.winner, self.winner), self.score_b, self.score_a, self.reason)


class Judge(Protocol):
    name: str
    person: bool  # a person must not be told which side is which, nor see a pair twice

    def __call__(self, prompts: Sequence[Text], answers_a: Sequence[str], answers_b: Sequence[str]) -> list[Verdict]: ...


@dataclass
class ScoreJudge:
    """The higher score wins; scores within `margin` of each other are a tie; no finite score on either side is invalid.

    >>> judge = ScoreJudge("longer", lambda prompts, answers: [len(a) for a in answers])
    >>> [v.winner for v in judge(["Hi", "Hi"], ["Hello", "Yes"], ["Yo", "Yes"])]
    ['a', 'tie']
    """

    name: str
    scores: Scores
    margin: float = 0.0
    person: bool = False

    def __call__(self, prompts: Sequence[Text], answers_a: Sequence[str], answers_b: Sequence[str]) -> list[Verdict]:
        # Both sides in one call: a batch can not favour a side.
        both = list(self.scores([*prompts, *prompts], [*answers_a, *answers_b]))
        if len(both) != 2 * len(prompts):
            raise UserError(
                f"judge '{self.name}' returned {len(both)} scores for {2 * len(prompts)} answers", remedy="Return one for each."
            )
        pairs = zip(both[: len(prompts)], both[len(prompts) :], strict=True)
        return [_by_score(finite(a), finite(b), self.margin) for a, b in pairs]


def finite(score: float | None) -> float | None:
    return float(score) if score is not None and math.isfinite(score) else None


def _by_score(a: float | None, b: float | None, margin: float) -> Verdict:
    if a is None or b is None:
        return Verdict("invalid", a, b, "no score for " + ("either answer" if a is None and b is None else "one answer"))
    if abs(a - b) <= margin:
        return Verdict("tie", a, b)
    return Verdict("a" if a > b else "b", a, b)


# -- ready judges ------------------------------------------------------------------------------------------------------


def reward_model(name: str, *, margin: float = 0.0, precision: str = "auto") -> ScoreJudge:
    """A reward model's scores, each text by the model's own tokenizer and template."""
    from tether.scalar import ScalarModel

    model = ScalarModel.load(name, precision=precision)
    return ScoreJudge(name, lambda prompts, answers: model.score_texts(list(zip(prompts, answers, strict=True))), margin)


def vader(*, margin: float = 0.0) -> ScoreJudge:
    """How cheerful an answer is, -1..1 (Hutto & Gilbert 2014)."""
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError:
        raise UserError(
            "the judge vader needs the package vaderSentiment", remedy="Install it with: pip install 'tether-lm[demo]'"
        ) from None
    analyzer = SentimentIntensityAnalyzer()
    return ScoreJudge("vader", lambda _, answers: [float(analyzer.polarity_scores(a)["compound"]) for a in answers], margin)


def longer(*, margin: float = 0.0) -> ScoreJudge:
    """More words win."""
    return ScoreJudge("longer", lambda _, answers: [float(len(a.split())) for a in answers], margin)


def shorter(*, margin: float = 0.0) -> ScoreJudge:
    """Fewer words win."""
    return ScoreJudge("shorter", lambda _, answers: [-float(len(a.split())) for a in answers], margin)


def pattern(regex: str) -> ScoreJudge:
    """An answer in which the pattern is found scores 1, any other 0."""
    try:
        compiled = re.compile(regex)
    except re.error as error:
        raise UserError(f"the pattern cannot be read: {error}", where=f"regex:{regex}") from None
    return ScoreJudge(f"regex:{regex}", lambda _, answers: [float(compiled.search(a) is not None) for a in answers])


def function(spec: str, *, margin: float = 0.0) -> ScoreJudge:
    """`module:function` with the signature of rewards, f(prompts, completions) -> one number each, None where it cannot judge."""
    from tether.reward_call import arguments, awaited, checked

    called = _imported(spec)

    def scores(prompts: Sequence[Text], answers: Sequence[str]) -> Sequence[float | None]:
        # A row of messages gets its completion as messages, as in training.
        completions = [a if isinstance(p, str) else [{"role": "assistant", "content": a}] for p, a in zip(prompts, answers, strict=True)]
        positional, keyword = arguments(called, spec, {"prompts": list(prompts), "completions": completions})
        returned = called(*positional, **keyword)
        if inspect.isawaitable(returned):
            returned = asyncio.run(awaited(returned))
        return checked(spec, len(prompts), returned).values

    return ScoreJudge(spec, scores, margin)


def _imported(spec: str) -> Callable[..., Any]:
    module, _, attribute = spec.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # the user's own file beside the data
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"the module {module} cannot be imported: {error}", where=spec, remedy="Run where its file is.") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UserError(f"{module} has no {attribute}", where=spec)
        found = getattr(found, part)
    if not callable(found):
        raise UserError(f"{attribute} of {module} cannot be called", where=spec)
    return found


# -- a person ----------------------------------------------------------------------------------------------------------

KEYS: Mapping[str, Winner] = {"1": "a", "2": "b", "t": "tie", "s": "invalid"}


@dataclass
class PersonJudge:
    """A person at the terminal, blind: sides come as 1 and 2, in an order the person is not told.

    Whoever calls shuffles the sides and records how (`compare` does). Ending the input (Ctrl-D, q) leaves the rest invalid,
    with the reason "not judged".
    """

    name: str = "human"
    person: bool = True
    read: Callable[[str], str] = input
    out: TextIO | None = None

    def __call__(self, prompts: Sequence[Text], answers_a: Sequence[str], answers_b: Sequence[str]) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for i, (prompt, a, b) in enumerate(zip(prompts, answers_a, answers_b, strict=True), 1):
            if a == b:
                verdicts.append(Verdict("tie", reason="the answers are the same"))
                continue
            print(f"\n[{i}/{len(prompts)}] {plain(prompt)}\n\n-- 1 --\n{a}\n\n-- 2 --\n{b}\n", file=self.out)
            winner = self._asked()
            if winner is None:
                left = len(prompts) - len(verdicts)
                return verdicts + [Verdict("invalid", reason="not judged")] * left
            verdicts.append(Verdict(winner, reason="skipped by the person" if winner == "invalid" else None))
        return verdicts

    def _asked(self) -> Winner | None:
        while True:
            try:
                key = self.read("Which is better? 1, 2, t (tie), s (skip), q (stop): ").strip().lower()
            except EOFError:
                return None
            if key == "q":
                return None
            if key in KEYS:
                return KEYS[key]
            print("Please type 1, 2, t, s or q.", file=self.out)


# -- by name -----------------------------------------------------------------------------------------------------------


def make_judge(spec: str, *, margin: float = 0.0, precision: str = "auto") -> Judge:
    """The judge that a word on the command line means."""
    if not (math.isfinite(margin) and margin >= 0):
        raise UserError(f"the margin must be 0 or more, got {margin}", where="margin")
    ready: dict[str, Callable[[], Judge]] = {
        "vader": lambda: vader(margin=margin),
        "longer": lambda: longer(margin=margin),
        "shorter": lambda: shorter(margin=margin),
        "human": PersonJudge,
    }
    if spec in ready:
        return ready[spec]()
    if spec.startswith("regex:"):
        return pattern(spec.removeprefix("regex:"))
    if re.fullmatch(r"[\w.]+:[\w.]+", spec) and not Path(spec).exists():
        return function(spec, margin=margin)
    if Path(spec).expanduser().exists() or re.fullmatch(r"[\w.-]+/[\w.-]+", spec):
        return reward_model(spec, margin=margin, precision=precision)
    raise UserError(f"there is no judge {spec!r}", where="judge", remedy=f"Use {KINDS}.")


def shuffled_sides(n: int, seed: int) -> list[bool]:
    """Whether pair i is shown with its sides exchanged: a pure function of seed and i."""
    return [random.Random(f"{seed}/{i}").random() < 0.5 for i in range(n)]
