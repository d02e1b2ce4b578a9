"""From rows and samples to the tokens that are trained: what other libraries mask wrongly, encode twice, or lose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from tests.test_sampler import SIZES, forced, make
from tests.tiny import save_tiny
from tests.whole_runs import start, words, write_rows
from tether.batch import Example
from tether.chat import Codec
from tether.cli import run as tether
from tether.engine import Engine
from tether.engines.local import Completion, LocalSampler, Request
from tether.engines.sampling import Sampling
from tether.errors import UserError
from tether.packing import pack
from tether.rollout import from_sampled, group_example, read
from tether.run import Run


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


# -- rows with nothing to train on (trl#1820, #1920) -------------------------------------------------------------------


def chats(good: int, silent: int, empty: int) -> list[dict[str, Any]]:
    def turn(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": text}

    asked = [[turn("user", words(i, 3))] for i in range(good + silent + empty)]
    rows = [*([*a, turn("assistant", "w7 w8")] for a in asked[:good]), *asked[good : good + silent]]
    rows += [[*a, turn("assistant", "")] for a in asked[good + silent :]]
    return [{"messages": turns} for turns in rows]


def test_rows_without_a_trained_token_refuse_the_run_before_its_first_step(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_rows(tmp_path / "rows.jsonl", chats(good=10, silent=2, empty=1))
    arguments = ["--model", str(model), "--data", str(data), "--run", str(tmp_path / "run"), "--steps", "1"]
    assert tether(["sft", *arguments]) == 2
    told = capsys.readouterr().err
    assert "3 of 13 rows have nothing to train on" in told
    assert f"{data}:11" in told
    assert "on_bad_rows=drop" in told
    assert Run.open(tmp_path / "run").metrics() == []
    assert tether(["data", str(data), "--model", str(model)]) == 2, "the look at the data says the same"

    # Whoever accepts the loss gets the run, with every lost row counted and listed.
    assert tether(["sft", *arguments, "on_bad_rows=drop"]) == 0
    run = Run.open(tmp_path / "run")
    assert [n["text"].partition(": ")[0] for n in run.notices() if n["kind"] == "no_answer"] == [f"{data}:{i}" for i in (11, 12, 13)]
    assert tether(["report", str(run.folder)]) == 0
    assert "3 rows left out" in (run.folder / "report.html").read_text()


def test_a_small_share_of_such_rows_is_counted_and_the_run_goes_on(model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", chats(good=39, silent=1, empty=0))
    run, summary = start("sft", model, data, tmp_path / "run", max_steps=1)
    assert summary["rows"] == 39
    assert sum(n["kind"] == "no_answer" for n in run.notices()) == 1


def test_a_template_that_does_not_suit_the_rows_is_refused_under_any_policy(model: Path, tmp_path: Path) -> None:
    """A template that leaves every answer out would train on nothing."""
    template = tmp_path / "odd.jinja"
    template.write_text(
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}{{ m['content'] }} </s> {% endfor %}"
    )
    rows = [{"messages": [{"role": "system", "content": "w9"}, *row["messages"]]} for row in chats(12, 0, 0)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match="12 of 12 rows have nothing to train on"):
        start("sft", model, data, tmp_path / "run", chat_template=str(template), on_bad_rows="drop")


# -- several end marks (trl#7039, unsloth#416) -------------------------------------------------------------------------


class TwoEnds:
    """Stands for a codec whose model stops at either of two tokens."""

    end_ids = frozenset({2, 77})

    def decode(self, ids: Any, *, control: bool = False) -> str:
        return " ".join(f"t{i}" for i in ids)


def test_either_end_mark_finishes_a_completion_and_is_trained() -> None:
    """One completion ends with each mark, one is cut off: 2 of 3 finished; what is trained ends with the mark."""
    net = forced({10: 11, 11: 2, 20: 21, 21: 77, 30: 30})
    sampler = LocalSampler(net, TwoEnds.end_ids, precision="fp32")
    made = sampler.sample([Request([p], Sampling(5, temperature=0)) for p in (10, 20, 30)])
    rollouts = [rollout(c, [p], i) for i, (c, p) in enumerate(zip(made, (10, 20, 30), strict=True))]
    assert [r.finished for r in rollouts] == [True, True, False]
    for r, end in zip(rollouts[:2], (2, 77), strict=True):
        packed = pack([group_example([r])])
        assert packed.targets.tolist()[-1] == end
        assert r.n_trained == len(packed.targets) == 2
        assert "t2" not in r.text.split()
        assert "t77" not in r.text.split()


def test_tokens_after_the_first_end_mark_are_never_trained() -> None:
    """Another engine may hand on what it drew after the end."""
    drawn = Completion(0, 0, [11, 77, 5, 2, 6], [-0.5] * 5, [-0.5] * 5, "stop", None)
    r = rollout(drawn, [10], 0)
    assert r.trained == [True, True, False, False, False]
    assert r.text == "t11"
    assert pack([group_example([r])]).targets.tolist() == [11, 77]


def rollout(sampled: Any, prompt: list[int], number: int) -> Any:
    return from_sampled(sampled, prompt="p", prompt_ids=prompt, prompt_id=number, group=number, codec=TwoEnds(), policy_version=0)


# -- ids are never decoded and encoded again (trl#5224, rllm#816) ------------------------------------------------------


def hello_tokenizer() -> Any:
    """'hello' is one token, and 'he' with 'llo' two that decode to the same text."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(
        models.WordPiece({"<unk>": 0, "x": 1, "</s>": 2, "he": 3, "llo": 4, "hello": 5}, unk_token="<unk>", continuing_subword_prefix="")
    )
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_the_update_sees_the_sampled_ids_and_its_first_ratio_is_one(temperature: float) -> None:
    tokenizer = hello_tokenizer()
    net = forced({1: 3, 3: 4, 4: 2}, vocabulary=6)
    codec = Codec(tokenizer)
    made = LocalSampler(net, codec, precision="fp32").sample([Request([1], Sampling(5, temperature=temperature), n=3)])
    group = [from_sampled(c, prompt="x", prompt_ids=[1], prompt_id=0, group=0, codec=codec, policy_version=0) for c in made]
    assert group[0].tokens == [3, 4, 2]
    assert tokenizer.encode(group[0].text, add_special_tokens=False) == [5], "the text would be encoded otherwise"
    example = group_example(group)
    assert example.answers == [r.tokens for r in group]
    packed = pack([example])
    logps = Engine(net, precision="fp32").logprobs(packed, temperature)
    old = torch.tensor([x for r in group for x in r.logps])
    assert float((logps.detach() - old).exp().sub(1).abs().max()) < 1e-5


def test_a_source_of_texts_without_ids_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").write_text(json.dumps({"prompt": "x", "text": "hello"}) + "\n")
    with pytest.raises(UserError, match="this line is not a rollout"):
        list(read(tmp_path / "rollouts.jsonl"))
    with pytest.raises((AttributeError, TypeError)):
        from_sampled("hello", prompt="x", prompt_ids=[1], prompt_id=0, group=0, codec=TwoEnds(), policy_version=0)  # type: ignore[arg-type]


# -- rows do not feel their neighbours (unsloth#3699, transformers#18388) ----------------------------------------------

POSITIONS = {
    "learned": GPT2Config(vocab_size=150, n_embd=32, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2),
    "rotary": LlamaConfig(**SIZES),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_short_and_long_prompts_together_are_each_alone(name: str) -> None:
    """Prompts of 3 and 25 tokens: the same greedy tokens, and log-probabilities of fixed completions within 1e-4."""
    net = make(POSITIONS[name])
    prompts = [list(range(5, 8)), list(range(20, 45))]
    requests = [Request(p, Sampling(12, temperature=0)) for p in prompts]
    together = LocalSampler(net, [2], precision="fp32").sample(requests)
    alone = [LocalSampler(net, [2], precision="fp32").sample([r])[0] for r in requests]
    assert [c.tokens for c in together] == [c.tokens for c in alone]

    engine = Engine(net, precision="fp32")
    rows = [Example(p, [[30, 31, 32, 2]], [[True] * 4]) for p in prompts]
    both = engine.logprobs(pack(rows)).detach()
    each = torch.cat([engine.logprobs(pack([r])).detach() for r in rows])
    torch.testing.assert_close(both, each, rtol=0, atol=1e-4)
    plain = torch.cat([net(torch.tensor([r.prompt + r.answers[0]])).logits[0, len(r.prompt) - 1 : -1].log_softmax(-1) for r in rows])
    torch.testing.assert_close(both, plain[range(8), [30, 31, 32, 2] * 2].detach(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_padding_side_of_the_tokenizer_file_plays_no_part(model: Path, tmp_path: Path, side: str) -> None:
    import shutil

    folder = tmp_path / side
    shutil.copytree(model, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "padding_side": side, "truncation_side": side}))
    data = write_rows(tmp_path / "rows.jsonl", [{"prompt": words(i, 3 + 11 * i), "completion": words(i, 1 + 9 * i)} for i in range(3)])
    losses = [start("sft", m, data, tmp_path / f"run{m.name}", max_steps=2)[0].metrics() for m in (model, folder)]
    assert [m["loss"] for m in losses[0]] == [m["loss"] for m in losses[1]]
