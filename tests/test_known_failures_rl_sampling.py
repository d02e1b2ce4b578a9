"""From sampling to the update: what users of other libraries have met, as whole runs of `tether grpo`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from tests.grpo_runs import PRESETS, Train, even, finite, model, rollout, train
from tests.test_known_failures_tokens import hello_tokenizer
from tests.test_sampler import forced
from tests.tiny import save_tiny
from tests.whole_runs import write_rows
from tether import rollout as attempts
from tether.algorithms import grpo
from tether.cli import run as tether
from tether.errors import UserError
from tether.loop import Tally
from tether.models import save_model
from tether.recipe import RECIPES, GRPORecipe
from tether.rl_metrics import row_metrics, warn
from tether.rollout import Rollout
from tether.run import Run
from tether.token_batch import token_batch

__all__ = ["model", "train"]  # fixtures

# -- several end marks (trl#7039, unsloth#416) -------------------------------------------------------------------------


def test_a_run_ends_answers_at_either_mark_and_trains_it(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second mark is known to the generation settings alone."""
    folder = save_tiny(tmp_path / "two")
    GenerationConfig(eos_token_id=[2, 77]).save_pretrained(folder)
    trained: list[list[int]] = []
    watch_targets(monkeypatch, trained)
    run, _ = train([even], model=str(folder), mask_truncated=True, max_completion_length=40, max_steps=2, learning_rate=1e-5)
    made = [Rollout.from_row(row) for row in run.rows(attempts.FILE)]
    assert {r.tokens[-1] for r in made if r.finished} == {2, 77}, "the run is long enough to see both"
    for r in made:
        assert not {2, 77} & set(r.tokens[:-1]), "nothing follows a mark"
        assert r.finished == (r.tokens[-1] in (2, 77))
        assert r.n_trained == len(r.tokens)
        assert "77" not in r.text.split()
    for step, m in enumerate(run.metrics(), start=1):
        cut = [not r.finished for r, row in zip(made, run.rows(attempts.FILE), strict=True) if row["step"] == step]
        assert m["completions/clipped_ratio"] == pytest.approx(sum(cut) / len(cut))
    assert sorted(t for t in trained if t[-1] in (2, 77)) == sorted(trained), "what is masked is the cut ones"
    assert len(trained) == sum(r.finished for r in made)


def watch_targets(monkeypatch: pytest.MonkeyPatch, into: list[list[int]]) -> None:
    """Collects the token ids that the update is made of, answer by answer."""
    real = grpo.parts

    def spying(batch: Any, examples: Any, *more: Any) -> Any:
        for part in real(batch, examples, *more):
            into.extend(part.packed.targets[part.packed.answer == a].tolist() for a in range(part.packed.n_answers))
            yield part

    monkeypatch.setattr(grpo, "parts", spying)


# -- ids are never decoded and encoded again (trl#5224, rllm#816) ------------------------------------------------------


def test_a_run_trains_the_sampled_ids_though_their_text_would_be_encoded_otherwise(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy says "he" and "llo", two tokens whose text is the one token "hello"."""
    net = forced({1: 3, 3: 4, 4: 2}, vocabulary=6)
    folder = save_model(net, hello_tokenizer(), tmp_path / "hello")
    data = write_rows(tmp_path / "x.jsonl", [{"prompt": "x"}])
    trained: list[list[int]] = []
    watch_targets(monkeypatch, trained)

    def alternate(prompts: Any, completions: list[str]) -> list[float]:
        assert completions == ["hello"] * 4
        return [0.0, 1.0, 0.0, 1.0]

    run, _ = train([alternate], model=str(folder), data=str(data), updates_per_batch=2, max_steps=1, learning_rate=1e-12)
    assert trained == [[3, 4, 2]] * 8, "two updates of four answers"
    [m] = run.metrics()
    assert m["ratio/min"] == pytest.approx(1, abs=1e-5)
    assert m["ratio/max"] == pytest.approx(1, abs=1e-5)
    assert m["sampling/sampling_logp_difference/max"] < 1e-5


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_trained_is_what_was_drawn_id_by_id(train: Train, monkeypatch: pytest.MonkeyPatch, preset: str) -> None:
    trained: list[list[int]] = []
    watch_targets(monkeypatch, trained)
    run, _ = train([even], preset=preset, dynamic_sampling=False, max_steps=1)
    drawn = [r["tokens"] for r in run.rows(attempts.FILE)]
    assert sorted(trained) == sorted(drawn)


# -- temperature and settings that bend the sampling (trl#3029, #4159, #1017) -----------------------------------------


@pytest.mark.parametrize("temperature", [0.6, 1.4])
@pytest.mark.parametrize("preset", ["grpo", "rloo"])
def test_ratios_and_kl_begin_at_nothing_at_any_temperature(train: Train, temperature: float, preset: str) -> None:
    run, _ = train([even], preset=preset, temperature=temperature, max_steps=1, updates_per_batch=2, learning_rate=1e-12)
    m = run.metrics()[0]
    assert m["ratio/max"] == pytest.approx(1, abs=1e-5)
    assert m["ratio/min"] == pytest.approx(1, abs=1e-5)
    assert m["sampling/sampling_logp_difference/max"] < 1e-5
    assert m["kl"] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("setting", ["top_k", "top_p", "repetition_penalty", "min_new_tokens"])
@pytest.mark.parametrize("command", ["grpo", "ppo"])
def test_settings_that_bend_the_sampling_are_refused_by_name(command: str, setting: str) -> None:
    with pytest.raises(UserError, match=f"{setting}.*no such setting"):
        RECIPES[command](model="m", data="d", **{setting: 5})


def test_generation_settings_of_the_model_do_not_bend_the_sampling(train: Train, tmp_path: Path, model: Path) -> None:
    """They are meant for talking to a model: with them, log-probabilities would be of another distribution than the one drawn from."""
    folder = save_tiny(tmp_path / "bent")
    bent = GenerationConfig(eos_token_id=2, do_sample=True, temperature=0.3, top_k=1, top_p=0.1, repetition_penalty=9.0, min_new_tokens=5)
    bent.save_pretrained(folder)
    settings: dict[str, Any] = {"temperature": 1.4, "max_steps": 1, "learning_rate": 1e-12, "updates_per_batch": 2, "beta": 0.1}
    run, _ = train([even], model=str(folder), **settings)
    plain, _ = train([even], model=str(model), **settings)
    assert [r["tokens"] for r in run.rows(attempts.FILE)] == [r["tokens"] for r in plain.rows(attempts.FILE)]
    [m] = run.metrics()
    assert m["ratio/max"] == pytest.approx(1, abs=1e-5)
    assert m["kl"] == pytest.approx(0, abs=1e-5)


# -- a KL that cannot be (trl#1017, LLaMA-Factory#664, trl#203) --------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_answers_of_one_token_give_finite_numbers(train: Train, tmp_path: Path, preset: str) -> None:
    """Among them the end mark alone, from a policy that likes to stop at once."""
    net = forced({10: 2}, vocabulary=100)
    with torch.no_grad():
        net.lm_head.weight[2, 10] = 5.0
    folder = save_tiny_net(net, tmp_path / "stops")
    data = write_rows(tmp_path / "ten.jsonl", [{"prompt": "w10"}] * 4)
    more: dict[str, Any] = {"beta": 0.1} if preset in ("grpo", "rloo", "reinforce", "reinforce_pp") else {}

    def ends(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float]:
        return [float(ids == [2]) for ids in completion_ids]

    off: dict[str, Any] = {"overlong_cache": None, "dynamic_sampling": False} if preset == "dapo" else {}
    settings: dict[str, Any] = {
        "preset": preset,
        "max_completion_length": 3,
        "updates_per_batch": 2,
        "max_steps": 3,
        "temperature": 1.3,
        **off,
    }
    run, _ = train([ends], model=str(folder), data=str(data), **settings, **more)
    made = [r["tokens"] for r in run.rows(attempts.FILE)]
    assert [2] in made
    assert finite(run)
    assert all(r["advantage"] is None or math.isfinite(r["advantage"]) for r in run.rows(attempts.FILE))


def save_tiny_net(net: Any, folder: Path) -> Path:
    from tests.tiny import tiny_tokenizer

    return save_model(net, tiny_tokenizer(), folder)


def test_the_kl_is_over_real_tokens_only_and_one_far_below_zero_is_named_with_its_step(tmp_path: Path) -> None:
    """Lengths 1 and 4: the means of five tokens and of two answers, worked by hand, whatever stands behind the end."""
    batch = token_batch([[rollout([2], 1.0), rollout([10, 11, 12, 2], 0.0, sample=1)]])
    lp = torch.tensor([[-1.0, 99.0, 99.0, 99.0], [-1.0, -2.0, -3.0, -4.0]])
    ref = torch.tensor([[-0.5, -7.0, -7.0, -7.0], [-0.5, -1.0, -2.0, -3.0]])
    tally = Tally()
    row_metrics(tally, batch, torch.tensor([0, 1]), lp, None, ref)
    found = tally.means()
    assert found["kl/k1"] == pytest.approx(-(0.5 + 0.5 + 1 + 1 + 1) / 5)
    assert found["objective/kl"] == pytest.approx(-(0.5 + 3.5) / 2)
    recipe = GRPORecipe(model="m", data="d", num_generations=2, batch_size=2)
    with Run.create(tmp_path / "run", recipe) as run:
        warn(run, batch, torch.tensor([1.0, -1.0]), 6, found)
        [notice] = run.notices()
    assert notice["kind"] == "negative_kl"
    assert notice["step"] == 7
    assert "in step 7" in notice["text"]
    assert "generation settings" in notice["text"]


# -- cut off before anything can be earned (trl#5697) ------------------------------------------------------------------


def test_answers_that_are_cut_off_are_warned_of_with_the_limit_and_lead_the_report(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """The task needs more tokens than the limit allows."""

    def long(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float]:
        return [float(len(ids) >= 40) for ids in completion_ids]

    run, _ = train([long], max_completion_length=16, max_steps=3)
    assert all(m["reward"] == 0 and m["reward_std"] == 0 for m in run.metrics())
    told = [n for n in run.notices() if n["kind"] == "cut_off"]
    assert [n["step"] for n in told] == [1, 2, 3]
    assert "max_completion_length 16" in told[0]["text"]
    assert "%" in told[0]["text"]
    assert capsys.readouterr().err.count("were cut off") == 1, "said once"
    assert tether(["report", str(run.folder)]) == 0
    page = (run.folder / "report.html").read_text()
    short = page[page.index("In short") :]
    assert short.index("cut off at max_completion_length=16") < short.index("all answers earned the same")
