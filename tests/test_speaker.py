"""A model that is asked: a mistake in one of many prompts is told by its file and line, or by its number where it has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import save_tiny, tiny_config, tiny_tokenizer
from tether.answers import Speaker
from tether.engines.sampling import Sampling
from tether.errors import UserError
from tether.files import Source

NO_SYSTEM = "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}{{ m['content'] }} </s> {% endfor %}"
SHORT = Sampling(max_new_tokens=4)


def speaker(tmp_path: Path) -> Speaker:
    return Speaker(
        str(save_tiny(tmp_path / "model", tiny_config(tie_word_embeddings=False), tokenizer=tiny_tokenizer(template=NO_SYSTEM))),
        precision="fp32",
    )


def place_of_the_mistake(model: Speaker, prompts: list[Any], sources: list[Source] | None, words: str) -> str | None:
    with pytest.raises(UserError, match=words) as caught:
        model.answer(prompts, SHORT, n=2, sources=sources)
    return caught.value.where


@pytest.mark.parametrize("given", [True, False], ids=["from a file", "from words"])
def test_a_mistake_in_a_prompt_is_pointed_to(tmp_path: Path, given: bool) -> None:
    """The second prompt is refused by the template, or too long for 2048 positions; then the weights give no numbers for it."""
    model = speaker(tmp_path)
    sources = [Source("p.jsonl", 3), Source("p.jsonl", 8)] if given else None
    wanted = "p.jsonl:8" if given else "prompt 2"
    refused = [{"role": "system", "content": "w8"}, {"role": "user", "content": "w9"}]
    assert place_of_the_mistake(model, ["w10", refused], sources, "no system turn") == wanted
    assert place_of_the_mistake(model, ["w10", "w11 " * 2045], sources, "2045 tokens and max_new_tokens 4 exceed") == wanted
    with torch.no_grad():
        model.sampler.model.get_input_embeddings().weight[11] = torch.nan
    model.sampler.refresh()
    assert place_of_the_mistake(model, ["w10", "w10 w11"], sources, "not numbers") == wanted


def test_answers_are_in_order_and_know_their_prompt(tmp_path: Path) -> None:
    sources = [Source("p.jsonl", 3), Source("p.jsonl", 8)]
    made = speaker(tmp_path).answer(["w10", "w11 w12"], SHORT, n=2, sources=sources)
    assert [(a.prompt, a.sample, a.source, a.prompt_tokens) for a in made] == [
        ("w10", 0, sources[0], 1),
        ("w10", 1, sources[0], 1),
        ("w11 w12", 0, sources[1], 2),
        ("w11 w12", 1, sources[1], 2),
    ]
