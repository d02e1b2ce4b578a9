"""`tether verify`: every recipe that is shipped holds, what stands in is said, and a mistake is one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from tests.architectures import CONFIGS, SIZE, VOCABULARY
from tests.tiny import save_tiny, tiny_tokenizer
from tests.whole_runs import words, write_rows
from tether import cli, packing
from tether.algorithms import grpo
from tether.config import configure
from tether.dpo_recipe import LOSS_NAMES
from tether.grpo_recipe import PRESETS
from tether.policy import Policy
from tether.recipe import DPORecipe, GRPORecipe, PPORecipe, RewardRecipe
from tether.verify import formulas, losses, policy_formulas, subject
from tether.verify.check import Check, Found, judged
from tether.verify.exact import rule_of
from tether.verify.fixed_points import Rule
from tether.verify.lines import LINES, built_in
from tether.verify.small import save_small

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def verified(given: list[str], capsys: Any) -> tuple[int, dict[str, Any]]:
    code = cli.run(["verify", *given, "--json"])
    told = capsys.readouterr()
    return code, json.loads(told.out) if told.out else {"error": told.err}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_that_is_shipped_holds(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """With its own settings, and its own rows where they are shipped, on a stand-in for the model."""
    monkeypatch.chdir(ROOT)
    recipe = configure(path).recipe
    more = [] if recipe.model is None else ["model=no such model", "precision=fp32"]
    code, told = verified([str(path), *more], capsys)
    assert code == 0, [line for line in told["recipes"][0]["lines"] if line["verdict"] == "fails"]
    lines = {line["name"]: line for line in told["recipes"][0]["lines"]}
    assert list(lines) == [line.name for line in LINES]
    for line in lines.values():
        assert line["detail"], "a line that is left out says why"
        assert (line["difference"] is None) == (line["verdict"] == "left out")
    if recipe.model is not None:
        assert told["recipes"][0]["notes"][0] == "model: a tiny random Llama, because no such model is not on this machine"
        assert {n for n, line in lines.items() if line["verdict"] == "left out"} <= LEFT_OUT_AT_MOST[recipe.command]


LEFT_OUT_AT_MOST = {
    "sft": {"shared = repeated", "sampling = training", "reference", "advantage = formula", "exact policy", "bf16"},
    "reward": {"chunked = whole", "sampling = training", "reference", "advantage = formula", "exact policy", "bf16"},
    "dpo": {"shared = repeated", "sampling = training", "reference", "advantage = formula", "exact policy", "bf16"},
    "grpo": {"reference", "bf16"},
    "ppo": {"reference", "bf16"},
}


# -- what is verified with ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


def turns(*contents: str) -> dict[str, Any]:
    return {"messages": [{"role": "user" if i % 2 == 0 else "assistant", "content": c} for i, c in enumerate(contents)]}


CHATS = [turns(words(i, 3), words(i + 5, 4), words(i + 9, 2), words(i + 1, 1 + i % 4)) for i in range(6)]


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_a_model_and_rows_that_are_here_are_used_themselves(train_on: str, model: Path, tmp_path: Path, capsys: Any) -> None:
    data = write_rows(tmp_path / "chats.jsonl", CHATS)
    settings = [f"train_on={train_on}", "lora={rank: 4, dropout: 0.1}", "precision=fp32"]
    code, told = verified(["sft", f"model={model}", f"data={data}", *settings], capsys)
    assert code == 0, told
    assert told["recipes"][0]["notes"] == [f"model: {model} itself", f"rows: 6 short rows of the first 6 of {data}"]
    answers = {"assistant": 6, "last": 6, "all": 6}[train_on]
    first = told["recipes"][0]["lines"][0]
    assert first["detail"].endswith(f"are the words of {answers} answers and their ends")


def test_a_model_of_some_size_is_checked_itself_and_trains_as_a_small_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "TINY", 1000.0)
    place = save_tiny(tmp_path / "m", Qwen3Config(**{**SIZE, "head_dim": 12, "hidden_size": 48}))
    made = subject.make(DPORecipe(model=str(place), data="d"), tmp_path / "v")
    assert made.main.name == str(place)
    assert str(made.small) == "a small random qwen3 with the same tokenizer"
    assert made.small.why == f"{place} has {sum(p.numel() for p in made.model.model.parameters()):,} parameters"
    assert made.load(made.small).model.config.head_dim == 8
    monkeypatch.setattr(subject, "LARGE", 2000.0)
    assert subject.make(DPORecipe(model=str(place), data="d"), tmp_path / "w").main.name != str(place)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi3", "gpt2", "opt", "mixtral", "gpt_neox", "cohere", "smollm3"])
def test_an_architecture_is_narrowed_or_stood_in_for(name: str, tmp_path: Path) -> None:
    made = save_small(CONFIGS[name](), tiny_tokenizer(VOCABULARY), tmp_path / "m")
    assert made is not None
    policy = Policy.load(made, precision="fp32")
    assert policy.model.config.model_type == CONFIGS[name]().model_type
    assert sum(p.numel() for p in policy.model.parameters()) < 200_000


def test_a_long_row_that_was_cut_is_no_fault(model: Path, tmp_path: Path, capsys: Any) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": words(i, 4), "completion": words(i, 9)} for i in range(3)])
    code, told = verified(["sft", f"model={model}", f"data={data}", "max_length=8", "precision=fp32"], capsys)
    assert code == 0, told


@pytest.mark.parametrize("precision, verdict", [("bf16", "reported"), ("fp32", "left out")])
def test_bfloat16_is_reported_and_not_judged(precision: str, verdict: str, capsys: Any) -> None:
    code, told = verified(["sft", f"precision={precision}"], capsys)
    last = told["recipes"][0]["lines"][-1]
    assert (code, last["name"], last["verdict"], last["limit"]) == (0, "bf16", verdict, None)
    assert precision == "fp32" or last["difference"] > 1e-4


# -- what is printed ---------------------------------------------------------------------------------------------------


def test_without_a_recipe_every_method_is_verified(capsys: Any) -> None:
    assert cli.run(["verify"]) == 0
    told = capsys.readouterr().out
    assert list(built_in()) == ["sft", "reward", "dpo", "kto", "grpo", "ppo"]
    for name in built_in():
        assert f"\n{name}\n" in f"\n{told}"
    n = told.count("  holds     ")
    assert told.splitlines()[-1] == f"all {n} lines hold"
    assert n > 55
    assert "left out  nothing is sampled" in told


def test_a_line_that_stops_in_the_middle_does_not_hold(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of luck\nat great length")

    monkeypatch.setattr(packing.Packed, "sum_by_answer", broken)
    assert cli.run(["verify", "dpo", "precision=fp32"]) == 1
    told = capsys.readouterr().out
    assert "stopped by RuntimeError: out of luck" in told
    assert "Traceback" not in told
    assert " does not hold: stopped by RuntimeError" in told.splitlines()[-1]


@pytest.mark.parametrize(
    "words_, told",
    [
        (["nowhere.yaml"], "there is no such recipe"),
        (["dpo", "betta=0.1"], "Did you mean beta"),
        (["sft", "data=BROKEN"], "BROKEN:1"),
        (["sft", "chat_template=no.jinja"], "there is no such template file"),
    ],
)
def test_a_users_mistake_is_one_sentence(words_: list[str], told: str, tmp_path: Path, capsys: Any) -> None:
    broken = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": 3}])
    words_ = [w.replace("BROKEN", str(broken)) for w in words_]
    assert cli.run(["verify", *words_]) == 2
    error = capsys.readouterr().err
    assert told.replace("BROKEN", str(broken)) in error
    assert "Traceback" not in error


def test_a_difference_that_is_no_number_does_not_hold() -> None:
    assert judged(Found(float("nan"), 1.0, "")) == "fails"
    assert judged(Found(float("inf"), 1.0, "")) == "fails"
    assert judged(Found(0.5, None, "")) == "reported"
    assert Check("n", "c", "fails", float("inf"), 1.0, "d").row()["difference"] is None


# -- the formulas reach what they should -------------------------------------------------------------------------------

PAIRWISE = [name for name in LOSS_NAMES if name != "kto"]
POLICY: list[dict[str, Any]] = [
    *({"preset": name} for name in PRESETS),
    *(
        {"preset": "grpo", "beta": 0.1, **given}
        for given in ({"kl_kind": "k2"}, {"kl_unbiased": True}, {"kl_kind": "k1", "kl_unbiased": True})
    ),
    *({"surrogate": name, "aggregation": "seq-mean-token-mean", "beta": 0.1} for name in ("gspo_token", "seq_ratio")),
    *({"importance": name, "importance_max": 1.2} for name in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")),
    {"importance": "geo_mask_token_weight", "importance_min": 0.5},
    {"dual_clip": 2.0, "mask_truncated": True},
    {"advantage": "batch_std"},
    {"advantage": "reinforce_pp_baseline", "std": "population"},
    {"reward_mixture": "normalize_then_sum"},
    {"preset": "reinforce_pp", "mask_truncated": True},
]
CRITIC: list[dict[str, Any]] = [
    {},
    {"gamma": 0.9, "beta": 0.0, "whiten_advantages": False},
    {"whiten_rewards": True, "num_generations": 4},
    {"score_scaling": "running", "score_clip": 0.5},
    {"missing_end_penalty": 1.0, "value_clip": None, "score_clip": None},
    {"dual_clip": 2.0, "importance": "token_truncate", "mask_truncated": True},
]


def stand_in(recipe: Any) -> Any:
    """The two lines about formulas look at nothing but the recipe."""
    return subject.Subject(recipe, Path(), *[subject.Place("", "", None)] * 2, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("loss_type", PAIRWISE)
def test_every_loss_on_pairs_is_its_formula(loss_type: str) -> None:
    found = losses.loss_is_its_formula(stand_in(DPORecipe(model="m", data="d", loss_type=loss_type)))
    assert found.difference < 1e-6, found


@pytest.mark.parametrize("given", POLICY, ids=str)
def test_every_method_that_samples_is_its_formulas(given: dict[str, Any]) -> None:
    whole = stand_in(GRPORecipe(model="m", data="d", num_generations=4, batch_size=16, **given))
    for line in (losses.loss_is_its_formula, losses.advantages_are_their_formula):
        assert line(whole).difference < 1e-6, line(whole)


@pytest.mark.parametrize("given", CRITIC, ids=str)
def test_ppo_is_its_formulas(given: dict[str, Any]) -> None:
    whole = stand_in(PPORecipe(model="m", data="d", batch_size=16, **given))
    for line in (losses.loss_is_its_formula, losses.advantages_are_their_formula):
        assert line(whole).difference < 1e-6, line(whole)


@pytest.mark.parametrize("setting", ["eps_low", "eps_high", "dual_clip", "beta"])
@pytest.mark.parametrize("given", [{"preset": "grpo"}, {"preset": "gspo", "beta": 0.1}, {"preset": "dapo", "beta": 0.1}], ids=str)
def test_every_setting_of_a_clipped_loss_would_be_missed(setting: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up attempts lie beyond each bound, good and bad ones alike."""
    recipe = GRPORecipe(model="m", data="d", num_generations=4, batch_size=16, dual_clip=2.0, **given)
    real = grpo.policy_loss
    neutral = {"eps_low": 0.999, "eps_high": 1e6, "dual_clip": None, "beta": 0.0}[setting]
    name = "kl_coef" if setting == "beta" else setting
    monkeypatch.setattr(grpo, "policy_loss", lambda *args, **kwargs: real(*args, **{**kwargs, name: neutral}))
    assert losses.loss_is_its_formula(stand_in(recipe)).difference > 1e-3


def test_the_readable_reward_model_is_its_formula() -> None:
    recipe = RewardRecipe(data="d", features=["a", "b"], feature_l2=0.1)
    assert losses.loss_is_its_formula(stand_in(recipe)).difference < 1e-9


def test_the_formulas_say_what_the_worked_examples_say() -> None:
    """dpo: d = (-10 + 11) - (-12 + 11) = 2, -log s(0.2) = 0.598139. gae by hand: lam 0.5, rewards 0 and 1, values 0.5 and 0.25."""
    assert formulas.preference("dpo", [formulas.Pair(-10, -12, -11, -11, 4, 5)], {"beta": 0.1}) == pytest.approx(0.598139, abs=1e-6)
    assert formulas.kto([1.0], [0.0], [True], 0.0, beta=1.0, desirable=2.0, undesirable=1.0) == pytest.approx(2 * 0.268941, abs=1e-6)
    recipe = PPORecipe(model="m", data="d", lam=0.5, beta=0.0, whiten_advantages=False)
    one = policy_formulas.Try(0, 1.0, old=[0.0, 0.0], ref=[0.0, 0.0], old_values=[0.5, 0.25])
    # deltas: 0 + 0.25 - 0.5 = -0.25 and 1 - 0.25 = 0.75; A = -0.25 + 0.5 x 0.75 = 0.125 and 0.75
    assert policy_formulas.gae(recipe, [one]) == ([[0.125, 0.75]], [[0.625, 1.0]])
    assert policy_formulas.clipped(1.5, 1.0, 0.2, 0.2, None) == pytest.approx(1.2)
    assert policy_formulas.clipped(0.5, -1.0, 0.2, 0.2, None) == pytest.approx(-0.8)
    assert policy_formulas.clipped(5.0, -1.0, 0.2, 0.2, 3.0) == pytest.approx(-3.0)


def test_a_tie_that_has_no_known_fixed_point_is_said() -> None:
    assert rule_of(GRPORecipe(model="m", data="d", preset="dr_grpo", beta=0.1)) == Rule("k3")
    assert rule_of(GRPORecipe(model="m", data="d", preset="rloo")) == Rule("reward")
    assert rule_of(GRPORecipe(model="m", data="d", surrogate="seq_ratio", aggregation="seq-mean-token-mean", beta=0.1)) is None
