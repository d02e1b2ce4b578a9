"""How many models each method holds, and what they weigh: `plan_sizes`, the numbers behind `tether plan --parameters`.

    full training    16 bytes a parameter of a trained model: weight, gradient and AdamW's two moments, all float32
    frozen models    2 bytes a parameter: bfloat16
    LoRA             4 bytes a parameter of the policy, float32 and frozen, and 16 of each adapter's; the reference is the policy without adapter
    sampler's copy   2 bytes a parameter: the weights as sampling reads them, bfloat16; none where training runs in float32

Activations and the keys and values of answers come on top: they depend on the batch, not on the method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tether.lab.catalogue import NAMES
from tether.lab.experiment import Difference, Experiment, Result, Variant
from tether.plan_sizes import FLOAT, HALF, METHODS, Method, Need, lora_share, needs
from tether.report.bars import Bars, bar_chart
from tether.report.charts import Chart
from tether.report.numbers import number
from tether.report.view import Section, Table

SIZES = {"135M": 135e6, "1B": 1e9, "8B": 8e9, "70B": 70e9, "671B": 671e9}
CHAPTER = "671B"  # the size at which the chapter says that two models are too many
CARD = 80e9  # bytes of a card of 80 GB
CARDS = (1, 8, 64)
SAMPLES = ("grpo", "ppo")  # what the names of methods begin with that sample while they train
SAME = "The numbers of tether plan --parameters."
TRAINED = 4 * FLOAT  # bytes a parameter of a trained model
# What the lecture counts, by the method that holds as much.
LECTURE = {"dpo": "2", "grpo": "2", "ppo": "3 to 4"}


def need_of(name: str, parameters: float) -> Need:
    return next(need for need in needs(parameters) if need.method.name == name)


def sampler_bytes(method: Method, parameters: float) -> float:
    """The weights once more, as sampling reads them; adapters are merged into them."""
    return HALF * parameters if method.name.startswith(SAMPLES) else 0.0


def largest(cards: int, bytes_of: Callable[[float], float]) -> float:
    """The most parameters whose `bytes_of` fit on so many cards, shared among them without loss."""
    low, high = 0.0, 1.0
    while bytes_of(high) <= cards * CARD:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if bytes_of(middle) <= cards * CARD else (low, middle)
    return low


def cards_for(size: float) -> int:
    """How many cards so many bytes take at the least."""
    return math.ceil(size / CARD)


# The page --------------------------------------------------------------------------------------------------------------------------


def run(variant: Variant) -> Result:
    big = SIZES[CHAPTER]
    ppo, shared, grpo = (need_of(name, big) for name in ("ppo", "ppo, shared critic", "grpo"))
    critic = TRAINED * big
    return Result(
        see=(
            f"A trained model takes {TRAINED} bytes a parameter, a frozen one {HALF}: which models are trained decides, not how many there are.",
            f"At {CHAPTER} a critic of the policy's size takes {_gib(critic)} GiB, {number(100 * critic / ppo.full, 2)} % of PPO and "
            f"{cards_for(critic)} cards of 80 GB; GRPO with rewards by rule does without it and without a reward model, and needs "
            f"{cards_for(grpo.full)} cards where PPO needs {cards_for(ppo.full)}.",
        ),
        tables=[
            _models_table(),
            _size_table("Full training, GiB", SAME, lambda need: need.full),
            _size_table("LoRA of rank 16, GiB", f"{SAME} It trains {_shares()}.", lambda need: need.lora),
            _cards_table(),
        ],
        sections=[
            Section(
                "By method",
                [
                    f"Full: bytes = {TRAINED}·(trained models)·parameters + {HALF}·(frozen models)·parameters. LoRA: {FLOAT} bytes for every parameter of "
                    f"the policy, frozen but kept in float32, {TRAINED} for those of its adapters, {HALF} for the reward model's; the reference is the policy "
                    "without adapter, and PPO's critic one more adapter. Across: GiB, activations not counted."
                ],
                [_methods_chart("8B"), _methods_chart(CHAPTER)],
            ),
            Section(
                f"PPO at {CHAPTER}, model by model",
                ["What full training holds. GRPO with a reward by rule drops the critic and the reward model. Across: GiB."],
                [_parts_chart(big)],
            ),
        ],
        differences=[
            Difference(
                "models of DPO",
                LECTURE["dpo"],
                "1 or 2",
                "The reference never changes: its scores of the fixed pairs are worked out once, then it can go; 2 where it is kept.",
            ),
            Difference(
                "models of PPO",
                LECTURE["ppo"],
                "3 or 4",
                "4 with a critic of its own, 3 where the critic is a head on the policy.",
            ),
            Difference("models of GRPO", LECTURE["grpo"], "1 or 2", "2 with a tether; with β = 0 nothing reads the reference."),
            Difference(
                f"a critic beside a policy of {CHAPTER}",
                "too much",
                f"{_gib(critic)} GiB more",
                f"{cards_for(ppo.full)} cards of 80 GB in place of {cards_for(shared.full)} with a critic that is a head on the policy: "
                "much, but it can be had.",
            ),
        ],
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f}"


def _shares() -> str:
    small, large = (lora_share(p) for p in (SIZES["135M"], SIZES[CHAPTER]))
    return f"{small:.2%} of 135M, {large:.2%} of {CHAPTER}".replace("%", " %")


def _models_table() -> Table:
    rows = []
    for m in METHODS:
        copy = f" + {HALF}" if sampler_bytes(m, 1.0) else ""
        rows.append([m.name, str(m.models), str(m.trained), f"{m.trained * TRAINED + m.frozen * HALF}{copy}", m.why])
    return Table(
        ["method", "models", "trained", "bytes a parameter", "held in memory"],
        rows,
        "Models in memory",
        f"+ {HALF}: the sampler's copy, bfloat16 weights that follow the policy. It is not counted among the models.",
        frozenset({1, 2, 3}),
    )


def _size_table(title: str, caption: str, which: Callable[[Need], float]) -> Table:
    by_size = {name: {n.method.name: which(n) for n in needs(parameters)} for name, parameters in SIZES.items()}
    rows = [[m.name, *(_gib(by_size[name][m.name]) for name in SIZES)] for m in METHODS]
    rows.append(["sampler's copy, on top", *(_gib(HALF * parameters) for parameters in SIZES.values())])
    return Table(["method", *SIZES], rows, title, caption, frozenset(range(1, len(SIZES) + 1)))


def _cards_table() -> Table:
    rows = []
    for m in METHODS:
        full = [largest(cards, lambda p, m=m: need_of(m.name, p).full + sampler_bytes(m, p)) for cards in CARDS]  # type: ignore[misc]
        lora = [largest(cards, lambda p, m=m: need_of(m.name, p).lora + sampler_bytes(m, p)) for cards in CARDS]  # type: ignore[misc]
        rows.append([m.name, *(f"{p / 1e9:,.1f}" for p in (*full, *lora))])
    cards = [f"{n} card{'s' if n > 1 else ''}" for n in CARDS]
    return Table(
        ["method", *(f"full, {c}" for c in cards), *(f"LoRA, {c}" for c in cards)],
        rows,
        "The largest model that fits, in billions of parameters",
        "Cards of 80 GB (80·10⁹ bytes), shared without loss, the sampler's copy counted, nothing left for activations: an upper bound.",
        frozenset(range(1, 7)),
    )


def _methods_chart(size: str) -> Chart:
    made = list(needs(SIZES[size]))
    one = CARD / 2**30
    return bar_chart(
        [Bars(n.method.name, (n.full / 2**30, n.lora / 2**30)) for n in made],
        ["full", "LoRA"],
        title=f"A model of {size}",
        x_label="GiB",
        text=_whole,
        mark=one if size == "8B" else None,  # at 671B it would lie on zero
        mark_label="one card of 80 GB",
    )


def _parts_chart(parameters: float) -> Chart:
    held: Sequence[tuple[str, float]] = [
        ("policy", TRAINED),
        ("critic", TRAINED),
        ("reference", HALF),
        ("reward model", HALF),
        ("sampler's copy", HALF),
    ]
    return bar_chart(
        [Bars(name, (each * parameters / 2**30,)) for name, each in held], ["GiB"], title="Where the bytes are", x_label="GiB", text=_whole
    )


def _whole(value: float) -> str:
    return f"{value:,.0f}"


EXPERIMENT = Experiment("memory", "Models in memory", NAMES["memory"], run)
