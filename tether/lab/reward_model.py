"""A reward model that can be read: five comparisons, four weights, and a bias that no comparison can move (Bradley and Terry 1952).

    P(a beats b) = s(r_a - r_b)        r = bias + w.f        loss: mean of -log s(r_w - r_l)

The true run descends `losses.reward_model.reward_model_loss` by autograd, bias included; the long runs and the exercise are
`algorithms.linear_reward.fit`, which is what `tether reward` calls for features. As printed: `as_printed.reward_model`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tether.algorithms.linear_reward import fit
from tether.lab import as_printed
from tether.lab.as_printed import FEATURES, PAIRS, Row
from tether.lab.catalogue import NAMES
from tether.lab.experiment import Difference, Experiment, Result, Variant
from tether.losses.reward_model import reward_model_loss
from tether.report.charts import Chart, Series, line_chart
from tether.report.numbers import number, signed
from tether.report.view import Section, Table

EPOCHS, RATE = 200, 0.1
SHOWN = (50, 100, 150, 200)
STOPS = [25 * 2**k for k in range(8)]  # epochs after which training stops: 25 to 3,200
SHIFT = 100.0  # what is added to every score
# The chapter's exercise 1: the preferred answer is the less safe one.
CONTRARY: tuple[Row, Row] = ((0.8, 0.8, 0.6, 0.1), (0.7, 0.7, 0.6, 0.9))
MOST_CONTRARY = 6


@dataclass(frozen=True)
class Trained:
    """By epoch: the mean loss, each pair's before the update it caused, and the rest after the epoch."""

    losses: list[float]
    correct: list[int]
    weights: list[list[float]]
    bias: float
    largest_bias_gradient: float  # over every update


def features(pairs: Sequence[tuple[Row, Row]]) -> tuple[Tensor, Tensor]:
    """Chosen and rejected (N, 4)."""
    rows = torch.tensor(pairs, dtype=torch.float64)
    return rows[:, 0], rows[:, 1]


def train(pairs: Sequence[tuple[Row, Row]] = PAIRS, *, epochs: int = EPOCHS, bias: float = 0.0) -> Trained:
    """Plain descent from zero weights, one pair at a time in their order."""
    chosen, rejected = features(pairs)
    weights = torch.zeros(len(FEATURES), dtype=torch.float64, requires_grad=True)
    start = torch.tensor(bias, dtype=torch.float64, requires_grad=True)
    run = Trained([], [], [], bias, 0.0)
    largest = 0.0
    for _ in range(epochs):
        total = 0.0
        for c, r in zip(chosen.split(1), rejected.split(1), strict=True):
            loss, _ = reward_model_loss(start + c @ weights, start + r @ weights)
            for_weights, for_bias = torch.autograd.grad(loss, [weights, start])
            with torch.no_grad():
                weights -= RATE * for_weights
                start -= RATE * for_bias
            total += loss.item()
            largest = max(largest, abs(for_bias.item()))
        run.losses.append(total / len(chosen))
        run.correct.append(int((chosen @ weights > rejected @ weights).sum()))
        run.weights.append(weights.tolist())
    return Trained(run.losses, run.correct, run.weights, start.item(), largest)


def contrary(copies: int) -> tuple[dict[str, float], int]:
    """Weights after 200 epochs with `copies` of the contrary pair at the end, and how many of the pairs are in order."""
    chosen, rejected = features([*PAIRS, *[CONTRARY] * copies])
    model, epochs = fit(chosen, rejected, FEATURES, learning_rate=RATE, epochs=EPOCHS, batch_size=1)
    return model.named(), round(epochs[-1].accuracy * len(chosen))


def longer(epochs: Sequence[int], l2: float = 0.0) -> list[tuple[int, float, float]]:
    """Epochs, length of the weights and mean loss of an epoch, when training stops after that many."""
    chosen, rejected = features(PAIRS)
    found = []
    for n in epochs:
        model, history = fit(chosen, rejected, FEATURES, learning_rate=RATE, epochs=n, batch_size=1, l2=l2)
        found.append((n, float(np.linalg.norm(model.weights)), history[-1].loss))
    return found


def contrary_printed(copies: int) -> tuple[dict[str, float], int]:
    """The same by the listing's own arithmetic."""
    last = as_printed.reward_model([*PAIRS, *[CONTRARY] * copies], epochs=EPOCHS)[-1]
    return dict(zip(FEATURES, map(float, last.weights), strict=True)), last.correct


def longer_printed(epochs: Sequence[int]) -> list[tuple[int, float, float]]:
    """The same by the listing's own arithmetic: one run, looked at on its way."""
    history = as_printed.reward_model(epochs=max(epochs))
    return [(n, float(np.linalg.norm([float(w) for w in history[n - 1].weights])), float(history[n - 1].loss)) for n in epochs]


def shifted(weights: Sequence[float], dtype: torch.dtype) -> float:
    """The largest change of a pair's probability when 100 is added to every score and scores are kept in `dtype`."""
    chosen, rejected = (side @ torch.tensor(weights, dtype=torch.float64) for side in features(PAIRS))

    def chances(shift: float, kept: torch.dtype) -> Tensor:
        _, metrics = reward_model_loss((chosen + shift).to(kept).double(), (rejected + shift).to(kept).double())
        return (-metrics["loss/per_pair"]).exp()

    return float((chances(SHIFT, dtype) - chances(0.0, torch.float64)).abs().max())


def loss_of_gap(gap: float) -> float:
    """The loss of one pair whose chosen answer scores higher by `gap`."""
    loss, _ = reward_model_loss(torch.tensor([gap], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    return loss.item()


# The page -----------------------------------------------------------------------------------------------------------------------------


def run(variant: Variant) -> Result:
    printed = as_printed.reward_model()
    true = train()
    shown = [float(w) for w in printed[-1].weights] if variant == "printed" else true.weights[-1]
    named = dict(zip(FEATURES, shown, strict=True))
    first, second = sorted(named, key=lambda name: -named[name])[:2]
    by_print = variant == "printed"
    exercise = [contrary_printed(n) if by_print else contrary(n) for n in range(MOST_CONTRARY + 1)]
    growth = {0.0: longer_printed(STOPS)} if by_print else {l2: longer(STOPS, l2) for l2 in (0.0, 0.01)}
    return Result(
        see=(
            f"Five comparisons say what each feature is worth against the others: {first} {_three(named[first])} and {second} "
            f"{_three(named[second])} lead; all five pairs are in order after the first epoch, and the weights grow for as long as it trains.",
            "The bias stands in both scores and cancels, so its gradient is 0 on every pair: a score says which answer is better, "
            "never whether one is good.",
        ),
        tables=[
            _loss_table(printed, true, variant),
            _weight_table(printed, true, variant),
            *([] if by_print else [_shift_table(true)]),
            _growth_table(growth[0.0]),
            _exercise_table(exercise, variant),
        ],
        sections=[
            Section(
                "What the comparisons teach",
                [
                    "Loss of a pair: −log σ(r of the chosen − r of the rejected), r = bias + w·f. Across: passes over the five pairs. "
                    "A weight is reward for one unit of its feature."
                ],
                [_weights_chart(printed, true, variant), _loss_chart(printed, true, variant)],
            ),
            Section(
                "No end, and other wishes",
                [
                    "Five pairs that a weighted sum can separate have no best weights: longer is always better."
                    + ("" if by_print else " A penalty on the weights, λ/2·|w|², gives them an end."),
                    "Second picture, exercise 1: pairs whose preferred answer is the less safe one. The weight of safety falls and turns "
                    "negative; accuracy rises to make up for it in the first five.",
                ],
                [_growth_chart(growth), _exercise_chart(exercise)],
            ),
        ],
        differences=_differences(printed, true) if variant == "both" else [],
    )


def _three(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def _loss_table(printed: list[as_printed.RewardEpoch], true: Trained, variant: Variant) -> Table:
    columns = []
    if variant != "true":
        columns += [
            ("loss, as printed", [f"{printed[n - 1].loss:.3f}" for n in (1, *SHOWN)]),
            ("in order", [f"{printed[n - 1].correct}/{len(PAIRS)}" for n in (1, *SHOWN)]),
        ]
    if variant != "printed":
        columns += [
            ("loss, float64", [f"{true.losses[n - 1]:.9f}" for n in (1, *SHOWN)]),
            ("in order", [f"{true.correct[n - 1]}/{len(PAIRS)}" for n in (1, *SHOWN)]),
        ]
    return Table(
        ["epoch", *(name for name, _ in columns)],
        [[str(n), *(cells[i] for _, cells in columns)] for i, n in enumerate((1, *SHOWN))],
        "Five pairs, two hundred passes",
        "Loss: mean over the five pairs, each before the update that it causes. In order: pairs whose chosen answer scores higher, after the pass.",
        frozenset(range(1, 5)),
    )


def _weight_table(printed: list[as_printed.RewardEpoch], true: Trained, variant: Variant) -> Table:
    last = printed[-1]
    columns = []
    if variant != "true":
        columns += [
            ("as printed", [_three(float(w)) for w in (*last.weights, last.bias)]),
            ("its nine digits", [f"{w:.9g}" for w in (*last.weights, last.bias)]),
        ]
    if variant != "printed":
        columns += [("float64", [f"{w:.9g}" for w in (*true.weights[-1], true.bias)])]
    return Table(
        ["weight", *(name for name, _ in columns)],
        [[name, *(cells[i] for _, cells in columns)] for i, name in enumerate((*FEATURES, "bias"))],
        "What was learnt",
        f"Largest gradient of the bias over the {EPOCHS * len(PAIRS):,} updates of the float64 run, by autograd: {number(true.largest_bias_gradient)}."
        if variant != "printed"
        else "The listing has no update of the bias.",
        frozenset(range(1, 4)),
    )


def _shift_table(true: Trained) -> Table:
    kinds = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
    return Table(
        ["scores kept in", "step between numbers near 100", "largest change of a probability"],
        [
            [name, number(64 * torch.finfo(dtype).eps, 2), number(shifted(true.weights[-1], dtype), 2)]
            for name, dtype in kinds.items()
        ],
        "One hundred more for every answer",
        "P(chosen beats rejected) of the five pairs after adding 100 to all ten scores. In mathematics nothing changes; what does change is rounding, "
        "because a score near 100 leaves fewer digits for the difference.",
        frozenset({1, 2}),
    )  # fmt: skip


def _growth_table(growth: list[tuple[int, float, float]]) -> Table:
    return Table(
        ["epochs", "length of w", "loss"],
        [[f"{n:,}", f"{size:.2f}", number(loss)] for n, size, loss in growth],
        "It never arrives",
        "All five pairs are in order in every row. Weights of two runs compare only after the same number of epochs, or with a penalty.",
        frozenset({0, 1, 2}),
        folded=True,
    )


def _exercise_table(exercise: list[tuple[dict[str, float], int]], variant: Variant) -> Table:
    return Table(
        ["contrary pairs", *FEATURES, "in order"],
        [
            [str(n), *(_three(weights[name]) for name in FEATURES), f"{correct}/{len(PAIRS) + n}"]
            for n, (weights, correct) in enumerate(exercise)
        ],
        "Exercise 1: the less safe answer is preferred",
        "Copies of (0.8 0.8 0.6 0.1) preferred to (0.7 0.7 0.6 0.9), added at the end; weights after 200 epochs"
        f"{' of the listing' if variant == 'printed' else ' in float64'}.",
        frozenset(range(6)),
    )


def _differences(printed: list[as_printed.RewardEpoch], true: Trained) -> list[Difference]:
    gap = -30.0
    wrong = as_printed.pair_loss(as_printed.sigmoid(as_printed.F(gap)))
    moved = as_printed.reward_model(bias=SHIFT)[-1].weights
    by_rounding = max(abs(float(a) - float(b)) for a, b in zip(moved, printed[-1].weights, strict=True))
    in_float64 = max(abs(a - b) for a, b in zip(train(bias=SHIFT).weights[-1], true.weights[-1], strict=True))
    return [
        Difference(
            "weight of safety after 200 epochs",
            f"{printed[-1].weights[-1]:.9g}",
            f"{true.weights[-1][-1]:.9g}",
            "The gradient is the true one; the listing rounds each operation to float32.",
        ),
        Difference(
            "loss of a pair that is out of order by 30",
            f"{wrong:.2f}",
            f"{loss_of_gap(gap):.2f}",
            "The listing adds 1e−8 inside the logarithm, which bounds the loss at 18.42; the log of a sigmoid can be computed without it.",
        ),
        Difference(
            "largest change of a weight when the bias starts at 100",
            number(by_rounding, 2),
            number(in_float64, 2),
            "The constant cancels, but a float32 score near 100 has only five digits left behind the point.",
        ),
        Difference(
            "what the loss falls from",
            f"{printed[SHOWN[0] - 1].loss:.3f}",
            f"{true.losses[0]:.3f}",
            "The text counts from the first line that is printed, epoch 50; most of the fall is before it.",
        ),
    ]


def _weights_chart(printed: list[as_printed.RewardEpoch], true: Trained, variant: Variant) -> Chart:
    rows = [[float(w) for w in e.weights] for e in printed] if variant == "printed" else true.weights
    colours = {"safety": 1, "accuracy": 2, "helpfulness": 3, "conciseness": 4}
    return line_chart(
        [
            *(
                Series(name, [(0, 0.0), *((n, row[FEATURES.index(name)]) for n, row in enumerate(rows, 1))], colour)
                for name, colour in colours.items()
            ),
            Series("bias", [(0, 0.0), (EPOCHS, true.bias)], 5, dashed=True),
        ],
        title="Four weights and a bias",
        x_label="epoch",
        y_label="weight",
        smooth=False,
        with_zero=True,
    )


def _loss_chart(printed: list[as_printed.RewardEpoch], true: Trained, variant: Variant) -> Chart:
    series = []
    if variant != "printed":
        series.append(Series("every epoch, float64", list(enumerate(true.losses, 1)), 1))
    else:
        series.append(Series("every epoch", [(n, float(e.loss)) for n, e in enumerate(printed, 1)], 1))
    if variant != "true":
        series.append(Series("the lines that are printed", [(n, float(printed[n - 1].loss)) for n in SHOWN], 2, dots=True))
    return line_chart(series, title="Loss", x_label="epoch", y_label="loss (nats)", smooth=False, with_zero=True)


def _growth_chart(growth: dict[float, list[tuple[int, float, float]]]) -> Chart:
    return line_chart(
        [
            Series("no penalty" if l2 == 0 else f"λ = {number(l2)}", [(n, size) for n, size, _ in rows], i, dots=True)
            for i, (l2, rows) in enumerate(growth.items(), 1)
        ],
        title="Length of the weights",
        x_label="epochs",
        y_label="|w|",
        smooth=False,
        with_zero=True,
    )


def _exercise_chart(exercise: list[tuple[dict[str, float], int]]) -> Chart:
    colours = {"safety": 1, "accuracy": 2, "helpfulness": 3, "conciseness": 4}
    return line_chart(
        [
            Series(name, [(n, weights[name]) for n, (weights, _) in enumerate(exercise)], colour, dots=True)
            for name, colour in colours.items()
        ],
        title="Weights as contrary pairs are added",
        x_label="contrary pairs",
        y_label="weight",
        smooth=False,
        with_zero=True,
        caption=f"Safety: {', '.join(signed(weights['safety']) for weights, _ in exercise[:4])} with 0 to 3 of them.",
    )


EXPERIMENT = Experiment("reward-model", "A reward model that can be read", NAMES["reward-model"], run, has_variants=True)
