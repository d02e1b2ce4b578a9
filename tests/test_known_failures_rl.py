"""A step of sampling and learning: what users of other libraries have met, as whole steps and whole runs of `tether grpo`."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, GPT2Config

from tests.grpo_runs import PRESETS, Train, even, gradients, model, moved, rollout, train, weights
from tests.test_known_failures_tokens import hello_tokenizer
from tests.test_sampler import forced
from tests.tiny import save_tiny, tiny_config
from tests.whole_runs import measured_alone, start, tokenizer_of, words, write_rows
from tests.whole_runs import weights as weights_in
from tether import rollout as attempts
from tether.algorithms import grpo
from tether.cli import run as tether
from tether.errors import UserError
from tether.loop import Tally
from tether.models import save_model
from tether.policy import Policy
from tether.recipe import RECIPES, GRPORecipe
from tether.reward import Rewards
from tether.rl_metrics import row_metrics, warn
from tether.rollout import Rollout
from tether.run import Run
from tether.token_batch import mini_batches, parts, token_batch

__all__ = ["model", "train"]  # fixtures


def finite(run: Run) -> bool:
    return all(math.isfinite(v) for m in run.metrics() for v in m.values() if isinstance(v, float))


# -- splits of a step (transformers#24725) -----------------------------------------------------------------------------


def mixed_groups() -> list[list[Rollout]]:
    """Three groups with answers of 1 to 40 tokens: one answer is cut off, one is unscored, one group agrees."""
    lengths = [[2, 40, 7, 3], [1, 25, 9, 4], [6, 6, 2, 11]]
    groups = []
    for g, row in enumerate(lengths):
        made = [rollout([10 + (7 * t + g) % 80 for t in range(n - 1)] + [2], (n * 3 % 5) / 4, group=g, sample=i) for i, n in enumerate(row)]
        groups.append(made)
    groups[0][1] = rollout(groups[0][1].tokens, 0.2, finish="length", sample=1)
    groups[1][2] = rollout(groups[1][2].tokens, None, group=1, sample=2)
    groups[2] = [rollout(r.tokens, 0.5, group=2, sample=i) for i, r in enumerate(groups[2])]
    return groups


@pytest.mark.parametrize("masked", [False, True], ids=["", "cut answers masked"])
@pytest.mark.parametrize("preset", PRESETS)
def test_any_split_of_a_step_gives_the_same_gradient(model: Path, preset: str, masked: bool) -> None:
    """One prompt at a time, two, or all at once; with a tie where the method has one, and off policy."""
    policy = Policy.load(model, precision="fp32")
    policy.model.double()
    beta = 0.1 if preset in ("grpo", "rloo", "reinforce", "reinforce_pp") else 0.0
    off: dict[str, Any] = {"overlong_cache": None} if preset == "dapo" else {}
    found = []
    for budget in (1, 90, 10_000):
        settings: dict[str, Any] = {
            "mask_truncated": masked,
            "num_generations": 4,
            "batch_size": 12,
            "tokens_per_micro_batch": budget,
            "beta": beta,
            **off,
        }
        recipe = GRPORecipe(model="m", data="d", preset=preset, updates_per_batch=2, **settings)
        batch = token_batch(mixed_groups(), mask_truncated=masked)
        old, ref = batch.sampled_logp.double(), batch.sampled_logp.double() - 0.05
        advantages = grpo.advantages_of(recipe, batch, old, ref if beta else None, beta, Rewards([even])).double()
        found.append(gradients(policy, recipe, batch, advantages, old=old, ref=ref if beta else None, beta=beta))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert float(one.norm()) > 0
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6 * float(one.abs().max()))


# -- masking of cut-off answers (trl#6369) -----------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_a_masked_answer_leaves_the_divisor_too(model: Path, aggregation: str) -> None:
    """Answers of 2, 3, 5 and 30 tokens, the last cut off and masked: the gradient of a batch of the first three."""
    policy = Policy.load(model, precision="fp32")
    recipe = GRPORecipe(model="m", data="d", aggregation=aggregation, mask_truncated=True, num_generations=4, batch_size=4)
    whole = [rollout([10 + t for t in range(n - 1)] + [2], float(n), sample=n) for n in (2, 3, 5)]
    cut = rollout(list(range(10, 40)), 0.0, finish="length", sample=30)
    advantages = torch.tensor([1.0, -0.5, 0.7, 9.0])
    four = gradients(policy, recipe, token_batch([[*whole, cut]], mask_truncated=True), advantages)
    three = gradients(policy, recipe, token_batch([whole], mask_truncated=True), advantages[:3])
    torch.testing.assert_close(four, three, rtol=1e-5, atol=1e-7)


def test_the_reward_of_a_masked_answer_stays_in_the_group() -> None:
    batch = token_batch([[rollout([10, 2], 1.0), rollout([10, 11], 0.0, finish="length", sample=1)]], mask_truncated=True)
    recipe = GRPORecipe(model="m", data="d", advantage="group_mean", num_generations=2, batch_size=2)
    assert grpo.advantages_of(recipe, batch, None, None, 0.0, Rewards([even])).tolist() == [0.5, -0.5]
    assert batch.active.tolist() == [True, False]


def test_a_step_with_everything_masked_moves_nothing_and_is_warned_of(train: Train, model: Path) -> None:
    run, _ = train([even], mask_truncated=True, max_completion_length=1, max_steps=3, weight_decay=0.1, learning_rate=1e-4)
    silent = [m for m in run.metrics() if m["completions/clipped_ratio"] == 1.0]
    assert silent, "one token is seldom the end mark"
    assert all(m["skipped"] == 1 and m["grad_norm"] == 0.0 and "no token" in m["skip_reason"] for m in silent)
    assert [n["step"] for n in run.notices() if n["kind"] == "nothing_trained"] == [m["step"] for m in silent]
    assert finite(run)
    if len(silent) == 3:
        assert moved(run, model) == 0.0


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


# -- nothing was learnt yet: ratio 1, KL 0 (trl#3500, #639) ------------------------------------------------------------

DROPOUT = {
    "llama": (tiny_config(attention_dropout=0.1), ("attention_dropout",)),
    "gpt2": (
        GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2),
        ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    ),
}


@pytest.mark.parametrize("name", DROPOUT)
@pytest.mark.parametrize("command", ["grpo", "ppo"])
def test_dropout_in_the_model_changes_nothing(train: Train, tmp_path: Path, command: str, name: str) -> None:
    config, keys = DROPOUT[name]
    folder = save_tiny(tmp_path / "dropout", config)
    settings: dict[str, Any] = {"beta": 0.1, "max_steps": 1, "learning_rate": 1e-12, "updates_per_batch": 2, "max_length": 32}
    run, _ = train([even], command=command, model=str(folder), **settings)
    [m] = run.metrics()
    assert m["ratio/max"] == pytest.approx(1, abs=1e-5)
    assert m["ratio/min"] == pytest.approx(1, abs=1e-5)
    assert m["kl"] == pytest.approx(0, abs=1e-5)
    kept = json.loads((run.folder / "model/config.json").read_text())
    assert all(kept[key] == 0.1 for key in keys), "the config on disk keeps its values"
    with pytest.raises(UserError, match="dropout"):
        RECIPES[command](model="m", data="d", lora={"dropout": 0.1})


def test_a_run_on_an_sft_adapter_is_tied_to_the_sft_model(train: Train, tmp_path: Path) -> None:
    """LLaMA-Factory#8459, torchtune#2272: not to the raw base, and the adapter on disk stays as it is."""
    base = save_tiny(tmp_path / "base", tiny_config(pad_token_id=None, initializer_range=0.4))
    blue = write_rows(tmp_path / "blue.jsonl", [{"prompt": words(i, 2), "completion": "w42"} for i in range(8)])
    sft, _ = start("sft", base, blue, tmp_path / "sft", lora={"rank": 4}, max_steps=30, learning_rate=1e-2)
    adapter = sft.folder / "model"
    before = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in adapter.iterdir() if p.is_file()}
    run, _ = train([even], model=str(adapter), preset="grpo", beta=0.1, max_steps=3, max_length=16, temperature=1.5)
    m = run.metrics()
    assert m[0]["kl"] == pytest.approx(0, abs=1e-5)
    assert m[0]["objective/kl"] == pytest.approx(0, abs=1e-5)
    assert m[-1]["objective/kl"] != 0
    assert {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in adapter.iterdir() if p.is_file()} == before
    names = set(weights_in(run.folder / "model"))
    assert names == set(weights_in(adapter)), "one adapter goes on"


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


# -- numbers at masked places (AReaL#1346, OpenRLHF#1240) --------------------------------------------------------------


@pytest.mark.parametrize("junk", [9.0, float("nan"), float("inf")])
@pytest.mark.parametrize("preset", PRESETS)
def test_what_stands_at_masked_places_changes_nothing(preset: str, junk: float) -> None:
    """Behind the ends, and at an answer that no reward could judge: loss, gradient, advantages and metrics, bit for bit."""
    beta = 0.1 if preset in ("grpo", "rloo", "reinforce", "reinforce_pp") else 0.0
    off: dict[str, Any] = {"overlong_cache": None} if preset == "dapo" else {}
    settings: dict[str, Any] = {"updates_per_batch": 2, "num_generations": 3, "batch_size": 6, "importance": "token_truncate", **off}
    recipe = GRPORecipe(model="m", data="d", preset=preset, beta=beta, **settings)
    groups = [
        [rollout([10, 11, 12, 2], 1.0), rollout([10, 2], 0.0, sample=1), rollout([10, 12, 2], None, sample=2)],
        [rollout([13, 2], 0.3, group=1), rollout([2], 0.9, group=1, sample=1), rollout([14, 2], 0.1, group=1, sample=2)],
    ]
    results = []
    for fill in (0.0, junk):
        batch = token_batch(groups)
        old, ref = batch.sampled_logp.clone() + 0.02, batch.sampled_logp - 0.1
        for matrix in (old, ref, batch.sampled_logp):
            matrix[~batch.mask] = fill
        advantages = grpo.advantages_of(recipe, batch, old, ref if beta else None, beta, Rewards([even]))
        weigh = grpo.mismatch_weights(old, batch.sampled_logp, batch.mask, recipe.importance)
        [mini] = mini_batches(batch, 1, "")
        [part] = parts(batch, mini.examples, 10**6)
        lp = torch.where(batch.mask, batch.sampled_logp + 0.05, fill)[part.rows].requires_grad_()
        loss, metrics = grpo.part_loss(recipe, batch, part, mini, lp, advantages, old, ref if beta else None, weigh, beta)
        loss.backward()
        results.append((loss.detach(), lp.grad, advantages, *metrics.values()))
    assert bool(torch.isfinite(results[0][0]))
    assert float(results[0][1].abs().sum()) > 0  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# -- a step that is not finite (trl#6702) ------------------------------------------------------------------------------


def test_a_step_that_is_not_finite_is_not_applied_and_is_seen(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = grpo.part_loss, []

    def poisoned(*arguments: Any) -> Any:
        calls.append(1)
        loss, metrics = real(*arguments)
        return (loss * math.nan if len(calls) == 3 else loss), metrics

    monkeypatch.setattr(grpo, "part_loss", poisoned)
    run, _ = train([even], max_steps=6, save_steps=1, keep_checkpoints=10, learning_rate=1e-3, n_prompts=24)
    assert [m["skipped"] for m in run.metrics()] == [0, 0, 1, 0, 0, 0]
    assert math.isnan(run.metrics()[2]["loss"])
    saved = [weights_in(folder) for folder in run.checkpoints()]
    assert all(torch.isfinite(t).all() for state in [*saved, weights(run)] for t in state.values())
    assert all(torch.equal(saved[1][n], saved[2][n]) for n in saved[1]), "step 3 moved nothing"
    assert tether(["report", str(run.folder)]) == 0
    assert "1 step of 6 could not be applied, at 3" in (run.folder / "report.html").read_text()


def test_an_infinite_reward_is_unscored_and_many_of_them_stop_the_run(train: Train) -> None:
    def infinite(share: int) -> Any:
        def some(prompts: Any, completions: Any, completion_ids: list[list[int]]) -> list[float]:
            return [math.inf if i < share else v for i, v in enumerate(even(prompts, completions, completion_ids))]

        return some

    run, _ = train([infinite(1)], max_steps=2)
    assert finite(run)
    assert all(r["total"] is None for r in run.rows(attempts.FILE) if r["sample"] == 0 and r["group"] % 8 == 0)
    assert any("gave NaN or inf for 1 of 16" in n["text"] for n in run.notices())
    with pytest.raises(UserError, match=r"reward 'some' gave NaN or inf for 4 of 16.*stops the run"):
        train([infinite(4)], max_steps=2)


# -- half-precision weights at a small learning rate (AReaL#1634) ------------------------------------------------------


def test_small_steps_move_half_precision_runs(train: Train, model: Path) -> None:
    """At a learning rate of 1e-6 a bfloat16 weight would stay where it is: trained weights are float32 whatever the matmuls run in."""
    run, _ = train([even], precision="bf16", learning_rate=1e-6, max_steps=3, lr_scheduler="constant")
    start, end = load_file(model / "model.safetensors"), weights(run)
    changed = [(end[n].float() != w.float()).float().mean() for n, w in start.items() if n in end]
    assert min(map(float, changed)) > 0.9


# -- adapters and resuming (lerobot#3459, peft#574) --------------------------------------------------------------------


def test_a_run_with_another_rank_is_not_continued(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    run, _ = train([even], lora={"rank": 4}, max_steps=2, save_steps=1)
    (run.folder / "summary.json").unlink()
    path = run.folder / "recipe.yaml"
    recipe = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**recipe, "lora": {**recipe["lora"], "rank": 8}, "max_steps": 4, "rewards": ["format"]}))
    before = {p: p.read_bytes() for p in run.folder.rglob("*.safetensors")}
    assert tether(["resume", str(run.folder)]) == 2
    told = capsys.readouterr().err
    assert "rank 4" in told
    assert "rank 8" in told
    assert "Traceback" not in told
    assert before == {p: p.read_bytes() for p in run.folder.rglob("*.safetensors")}


# -- memory (trl#3678, OpenRLHF#718) -----------------------------------------------------------------------------------

MEMORY = """
from tether.algorithms import grpo
from tether.recipe import GRPORecipe
from tether.run import Run
recipe = GRPORecipe(model=str(model), data=str(data), run=str(run_folder), precision="fp32", trackers=[], batch_size=2, num_generations=2, max_steps=1,
    max_completion_length=512, max_length=1024, tokens_per_micro_batch=10_000, beta=0.1, updates_per_batch=2, log_every=1000)
with Run.create(run_folder, recipe) as run:
    grpo.train(recipe, run, [lambda prompts, completions, completion_ids: [float(len(i)) + i[0] for i in completion_ids]])
row = run.metrics()[0]
print(json.dumps([peak() - marks[0], row["completions/mean_length"], row["grad_norm"], row["kl"]]))
"""


@pytest.mark.slow
def test_a_whole_run_with_a_large_vocabulary_never_holds_the_table_of_scores(tmp_path: Path) -> None:
    """Vocabulary 150,000, width 64, two answers of 512 tokens, sampled, scored by policy and reference, and learnt from twice: a
    float32 table is 586 MiB, and the plain way keeps three to four. The run stays below 1.5 of them over the loaded model."""
    tokenizer = tokenizer_of([f"v{i}" for i in range(149_997)])
    config = tiny_config(150_000, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128, initializer_range=0.02)
    folder = save_tiny(tmp_path / "model", config, tokenizer=tokenizer)
    data = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "v1 v2 v3"}])
    extra, length, norm, kl = measured_alone(MEMORY, folder, data, tmp_path / "run", tmp_path / "cache")
    assert length > 500
    assert norm > 0
    assert math.isfinite(kl)
    # Gradients, moments and the reference's copy of the weights (4 x 37 MiB), keys and values, and the checkpoint's copy are in it.
    assert extra < 1.5 * 586, f"{extra:.0f} MiB"
