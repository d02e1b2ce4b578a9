"""Chat templates that rewrite, refuse or lose turns: trained on what the model wrote, or left out and named."""

from __future__ import annotations

import pytest

from tests import toy_text as toy
from tests.codec_cases import chat_row, encode, said, trained_text, user, whole_text
from tether.chat import Codec
from tether.errors import UserError


def test_a_template_that_strips_earlier_thoughts_trains_only_the_last_turn_and_says_so() -> None:
    codec = Codec(toy.byte_tokenizer(toy.STRIPS_THOUGHTS))
    thought = "<think>\n2+2\n</think>\n\n"
    row = chat_row(user("A"), said(thought + "Four."), user("B"), said(thought + "Nine."))
    encoded = encode(codec, row)
    assert [trained_text(codec, e) for e in encoded.examples] == [thought + "Nine.<|im_end|>"]
    assert [(p.action, p.kind) for p in encoded.problems] == [("warn", "turn_not_trained")]
    assert "turn 2" in encoded.problems[0].what
    # In the prompt the earlier thought is gone, as it is when the model is asked.
    assert codec.decode(encoded.examples[0].prompt, control=True).count("2+2") == 0
    single = encode(codec, chat_row(user("A"), said(thought + "Four.")))
    assert trained_text(codec, single.examples[0]) == thought + "Four.<|im_end|>"
    assert single.problems == []
    # Without a thought this template writes an empty one; the model would have to as well.
    bare = encode(codec, chat_row(user("A"), said("Four.")))
    assert trained_text(codec, bare.examples[0]) == "<think>\n\n</think>\n\nFour.<|im_end|>"


def test_a_template_whose_generation_prompt_is_not_in_the_answer_is_refused_with_the_reason() -> None:
    codec = Codec(toy.byte_tokenizer(toy.OPENS_THOUGHT))
    encoded = encode(codec, chat_row(user("A"), said("Four.")))
    assert encoded.examples == []
    (problem,) = encoded.problems
    assert (problem.action, problem.kind) == ("drop", "template_not_a_prefix")
    assert "<think>" in problem.what
    assert "template" in problem.remedy
    with pytest.raises(UserError, match="does not continue its own generation prompt"):
        codec.conversation(chat_row(user("A"), said("Four.")))


def test_a_template_that_refuses_a_turn_drops_the_row_with_its_words() -> None:
    codec = Codec(toy.byte_tokenizer(toy.TURNS, bos="<bos>"))
    rows = [
        chat_row({"role": "system", "content": "Be calm."}, user("A"), said("B")),
        chat_row(user("A"), user("B"), said("C")),
        chat_row(user("A"), said("B")),
    ]
    encoded = encode(codec, *rows)
    assert len(encoded.examples) == 1
    assert [(p.action, p.kind) for p in encoded.problems] == [("drop", "template_refuses")] * 2
    assert "System role not supported" in encoded.problems[0].what
    assert "alternate" in encoded.problems[1].what


def test_no_turn_is_lost_in_silence() -> None:
    middle = chat_row(user("A"), {"role": "system", "content": "Be brief."}, said("B"))
    kept = encode(Codec(toy.byte_tokenizer(toy.CHATML)), middle)
    assert "Be brief." in whole_text(Codec(toy.byte_tokenizer(toy.CHATML)), kept.examples[0])
    lost = encode(Codec(toy.byte_tokenizer(toy.LOSES_SYSTEM)), middle)
    assert lost.examples == []
    assert [(p.action, p.kind) for p in lost.problems] == [("drop", "turn_lost")]
    assert "turn 2 (system)" in lost.problems[0].what


@pytest.mark.parametrize("bad, words", [("{% for m in %}", "refuses"), ("{{ messages[0]['content'] }}", "does not show")])
def test_a_broken_template_is_refused_when_given_or_needed_and_never_by_plain_text(bad: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Codec(toy.byte_tokenizer(), bad)
    codec = Codec(toy.byte_tokenizer(bad))
    assert codec.decode(codec.prompt_ids("Hi")) == "Hi"
    assert codec.end_ids == {codec.tokenizer.eos_token_id}
    with pytest.raises(UserError, match=words):
        codec.prompt_ids([user("Hi")])  # type: ignore[list-item]


def test_a_given_template_replaces_the_tokenizer_s_and_stays_in_it() -> None:
    tokenizer = toy.byte_tokenizer(toy.CHATML)
    codec = Codec(tokenizer, toy.HEADERS)
    assert "<|header|>assistant" in codec.decode(codec.prompt_ids([user("Hi")]), control=True)  # type: ignore[list-item]
    assert tokenizer.chat_template == toy.HEADERS


def test_without_a_template_messages_take_the_built_in_one_and_it_is_said_and_kept() -> None:
    tokenizer = toy.byte_tokenizer()
    codec = Codec(tokenizer)
    assert codec.decode(codec.prompt_ids("Hi")) == "Hi"
    assert (codec.notice, tokenizer.chat_template) == (None, None)
    messages = [{"role": "system", "content": "Be calm."}, user("Hi"), said("Yes."), user("Why?")]
    text = codec.decode(codec.prompt_ids(messages), control=True)  # type: ignore[arg-type]
    assert text == "System: Be calm.\n\nUser: Hi\n\nAssistant: Yes.<|end|>\n\nUser: Why?\n\nAssistant:"
    assert "no chat template" in str(codec.notice)
    assert tokenizer.chat_template
    assert Codec(tokenizer).prompt_ids(messages) == codec.prompt_ids(messages)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no end token"):
        Codec(toy.word_tokenizer(eos=None)).prompt_ids([user("w1")])  # type: ignore[list-item]
