"""The check before step 0: what would make a run silently wrong is looked for while it still costs nothing."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tether.batch import Example
from tether.errors import UserError
from tether.files import Problem
from tether.run import Run

# Per trained token. Two float32 forwards of the same tokens in different company differ by about 1e-6; bfloat16 has 8 bits.
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}


def note_problems(run: Run, problems: Sequence[Problem]) -> None:
    """Write every row that is dropped, cut or suspicious to the run's notices, with file and line."""
    for problem in problems:
        run.note(problem.kind, str(problem), action=problem.action)


def record_problems(run: Run, problems: Sequence[Problem], *, max_length: int | None) -> dict[str, int]:
    """`note_problems`, and say the counts with the limit that was used."""
    note_problems(run, problems)
    counts = Counter(f"{action}/{kind}" for action, kind, _ in {(p.action, p.kind, p.source) for p in problems})
    for name, n in sorted(counts.items()):
        action, kind = name.split("/", 1)
        limit = f" {max_length}" if action == "truncate" else ""
        run.say(f"{n} row{'s' if n > 1 else ''} {PAST[action]}{limit}: {kind} (listed in {run.folder / 'notices.jsonl'})")
    return dict(counts)


PAST = {"reject": "left out as unusable", "drop": "dropped", "warn": "kept with a warning", "truncate": "cut at max_length"}


def check_rows(run: Run, examples: Sequence[Example], n_read: int, *, what: str, share: float = 0.2) -> None:
    """Refuse a run whose rows mostly have nothing to train on; say how many rows and trained tokens there are."""
    empty = [e for e in examples if any(not any(t) for t in e.trained)]
    if empty:
        places = ", ".join(str(e.source) for e in empty[:3])
        raise UserError(f"{len(empty)} rows have an answer without a single trained token", where=places, remedy="Check the chat template.")
    if not examples:
        raise UserError(
            f"no row is left to train on out of {n_read}", remedy="See notices.jsonl in the run directory for the reason of each."
        )
    lost = n_read - len(examples)
    if n_read and lost > share * n_read:
        run.note("many_rows_lost", f"{lost} of {n_read} rows are not trained on; see the counts above")
        run.say(f"warning: {lost} of {n_read} rows are not trained on")
    tokens = sum(e.n_tokens for e in examples)
    trained = sum(e.n_trained for e in examples)
    shares = f" computed an epoch, {trained:,} of them trained" if trained else ""
    run.say(f"{len(examples)} {what}, {tokens:,} tokens{shares}")


def check_ids(examples: Sequence[Example], model: Any) -> None:
    """Refuse rows with a token that the model has no embedding for: its tokenizer belongs to another model."""
    known = len(model.get_input_embeddings().weight)
    for e in examples:
        highest = max(itertools.chain(e.prompt, *e.answers), default=0)
        if highest >= known:
            raise UserError(
                f"its tokenizer makes token {highest}, and the model knows {known} tokens",
                where=str(e.source) if e.source else None,
                remedy="Use the tokenizer that belongs to the model.",
            )


def check_start(
    run: Run, policy_logps: Tensor, reference_logps: Tensor, lengths: Tensor, *, precision: str, margins: Tensor | None = None
) -> None:
    """Before anything is learnt the policy is its reference: ratio 1, KL 0, and for pairs margin 0.

    All arguments are per answer (A,): summed log-probs under the policy and the reference, trained tokens.
    Raises UserError when they differ by more than rounding, because every later number would be off by it.
    """
    per_token = (policy_logps.double() - reference_logps.double()) / lengths.clamp_min(1)
    worst = float(per_token.abs().max())
    if not torch.isfinite(per_token).all() or worst > TOLERANCE[precision]:
        raise UserError(
            f"at the start the policy differs from its reference by {worst:.2e} nats per token (at most {TOLERANCE[precision]:.0e} expected)",
            remedy="The reference scores belong to another model, tokenizer, template or precision; "
            "set reference: start, or delete the reference cache.",
        )
    words = f"start-up check: ratio {float(per_token.exp().mean()):.6f}, KL {float(per_token.mean()):+.1e} nats per token"
    if margins is not None:
        words += f", margin {float(margins.double().abs().max()):.1e}"
    run.say(words)
    run.note("startup_check", words)
