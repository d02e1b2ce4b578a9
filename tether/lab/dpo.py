"""DPO in numbers: the derivation, the quiz, the chosen answer that falls, and pairs that know nothing of the best answer.

The worlds stand in `hidden_reward.py`, `collapse.py` and `stale_pairs.py`; every loss is one of `losses/`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from tether.lab import bandit, collapse, hidden_reward, stale_pairs
from tether.lab.catalogue import NAMES
from tether.lab.experiment import Difference, Experiment, Result, Variant
from tether.losses.preference import PairLogps, preference_loss
from tether.report.bars import Bars, bar_chart
from tether.report.charts import Chart, Series, line_chart
from tether.report.numbers import measured, number, percent
from tether.report.view import Section, Table

QUIZ = (0.1, -2.0)  # log-ratios of the chosen and the rejected answer
BETAS = (0.01, 0.1, 0.5, 1.0)
SHARES = (0.0, 0.5, 0.75, 1.0, 1.5)
GAP = 4.0  # nats, where methods are compared


@dataclass(frozen=True)
class Quiz:
    gap: float  # difference of the log-ratios, nats
    rejected_share: float  # of the gap, due to the rejected answer
    margin: float  # beta times the gap
    probability: float  # sigmoid of the margin
    loss: float


def quiz(beta: float, log_ratios: tuple[float, float] = QUIZ) -> Quiz:
    chosen, rejected = (torch.tensor([x], dtype=torch.float64) for x in log_ratios)
    none, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    loss, metrics = preference_loss(PairLogps(chosen, rejected, none, none, one, one), "dpo", beta=beta)
    margin, lost = metrics["rewards/margins"].item(), -metrics["rewards/rejected"].item()
    return Quiz(margin / beta, lost / margin, margin, math.exp(-loss.item()), loss.item())


def run(variant: Variant) -> Result:
    best = hidden_reward.hidden()
    trained = hidden_reward.train()
    distance = 0.5 * float((trained - best.p).abs().sum())
    shares = {share: collapse.train("DPO", share=share, until_gap=GAP) for share in SHARES}
    fallen = shares[1.0]
    paths = {name: fallen if name == "DPO" else collapse.train(name, until_gap=GAP) for name in collapse.METHODS}
    learned = {name: stale_pairs.learn(name) for name in stale_pairs.METHODS}
    at_tenth, at_one = quiz(0.1), quiz(1.0)
    return Result(
        see=(
            "The best policy under reward minus β·KL contains the reward, up to a constant that cancels between two answers: "
            f"training on comparisons alone ended within {number(distance, 1)} of it.",
            f"The loss sees only the gap: it fell from {number(fallen.loss[0])} to {number(fallen.loss[-1])} while the chosen answer lost "
            f"{number(-fallen.chosen[-1])} nats, and what no pair contains is never found.",
        ),
        tables=[_reward_table(best, trained), _quiz_table(), _share_table(shares), _method_table(paths), _stale_table(learned)],
        sections=[
            Section(
                "The reward inside the policy, and the quiz",
                [
                    "p* = ref·exp(r/β)/Z, so r = β·log(p*/ref) + β·log Z. First picture: what the trained policy says of each answer, "
                    "β·log(p/ref), against its true reward: a straight line of slope 1, lower by β·log Z.",
                    "Second picture: −log σ(β·2.1), the loss of the quiz's gap. It is small only where β is near 1.",
                ],
                [_reward_chart(best, trained), _quiz_chart()],
            ),
            Section(
                "The chosen answer falls while the loss falls",
                [
                    "Chosen and rejected share a feature, the rejected one has half as much again. The gap grows fastest when the weight of "
                    "the shared feature falls, and that takes both down: their probability goes to answers in no pair.",
                    f"The bars compare seven losses where each has made the same gap of {number(GAP)} nats.",
                ],
                [_fall_chart(fallen, shares[0.0]), _method_chart(paths)],
            ),
            Section(
                "Pairs of yesterday",
                [
                    "The best answer (reward 5, 2 % in the reference) is in no pair: pairs are of the other five. DPO on them ends where they end. The same loss on "
                    "pairs of the policy's own answers finds it, as do PPO and GRPO, which ask for the reward of what they sample. "
                    "How fast each one climbs depends on its rates; where the fixed pairs end does not."
                ],
                [_stale_chart(learned)],
            ),
        ],
        differences=[
            Difference(
                "loss of the quiz's gap, 2.1",
                "small",
                f"{at_tenth.loss:.3f}",
                f"At the usual β = 0.1; at the start of training it is {math.log(2):.3f}. At β = 1 it is {at_one.loss:.3f}.",
            ),
            Difference(
                "the optimum's probability of the best answer",
                "1",
                f"{float(best.p[hidden_reward.REWARDS.argmax()]):.3f}",
                "Putting all mass where r + β·log ref is highest leaves out that a spread policy pays less KL: "
                f"it reaches {hidden_reward.objective(hidden_reward.greedy()):.3f} of r − β·KL, the optimum {hidden_reward.BETA * best.log_z:.3f}.",
            ),
        ],
    )  # fmt: skip


# Tables ----------------------------------------------------------------------------------------------------------------------------


def _reward_table(best: hidden_reward.Hidden, trained: torch.Tensor) -> Table:
    rows = [
        [
            "ABCDE"[i],
            f"{hidden_reward.REF[i]:.2f}",
            f"{hidden_reward.REWARDS[i]:.1f}",
            f"{best.p[i]:.6f}",
            f"{trained[i]:.6f}",
            f"{best.implicit[i]:+.4f}".replace("-", "−"),
            f"{best.recovered[i]:.4f}",
        ]
        for i in range(len(hidden_reward.REF))
    ]
    return Table(
        ["answer", "ref", "reward r", "optimum p*", "by DPO", "β·log(p*/ref)", "+ β·log Z"],
        rows,
        f"The reward hidden in the policy, β = {hidden_reward.BETA}",
        f"β·log Z = {hidden_reward.BETA * best.log_z:.4f}. Largest error of the recovered reward {number(best.reward_error, 1)}, "
        f"of a difference of two without Z {number(best.difference_error, 1)}.",
        frozenset(range(1, 7)),
    )


def _quiz_table() -> Table:
    rows = [(beta, quiz(beta)) for beta in BETAS]
    first = rows[0][1]
    return Table(
        ["β", "margin", "σ(margin)", "loss"],
        [[number(beta), number(q.margin), f"{q.probability:.6f}", f"{q.loss:.6f}"] for beta, q in rows],
        "The quiz: log-ratios +0.1 (chosen) and −2.0 (rejected)",
        f"The gap is {first.gap:.1f}; {100 * first.rejected_share:.1f} % of it comes from the rejected answer: it was pushed down, "
        "the chosen one hardly rose.",
        frozenset(range(4)),
    )


def _share_table(shares: dict[float, collapse.Path]) -> Table:
    return Table(
        ["shared", "score", "chosen", "rejected", "other answers", "loss", "true reward"],
        [
            [number(share), measured(collapse.Features.made(share).score(), True), measured(p.chosen[-1], True), measured(p.rejected[-1], True), percent(p.others[-1]), f"{p.loss[-1]:.3f}", f"{p.reward[-1]:.2f}"]
            for share, p in shares.items()
        ],
        "DPO: how much chosen and rejected share",
        "Score: φ(chosen)·φ(rejected) − |φ(chosen)|² of one pair. Above 0 the chosen answer falls here; a warning and no border: both pairs push the "
        "same shared weight, and with 0.75 of it the chosen answer falls a little at a score below 0. "
        f"Measured where the gap has grown to {number(GAP)} nats. Chosen, rejected: change of log-probability in nats. Other answers: probability of all "
        f"that the pair does not mention, {percent(next(iter(shares.values())).others[0])} at the start. True reward at the start: "
        f"{next(iter(shares.values())).reward[0]:.2f}.",
        frozenset(range(1, 7)),
    )  # fmt: skip


def _method_table(paths: dict[str, collapse.Path]) -> Table:
    return Table(
        ["loss", "chosen", "rejected", "other answers", "true reward", "updates"],
        [
            [
                name,
                measured(p.chosen[-1], True),
                measured(p.rejected[-1], True),
                percent(p.others[-1]),
                f"{p.reward[-1]:.2f}",
                str(p.updates),
            ]
            for name, p in paths.items()
        ],
        "Seven losses on the same pairs, shared feature 1",
        "Each with the settings it has by default, plain gradient descent, first steps of equal length.",
        frozenset(range(1, 6)),
    )


def _stale_table(learned: dict[str, stale_pairs.Learned]) -> Table:
    limit = stale_pairs.limit_of_pairs()
    updates = len(next(iter(learned.values())).reward) - 1
    return Table(
        ["", "true reward", "best answer", "KL to ref (nats)"],
        [
            ["reference", f"{float(stale_pairs.REF @ stale_pairs.REWARDS):.2f}", percent(float(stale_pairs.REF[stale_pairs.BEST])), "0"],
            *([name, f"{v.reward[-1]:.2f}", percent(v.best), number(v.kl)] for name, v in learned.items()),
            ["limit of the fixed pairs", f"{float(limit @ stale_pairs.REWARDS):.2f}", percent(float(limit[stale_pairs.BEST])),
             number(float(bandit.kl(limit.log(), stale_pairs.REF.log())))],
        ],
        f"After {updates} updates of {stale_pairs.ANSWERS} answers, mean of {stale_pairs.RUNS} runs",
        f"β = {stale_pairs.BETA}. The optimum of r − β·KL earns {stale_pairs.optimal_reward():.2f}.",
        frozenset({1, 2, 3}),
    )  # fmt: skip


# Pictures --------------------------------------------------------------------------------------------------------------------------


def _reward_chart(best: hidden_reward.Hidden, trained: torch.Tensor) -> Chart:
    beta = hidden_reward.BETA
    said = beta * (trained / hidden_reward.REF).log()
    ends = (0.0, 3.5)
    return line_chart(
        [
            Series("r − β·log Z", [(r, r - beta * best.log_z) for r in ends], 5, dashed=True),
            Series(
                "the policy that DPO found",
                sorted(zip(hidden_reward.REWARDS.tolist(), said.tolist(), strict=True)),
                1,
                dots=True,
                joined=False,
            ),
        ],
        title="Hidden reward against true reward",
        x_label="true reward r",
        y_label="β·log(p/ref)",
        whole_x=False,
        smooth=False,
    )


def _quiz_chart() -> Chart:
    betas = [i / 100 for i in range(1, 201)]
    return line_chart(
        [
            Series("loss", [(b, quiz(b).loss) for b in betas], 1),
            Series("β = 0.01, 0.1, 0.5, 1", [(b, quiz(b).loss) for b in BETAS], 2, dots=True, joined=False),
        ],
        title="The quiz's loss against β",
        x_label="β",
        y_label="loss (nats)",
        whole_x=False,
        smooth=False,
        with_zero=True,
        mark=math.log(2),
        mark_label="at the start: log 2",
    )


def _fall_chart(fallen: collapse.Path, apart: collapse.Path) -> Chart:
    others = [math.log(p / fallen.others[0]) for p in fallen.others]
    return line_chart(
        [
            Series("chosen", list(enumerate(fallen.chosen)), 1),
            Series("rejected", list(enumerate(fallen.rejected)), 2),
            Series("all other answers", list(enumerate(others)), 4),
            Series("chosen, nothing shared", list(enumerate(apart.chosen)), 1, dashed=True),
        ],
        title="DPO, shared feature 1",
        x_label="update",
        y_label="change of log-probability (nats)",
        smooth=False,
    )


def _method_chart(paths: dict[str, collapse.Path]) -> Chart:
    return bar_chart(
        [Bars(name, [p.chosen[-1], p.rejected[-1]]) for name, p in paths.items()],
        ["chosen", "rejected"],
        title="Who moved to make the gap",
        x_label="change of log-probability (nats)",
        text=lambda v: f"{v:+.1f}".replace("-", "−"),
    )


def _stale_chart(learned: dict[str, stale_pairs.Learned]) -> Chart:
    colours = {"DPO, fixed pairs": 2, "DPO, fresh pairs": 3, "PPO": 1, "GRPO": 4}
    limit = float(stale_pairs.limit_of_pairs() @ stale_pairs.REWARDS)
    last = len(next(iter(learned.values())).reward) - 1
    return line_chart(
        [
            *(Series(name, list(enumerate(v.reward)), colours[name]) for name, v in learned.items()),
            Series("limit of the fixed pairs", [(0, limit), (last, limit)], 2, dashed=True),
        ],
        title="True reward while learning",
        x_label="update",
        y_label="expected true reward",
        smooth=False,
        mark=stale_pairs.optimal_reward(),
        mark_label="optimum",
    )


EXPERIMENT = Experiment("dpo", "DPO: the reward hidden in the policy", NAMES["dpo"], run)
