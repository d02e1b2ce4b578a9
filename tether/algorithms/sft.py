"""Supervised fine-tuning: raise the likelihood of given answers.

Minimises -(1/D) sum of log pi(token) over the trained tokens, D = their number in the whole optimiser step (not per
micro-batch: averaging averages weighs short rows too much). Rows are packed into one stream without padding and without
seeing each other; each assistant turn is trained including its end-of-turn token, nothing else, unless `train_on: all`.
"""

from __future__ import annotations

from typing import Any

import torch

from tether import conversations
from tether.batch import Example
from tether.chat import encode_conversations
from tether.loop import Loop, Tally
from tether.losses.sft import sft_loss
from tether.packing import own_parts, pack
from tether.policy import Policy
from tether.recipe import SFTRecipe
from tether.run import Run
from tether.training_rows import Rows, training_rows


def train(recipe: SFTRecipe, run: Run) -> dict[str, Any]:
    """Run the recipe to its end, from wherever the run directory stands. Returns the summary, also written to the run."""
    # 1. The model, and the rows as token ids.
    policy = Policy.from_recipe(recipe, run)
    rows = load_rows(recipe, policy, run)
    examples, held_out = rows.train, rows.held_out

    # 2. Steps.
    with Loop(recipe, run, policy, n_rows=len(examples), title="sft") as loop:
        for _ in loop:
            total = sum(examples[i].n_trained for i in loop.rows())
            tally = Tally()
            for part in loop.parts(examples):
                packed = pack([examples[i] for i in part], device=policy.device)
                logps, stats = policy.logprobs(packed, stats=True)
                loss = sft_loss(logps, total_tokens=total)
                loss.backward()
                tally.add(loss, tokens=packed.n_tokens)
                _token_means(tally, stats, len(logps))
            loop.end(tally.merged())
            if held_out and loop.due(recipe.eval_steps):
                evaluate(recipe, policy, held_out, run, loop.step)

    # 3. The result.
    summary: dict[str, Any] = {"steps": loop.step, "rows": len(examples)}
    if held_out:
        summary["held_out"] = evaluate(recipe, policy, held_out, run, loop.step)
    policy.save_result(run)
    return run.finish(summary)


def load_rows(recipe: SFTRecipe, policy: Policy, run: Run) -> Rows:
    """Demonstrations as token ids: one answer per example."""
    options: Any = {"max_length": recipe.max_length, "truncation": recipe.truncation, "train_on": recipe.train_on}
    return training_rows(
        recipe, run, conversations.load, lambda rows: encode_conversations(rows, policy.codec, **options), what="rows", model=policy.model
    )


def _token_means(tally: Tally, stats: dict[str, torch.Tensor], tokens: int) -> None:
    tally.add_ratio("mean_token_accuracy", float(stats["correct"].double().sum()), tokens)
    tally.add_ratio("entropy", float(stats["entropy"].double().sum()), tokens)


@torch.no_grad()
def evaluate(recipe: SFTRecipe, policy: Policy, held_out: list[Example], run: Run, step: int) -> dict[str, float]:
    """Loss, perplexity and token accuracy on rows that are never trained on, logged with the prefix `eval_`."""
    total = sum(e.n_trained for e in held_out)
    tally = Tally()
    for part in own_parts(held_out, recipe.tokens_per_micro_batch):
        packed = pack([held_out[i] for i in part], device=policy.device)
        logps, stats = policy.logprobs(packed, stats=True)
        tally.add(sft_loss(logps, total_tokens=total))
        _token_means(tally, stats, len(logps))
    out = {f"eval_{name}": value for name, value in tally.merged().means().items()}
    out["eval_perplexity"] = float(torch.tensor(out["eval_loss"], dtype=torch.float64).exp())
    run.log(step, out)
    return out
