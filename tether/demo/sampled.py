"""The demo's measurement: every model answers the same held-out prompts, and everyone who has an opinion scores the answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tether import stats
from tether.demo.world import FREE_TOKENS, length_cost, sentiment
from tether.progress import Progress

PROMPTS_AT_ONCE = 16  # between two steps of the progress bar


@dataclass(frozen=True)
class Answered:
    """One answer to one held-out prompt; `tokens` counts its end token, `ended` is False when it was cut at the limit."""

    text: str
    tokens: int
    ended: bool
    ids: tuple[int, ...] = ()
    logp: float = 0.0  # of the whole answer, under the model that wrote it


@dataclass(frozen=True)
class Side:
    """What one model answered: `samples` answers to each prompt, those to one prompt side by side.

    `scores` are the reward model's, in standard deviations of the scores it gave its own training answers; `kl` is each answer's
    log-prob under this model less that under the start, in nats: its mean estimates KL(model, start) of whole answers.
    """

    answers: Sequence[Answered]
    samples: int = 1
    scores: Sequence[float] = field(default_factory=list)
    kl: Sequence[float] = field(default_factory=list)

    @property
    def cut(self) -> float:
        """Share of answers that ran into the limit."""
        return sum(not a.ended for a in self.answers) / len(self.answers)

    def values(self, name: str) -> list[float]:
        """(prompts,) means over each prompt's answers of sentiment, true, length, reward or kl."""
        each: Sequence[float]
        if name == "sentiment":
            each = [sentiment(a.text) for a in self.answers]
        elif name == "true":
            each = [sentiment(a.text) - length_cost(a.tokens) for a in self.answers]
        elif name == "length":
            each = [float(a.tokens) for a in self.answers]
        else:
            each = self.scores if name == "reward" else self.kl
        return [sum(each[i : i + self.samples]) / self.samples for i in range(0, len(each), self.samples)]


def answer_prompts(
    models: Mapping[str, Path], prompts: Sequence[Any], *, samples: int, max_new_tokens: int, seed: int
) -> dict[str, list[Answered]]:
    """Each model's answers at temperature 1; `models` has folders of one architecture, named as the progress shall call them.

    The same seed for every model: answer i to a prompt draws the same uniform numbers.
    """
    from tether.engines.local import LocalSampler, Request
    from tether.engines.sampling import Sampling
    from tether.policy import Policy

    folders = list(models.values())
    policy = Policy.load(folders[0])
    sampler = LocalSampler(policy.model, policy.tokenizer, precision=policy.precision)
    setting = Sampling(max_new_tokens=max_new_tokens, temperature=1.0)
    requests = [Request(policy.codec.prompt_ids(p), setting, n=samples, seed=f"{seed}/{i}") for i, p in enumerate(prompts)]
    answers: dict[str, list[Answered]] = {}
    for name, folder in models.items():
        if folder != folders[0]:  # the sampler has found out how to run this architecture: the next model is new weights to it
            policy.read_weights(folder)
            sampler.refresh()
        with Progress(len(requests) * samples, f"{name}: answers") as progress:
            done = 0

            def ended(_: object, progress: Progress = progress) -> None:
                nonlocal done
                done += 1
                progress.update(done)

            completions = sampler.sample(requests, on_done=ended)
        answers[name] = [
            Answered((c.text or "").strip(), len(c.tokens), c.finish_reason != "length", tuple(c.tokens), sum(c.logps)) for c in completions
        ]
    return answers


def score_with_reward_model(model: Path, prompts: Sequence[Any], sides: Sequence[Sequence[Answered]]) -> list[list[float]]:
    """Of each side's answers, in standard deviations of the scores it gave its own training answers."""
    from tether.scalar import ScalarModel

    scorer = ScalarModel.load(model)
    scores: list[float] = []
    with Progress(sum(len(side) for side in sides), "the reward model reads them") as progress:
        for start in range(0, len(prompts), PROMPTS_AT_ONCE):
            some = range(start, min(start + PROMPTS_AT_ONCE, len(prompts)))
            scores += scorer.score_texts([(prompts[i], a.text) for i in some for a in answers_to(i, prompts, sides)], normalised=True)
            progress.update(len(scores))
    return by_side(scores, prompts, sides)


def distances(start: Path, prompts: Sequence[Any], sides: Sequence[Sequence[Answered]]) -> list[list[float]]:
    """Of each side's answers: log-prob under the model that wrote it less log-prob under the start, in nats."""
    from tether.batch import Example
    from tether.policy import Policy
    from tether.reference import reference_logps

    policy = Policy.load(start)
    written = [answers_to(i, prompts, sides) for i in range(len(prompts))]
    examples = [
        Example(policy.codec.prompt_ids(prompt), [list(a.ids) for a in answers], [[True] * len(a.ids) for a in answers], None, {})
        for prompt, answers in zip(prompts, written, strict=True)
    ]
    logps = [a.logp for answers in written for a in answers]
    with Progress(len(logps), "the start reads them") as progress:
        there = reference_logps(policy, examples, cache=False, progress=lambda done, _: progress.update(done)).tolist()
    return by_side([here - t for here, t in zip(logps, there, strict=True)], prompts, sides)


def answers_to(i: int, prompts: Sequence[Any], sides: Sequence[Sequence[Answered]]) -> list[Answered]:
    """All sides' answers to prompt i in a row: whoever reads them computes the prompt once."""
    samples = [len(side) // len(prompts) for side in sides]
    return [a for side, n in zip(sides, samples, strict=True) for a in side[i * n : (i + 1) * n]]


def by_side(values: Sequence[float], prompts: Sequence[Any], sides: Sequence[Sequence[Answered]]) -> list[list[float]]:
    """Values in the order of `answers_to`, prompt after prompt, sorted back to the order of each side."""
    left = iter(values)
    out: list[list[float]] = [[] for _ in sides]
    for _ in prompts:
        for side, mine in zip(sides, out, strict=True):
            mine += [next(left) for _ in range(len(side) // len(prompts))]
    return out


@dataclass(frozen=True)
class Measure:
    """One number per prompt, before and after; the gain's interval is over prompts, paired."""

    name: str
    unit: str
    before: stats.Interval
    after: stats.Interval
    gain: stats.Interval

    @classmethod
    def of(cls, name: str, unit: str, before: Sequence[float], after: Sequence[float]) -> Measure:
        return cls(name, unit, stats.mean_interval(before), stats.mean_interval(after), stats.paired_difference(after, before))

    @property
    def clear(self) -> int:
        """1 or -1 when the whole interval of the gain lies above or below 0, else 0."""
        return 1 if self.gain.low > 0 else -1 if self.gain.high < 0 else 0

    def row(self) -> dict[str, Any]:
        return {"name": self.name, "unit": self.unit, **{k: list(getattr(self, k))[:3] for k in ("before", "after", "gain")}}


UNITS = {
    "sentiment": ("Sentiment", "VADER compound, −1 to 1"),
    "true": ("True score", f"sentiment less the cost beyond {FREE_TOKENS} tokens"),
    "length": ("Length", "tokens"),
    "reward": ("Reward model's score", "standard deviations of its training scores"),
}


def measure(before: Side, after: Side) -> dict[str, Measure]:
    """What the people like, what they truly like, length, and what the reward model says."""
    return {key: Measure.of(name, unit, before.values(key), after.values(key)) for key, (name, unit) in UNITS.items()}


def sample_rows(prompts: Sequence[Any], sides: dict[str, Side]) -> list[dict[str, Any]]:
    """Rows of samples.jsonl: the first answer of every model to each prompt, then the second ones, and so on."""

    def told(side: Side, at: int) -> dict[str, Any]:
        a, felt = side.answers[at], sentiment(side.answers[at].text)
        numbers = {"sentiment": felt, "tokens": a.tokens, "true score": felt - length_cost(a.tokens)}
        numbers |= {"reward model": side.scores[at], "nats from the start": side.kl[at]}
        return {"text": a.text, "ended": a.ended, "numbers": {k: round(v, 4) for k, v in numbers.items()}}

    n = next(iter(sides.values())).samples
    places = [(i, sample) for sample in range(n) for i in range(len(prompts))]
    return [
        {"prompt": prompts[i][-1]["content"], "sample": sample, **{name: told(side, i * n + sample) for name, side in sides.items()}}
        for i, sample in places
    ]
