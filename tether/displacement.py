"""Likelihood displacement: a preference margin that grows although the chosen answer gets less likely.

Losses that depend on d = (c - c0) - (r - r0) alone can fall while c falls, as long as r falls faster (Razin et al. 2024,
"Unintentional unalignment"; Pal et al. 2024, DPO-positive). Accuracy and margin look perfect meanwhile, so the two halves are
watched apart, and the pair's similarity is kept beside them: the more tokens two answers share, the more they fall together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from tether.loop import Tally
from tether.run import Run

REMEDY = (
    "add the likelihood of the chosen answer (loss_type=dpo_nll_seq), penalise its fall (loss_type=dpop), normalise by length "
    "(loss_type=dpo_norm), leave out pairs that are too alike (min_edit_distance=0.2), or lower learning_rate"
)


def similarity(chosen: Sequence[int], rejected: Sequence[int]) -> float:
    """Share of tokens that two answers have in common, in order: 1 for equal ones, 0 for disjoint ones.

    >>> similarity([1, 2, 3, 4], [1, 2, 9, 4])
    0.75
    """
    if not chosen and not rejected:
        return 1.0
    return SequenceMatcher(None, chosen, rejected, autojunk=False).ratio()


class DisplacementWatch:
    """Counts the steps in which most chosen answers are below the reference while the pairs are told apart ever better."""

    def __init__(self, warn_after: int) -> None:
        self.warn_after, self.steps, self.warned = warn_after, 0, False

    def load(self, state: Mapping[str, Any]) -> None:
        self.steps, self.warned = int(state.get("steps", 0)), bool(state.get("warned", False))

    def shares(self, tally: Tally) -> dict[str, float]:
        """The margin's two halves as shares of the step's pairs."""
        chosen, rejected = tally.rows("displacement/chosen"), tally.rows("displacement/rejected")
        if not len(chosen):
            return {}
        up, down = float(chosen.mean()), -float(rejected.mean())
        out = {"displacement/frac_chosen_down": float((chosen < 0).double().mean())}
        if up + down > 0:  # the share is meaningless while the margin is not positive
            out["displacement/share_from_rejected"] = down / (up + down)
        return out

    def update(self, run: Run, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Warn once, by name, when the chosen side has been falling for `warn_after` steps. Returns the state to keep."""
        down = metrics.get("displacement/frac_chosen_down")
        if down is not None:
            falling = down > 0.5 and metrics.get("displacement/chosen", 0.0) < 0 and metrics.get("rewards/margins", 0.0) > 0
            self.steps = self.steps + 1 if falling else 0
            if self.steps >= self.warn_after and not self.warned:
                self.warned = True
                words = (
                    f"likelihood displacement: for {self.steps} steps most chosen answers have been less likely than at the start "
                    f"(mean {metrics['displacement/chosen']:+.2f} nats) while the margin is positive "
                    f"({metrics.get('rewards/margins', 0.0):+.3f}); remedies: {REMEDY}"
                )
                run.say("warning: " + words)
                run.note("likelihood_displacement", words)
        return {"steps": self.steps, "warned": self.warned}
