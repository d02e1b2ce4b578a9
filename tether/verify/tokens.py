"""Whether what is trained is what the model is meant to say: counted again from the rows' own words, position by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tether import packing
from tether.batch import Example
from tether.codec import Codec
from tether.conversations import Conversation
from tether.feedback import Feedback
from tether.messages import plain
from tether.preferences import Preference
from tether.rankings import Ranking
from tether.recipe import SFTRecipe
from tether.verify.check import Found
from tether.verify.subject import Subject


def trained_tokens(subject: Subject) -> Found:
    """Every trained position predicts the next token of its own row; together they are the answer and its end, nothing else."""
    if subject.scores:
        return _read_at_the_end(subject)
    examples = subject.examples
    wrong = _misplaced(examples)
    codec: Codec = subject.model.codec
    told = _sampled(subject, codec) if subject.samples else _said(subject, codec)
    tokens = sum(e.n_trained for e in examples)
    answers = sum(len(e.answers) for e in examples)
    faults = [*wrong, *told]
    detail = faults[0] if faults else f"{tokens} trained tokens are the words of {answers} answers and their ends"
    return Found(len(faults), 0, detail)


def _misplaced(examples: Sequence[Example]) -> list[str]:
    """Packed and looked at: which trained positions do not predict the token that follows in their own row."""
    packed = packing.pack(examples)
    tokens, positions = packed.tokens.tolist(), packed.positions.tolist()
    rows = [(e, e.prompt + a, t) for e in examples for a, t in zip(e.answers, e.trained, strict=True)]
    faults: list[str] = []
    found: list[list[int]] = [[] for _ in rows]
    for at, target, answer in zip(packed.predict.tolist(), packed.targets.tolist(), packed.answer.tolist(), strict=True):
        example, ids, _ = rows[answer]
        place = positions[at]
        if not (place + 1 < len(ids) and tokens[at] == ids[place] and target == ids[place + 1]):
            faults.append(f"{_where(example)}: position {place} is trained towards token {target}, which does not follow there")
        found[answer].append(place + 1 - len(example.prompt))
    for (example, _, trained), places in zip(rows, found, strict=True):
        wanted = [t for t, is_trained in enumerate(trained) if is_trained and t + len(example.prompt) > 0]
        if sorted(places) != wanted:
            faults.append(f"{_where(example)}: trained places of the answer are {_few(sorted(places))}, wanted are {_few(wanted)}")
    return faults


def _said(subject: Subject, codec: Codec) -> list[str]:
    """Which answers' trained tokens do not spell the words of the row, or lack the end mark."""
    faults = []
    for row, example in zip(subject.rows.rows, subject.rows.examples, strict=True):
        whole = isinstance(row, Conversation) and (row.text is not None or getattr(subject.recipe, "train_on", "") == "all")
        for words, answer, trained in zip(_words(subject, row), example.answers, example.trained, strict=True):
            ids = [token for token, is_trained in zip(answer, trained, strict=True) if is_trained]
            # A text without a prompt gives its first token as the prompt; it predicts and is not predicted.
            spelt = codec.decode([*(example.prompt if whole else ()), *ids])
            cut = len(example.prompt) + len(answer) >= subject.recipe.max_length
            fits = _squeezed(spelt) in _squeezed(" ".join(words)) if cut else _in_order(words, spelt)
            if not fits:
                faults.append(f"{_where(example)}: the trained tokens say {_short(spelt)}, the row says {_short(' '.join(words))}")
            elif not cut and (not ids or ids[-1] not in codec.end_ids) and not whole:
                faults.append(f"{_where(example)}: the last trained token is not an end mark")
            elif not whole and not cut and sum(t in codec.end_ids for t in ids) != len(words):
                faults.append(f"{_where(example)}: {sum(t in codec.end_ids for t in ids)} end marks are trained, {len(words)} wanted")
    return faults


def _words(subject: Subject, row: Any) -> list[list[str]]:
    """The texts that each answer of a row is meant to train, turn by turn."""
    if isinstance(row, Preference):
        return [_turns(row.chosen), _turns(row.rejected)]
    if isinstance(row, Ranking):
        return [_turns(a) for a in row.answers]
    if isinstance(row, Feedback):
        return [_turns(row.completion)]
    assert isinstance(row, Conversation)
    train_on = subject.recipe.train_on if isinstance(subject.recipe, SFTRecipe) else "assistant"
    if row.text is not None:
        return [[row.text]]
    if row.messages is None:
        said = _turns(row.completion or "")
        return [[plain(row.prompt or ""), *said] if train_on == "all" else said]
    if train_on == "all":
        return [[m["content"] for m in row.messages]]
    said = [m["content"] for m in row.messages if m["role"] == "assistant" and m["content"].strip()]
    return [said[-1:] if train_on == "last" else said]


def _turns(text: Any) -> list[str]:
    """What the assistant says in an answer."""
    return [text] if isinstance(text, str) else [m["content"] for m in text if m["role"] == "assistant"]


def _sampled(subject: Subject, codec: Codec) -> list[str]:
    """Which attempts are not trained on exactly the sampled tokens, up to and with the first end mark."""
    from tether.verify.sampled import PROMPTS, sample

    by_prompt: dict[int, list[list[int]]] = {}
    for completion in sample(subject):
        by_prompt.setdefault(completion.request, []).append(completion.tokens)
    faults = []
    for number, example in enumerate(subject.examples[:PROMPTS]):
        packed = packing.pack([example])
        for k, tokens in enumerate(by_prompt[number]):
            end = next((t for t, token in enumerate(tokens) if token in codec.end_ids), len(tokens) - 1)
            trained = packed.targets[packed.answer == k].tolist()
            if trained != tokens[: end + 1]:
                faults.append(f"prompt {number + 1}, attempt {k + 1}: sampled {_few(tokens)}, trained {_few(trained)}")
    return faults


def _read_at_the_end(subject: Subject) -> Found:
    """A reward model trains no token: it reads each answer at its last one, the end mark."""
    codec: Codec = subject.model.codec
    packed = packing.pack(subject.examples)
    tokens, faults, number = packed.tokens.tolist(), [], 0
    for row, example in zip(subject.rows.rows, subject.examples, strict=True):
        for words, answer in zip(_words(subject, row), example.answers, strict=True):
            at = int(packed.last[number])
            place, number = int(packed.positions[at]), number + 1
            cut = len(example.prompt) + len(answer) >= subject.recipe.max_length
            if place != len(example.prompt) + len(answer) - 1 or tokens[at] != answer[-1]:
                faults.append(f"{_where(example)}: the score is read at position {place} of {len(example.prompt) + len(answer)}")
            elif not cut and not _in_order(words, codec.decode(answer)):
                faults.append(f"{_where(example)}: the answer is {_short(codec.decode(answer))}, the row says {_short(' '.join(words))}")
            elif not cut and answer[-1] not in codec.end_ids:
                faults.append(f"{_where(example)}: the score is not read at an end mark")
    return Found(len(faults), 0, faults[0] if faults else f"{number} answers are read at their end mark")


def _in_order(words: Sequence[str], spelt: str) -> bool:
    """Whether the texts stand in `spelt` one after another. Blanks are a template's business and are left aside."""
    rest = _squeezed(spelt)
    for text in map(_squeezed, words):
        _, found, rest = rest.partition(text)
        if text and not found:
            return False
    return True


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _where(example: Example) -> str:
    return str(example.source) if example.source else "an attempt"


def _few(values: Sequence[int]) -> str:
    return f"[{', '.join(map(str, values[:6]))}{', ...' if len(values) > 6 else ''}]"


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
