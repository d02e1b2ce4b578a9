"""Templates and tokenizers as cases for the codec's tests, and what they ask of an encoded row."""

from __future__ import annotations

from typing import Any

import pytest

from tests import toy_text as toy
from tether import chat
from tether.chat import Codec, encode_conversations
from tether.conversations import Conversation
from tether.files import Loaded, Source

HERE = Source("rows.jsonl", 1)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def chat_row(*messages: dict[str, str]) -> Any:
    return Conversation(list(messages), None, None, None, HERE)  # type: ignore[arg-type]


def trained_text(codec: Codec, example: Any) -> str:
    (answer,), (mask,) = example.answers, example.trained
    return codec.decode([t for t, on in zip(answer, mask, strict=True) if on], control=True)


def same(codec: Codec, shown: str, wanted: str) -> bool:
    """Equal text; a SentencePiece decoder drops one blank at the very start."""
    if type(codec.tokenizer.backend_tokenizer.decoder).__name__ == "Sequence":
        return shown.removeprefix(" ") == wanted.removeprefix(" ") or f" {shown}" == wanted
    return shown == wanted


def whole_text(codec: Codec, example: Any) -> str:
    return codec.decode([*example.prompt, *example.answers[0]], control=True)


def encode(codec: Codec, *rows: Any, **settings: Any) -> chat.Encoded:
    settings = {"max_length": None, **settings}
    return encode_conversations(Loaded(list(rows), [], "", ""), codec, **settings)


# name -> (tokenizer, text around an answer in the template: (before, after), end token)
CASES: dict[str, tuple[Any, tuple[str, str], str]] = {
    "chatml": (lambda: toy.byte_tokenizer(toy.CHATML, eos="<|im_end|>"), ("", ""), "<|im_end|>"),
    "chatml, other eos": (lambda: toy.byte_tokenizer(toy.CHATML), ("", ""), "<|im_end|>"),
    "chatml with generation marks": (lambda: toy.byte_tokenizer(toy.CHATML_GENERATION), ("", ""), "<|im_end|>"),
    "headers": (lambda: toy.byte_tokenizer(toy.HEADERS, bos="<|begin|>", adds_bos=True), ("", ""), "<|eot|>"),
    "inst": (lambda: toy.byte_tokenizer(toy.INST, bos="<bos>", adds_bos=True), (" ", " "), "<|end|>"),
    "turns": (lambda: toy.byte_tokenizer(toy.TURNS, bos="<bos>", adds_bos=True), ("", ""), "<end_of_turn>"),
    "answer with a blank": (lambda: toy.byte_tokenizer(toy.ANSWER_BLANK), ("", ""), "<|end|>"),
    "answer without a blank": (lambda: toy.byte_tokenizer(toy.ANSWER_NO_BLANK), (" ", ""), "<|end|>"),
    "no marks": (lambda: toy.byte_tokenizer(toy.NO_MARKS), ("", ""), "<|end|>"),
    "ignores the generation prompt": (lambda: toy.byte_tokenizer(toy.IGNORES_OPENING), ("", ""), "<|eot|>"),
    "end mark that is not special": (toy.with_plain_end_mark, ("", ""), "<|stop|>"),
    "sentencepiece": (lambda: toy.sentencepiece_tokenizer(toy.INST), (" ", " "), "</s>"),
    "sentencepiece, plain lines": (lambda: toy.sentencepiece_tokenizer(toy.NO_MARKS), ("", ""), "</s>"),
    "built in": (lambda: toy.byte_tokenizer(None), (" ", ""), "<|end|>"),
    "sentencepiece, built in": (lambda: toy.sentencepiece_tokenizer(None), (" ", ""), "</s>"),
}


@pytest.fixture(params=CASES, ids=list(CASES))
def case(request: pytest.FixtureRequest) -> tuple[Codec, tuple[str, str], str]:
    make, around, end = CASES[request.param]
    return Codec(make()), around, end


CHATML_CODEC, PLAIN_CODEC = Codec(toy.byte_tokenizer(toy.CHATML)), Codec(toy.byte_tokenizer())
