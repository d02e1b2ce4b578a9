"""The critic of `tether ppo`: what it starts from, what its values belong to, and that checkpoints keep every bit of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.ppo_runs import Train, even, model, train
from tests.tiny import move, save_tiny, some_examples, tiny_config, tiny_tokenizer
from tether.batch import Example
from tether.critic import FOLDER, HEAD, SeparateCritic, SharedCritic, make_critic
from tether.errors import UserError
from tether.learner import Learner
from tether.packing import pack
from tether.policy import Policy
from tether.recipe import LoraConfig, PPORecipe
from tether.scalar import ScalarModel
from tether.token_rows import to_rows

__all__ = ["model", "train"]  # fixtures

LORA = LoraConfig(rank=4)
PACKED = pack(some_examples())


class Quiet:
    """A run that nobody watches."""

    def recorded(self, key: str) -> None:
        return None

    def note(self, kind: str, text: str) -> None: ...

    def say(self, text: str) -> None: ...


QUIET: Any = Quiet()


def recipe(model: Path, **given: Any) -> PPORecipe:
    return PPORecipe(model=str(model), data="d", batch_size=4, **given)


def made(model: Path, **given: Any) -> tuple[Policy, SharedCritic | SeparateCritic]:
    policy = Policy.load(model, precision="fp32", lora=given.get("lora"))
    return policy, make_critic(recipe(model, **given), policy, QUIET)


def values_of(policy: Policy, critic: SharedCritic | SeparateCritic) -> Tensor:
    with torch.no_grad():
        return critic.judge(policy, PACKED, 1.0)[1]


@pytest.fixture(scope="module")
def reward_models(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Trained reward models on the same tokenizer: whole, and as an adapter."""
    folder, out = tmp_path_factory.mktemp("rewards"), {}
    for name, lora in (("whole", None), ("adapter", LORA)):
        scalar = ScalarModel.load(model, fresh_head=True, precision="fp32", lora=lora, seed=5)
        move(scalar.parameters(), size=0.05, seed=7)
        scalar.set_normalisation(mean=3.0, std=2.0)
        out[name] = scalar.save(folder / name)
    return out


# --- what it starts from ----------------------------------------------------------------------------------------------------------


def test_a_shared_critic_starts_at_nothing(model: Path) -> None:
    assert not bool(values_of(*made(model)).any())


@pytest.mark.parametrize("kind", ["whole", "adapter"])
def test_a_critic_from_a_reward_model_keeps_its_head_and_trunk(model: Path, reward_models: dict[str, Path], kind: str) -> None:
    """Its first values are the reward model's raw scores of what was written so far, bit for bit."""
    scalar = ScalarModel.load(reward_models[kind], precision="fp32")
    policy, critic = made(model, critic="separate", critic_model=str(reward_models[kind]))
    assert torch.equal(values_of(policy, critic), scalar.values(PACKED))
    whole = pack([Example([7, 8], [[10, 11, 2]], [[True] * 3])])
    ahead = pack([Example([7, 8], [[10, 11]], [[True] * 2])])
    with torch.no_grad():
        values = critic.judge(policy, whole, 1.0)[1]
        torch.testing.assert_close(values[2:], scalar.scores(ahead)[:, 0], rtol=1e-5, atol=1e-6)


def test_a_critic_from_nothing_named_is_the_policy_under_a_fresh_head_drawn_from_the_seed(model: Path, tmp_path: Path) -> None:
    policy, critic = made(model, critic="separate")
    assert isinstance(critic, SeparateCritic)
    trunk = dict(policy.model.model.named_parameters())
    theirs = dict(critic.scalar.model.model.named_parameters())
    assert trunk.keys() == theirs.keys()
    assert all(torch.equal(p, theirs[n]) for n, p in trunk.items())
    assert not any(p.data_ptr() == theirs[n].data_ptr() for n, p in trunk.items()), "a model of its own"
    again, other = made(model, critic="separate")[1], made(model, critic="separate", seed=1)[1]
    head = critic.scalar.model.score.weight
    assert torch.equal(head, again.parameters()["score.weight"])
    assert not torch.equal(head, other.parameters()["score.weight"])
    assert 0 < float(head.detach().std()) < 0.5
    another = save_tiny(tmp_path / "another", seed=3)
    policy, critic = made(model, critic="separate", critic_model=str(another))
    assert not torch.equal(critic.parameters()["model.embed_tokens.weight"], trunk["embed_tokens.weight"])


def test_a_critic_that_cannot_be_one_is_refused_by_name(model: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", tiny_config(vocab=120), tokenizer=tiny_tokenizer(120))
    with pytest.raises(UserError, match="another tokenizer"):
        made(model, critic="separate", critic_model=str(other))
    two = ScalarModel.load(model, fresh_head=True, heads=2, precision="fp32").save(tmp_path / "two")
    with pytest.raises(UserError, match="2 heads"):
        made(model, critic="separate", critic_model=str(two))
    with pytest.raises(UserError, match="critic: separate"):
        recipe(model, critic_model=str(two))


# --- what its values belong to ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_values_belong_to_the_state_ahead_of_each_token(model: Path, critic: str) -> None:
    """V_t may depend on the prompt and on tokens before t, and on nothing that comes after."""
    policy, asked = made(model, critic=critic)
    with torch.no_grad():
        for p in asked.parameters().values():
            p.add_(0.1)

    def values(prompt: list[int], answer: list[int]) -> Tensor:
        packed = pack([Example(prompt, [answer], [[True] * len(answer)])])
        with torch.no_grad():
            logps, v, _ = asked.judge(policy, packed, 1.0)
            torch.testing.assert_close(logps, policy.logprobs(packed), rtol=1e-5, atol=1e-6)
        return to_rows(packed, v)[0]

    one, other = values([7, 8], [10, 11, 12, 2]), values([7, 8], [10, 11, 30, 31])
    torch.testing.assert_close(one[:3], other[:3], rtol=1e-5, atol=1e-6)
    assert abs(float(one[3] - other[3])) > 1e-5, "what stands before the token counts"
    assert abs(float(one[0] - values([7, 9], [10, 11, 12, 2])[0])) > 1e-5, "the prompt counts"


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_the_loss_of_the_critic_reaches_the_policy_through_a_shared_trunk_only(model: Path, critic: str) -> None:
    policy, asked = made(model, critic=critic)
    move(asked.parameters(), size=0.05)
    (asked.judge(policy, PACKED, 1.0)[1] ** 2).sum().backward()
    reached = [p.grad is not None and bool(p.grad.any()) for p in policy.parameters().values()]
    assert any(reached) == (critic == "shared")
    assert all(p.grad is not None and bool(p.grad.any()) for p in asked.parameters().values())


# --- what is kept -----------------------------------------------------------------------------------------------------------------

KEPT = {
    "shared": {},
    "shared, adapter": {"lora": LORA},
    "separate": {"critic": "separate"},
    "separate, adapter": {"critic": "separate", "lora": LORA},
    "from a reward model": {"critic": "separate", "critic_model": "whole"},
    "from a reward model, adapter": {"critic": "separate", "critic_model": "whole", "lora": LORA},
    "from a reward model's adapter": {"critic": "separate", "critic_model": "adapter"},
}


@pytest.mark.parametrize("name", KEPT)
def test_a_critic_is_saved_and_put_back_bit_for_bit(model: Path, reward_models: dict[str, Path], tmp_path: Path, name: str) -> None:
    given = dict(KEPT[name])
    if "critic_model" in given:
        given["critic_model"] = str(reward_models[given["critic_model"]])
    policy, critic = made(model, **given)
    learner = Learner(policy, None, critic)
    move(learner.parameters(), size=0.05)
    (tmp_path / "saved").mkdir()
    learner.write_weights(tmp_path / "saved")

    policy_again, critic_again = made(model, **{**given, "seed": 9})
    again = Learner(policy_again, None, critic_again)
    head = next(
        n for n in learner.parameters() if n.startswith("critic.") and n.endswith(("score.weight", "default.weight", "critic.weight"))
    )
    assert not torch.equal(learner.parameters()[head], again.parameters()[head])
    again.read_weights(tmp_path / "saved")
    assert learner.parameters().keys() == again.parameters().keys()
    assert all(torch.equal(p, again.parameters()[n]) for n, p in learner.parameters().items())
    assert torch.equal(values_of(policy, critic), values_of(policy_again, critic_again))
    if isinstance(critic, SeparateCritic):
        alone = ScalarModel.load(tmp_path / "saved" / FOLDER, precision="fp32")
        assert torch.equal(alone.values(PACKED), values_of(policy, critic)), "the folder is a reward model that loads by itself"
        assert (alone.mean, alone.std) == (critic.scalar.mean, critic.scalar.std)
    else:
        assert load_file(tmp_path / "saved" / HEAD).keys() == {"weight", "bias"}


@pytest.mark.parametrize("name", KEPT)
def test_a_run_trains_its_critic_and_keeps_it_in_every_checkpoint(train: Train, reward_models: dict[str, Path], name: str) -> None:
    given = dict(KEPT[name])
    if "critic_model" in given:
        given["critic_model"] = str(reward_models[given["critic_model"]])
    run, _ = train([even], max_steps=2, save_steps=1, updates_per_batch=1, **given)
    file = next((run.folder / "checkpoints/000002").glob(f"{FOLDER}/*.safetensors"), run.folder / "checkpoints/000002" / HEAD)
    before = load_file(run.folder / "checkpoints/000001" / file.relative_to(run.folder / "checkpoints/000002"))
    after = load_file(file)
    assert before.keys() == after.keys()
    head = next(n for n in after if n in ("weight", "score.weight") or n.endswith("score.weight"))
    assert not torch.equal(before[head], after[head])
    moments = load_file(run.folder / "checkpoints/000002/optimizer.safetensors")
    assert any(n.startswith("critic.") and n.endswith("exp_avg") for n in moments)
    assert not [p.name for p in (run.folder / "model").iterdir() if "critic" in p.name or p.name == HEAD], "the result is the policy alone"


def test_rates_of_policy_and_critic_are_their_own(train: Train, model: Path) -> None:
    """AdamW's first step is its rate in every place that has a gradient."""
    given: dict[str, Any] = {
        "learning_rate": 1e-4,
        "critic_learning_rate": 1e-2,
        "max_steps": 1,
        "updates_per_batch": 1,
        "lr_scheduler": "constant",
    }
    run, _ = train([even], critic="separate", **given)
    start, end = load_file(model / "model.safetensors"), load_file(run.folder / "checkpoints/000001/model.safetensors")
    theirs = load_file(run.folder / "checkpoints/000001" / FOLDER / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert float((end[name] - start[name]).abs().median()) == pytest.approx(1e-4, rel=0.05)
    assert float((theirs[name] - start[name]).abs().median()) == pytest.approx(1e-2, rel=0.05)
