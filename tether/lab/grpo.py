"""GRPO on four actions: six draws a step, and the group is its own baseline (Shao et al. 2024, arXiv:2402.03300, eq. 3).

The listing's run and that of the objective stand in `group_runs.py`, both on the C library's random numbers; group sizes and prompts of other
scales in `group_baseline.py`; the pictures in `grpo_pictures.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tether.lab import as_printed, grpo_pictures
from tether.lab.bandit import optimum
from tether.lab.catalogue import NAMES
from tether.lab.experiment import Difference, Experiment, Result, Variant
from tether.lab.group_baseline import VARIANCE, Spread, many, pull, spread
from tether.lab.group_runs import BEST, BETA, EPS, GROUP, REF_LOGP, REWARDS, STEPS, WORST, Run, learn, listing, penalty_push
from tether.lab.grpo_pictures import OLD, PRINTED, REFERENCE
from tether.report.numbers import number, percent, signed
from tether.report.view import Section, Table

SHOWN = (5, 10, 15, 20)
SIZES = (2, 4, 8, 16, 32, 64)
DENSE = (2, 3, 4, 6, 8, 12, 16, 32, 64)  # of the picture
DRAWS = 192  # for comparing group sizes at equal cost: a multiple of each
BETAS = (0.1, 0.5, 1.0, 2.0)
SCALES = (0.01, 1.0, 100.0)
SCALE_STEPS = 40
SOLVED = (0.01, 0.05, 0.2, 0.5, 0.8, 0.95, 0.99)


def run(variant: Variant) -> Result:
    runs: dict[str, Run] = {}
    if variant != "true":
        runs[PRINTED] = listing()
    if variant != "printed":
        runs |= {OLD: learn("old"), REFERENCE: learn("reference")}
    tables = [_steps_table(runs), _ends_table(runs), *([_optimum_table()] if variant != "printed" else []), _changed_table(variant)]
    sections = [
        Section(
            "Exact and estimated",
            [
                "Expected reward: Σ π·r over the four actions, exact. Group: the mean of the six rewards drawn at that step, an estimate of the same "
                "number for the same policy. What lies between them goes into every advantage of the step.",
                *([_RATIO_TEXT] if PRINTED in runs else []),
            ],
            [grpo_pictures.reward_chart(runs), *([grpo_pictures.ratio_chart(runs[PRINTED])] if PRINTED in runs else [])],
        )
    ]
    if variant != "printed":  # the rest learns by the objective's gradient
        of_exercises = _exercises()
        tables += of_exercises[0]
        sections += of_exercises[1]
    return Result(see=_see(runs), tables=tables, sections=sections, differences=_differences(runs) if variant == "both" else [])


def _exercises() -> tuple[list[Table], list[Section]]:
    dense = [spread(size) for size in DENSE]
    spreads = [s for s in dense if s.size in SIZES]
    scaled = {(scale, divide): many(SCALE_STEPS, scale=scale, divide=divide, runs=100) for scale in SCALES for divide in (True, False)}
    return [_size_table(spreads), _spread_table(spreads), _scale_table(scaled), _pull_table()], [
        Section(
            "Exercise 3: the size of the group",
            [
                f"The baseline's standard deviation over groups of the first policy: √(σ²/G) for the group's mean, √(σ²/(G − 1)) for the mean of the "
                f"others, with σ² = {number(VARIANCE)}, the variance of one reward. Four times the draws halve it."
            ],
            [grpo_pictures.spread_chart(dense)],
        ),
        Section(
            "Exercise 6: without dividing by the deviation",
            [
                "A = R − mean grows with the reward's scale: at one rate a prompt paid in hundredths hardly learns, and one paid in hundreds takes steps so "
                "large that the first lucky draw can stay for good.",
                "Dividing has a price of its own. Second picture: the expected push on a right answer of a prompt that is solved with probability p. "
                "With the division prompts that are almost solved or almost hopeless count for more.",
            ],
            [grpo_pictures.scale_chart(scaled), grpo_pictures.pull_chart()],
        ),
    ]


_RATIO_TEXT = (
    "Second picture: the listing divides by the reference's probability, not by that of the policy that drew the group. A good draw of the best "
    "action counts at most 1.2, a bad draw the whole ratio; the ratio to the policy that drew is 1 for both."
)


def _see(runs: dict[str, Run]) -> tuple[str, str]:
    name = PRINTED if PRINTED in runs else OLD
    start, *_, end = (runs[name].at(n) for n in SHOWN)
    worst = max(abs(step.group - step.expected) for step in runs[name].steps)
    first = (
        f"What the policy earns rises from {start.expected:.2f} at step {SHOWN[0]} to {end.expected:.2f} at step {SHOWN[-1]}; what six draws say of it "
        f"is off by up to {worst:.2f}, and that error is in every advantage."
    )
    if PRINTED in runs and OLD in runs:
        ends = {kind: r.at(STEPS).expected for kind, r in runs.items()}
        return first, (
            f"The listing measures its ratio against the reference: with the clip's own derivative that would stay near {ends[REFERENCE]:.2f}, "
            f"and measured against the policy that drew the group, as published, it reaches {ends[OLD]:.2f}."
        )
    two, thirty_two = ((VARIANCE / size) ** 0.5 for size in (2, 32))
    return first, (
        f"The noise of the baseline falls with the root of the group: {two:.2f} with two draws, {thirty_two:.2f} with thirty-two, "
        "for sixteen times the cost."
    )


# Tables -------------------------------------------------------------------------------------------------------------------------------


def _two(probs: Sequence[float]) -> str:
    return " ".join(f"{p:.2f}" for p in probs)


def _steps_table(runs: dict[str, Run]) -> Table:
    nine = PRINTED in runs
    rows = []
    for name, run in runs.items():
        for n in SHOWN:
            at = run.at(n)
            cells = [name if n == SHOWN[0] else "", str(n), _two(at.probs), f"{at.expected:.2f}", f"{at.group:.2f}"]
            rows.append([*cells, *([run.digits.get(n, "")] if nine else [])])
    return Table(
        ["run", "step", "probabilities", "exp", "group", *(["exp / group, nine digits"] if nine else [])],
        rows,
        "Twenty steps, six draws each",
        "Rewards 2, 5, 1, 3 plus noise over a width of 1; clip 0.2, β = 0.1, rate 0.3. Each row is the policy before that step's update. "
        "The random numbers are those of srand(42).",
        frozenset(range(1, 6)),
    )


def _ends_table(runs: dict[str, Run]) -> Table:
    rows = []
    for name, run in runs.items():
        digits = run.digits or {
            "probabilities": " ".join(f"{p:.6f}" for p in run.at(STEPS).probs),
            "logits": " ".join(f"{z:.6f}" for z in run.logits),
        }
        rows.append([name, digits["probabilities"], digits["logits"].replace("-", "−")])
    return Table(
        ["run", f"probabilities at step {STEPS}", "logits after it"], rows, "Where they end", numeric=frozenset({1, 2}), folded=True
    )


def _optimum_table() -> Table:
    rows = []
    for beta in BETAS:
        best = optimum(REWARDS, REF_LOGP, beta)
        probs = " ".join(f"{p:.6f}" if p >= 1e-5 else number(p) for p in best.p.tolist())
        log_z = best.value / beta
        rows.append([number(beta), probs, f"{log_z:.6f}", f"{best.value:.6f}", f"{best.kl:.6f}", f"{best.reward:.6f}"])
    return Table(
        ["β", "best policy", "log Z", "J*", "KL", "E[r]"],
        rows,
        "Where the penalty would let it go",
        "π* = ref·exp(r/β)/Z for max E[r] − β·KL(π ‖ ref), with the uniform reference. Divided by the group's deviation, rewards are no longer in "
        "the unit in which β is meant: the runs above do not aim at these.",
        frozenset(range(6)),
    )


def _changed_table(variant: Variant) -> Table:
    def cells(run: Run) -> list[str]:
        return [f"{run.at(n).expected:.2f}/{run.at(n).group:.2f}" for n in SHOWN]

    rows = []
    kinds = [
        *((f"G = {size}", {"group_size": size}) for size in (2, GROUP, 32)),
        ("no division by the deviation", {"divide": False}),
        ("no penalty, β = 0", {"beta": 0.0}),
    ]
    for name, changed in kinds:
        if variant != "true":
            rows.append([name, PRINTED, *cells(listing(**changed))])  # type: ignore[arg-type]
        if variant != "printed":
            rows.append([name if variant == "true" else "", OLD, *cells(learn(**changed))])  # type: ignore[arg-type]
    return Table(
        ["changed", "run", *(f"step {n}" for n in SHOWN)],
        rows,
        "The same program, one thing changed",
        "exp/group as above.",
        frozenset(range(2, 6)),
        folded=True,
    )


def _size_table(spreads: list[Spread]) -> Table:
    rows = []
    for s in spreads:
        steps, draws = many(STEPS, group_size=s.size), many(DRAWS // s.size, group_size=s.size)
        rows.append([str(s.size), str(s.size * STEPS), _mean(steps), str(DRAWS // s.size), _mean(draws)])
    return Table(
        ["G", f"draws in {STEPS} steps", f"E[r] after {STEPS} steps", f"steps in {DRAWS} draws", f"E[r] after {DRAWS} draws"],
        rows,
        "What a larger group buys, and costs",
        "Mean ± standard deviation over 40 policies, objective's gradient, no penalty, one rate for all. At equal steps large groups end higher and closer "
        "together; at equal draws small groups have taken more steps. Two draws get +1 and −1 however close their rewards are.",
        frozenset(range(5)),
    )


def _mean(values: Tensor) -> str:
    return f"{float(values.mean()):.2f} ± {float(values.std()):.2f}"


def _spread_table(spreads: list[Spread]) -> Table:
    rows = []
    for s in spreads:
        measured = (s.with_self, s.without, s.centred, s.left_out)
        rows.append([str(s.size), *(f"{m.value:.3f} / {t:.3f}" for m, t in zip(measured, s.theory, strict=True))])
    return Table(
        ["G", "group's mean", "mean of the others", "R − group's mean", "R − mean of the others"],
        rows,
        "Variance: measured / theory",
        f"2,000 groups of the first policy. Theory: σ²/G, σ²/(G − 1), σ²(1 − 1/G), σ²G/(G − 1) with σ² = {VARIANCE:.4f}. The two advantages differ by the "
        "factor G/(G − 1) and nothing else.",
        frozenset(range(5)),
        folded=True,
    )


def _scale_table(scaled: dict[tuple[float, bool], Tensor]) -> Table:
    rows = []
    for scale in SCALES:
        with_std, without = scaled[scale, True], scaled[scale, False]
        stuck = percent(float((without < 4.5).double().mean()))
        rows.append([f"× {number(scale)}", _mean(with_std), _mean(without), stuck, f"{float(without.min()):.2f}"])
    return Table(
        ["rewards", "divided", "mean subtracted only", "of these below 4.5", "worst"],
        rows,
        "Exercise 6: prompts of other scales",
        f"Expected reward, in units of the scale, after {SCALE_STEPS} steps at the same rate; mean ± standard deviation over 100 policies. "
        "The best action earns 5, the start 2.75.",
        frozenset(range(1, 5)),
    )


def _pull_table() -> Table:
    def relative(p: float, size: int, divide: bool) -> str:
        return f"{pull(p, size, divide) / pull(0.5, size, divide):.2f}"

    return Table(
        ["solved", "divided, G = 8", "divided, G = 64", "mean subtracted only", "√(p(1 − p))", "p(1 − p)"],
        [
            [
                percent(p),
                *(relative(p, size, divide) for size, divide in ((8, True), (64, True), (8, False))),
                f"{2 * (p * (1 - p)) ** 0.5:.2f}",
                f"{4 * p * (1 - p):.2f}",
            ]
            for p in SOLVED
        ],
        "Exercise 6: prompts solved to different degrees",
        "Expected push on the logit of the right answer, rewards 0 and 1, relative to a prompt solved half the time. Without the division it is the true "
        "gradient, p(1 − p), times (G − 1)/G; with it, it nears √(p(1 − p)) as the group grows.",
        frozenset(range(6)),
        folded=True,
    )


def _differences(runs: dict[str, Run]) -> list[Difference]:
    last = runs[PRINTED].at(STEPS)
    ratio = last.probs[BEST] / 0.25
    low = last.probs[WORST]
    value = float(as_printed.penalty(as_printed.F(low), as_printed.F(0.25)))
    stalled = runs[REFERENCE].at(STEPS).probs[BEST] / 0.25
    at_15 = {name: runs[name].at(15) for name in (PRINTED, OLD)}
    return [
        Difference(
            "weight of a bad draw of the best action, step 20",
            f"{ratio:.2f}",
            "1",
            f"The listing's ratio is to the reference. A good draw is clipped to {1 + EPS:.1f}, so a bad one weighs {ratio / (1 + EPS):.1f} times as much; the "
            "policy that drew the group is the one being updated.",
        ),
        Difference(
            "exp after that formula's own gradient, step 20",
            f"{last.expected:.2f}",
            f"{runs[REFERENCE].at(STEPS).expected:.2f}",
            f"With the derivative of the clip, 0 beyond {1 + EPS:.1f} times the reference, the printed ratio stalls soon after, at {stalled:.1f} times; "
            "the listing learns because it adds the value of the objective instead.",
        ),
        Difference(
            "exp at step 20, published objective",
            f"{last.expected:.2f}",
            f"{runs[OLD].at(STEPS).expected:.2f}",
            "Ratio 1, derivative of the softmax, gradient of the penalty.",
        ),
        Difference(
            "penalty's push on the rarest action, step 20",
            signed(-BETA * value),
            signed(penalty_push(low, 0.25)),
            "The listing subtracts the penalty's value, which is never negative: it pushes a rare action further down. The gradient, −β(1 − ref/p), pushes it "
            "back up.",
        ),
        Difference(
            "group at step 15",
            f"{at_15[PRINTED].group:.2f}",
            f"{at_15[OLD].group:.2f}",
            "Same random numbers; the two policies have parted and one of the six draws falls on another action.",
        ),
        Difference(
            "push of a prompt solved 95 %, relative to one solved 50 %, G = 64",
            f"{pull(0.95, 64, True) / pull(0.5, 64, True):.2f}",
            f"{pull(0.95, 64, False) / pull(0.5, 64, False):.2f}",
            "The text says that dividing by the deviation costs nothing. It costs direction: the gradient of the expected reward gives such a prompt "
            "the second number.",
        ),
    ]


EXPERIMENT = Experiment("grpo", "GRPO: the group as its own baseline", NAMES["grpo"], run, has_variants=True)
