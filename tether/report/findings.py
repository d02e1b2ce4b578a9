"""A run in sentences: what a reader who looks at one thing should know, the worst first."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tether.report import sampling
from tether.report.numbers import number, percent, plural, signed
from tether.report.view import Finding, RunView, is_number
from tether.stats import calibration_error

WORST_FIRST = {"bad": 0, "watch": 1, "plain": 2, "good": 3}
# What helps against displacement, and the losses for which the advice is no news.
REMEDIES = [
    ("add the likelihood of the chosen answer to the loss (loss_type=dpo_nll_seq)", {"dpo_nll_seq", "dpo_nll_token"}),
    ("penalise its fall (loss_type=dpop)", {"dpop"}),
    ("normalise by length (loss_type=dpo_norm)", {"dpo_norm"}),
]


def findings(view: RunView) -> list[Finding]:
    all_of_them = (sampling.findings, progress, numbers_broken, displacement, overfitting, reward_quality, rows_lost, clipping)
    told = [f for part in all_of_them for f in part(view)]
    return sorted(told, key=lambda f: WORST_FIRST[f.tone])


def progress(view: RunView) -> Iterator[Finding]:
    """Whether it ended, and whether it learnt."""
    stopped = [n for n in view.notices if n.get("kind") == "error"] if view.summary is None else []
    if stopped:
        yield Finding("bad", f"The run stopped with an error. {stopped[-1].get('text', '')}")
    if view.summary is None:
        steps = plural(len(view.metrics), "step")
        yield Finding(
            "watch", f"This run has not finished: {steps} so far.", f"Continue it with: tether resume {view.folder}" if view.metrics else ""
        )
    accuracy, loss = view.late("rewards/accuracies"), view.series("loss")
    margin = view.late("displacement/chosen"), view.late("displacement/rejected")
    if accuracy is not None and margin[0] is not None and margin[1] is not None and abs(margin[0] - margin[1]) < 0.02:
        yield Finding(
            "watch",
            f"The model has hardly moved: the mean margin of the last {view.n_late} steps is {signed(margin[0] - margin[1])} nats.",
            "Raise learning_rate, or train for more steps.",
        )
    elif view.command == "sft" and len(loss) > 10:
        first = sum(v for _, v in loss[:5]) / 5
        last = view.late("loss") or math.nan
        if last < first:
            yield Finding("good", f"The loss fell from {number(first)} to {number(last)} nats per token.")


def numbers_broken(view: RunView) -> Iterator[Finding]:
    """Steps that were not applied, and numbers that are none."""
    skipped = [row for row in view.metrics if row.get("skipped")]
    if skipped:
        reason = next((f" ({row['skip_reason']})" for row in skipped if row.get("skip_reason")), "")
        steps = ", ".join(str(row["step"]) for row in skipped[:5]) + (", ..." if len(skipped) > 5 else "")
        yield Finding(
            "bad",
            f"{plural(len(skipped), 'step')} of {len(view.metrics)} could not be applied, at {steps}{reason}.",
            "The weights stayed as they were. Lower learning_rate, look at the rows of these steps, or set precision=fp32.",
        )
    broken = sorted(
        {key for row in view.metrics for key, v in row.items() if is_number(v) and not math.isfinite(v)} - {"loss", "grad_norm"}
    )
    lost = [int(x) for x, y in view.series("loss") if not math.isfinite(y)]
    if lost:
        yield Finding("bad", f"The loss was not a finite number in {plural(len(lost), 'step')}, first at step {lost[0]}.")
    if broken:
        yield Finding("watch", f"Not finite in some steps: {', '.join(broken[:6])}.")


def displacement(view: RunView) -> Iterator[Finding]:
    """Which half of a DPO margin moved."""
    chosen, rejected = view.late("displacement/chosen"), view.late("displacement/rejected")
    if chosen is None or rejected is None or abs(chosen - rejected) < 0.02:
        return
    margin, over = chosen - rejected, f"over the last {plural(view.n_late, 'step')}"
    if margin <= 0:
        yield Finding(
            "watch",
            f"The pairs are told apart the wrong way round: {over} the mean margin is {signed(margin)} nats.",
            "Check that chosen and rejected are not swapped in the data; lower learning_rate if the loss is jumping.",
        )
    elif chosen < 0:
        share = view.late("displacement/frac_chosen_down")
        fell = "" if share is None else f"; {percent(share)} of them fell"
        loss = view.settings.get("loss_type", "dpo")
        advice = [words for words, known in REMEDIES if loss not in known]
        yield Finding(
            "watch",
            f"Likelihood displacement: {over} the chosen answers are less likely than under the reference "
            f"({signed(chosen)} nats per answer{fell}). The margin of {signed(margin)} nats exists only because the rejected answers "
            f"fell further ({signed(rejected)}). The probability that left both went to answers that nobody has compared.",
            f"If the chosen answers themselves matter: {', '.join(advice)}, leave out pairs that are too alike "
            "(min_edit_distance=0.2), or lower learning_rate.",
        )
    else:
        up = percent(min(1.0, chosen / margin))
        yield Finding(
            "good",
            f"The margin of {signed(margin)} nats {over} has both of its halves in view: the chosen answers became more likely "
            f"({signed(chosen)} nats, {up} of the margin), the rejected ones moved by {signed(rejected)}.",
        )


def overfitting(view: RunView) -> Iterator[Finding]:
    """A held-out loss that turned, or a gap between the two accuracies."""
    held = [(x, y) for x, y in view.series("eval_loss") if math.isfinite(y)]
    if len(held) >= 3:
        step, best = min(held, key=lambda p: p[1])
        if held[-1][1] > best * 1.03 + 0.005:
            yield Finding(
                "watch",
                f"The held-out loss was lowest at step {step} ({number(best)}) and ended at {number(held[-1][1])}: overfitting.",
                "Train for fewer steps, lower learning_rate, or add data.",
            )
    for train, test, unit in (("rewards/accuracies", "eval_rewards/accuracies", "pairs"), ("accuracy", "eval_accuracy", "pairs")):
        seen, unseen = view.late(train), view.series(test)
        if seen is not None and unseen and seen - unseen[-1][1] > 0.15:
            yield Finding(
                "watch",
                f"{percent(seen)} of the training {unit} are ordered right at the end, but only {percent(unseen[-1][1])} of the held-out ones.",
                "Part of what was learnt holds for the training rows only.",
            )


def reward_quality(view: RunView) -> Iterator[Finding]:
    """Held-out accuracy, calibration and the pull of length of a reward model."""
    accuracy = view.held_out.get("accuracy")
    if isinstance(accuracy, dict):
        text = (
            f"On {accuracy['n']} held-out comparisons the reward model agrees with the people in {percent(accuracy['value'])} "
            f"(95 % interval {percent(accuracy['low'])} to {percent(accuracy['high'])})"
        )
        if accuracy["low"] <= 0.5:
            yield Finding("watch", f"{text}, which cannot be told from guessing.", "Compare more pairs, or train for longer.")
        else:
            yield Finding("good", f"{text}; guessing would give 50 %.")
    bins = view.held_out.get("calibration")
    error = calibration_error(bins) if isinstance(bins, list) and bins else None
    if bins and error is not None and error > 0.08:
        n = sum(b["n"] for b in bins)
        sure = sum(b["predicted"] * b["n"] for b in bins) / n
        right = sum(b["frequency"] * b["n"] for b in bins) / n
        word = "surer than it is right" if sure > right else "less sure than it could be"
        yield Finding("watch", f"It is {word}: it expects to be right in {percent(sure)} of the pairs and is in {percent(right)}.")
    r, longer = view.held_out.get("length_correlation"), view.held_out.get("prefers_longer")
    if is_number(r) and abs(r) >= 0.2:
        wins = f", and the longer answer of a pair wins in {percent(longer)}" if is_number(longer) else ""
        way = "longer answers score higher" if r > 0 else "longer answers score lower"
        yield Finding(
            "watch",
            f"The score leans on length: {way} (correlation {number(r)}{wins}).",
            "If length is not what people want, whatever is trained against this score will learn it all the same.",
        )


def rows_lost(view: RunView) -> Iterator[Finding]:
    """Rows that were not trained on as they stood in the file."""
    left_out = sum(n.get("action") in ("drop", "reject") for n in view.notices)
    cut = sum(n.get("action") == "truncate" for n in view.notices)
    if left_out or cut:
        parts = [f"{plural(left_out, 'row')} left out"] if left_out else []
        parts += [f"{plural(cut, 'row')} cut at max_length {view.settings.get('max_length')}"] if cut else []
        yield Finding("plain", f"{' and '.join(parts)}; each is listed below with its file and line.")


def clipping(view: RunView) -> Iterator[Finding]:
    """A gradient limit that decides the step size most of the time."""
    limit = view.settings.get("max_grad_norm")
    norms = [y for _, y in view.series("grad_norm") if math.isfinite(y)]
    if is_number(limit) and len(norms) >= 10:
        share = sum(y > limit for y in norms) / len(norms)
        if share > 0.5:
            yield Finding(
                "plain",
                f"The gradient was longer than max_grad_norm={number(limit)} in {percent(share)} of the steps and was scaled down there.",
            )
