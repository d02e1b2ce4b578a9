"""sft, reward, dpo and kto on two and four ranks: the numbers and weights of one, up to rounding in float32."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.ppo_runs import timeless
from tests.ranks_runs import finish, gap, start
from tests.tiny import save_tiny
from tests.whole_runs import rows_for, write_rows
from tether.run import Run

STEPS, MIDDLE = 20, 10
SMALL = {"max_steps": STEPS, "save_steps": MIDDLE, "keep_checkpoints": 2, "batch_size": 6, "tokens_per_micro_batch": 60, "learning_rate": 1e-3,
         "precision": "fp32", "threads": 1, "trackers": [], "log_every": 1000,
         # AdamW's first step divides a gradient by its own size: where that is rounding alone, its sign would be chance.
         "adam_epsilon": 1e-6}  # fmt: skip
LORA = {"lora": {"rank": 4}}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sft": ("sft", "sft", {"eval_fraction": 0.2, "eval_steps": 7}),
    "sft, adapter": ("sft", "sft", LORA),
    "sft, recomputed": ("sft", "sft", {"gradient_checkpointing": True, **LORA}),
    "reward": ("reward", "reward", {"eval_fraction": 0.2, "eval_steps": 7}),
    "reward, adapter": ("reward", "reward", {"heads": 2, **LORA}),
    "dpo": ("dpo", "dpo", {"cache_reference": False, "gradient_checkpointing": True}),
    "dpo, adapter": ("dpo", "dpo", {"cache_reference": False, "eval_fraction": 0.2, "eval_steps": 7, **LORA}),
    "ipo": ("dpo", "dpo", {"loss_type": "ipo", "cache_reference": False}),
    "simpo": ("dpo", "dpo", {"loss_type": "simpo"}),
    "orpo": ("dpo", "dpo", {"loss_type": "orpo"}),
    "kto": ("dpo", "kto", {"loss_type": "kto", "cache_reference": False, "learning_rate": 3e-4}),
    "kto, adapter": ("dpo", "kto", {"loss_type": "kto", "cache_reference": False, "learning_rate": 3e-4, **LORA}),
}
ON_FOUR = ["sft", "reward", "dpo, adapter", "kto"]
RESUMED = ["sft", "sft, adapter", "reward", "dpo"]
# Of two numbers that are equal but for rounding one is larger by chance: what only counts such is left out of the first step.
COUNTS = (
    "rewards/accuracies",
    "accuracy",
    "displacement/frac_chosen_down",
    "displacement/frac_rejected_up",
    "displacement/share_from_rejected",
)


def folder(root: Path, name: str, n: int) -> Path:
    return root / str(n) / name.replace(", ", "-").replace(" ", "-")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    model = save_tiny(root / "model")
    data = {kind: write_rows(root / f"{kind}.jsonl", rows_for(kind)) for kind in ("sft", "reward", "dpo", "kto")}

    def spec(name: str, n: int) -> dict[str, Any]:
        command, rows, more = KINDS[name.removesuffix(" again")]
        return {
            "name": name, "command": command, "folder": str(folder(root, name, n)),
            "settings": {**SMALL, "model": str(model), "data": str(data[rows]), **more},
        }  # fmt: skip

    finish(*start(2, [spec(name, 2) for name in KINDS], root))
    for name in RESUMED:  # what two ranks had saved in the middle
        for n in (1, 4):
            target = folder(root, name + " again", n)
            shutil.copytree(folder(root, name, 2), target)
            shutil.rmtree(target / "checkpoints" / f"{STEPS:06d}")
            (target / "summary.json").unlink()
    alone = start(1, [spec(name, 1) for name in KINDS] + [spec(name + " again", 1) for name in RESUMED], root)
    four = start(4, [spec(name, 4) for name in ON_FOUR] + [spec(name + " again", 4) for name in RESUMED], root)
    finish(*alone)
    finish(*four)
    # What one rank has saved goes on on two.
    target = folder(root, "sft again", 2)
    shutil.copytree(folder(root, "sft", 1), target)
    shutil.rmtree(target / "checkpoints" / f"{STEPS:06d}")
    (target / "summary.json").unlink()
    finish(*start(2, [spec("sft again", 2)], root))
    return root


def assert_alike(one: Path, other: Path, *, since: int = 0) -> None:
    runs = [Run.open(one), Run.open(other)]
    metrics = [[m for m in timeless(run) if m["step"] > since] for run in runs]
    assert len(metrics[0]) >= STEPS - since
    for a, b in zip(*metrics, strict=True):
        if a["step"] == 1:
            a, b = ({name: value for name, value in m.items() if name not in COUNTS} for m in (a, b))
        assert a == pytest.approx(b, rel=1e-5, abs=1e-5)
    assert gap(one / "model", other / "model") <= 1e-5
    pairs = [sorted((r["step"], r["pair"], r["source"]) for r in run.rows("pairs.jsonl")) for run in runs]
    assert pairs[0] == pairs[1]


@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_learn_as_one(root: Path, name: str) -> None:
    assert_alike(folder(root, name, 1), folder(root, name, 2))


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_learn_as_one(root: Path, name: str) -> None:
    assert_alike(folder(root, name, 1), folder(root, name, 4))


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("name", RESUMED)
def test_what_two_ranks_saved_goes_on_elsewhere(root: Path, name: str, n: int) -> None:
    again = folder(root, name + " again", n)
    assert any(note["kind"] == "resumed" for note in Run.open(again).notices())
    assert_alike(folder(root, name, 1), again, since=MIDDLE)


def test_what_one_rank_saved_goes_on_on_two(root: Path) -> None:
    again = folder(root, "sft again", 2)
    assert any(note["kind"] == "resumed" for note in Run.open(again).notices())
    assert_alike(folder(root, "sft", 1), again, since=MIDDLE)


def test_the_runs_are_no_standstill(root: Path) -> None:
    assert gap(folder(root, "ipo", 2) / "model", folder(root, "simpo", 2) / "model") > 1e-3


def test_each_rank_saves_its_own_part_of_the_optimiser(root: Path) -> None:
    """Two files of about half the numbers each, none of them a pickle; the checkpoint is a model folder besides."""
    checkpoint = folder(root, "sft", 2) / "checkpoints" / f"{STEPS:06d}"
    sizes = []
    for path in sorted((checkpoint / "optimizer").iterdir()):
        assert path.suffix == ".safetensors"
        with safe_open(path, framework="pt") as file:
            sizes.append(sum(file.get_tensor(name).numel() for name in file.keys()))  # noqa: SIM118
    assert len(sizes) == 2
    assert 0.8 < sizes[0] / sizes[1] < 1.25
    assert (checkpoint / "model.safetensors").is_file()
