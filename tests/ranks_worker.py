"""One rank of several runs, as `test_ranks_training.py` and `test_ranks_rl.py` start it: python -m tests.ranks_worker SPECS.json

The file holds a list of {name, command, settings, folder}; all of them run one after the other in this process, because a start costs
seconds. The first rank writes what each rank has seen beside it, as SPECS.seen.json.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from tether import ranks
from tether.commands.train import ALGORITHMS
from tether.errors import UserError
from tether.follower import Follower
from tether.recipe import RECIPES
from tether.run import Run

calls = 0


def even(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float | None]:
    """Share of tokens with an even id, None for one attempt in seven: not every attempt is in the loss."""
    global calls
    calls += 1
    return [None if sum(ids) % 7 == 0 else sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def often_alike(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float]:
    """Whether the first token's id is even: many groups earn the same."""
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def failing(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float]:
    raise RuntimeError("out of paper")


REWARDS = {"even": even, "often_alike": often_alike, "failing": failing}


def train(spec: dict[str, Any]) -> str | None:
    """The error that ended the run, if one did."""
    folder = Path(spec["folder"])
    recipe = RECIPES[spec["command"]](**spec["settings"])
    if ranks.first():
        run = Run.open(folder) if folder.exists() else Run.create(folder, recipe, spec["command"])
    ranks.share(None)
    if not ranks.first():
        run = Follower.open(folder)
    try:
        with run:
            given = [[REWARDS[spec["reward"]]]] if "reward" in spec and not recipe.rewards else []
            importlib.import_module(ALGORITHMS[spec["command"]]).train(run.recipe, run, *given)
    except UserError as error:
        return str(error)
    return None


def main(path: Path) -> None:
    torch.set_num_threads(1)
    with ranks.joined():
        errors = {spec["name"]: train(spec) for spec in json.loads(path.read_text())}
        seen = ranks.gather({"errors": {name: e for name, e in errors.items() if e}, "calls": calls})
        if ranks.first():
            path.with_suffix(".seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
