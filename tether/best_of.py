"""The best of n samples by a scorer, as one side of a comparison: who is chosen, how often, and how far that moves the policy.

Beirami et al. 2024 (arXiv:2401.01879): the choice's KL to the policy is at most log n - (n - 1)/n, reached only where no two samples
are alike; it is an upper bound, not the KL. With more samples than n nobody is chosen by one draw: each sample counts by its
chance to be the best of n drawn among them, which makes every mean an unbiased estimate for best of n.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tether import stats
from tether.answers import Answer, same_question
from tether.errors import UserError
from tether.judges import Judge, ScoreJudge, Scores, finite, make_judge
from tether.messages import Text, assistant
from tether.reward import Rewards
from tether.rewards.functions import READY
from tether.tasks import make_reward

JUDGES_OWN = {"vader"}  # names that are a judge and a reward: the judge's is meant


def kl_bound(n: int) -> float:
    """Upper bound of KL(best of n || policy) in nats.

    >>> round(kl_bound(4), 4)
    0.6363
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    return math.log(n) - (n - 1) / n


def chances(scores: Sequence[float | None], n: int) -> list[float]:
    """Chance of each sample to be the best of n drawn without return. Of equal scores the earlier wins; no score loses to any.

    Sums to 1; the mean of scores under it is `stats.best_of_n`.

    >>> chances([0.0, 2.0, 1.0], 2)
    [0.0, 0.6666666666666666, 0.3333333333333333]
    """
    if not 1 <= n <= len(scores):
        raise ValueError(f"need 1 <= n <= {len(scores)} samples, got {n}")
    keys = [(-math.inf if s is None else float(s), s is not None, -i) for i, s in enumerate(scores)]
    out, total = [0.0] * len(scores), math.comb(len(scores), n)
    for below, i in enumerate(sorted(range(len(scores)), key=lambda i: keys[i])):
        out[i] = math.comb(below, n - 1) / total
    return out


# -- scorers -----------------------------------------------------------------------------------------------------------


class Remembered:
    """Scores that are asked for once for each answer to a question, however many pairs it is in."""

    def __init__(self, scores: Scores) -> None:
        self.scores = scores
        self.known: dict[tuple[str, str], float | None] = {}

    def __call__(self, prompts: Sequence[Text], answers: Sequence[str]) -> list[float | None]:
        keys = [(same_question(p), a) for p, a in zip(prompts, answers, strict=True)]
        new = {key: i for i, key in reversed(list(enumerate(keys))) if key not in self.known}
        wanted = sorted(new.values())
        if wanted:
            found = list(self.scores([prompts[i] for i in wanted], [answers[i] for i in wanted]))
            if len(found) != len(wanted):
                raise UserError(f"the scorer returned {len(found)} scores for {len(wanted)} answers", remedy="Return one for each.")
            self.known |= {keys[i]: finite(s) for i, s in zip(wanted, found, strict=True)}
        return [self.known[key] for key in keys]


def make_scorer(
    spec: str, columns: Mapping[str, Mapping[str, Any]] | None = None, *, margin: float = 0.0, precision: str = "auto"
) -> Judge:
    """The judge that a word means: one of `judges.make_judge`, or a reward by name (math, code, file.py:function, a recipe's block).

    `columns[same_question(prompt)]` are the columns of the data that a reward is given. Judges that score remember their scores.
    """
    if not (spec in READY and spec not in JUDGES_OWN) and ".py:" not in spec and not spec.lstrip().startswith("{"):
        made = make_judge(spec, margin=margin, precision=precision)
        return replace(made, scores=Remembered(made.scores)) if isinstance(made, ScoreJudge) else made
    judged_by = make_reward(spec)
    rewards = Rewards([replace(judged_by, weight=1.0)])

    def scores(prompts: Sequence[Text], answers: Sequence[str]) -> list[float | None]:
        rows = [dict((columns or {}).get(same_question(p), {})) for p in prompts]
        names = sorted({name for row in rows for name in row})
        given = [a if isinstance(p, str) else assistant(a) for p, a in zip(prompts, answers, strict=True)]
        try:
            scored = rewards.score(prompts, given, {name: [row.get(name) for row in rows] for name in names})
        finally:
            rewards.close()
        return [scored.total(i) for i in range(len(prompts))]

    return ScoreJudge(spec, Remembered(scores), margin)


# -- one side ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Best of `n`: mean scores over prompts by the scorer that chooses and by the judge. None where there are no scores."""

    n: int
    chosen_by: stats.Interval | None
    judged: stats.Interval | None

    @property
    def kl_upper_bound(self) -> float:
        return kl_bound(self.n)


@dataclass(frozen=True)
class BestOf:
    """A side that answers with the best of `n`. `chances` is aligned with `answers`; the chances of a prompt sum to 1."""

    n: int
    by: str
    answers: list[Answer]
    chances: list[float]
    steps: list[Step] = field(default_factory=list)
    unscored: int = 0  # samples that the scorer could not score: they never win
    undecided: int = 0  # prompts without any score: the first sample answers

    @property
    def samples(self) -> tuple[int, int]:
        """Fewest and most samples of a prompt."""
        counts = [len(group) for group in _by_prompt(self.answers).values()]
        return min(counts), max(counts)

    def as_dict(self, interval: Callable[[stats.Interval | None], Any]) -> dict[str, Any]:
        """For JSON; `interval` writes one."""
        steps = [
            {"n": s.n, "kl_upper_bound": s.kl_upper_bound, "score_by": interval(s.chosen_by), "score_judge": interval(s.judged)}
            for s in self.steps
        ]
        return {
            "n": self.n,
            "by": self.by,
            "kl_upper_bound": kl_bound(self.n),
            "samples": list(self.samples),
            "unscored": self.unscored,
            "undecided": self.undecided,
            "steps": steps,
        }


def best_of(answers: Sequence[Answer], n: int, by: Judge, judge: Judge | None = None, *, name: str = "", seed: int = 0) -> BestOf:
    """A side of a comparison from its samples, of which each prompt has at least n. UserError when `by` gives no scores."""
    if not isinstance(by, ScoreJudge):
        raise UserError(f"{by.name} gives no scores to choose by", where="--by", remedy="Use a reward model, a rule or a function.")
    if any(a.prompt is None for a in answers):
        raise UserError("answers without prompts cannot be told apart by prompt", where=name, remedy="Add a prompt to each row.")
    groups = _by_prompt(answers)
    for question, group in groups.items():
        if len(group) < n:
            raise UserError(
                f"{len(group)} answers to {question[:60]!r} are too few for the best of {n}", where=name, remedy="Draw more of them."
            )
    prompts, texts = [a.prompt or "" for a in answers], [a.text for a in answers]
    scores = by.scores(prompts, texts)
    judged = judge.scores(prompts, texts) if isinstance(judge, ScoreJudge) else None
    weights = [0.0] * len(answers)
    for group in groups.values():
        for i, chance in zip(group, chances([scores[i] for i in group], n), strict=True):
            weights[i] = chance
    ns = sorted({1, n, *(2**p for p in range(1, n.bit_length()) if 2**p < n)})
    steps = [Step(m, _mean(groups, scores, scores, m, seed), _mean(groups, scores, judged, m, seed) if judged else None) for m in ns]
    undecided = sum(all(scores[i] is None for i in group) for group in groups.values())
    return BestOf(n, by.name, list(answers), weights, steps, sum(s is None for s in scores), undecided)


def _by_prompt(answers: Sequence[Answer]) -> dict[str, list[int]]:
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for i, a in enumerate(answers):
        groups[same_question(a.prompt or "")].append(i)
    return dict(groups)


def _mean(
    groups: Mapping[str, Sequence[int]], chooses: Sequence[float | None], values: Sequence[float | None], n: int, seed: int
) -> stats.Interval | None:
    """Mean over prompts of the value of the best of n. A chosen sample without a value is left out of its prompt's mean."""
    means = []
    for group in groups.values():
        weighed = [(c, v) for c, i in zip(chances([chooses[i] for i in group], n), group, strict=True) if (v := values[i]) is not None]
        total = sum(c for c, _ in weighed)
        if total > 0:
            means.append(sum(c * v for c, v in weighed) / total)
    return stats.bootstrap_mean(means, seed=seed) if means else None
