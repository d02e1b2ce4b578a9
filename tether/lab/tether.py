"""Longer pays more: a policy against a reward model that likes length, with a tether and without one.

    J(p) = E_p[r] - beta KL(p || ref),   p*(y) = ref(y) exp(r(y)/beta) / Z,   J(p*) - J(p) = beta KL(p || p*)

(Korbak et al. 2022, arXiv:2205.11275, section 3.) Answers have 1 to 40 tokens. What they are worth rises and then falls; the reward
model has seen only comparisons of the reference's own, mostly short answers. How far true score and reward part at a given distance
from the reference is drawn against sqrt(KL), as in Gao et al. 2022 (arXiv:2210.10760, figure 1).

The policy decides after each token whether to stop: 39 logits. It learns from samples by `losses.policy_gradient.policy_loss` and
`advantage.rloo`, the KL in the reward by `losses.kl.penalised_rewards`; the reward model by `losses.reward_model`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tether.advantage import rloo
from tether.best_of import kl_bound
from tether.lab.catalogue import NAMES
from tether.lab.experiment import Experiment, Result, Variant
from tether.losses.kl import penalised_rewards
from tether.losses.policy_gradient import policy_loss
from tether.losses.reward_model import reward_model_loss
from tether.report.charts import Chart, Series, line_chart
from tether.report.numbers import number
from tether.report.view import Section, Table

LONGEST = 40  # tokens; an answer that has not stopped by then is cut off
LENGTHS = torch.arange(1, LONGEST + 1, dtype=torch.float64)
BETAS = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
DRAWN = {0.0: 4, 0.5: 3, 1.0: 2, 2.0: 1}  # beta to colour in the pictures
SIZES = tuple(2**k for k in range(11))  # best of 1 .. 1024
UPDATES, BATCH, RATE = 600, 256, 0.2
SHOWN = 120  # updates in the picture; the rest is a line
BY_DISTANCE: dict[str, Any] = {"x_label": "√KL to the reference, √nats", "whole_x": False, "smooth": False}


# The world -------------------------------------------------------------------------------------------------------------------------


def reference() -> Tensor:
    """(40,): probability of each length before anything is learnt; 10 tokens on average."""
    weights = LENGTHS**3 * torch.exp(-LENGTHS / 2.5)
    return weights / weights.sum()


def true_scores() -> Tensor:
    """(40,): what an answer of each length is worth: there is less and less to add, and from 18 tokens on each costs the reader 0.2."""
    return 6 * (1 - torch.exp(-LENGTHS / 10)) - 0.2 * (LENGTHS - 18).clamp(min=0)


def proxy_weight() -> float:
    """Reward per token that a reward model r = w length learns from comparisons of the reference's answers.

    All pairs, each with its chance, judged by people who prefer a to b with probability s(true a - true b) (Bradley and Terry 1952).
    """
    ref, true = reference(), true_scores()
    a, b = torch.cartesian_prod(torch.arange(LONGEST), torch.arange(LONGEST)).T
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=100, tolerance_grad=1e-14, tolerance_change=0.0, line_search_fn="strong_wolfe")
    preferred = logsigmoid(true[a] - true[b]).exp()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss, _ = reward_model_loss(weight * LENGTHS[a], weight * LENGTHS[b], soft_labels=preferred, weights=ref[a] * ref[b], total=1.0)
        loss.backward()
        return loss

    optimizer.step(closure)
    return float(weight.detach())


def proxy_scores() -> Tensor:
    """(40,): the learnt reward. Comparisons leave its zero free; it is put where reward and true score agree on the reference."""
    rewards, ref = proxy_weight() * LENGTHS, reference()
    return rewards + ref @ (true_scores() - rewards)


# Policies --------------------------------------------------------------------------------------------------------------------------

DECISIONS = torch.arange(LONGEST - 1)
MADE = LENGTHS[:, None] > DECISIONS  # (40, 39): the decisions an answer of each length took; the last was to stop
STOPS = LENGTHS[:, None] - 1 == DECISIONS


def decisions(logits: Tensor) -> Tensor:
    """Logits (39,) of stopping -> log-probabilities (40, 39) of the decisions that each length took, 0 where it took none."""
    return torch.where(STOPS, logsigmoid(logits), logsigmoid(-logits)) * MADE


def logits_of(p: Tensor) -> Tensor:
    """The logits whose answers have lengths distributed by p (40,)."""
    longer = p.flip(0).cumsum(0).flip(0)[1:]
    return p[:-1].log() - longer.log()


def optimum(rewards: Tensor, beta: float) -> Tensor:
    """p* (40,). With beta 0 all of it is on the best answer."""
    if beta == 0:
        return torch.nn.functional.one_hot(rewards.argmax(), len(rewards)).double()
    return (reference().log() + rewards / beta).softmax(0)


def kl(p: Tensor) -> float:
    """KL(p || ref) in nats."""
    return float((torch.xlogy(p, p) - torch.xlogy(p, reference())).sum())


def best_of(n: int, scores: Tensor) -> Tensor:
    """(40,): lengths of the best of n answers of the reference, exact: P(all n score at most so much) by differences.

    `scores` must be distinct, as here: otherwise which of two equal answers is returned would depend on their order.
    """
    order = scores.argsort()
    ref = reference()[order]
    below = torch.cat([ref.new_zeros(1), ref.cumsum(0)]).clamp(max=1.0)
    out = torch.empty_like(ref)
    out[order] = (below**n).diff()
    return out


def moments(p: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of the length."""
    mean = float(p @ LENGTHS)
    return mean, float(p @ (LENGTHS - mean) ** 2) ** 0.5


def total_variation(p: Tensor, q: Tensor) -> float:
    return 0.5 * float((p - q).abs().sum())


@dataclass(frozen=True)
class Trained:
    beta: float
    p: Tensor  # (40,)
    mean_lengths: list[float]  # before each update, and after the last


def train(rewards: Tensor, beta: float, *, updates: int = UPDATES, batch: int = BATCH, seed: int = 0) -> Trained:
    """Policy gradients on sampled answers, one update a batch, steps that shrink to 0 in a line."""
    generator = torch.Generator().manual_seed(seed)
    start = logits_of(reference())
    ref_logp = decisions(start)
    logits = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=RATE)
    one_group = torch.zeros(batch, dtype=torch.long)
    mean_lengths = []
    for i in range(updates):
        table = decisions(logits)  # (40, 39)
        p = table.detach().sum(1).exp()
        mean_lengths.append(float(p @ LENGTHS))
        drawn = torch.multinomial(p, batch, replacement=True, generator=generator)
        logp, mask = table[drawn], MADE[drawn]  # (B, 39)
        advantages = rloo(penalised_rewards(rewards[drawn], logp.detach(), ref_logp[drawn], mask, beta), one_group)
        loss, _ = policy_loss(logp, logp.detach(), advantages, mask, mode="seq-mean-token-sum")
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = RATE * (1 - i / updates)
        optimizer.step()
    p = decisions(logits.detach()).sum(1).exp()
    return Trained(beta, p, [*mean_lengths, float(p @ LENGTHS)])


# The frontier ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A policy on the frontier: `dial` is beta or n, `kl` in nats, scores are expected ones."""

    dial: float
    kl: float
    proxy: float
    true: float

    @property
    def distance(self) -> float:
        return math.sqrt(max(0.0, self.kl))


def place(dial: float, p: Tensor, proxy: Tensor) -> Place:
    return Place(dial, kl(p), float(p @ proxy), float(p @ true_scores()))


def tethered_frontier(rewards: Tensor, proxy: Tensor, points: int = 241) -> list[Place]:
    """Optima from beta 100 down to 0.01, evenly in log beta, of `rewards`; placed by `proxy` and the true score."""
    betas = [100 * 10 ** (-4 * i / (points - 1)) for i in range(points)]
    return [place(b, optimum(rewards, b), proxy) for b in betas]


def best_of_frontier(proxy: Tensor, sizes: Sequence[int] | None = None) -> list[Place]:
    """Best of 1 .. 1024: every n up to 64, then 32 of each doubling."""
    sizes = sizes or sorted({*range(1, 65), *(round(2 ** (k / 32)) for k in range(6 * 32, 10 * 32 + 1))})
    return [place(n, best_of(n, proxy), proxy) for n in sizes]


def peak(places: Sequence[Place]) -> Place:
    """Where the true score is highest."""
    return max(places, key=lambda at: at.true)


# The page --------------------------------------------------------------------------------------------------------------------------


def run(variant: Variant) -> Result:
    proxy = proxy_scores()
    runs = [train(proxy, beta) for beta in BETAS]
    tethered, best = tethered_frontier(proxy, proxy), best_of_frontier(proxy)
    ceiling = tethered_frontier(true_scores(), proxy)
    free, top = runs[0], peak(tethered)
    widest = max(kl_bound(int(at.dial)) - at.kl for at in best)
    apart = max(total_variation(r.p, optimum(proxy, r.beta)) for r in runs)
    return Result(
        see=(
            f"Without a tether (β = 0) the policy writes {number(float(free.p @ LENGTHS))} tokens of {LONGEST}: the reward rises to "
            f"{number(float(free.p @ proxy))} while the true score falls to {number(float(free.p @ true_scores()))}, below the "
            f"reference's {number(float(reference() @ true_scores()))}; with β > 0 training comes to rest at ref·exp(r/β)/Z (all within {number(apart, 1)}).",
            f"The true score peaks {number(top.kl)} nats from the reference (β = {number(top.dial)}) and falls from there on while the "
            "reward still rises, by the tether and by best-of-n alike: the reward does not say when to stop, and the place differs.",
        ),
        tables=[_trained_table(runs, proxy), _best_of_table(best), _peaks_table(tethered, best, proxy)],
        sections=[
            Section(
                "A reward that likes length",
                [
                    f"r(length) = {number(proxy_weight())}·length + constant, learnt from comparisons of the reference's answers, for which "
                    "longer usually was better. Across: tokens. Second picture: how often each length is written, before training and "
                    "at the end of it."
                ],
                [_scores_chart(proxy), _lengths_chart(runs)],
            ),
            Section(
                "On the way",
                [
                    "Reward r − β·log(p/ref), leave-one-out baseline, 256 sampled answers an update. Dashed: E[length] under "
                    f"ref·exp(r/β)/Z. Across: the first {SHOWN} of {UPDATES} updates."
                ],
                [_training_chart(runs, proxy)],
            ),
            Section(
                "What distance buys",
                [
                    "Across: √KL(p‖ref), in √nats. Best-of-n returns the answer with the highest reward of n from the reference; its KL is at most "
                    f"log n − (n − 1)/n, and here, where several of the n can be equally long, at most {number(widest)} nats less.",
                    "Ceiling: the optima for the true score itself as the reward: no policy at that distance is worth more.",
                ],
                [_proxy_chart(tethered, best), _true_chart(tethered, best, ceiling)],
            ),
        ],
    )


def _trained_table(runs: Sequence[Trained], proxy: Tensor) -> Table:
    rows = []
    for made in runs:
        wanted = optimum(proxy, made.beta)
        at = place(made.beta, made.p, proxy)
        numbers = (float(wanted @ LENGTHS), float(made.p @ LENGTHS))
        apart = total_variation(made.p, wanted)
        rows.append(
            [number(made.beta), *(f"{x:.2f}" for x in numbers), f"{apart:.4f}", f"{at.kl:.3f}", f"{at.proxy:.2f}", f"{at.true:.2f}"]
        )
    return Table(
        ["β", "tokens, exact", "trained", "apart", "KL, nats", "reward", "true score"],
        rows,
        "Where training ends",
        f"Exact: ref·exp(r/β)/Z. Apart: total variation. {UPDATES} updates of {BATCH} samples. There every advantage is exactly 0, so samples bring no noise.",
        frozenset(range(7)),
    )


def _best_of_table(best: Sequence[Place]) -> Table:
    by_size = {int(at.dial): at for at in best}
    return Table(
        ["n", "KL at most, nats", "KL, exact", "tokens", "reward", "true score"],
        [
            [
                f"{n:,}",
                f"{kl_bound(n):.3f}",
                f"{by_size[n].kl:.3f}",
                f"{moments(best_of(n, LENGTHS))[0]:.2f}",
                f"{by_size[n].proxy:.2f}",
                f"{by_size[n].true:.2f}",
            ]
            for n in SIZES
        ],
        "Best of n",
        "Exact, not sampled. The answer with the highest reward of n is returned.",
        frozenset(range(6)),
    )


def _peaks_table(tethered: Sequence[Place], best: Sequence[Place], proxy: Tensor) -> Table:
    highest, most = peak(tethered), peak(best)
    policies = {
        ("reference", "–"): reference(),
        ("tether", f"β = {number(highest.dial)}"): optimum(proxy, highest.dial),
        ("best of n", f"n = {int(most.dial)}"): best_of(int(most.dial), proxy),
    }
    rows = []
    for (name, dial), p in policies.items():
        at, (mean, spread) = place(0, p, proxy), moments(p)
        rows.append([name, dial, f"{at.kl:.3f}", f"{mean:.2f}", f"{spread:.2f}", f"{at.proxy:.2f}", f"{at.true:.2f}"])
    return Table(
        ["", "at", "KL, nats", "tokens", "their spread", "reward", "true score"],
        rows,
        "Where the true score peaks",
        "The tether pays its KL into a long tail: nothing earns more reward at that KL, but lengths spread out, and what is far too "
        "long is worth little. Best-of-n moves all answers up together.",
        frozenset(range(1, 7)),
    )


def _scores_chart(proxy: Tensor) -> Chart:
    by_length = [float(n) for n in LENGTHS]
    return line_chart(
        [
            Series("reward", list(zip(by_length, proxy.tolist(), strict=True)), 4),
            Series("true score", list(zip(by_length, true_scores().tolist(), strict=True)), 1),
        ],
        title="What is paid, and what is wanted",
        x_label="tokens of the answer",
        y_label="score",
        smooth=False,
    )


def _lengths_chart(runs: Sequence[Trained]) -> Chart:
    by_length = [float(n) for n in LENGTHS]
    return line_chart(
        [
            Series("reference", list(zip(by_length, reference().tolist(), strict=True)), 5, dashed=True),
            *(
                Series(f"β = {number(r.beta)}", list(zip(by_length, r.p.tolist(), strict=True)), DRAWN[r.beta])
                for r in reversed(runs)
                if r.beta in DRAWN and r.beta > 0
            ),
        ],
        title="How long answers are",
        x_label="tokens of the answer",
        y_label="probability",
        caption=f"β = 0 is a single bar at {LONGEST} tokens and is left out.",
        smooth=False,
    )


def _training_chart(runs: Sequence[Trained], proxy: Tensor) -> Chart:
    drawn = [r for r in runs if r.beta in DRAWN]
    ends = [(r.beta, float(optimum(proxy, r.beta) @ LENGTHS)) for r in drawn]
    chart = line_chart(
        [
            *(Series(f"β = {number(r.beta)}", list(enumerate(r.mean_lengths[: SHOWN + 1])), DRAWN[r.beta]) for r in drawn),
            *(Series(f"β = {number(b)}, exact", [(0.0, end), (float(SHOWN), end)], DRAWN[b], dashed=True) for b, end in ends),
        ],
        title="Length while training",
        x_label="update",
        y_label="tokens, expected",
        smooth=False,
        limits=(0.0, None),
    )
    return replace(chart, legend=[*chart.legend[: len(drawn)], ("where it should end", 0, "dashed")])


def _proxy_chart(tethered: Sequence[Place], best: Sequence[Place]) -> Chart:
    return line_chart(
        [
            Series("tether", [(at.distance, at.proxy) for at in tethered], 4),
            Series("best of n", [(at.distance, at.proxy) for at in best], 3),
            Series("best of n, at the bound", [(math.sqrt(kl_bound(int(at.dial))), at.proxy) for at in best], 3, dashed=True),
        ],
        title="Reward",
        y_label="expected reward",
        **BY_DISTANCE,
    )


def _true_chart(tethered: Sequence[Place], best: Sequence[Place], ceiling: Sequence[Place]) -> Chart:
    return line_chart(
        [
            Series("tether", [(at.distance, at.true) for at in tethered], 1),
            Series("best of n", [(at.distance, at.true) for at in best], 2),
            Series("best of n, at the bound", [(math.sqrt(kl_bound(int(at.dial))), at.true) for at in best], 2, dashed=True),
            Series("ceiling", [(at.distance, at.true) for at in ceiling], 5, dashed=True),
        ],
        title="True score",
        y_label="expected true score",
        **BY_DISTANCE,
        mark=float(reference() @ true_scores()),
        mark_label="reference",
    )


EXPERIMENT = Experiment("tether", "The tether", NAMES["tether"], run)
