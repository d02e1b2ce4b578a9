"""Checkpoints: a resumed run is the run that was stopped, bit for bit; what is broken is named and never half loaded."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.test_step import Settings
from tests.tiny import save_tiny, some_examples
from tether import checkpoint
from tether.batch import DataOrder
from tether.checkpoint import load_checkpoint, save_checkpoint, verify
from tether.errors import UserError
from tether.models import load_model
from tether.packing import pack
from tether.policy import Policy
from tether.recipe import LoraConfig
from tether.scalar import ScalarModel
from tether.step import Update

EXAMPLES = some_examples(23)
LORA = LoraConfig(rank=4)
SETTINGS = Settings(learning_rate=3e-3, lr_scheduler="cosine", warmup_steps=2, weight_decay=0.01, max_grad_norm=1.0)


@dataclass
class FakeRun:
    """What checkpoints need of a run: a folder and ears."""

    folder: Path
    said: list[str] = field(default_factory=list)

    def note(self, kind: str, text: str) -> None:
        self.said.append(f"{kind}: {text}")

    def say(self, text: str) -> None:
        pass


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "base")


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "run")


def policy_loss(model: Any, rows: list[int]) -> torch.Tensor:
    packed = pack([EXAMPLES[i] for i in rows])
    return -model.logprobs(packed).mean()


def score_loss(model: Any, rows: list[int]) -> torch.Tensor:
    scores = model.scores(pack([EXAMPLES[i] for i in rows])).view(len(rows), 2, -1)
    return -torch.nn.functional.logsigmoid(scores[:, 0] - scores[:, 1]).mean()


KINDS: dict[str, tuple[Callable[[Path], Any], Callable[[Any, list[int]], torch.Tensor]]] = {
    "full": (lambda base: Policy.load(base, precision="fp32"), policy_loss),
    "full bf16": (lambda base: Policy.load(base, precision="bf16"), policy_loss),
    "lora": (lambda base: Policy.load(base, precision="fp32", lora=LORA), policy_loss),
    "lora dropout": (
        lambda base: Policy.load(base, precision="fp32", lora=LoraConfig(rank=4, dropout=0.3), train_dropout=True),
        policy_loss,
    ),
    "lora and more": (
        lambda base: Policy.load(base, precision="fp32", lora=LoraConfig(rank=2, target_modules=["q_proj"], modules_to_save=["norm"])),
        policy_loss,
    ),
    "reward": (lambda base: ScalarModel.load(base, precision="fp32", fresh_head=True, heads=2), score_loss),
    "reward lora": (lambda base: ScalarModel.load(base, precision="fp32", fresh_head=True, lora=LORA), score_loss),
}


def seed_everything() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def train(model: Any, update: Update, loss_of: Callable[[Any, list[int]], torch.Tensor], steps: range) -> list[tuple[Any, ...]]:
    """23 rows in batches of 4, two micro-batches each, plus a draw from every generator: what a run's log would show."""
    order, log = DataOrder(23, 4, seed=0), []
    for step in steps:
        rows, total = order.batch(step), 0.0
        for part in (rows[:2], rows[2:]):
            if part:
                loss = loss_of(model, part) * len(part) / len(rows)
                loss.backward()
                total += float(loss.detach())
        out = update.apply(total)
        log.append((rows, total, out["grad_norm"], out["learning_rate"], random.random(), np.random.rand(), float(torch.rand(()))))
    return log


def state_of(model: Any, update: Update) -> dict[str, torch.Tensor]:
    return {**model.model.state_dict(), **update.state_dict()["tensors"]}


# -- B40, B43: the run that was stopped --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_four_steps_a_reload_and_six_are_ten_in_one_go_bit_for_bit(base: Path, run: FakeRun, kind: str) -> None:
    load, loss_of = KINDS[kind]
    seed_everything()
    model = load(base)
    update = Update(model.parameters(), SETTINGS, 10)
    whole = train(model, update, loss_of, range(10))

    seed_everything()
    stopped = load(base)
    first_update = Update(stopped.parameters(), SETTINGS, 10)
    first = train(stopped, first_update, loss_of, range(4))
    save_checkpoint(run, 4, stopped, first_update, {"num_tokens": 1234, "rows": [1, 2]})
    train(stopped, first_update, loss_of, range(4, 6))  # lost with the process

    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    resumed = load(base)
    second_update = Update(resumed.parameters(), SETTINGS, 10)
    found = load_checkpoint(run, resumed, second_update)
    assert found is not None
    assert (found.step, found.extra) == (4, {"num_tokens": 1234, "rows": [1, 2]})
    second = train(resumed, second_update, loss_of, range(4, 10))

    assert first + second == whole
    expected, got = state_of(model, update), state_of(resumed, second_update)
    assert expected.keys() == got.keys()
    assert all(torch.equal(t, got[k]) for k, t in expected.items())
    assert run.said == []


def test_resuming_keeps_exactly_one_trained_adapter(base: Path, run: FakeRun) -> None:
    policy = Policy.load(base, precision="fp32", lora=LORA)
    update = Update(policy.parameters(), SETTINGS, 10)
    train(policy, update, policy_loss, range(3))
    save_checkpoint(run, 3, policy, update)
    resumed = Policy.load(base, precision="fp32", lora=LORA)
    names = set(resumed.parameters())
    load_checkpoint(run, resumed, Update(resumed.parameters(), SETTINGS, 10))
    assert list(resumed.model.peft_config) == ["default"]
    assert set(resumed.parameters()) == names
    rows = [0, 1, 2]
    assert torch.equal(policy_loss(resumed, rows), policy_loss(policy, rows)), "the first resumed loss continues the curve"
    with resumed.reference() as reference:
        packed = pack(EXAMPLES[:2])
        assert torch.equal(reference.logprobs(packed), Policy.load(base, precision="fp32").logprobs(packed))


def test_a_run_that_started_from_an_adapter_resumes_with_its_reference(base: Path, tmp_path: Path, run: FakeRun) -> None:
    first = Policy.load(base, precision="fp32", lora=LORA)
    train(first, Update(first.parameters(), SETTINGS, 10), policy_loss, range(3))
    first.save(tmp_path / "sft")
    policy = Policy.load(tmp_path / "sft", precision="fp32")
    update = Update(policy.parameters(), SETTINGS, 10)
    train(policy, update, policy_loss, range(3))
    save_checkpoint(run, 3, policy, update)
    resumed = Policy.load(tmp_path / "sft", precision="fp32")
    load_checkpoint(run, resumed, Update(resumed.parameters(), SETTINGS, 10))
    packed = pack(EXAMPLES[:3])
    assert torch.equal(resumed.logprobs(packed), policy.logprobs(packed))
    with resumed.reference() as reference:
        assert torch.equal(reference.logprobs(packed), first.logprobs(packed))


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        (LORA, LoraConfig(rank=8), "has rank 4, but rank 8 was asked for"),
        (LORA, LoraConfig(rank=4, alpha=8), "trained with alpha 32, but alpha 8"),
        (LORA, LoraConfig(rank=4, target_modules=["q_proj"]), "has no place in this model"),
        (LoraConfig(rank=4, target_modules=["q_proj"]), LORA, "missing"),
        (LORA, None, "the checkpoint trained an adapter, this run trains every weight"),
        (None, LORA, "the checkpoint trained every weight, this run trains an adapter"),
    ],
)
def test_resuming_with_other_adapter_settings_is_refused_by_name(
    base: Path, run: FakeRun, then: LoraConfig | None, now: LoraConfig | None, message: str
) -> None:
    policy = Policy.load(base, precision="fp32", lora=then)
    save_checkpoint(run, 1, policy, Update(policy.parameters(), SETTINGS, 10))
    other = Policy.load(base, precision="fp32", lora=now)
    with pytest.raises(UserError, match=message) as caught:
        load_checkpoint(run, other, Update(other.parameters(), SETTINGS, 10))
    assert caught.value.remedy


def test_a_reward_models_normalisation_is_in_its_checkpoint(base: Path, run: FakeRun) -> None:
    model = ScalarModel.load(base, precision="fp32", fresh_head=True)
    model.set_normalisation(mean=0.5, std=2.0)
    save_checkpoint(run, 1, model, Update(model.parameters(), SETTINGS, 10))
    again = ScalarModel.load(base, precision="fp32", fresh_head=True, seed=5)
    load_checkpoint(run, again, Update(again.parameters(), SETTINGS, 10))
    assert (again.mean, again.std) == (0.5, 2.0)


# -- on disk -----------------------------------------------------------------------------------------------------------


def saved(run: FakeRun, base: Path, steps: list[int], lora: LoraConfig | None = LORA) -> tuple[Policy, Update]:
    policy = Policy.load(base, precision="fp32", lora=lora)
    update = Update(policy.parameters(), SETTINGS, 10)
    for step in steps:
        train(policy, update, policy_loss, range(1))
        save_checkpoint(run, step, policy, update, {"at": step})
    return policy, update


def resume(run: FakeRun, base: Path) -> tuple[checkpoint.Resumed | None, Policy]:
    policy = Policy.load(base, precision="fp32", lora=LORA)
    return load_checkpoint(run, policy, Update(policy.parameters(), SETTINGS, 10)), policy


def test_a_run_without_checkpoints_begins_at_the_beginning(base: Path, run: FakeRun) -> None:
    assert resume(run, base)[0] is None


def test_a_checkpoint_holds_only_safetensors_json_and_text_and_is_a_model(base: Path, run: FakeRun) -> None:
    saved(run, base, [200], lora=None)
    folder = run.folder / "checkpoints" / "000200"
    assert {p.suffix for p in folder.iterdir()} <= {".safetensors", ".json", ".jinja"}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["sha256"]) == {p.name for p in folder.iterdir()} - {"manifest.json"}
    policy, _ = load_model(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(plain.model.norm.weight, policy.model.norm.weight)


def test_an_adapter_checkpoint_loads_as_an_adapter(base: Path, run: FakeRun) -> None:
    policy, _ = saved(run, base, [7])
    again = Policy.load(run.folder / "checkpoints" / "000007", precision="fp32")
    packed = pack(EXAMPLES[:2])
    assert torch.equal(again.logprobs(packed), policy.logprobs(packed))
    assert not (run.folder / "checkpoints" / "000007" / "model.safetensors").exists(), "the frozen base is not copied"


def damage(folder: Path, how: str) -> str:
    """Break a checkpoint; returns what the refusal must name."""
    if how == "cut":
        path = folder / "optimizer.safetensors"
        path.write_bytes(path.read_bytes()[:-10])
        return "optimizer.safetensors is not what was written"
    if how == "flipped":
        path = folder / "adapter_model.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(bytes(content))
        return "adapter_model.safetensors is not what was written"
    if how == "lost":
        (folder / "random.safetensors").unlink()
        return "random.safetensors is missing"
    if how == "unfinished":
        (folder / "manifest.json").unlink()
        return "manifest.json is missing: it was not completely written"
    (folder / "manifest.json").write_text("{")
    return "manifest.json cannot be read"


@pytest.mark.parametrize("how", ["cut", "flipped", "lost", "unfinished", "garbled"])
def test_a_broken_checkpoint_is_named_and_the_one_before_it_taken(base: Path, run: FakeRun, how: str) -> None:
    saved(run, base, [2, 4, 6])
    said = damage(run.folder / "checkpoints" / "000006", how)
    found, _ = resume(run, base)
    assert found is not None
    assert (found.step, found.extra) == (4, {"at": 4})
    assert run.said == [f"broken_checkpoint: checkpoint 000006 is broken ({said}): going back to 000004"]


def test_when_all_are_broken_nothing_is_loaded_and_all_are_named(base: Path, run: FakeRun) -> None:
    saved(run, base, [2, 4])
    damage(run.folder / "checkpoints" / "000002", "lost")
    damage(run.folder / "checkpoints" / "000004", "cut")
    with pytest.raises(UserError, match=r"000004 is broken.*000002 is broken") as caught:
        resume(run, base)
    assert caught.value.remedy


def test_a_crash_while_saving_leaves_the_checkpoints_before(base: Path, run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, update = saved(run, base, [2])
    folder = run.folder / "checkpoints"

    def crash(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_file", crash)
        with pytest.raises(OSError, match="no space left"):
            save_checkpoint(run, 4, policy, update)
    assert [p.name for p in folder.iterdir()] == ["000002"]
    # A killed process cannot clean up; the next save does, and no load is misled.
    shutil.copytree(folder / "000002", folder / ".000004.abc.tmp")
    found, _ = resume(run, base)
    assert found is not None
    assert found.step == 2
    save_checkpoint(run, 6, policy, update)
    assert sorted(p.name for p in folder.iterdir()) == ["000002", "000006"]


def test_a_step_that_is_saved_again_replaces_the_old_one(base: Path, run: FakeRun) -> None:
    policy, update = saved(run, base, [2])
    save_checkpoint(run, 2, policy, update, {"at": "again"})
    found, _ = resume(run, base)
    assert found is not None
    assert found.extra == {"at": "again"}


def test_only_the_newest_are_kept_and_never_fewer_than_the_one_just_written(base: Path, run: FakeRun) -> None:
    policy, update = saved(run, base, [2, 4, 6])
    save_checkpoint(run, 8, policy, update, keep=2)
    assert [p.name for p in checkpoint.checkpoints(run.folder)] == ["000006", "000008"]
    save_checkpoint(run, 5, policy, update, keep=1)
    assert "000005" in [p.name for p in checkpoint.checkpoints(run.folder)]
    assert all(verify(p) is None for p in checkpoint.checkpoints(run.folder))


def test_saving_moves_no_random_state(base: Path, run: FakeRun) -> None:
    seed_everything()
    saved(run, base, [])
    policy, update = saved(run, base, [])
    before = (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist())
    save_checkpoint(run, 1, policy, update)
    assert (random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()) == before
