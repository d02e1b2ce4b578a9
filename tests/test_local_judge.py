"""A frozen copy of a model as the judge of a run: named in the recipe, loaded once, heard again when the run is resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny import TEMPLATE, save_tiny, tiny_config
from tests.whole_runs import tokenizer_of, words, write_rows
from tether.algorithms import grpo
from tether.errors import UserError
from tether.models import load_model
from tether.recipe import RECIPES
from tether.rewards.asking import LocalModel, local_model
from tether.rewards.functions import reward
from tether.rollouts import make_rewards
from tether.run import Run

VOTES = [f"w{i}[[{'yes' if i % 2 else 'no'}]]" for i in range(90)]
PRINCIPLES = ["The answer is short.", "The answer is kind."]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whatever it says is a vote."""
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", tokenizer=tokenizer_of(["user assistant", *VOTES], TEMPLATE))


def test_the_policy_judges_itself_as_it_is_at_the_start(model: Path, tmp_path: Path) -> None:
    """Without a model in the block, the run's own is asked; training moves the policy and not the judge."""
    data = write_rows(tmp_path / "prompts.jsonl", [{"prompt": words(5 * i, 3)} for i in range(6)])
    block = {"reward": "principles", "local": {"max_tokens": 6}, "votes": 2, "principles": PRINCIPLES}
    recipe = RECIPES["grpo"](
        model=str(model),
        data=str(data),
        run=str(tmp_path / "run"),
        rewards=[block],
        num_generations=4,
        batch_size=8,
        max_completion_length=5,
        max_steps=2,
        learning_rate=1e-2,
        precision="fp32",
        trackers=[],
    )
    with Run.create(tmp_path / "run", recipe) as run:
        rewards = make_rewards(recipe, run)
        judge = rewards.rewards[0].function.ask  # type: ignore[attr-defined]
        assert isinstance(judge, LocalModel)
        start = {name: value.clone() for name, value in judge.sampler.model.state_dict().items()}
        loaded, _ = load_model(str(model))
        assert all(torch.equal(value, start[name]) for name, value in loaded.state_dict().items())
        asked = (["w6 w7"] * 3, ["w8", "w9 w10", "w11"])
        before = rewards.score(*asked).totals
        assert set(before) <= {0.0, 0.25, 0.5, 0.75, 1.0}
        summary = grpo.train(recipe, run)
        assert summary["steps"] == 2
        assert all(torch.equal(value, start[name]) for name, value in judge.sampler.model.state_dict().items())
        assert make_rewards(recipe, run).score(*asked).totals == before  # as a resumed run would hear it


def test_another_model_may_be_named(model: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", seed=1, tokenizer=tokenizer_of(["user assistant", *VOTES], TEMPLATE))
    values = [
        reward("principles", local={"model": str(m), "max_tokens": 6, "precision": "fp32"}, principles=PRINCIPLES, votes=5).function(
            ["w6 w7"] * 4, ["w8", "w9", "w10", "w11"]
        )
        for m in (model, model, other)
    ]
    assert values[0] == values[1]
    assert values[0] != values[2]
    pairs = reward("judge", local={"model": str(model), "max_tokens": 6}, max_invalid=1.0).function
    assert pairs(["w6"] * 2, ["w7", "w8"]) == [None, None]  # yes and no are no verdict on a pair


def test_a_question_without_room_for_a_reply_is_no_vote(tmp_path: Path) -> None:
    config = tiny_config(max_position_embeddings=60, vocab_size=120)
    small = save_tiny(tmp_path / "small", config, tokenizer=tokenizer_of(["user assistant", *VOTES], TEMPLATE))
    ask = local_model(str(small), max_tokens=6, precision="fp32")
    short, long = ([{"role": "user", "content": " ".join(["w6"] * n)}] for n in (5, 80))
    replies = ask([long, short, long])  # type: ignore[list-item]
    assert [r is None for r in replies] == [True, False, True]
    assert replies[1] == ask([short])[0]  # type: ignore[list-item]
    assert "leaves no room for 6 more in the judge's 60 positions" in ask.failures[0]
    judge = reward("principles", local={"model": str(small), "max_tokens": 6}, principles=PRINCIPLES).function
    with pytest.raises(UserError, match=r"votes are invalid.*no reply at all.*no room"):
        judge(["w6"], [" ".join(["w6"] * 80)])


@pytest.mark.parametrize(
    "settings, words",
    [
        ({}, "asks one judge, and none is given.*local: {model"),
        ({"local": {"model": "m"}, "endpoint": {"url": "http://x", "model": "m"}}, "several are given"),
        ({"local": "smollm2"}, "local of reward 'principles' is a block of settings, got 'smollm2'"),
        ({"local": {"modle": "m"}}, "no setting 'modle'.*Did you mean model"),
        ({"local": {}}, "needs the setting 'model'"),
        ({"local": {"model": "m", "chat_template": "no_such.jinja"}}, "there is no such template file"),
    ],
)
def test_mistakes_in_naming_the_judge_are_told(settings: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        reward("principles", principles=PRINCIPLES, **settings)
