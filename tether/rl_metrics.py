"""What a step of sampling and learning says of itself beside its loss, and what it warns of."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tether.loop import Tally
from tether.masked import select
from tether.rollout import FILE
from tether.rollouts import Attempts
from tether.run import Run
from tether.token_batch import TokenBatch

KL_ALARM = -0.1  # nats per token: a mean this far below 0 says that the tokens are not the policy's own


def row_metrics(tally: Tally, batch: TokenBatch, rows: Tensor, lp: Tensor, old: Tensor | None, ref: Tensor | None) -> None:
    """Extremes of the ratio and, with a reference, the KL per answer and per token. lp (A, T) of the step's `rows`."""
    mask = batch.mask[rows]
    if ref is not None:
        delta = select(lp - ref[rows], mask)
        tally.add(torch.zeros(()), {"objective/kl": delta.sum(1)})
        tally.add_ratio("kl/k1", float(delta.sum()), float(mask.sum()))
    log_ratio = torch.zeros_like(lp) if old is None else lp - old[rows]
    tally.add_extremes("ratio", log_ratio[mask].exp())
    if old is None:
        sampling_difference(tally, lp, batch.sampled_logp[rows], mask)


def sampling_difference(tally: Tally, old: Tensor, sampled: Tensor, mask: Tensor) -> None:
    """How far the log-probs of sampling are from those of training, over active places."""
    gap = (old - sampled)[mask].abs()
    tally.add_ratio("sampling/sampling_logp_difference/mean", float(gap.sum()), float(mask.sum()))
    tally.add_extremes("sampling/sampling_logp_difference", gap, low=False)


def weight_metrics(tally: Tally, weights: Tensor, old: Tensor, batch: TokenBatch) -> None:
    """The importance weights in use, and the share of tokens that their bounds have changed."""
    if not bool(batch.mask.any()):
        return
    w, free = weights[batch.mask], (old - batch.sampled_logp)[batch.mask].exp()
    tally.add_ratio("sampling/importance_sampling_ratio/mean", float(w.mean()), 1.0)
    tally.add_extremes("sampling/importance_sampling_ratio", w)
    tally.add_ratio("sampling/importance_bound", float(((w - free).abs() > 1e-6).double().mean()), 1.0)


def record(run: Run, step: int, sampled: Attempts, batch: TokenBatch, advantages: Tensor) -> None:
    """Every attempt of the step into rollouts.jsonl, with the advantage (R,) of those that were learnt from."""
    values = {(r.group, r.sample): a for r, a in zip(batch.rollouts, advantages.tolist(), strict=True)}
    rows = []
    for r in sampled.all:
        value = values.get((r.group, r.sample))
        rows.append((r if value is None else r.with_advantage(value)).row())
    run.append(FILE, step, rows)


def warn(run: Run, batch: TokenBatch, advantages: Tensor, step: int, metrics: Mapping[str, float]) -> None:
    """Say what makes a step teach nothing, and what must not be. A batch without attempts: all of them were set aside as alike."""
    if not batch.rollouts or (bool(batch.mask.any()) and not bool((advantages != 0).any())):
        text = (
            "in some steps all answers to each prompt earned the same, so that rewards gave no direction. Look at "
            "frac_reward_zero_std: prompts may be too hard or too easy, or the reward does not see the answers"
        )
        if run.note("no_signal", text):
            run.say(f"warning: {text} (step {step + 1} is the first)")
    elif not bool(batch.mask.any()):
        text = f"no token of step {step + 1} is in the loss (all answers are cut off and masked, or unscored): nothing was learnt from it"
        run.note("nothing_trained", text, step=step + 1)
        run.say(f"warning: {text}")
    k1 = metrics.get("kl/k1")
    if k1 is not None and k1 < KL_ALARM:
        text = (
            f"the KL to the reference is {k1:.2f} nats per token in step {step + 1}: a mean this far below 0 says that the tokens trained on "
            "are not drawn from the policy's own distribution. Check temperature and the model's generation settings"
        )
        run.note("negative_kl", text, step=step + 1)
        run.say(f"warning: {text}")
