"""PPO on four actions, with four updates a batch: what the clip stops (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

As printed: `as_printed.ppo`. By the gradient of the objective, with three weightings of the actions: `clipped_updates.py`. Exercise 2 adds
beta KL to the first policy, in either direction, and compares where the gradient comes to rest with the closed forms of `bandit.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tether.lab.bandit import Direction, Optimum, kl, optimum, vector
from tether.lab.catalogue import NAMES
from tether.lab.clipped_updates import BEST, EPS, INNER, OUTER, REWARDS, START, WEIGHTINGS, WORST, Run, climb, listing, pushes, rested
from tether.lab.experiment import Difference, Experiment, Result, Variant
from tether.report.charts import Chart, Series, line_chart
from tether.report.numbers import number
from tether.report.view import Section, Table

BETAS = (1.0, 2.0, 5.0)
FORMULAS = {"reverse": "KL(π ‖ ref)", "forward": "KL(ref ‖ π)"}
DIRECTIONS: tuple[Direction, Direction] = ("reverse", "forward")
INNERS = (1, 2, 4, 8, 16, 32)
PRINTED, OBJECTIVE = "as printed", "the objective"
INNER_TEXT = {
    PRINTED: "As printed the push never stops: with many updates bad actions lose everything within a batch.",
    OBJECTIVE: "By the objective's gradient an action beyond the band is let go, and drifts on only as the others are pushed.",
}
WEIGHED = "The objective weighs actions by their old probability"
WEIGHTS_TEXT: dict[Variant, str] = {
    "both": f"{WEIGHED}; the listing visits each once, so the other two weightings stand beside it.",
    "printed": "The listing visits each action once, whatever its probability.",
    "true": f"{WEIGHED}; the other two weightings visit each once, as the listing does.",
}
Runs = dict[str, Run]
WithKl = dict[tuple[Direction, float], tuple[Run, Run]]  # by direction and beta: at rest, and after the listing's ten batches


def run(variant: Variant) -> Result:
    runs: Runs = {}
    inners: dict[str, dict[int, Run]] = {}
    with_kl: WithKl = {}
    if variant != "true":
        runs[PRINTED] = listing()
        inners[PRINTED] = {n: listing(inner=n) for n in INNERS}
    if variant != "printed":
        runs |= {name: climb(name) for name in WEIGHTINGS}
        inners[OBJECTIVE] = {n: climb(inner=n) for n in INNERS}
        with_kl = {(d, b): (rested(b, d), climb(beta=b, direction=d)) for d in DIRECTIONS for b in BETAS}
    tables = [_steps_table(runs, variant), _ends_table(runs), _outer_table(runs), _inner_table(inners)]
    sections = [
        Section(
            "Four updates of one batch",
            [
                "Ratio ρ = new/old probability of each action, looked at before each of four updates; the clip is 0.8 to 1.2. First picture: what is learnt. "
                "Second: the smallest and the largest ratio of each batch. The largest alone falls towards 1 in every run; the smallest says what goes on.",
            ],
            [_best_chart(runs), _ratio_chart(runs)],
        ),
        Section(
            "More updates of one batch",
            [
                "The same ten batches with 1 to 32 updates each. One update: every ratio is 1, and there is nothing to clip. "
                + " ".join(INNER_TEXT[name] for name in inners)
            ],
            [_inner_chart(inners)],
        ),
    ]
    if with_kl:
        tables.append(_kl_table(with_kl))
        sections.append(
            Section(
                "Exercise 2: a penalty for leaving the start",
                [
                    "The best policy under E[r] − β·KL: π* = ref·exp(r/β)/Z for KL(π ‖ ref), π* = β·ref/(λ − r) for KL(ref ‖ π). "
                    "The gradient comes to rest on these curves. The second direction keeps some of every answer that the start could give."
                ],
                [_reward_chart(), _worst_chart()],
            )
        )
    return Result(see=_see(runs, variant), tables=tables, sections=sections, differences=_differences(runs) if variant == "both" else [])


def _see(runs: Runs, variant: Variant) -> tuple[str, str]:
    checks = INNER * OUTER * len(REWARDS)
    if variant == "true":
        run, each = runs[WEIGHTINGS[0]], runs[WEIGHTINGS[1]]
        return (
            f"With the objective's own weights four updates a batch stay inside the band: {run.clips} of {checks} checks bind, "
            f"and action 1 reaches {run.steps[-1].probs[BEST]:.3f}.",
            f"Counting every action alike makes the steps larger, and {each.clips} checks bind: the clip lets the action go, and the others pull it on.",
        )
    printed = runs[PRINTED]
    first = f"As printed the clip fires {printed.clips} times of {checks} and stops nothing, because the clipped value is still pushed with"
    if variant == "both":
        run = runs[WEIGHTINGS[0]]
        first += (
            f"; by the gradient of the objective it fires {run.clips} times, and action 1 reaches {run.steps[-1].probs[BEST]:.3f} "
            f"instead of {printed.steps[-1].probs[BEST]:.3f}"
        )
    low, high = printed.ends(OUTER)
    return (
        first + ".",
        f"Look at both ends of the ratio: the largest falls to {high:.2f} while the smallest falls to {low:.3f}, "
        f"so the clip does not stop mattering: {printed.steps[-1].clips} of the last batch's {checks // OUTER} checks are below 0.8.",
    )


def _three(probs: Sequence[float]) -> str:
    return " ".join(f"{p:.3f}" for p in probs)


def _steps_table(runs: Runs, variant: Variant) -> Table:
    rows = []
    for name, run in runs.items():
        for n in range(2, OUTER + 1, 2):
            low, high = run.ends(n - 1, n)
            clips = sum(s.clips for s in run.steps[n - 2 : n])
            rows.append([name if n == 2 else "", str(n), _three(run.steps[n - 1].probs), f"{high:.2f}", f"{low:.3f}", str(clips)])
    return Table(
        ["weights", "step", "probabilities", "max ratio", "min ratio", "clips"],
        rows,
        "Ten batches, four updates of each",
        f"Rewards 2, 5, 1, 3. Ratios and clips are those of the two batches up to the row. {WEIGHTS_TEXT[variant]}",
        frozenset({1, 2, 3, 4, 5}),
    )


def _ends_table(runs: Runs) -> Table:
    checks = INNER * OUTER * len(REWARDS)
    return Table(
        ["weights", "logit 0", "logit 1", "logit 2", "logit 3", "clips"],
        [
            [name, *(z.replace("-", "−") for z in run.digits or [f"{z:.6f}" for z in run.logits]), f"{run.clips}/{checks}"]
            for name, run in runs.items()
        ],
        "Where they end",
        "Clips: checks at which the ratio lies beyond the band on the side that the advantage wants, so that the minimum takes the clipped value.",
        frozenset(range(1, 6)),
        folded=True,
    )


def _outer_table(runs: Runs) -> Table:
    shown = [runs[name] for name in (PRINTED, WEIGHTINGS[0]) if name in runs]
    names = [name for name, key in ((PRINTED, PRINTED), (OBJECTIVE, WEIGHTINGS[0])) if key in runs]
    return Table(
        ["batch", *(title for name in names for title in (f"{name}: ratios", "below 0.8", "above 1.2"))],
        [
            [
                str(n + 1),
                *(
                    cell
                    for s in (run.steps[n] for run in shown)
                    for cell in (f"{s.smallest_ratio:.3f} to {s.largest_ratio:.3f}", str(s.below), str(s.above))
                ),
            ]
            for n in range(OUTER)
        ],
        "Batch by batch",
        f"Of {INNER * len(REWARDS)} checks a batch.",
        frozenset(range(7)),
        folded=True,
    )


def _inner_table(inners: dict[str, dict[int, Run]]) -> Table:
    rows = []
    for name, found in inners.items():
        for n, run in found.items():
            low, high = run.ends()
            ratios = f"{number(low)} to {number(high)}" if high - low > 1e-6 else "1"
            clips = f"{run.clips:,}/{n * OUTER * len(REWARDS):,}"
            rows.append([name if n == INNERS[0] else "", str(n), ratios, clips, _three(run.steps[-1].probs)])
    return Table(
        ["", "updates a batch", "ratios", "clips", "probabilities at the end"],
        rows,
        "How often a batch is used",
        "Ten batches each. Ratios: from the smallest to the largest of all checks." + _idle_text(inners),
        frozenset({1, 2, 3, 4}),
        folded=True,
    )


def _idle_text(inners: dict[str, dict[int, Run]]) -> str:
    """What is counted as a clip and is none."""
    idle = {n: run.idle for n, run in inners.get(PRINTED, {}).items() if run.idle}
    if not idle:
        return ""
    told = " and ".join(f"{count} with {n}" for n, count in idle.items())
    return f" The listing's counter takes every ratio beyond the band; some bind nothing, as a good action's below 0.8: {told} updates."


def _kl_table(with_kl: WithKl) -> Table:
    rows = []
    for (direction, beta), (rest, ten) in with_kl.items():
        best = optimum(REWARDS, START.log_softmax(0), beta, direction)
        gap = float((vector(rest.steps[-1].probs) - best.p).abs().max())
        rows.append(
            [
                FORMULAS[direction] if beta == BETAS[0] else "",
                number(beta),
                _three(ten.steps[-1].probs),
                " ".join(f"{p:.6f}" for p in best.p.tolist()),
                f"{best.reward:.6f}",
                number(best.kl),
                "below 1e−9" if gap < 1e-9 else number(gap, 1),
            ]
        )
    return Table(
        ["penalty", "β", "after ten batches", "best policy", "E[r]", "KL", "distance at rest"],
        rows,
        "Exercise 2: the weight of the penalty",
        "The chapter writes the second direction; RLHF uses the first. In a loss, k2 pulls like the first and k3 like the second. "
        "Distance at rest: largest difference between a probability that the gradient came to rest at and the closed form. KL: of the row's own "
        "direction, in nats.",
        frozenset(range(1, 7)),
    )


def _differences(runs: Runs) -> list[Difference]:
    printed, true = runs[PRINTED], runs[WEIGHTINGS[0]]
    bound, inside = pushes(1.3), pushes(1.0)
    ref_logp, checks = START.log_softmax(0), INNER * OUTER * len(REWARDS)
    one, one_true = listing(inner=1, outer=50), climb(inner=1, outer=50)

    def distance(run: Run) -> str:
        return number(float(kl(vector(run.logits).log_softmax(0), ref_logp)))

    return [
        Difference(
            "push of the best action's term on its own logit at ratio 1.3",
            number(bound[0]),
            number(bound[1] + 0.0),
            "Where the clip binds the objective is flat; the listing pushes on with its value, 1.2·A·(1 − p).",
        ),
        Difference(
            "push of the same term on the worst action's logit, at ratio 1",
            "0",
            number(inside[2]),
            "Raising one logit of a softmax lowers the other probabilities: the derivative has −p of every other action.",
        ),
        Difference(
            "weight of the worst action in the sum",
            "1",
            number(float(ref_logp[WORST].exp())),
            "An expectation over samples of the old policy weighs each action by its old probability; the listing visits each once.",
        ),
        Difference(
            f"clips of {checks} checks",
            str(printed.clips),
            str(true.clips),
            "Weighed by its old probability each action takes smaller steps, and no ratio leaves the band.",
        ),
        Difference(
            "probability of the best action at the end",
            f"{printed.steps[-1].probs[BEST]:.3f}",
            f"{true.steps[-1].probs[BEST]:.3f}",
            "The listing takes larger steps than the objective asks for.",
        ),
        Difference(
            "smallest ratio of the last batch",
            f"{printed.ends(OUTER)[0]:.3f}",
            f"{true.ends(OUTER)[0]:.3f}",
            "The text reads the falling largest ratio as a clip that stops mattering; the smallest is not printed.",
        ),
        Difference(
            "smallest ratio with one update a batch, fifty batches",
            f"{one.ends()[0]:.3f}",
            number(one_true.ends()[0]),
            f"It is 1 by definition; 1e−8 in the listing's denominator shows once a probability is that small, and {one.clips} checks count as clips.",
        ),
        Difference(
            "distance from the start at the end, in nats",
            distance(printed),
            distance(climb(beta=1.0)),
            "The text says that the KL penalty appears in both algorithms. This listing has none; beside it ten batches of the objective with β = 1; "
            f"without it they end at {distance(true)}. KL(π ‖ ref).",
        ),
    ]


COLOURS = {PRINTED: 2, OBJECTIVE: 1, WEIGHTINGS[0]: 1, WEIGHTINGS[1]: 3, WEIGHTINGS[2]: 4}


def _best_chart(runs: Runs) -> Chart:
    start = float(START.softmax(0)[BEST])
    return line_chart(
        [
            Series(
                name if name == PRINTED else f"weights: {name}",
                [(0, start), *((n, s.probs[BEST]) for n, s in enumerate(run.steps, 1))],
                COLOURS[name],
                dashed=name == PRINTED,
            )
            for name, run in runs.items()
        ],
        title="Probability of the best action",
        x_label="batch",
        y_label="probability",
        smooth=False,
        limits=(0.0, 1.0),
    )


def _ratio_chart(runs: Runs) -> Chart:
    series = []
    for name, key in ((PRINTED, PRINTED), (OBJECTIVE, WEIGHTINGS[0])):
        if key in runs:
            ends = [(n, *runs[key].ends(n, n)) for n in range(1, OUTER + 1)]
            series += _both_ends(name, ends)
    bounds = [Series(f"clip: {b}", [(1, b), (OUTER, b)], 5, dashed=True) for b in (1 + EPS, 1 - EPS)]
    return line_chart(
        [*series, *bounds], title="Both ends of the ratio", x_label="batch", y_label="ratio ρ", smooth=False, with_zero=True
    )  # fmt: skip


def _inner_chart(inners: dict[str, dict[int, Run]]) -> Chart:
    series = [s for name, found in inners.items() for s in _both_ends(name, [(n, *run.ends()) for n, run in found.items()])]
    return line_chart(
        series, title="Ratios against updates a batch", x_label="updates of each batch", y_label="ratio ρ", smooth=False, with_zero=True
    )  # fmt: skip


def _both_ends(name: str, ends: list[tuple[int, float, float]]) -> list[Series]:
    return [
        Series(f"{name}: largest", [(n, high) for n, _, high in ends], COLOURS[name], dots=True),
        Series(f"{name}: smallest", [(n, low) for n, low, _ in ends], COLOURS[name], dashed=True),
    ]


def _reward_chart() -> Chart:
    return line_chart(
        _by_beta(lambda o: o.reward),
        title="What the best policy earns",
        x_label="β (reward per nat)",
        y_label="expected reward",
        whole_x=False,
        smooth=False,
        mark=float(START.softmax(0) @ REWARDS),
        mark_label="the start",
    )


def _worst_chart() -> Chart:
    return line_chart(
        _by_beta(lambda o: float(o.p[WORST])),
        title="What it keeps of the worst action",
        x_label="β (reward per nat)",
        y_label="probability of action 2",
        whole_x=False,
        smooth=False,
        mark=float(START.softmax(0)[WORST]),
        mark_label="the start",
        with_zero=True,
    )


def _by_beta(value: Callable[[Optimum], float]) -> list[Series]:
    ref_logp, betas = START.log_softmax(0), [0.1 * k for k in range(1, 61)]
    return [
        Series(FORMULAS[d], [(b, value(optimum(REWARDS, ref_logp, b, d))) for b in betas], colour, dashed=d == "forward")
        for colour, d in enumerate(DIRECTIONS, 1)
    ]


EXPERIMENT = Experiment("ppo", "PPO on four actions", NAMES["ppo"], run, has_variants=True)
