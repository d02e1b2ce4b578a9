"""Memory of every method for a model of a given size, by numbers alone: `tether plan --parameters 7e9`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tether.errors import UserError

FLOAT, HALF = 4, 2


@dataclass(frozen=True)
class Method:
    """Which models a method holds while it trains. `trained` and `frozen` are whole copies of a model of the same size."""

    name: str
    trained: int
    frozen: int
    why: str
    looked: int = 0  # passes without gradient over a step's answers, by whichever model

    @property
    def models(self) -> int:
        return self.trained + self.frozen


METHODS = (
    Method("sft", 1, 0, "the policy"),
    Method("reward", 1, 0, "the reward model"),
    Method("dpo", 1, 0, "the policy; the reference's scores are worked out once, before training"),
    Method("dpo, reference kept", 1, 1, "policy and reference", 1),
    Method("grpo, beta 0", 1, 0, "the policy; rewards by rule"),
    Method("grpo", 1, 1, "policy and reference", 1),
    Method("ppo, shared critic", 1, 2, "policy with value head, reference, reward model", 3),
    Method("ppo", 2, 2, "policy, critic, reference, reward model", 4),
)


@dataclass(frozen=True)
class Need:
    """Bytes of weights, gradients and AdamW; activations come on top and depend on the micro-batch."""

    method: Method
    full: float
    lora: float


def parse_parameters(text: str, option: str = "--parameters") -> float:
    """
    >>> parse_parameters("7e9"), parse_parameters("135M"), parse_parameters("1.7b")
    (7000000000.0, 135000000.0, 1700000000.0)
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+]?[0-9]+)?)\s*([kKmMbBgGtT]?)\s*", text)
    scale = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
    try:
        number = float(match[1]) * scale[match[2].lower()] if match else 0.0
    except ValueError:
        number = 0.0
    if number < 1:
        raise UserError(f"{text!r} is not a number of parameters", where=option, remedy="Write 7e9, 7B or 135M.")
    return number


def lora_share(parameters: float, rank: int = 16) -> float:
    """Share of a model's parameters that adapters on all linear layers have, for a transformer of usual shape.

    With width d and d/128 layers of about 12 d^2 parameters each, P = 12 d^3 / 128; an adapter adds about 18 d rank a layer.

    >>> round(lora_share(6.7e9) * 6.7e9 / 1e6)  # a 7B Llama has 40.0 million at rank 16
    39
    """
    return min(1.0, 1.5 * rank / usual_width(parameters))


def usual_width(parameters: float) -> float:
    return (parameters * 128 / 12) ** (1 / 3)


def needs(parameters: float, *, frozen_in_half: bool = True) -> Iterator[Need]:
    """One row for each method. A trained model takes 16 bytes a parameter: weight, gradient and two moments in float32."""
    frozen = HALF if frozen_in_half else FLOAT
    adapter = lora_share(parameters) * parameters
    for method in METHODS:
        others = method.frozen * frozen * parameters
        full = method.trained * 4 * FLOAT * parameters + others
        # With an adapter the reference is the same model with the adapter off, and one copy of the weights serves all
        # but the reward model.
        kept = FLOAT * parameters + (frozen * parameters if method.name.startswith("ppo") else 0)
        yield Need(method, full, kept + method.trained * 4 * FLOAT * adapter)
