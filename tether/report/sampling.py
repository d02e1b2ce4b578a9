"""The page of a run that samples: what answers earned, which groups taught something, and what the model says now and said before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from tether.files import json_lines
from tether.report.curves import SHARE, Curve, drawn
from tether.report.numbers import number, percent, plural, signed
from tether.report.view import Finding, RunView, Section, is_number
from tether.rollout import FILE

COMMANDS = frozenset({"grpo", "ppo"})
CUT_OFF = 0.5  # share of answers that hit the limit above which this is the first thing to know
MUCH_ALIKE = 0.5  # share of groups without a spread above which most sampling is for nothing
ENGINES_APART = 0.05  # nats per token between sampling and training; bf16 alone gives about 0.01

CURVES = (
    Curve("Reward", "mean of the step's answers", (("reward", "training"), ("eval_reward", "held-out"), ("eval_greedy_reward", "held-out, greedy"))),
    Curve("Scores", "after scaling and penalties", (("objective/scores", "score"), ("objective/rlhf_reward", "score less the tie"))),
    Curve("Spread within groups", "standard deviation of the reward", (("reward_std", "spread"),), limits=(0.0, None)),
    Curve(
        "Groups that teach nothing",
        "share of the step's groups",
        (("frac_reward_zero_std/all_wrong", "all answers at 0 or below"), ("frac_reward_zero_std/all_right", "all answers equal, above 0")),
        limits=SHARE,
    ),
    Curve(
        "Length of the answers",
        "tokens",
        (("completions/mean_length", "all"), ("completions/mean_terminated_length", "ended by the model")),
        limits=(0.0, None),
    ),
    Curve("Answers that were cut off", "share of the step's answers", (("completions/clipped_ratio", "cut off"),), limits=SHARE),
    Curve("Distance from the reference", "KL, nats per answer", (("objective/kl", "measured"),)),
    Curve("Strength of the tie", "beta", (("kl_coef", "beta"),), limits=(0.0, None)),
    Curve("Entropy", "nats per token", (("entropy", "training"),), limits=(0.0, None)),
    Curve("Where the clip acts", "share of the tokens", (("clip_ratio/low_mean", "from below"), ("clip_ratio/high_mean", "from above"))),
    Curve("What the critic foresees", "share of the returns' variance", (("val/explained_variance", "explained"),), limits=(None, 1.0)),
    Curve("Loss", "loss", (("loss", "training"),)),
    Curve(
        "Time of a step",
        "seconds",
        (("time/sampling", "sampling"), ("time/reward", "rewards"), ("time/scoring", "scoring"), ("time/update", "update")),
        limits=(0.0, None),
    ),
)  # fmt: skip


def learning(view: RunView) -> Section | None:
    charts = [c for curve in (CURVES[0], *parts(view), *CURVES[1:]) if (c := drawn(view, curve)) is not None and not _flat(view, curve)]
    return Section("Learning", charts=charts) if charts else None


def parts(view: RunView) -> list[Curve]:
    """The rewards by name, where there are several: up to six lines of one chart."""
    names = list(dict.fromkeys(k for row in view.metrics for k in row if k.startswith("rewards/") and k.endswith("/mean")))
    lines = tuple((name, name.removeprefix("rewards/").removesuffix("/mean")) for name in names[:6])
    return [Curve("Rewards by name", "mean of the step's answers", lines)] if len(names) > 1 else []


def _flat(view: RunView, curve: Curve) -> bool:
    """Whether every line of it is constant: the clip that never acts, a tie that does not change."""
    if curve.title not in ("Where the clip acts", "Strength of the tie", "Groups that teach nothing"):
        return False
    return all(a == b for name, _ in curve.lines for (_, a), (_, b) in pairwise(view.series(name)))


# What was said -----------------------------------------------------------------------------------------------------------------


def answers(folder: Path, most: int = 6) -> Section | None:
    """The first answer to a prompt when it was first sampled and when it was last sampled, for the prompts seen furthest apart."""
    first: dict[Any, dict[str, Any]] = {}
    last: dict[Any, dict[str, Any]] = {}
    path = folder / FILE
    for row in json_lines(path) if path.is_file() else ():
        if row.get("sample") == 0:
            first.setdefault(row.get("prompt_id"), row)
            last[row.get("prompt_id")] = row
    apart = sorted(last, key=lambda k: first[k]["step"] - last[k]["step"])[:most]
    if not apart:
        return None
    samples = []
    for key in apart:
        before, after = first[key], last[key]
        sample = {"prompt": _prompt(after["prompt"]), "after": _said(after)}
        samples.append({**sample, "before": _said(before)} if before["step"] < after["step"] else sample)
    text = f"One sampled answer for each prompt, chosen by number and not by what it earned; all of them are in {FILE}."
    return Section("Answers when a prompt was first and last sampled", [text], samples=samples)


def _prompt(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"]) if prompt else ""


def _said(row: dict[str, Any]) -> dict[str, Any]:
    numbers = {"step": row["step"], "reward": row["total"], "tokens": len(row["tokens"])}
    text = str(row["view"]["text"]) + ("" if row["finish_reason"] != "length" else " [cut off]")
    return {"text": text, "numbers": {k: v for k, v in numbers.items() if is_number(v)}}


# In short ----------------------------------------------------------------------------------------------------------------------


def findings(view: RunView) -> Iterator[Finding]:
    if view.command in COMMANDS:
        for part in (cut_off, reward, groups, zero_loss, unscored, engines):
            yield from part(view)


def cut_off(view: RunView) -> Iterator[Finding]:
    early, late = _early(view, "completions/clipped_ratio"), view.late("completions/clipped_ratio")
    limit = view.settings.get("max_completion_length")
    if early is None or late is None or max(early, late) <= CUT_OFF:
        return
    if late > CUT_OFF:
        text = f"{percent(late)} of the answers were cut off at max_completion_length={limit} at the end of the run."
        remedy = "What is cut off can hardly earn anything. Raise max_completion_length, or ask for shorter answers in the prompt."
        yield Finding("bad", text, remedy)
    else:
        text = (
            f"{percent(early)} of the answers were cut off at max_completion_length={limit} in the first steps, {percent(late)} at the end."
        )
        yield Finding("watch", text, "If the model had to learn to be brief, raise max_completion_length.")


def reward(view: RunView) -> Iterator[Finding]:
    """The last fifth of the steps against the first; what differs by less than two standard errors is no change."""
    values = [v for step, v in view.series("reward") if step > 0 and math.isfinite(v)]
    n = max(5, len(values) // 5)
    if len(values) < 2 * n:
        return
    (a, error_a), (b, error_b) = _mean(values[:n]), _mean(values[-n:])
    change, error = b - a, math.hypot(error_a, error_b)
    text = f"from {number(a)} in the first {n} steps to {number(b)} in the last {n}"
    held = [v for _, v in view.series("eval_reward")]
    more = f"; on held-out prompts from {number(held[0])} to {number(held[-1])}" if len(held) > 1 else ""
    if change > 2 * error:
        yield Finding("good", f"The reward rose {text}{more}.")
    elif change < -2 * error:
        yield Finding("watch", f"The reward fell {text}{more}.", "Lower learning_rate, or tie the model to its reference with beta.")
    else:
        remedy = "Prompts may be too hard or too easy. Else train for longer, or raise learning_rate."
        yield Finding("watch", f"The reward did not clearly change: {text} ({signed(change)}){more}.", remedy)


def groups(view: RunView) -> Iterator[Finding]:
    share = view.late("frac_reward_zero_std")
    if share is None or share <= MUCH_ALIKE:
        return
    wrong, right = view.late("frac_reward_zero_std/all_wrong") or 0.0, view.late("frac_reward_zero_std/all_right") or 0.0
    text = (
        f"In {percent(share)} of the groups at the end of the run all answers earned the same, and such a group teaches nothing "
        f"({percent(wrong)} at 0 or below, {percent(right)} above)."
    )
    hard = "Take easier prompts, sample more answers to each (num_generations), or give credit for part of the way."
    easy = "The prompts are solved: take harder ones."
    yield Finding("bad" if share == 1 else "watch", text, hard if wrong >= right else easy)


def zero_loss(view: RunView) -> Iterator[Finding]:
    loss, norm = [abs(v) for _, v in view.series("loss")], view.late("grad_norm")
    if loss and max(loss) < 1e-4 and norm:
        yield Finding(
            "plain",
            f"A loss of 0 is no stand-still here: with one update for a batch it is 0 by construction. The gradient has a norm of {number(norm)}.",
            "Look at the reward and the gradient norm.",
        )


def unscored(view: RunView) -> Iterator[Finding]:
    for name in dict.fromkeys(k for row in view.metrics for k in row if k.startswith("rewards/") and k.endswith("/unscored")):
        share = sum(v for _, v in view.series(name)) / max(1, len(view.series("reward")))
        kind = name.removeprefix("rewards/").removesuffix("/unscored")
        if share > 0.01:
            yield Finding("watch", f"The reward {kind} could not judge {percent(share)} of the answers; they took no part by it.")


def engines(view: RunView) -> Iterator[Finding]:
    gap = view.late("sampling/sampling_logp_difference/mean")
    if gap is not None and gap > ENGINES_APART:
        text = f"Log-probabilities of sampling and of training differ by {number(gap)} nats per token."
        yield Finding("watch", text, "Set precision=fp32, or weigh by importance=token_truncate.")
    steps = [n.get("step") for n in view.notices if n.get("kind") == "negative_kl"]
    if steps:
        text = f"The KL to the reference was clearly below 0 in {plural(len(steps), 'step')}, first at step {steps[0]}, which cannot be."
        yield Finding("bad", text, "The tokens trained on are not the policy's own. Check temperature and the model's generation settings.")


def _early(view: RunView, name: str, n: int = 3) -> float | None:
    values = [v for step, v in view.series(name) if step > 0][:n]
    return sum(values) / len(values) if values else None


def _mean(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1) / len(values))
