"""The demo's measurement: the same held-out prompts answered before and after, scored by everyone who has an opinion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether import stats
from tether.demo.world import FREE_TOKENS, length_cost, sentiment
from tether.progress import Progress
from tether.report.numbers import measured, percent


@dataclass(frozen=True)
class Answered:
    """One answer to one held-out prompt; `tokens` counts its end token, `ended` is False when it was cut at the limit."""

    text: str
    tokens: int
    ended: bool


def answer_prompts(model: Path, prompts: Sequence[Any], *, max_new_tokens: int, seed: int, title: str) -> list[Answered]:
    """One answer per prompt at temperature 1. The same seed before and after: prompt i draws the same uniform numbers."""
    from tether.engines.local import LocalSampler, Request
    from tether.engines.sampling import Sampling
    from tether.policy import Policy

    policy = Policy.load(model)
    sampler = LocalSampler(policy.model, policy.tokenizer, precision=policy.precision)
    setting = Sampling(max_new_tokens=max_new_tokens, temperature=1.0)
    requests = [Request(policy.codec.prompt_ids(p), setting, seed=f"{seed}/{i}") for i, p in enumerate(prompts)]
    with Progress(len(requests), title) as progress:
        drawn = [0] * len(requests)
        done = 0

        def count(request: int, sample: int, token: int) -> None:
            nonlocal done
            drawn[request] += 1
            if token in sampler.end_ids or drawn[request] == max_new_tokens:
                done += 1
                progress.update(done)

        completions = sampler.sample(requests, on_token=count)
    return [Answered((c.text or "").strip(), len(c.tokens), c.finish_reason != "length") for c in completions]


def score_with_reward_model(model: Path, prompts: Sequence[Any], answers: Sequence[Answered]) -> list[float]:
    """In standard deviations of the scores it gave its own training answers."""
    from tether.scalar import ScalarModel

    return ScalarModel.load(model).score_texts([(p, a.text) for p, a in zip(prompts, answers, strict=True)], normalised=True)


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


def measure(before: Sequence[Answered], after: Sequence[Answered], scores: tuple[Sequence[float], Sequence[float]]) -> dict[str, Measure]:
    """What the people like, what they truly like, length, and what the reward model says."""
    felt = [[sentiment(a.text) for a in side] for side in (before, after)]
    true = [[f - length_cost(a.tokens) for f, a in zip(fs, side, strict=True)] for fs, side in zip(felt, (before, after), strict=True)]
    lengths = [[float(a.tokens) for a in side] for side in (before, after)]
    return {
        "sentiment": Measure.of("Sentiment", "VADER compound, −1 to 1", *felt),
        "true": Measure.of("True score", f"sentiment less the cost beyond {FREE_TOKENS} tokens", *true),
        "length": Measure.of("Length", "tokens", *lengths),
        "reward": Measure.of("Reward model's score", "standard deviations of its training scores", *scores),
    }


def sample_rows(
    prompts: Sequence[Any], before: Sequence[Answered], after: Sequence[Answered], scores: tuple[Sequence[float], Sequence[float]]
) -> list[dict[str, Any]]:
    """Rows of samples.jsonl."""

    def told(a: Answered, score: float) -> dict[str, Any]:
        felt = sentiment(a.text)
        numbers = {"sentiment": felt, "tokens": a.tokens, "true score": felt - length_cost(a.tokens), "reward model": score}
        return {"text": a.text, "ended": a.ended, "numbers": {k: round(v, 4) for k, v in numbers.items()}}

    return [
        {"prompt": p[-1]["content"], "before": told(b, x), "after": told(a, y)}
        for p, b, a, x, y in zip(prompts, before, after, *scores, strict=True)
    ]


def lessons(measures: Mapping[str, Measure], cut: tuple[float, float], n: int) -> list[dict[str, str]]:
    """The result in sentences, whatever it is."""
    felt, true, length, reward = (measures[k] for k in ("sentiment", "true", "length", "reward"))

    def words(m: Measure) -> str:
        value, low, high = (measured(x, sign=True) for x in m.gain[:3])
        return f"{value}, 95 % interval {low} to {high}"

    told = []
    if felt.clear > 0:
        text = f"The answers became more cheerful: sentiment {measured(felt.before.value)} → {measured(felt.after.value)} ({words(felt)}) on {n} prompts "
        told.append({"tone": "good", "text": text + "that training never saw. The model learnt what the people went by."})
    else:
        text = f"Sentiment {measured(felt.before.value)} → {measured(felt.after.value)} ({words(felt)}) on {n} held-out prompts: "
        told.append({"tone": "watch", "text": text + ("it fell." if felt.clear < 0 else "no change that stands out from chance.")})
    if length.clear > 0:
        text = f"They also became longer: {measured(length.before.value)} → {measured(length.after.value)} tokens ({words(length)}). "
        text += "Nobody wanted that, but people who choose lean a little to the longer answer, and the pairs hand it on."
        if cut[1] > cut[0] + 0.02:
            text += f" {percent(cut[1])} of the answers now run into the limit, before {percent(cut[0])}."
        told.append({"tone": "watch", "text": text})
    moved = f"{measured(true.before.value)} → {measured(true.after.value)} ({words(true)})"
    remedy = "Measure what you want apart from what you train on, and watch the length."
    if true.clear < 0:
        text = f"By what the people truly like the model got worse: {moved}. "
        text += "That is the lesson: whatever learns from choices learns the mistakes in them too."
        told.append({"tone": "watch", "text": text, "remedy": remedy})
    elif true.clear > 0:
        told.append({"tone": "good", "text": f"True score {moved}: the people would agree."})
    elif felt.clear > 0:
        text = f"True score {moved}: what the people truly like did not rise with what they went by. "
        told.append({"tone": "watch", "text": text + "Whatever learns from choices learns the mistakes in them too.", "remedy": remedy})
    else:
        told.append({"tone": "plain", "text": f"True score {moved}: no clear change."})
    if reward.clear > 0 and true.clear < 0:
        text = f"The reward model, which learnt from the same choices, likes the new answers better ({words(reward)} standard deviations): "
        told.append({"tone": "watch", "text": text + "the stand-in rises while what it stands for falls."})
    return told
