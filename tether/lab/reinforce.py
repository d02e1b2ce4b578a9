"""REINFORCE where every answer can be written down: the log-derivative trick, and five baselines (Williams 1992).

    grad J = E[R grad log p(y)],  J = sum over y of p(y) R(y)            the trick: grad p = p grad log p
    grad J = E[(R - b) grad log p(y)]                                    for any b that does not look at y itself

The policy writes two tokens out of three: nine answers, twelve logits (three for the first token, three after each). Losses are
`losses.policy_gradient.policy_loss`, advantages those of `advantage.py`, gradients autograd's, in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.advantage import group_mean, no_baseline, rloo
from tether.lab.catalogue import NAMES
from tether.lab.experiment import Experiment, Result, Variant
from tether.losses.policy_gradient import policy_loss
from tether.report.charts import Chart, Estimate, Series, interval_chart, line_chart
from tether.report.numbers import number, percent
from tether.report.view import Section, Table
from tether.stats import Interval, mean_interval

TOKENS = 3
ANSWERS = list(itertools.product(range(TOKENS), repeat=2))  # first and second token
LOGITS = torch.tensor([0.4, 0.0, -0.3, 0.2, -0.5, 0.1, 0.0, 0.6, -0.2, -0.1, 0.3, 0.5], dtype=torch.float64)
REWARDS = torch.tensor([2.0, 3.0, 1.0, 3.0, 5.0, 4.0, 1.0, 4.0, 2.0], dtype=torch.float64)  # of ANSWERS
BATCH = 8  # answers of one update
SIZES = (2, 4, 8, 16, 32)


def logps(logits: Tensor) -> Tensor:
    """(..., 12) -> log-probabilities (..., 9, 2) of both tokens of every answer."""
    first = logits[..., :TOKENS].log_softmax(-1)
    second = logits[..., TOKENS:].unflatten(-1, (TOKENS, TOKENS)).log_softmax(-1)
    return torch.stack([torch.stack([first[..., a], second[..., a, b]], -1) for a, b in ANSWERS], -2)


def ascent(logp: Tensor, advantages: Tensor, weights: Tensor | None = None, rows: float | None = None) -> Tensor:
    """The objective (a number to climb) whose gradient is the mean over rows of A grad log p; `weights` (B,) for other means."""
    mask = torch.ones_like(logp)
    each = None if weights is None else weights[:, None].expand_as(logp)
    settings = {"surrogate": "reinforce", "mode": "seq-mean-token-sum", "total_rows": rows}
    loss, _ = policy_loss(logp, None, advantages, mask, weights=each, **settings)  # type: ignore[arg-type]
    return -loss


# The trick -------------------------------------------------------------------------------------------------------------------------


def exact_gradient(logits: Tensor = LOGITS) -> Tensor:
    """(12,): the derivative of sum p R itself."""
    z = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(logps(z).sum(-1).exp() @ REWARDS, z)
    return gradient


def trick_gradient(logits: Tensor = LOGITS, baseline: float = 0.0) -> Tensor:
    """(12,): sum over all answers of p (R - b) grad log p."""
    z = logits.clone().requires_grad_()
    logp = logps(z)
    (gradient,) = torch.autograd.grad(ascent(logp, REWARDS - baseline, logp.detach().sum(-1).exp(), rows=1), z)
    return gradient


def gradient_without_log(logits: Tensor = LOGITS) -> Tensor:
    """(12,): what sampling and averaging R grad p would give, sum of p R grad p: every answer counted by p twice."""
    z = logits.clone().requires_grad_()
    p = logps(z).sum(-1).exp()
    (gradient,) = torch.autograd.grad(p.detach() * REWARDS @ p, z)
    return gradient


# Five baselines --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """What theory needs: probabilities (9,), grad log p of every answer (9, 12) and the exact gradient (12,)."""

    p: Tensor
    scores: Tensor
    gradient: Tensor

    @property
    def value(self) -> float:
        """Expected reward: what a perfect critic says."""
        return float(self.p @ REWARDS)

    @property
    def best_baseline(self) -> float:
        """The constant of least variance, E[R |s|^2] / E[|s|^2], s = grad log p (Greensmith et al. 2004, theorem 13)."""
        size = self.p * self.scores.square().sum(1)
        return float(size @ REWARDS / size.sum())

    def constant_variance(self, baseline: float, batch: int = BATCH) -> float:
        """Variance of the gradient, summed over its entries, with a constant baseline: (E[(R - b)^2 |s|^2] - |grad J|^2) / G."""
        second = self.p @ ((REWARDS - baseline).square() * self.scores.square().sum(1))
        return float((second - self.gradient.square().sum()) / batch)

    def leave_one_out_variance(self, batch: int = BATCH) -> float:
        """The gradient is then a U-statistic with kernel h = (R1 - R2)(s1 - s2)/2 (Hoeffding 1948, eq. 5.13):
        variance (4 (G - 2) Var E[h | y1] + 2 Var h) / (G (G - 1))."""
        h = (REWARDS[:, None] - REWARDS)[..., None] * (self.scores[:, None] - self.scores) / 2  # (9, 9, 12)
        given_first = torch.einsum("j,ijk->ik", self.p, h)
        mean = self.p @ given_first

        def spread(values: Tensor, weights: Tensor) -> float:
            return float((weights * (values - mean).square().sum(-1)).sum())

        zeta1, zeta2 = spread(given_first, self.p), spread(h, self.p[:, None] * self.p)
        return (4 * (batch - 2) * zeta1 + 2 * zeta2) / (batch * (batch - 1))


def world(logits: Tensor = LOGITS) -> World:
    z = logits.clone().requires_grad_()
    logp = logps(z)
    one = torch.ones(1, dtype=torch.float64)
    scores = [torch.autograd.grad(ascent(logp[i : i + 1], one), z, retain_graph=True)[0] for i in range(len(ANSWERS))]
    return World(logp.detach().sum(-1).exp(), torch.stack(scores), exact_gradient(logits))


@dataclass(frozen=True)
class Baseline:
    """`advantages`: rewards (N,) and their batch (N,) -> (N,). `scale`: the mean gradient in units of the exact one."""

    name: str
    advantages: Callable[[Tensor, Tensor], Tensor]
    variance: Callable[[int], float]
    scale: Callable[[int], float] = lambda batch: 1.0


def baselines(w: World) -> list[Baseline]:
    def constant(b: float) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda rewards, batch: no_baseline(rewards - b, batch)

    def shrunk(batch: int) -> float:
        return ((batch - 1) / batch) ** 2 * w.leave_one_out_variance(batch)

    return [
        Baseline("none", no_baseline, lambda g: w.constant_variance(0.0, g)),
        Baseline("batch mean", group_mean, shrunk, lambda g: (g - 1) / g),
        Baseline("leave one out", rloo, w.leave_one_out_variance),
        Baseline("critic", constant(w.value), lambda g: w.constant_variance(w.value, g)),
        Baseline("best constant", constant(w.best_baseline), lambda g: w.constant_variance(w.best_baseline, g)),
    ]


@dataclass(frozen=True)
class Measured:
    """Over many batches: `variance` of the gradient summed over its entries, `scale` of its mean along the exact gradient."""

    baseline: Baseline
    batch: int
    variance: Interval
    scale: Interval


def measure(w: World, chosen: list[Baseline], *, batch: int = BATCH, batches: int = 4000, seed: int = 0) -> list[Measured]:
    """The same `batches` draws for every baseline."""
    rng = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(w.p, batches * batch, replacement=True, generator=rng)
    ids = torch.arange(batches).repeat_interleave(batch)
    found = []
    for baseline in chosen:
        advantages = baseline.advantages(REWARDS[drawn], ids)
        # The mean over a batch of A grad log p is linear in A, so the gradients of the nine answers are enough.
        gradients = (advantages[:, None] * w.scores[drawn]).view(batches, batch, -1).mean(1)  # (batches, 12)
        centred = gradients - baseline.scale(batch) * w.gradient
        along = gradients @ w.gradient / w.gradient.square().sum()
        found.append(Measured(baseline, batch, mean_interval(centred.square().sum(1).numpy()), mean_interval(along.numpy())))
    return found


# Learning with each ----------------------------------------------------------------------------------------------------------------

# Rewards (N,), the exact value of the policy that drew each (N,), and its run (N,) -> advantages (N,).
LEARNERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "none": lambda rewards, value, runs: no_baseline(rewards, runs),
    "leave one out": lambda rewards, value, runs: rloo(rewards, runs),
    "critic": lambda rewards, value, runs: no_baseline(rewards - value, runs),
}


def learn(name: str, *, updates: int = 120, rate: float = 2.0, runs: int = 64, seed: int = 1) -> list[float]:
    """Expected reward before each update and after the last, exact for each policy, mean over `runs` that learn side by side."""
    rng = torch.Generator().manual_seed(seed)
    z = LOGITS.repeat(runs, 1).requires_grad_()
    ids = torch.arange(runs).repeat_interleave(BATCH)
    curve = []
    for update in range(updates + 1):
        table = logps(z)  # (runs, 9, 2)
        p = table.detach().sum(-1).exp()
        value = p @ REWARDS  # (runs,)
        curve.append(float(value.mean()))
        if update == updates:
            break
        drawn = torch.multinomial(p, BATCH, replacement=True, generator=rng)  # (runs, BATCH)
        logp = table.gather(1, drawn[..., None].expand(-1, -1, 2)).flatten(0, 1)
        advantages = LEARNERS[name](REWARDS[drawn].flatten(), value.repeat_interleave(BATCH), ids)
        (gradient,) = torch.autograd.grad(ascent(logp, advantages, rows=BATCH), z)  # rows: each run's own mean
        z = (z + rate * gradient).detach().requires_grad_()
    return curve


# The page --------------------------------------------------------------------------------------------------------------------------


def run(variant: Variant) -> Result:
    w = world()
    measured = measure(w, baselines(w))
    curves = {name: learn(name) for name in LEARNERS}
    none, best = w.constant_variance(0.0), w.constant_variance(w.best_baseline)
    return Result(
        see=(
            f"A baseline leaves the expected gradient as it is and here takes {percent(1 - best / none)} of its variance away: "
            "the policy's value is almost the best constant, and the mean of the other samples comes close without a critic.",
            f"A mean that includes the sample itself shrinks the gradient to (G − 1)/G of its size, {number((BATCH - 1) / BATCH)} at "
            f"G = {BATCH}, and leaves its direction; leaving the sample out costs no bias.",
        ),
        tables=[_trick_table(), _baseline_table(measured)],
        sections=[
            Section(
                "What a baseline is worth",
                [
                    "Variance of (1/G) Σ (R − b)·∇log p, summed over its entries: for a constant b a parabola, exact by enumeration, lowest at "
                    "b* = E[R·|∇log p|²] / E[|∇log p|²]. Beside it: the variance of 4,000 measured batches over the exact one, with 95 % intervals."
                ],
                [_parabola(w), _agreement(measured)],
            ),
            Section(
                "Where there is bias, and what the noise costs",
                [
                    "First the mean gradient along the exact one, in units of its size, against the group size G. "
                    "Then the expected reward while 64 policies learn with each baseline, from the same start at the same rate, 8 answers an update."
                ],
                [_bias_chart(w), _learning_chart(curves)],
            ),
        ],
    )  # fmt: skip


def _trick_table() -> Table:
    exact = exact_gradient()
    kinds = {
        "Σ p·R·∇log p": trick_gradient(),
        "Σ p·(R − 3)·∇log p": trick_gradient(baseline=3.0),
        "Σ p·R·∇p": gradient_without_log(),
    }
    return Table(
        ["over all nine answers", "largest difference", "length", "cosine"],
        [
            ["∇ Σ p·R", "", number(float(exact.norm())), ""],
            *(
                [name, number(float((g - exact).abs().max()), 1), number(float(g.norm())),
                 f"{float(torch.cosine_similarity(g, exact, 0)):.4f}"]
                for name, g in kinds.items()
            ),
        ],
        "The log-derivative trick",
        "The two with the logarithm agree with the derivative to rounding. The last is what averaging R·∇p over samples gives: "
        "each answer counts by p twice, which is another direction.",
        frozenset({1, 2, 3}),
    )  # fmt: skip


def _baseline_table(measured: list[Measured]) -> Table:
    least = min(m.baseline.variance(BATCH) / m.baseline.scale(BATCH) ** 2 for m in measured)
    return Table(
        ["baseline", "variance", "measured", "mean gradient", "answers needed"],
        [
            [
                m.baseline.name,
                f"{m.baseline.variance(BATCH):.4f}",
                f"{m.variance.value:.4f} ± {m.variance.high - m.variance.value:.4f}",
                f"{m.scale.value:.3f} ± {m.scale.high - m.scale.value:.3f}",
                f"{m.baseline.variance(BATCH) / m.baseline.scale(BATCH) ** 2 / least:.2f}",
            ]
            for m in measured
        ],
        f"Five baselines, {BATCH} answers an update",
        "± is half a 95 % interval. Mean gradient: along the exact one, 1 = its size. Answers needed: for the same share of noise, relative to the best constant; "
        "the shrunken gradient of the batch mean is scaled back for it.",
        frozenset(range(1, 5)),
    )


def _parabola(w: World) -> Chart:
    levels = [i / 20 for i in range(111)]
    loo = w.leave_one_out_variance()
    return line_chart(
        [
            Series("constant b", [(b, w.constant_variance(b)) for b in levels], 1),
            Series("none: b = 0", [(0.0, w.constant_variance(0.0))], 2, dots=True),
            Series(f"the value, {w.value:.2f}, and b* = {w.best_baseline:.2f}",
                   [(b, w.constant_variance(b)) for b in (w.value, w.best_baseline)], 3, dots=True, joined=False),
            Series("leave one out", [(levels[0], loo), (levels[-1], loo)], 4, dashed=True),
        ],
        title="Variance against the baseline",
        x_label="baseline b (reward)",
        y_label="variance",
        whole_x=False,
        smooth=False,
        with_zero=True,
    )  # fmt: skip


def _agreement(measured: list[Measured]) -> Chart:
    rows = []
    for m in measured:
        exact = m.baseline.variance(BATCH)
        rows.append(Estimate(m.baseline.name, m.variance.value / exact, m.variance.low / exact, m.variance.high / exact))
    return interval_chart(rows, title="Measured variance over the exact one", x_label="ratio", mark=1.0, mark_label="theory")


def _bias_chart(w: World) -> Chart:
    chosen = [b for b in baselines(w) if b.name in ("batch mean", "leave one out")]
    found = {size: measure(w, chosen, batch=size, batches=16000 // size, seed=size) for size in SIZES}
    return line_chart(
        [
            Series("(G − 1)/G", [(g, (g - 1) / g) for g in range(SIZES[0], SIZES[-1] + 1)], 1, dashed=True),
            *(
                Series(chosen[i].name, [(g, found[g][i].scale.value) for g in SIZES], i + 1, dots=True)
                for i in range(len(chosen))
            ),
        ],
        title="Size of the mean gradient",
        x_label="group size G",
        y_label="in units of the exact gradient",
        smooth=False,
        with_zero=True,
        caption="Measured on 16,000 answers for each size.",
    )  # fmt: skip


def _learning_chart(curves: dict[str, list[float]]) -> Chart:
    colours = {"none": 2, "leave one out": 4, "critic": 3}
    return line_chart(
        [Series(name, list(enumerate(curve)), colours[name], dashed=name == "critic") for name, curve in curves.items()],
        title="Learning with each baseline",
        x_label="update",
        y_label="expected reward",
        smooth=False,
        mark=float(REWARDS.max()),
        mark_label="best answer",
        caption="Mean of 64 runs. With large positive rewards and no baseline whatever is drawn first grows, and some runs stay with it.",
    )


EXPERIMENT = Experiment("reinforce", "REINFORCE and its baselines", NAMES["reinforce"], run)
