"""Which way of sampling fits a model, found out by a probe on a few random tokens before anything is sampled.

Two prompts of different length are run through slots, some tokens as prompt and some one by one, and compared with the
model's plain forward. A model that gives other numbers, or does not come through at all, is sampled the plain way, with a notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tether.engines.joined import joinable
from tether.engines.kv import IMPLEMENTATION, Unsupported
from tether.engines.linear import can_pack
from tether.engines.runners import Entering, PlainRunner, Runner, SlotRunner
from tether.engines.working_copy import Kind, working_copy

Precision = Literal["fp32", "bf16"]
# What a model may raise when it is run in a way it was not written for.
MISFITS = (Unsupported, TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError)
MOVING_ROPE = {"dynamic", "longrope"}  # rotary frequencies that depend on the longest sequence of the batch


@dataclass(frozen=True)
class Fit:
    slots: bool
    kind: Kind
    notice: str | None
    bytes_per_token: int
    plain_beyond: int | None  # sequences that may get longer go the plain way, alone

    def needs_plain(self, longest: int) -> bool:
        return not self.slots or (self.plain_beyond is not None and longest > self.plain_beyond)

    def runner(self, model: nn.Module, *, plain: bool) -> Runner:
        if plain:
            return PlainRunner(working_copy(model, "shared" if self.kind == "shared" else "whole", _stock(model)))
        return SlotRunner(working_copy(model, self.kind, IMPLEMENTATION), None if self.kind == "shared" else torch.bfloat16)


@torch.inference_mode()
def fit(model: nn.Module, precision: Precision) -> tuple[Fit, SlotRunner | None]:
    """Probes `model`, which is left as it was. Also returns the runner that passed, as it holds a cast copy of the weights."""
    prompts = _probe_prompts(config_of(model).vocab_size)
    expected = _plain_scores(working_copy(model, "shared", "eager"), prompts)
    shared = SlotRunner(working_copy(model, "shared", IMPLEMENTATION))
    why = _cannot_use_slots(config_of(model)) or _differs(shared, prompts, expected, _tolerance(model))
    bytes_per_token = shared.slots.bytes_per_token()
    beyond = _plain_beyond(config_of(model))
    if why is not None:
        name = type(_base(model)).__name__
        notice = f"{name} cannot share a batch ({why}); its sequences are sampled one after the other, which is slower."
        return Fit(False, "shared" if precision == "fp32" else "whole", notice, max(bytes_per_token, 1), beyond), None
    if precision == "fp32":
        return Fit(True, "shared", None, bytes_per_token, beyond), shared
    kinds: list[Kind] = ["packed", "cast", "whole"] if can_pack(_device(model)) else ["cast", "whole"]
    if any(joinable(m) for m in model.modules()):
        # One layer in the model's own type shows whether the formulas are the layer's: bfloat16 would hide a small mistake.
        one = SlotRunner(working_copy(model, "one_joined", IMPLEMENTATION))
        if _differs(one, prompts, expected, _tolerance(model)) is None:
            kinds.insert(0, "joined")
    problems = []
    for kind in kinds:
        runner = SlotRunner(working_copy(model, kind, IMPLEMENTATION), torch.bfloat16)
        # bfloat16 rounds by up to 1 in 256 at each of many layers; a wrong cast is wrong by the spread of the scores.
        found = _differs(runner, prompts, expected, 0.2)
        if found is None:
            return Fit(True, kind, None, max(1, runner.slots.bytes_per_token()), beyond), runner
        problems.append(found)
    raise RuntimeError(f"{type(model).__name__} does not run in bfloat16: {'; '.join(problems)}")


def config_of(model: Any) -> Any:
    """The config that describes the text model."""
    return model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config


# -- the probe ---------------------------------------------------------------------------------------------------------


def _probe_prompts(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)  # of its own: the global random state is left alone
    return [torch.randint(1, vocabulary, (n,), generator=generator).tolist() for n in (17, 15)]


GIVEN = 12  # tokens of the longer probe that are its prompt, the other's has two less; the rest comes one by one, past a slot's first block


def _plain_scores(model: Any, prompts: list[list[int]]) -> Tensor:
    device = _device(model)
    parts = []
    for prompt, given in zip(prompts, (GIVEN, GIVEN - 2), strict=True):
        logits = model(input_ids=torch.tensor([prompt], device=device), use_cache=False).logits[0]
        parts.append(logits[given - 1 :].to(torch.float32))
    return torch.cat(parts)


def _slot_scores(runner: SlotRunner, prompts: list[list[int]]) -> Tensor:
    runner.open(3)
    first, second = prompts
    # Slots 1 and 2 share the second prompt; slot 2 is the one read.
    scores, _ = runner.step([], [], [Entering(first[:GIVEN], 0, 1, False), Entering(second[: GIVEN - 2], 1, 2, False)])
    parts = ([scores[0]], [scores[1]])
    for i in range(len(first) - GIVEN):
        a, b = GIVEN + i, GIVEN - 2 + i
        scores, _ = runner.step([first[a], second[b], second[b]], [a, b, b], [])
        parts[0].append(scores[0])
        parts[1].append(scores[2])
    return torch.stack(parts[0] + parts[1]).to(torch.float32)


def _differs(runner: SlotRunner, prompts: list[list[int]], expected: Tensor, tolerance: float) -> str | None:
    """None if slots give the expected scores, else what is wrong, in words."""
    try:
        found = _slot_scores(runner, prompts)
    except MISFITS as error:
        text = str(error).splitlines()
        return text[0] if isinstance(error, Unsupported) else f"{type(error).__name__}: {text[0] if text else 'no message'}"
    if not runner.slots.layers:
        return "its attention does not go through the attention interface"
    centred = expected - expected.mean(-1, keepdim=True)
    gap = float((found - expected).norm() / centred.norm().clamp(min=1e-12))
    return None if gap <= tolerance else f"slots and plain forward differ by {gap:.1e} of the scores' spread"


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _tolerance(model: nn.Module) -> float:
    dtype = next(model.parameters()).dtype
    return 1e-4 if dtype in (torch.float32, torch.float64) else 0.1


def _cannot_use_slots(config: Any) -> str | None:
    """What only a longer probe would show."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of type {', '.join(sorted(kinds))}"
    return "it attends in chunks" if getattr(config, "attention_chunk_size", None) else None


def _plain_beyond(config: Any) -> int | None:
    """Length up to which rotary frequencies stay put, if they move at all."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {v.get("rope_type") for v in rope.values() if isinstance(v, dict)}
    if not kinds & MOVING_ROPE:
        return None
    return int(
        getattr(config, "original_max_position_embeddings", None)
        or rope.get("original_max_position_embeddings")
        or config.max_position_embeddings
    )


def _stock(model: Any) -> str:
    return "sdpa" if getattr(_base(model), "_supports_sdpa", False) else "eager"


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
