"""Direct preference optimisation and its family, on pairs.

DPO (Rafailov et al. 2023, eq. 7): minimise -log s(beta d), d = (c - c0) - (r - r0), where c and r are the summed log-probs of
the chosen and the rejected answer under the policy and c0, r0 those under the reference. The rest of the family changes this
one line (`losses/preference.py`); what surrounds it is the same and stands here.

Ours: the prompt is computed once for both answers; reference scores are worked out once and cached; every mean is over the
whole optimiser step, so micro-batches do not show; and the margin is always shown as its two halves, because a margin can
grow while the chosen answer gets less likely (likelihood displacement).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tether import preferences, ranks
from tether.batch import Example
from tether.chat import encode_preferences
from tether.displacement import DisplacementWatch, similarity
from tether.files import Problem
from tether.loop import Loop, Tally
from tether.losses.preference import NEEDS_REFERENCE, PairLogps, preference_loss
from tether.packing import own_parts, pack
from tether.policy import Policy
from tether.recipe import DPORecipe
from tether.reference import reference_logps
from tether.run import Run
from tether.startup import check_start
from tether.training_rows import Rows, training_rows


def train(recipe: DPORecipe, run: Run) -> dict[str, Any]:
    """Run the recipe to its end, from wherever the run directory stands. Returns the summary, also written to the run."""
    if recipe.loss_type == "kto":
        from tether.algorithms import kto

        return kto.train(recipe, run)

    # 1. The model, and the pairs as token ids: one prompt with two answers, chosen first.
    policy = Policy.from_recipe(recipe, run)
    data = load_pairs(recipe, policy, run)
    examples, held_out = data.train, data.held_out

    # 2. What the reference says of every answer, once.
    reference = _reference(recipe, policy, data.all, run)
    if reference is not None and recipe.reference == "start" and run.is_new:
        first = examples[:8]
        _check_margin_is_zero(run, policy, first, reference[: len(first)])  # scores of held-out pairs follow

    # 3. Steps.
    losses = recipe.loss_settings()
    watch = DisplacementWatch(recipe.displacement_warn_steps)
    alike = [similarity(*e.answers) for e in examples]
    with Loop(recipe, run, policy, n_rows=len(examples), title=f"dpo ({recipe.loss_type})") as loop:
        watch.load(loop.state.get("displacement", {}))
        for _ in loop:
            rows = loop.rows()
            chosen_tokens = sum(sum(examples[i].trained[0]) for i in rows)
            tally, order = Tally(), []
            for part in loop.parts(examples):
                packed = pack([examples[i] for i in part], device=policy.device)
                pairs = pair_logps(policy.logprobs(packed), packed, None if reference is None else reference[part])
                loss, metrics = preference_loss(pairs, **losses, total_pairs=len(rows), total_chosen_tokens=chosen_tokens)
                loss.backward()
                tally.add(loss, metrics, tokens=packed.n_tokens)
                order += part
            tally, order = tally.merged(), [i for part in ranks.gather(order) for i in part]
            run.append("pairs.jsonl", loop.step + 1, pair_rows(tally, order, examples, alike))
            logged = loop.end(tally, watch.shares(tally))
            loop.state["displacement"] = watch.update(run, logged)
            if held_out and loop.due(recipe.eval_steps):
                evaluate(recipe, policy, held_out, reference, run, loop.step)

    # 4. The result, and what it does on pairs it has not seen.
    summary: dict[str, Any] = {"steps": loop.step, "pairs": len(examples), "loss_type": recipe.loss_type}
    if held_out:
        summary["held_out"] = evaluate(recipe, policy, held_out, reference, run, loop.step)
    policy.save_result(run)
    return run.finish(summary)


def load_pairs(recipe: DPORecipe, policy: Policy, run: Run) -> Rows:
    """Pairs as token ids: answers = [chosen, rejected]."""
    options: Any = {"max_length": recipe.max_length, "truncation": recipe.truncation}
    return training_rows(
        recipe,
        run,
        preferences.load,
        lambda rows: encode_preferences(rows, policy.codec, **options),
        what="pairs",
        model=policy.model,
        refine=lambda examples: drop_alike(examples, recipe.min_edit_distance),
    )


def drop_alike(examples: Sequence[Example], min_edit_distance: float) -> tuple[list[Example], list[Problem]]:
    """Leave out pairs whose answers differ in less than this share of their tokens: they displace the most."""
    if min_edit_distance <= 0:
        return list(examples), []
    kept, problems = [], []
    for example in examples:
        distance = 1 - similarity(*example.answers)
        if distance >= min_edit_distance:
            kept.append(example)
        elif example.source is not None:
            words = f"the answers differ in {distance:.0%} of their tokens, below min_edit_distance {min_edit_distance:.0%}"
            problems.append(Problem(example.source, "too_alike", words, "Lower min_edit_distance to keep it.", "drop"))
    return kept, problems


def pair_logps(logps: Tensor, packed: Any, reference: Tensor | None) -> PairLogps:
    """Per-token log-probs (M,) of a packed batch of pairs -> sums per answer. `reference` is (B, 2) or None."""
    sums = packed.sum_by_answer(logps).view(-1, 2)  # (B, 2): chosen, rejected
    lengths = packed.lengths.view(-1, 2)
    ref_chosen, ref_rejected = (None, None) if reference is None else reference.to(sums).unbind(1)
    return PairLogps(sums[:, 0], sums[:, 1], ref_chosen, ref_rejected, lengths[:, 0], lengths[:, 1])


def pair_rows(tally: Tally, order: list[int], examples: Sequence[Example], alike: Sequence[float]) -> list[dict[str, Any]]:
    """What this step says of each pair, for the report: which half of the margin moved, and how alike the answers are."""
    chosen, rejected = tally.rows("displacement/chosen"), tally.rows("displacement/rejected")
    if not len(chosen):
        return []
    return [
        {
            "pair": i,
            "source": str(examples[i].source),
            "chosen_up": round(float(chosen[k]), 5),
            "rejected_down": round(-float(rejected[k]), 5),
            "similarity": round(alike[i], 4),
        }
        for k, i in enumerate(order)
    ]


def _reference(recipe: DPORecipe, policy: Policy, examples: list[Example], run: Run) -> Tensor | None:
    """Reference sums (rows, 2), or None for a loss that has no reference."""
    if recipe.loss_type not in NEEDS_REFERENCE:
        return None
    scorer = policy
    if recipe.reference != "start":
        scorer = Policy.load(recipe.reference, precision=policy.precision, trust_remote_code=recipe.trust_remote_code)
        if scorer.codec.fingerprint != policy.codec.fingerprint:
            run.say("the reference has its own tokenizer or template; the policy's token ids are used for both")
    beside = Path(recipe.data if isinstance(recipe.data, str) else recipe.data[0])
    sums = reference_logps(
        scorer, examples, cache=recipe.cache_reference, beside=beside, tokens_per_micro_batch=recipe.tokens_per_micro_batch, say=run.say
    )
    return sums.view(-1, 2)


def _check_margin_is_zero(run: Run, policy: Policy, examples: list[Example], reference: Tensor) -> None:
    packed = pack(examples, device=policy.device)
    with torch.no_grad():
        sums = packed.sum_by_answer(policy.logprobs(packed))
    gap = (sums - reference.reshape(-1).to(sums)).view(-1, 2)
    check_start(run, sums, reference.reshape(-1).to(sums), packed.lengths, precision=policy.precision, margins=gap[:, 0] - gap[:, 1])


@torch.no_grad()
def evaluate(recipe: DPORecipe, policy: Policy, held_out: list[Example], reference: Tensor | None, run: Run, step: int) -> dict[str, float]:
    """The training loss and metrics on pairs that are never trained on, logged with the prefix `eval_`."""
    tally = Tally()
    tokens = sum(sum(e.trained[0]) for e in held_out)
    ours = None if reference is None else reference[-len(held_out) :]
    for part in own_parts(held_out, recipe.tokens_per_micro_batch):
        packed = pack([held_out[i] for i in part], device=policy.device)
        pairs = pair_logps(policy.logprobs(packed), packed, None if ours is None else ours[part])
        loss, metrics = preference_loss(pairs, **recipe.loss_settings(), total_pairs=len(held_out), total_chosen_tokens=tokens)
        tally.add(loss, metrics)
    out = {f"eval_{name}": value for name, value in tally.merged().means().items()}
    run.log(step, out)
    return out
