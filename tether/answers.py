"""`Answer`: what a model said to a prompt; asked of a model, written to a file, read back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether import atomic
from tether.codec import Codec
from tether.engines.local import LocalSampler, Request
from tether.engines.sampling import Sampling
from tether.errors import UserError
from tether.files import Source
from tether.messages import BadRow, Text, as_messages, as_string, as_text, plain, user
from tether.progress import Progress
from tether.readers import Row, read_rows

COMPLETION_COLUMNS = ("completion", "answer", "response", "output")
MODEL_SUFFIXES = (".gguf",)


@dataclass(frozen=True)
class Answer:
    """`prompt` is None for a file that holds answers alone; token counts and finish reason are None where they are not known."""

    prompt: Text | None
    text: str
    finish_reason: str | None = None  # "stop" | "length" | "stop_string"
    prompt_tokens: int | None = None
    completion_tokens: int | None = None  # the end token counts
    sample: int = 0  # which of several answers to the prompt
    source: Source | None = None

    def as_row(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "completion": self.text,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "sample": self.sample,
        }


# -- from a model ------------------------------------------------------------------------------------------------------


class Speaker:
    """A model that answers: folder, hub name, GGUF file, adapter folder or "smollm2"."""

    def __init__(
        self, name: str, *, precision: str = "auto", slots: int = 128, chat_template: str | None = None, trust_remote_code: bool = False
    ) -> None:
        import torch

        from tether.models import load_model
        from tether.precision import choose

        self.name = name
        model: Any
        model, tokenizer = load_model(name, trust_remote_code=trust_remote_code)
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        self.codec = Codec(tokenizer, chat_template, generation_config=getattr(model, "generation_config", None))
        self.sampler = LocalSampler(model, self.codec, precision=choose(precision), slots=slots)

    @property
    def notices(self) -> list[str]:
        return [n for n in (self.sampler.notice, self.codec.notice) if n]

    def answer(
        self, prompts: Sequence[Text], sampling: Sampling, *, n: int = 1, seed: int | str = 0, sources: Sequence[Source] | None = None
    ) -> list[Answer]:
        """`n` answers to each prompt, in order. Answer i of prompt j depends on the prompt, the settings, the seed, i and j alone.

        A prompt that cannot be asked is a UserError that points to its source, or to its number where it has none.
        """
        requests = []
        for j, prompt in enumerate(prompts):
            place = str(sources[j]) if sources else f"prompt {j + 1}"
            requests.append(Request(self.codec.prompt_ids(prompt, place), sampling, n, f"{seed}/{j}", place))
        with Progress(len(requests) * n, f"answers of {self.name}") as progress:
            completions = self.sampler.sample(requests, _counting(progress, requests, self.sampler.end_ids))
        return [
            Answer(
                prompts[c.request],
                c.text or "",
                c.finish_reason,
                len(requests[c.request].prompt),
                len(c.tokens),
                c.sample,
                sources[c.request] if sources else None,
            )
            for c in completions
        ]


def _counting(progress: Progress, requests: Sequence[Request], end_ids: Iterable[int]) -> Callable[[int, int, int], None]:
    """Counts finished answers as far as tokens tell; one that ends by a stop string is counted late, with the next."""
    drawn: dict[tuple[int, int], int] = {}
    done = 0

    def count(request: int, sample: int, token: int) -> None:
        nonlocal done
        drawn[request, sample] = drawn.get((request, sample), 0) + 1
        sampling = requests[request].sampling
        if (token in end_ids and not sampling.ignore_end) or drawn[request, sample] == sampling.max_new_tokens:
            done += 1
            progress.update(done)

    return count


def is_answers_file(name: str) -> bool:
    """Whether `name` is a file of answers rather than a model."""
    path = Path(name).expanduser()
    return path.is_file() and path.suffix not in MODEL_SUFFIXES


# -- files -------------------------------------------------------------------------------------------------------------


def write_answers(path: Path, answers: Sequence[Answer]) -> None:
    """JSONL, one answer a line; the file is the old one or the whole new one."""
    atomic.write_file(path, "".join(json.dumps(a.as_row(), ensure_ascii=False) + "\n" for a in answers))


def read_answers(path: str) -> list[Answer]:
    """Answers of a file: a `completion` (or answer, response, output) in each row, and a `prompt` in all rows or in none.

    A row of `messages` that ends with the assistant is a prompt and its answer. Raises UserError with file and line.
    """
    rows = read_rows(path)
    if rows.problems:
        raise UserError(f"{len(rows.problems)} rows cannot be read, the first: {rows.problems[0]}", where=path)
    answers = [_answer(row) for row in rows.rows]
    with_prompt = [a for a in answers if a.prompt is not None]
    if with_prompt and len(with_prompt) < len(answers):
        first = next(a for a in answers if a.prompt is None)
        raise UserError(
            "this row has no prompt, though others have", where=str(first.source), remedy="Give a prompt in all rows or in none."
        )
    return answers


def _answer(row: Row) -> Answer:
    data = row.data
    try:
        if isinstance(data.get("messages"), list):
            turns = as_messages(data["messages"], "messages")
            if len(turns) < 2 or turns[-1]["role"] != "assistant":
                raise BadRow(
                    "no_answer", "the conversation does not end with the assistant", "Its last turn is the answer.", field="messages"
                )
            return Answer(turns[:-1], turns[-1]["content"], source=row.source)
        name = next((n for n in COMPLETION_COLUMNS if data.get(n) is not None), None)
        if name is None:
            raise BadRow(
                "no_answer", f"the row holds no answer (columns: {', '.join(data) or 'none'})", f"Name it {COMPLETION_COLUMNS[0]}."
            )
        value = data[name]
        text = as_messages(value, name)[-1]["content"] if isinstance(value, list) else as_string(value, name)
        prompt = as_text(data["prompt"], "prompt") if data.get("prompt") is not None else None
    except BadRow as bad:
        place = f"{row.source}: {bad.field}" if bad.field else str(row.source)
        raise UserError(bad.what, where=place, remedy=bad.remedy) from None
    known = {k: data.get(k) for k in ("finish_reason", "prompt_tokens", "completion_tokens")}
    return Answer(prompt, text, **{k: v for k, v in known.items() if v is not None}, sample=data.get("sample") or 0, source=row.source)


def read_prompts(path: str, *, on_bad_rows: Any = "refuse") -> tuple[list[Text], list[Source], int]:
    """Prompts of a data file, or of a .txt file with one question a line; their places; and how many rows were left out."""
    if Path(path).suffix.lower() == ".txt":
        try:
            lines = Path(path).expanduser().read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the file cannot be read: {error}", where=path, remedy="Wanted: UTF-8 text, one prompt a line.") from None
        asked = [(line.strip(), Source(path, i)) for i, line in enumerate(lines, 1) if line.strip()]
        if not asked:
            raise UserError("the file holds no prompt", where=path, remedy="Write one prompt a line.")
        return [user(t) for t, _ in asked], [s for _, s in asked], 0
    from tether import prompts

    loaded = prompts.load(path)
    loaded.enforce(on_bad_rows)
    left_out = sum(p.action in ("reject", "drop") for p in loaded.problems)
    return [p.prompt for p in loaded.rows], [p.source for p in loaded.rows], left_out


def same_question(prompt: Text) -> str:
    """A key under which one question is the same in two files, written as text or as messages."""
    return plain(prompt).strip()
