"""An adapter folded into its base model, and the proof that the result computes the same.

Two ways to a merged model that talks rubbish are closed here. With tied embeddings, an adapter on the input or the output
layer makes the two differ: they are untied first, and the saved config says so. And whatever was merged is loaded again from
the files and its scores compared before the folder takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tether import atomic
from tether.adapters import is_adapted
from tether.errors import UserError
from tether.hub import first_line, quiet
from tether.models import check_replaceable, load_model, load_weights, source_dtype, write_model

TOLERANCE = 1e-5  # of the largest score, float32


@dataclass(frozen=True)
class Merged:
    folder: Path
    dtype: torch.dtype
    difference: float  # largest change of a score in float32, before against after
    rounding: float  # as it is after rounding to `dtype` and loading again
    untied: bool  # input and output embeddings had to be stored apart


def merge_adapter(adapter: str | Path, out: str | Path, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False) -> Merged:
    """Merge an adapter folder into its base and save the result as a plain model folder.

    Scores (logits) before and after agree within 1e-5 of the largest, or UserError and nothing is written. `dtype` None keeps
    the base's stored type; a half-precision one rounds, by how much is returned.
    """
    target = Path(out)
    check_replaceable(target)
    model: Any
    model, tokenizer = load_model(adapter, trust_remote_code=trust_remote_code)
    if not is_adapted(model):
        raise UserError("this is not an adapter folder (no adapter_config.json)", where=str(adapter), remedy="There is nothing to merge.")
    kept = dtype or source_dtype(model.get_base_model())
    before = probe(model)
    tied = model.config.get_text_config().tie_word_embeddings
    merged = merge(model, where=str(adapter))
    difference = check_same(before, probe(merged), str(adapter), "merging")
    with atomic.new_folder(target) as fresh:
        write_model(merged, tokenizer, fresh, dtype=kept)
        again, _ = load_weights(type(merged), str(fresh), torch.float32, trust_remote_code=trust_remote_code, local_only=True)
        rounding = float((probe(again) - before).abs().max())
        if kept == torch.float32:
            check_same(before, probe(again), str(adapter), "saving")
    return Merged(target, kept, difference, rounding, untied=bool(tied and not merged.config.get_text_config().tie_word_embeddings))


def merge(model: Any, *, where: str) -> Any:
    """The base model with the adapter folded into its weights (the adapted model is used up)."""
    base = model.get_base_model()
    tied = base.config.get_text_config().tie_word_embeddings
    if tied:
        _give_output_its_own_weights(base)
    try:
        with quiet():
            merged: Any = model.merge_and_unload(safe_merge=True).eval()
    except (ValueError, TypeError) as error:
        raise UserError(f"the adapter cannot be merged: {first_line(error)}", where=where, remedy="Use the adapter as it is.") from error
    if tied:
        _settle_tie(merged)
    return merged


def _give_output_its_own_weights(base: Any) -> None:
    """While an adapter is merged into the input or the output embeddings, the other must not change with it."""
    into, out = base.get_input_embeddings(), base.get_output_embeddings()
    if out is None or (type(into) is nn.Embedding and type(out) is nn.Linear):
        return
    shared, own = _plain(into).weight, _plain(out)
    if own.weight is shared:
        own.weight = nn.Parameter(shared.detach().clone(), requires_grad=False)


def _settle_tie(merged: Any) -> None:
    """Tied again if the embeddings are still one, and the config says what is so: it decides what a load does."""
    into, out = merged.get_input_embeddings(), merged.get_output_embeddings()
    same = out is None or torch.equal(into.weight, out.weight)
    if same and out is not None:
        out.weight = into.weight
    merged.config.tie_word_embeddings = merged.config.get_text_config().tie_word_embeddings = same


def _plain(module: Any) -> Any:
    """The layer below PEFT's wrappers."""
    while (inner := getattr(module, "base_layer", None) or getattr(module, "original_module", None)) is not None:
        module = inner
    return module


@torch.no_grad()
def probe(model: Any) -> Tensor:
    """Scores on fixed token ids, among them the last of the vocabulary (where added tokens are): (3, 24, V)."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocabulary, (3, 24), generator=torch.Generator().manual_seed(0))
    last = torch.arange(max(0, vocabulary - 8), vocabulary)
    ids[2, : len(last)] = last
    return model(input_ids=ids.to(model.device), use_cache=False).logits.float().cpu()


def check_same(before: Tensor, after: Tensor, where: str, act: str) -> float:
    difference = float((before - after).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(before.abs().max())):
        raise UserError(
            f"{act} changes what the model computes: scores differ by {difference:.1e}",
            where=where,
            remedy="Nothing was written. Use the adapter unmerged (it loads as a model), and please report this combination.",
        )
    return difference
