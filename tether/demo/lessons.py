"""What came of the demo, in sentences: they follow the intervals, whatever these say."""

from __future__ import annotations

from collections.abc import Mapping

from tether import stats
from tether.demo.online import NAMES, TETHER, Trial
from tether.demo.sampled import Measure, Side
from tether.report.numbers import measured, percent

Told = list[dict[str, str]]


def words(gain: stats.Interval) -> str:
    value, low, high = (measured(x, sign=True) for x in gain[:3])
    return f"{value}, 95 % interval {low} to {high}"


def from_choices(measures: Mapping[str, Measure], cut: tuple[float, float], n: int) -> Told:
    """DPO: the models before and after, on n held-out prompts; `cut` are the shares of answers that ran into the limit."""
    felt, true, length, reward = (measures[k] for k in ("sentiment", "true", "length", "reward"))
    told = []
    if felt.clear > 0:
        text = f"DPO made the answers more cheerful: sentiment {measured(felt.before.value)} → {measured(felt.after.value)} ({words(felt.gain)}) on {n} prompts "
        told.append({"tone": "good", "text": text + "that training never saw. The model learnt what the people went by."})
    else:
        text = f"DPO: sentiment {measured(felt.before.value)} → {measured(felt.after.value)} ({words(felt.gain)}) on {n} held-out prompts: "
        told.append({"tone": "watch", "text": text + ("it fell." if felt.clear < 0 else "no change that stands out from chance.")})
    if length.clear > 0:
        text = f"They also became longer: {measured(length.before.value)} → {measured(length.after.value)} tokens ({words(length.gain)}). "
        text += "Nobody wanted that, but people who choose lean a little to the longer answer, and the pairs hand it on."
        if cut[1] > cut[0] + 0.02:
            text += f" {percent(cut[1])} of the answers now run into the limit, before {percent(cut[0])}."
        told.append({"tone": "watch", "text": text})
    moved = f"{measured(true.before.value)} → {measured(true.after.value)} ({words(true.gain)})"
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
        text = f"The reward model, which learnt from the same choices, likes the new answers better ({words(reward.gain)} standard deviations): "
        told.append({"tone": "watch", "text": text + "the stand-in rises while what it stands for falls."})
    return told


def from_practice(start: Side, sides: Mapping[Trial, Side]) -> Told:
    """GRPO and PPO on the reward model: each run against the start, and the tethered against the free one."""
    told = []
    for trial, side in sides.items():
        proxy, true = (stats.paired_difference(side.values(k), start.values(k)) for k in ("reward", "true"))
        length, kl = (stats.mean_interval(side.values(k)) for k in ("length", "kl"))
        text = f"{trial.name}: the reward model's score {_moved(proxy)} ({words(proxy)}), the true score {_moved(true)} ({words(true)}); "
        text += (
            f"{measured(length.value)} tokens an answer, {percent(side.cut)} cut at the limit, {measured(kl.value)} nats from the start."
        )
        hacked = proxy.low > 0 and true.high < 0
        if hacked:
            text += " This is reward hacking: it found what the stand-in pays for and the people do not like."
        told.append({"tone": "watch" if hacked else "good" if true.low > 0 else "plain", "text": text})
    for method in dict.fromkeys(trial.method for trial in sides):
        free, tied = sides[Trial(method, False)], sides[Trial(method, True)]
        gap = stats.paired_difference(tied.values("true"), free.values("true"))
        lead = f"{NAMES[method]} with and without the tether ({TETHER:g} per nat), true score: {words(gap)}. "
        if gap.low > 0:
            told.append({"tone": "good", "text": lead + "The tether kept it from running to where the stand-in is wrong."})
        elif gap.high < 0:
            told.append({"tone": "watch", "text": lead + "Here the tether cost more than it kept."})
        else:
            told.append({"tone": "plain", "text": lead + "No difference that stands out from chance."})
    return told


def _moved(gain: stats.Interval) -> str:
    return "rose" if gain.low > 0 else "fell" if gain.high < 0 else "did not clearly move"
