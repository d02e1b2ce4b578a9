"""How unsure a reward model is of an item: the spread of its heads over the gap between two answers. Torch is loaded when asked.

An ensemble's heads agree where data was plenty and part where it was not, so votes there teach most (Gleave and Irving 2022,
arXiv:2203.07472). The spread is that of the gap, not of each score: a prompt on which all heads shift alike is no uncertain pair.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from tether.collect.items import Item
from tether.errors import UserError


def spreads(items: Mapping[str, Item], model: str, *, precision: str = "auto", tokens_per_micro_batch: int = 4096) -> dict[str, float]:
    """{item id: standard deviation over heads of r(a) - r(b)}, of several answers the widest pair's. UserError with a single head."""
    from tether.scalar import ScalarModel

    loaded = ScalarModel.load(model, precision=precision)
    if loaded.heads < 2:
        remedy = "Train one with `tether reward heads=5`, or let items come at random."
        raise UserError("a reward model with one head does not know what it is unsure of", where=model, remedy=remedy)
    return item_spreads(loaded, items, tokens_per_micro_batch=tokens_per_micro_batch)


def item_spreads(model: Any, items: Mapping[str, Item], *, tokens_per_micro_batch: int = 4096) -> dict[str, float]:
    """As `spreads`, by a ScalarModel that is loaded."""
    import torch

    from tether.packing import micro_batches, pack

    rendered = []
    for item in items.values():
        made = model.codec.render_answers(item.prompt, [item.answer(i) for i in range(len(item.answers))])
        if dropped := next((note for note in made.notes if note.action == "drop"), None):
            raise UserError(dropped.what, where=item.source or item.id, remedy=dropped.remedy)
        rendered.append(made)
    examples = model.codec.examples(rendered)
    found: dict[str, float] = {}
    ids = list(items)
    with torch.no_grad():
        for part in micro_batches(examples, tokens_per_micro_batch):
            scores = model.scores(pack([examples[i] for i in part], device=model.device)).double().cpu()  # (A, heads)
            start = 0
            for i in part:
                own = scores[start : (start := start + len(examples[i].answers))]
                gaps = [(own[a] - own[b]).std(correction=0).item() for a, b in itertools.combinations(range(len(own)), 2)]
                found[ids[i]] = max(gaps)
    return found
