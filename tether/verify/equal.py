"""What is fast or cached against the slow way to the same numbers. Log-probs are compared in nats, at float32."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tether import packing
from tether import precision as arithmetic
from tether.adapters import is_adapted
from tether.engine import Engine
from tether.head import TILE_BYTES
from tether.learner import Anchor
from tether.policy import Policy
from tether.recipe import DPORecipe
from tether.reference import reference_logps
from tether.verify import plain, sampled
from tether.verify.check import Found, LeftOut, largest, relative
from tether.verify.small import move
from tether.verify.subject import Subject

NATS = 1e-4  # of a log-prob; two float32 forward passes of one row in different company differ by about 1e-5
SHARE = 1e-4  # of a gradient's largest entry
CHUNK_ROWS = 64
TILE = TILE_BYTES // 4  # scores of a tile


def packed_is_padded(subject: Subject) -> Found:
    """All rows in one stream, as training computes them, against each row alone."""
    examples, packed = subject.examples, packing.pack(subject.examples, device=subject.model.device)
    with torch.no_grad():
        if subject.scores:
            fast, slow = subject.model.scores(packed), plain.scores(subject.model.model, examples)
            words = f"scores of {len(slow)} answers"
        else:
            fast, slow = _together(subject), _alone(subject)
            words = f"{len(slow)} log-probs" + (f" at temperature {subject.temperature:g}" if subject.samples else "")
    if fast.shape != slow.shape:
        return Found(float("inf"), NATS, f"the engine gives {len(fast)} numbers, the rows alone {len(slow)}")
    how = "" if subject.engine.packed else "; this model takes the padded path"
    return Found(largest(fast, slow), _limit(slow), f"{words} on {subject.main}{how}")


def _together(subject: Subject) -> Tensor:
    """Log-probs (M,) of all rows by the engine, as training computes them."""
    packed = packing.pack(subject.examples, device=subject.model.device)
    made: Tensor = subject.keep("together", lambda: subject.engine.logprobs(packed, subject.temperature))
    return made


def _alone(subject: Subject) -> Tensor:
    """The same (M,) of each row alone."""
    made: Tensor = subject.keep("alone", lambda: plain.logprobs(subject.model.model, subject.examples, subject.temperature))
    return made


def _limit(values: Tensor) -> float:
    """A log-prob of -60 is not known to the digits of one of -1."""
    return NATS * max(1.0, float(values.abs().max()) / 10)


def shared_is_repeated(subject: Subject) -> Found:
    """A prompt computed once for all its answers, against once for each."""
    several = [e for e in subject.examples if len(e.answers) > 1]
    if not several:
        raise LeftOut("one answer to each prompt: nothing is shared")
    values = []
    with torch.no_grad():
        for share in (True, False):
            packed = packing.pack(several, share_prompts=share, device=subject.model.device)
            values.append(subject.model.scores(packed) if subject.scores else subject.engine.logprobs(packed, subject.temperature))
    n = sum(len(e.answers) for e in several)
    return Found(largest(*values), _limit(values[1]), f"{len(several)} prompts with {n} answers")


def chunked_is_whole(subject: Subject) -> Found:
    """The projection on the vocabulary in tiles with a backward pass of its own, against one table and autograd."""
    if subject.scores:
        raise LeftOut("a reward model has no vocabulary")
    engine: Any = subject.engine
    packed = packing.pack(subject.examples, device=subject.model.device)
    with torch.no_grad():
        hidden = engine.hidden(packed)
    # As many rows, over and over, as it takes for a table of several tiles.
    vocabulary = len(engine.lm_head.weight)
    rows = max(CHUNK_ROWS, min(20_000, -(-3 * TILE // vocabulary)))
    order = torch.arange(rows, device=hidden.device) % len(packed.targets)
    many = dataclasses.replace(packed, predict=packed.predict[order], targets=packed.targets[order])
    weights = torch.linspace(0.5, 1.5, rows, device=hidden.device)

    def in_tiles(h: Tensor) -> Tensor:
        logps: Tensor = engine.logprobs(many, subject.temperature, hidden=h)
        return logps

    def as_table(h: Tensor) -> Tensor:
        return _table(subject, h[many.predict]).gather(1, many.targets[:, None])[:, 0]

    found = []
    for logprobs in (in_tiles, as_table):
        leaf = hidden.clone().requires_grad_()
        logps = logprobs(leaf)
        if not logps.requires_grad:
            raise LeftOut("this model's scores come from its own forward pass only")
        by = [leaf, *(p for p in engine.lm_head.parameters() if p.requires_grad)]
        found.append((logps.detach(), torch.autograd.grad((weights * logps).mean(), by)))
    gaps = [relative(a, b) for a, b in zip(found[0][1], found[1][1], strict=True)]
    detail = f"{rows} x {vocabulary} scores; gradients differ by {max(gaps):.1e} of their largest entry"
    return Found(max(largest(found[0][0], found[1][0]), *gaps), _limit(found[1][0]), detail)


def _table(subject: Subject, hidden: Tensor) -> Tensor:
    """log_softmax of all scores (M, V), with what the architecture does to its projection."""
    model = subject.model.model
    config = (model.get_base_model() if is_adapted(model) else model).config.get_text_config()
    z = subject.engine.lm_head(hidden).float()
    z = z * float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    z = torch.tanh(z / cap) * cap if cap else z
    return torch.log_softmax(z / subject.temperature, -1)


def sampling_is_training(subject: Subject) -> Found:
    """The log-probs kept while sampling against those that the update computes, at the recipe's temperature."""
    if not subject.samples:
        raise LeftOut("nothing is sampled")
    completions = sampled.sample(subject)
    kept = torch.tensor([x for c in completions for x in c.logps])
    with torch.no_grad():
        trained, alone = _together(subject).cpu(), _alone(subject).cpu()
    if len(kept) != len(trained):
        return Found(float("inf"), NATS, f"{len(kept)} tokens were sampled, {len(trained)} are trained")
    sampler, engine = largest(kept, alone), largest(trained, alone)
    difference, limit = largest(kept, trained), _limit(alone)
    detail = f"{len(kept)} tokens at temperature {subject.temperature:g}"
    if not difference <= limit:
        detail += f"; against the plain forward pass the sampler is off by {sampler:.1e}, training by {engine:.1e}"
    return Found(difference, limit, detail)


def reference_is_kept(subject: Subject) -> Found:
    """Reference scores made, read again from the cache, and made once more after the policy has moved: all of the model at its start."""
    recipe: Any = subject.recipe
    if not getattr(recipe, "has_reference", False):
        raise LeftOut("beta is 0: there is no reference" if subject.samples else "this loss has no reference")
    policy: Policy = subject.load(subject.small)
    examples = subject.examples
    with torch.no_grad():
        alone = plain.by_answer(plain.logprobs(policy.model, examples, subject.temperature), examples)
    wanted = torch.stack([row.sum() for row in alone]).cpu()
    gaps, parts = [], []
    if isinstance(recipe, DPORecipe):
        beside = subject.folder / "reference" / "rows.jsonl"
        beside.parent.mkdir(exist_ok=True)
        gaps += [largest(reference_logps(policy, examples, cache=True, beside=beside), wanted) for _ in range(2)]
        parts.append("made, read from the cache")
    move(policy.parameters().values())
    gaps.append(largest(_reference_sums(subject, policy), wanted))
    parts.append("asked after the policy has moved")
    return Found(max(gaps), _limit(wanted), f"{len(wanted)} answers, {' and '.join(parts)}, on {subject.small}")


def _reference_sums(subject: Subject, policy: Policy) -> Tensor:
    """Sums per answer (A,) of the reference, as the recipe's loop asks for it."""
    packed = packing.pack(subject.examples, device=policy.device)
    reference = Anchor(policy).reference() if subject.samples else policy.reference()
    with reference as held:
        return packed.sum_by_answer(held.logprobs(packed, subject.temperature)).cpu()


def half_precision(subject: Subject) -> Found:
    """How far bfloat16 is from float32, where the run would compute in it. Reported, not judged: that is what bfloat16 is."""
    if arithmetic.choose(subject.recipe.precision) != "bf16":
        raise LeftOut("the run computes in float32")
    packed = packing.pack(subject.examples, device=subject.model.device)
    model = subject.model
    half = Engine(model.engine.model, precision="bf16")
    with torch.no_grad():
        if subject.scores:
            pair = [engine.hidden(packed)[packed.last].float() for engine in (half, model.engine)]
            what = "hidden states at the answers' ends"
        else:
            pair = [half.logprobs(packed, subject.temperature), _together(subject)]
            what = "nats of a log-prob"
    mean = float((pair[0] - pair[1]).abs().mean())
    return Found(largest(*pair), None, f"{what}; {mean:.1e} on average. The lines above compare in float32")
