"""Tokenizers and chat templates for tests: small, built on the spot, each with a trap that real ones have."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

WORDS = (
    "the sea was grey and calm assistant user system Answer: Question: Four. Nine. Say a number. Another. Mars. Soup. planet <|im_start|>"
)
CHAT_MARKS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|begin|>",
    "<|eot|>",
    "<|header|>",
    "<|/header|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<bos>",
]


def case_file(name: str) -> Path:
    """tests/cases/<name>.jsonl, or the file that TETHER_CASES_<NAME> names (PREFS, JSONL, KTO, SFT_CHATS, SFT_LENGTHS)."""
    short = {"prefs_weird": "PREFS", "jsonl_broken": "JSONL", "kto_rows": "KTO"}.get(name, name.upper())
    return Path(os.environ.get(f"TETHER_CASES_{short}") or Path(__file__).parent / "cases" / f"{name}.jsonl")


def case_lines(name: str) -> list[str]:
    """The lines of such a file, split at line ends alone (texts may hold other separators); line n is entry n - 1."""
    return case_file(name).read_text(encoding="utf-8", errors="replace").split("\n")


def expectations(name: str) -> list[dict[str, Any]]:
    """The file's side file `*.expect.jsonl`: what each line should come to."""
    path = case_file(name)
    side = path.with_name(path.stem + ".expect.jsonl")
    return [json.loads(line) for line in side.read_text(encoding="utf-8").split("\n") if line.strip()]


def check_expected(expect: str, actions: set[str], used: bool) -> None:
    """`expect` of one line against what was done with it: `actions` of its problems, and whether it became a row."""
    left_out = bool({"reject", "drop"} & actions)
    if expect == "skip":
        assert not used
        assert not actions
        return
    assert used != left_out, "a line is used, or it is left out and named: never neither, never both"
    allowed = {
        "accept": used and actions <= {"warn"},
        "accept_once_report_duplicate": actions == {"drop"},
        "reject_or_drop_counted": left_out,
        "drop_counted": actions & {"reject", "drop"} == {"drop"},
        "drop_or_warn": bool(actions & {"drop", "warn"}),
        "reject_with_line_number": "reject" in actions,
        "warn": used and "warn" in actions,
        "truncate_counted": bool(actions & {"truncate", "drop"}),
        "accept_or_reject_clearly": True,
        "policy_documented": True,
        "accept_as_text_or_warn": used,
        "reject_or_convert_reported": bool(actions),
        "accept_or_convert_reported": used,
    }
    assert expect in allowed, f"unknown expectation {expect!r}"
    assert allowed[expect], f"{expect}: {sorted(actions)}, used: {used}"


@cache
def _byte_bpe() -> str:
    """A byte-level BPE of GPT-2's kind: any text survives encoding and decoding unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|end|>", *CHAT_MARKS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([WORDS] * 4, trainer)
    return tokenizer.to_str()


def byte_tokenizer(
    template: str | None = None, *, eos: str = "<|end|>", pad: str = "<|end|>", bos: str | None = None, adds_bos: bool = False
) -> Any:
    """pad equals the end token unless said otherwise."""
    backend = Tokenizer.from_str(_byte_bpe())
    if adds_bos:
        assert bos is not None
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))])
    marks = {"bos_token": bos} if bos else {}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, pad_token=pad, **marks)
    made.chat_template = template
    return made


@cache
def _sentencepiece() -> str:
    """A BPE of Llama-2's kind: words carry their blank in front, and the first word of a text gets one too."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    alphabet = list("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:?!'[]/▁")
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS.replace("<|im_start|>", "")] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = json.loads(tokenizer.to_str())
    made["added_tokens"] = [t for t in made["added_tokens"] if not t["content"].startswith("<0x")]  # byte pieces are ordinary tokens
    return json.dumps(made)


def sentencepiece_tokenizer(template: str | None = None) -> Any:
    backend = Tokenizer.from_str(_sentencepiece())
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>", clean_up_tokenization_spaces=False
    )
    made.chat_template = template
    return made


def word_tokenizer(n_words: int = 200, *, eos: str | None = "[end]", template: str | None = None) -> Any:
    """One token a word, w0 w1 ...: lengths in tests can be counted by hand."""
    vocabulary = {w: i for i, w in enumerate(["[unk]", "[end]", "[pad]", *(f"w{i}" for i in range(n_words))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[unk]", pad_token="[pad]", eos_token=eos)
    made.chat_template = template
    return made


def with_plain_end_mark() -> Any:
    """ChatML whose <|im_end|> is an added token that the tokenizer does not call special."""
    made = byte_tokenizer(CHATML)
    made.add_tokens([AddedToken("<|stop|>", special=False, normalized=False)])
    made.chat_template = CHATML.replace("<|im_end|>", "<|stop|>")
    return made


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Headers in marks, blanks trimmed, BOS written by the template itself.
HEADERS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|header|>' + m['role'] + '<|/header|>\n\n' + m['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}"
)
# [INST] turns: no generation prompt of its own, blanks around the answer, the tokenizer's end token, BOS at every exchange.
INST = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set sys = '<<SYS>>' + messages[0]['content'] + '<</SYS>> ' %}"
    "{% else %}{% set rest = messages %}{% set sys = '' %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + (sys if loop.first else '') + m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# Another name for the assistant, strict alternation, no system turn.
TURNS = (
    "{{ bos_token }}{% if messages and messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Thoughts of earlier turns are left out; the last turn always has a (maybe empty) thought.
STRIPS_THOUGHTS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% set words = m['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m['content'].split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m['content'] else '' %}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' + words }}{% else %}{{ words }}{% endif %}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Opens a thought for generation that the finished answer does not show: what was generated cannot be rendered again.
OPENS_THOUGHT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|header|>' + m['content'] }}"
    "{% else %}{{ '<|/header|>' + m['content'].split('</think>')[-1] + '<|eot|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|/header|><think>\n' }}{% endif %}"
)
QUESTION_ANSWER = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'Question: ' + m['content'] + '\nAnswer:BLANK' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'GLUE' + m['content'] + '\n' }}{% else %}{{ m['content'] + '\n' }}{% endif %}{% endfor %}"
)
ANSWER_BLANK = QUESTION_ANSWER.replace("BLANK", " ").replace("GLUE", "")
ANSWER_NO_BLANK = QUESTION_ANSWER.replace("BLANK", "").replace("GLUE", " ")
# No marks around anything, not even line heads.
NO_MARKS = "{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}"
# Role headers, but add_generation_prompt is ignored.
IGNORES_OPENING = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|eot|>\n' }}{% endfor %}"
# Shows a system turn only at the start.
LOSES_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
