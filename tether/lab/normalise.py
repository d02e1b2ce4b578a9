"""Group-normalised advantages of right and wrong answers (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).

    A = (R - mean of the group) / std of the group        R = 1 for a right answer, 0 for a wrong one

With k right among G: right / wrong = -(G - k)/k, and right x wrong = -1 with the population's deviation (divide by G),
-(G - 1)/G with the sample's (divide by G - 1). Two printed values therefore name their group. All advantages come from
`advantage.group_norm` with nothing added to the deviation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tether.advantage import group_mean, group_norm
from tether.lab.catalogue import NAMES
from tether.lab.experiment import Difference, Experiment, Result, Variant
from tether.masked import StdKind
from tether.report.charts import Chart, Series, line_chart
from tether.report.numbers import number
from tether.report.view import Section, Table

PRINTED = (1.15, -0.58)  # the lecture's table of a group of eight
SHOWN = (1.0, 0.0, 1.0)  # its three rows: right, wrong, right
KINDS: tuple[StdKind, StdKind] = ("population", "sample")
LARGEST = 64


def advantages(rewards: tuple[float, ...], std_kind: StdKind) -> Tensor:
    """(G,) of one group."""
    return group_norm(torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards)), std_kind, std_eps=0.0)


def right_and_wrong(size: int, right: int, std_kind: StdKind) -> tuple[float, float]:
    """The advantage of a right and of a wrong answer; `right` lies between 1 and size - 1."""
    found = advantages((1.0,) * right + (0.0,) * (size - right), std_kind)
    return found[0].item(), found[-1].item()


@dataclass(frozen=True)
class Match:
    size: int
    right: int
    std_kind: StdKind
    values: tuple[float, float]


def groups_that_print(pair: tuple[float, float], sizes: range = range(2, LARGEST + 1)) -> tuple[list[Match], int]:
    """Every group whose two advantages, rounded to two decimals, are `pair`, and how many groups were tried."""
    found, tried = [], 0
    for size in sizes:
        for right in range(1, size):
            for kind in KINDS:
                values = right_and_wrong(size, right, kind)
                tried += 1
                if all(round(v, 2) == p for v, p in zip(values, pair, strict=True)):
                    found.append(Match(size, right, kind, values))
    return found, tried


def pull(size: int, right: int, divided: bool) -> float:
    """Sum of |A| over the group: how much it moves the policy, with and without the division by the deviation."""
    rewards, one_group = torch.tensor([1.0] * right + [0.0] * (size - right), dtype=torch.float64), torch.zeros(size)
    found = group_norm(rewards, one_group, "sample", std_eps=0.0) if divided else group_mean(rewards, one_group)
    return found.abs().sum().item()


# The page --------------------------------------------------------------------------------------------------------------------------


def run(variant: Variant) -> Result:
    matches, tried = groups_that_print(PRINTED)
    nearest = min(
        (max(abs(v - p) for v, p in zip(right_and_wrong(8, k, kind), PRINTED, strict=True)), k, kind) for k in range(1, 8) for kind in KINDS
    )
    values = right_and_wrong(8, nearest[1], nearest[2])
    shown = advantages(SHOWN, "sample").tolist()
    return Result(
        see=(
            "For k right answers of G the two values stand in the ratio (G − k) to k, so a printed pair says which group it came from: "
            "+1.15 and −0.58 are one right answer of three, not any number of eight.",
            "The rarer kind of answer gets the larger advantage: one right answer among eight weighs as much as all seven wrong ones together.",
        ),
        tables=[
            _eight(),
            Table(
                ["group", "deviation", "right", "wrong"],
                [[f"{m.right} right of {m.size}", m.std_kind, *(f"{v:+.4f}".replace("-", "−") for v in m.values)] for m in matches],
                "Groups that print +1.15 and −0.58",
                f"Of {tried:,} groups: every size from 2 to {LARGEST}, every number of right answers, both deviations. "
                "Exactly 2/√3 and −1/√3.",
                frozenset({2, 3}),
            ),
        ],
        sections=[
            Section(
                "Two values name their group",
                [
                    "A = (R − mean)/std. Across: the advantage of a right answer. Upwards: that of a wrong one. Every dot is one number of right "
                    "answers; the curves are right × wrong = −1 (population, any size) and −(G − 1)/G (sample)."
                ],
                [_plane(), _by_count()],
            ),
            Section(
                "What the division does to a group's weight",
                [
                    "Σ|A| over the group of eight, relative to four right answers. Without the division it falls with k(G − k), with it only with "
                    "√(k(G − k)): groups that are nearly solved, or nearly hopeless, count for more."
                ],
                [_pull_chart()],
            ),
        ],
        differences=[
            Difference(
                "the pair in a group of eight",
                "+1.15, −0.58",
                _pair(values),
                f"The nearest: {nearest[1]} right, {nearest[2]} deviation. In a group of eight the product is −1 or −7/8; the printed pair has "
                "−0.67 = −2/3, which is a group of three.",
            ),
            Difference(
                "right and wrong of the three rows shown, as a group",
                "+1.15, −0.58",
                _pair((shown[0], shown[1])),
                "Advantages of a group add up to 0; two right answers of three share what the one wrong answer loses.",
            ),
        ],
    )  # fmt: skip


def _pair(values: tuple[float, float]) -> str:
    return ", ".join(f"{v:+.2f}" for v in values).replace("-", "−")


def _eight() -> Table:
    both = [[right_and_wrong(8, k, kind) for kind in KINDS] for k in range(1, 8)]
    return Table(
        ["right of 8", *(f"{name}, {kind}" for kind in KINDS for name in ("right", "wrong"))],
        [[str(k), *(f"{v:.4f}".replace("-", "−") for pair in pairs for v in pair)] for k, pairs in enumerate(both, 1)],
        "The table for a group of eight",
        "The advantage of each right and of each wrong answer. With 0 or 8 right all are 0: the group says nothing.",
        frozenset(range(1, 5)),
    )


def _plane() -> Chart:
    def curve(size: int, kind: StdKind) -> list[tuple[float, float]]:
        return sorted(right_and_wrong(size, k, kind) for k in range(1, size))

    return line_chart(
        [
            Series("population, 8", curve(8, "population"), 1, dots=True),
            Series("sample, 8", curve(8, "sample"), 2, dots=True),
            Series("sample, 3", curve(3, "sample"), 3, dots=True),
            Series("the lecture's pair", [PRINTED], 4, dots=True),
        ],
        title="Every group of eight, and the printed pair",
        x_label="advantage of a right answer",
        y_label="advantage of a wrong answer",
        whole_x=False,
        smooth=False,
    )


def _by_count() -> Chart:
    pairs = {k: right_and_wrong(8, k, "sample") for k in range(1, 8)}
    return line_chart(
        [
            Series("right", [(k, p[0]) for k, p in pairs.items()], 1, dots=True),
            Series("printed: +1.15", [(1, PRINTED[0]), (7, PRINTED[0])], 1, dashed=True),
            Series("wrong", [(k, p[1]) for k, p in pairs.items()], 2, dots=True),
            Series("printed: −0.58", [(1, PRINTED[1]), (7, PRINTED[1])], 2, dashed=True),
        ],
        title="No number of right answers gives both",
        x_label="right answers of 8",
        y_label="advantage, sample deviation",
        smooth=False,
    )


def _pull_chart() -> Chart:
    def relative(divided: bool) -> list[tuple[float, float]]:
        return [(k, pull(8, k, divided) / pull(8, 4, divided)) for k in range(1, 8)]

    return line_chart(
        [Series("divided by the deviation", relative(True), 1, dots=True), Series("mean subtracted only", relative(False), 2, dots=True)],
        title="How much a group of eight pulls",
        x_label="right answers of 8",
        y_label="Σ|A|, relative to 4 right",
        with_zero=True,
        smooth=False,
        caption=f"One right of eight: {number(pull(8, 1, True) / pull(8, 4, True))} with the division, "
        f"{number(pull(8, 1, False) / pull(8, 4, False))} without.",
    )


EXPERIMENT = Experiment("normalise", "Which group gives +1.15 and −0.58?", NAMES["normalise"], run)
