"""The experiments, in the order of the page. An experiment's module is imported when it runs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from tether.errors import UserError
from tether.keys import nearest
from tether.lab.experiment import Experiment

NAMES: dict[str, str] = {
    "reward-model": "Five comparisons become four weights; the bias cannot move.",
    "ppo": "Four actions, four updates a batch: what the clip stops and what it does not.",
    "grpo": "Six draws a step, no critic: the group is its own baseline.",
    "clipping": "The clipped objective in six rows, and where its gradient is zero.",
    "dpo": "The reward hidden in the policy, and how the loser pays for the gap.",
    "reinforce": "The log-derivative trick by enumeration; five baselines and their variance.",
    "normalise": "+1.15 and -0.58: which group gives them, and the right table for eight.",
    "tether": "Longer pays more: where beta puts the policy, and best-of-n beside it.",
    "math": "Sums by a tiny transformer from nothing: SFT, then GRPO, then voting.",
    "memory": "How many models each method holds, up to 671 billion parameters.",
}


def experiment(name: str) -> Experiment:
    """Raises UserError with the nearest name."""
    if name not in NAMES:
        near = nearest(name, list(NAMES))
        hint = f"Did you mean {near}? " if near else ""
        raise UserError(f"there is no experiment {name!r}", remedy=f"{hint}`tether lab` lists all {len(NAMES)}.")
    module = importlib.import_module(f"tether.lab.{name.replace('-', '_')}")
    made: Experiment = module.EXPERIMENT
    return made


def experiments(names: Sequence[str] = ()) -> list[Experiment]:
    return [experiment(name) for name in names or NAMES]
