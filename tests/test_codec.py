"""Which tokens are the model's own: for every template, exactly the answer and one end token, whatever tokenizer and text."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import toy_text as toy
from tests.codec_cases import CHATML_CODEC, HERE, PLAIN_CODEC, case, chat_row, encode, said, same, trained_text, user, whole_text
from tether.chat import Codec
from tether.conversations import Conversation
from tether.errors import UserError

__all__ = ["case"]  # fixtures


def test_the_trained_span_is_the_answer_and_one_end_token(case: tuple[Codec, tuple[str, str], str]) -> None:
    codec, (before, after), end = case
    example = codec.conversation(chat_row(user("Say a number."), said("Four.")))
    assert same(codec, trained_text(codec, example), before + "Four." + after + end)
    assert [t in codec.end_ids for t in example.answers[0]] == [False] * (len(example.answers[0]) - 1) + [True]
    assert example.trained == [[True] * len(example.answers[0])]


def test_every_assistant_turn_or_the_last_is_trained(case: tuple[Codec, tuple[str, str], str]) -> None:
    codec, (before, after), end = case
    row = chat_row(user("Say a number."), said("Four."), user("Another."), said("Nine."))
    both = codec.conversation(row, "assistant")
    four, nine = before + "Four." + after + end, before + "Nine." + after + end
    assert same(codec, trained_text(codec, both), four + nine)
    assert same(codec, trained_text(codec, codec.conversation(row, "last")), nine)
    assert sum(t in codec.end_ids for t, on in zip(both.answers[0], both.trained[0], strict=True) if on) == 2


def test_the_prompt_is_what_the_model_sees_when_it_is_asked(case: tuple[Codec, tuple[str, str], str]) -> None:
    codec, _, _ = case
    messages = [user("Say a number."), said("Four."), user("Another.")]
    asked = codec.prompt_ids(messages)  # type: ignore[arg-type]
    tokenizer = codec.tokenizer
    theirs = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    if tokenizer.chat_template != toy.IGNORES_OPENING:
        assert asked == list(theirs)
    else:  # no generation prompt of its own: the header before an answer is added
        assert codec.decode(asked, control=True) == codec.decode(theirs, control=True) + "assistant: "
    # An example's prompt is the same ids, and prompt + answer is how the template writes the exchange.
    example = codec.conversation(chat_row(*messages, said("Nine.")), "last")
    assert example.prompt == asked
    assert codec.answer_ids(messages, "Nine.") == codec.answer_ids(messages, [said("Nine.")]) == example.answers[0]  # type: ignore[arg-type]


def test_prompt_and_answer_together_are_the_rendered_conversation(case: tuple[Codec, tuple[str, str], str]) -> None:
    codec, _, end = case
    messages = [user("Say a number."), said("Four."), user("Another."), said("Nine.")]
    example = codec.conversation(chat_row(*messages))
    rendered = codec.tokenizer.apply_chat_template(messages, tokenize=False)
    if codec.template.end is None:  # the template has no end token: each answer gets the tokenizer's
        rendered = rendered.replace("Four.", f"Four.{end}").replace("Nine.", f"Nine.{end}")
    shown = whole_text(codec, example)
    if codec.tokenizer.backend_tokenizer.decoder.__class__.__name__ == "Sequence":  # its decoder drops the blank it adds in front
        shown, rendered = shown.replace(" ", ""), rendered.replace(" ", "")
    assert rendered.startswith(shown)
    assert rendered.removeprefix(shown).strip() == ""


def test_bos_is_never_doubled(case: tuple[Codec, tuple[str, str], str]) -> None:
    codec, _, _ = case
    bos = codec.tokenizer.bos_token_id
    for prompt in ([user("Hi")], "Hi"):
        ids = codec.prompt_ids(prompt)  # type: ignore[arg-type]
        assert ids[:2] != [bos, bos]
        if bos is not None:
            assert ids[0] == bos or codec.tokenizer.chat_template == toy.NO_MARKS


def test_the_library_s_own_generation_marks_agree() -> None:
    tokenizer = toy.byte_tokenizer(toy.CHATML_GENERATION)
    codec = Codec(tokenizer)
    messages = [{"role": "system", "content": "Be calm."}, user("Say a number."), said("Four."), user("Another."), said("Nine.")]
    theirs = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ours = codec.conversation(chat_row(*messages))
    ids, mask = [*ours.prompt, *ours.answers[0]], [False] * len(ours.prompt) + ours.trained[0]
    assert ids == list(theirs["input_ids"])[: len(ids)]
    assert mask == [bool(m) for m in theirs["assistant_masks"]][: len(ids)]
    assert not any(theirs["assistant_masks"][len(ids) :])


def test_the_word_assistant_in_user_text_is_no_boundary(case: tuple[Codec, tuple[str, str], str]) -> None:
    codec, (before, after), end = case
    quoted = "Quote this: assistant: Four.\nAnswer: Four.\nAssistant: Four."
    example = codec.conversation(chat_row(user(quoted), said("Done.")))
    assert same(codec, trained_text(codec, example), before + "Done." + after + end)
    assert "Quote this: assistant: Four." in codec.decode(example.prompt, control=True)


def test_control_tokens_spelled_in_the_data_stay_text(case: tuple[Codec, tuple[str, str], str]) -> None:
    codec, _, end = case
    spelled = f"{end} and <|im_end|><|im_start|>system"
    rows = [chat_row(user(f"Repeat {spelled}"), said(f"It is {spelled} so."))]
    encoded = encode(codec, *rows)
    (example,) = encoded.examples
    assert [p.kind for p in encoded.problems] == ["control_text"]
    assert encoded.problems[0].action == "warn"
    assert f"It is {spelled} so." in trained_text(codec, example)
    assert sum(t in codec.end_ids for t in example.answers[0]) == 1
    assert example.answers[0][-1] in codec.end_ids
    plain = encode(codec, chat_row(user("Repeat it"), said("It is so.")))
    assert plain.problems == []
    control = set(codec.encoder.control.values()) - {codec.tokenizer.unk_token_id}
    assert sum(t in control for t in example.prompt) == sum(t in control for t in plain.examples[0].prompt)


def test_control_tokens_can_be_asked_for() -> None:
    codec = Codec(toy.byte_tokenizer(toy.CHATML), control_text="parse")
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>"
    row = Conversation(None, None, None, text, HERE)
    encoded = encode(codec, row)
    assert [p.kind for p in encoded.problems] == ["control_text"]
    ids = [*encoded.examples[0].prompt, *encoded.examples[0].answers[0]]
    assert ids == codec.tokenizer(text)["input_ids"]  # and no second end token
    as_text = encode(Codec(toy.byte_tokenizer(toy.CHATML)), row).examples[0]
    assert len(as_text.answers[0]) > len(ids)


def test_plain_text_is_prompt_answer_and_the_end_token() -> None:
    codec = Codec(toy.byte_tokenizer(toy.CHATML))
    for prompt, answer in [("Name a planet. ", "Mars."), ("Name a planet.", " Mars."), ("Name a planet.\r\n", "Mars.\r\n"), ("ab", "cd")]:
        ids, mask = codec.answer(prompt, answer)
        assert codec.decode(codec.prompt_ids(prompt)) == prompt
        assert codec.decode(ids[:-1]) == answer
        assert ids[-1] == codec.tokenizer.eos_token_id
        assert all(mask)


def test_a_tokenizer_that_puts_a_blank_before_the_first_word_does_not_put_one_between_prompt_and_answer() -> None:
    codec = Codec(toy.sentencepiece_tokenizer())
    for prompt, answer in [("Question: a", "Four."), ("Question:", " Four."), ("Question:\n", "Four."), ("Question:", "\nFour.")]:
        ids = [*codec.prompt_ids(prompt), *codec.answer_ids(prompt, answer)]
        assert codec.decode(ids).lstrip() == prompt + answer
        assert ids[0] == codec.tokenizer.bos_token_id
        assert ids.count(codec.tokenizer.bos_token_id) == 1


def test_an_empty_prompt_still_gives_the_first_answer_token_a_past() -> None:
    for tokenizer in (toy.byte_tokenizer(), toy.byte_tokenizer(bos="<bos>", adds_bos=True)):
        codec = Codec(tokenizer)
        (start,) = codec.prompt_ids("")
        assert start == (tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id)
        assert codec.decode(codec.answer_ids("", "Four.")) == "Four."
    with pytest.raises(UserError, match="empty prompt"):
        Codec(toy.word_tokenizer(eos=None)).prompt_ids("")


def test_a_document_is_trained_from_its_second_token_or_after_bos() -> None:
    row = Conversation(None, None, None, "the sea was grey", HERE)
    for tokenizer in (toy.byte_tokenizer(), toy.byte_tokenizer(bos="<bos>", adds_bos=True), toy.sentencepiece_tokenizer()):
        codec = Codec(tokenizer)
        example = codec.conversation(row)
        assert [*example.prompt, *example.answers[0]] == [*tokenizer("the sea was grey")["input_ids"], tokenizer.eos_token_id]
        assert len(example.prompt) == 1
        assert all(example.trained[0])


def test_train_on_all_takes_everything_but_tool_turns() -> None:
    codec = Codec(toy.byte_tokenizer(toy.CHATML))
    messages = [user("Use the tool."), said("call add(2,2)"), {"role": "tool", "content": "4"}, said("It is 4.")]
    example = codec.conversation(chat_row(*messages), "all")
    rendered = codec.tokenizer.apply_chat_template(messages, tokenize=False)
    assert whole_text(codec, example) == rendered
    assert trained_text(codec, example) == rendered.replace("<|im_start|>tool\n4<|im_end|>\n", "").removeprefix("<|im_start|>")
    pair = Conversation(None, "Count up.", "1 2", None, HERE)
    both = codec.conversation(pair, "all")
    assert whole_text(codec, both) == "Count up.1 2<|end|>"
    assert len(both.prompt) == 1


def test_a_conversation_may_open_with_the_assistant(case: tuple[Codec, tuple[str, str], str]) -> None:
    codec, (before, after), end = case
    encoded = encode(codec, chat_row(said("Welcome."), user("Say a number."), said("Four.")))
    if codec.tokenizer.chat_template in (toy.INST, toy.TURNS):  # they want a user first
        assert [p.kind for p in encoded.problems] == ["template_refuses"]
        return
    (example,) = encoded.examples
    assert same(codec, trained_text(codec, example), before + "Welcome." + after + end + before + "Four." + after + end)
    assert example.prompt


def test_tool_turns_are_context_and_never_trained() -> None:
    codec = Codec(toy.byte_tokenizer(toy.CHATML))
    row = chat_row(user("Use the tool."), said("call add(2,2)"), {"role": "tool", "content": "4"}, said("It is 4."))
    assert trained_text(codec, codec.conversation(row)) == "call add(2,2)<|im_end|>It is 4.<|im_end|>"
    assert "<|im_start|>tool\n4<|im_end|>" in whole_text(codec, codec.conversation(row))


def test_empty_assistant_turns_are_context_only() -> None:
    codec = Codec(toy.byte_tokenizer(toy.CHATML))
    encoded = encode(codec, chat_row(user("A"), said(""), user("B"), said("Four.")), chat_row(user("A"), said(" \n")))
    assert [trained_text(codec, e) for e in encoded.examples] == ["Four.<|im_end|>"]
    assert [(p.action, p.kind) for p in encoded.problems] == [("warn", "empty_answer"), ("drop", "no_answer")]
    last = encode(codec, chat_row(user("A"), said("Four."), user("B"), said("")), train_on="last")
    assert (last.examples, [p.kind for p in last.problems]) == ([], ["no_answer"])


def test_what_follows_the_last_answer_is_left_out() -> None:
    codec = Codec(toy.byte_tokenizer(toy.CHATML))
    example = codec.conversation(chat_row(user("A"), said("Four."), user("Thanks.")))
    assert whole_text(codec, example).endswith("Four.<|im_end|>")


# -- end tokens --------------------------------------------------------------------------------------------------------


def test_pad_equal_to_end_does_not_cost_the_end_its_place_in_the_loss() -> None:
    """Lengths say where a row ends, never the pad id: rows of different length keep their own end token, trained."""
    tokenizer = toy.byte_tokenizer(toy.CHATML, eos="<|im_end|>", pad="<|im_end|>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    codec = Codec(tokenizer)
    encoded = encode(codec, chat_row(user("A"), said("x")), chat_row(user("A"), said("the sea was grey and calm " * 9)))
    for example in encoded.examples:
        assert example.answers[0][-1] == tokenizer.eos_token_id
        assert example.trained[0][-1]
        assert example.answers[0].count(tokenizer.eos_token_id) == 1
    alone = [codec.conversation(chat_row(user("A"), said("x")))]
    assert alone[0].answers == encoded.examples[0].answers


def test_the_pad_spelling_inside_a_text_is_not_its_end() -> None:
    codec = Codec(toy.byte_tokenizer(pad="<|eot|>"))
    ids = codec.answer_ids("q", "before <|eot|> after")
    assert codec.tokenizer.pad_token_id not in ids
    assert codec.decode(ids[:-1]) == "before <|eot|> after"


def test_all_end_tokens_are_known() -> None:
    tokenizer = toy.byte_tokenizer(toy.HEADERS, bos="<|begin|>")

    class Settings:
        eos_token_id = (tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.convert_tokens_to_ids("<|end|>"))

    codec = Codec(tokenizer, generation_config=Settings())
    named = {tokenizer.convert_tokens_to_ids(t) for t in ("<|end|>", "<|eot|>", "<|im_end|>")}
    assert codec.end_ids == named
    assert codec.answer_ids([user("A")], "B")[-1] == tokenizer.convert_tokens_to_ids("<|eot|>")  # type: ignore[list-item]
    assert codec.answer_ids("A", "B")[-1] == tokenizer.eos_token_id


# -- laws --------------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cn"]), max_size=30)
SPELLED = st.lists(st.one_of(TEXT, st.sampled_from(["<|end|>", "<|im_end|>", "<|im_start|>", " ", "\n", "assistant"])), max_size=5).map(
    "".join
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SPELLED, SPELLED)
def test_any_text_comes_back_unchanged_with_one_end_token(prompt: str, answer: str) -> None:
    for codec, asked in ((CHATML_CODEC, [user(prompt)]), (PLAIN_CODEC, prompt)):
        ids = codec.answer_ids(asked, answer)  # type: ignore[arg-type]
        assert codec.decode(ids[:-1], control=True) == answer
        assert [t in codec.end_ids for t in ids] == [False] * (len(ids) - 1) + [True]
    assert PLAIN_CODEC.decode(PLAIN_CODEC.prompt_ids(prompt), control=True) == (prompt or "<|end|>")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT.filter(lambda t: bool(t.strip()))), min_size=1, max_size=4))
def test_a_batch_is_its_rows_one_by_one(pairs: list[tuple[str, str]]) -> None:
    rows = [chat_row(user(q), said(a)) for q, a in pairs]
    together = encode(CHATML_CODEC, *rows).examples
    assert [(e.prompt, e.answers, e.trained) for e in together] == [
        (x.prompt, x.answers, x.trained) for x in (CHATML_CODEC.conversation(r) for r in rows)
    ]
