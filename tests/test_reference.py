"""Stored reference scores: equal to fresh ones, found again by content, made anew for what changed, and said so."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny import move, save_tiny, some_examples
from tether.batch import Example
from tether.packing import pack
from tether.policy import Policy
from tether.recipe import LoraConfig
from tether.reference import answer_key, reference_logps

EXAMPLES = some_examples(10, seed=3)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "base")


@pytest.fixture
def policy(base: Path) -> Policy:
    return Policy.load(base, precision="fp32")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data" / "pairs.jsonl"


def fresh(policy: Policy, examples: list[Example]) -> torch.Tensor:
    with policy.reference() as reference:
        parts = [pack([e]) for e in examples]
        return torch.cat([p.sum_by_answer(reference.logprobs(p)) for p in parts])


def test_stored_scores_are_the_references_own_to_1e_5(policy: Policy, data: Path) -> None:
    expected = fresh(policy, EXAMPLES)
    for _ in range(2):
        found = reference_logps(policy, EXAMPLES, beside=data)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert torch.equal(reference_logps(policy, EXAMPLES, beside=data), found)
    torch.testing.assert_close(reference_logps(policy, EXAMPLES, cache=False), expected, rtol=0, atol=1e-5)
    assert [p.name for p in data.parent.iterdir()] == [".tether"]


def test_only_what_changed_is_made_anew_and_both_are_said(policy: Policy, data: Path) -> None:
    said: list[str] = []

    def run(examples: list[Example], by: Policy = policy) -> torch.Tensor:
        return reference_logps(by, examples, beside=data, say=said.append)

    first = run(EXAMPLES)
    assert said.pop() == "reference scores: 0 reused, 20 made new"
    run(EXAMPLES)
    assert said.pop() == "reference scores: 20 reused, 0 made new"

    # Another order: the same scores, in the new order.
    assert torch.equal(run(EXAMPLES[::-1]).view(-1, 2), first.view(-1, 2).flip(0))
    assert said.pop() == "reference scores: 20 reused, 0 made new"

    # One row edited: its answer only.
    edited = [*EXAMPLES]
    old = edited[4]
    edited[4] = Example(old.prompt, [old.answers[0], [*old.answers[1][:-1], 7, 2]], [old.trained[0], [True] * (len(old.answers[1]) + 1)])
    again = run(edited)
    assert said.pop() == "reference scores: 19 reused, 1 made new"
    torch.testing.assert_close(again, fresh(policy, edited), rtol=0, atol=1e-5)

    # Another template changes prompt ids: all of them.
    run([Example([5, *e.prompt], e.answers, e.trained) for e in EXAMPLES])
    assert said.pop() == "reference scores: 0 reused, 20 made new"

    # Another mask over the same ids.
    run([Example(e.prompt, e.answers, [[False, *t[1:]] for t in e.trained]) for e in EXAMPLES])
    assert said.pop() == "reference scores: 0 reused, 20 made new"


def test_another_model_or_precision_shares_nothing(base: Path, data: Path, tmp_path: Path) -> None:
    said: list[str] = []
    policies = [
        Policy.load(base, precision="fp32"),
        Policy.load(base, precision="bf16"),
        Policy.load(save_tiny(tmp_path / "other", seed=7), precision="fp32"),
    ]
    for policy in policies:
        reference_logps(policy, EXAMPLES, beside=data, say=said.append)
    assert said == ["reference scores: 0 reused, 20 made new"] * 3
    # An adapter's reference is the model without it, so those scores are shared.
    adapted = Policy.load(base, precision="fp32", lora=LoraConfig(rank=4))
    move(adapted.parameters())
    found = reference_logps(adapted, EXAMPLES, beside=data, say=said.append)
    assert said[-1] == "reference scores: 20 reused, 0 made new"
    torch.testing.assert_close(found, fresh(adapted, EXAMPLES), rtol=0, atol=1e-5)


def test_no_random_state_moves(policy: Policy, base: Path, data: Path) -> None:
    def states() -> tuple[object, bytes, bytes]:
        return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()

    before = states()
    reference_logps(policy, EXAMPLES, beside=data)
    moved = Policy.load(base, precision="fp32")
    move(moved.parameters())
    reference_logps(moved, EXAMPLES, beside=data, cache=False)
    assert states() == before


def test_the_first_margin_is_zero_and_the_loss_curve_the_same_with_and_without_the_store(base: Path, data: Path) -> None:
    """DPO over 10 rows of very different lengths, shuffled, 3 epochs."""
    examples = [
        Example(e.prompt, [[7] * (1 + 6 * i) + [2], e.answers[1]], [[True] * (2 + 6 * i), e.trained[1]]) for i, e in enumerate(EXAMPLES)
    ]

    def curve(stored: bool) -> list[float]:
        policy = Policy.load(base, precision="fp32")
        torch.manual_seed(0)
        kept = reference_logps(policy, examples, beside=data).view(-1, 2) if stored else None
        order = [torch.randperm(10).tolist() for _ in range(3)]  # would differ if scoring had drawn a random number
        optimizer = torch.optim.SGD(policy.parameters().values(), lr=0.02)
        losses, first = [], True
        for epoch in order:
            for rows in (epoch[:5], epoch[5:]):
                packed = pack([examples[i] for i in rows])
                ours = packed.sum_by_answer(policy.logprobs(packed)).view(-1, 2)
                if kept is not None:
                    theirs = kept[rows]
                else:
                    with policy.reference() as reference:
                        theirs = packed.sum_by_answer(reference.logprobs(packed)).view(-1, 2)
                gap = ours - theirs
                margin = gap[:, 0] - gap[:, 1]
                if first:
                    assert margin.detach().abs().max() < 1e-4 if stored else margin.detach().abs().max() == 0
                    first = False
                loss = -torch.nn.functional.logsigmoid(0.1 * margin).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
        return losses

    with_store, without = curve(True), curve(False)
    assert with_store == pytest.approx(without, abs=1e-5)
    assert with_store[-1] < with_store[0]


def test_scoring_before_training_needs_no_copy_of_the_model(policy: Policy, data: Path) -> None:
    reference_logps(policy, EXAMPLES, beside=data)
    assert policy._reference is None


def test_a_broken_store_is_made_again_and_said(policy: Policy, data: Path) -> None:
    said: list[str] = []
    first = reference_logps(policy, EXAMPLES, beside=data)
    (file,) = (data.parent / ".tether").iterdir()
    whole = file.read_bytes()
    for content in (whole[:-30], b"", b"nonsense" * 10):
        file.write_bytes(content)
        assert torch.equal(reference_logps(policy, EXAMPLES, beside=data, say=said.append), first)
        assert "0 reused, 20 made new" in said[-1]
        assert "is broken and was made again" in said[-1]
    assert file.read_bytes() == whole


def test_a_data_folder_that_cannot_be_written_is_left_alone(policy: Policy, data: Path, tmp_path: Path) -> None:
    said: list[str] = []
    (data.parent / ".tether").write_text("a file stands where the folder would be")
    reference_logps(policy, EXAMPLES, beside=data, say=said.append)
    reference_logps(policy, EXAMPLES, beside=data, say=said.append)
    assert said[-1] == "reference scores: 20 reused, 0 made new"
    assert list((tmp_path / "cache" / "reference").iterdir())


def test_progress_counts_answers_and_duplicates_are_scored_once(policy: Policy, data: Path) -> None:
    seen: list[tuple[int, int]] = []
    reference_logps(policy, EXAMPLES, beside=data, progress=lambda done, total: seen.append((done, total)), tokens_per_micro_batch=40)
    assert len(seen) > 3
    assert seen[-1] == (20, 20)
    assert seen == sorted(seen)


def test_keys_tell_apart_what_a_joined_list_would_not() -> None:
    def key(prompt: list[int], answer: list[int], trained: list[bool]) -> bytes:
        return answer_key(Example(prompt, [answer], [trained]), 0)

    keys = [
        key([1, 2], [3], [True]),
        key([1], [2, 3], [True, True]),
        key([1, 2], [3], [False]),
        key([1, 2, 3], [], []),
        key([258], [3], [True]),
        key([2, 1], [3], [True]),
    ]
    assert len(set(keys)) == len(keys)
