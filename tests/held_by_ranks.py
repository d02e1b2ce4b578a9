"""One rank of a step of supervised fine-tuning, as `test_plan_ranks.py` starts it: what it holds, and what it receives.

python -m tests.held_by_ranks MODEL: one JSON line for full training and one for an adapter.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from tests.tiny import some_examples
from tether import ranks
from tether.packing import own_parts, pack
from tether.policy import Policy
from tether.recipe import LoraConfig, SFTRecipe
from tether.sharding import own
from tether.step import Update

LENGTH, ROWS = 20, 8
BUDGET = 2 * LENGTH


def main(model: str) -> None:
    torch.set_num_threads(1)
    with ranks.joined():
        for lora in (None, LoraConfig(rank=4)):
            print(json.dumps(step(model, lora)), flush=True)


def step(model: str, lora: LoraConfig | None) -> dict[str, int]:
    policy = Policy.load(model, precision="fp32", lora=lora)
    policy.shard()
    recipe = SFTRecipe(model=model, data="d", batch_size=ROWS, tokens_per_micro_batch=BUDGET)
    update = Update(policy.parameters(), recipe, 1)
    examples = [e.__class__([7] * 10, [[8] * 10], [[True] * 10]) for e in some_examples(ROWS)]
    before = received()
    for part in own_parts(examples, BUDGET):
        loss = -policy.logprobs(pack([examples[i] for i in part])).sum() / (ROWS * 10)
        loss.backward()
    gradients = sum(own(p.grad).nbytes for p in policy.parameters().values() if p.grad is not None)
    update.apply(loss=1.0)
    after = received()
    with policy.whole():
        update.apply(loss=1.0)  # nothing moves without gradients; the watch writes
    moments = [t for name, t in update.state_dict()["tensors"].items() if not name.endswith("|step")]
    return {
        "weights": sum(own(p).nbytes for p in policy.model.parameters()),
        "gradients": gradients,
        "optimiser": sum(t.nbytes for t in moments),
        "gathered": after.get("gathered", 0) - before.get("gathered", 0),
        "summed": after.get("summed", 0) - before.get("summed", 0),
        "sampling": received().get("sampling", 0) - after.get("sampling", 0),
    }


def received() -> dict[str, int]:
    """What the watch has counted until the newest update."""
    path = Path(os.environ["RANKS_WATCH"]) / f"rank_{ranks.rank()}.json"
    counted: dict[str, int] = json.loads(path.read_text())[-1]["received"] if path.exists() else {}
    return counted


if __name__ == "__main__":
    main(sys.argv[1])
