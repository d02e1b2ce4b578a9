"""KTO (Ethayarajh et al. 2024, eq. 8): learn from answers marked good or bad, one at a time, without pairs.

With h = log pi(y|x) - log ref(y|x) and the reference point z0 = max(0, mean over the step of log pi(y'|x) - log ref(y'|x)),
where y' is the answer to another prompt:  desirable  w_d (1 - s(beta (h - z0))),  undesirable  w_u (1 - s(beta (z0 - h))).

Ours: z0 is worked out over the whole optimiser step before its first backward pass, so micro-batches do not show, and it
carries no gradient. Each prompt meets the answer of the next row in the step that has another prompt; a step in which all
rows share one prompt borrows an answer from the rest of the data, so that no row ever meets its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tether import feedback, ranks
from tether.batch import Example
from tether.chat import encode_feedback
from tether.errors import UserError
from tether.loop import Loop, Tally
from tether.losses.kto import class_balance, kto_baseline, kto_loss
from tether.packing import own_parts, pack
from tether.policy import Policy
from tether.recipe import DPORecipe
from tether.reference import reference_logps
from tether.run import Run
from tether.startup import check_start
from tether.training_rows import Rows, training_rows


def train(recipe: DPORecipe, run: Run) -> dict[str, Any]:
    """Run the recipe to its end, from wherever the run directory stands. Returns the summary, also written to the run."""
    # 1. The model, and the rows as token ids: one prompt with one answer, good or bad.
    policy = Policy.from_recipe(recipe, run)
    data = load_rows(recipe, policy, run)
    examples, held_out = data.train, data.held_out
    check_labels(recipe, examples, run)

    # 2. What the reference says of every answer, once.
    beside = Path(recipe.data if isinstance(recipe.data, str) else recipe.data[0])
    reference = reference_logps(
        policy, data.all, cache=recipe.cache_reference, beside=beside, tokens_per_micro_batch=recipe.tokens_per_micro_batch, say=run.say
    )
    if run.is_new:
        packed = pack(examples[:8], device=policy.device)
        with torch.no_grad():
            sums = packed.sum_by_answer(policy.logprobs(packed))
        check_start(run, sums, reference[: len(sums)].to(sums), packed.lengths, precision=policy.precision)

    # 3. Steps.
    weights = {"beta": recipe.beta, "desirable_weight": recipe.desirable_weight, "undesirable_weight": recipe.undesirable_weight}
    with Loop(recipe, run, policy, n_rows=len(examples), title="kto") as loop:
        for _ in loop:
            rows = loop.rows()
            z0, raw = reference_point(recipe, policy, examples, rows)
            tally, good = Tally(), sum(bool(examples[i].extra["label"]) for i in rows)
            for part in loop.parts(examples):
                packed = pack([examples[i] for i in part], device=policy.device)
                sums = packed.sum_by_answer(policy.logprobs(packed))
                labels = label_tensor(examples, part).to(sums.device)
                loss, metrics = kto_loss(sums, reference[part].to(sums), labels, z0, **weights, total=len(rows))
                loss.backward()
                tally.add(loss, metrics, tokens=packed.n_tokens)
            tally = tally.merged()
            loop.end(
                tally, {"kl": float(z0), "kl/raw": float(raw), "count/chosen": good, "count/rejected": len(rows) - good, **margin(tally)}
            )
            if held_out and loop.due(recipe.eval_steps):
                evaluate(recipe, policy, held_out, reference[len(examples) :], run, loop.step)

    # 4. The result.
    summary: dict[str, Any] = {"steps": loop.step, "rows": len(examples), "loss_type": "kto"}
    if held_out:
        summary["held_out"] = evaluate(recipe, policy, held_out, reference[len(examples) :], run, loop.step)
    policy.save_result(run)
    return run.finish(summary)


def label_tensor(examples: Sequence[Example], rows: Sequence[int]) -> Tensor:
    return torch.tensor([bool(examples[i].extra["label"]) for i in rows])


def margin(tally: Tally) -> dict[str, float]:
    """How far the two classes are apart; nothing when one of them is absent from the step."""
    means = tally.means()
    if "rewards/chosen" in means and "rewards/rejected" in means:
        return {"rewards/margins": means["rewards/chosen"] - means["rewards/rejected"]}
    return {}


def load_rows(recipe: DPORecipe, policy: Policy, run: Run) -> Rows:
    """Answers marked good or bad as token ids: one answer per example, its label in `extra`."""
    options: Any = {"max_length": recipe.max_length, "truncation": recipe.truncation}
    return training_rows(
        recipe, run, feedback.load, lambda rows: encode_feedback(rows, policy.codec, **options), what="rows", model=policy.model
    )


def check_labels(recipe: DPORecipe, examples: Sequence[Example], run: Run) -> None:
    """The reference point needs two prompts; the class weights should balance the counts (KTO, section 4.2: between 1 and 4/3)."""
    if recipe.batch_size < 2:
        raise UserError("kto compares each prompt with another row's answer", where="batch_size: 1", remedy="Use batch_size 2 or more.")
    if len({tuple(e.prompt) for e in examples}) < 2:
        raise UserError("kto needs at least two different prompts", where="data", remedy="With one prompt there is no mismatched answer.")
    good = sum(bool(e.extra["label"]) for e in examples)
    bad = len(examples) - good
    if good and bad:
        ratio = class_balance(good, bad, recipe.desirable_weight, recipe.undesirable_weight)
        if not 1 <= ratio <= 4 / 3:
            words = (
                f"{good} good and {bad} bad rows weigh {ratio:.2f} to 1; the paper keeps desirable_weight x good / "
                f"(undesirable_weight x bad) between 1 and 1.33: desirable_weight={recipe.undesirable_weight * bad / good:.3g} gives 1"
            )
            run.note("kto_class_weights", words)
            run.say("warning: " + words)


def mismatched(examples: Sequence[Example], rows: Sequence[int]) -> list[Example]:
    """For each row of the step its prompt with the answer of the next row that has another prompt.

    >>> a, b = Example([1], [[2]], [[True]]), Example([3], [[4]], [[True]])
    >>> [(e.prompt, e.answers) for e in mismatched([a, b], [0, 1])]
    [([1], [[4]]), ([3], [[2]])]
    """
    out = []
    for k, i in enumerate(rows):
        within = [rows[(k + shift) % len(rows)] for shift in range(1, len(rows))]
        beyond = ((i + shift) % len(examples) for shift in range(1, len(examples)))
        partner = next(j for j in [*within, *beyond] if examples[j].prompt != examples[i].prompt)
        out.append(Example(examples[i].prompt, examples[partner].answers, examples[partner].trained))
    return out


@torch.no_grad()
def reference_point(recipe: DPORecipe, policy: Policy, examples: Sequence[Example], rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """z0 and its value before the clamp at 0, over the whole step (mean first, clamp after: the other order is biased up)."""
    pairs = mismatched(examples, rows)
    gaps = []
    for part in own_parts(pairs, recipe.tokens_per_micro_batch):
        packed = pack([pairs[i] for i in part], device=policy.device)
        ours = packed.sum_by_answer(policy.logprobs(packed))
        with policy.reference() as reference:
            gaps.append(ours - packed.sum_by_answer(reference.logprobs(packed)))
    return kto_baseline(torch.cat(ranks.gather(torch.cat(gaps).cpu())).to(policy.device))


@torch.no_grad()
def evaluate(recipe: DPORecipe, policy: Policy, held_out: list[Example], reference: Tensor, run: Run, step: int) -> dict[str, float]:
    """How far good and bad held-out answers are apart, logged with the prefix `eval_`. The reference point is taken as 0."""
    tally = Tally()
    for part in own_parts(held_out, recipe.tokens_per_micro_batch):
        packed = pack([held_out[i] for i in part], device=policy.device)
        sums = packed.sum_by_answer(policy.logprobs(packed))
        loss, metrics = kto_loss(sums, reference[part].to(sums), label_tensor(held_out, part), 0.0, beta=recipe.beta, total=len(held_out))
        tally.add(loss, metrics)
    tally = tally.merged()
    out = {f"eval_{name}": value for name, value in {**tally.means(), **margin(tally)}.items()}
    run.log(step, out)
    return out
