"""Chat templates: where in the rendered text does what the model wrote begin and end? Found by rendering, never by searching for a marker.

The text before answer i is render(messages[:i]) with the generation prompt: what the model sees when it is asked to write.
The answer is what render(messages[: i + 1]) adds to it, up to and including the end-of-turn token. Both are checked against the
rendering of the whole conversation, so a template that rewrites earlier turns is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tether.encoder import TextEncoder, _any_of
from tether.errors import UserError
from tether.messages import Message

ANSWER, QUESTION = "Tidewater", "Harbour"

# For tokenizers without a template. No tokens beyond the tokenizer's own: turns are lines, an answer ends in the end token.
BUILT_IN = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}Assistant: {{ message['content'] }}{{ eos_token }}\n\n"
    "{% else %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


@dataclass(frozen=True)
class Piece:
    """A stretch of text, whether the loss sees it, and whether an end token must be put behind it."""

    text: str
    trained: bool
    needs_end: bool = False


@dataclass(frozen=True)
class Note:
    """Something to say about one row. `drop`: the row cannot be used."""

    kind: str
    what: str
    remedy: str
    action: Literal["drop", "warn"] = "warn"


class CannotRender(Exception):
    def __init__(self, kind: str, what: str, remedy: str) -> None:
        super().__init__(what)
        self.note = Note(kind, what, remedy, "drop")


REMEDY = "Pass another chat template (chat_template in the recipe), or change the row."


class ChatTemplate:
    """One template with one tokenizer: `prompt` and `turns` give text, cut where training needs it cut."""

    def __init__(self, tokenizer: Any, text: str, encoder: TextEncoder) -> None:
        self.tokenizer, self.text, self.encoder = tokenizer, text, encoder
        self._probe()

    def render(self, messages: Sequence[Message], *, opened: bool) -> str:
        """The conversation as text; `opened`: with the generation prompt at the end."""
        if not messages and not opened:
            return ""
        try:
            out = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=opened, chat_template=self.text)
        except Exception as error:  # templates raise what they like: jinja errors, KeyErrors, their own raise_exception
            roles = ", ".join(m["role"] for m in messages)
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            raise CannotRender("template_refuses", f"the chat template refuses the turns {roles}: {reason}", REMEDY) from error
        return str(out)

    def _probe(self) -> None:
        """Learn from one made-up exchange: the header before an answer, the text after it, and the end-of-turn token."""
        asked: list[Message] = [{"role": "user", "content": QUESTION}]
        answered: list[Message] = [*asked, {"role": "assistant", "content": ANSWER}]
        try:
            closed, opened, full = self.render(asked, opened=False), self.render(asked, opened=True), self.render(answered, opened=False)
        except CannotRender as error:
            raise UserError(error.note.what, where="chat template", remedy="Pass another one with chat_template.") from error
        if full.count(ANSWER) != 1:
            raise UserError("it does not show the text of an assistant turn", where="chat template", remedy="Pass another one.")
        at = full.index(ANSWER)
        # A template that ignores add_generation_prompt may still have a header before each answer; it is never trained. Mere
        # blanks there belong to the answer: that is how such a model is asked, and what it then writes.
        header = full[len(closed) : at] if opened == closed and full.startswith(closed) else ""
        self.header = header if header.strip() else ""
        asked_with = opened + self.header
        self._before_words = full[len(asked_with) : at] if full.startswith(asked_with) else ""  # the template's own, part of an answer
        self.tail = full[at + len(ANSWER) :]
        pattern = _any_of(self.encoder.added | self.encoder.control)
        found = pattern.search(self.tail) if pattern else None
        self.end: str | None = found.group() if found else None
        if self.end is not None and self.end not in self.encoder.control:
            self.encoder.protect(self.end)

    @property
    def end_id(self) -> int | None:
        return None if self.end is None else self.encoder.control[self.end]

    def prompt(self, messages: Sequence[Message]) -> str:
        """What the model sees when it is asked to write the next turn."""
        if not messages:
            # transformers renders no empty conversation: take what stands before the words of one that opens with an answer.
            alone = self.render([{"role": "assistant", "content": ANSWER}], opened=False)
            return alone.partition(ANSWER)[0].removesuffix(self._before_words)
        return self.render(messages, opened=True) + self.header

    def answer(self, added: str) -> Piece:
        """From the text that the template adds for an answer: the answer with its end-of-turn token, without what follows it."""
        if self.end is None:
            return Piece(added.removesuffix(self.tail) if self.tail else added, True, needs_end=True)
        if added.endswith(self.tail):
            body = len(added) - len(self.tail)
            return Piece(added[: body + self.tail.index(self.end) + len(self.end)], True)
        at = added.rfind(self.end)
        return Piece(added, True, needs_end=True) if at < 0 else Piece(added[: at + len(self.end)], True)

    def turns(self, messages: Sequence[Message], wanted: Sequence[int]) -> tuple[str, list[Piece], list[Note]]:
        """(text before the first trained turn, pieces from there to the end of the last, notes).

        `wanted`: indices of assistant turns to train, ascending; what follows the last one is left out. A turn that the template
        shows otherwise once it is history (Qwen3 strips its thoughts, for one) cannot be trained there: it stays context, and a
        note says so. Raises CannotRender when the last turn itself does not continue its prompt.
        """
        last = wanted[-1]
        full = self.render(messages[: last + 1], opened=False)
        spans: list[tuple[int, int, Piece]] = []
        notes = self._lost(messages[: last + 1], full)
        for i in wanted:
            before = self.prompt(messages[:i])
            whole = full if i == last else self.render(messages[: i + 1], opened=False)
            piece = self.answer(whole[len(before) :]) if whole.startswith(before) else None
            if piece is not None and full.startswith(before) and full.startswith(piece.text, len(before)):
                spans.append((len(before), len(before) + len(piece.text), piece))
            elif i == last:
                words = f"the template does not continue its own generation prompt ({before[-40:]!r}) with the answer"
                raise CannotRender("template_not_a_prefix", words, REMEDY)
            else:
                words = f"turn {i + 1} looks different once it is history, so only later turns are trained"
                notes.append(Note("turn_not_trained", words, "Use one row per answer, or a template that leaves earlier turns alone."))
        pieces: list[Piece] = []
        at = spans[0][0]
        for start, end, piece in spans:
            if start > at:
                pieces.append(Piece(full[at:start], False))
            pieces.append(piece)
            at = end
        return full[: spans[0][0]], pieces, notes

    def everything(self, messages: Sequence[Message]) -> tuple[list[Piece], list[Note]]:
        """The whole conversation as trained text, to the last blank that the template writes; tool turns excepted: nobody wants a
        model that makes up tool results."""
        full = self.render(messages, opened=False)
        notes = self._lost(messages, full)
        needs_end = False
        if messages[-1]["role"] == "assistant":
            before = self.prompt(messages[:-1])
            if full.startswith(before):
                needs_end = self.answer(full[len(before) :]).needs_end
        pieces: list[Piece] = []
        at, i = 0, 0
        while i < len(messages):
            if messages[i]["role"] != "tool":
                i += 1
                continue
            after = next((j for j in range(i, len(messages)) if messages[j]["role"] != "tool"), len(messages))
            start = _common(self.render(messages[:i], opened=False), full)
            end = _common(self.render(messages[:after], opened=False), full) if after < len(messages) else len(full)
            pieces += [Piece(full[at:start], True), Piece(full[start:end], False)]
            at, i = end, after
        pieces.append(Piece(full[at:], True, needs_end))
        return [p for p in pieces if p.text], notes

    def _lost(self, messages: Sequence[Message], full: str) -> list[Note]:
        """Turns whose words the template leaves out. Blanks may change (many templates trim); words may not."""
        shown = "".join(full.split())
        notes = []
        for i, message in enumerate(messages):
            if "".join(message["content"].split()) in shown:
                continue
            last = i == len(messages) - 1
            if message["role"] == "assistant":
                if last:  # earlier ones are history, which the template may shorten for the model too
                    words = "the template leaves out a part of the answer (such as its thoughts); the rest is trained"
                    notes.append(Note("template_rewrites", words, REMEDY))
            elif message["role"] == "tool":
                notes.append(Note("template_rewrites", f"the template shows turn {i + 1} (tool) in other words", REMEDY))
            else:
                words = f"the template leaves out turn {i + 1} ({message['role']})"
                notes.append(Note("turn_lost", words, REMEDY, "drop"))
        return notes


def _common(one: str, other: str) -> int:
    """Length of the common start."""
    if other.startswith(one):
        return len(one)
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
