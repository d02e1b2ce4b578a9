"""`Codec`: prompts and answers <-> token ids, with the exact span of what the model wrote.

A prompt is tokenised once, as the model will see it when it generates; an answer is tokenised on its own and ends in exactly one
end token, which is trained. Training, scoring and sampling all come through here, so they agree to the token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tether import __version__
from tether.batch import Example
from tether.conversations import Conversation
from tether.encoder import TextEncoder
from tether.errors import UserError
from tether.files import Source
from tether.messages import Message, Text, assistant, has_assistant, plain, user
from tether.template import BUILT_IN, CannotRender, ChatTemplate, Note, Piece

TrainOn = Literal["assistant", "last", "all"]


@dataclass
class Rendered:
    """A row as text: one prompt, the pieces of each answer, what there is to say about it.

    `start`: how the ids begin. "text": with the tokenizer's own start (BOS); "template": as the template writes it; "document":
    there is no prompt, the one answer begins with the start. `plain`: no template was used.
    """

    prompt: str
    answers: list[list[Piece]]
    start: Literal["text", "template", "document"] = "template"
    plain: bool = False
    notes: list[Note] = field(default_factory=list)


class Codec:
    """A tokenizer and its chat template, as the one way between words and token ids.

    `template`: Jinja text that replaces the tokenizer's own; it is written into the tokenizer, so that a saved model keeps it.
    Strings are plain text and see no template; messages go through it. Without any template a simple built-in one is used
    (`User: ...`, `Assistant: ...`), and `notice` says so.
    `control_text`: spellings of control tokens inside the data stay text ("text"), or become tokens ("parse").
    `generation_config`: its end tokens count as ends too (`end_ids`).
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None = None,
        *,
        control_text: Literal["text", "parse"] = "text",
        generation_config: Any = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.encoder = TextEncoder(tokenizer, control_text)
        self.notice: str | None = None
        if template is not None:
            tokenizer.chat_template = template
        self._template: ChatTemplate | None = None
        self._unusable: UserError | None = None  # why the template cannot be used; plain text does not need it
        if tokenizer.chat_template:
            try:
                self._template = ChatTemplate(tokenizer, tokenizer.get_chat_template(), self.encoder)
            except UserError as error:
                if template is not None:
                    raise
                self._unusable = error
        self._more_ends = getattr(generation_config, "eos_token_id", None)

    @property
    def template(self) -> ChatTemplate:
        """The chat template; a tokenizer without one gets the built-in one, now and in what is saved."""
        if self._unusable is not None:
            raise self._unusable
        if self._template is None:
            start = "{{ bos_token }}" if self.encoder.start else ""
            self.encoder.end()
            self.tokenizer.chat_template = start + BUILT_IN
            self._template = ChatTemplate(self.tokenizer, start + BUILT_IN, self.encoder)
            self.notice = "the tokenizer has no chat template: messages are written as 'User: ...' and 'Assistant: ...' (docs/data.md)"
        return self._template

    @property
    def has_template(self) -> bool:
        return self._template is not None

    @property
    def end_ids(self) -> set[int]:
        """Every token that ends an answer: the tokenizer's, the template's end of turn, and those of the generation settings."""
        more = self._more_ends if isinstance(self._more_ends, (list, tuple)) else [self._more_ends]
        mine = [self.encoder.eos, self._template.end_id if self._template else None, *more]
        return {i for i in mine if i is not None}

    @property
    def fingerprint(self) -> str:
        """Changes with anything that could change token ids: tokenizer, template, the rule for control tokens, version."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        words = backend.to_str() if backend is not None else repr(sorted(self.tokenizer.get_vocab().items()))
        template = self._template.text if self._template else None
        parts = (words, template, self.encoder.control_text, self.encoder.start, sorted(self.end_ids), __version__)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    # -- one at a time -------------------------------------------------------------------------------------------------

    def prompt_ids(self, prompt: Text, where: str | None = None) -> list[int]:
        """The prompt as the model sees it before it writes: with the generation prompt, and BOS at most once. Never empty.

        A prompt that the template refuses is a UserError that points to `where`.
        """
        if isinstance(prompt, str):
            return self.examples([Rendered(self.encoder.guard(prompt), [], "text", True)])[0].prompt
        try:
            rendered = Rendered(self.template.prompt(self.encoder.guard(prompt)), [])
        except CannotRender as error:
            raise UserError(error.note.what, where=where, remedy=error.note.remedy) from None
        return self.examples([rendered])[0].prompt

    def answer_ids(self, prompt: Text, answer: Text) -> list[int]:
        """The ids that follow `prompt_ids(prompt)` when the model answers so; the last one is the end token."""
        return self.answer(prompt, answer)[0]

    def answer(self, prompt: Text, answer: Text) -> tuple[list[int], list[bool]]:
        """`answer_ids`, and which of them the loss sees: all, unless the answer spans several turns."""
        example = self._one(self.render_answers(prompt, [answer]))
        return example.answers[0], example.trained[0]

    def conversation(self, conversation: Conversation, train_on: TrainOn = "assistant") -> Example:
        """A demonstration as an Example; raises UserError where `encode_conversations` would drop the row."""
        rendered = self.render_conversation(conversation, train_on)
        return self._one(rendered, conversation.source)

    def decode(self, ids: Iterable[int], *, control: bool = False) -> str:
        """The text of token ids; control tokens are left out unless `control`."""
        return self.encoder.decode(ids, control=control)

    def _one(self, rendered: Rendered, source: Source | None = None) -> Example:
        for note in rendered.notes:
            if note.action == "drop":
                raise UserError(note.what, where=str(source) if source else None, remedy=note.remedy)
        example = self.examples([rendered])[0]
        return Example(example.prompt, example.answers, example.trained, source)

    # -- rows -> text --------------------------------------------------------------------------------------------------

    def render_answers(self, prompt: Text, answers: Sequence[Text]) -> Rendered:
        """One prompt with all its answers. A string beside messages is read as a turn. Problems come as notes, never as exceptions."""
        notes = self._spelled([prompt, *answers])
        if isinstance(prompt, str) and all(isinstance(a, str) for a in answers):
            plain_answers = [[Piece(self.encoder.guard(a), True, needs_end=True)] for a in answers]
            return Rendered(self.encoder.guard(prompt), plain_answers, "text", True, notes)
        asked = self.encoder.guard(prompt if not isinstance(prompt, str) else user(prompt) if prompt else [])
        rows: list[list[Piece]] = []
        try:
            before = self.template.prompt(asked)
            for answer in answers:
                said: list[Message] = self.encoder.guard(assistant(answer) if isinstance(answer, str) else answer)
                wanted = [len(asked) + i for i, m in enumerate(said) if m["role"] == "assistant"]
                if not wanted or wanted[0] != len(asked):
                    raise CannotRender("no_answer", "the answer does not start with an assistant turn", "Add it.")
                start, pieces, more = self.template.turns([*asked, *said], wanted)
                if start != before:
                    raise CannotRender("template_not_a_prefix", "the template rewrites the first turn of the answer", "Use one turn.")
                rows.append(pieces)
                notes += [n for n in more if n not in notes]
        except CannotRender as error:
            return Rendered("", [], notes=[*notes, error.note])
        return Rendered(before, rows, notes=notes)

    def render_conversation(self, conversation: Conversation, train_on: TrainOn) -> Rendered:
        """A demonstration. Empty assistant turns are context and are not trained; with nothing left to train the row is dropped."""
        if train_on not in ("assistant", "last", "all"):
            raise UserError(f"there is no {train_on!r}", where="train_on", remedy="Use assistant, last or all.")
        if conversation.text is not None:
            # No prompt: the tokenizer's start comes first, or else the first token is the prompt.
            notes = self._spelled([conversation.text])
            return Rendered("", [[Piece(self.encoder.guard(conversation.text), True, needs_end=True)]], "document", True, notes)
        if conversation.messages is None:
            prompt, completion = conversation.prompt or "", conversation.completion or ""
            if isinstance(prompt, str) and isinstance(completion, str):
                rendered = self.render_answers(prompt, [completion])
                if train_on == "all" and prompt:
                    rendered.answers[0].insert(0, Piece(rendered.prompt, True))
                    rendered.prompt, rendered.start = "", "document"
                return rendered
            turns = [*(user(prompt) if isinstance(prompt, str) else prompt)]
            first = len(turns)
            turns += assistant(completion) if isinstance(completion, str) else completion
        else:
            turns, first = conversation.messages, 0
        notes = self._spelled([turns])
        turns = self.encoder.guard(turns)
        try:
            return self._turns(turns, first, train_on, notes)
        except CannotRender as error:
            return Rendered("", [], notes=[*notes, error.note])

    def _turns(self, turns: list[Message], first: int, train_on: TrainOn, notes: list[Note]) -> Rendered:
        said = [i for i, m in enumerate(turns) if m["role"] == "assistant" and i >= first]
        full = [i for i in said if turns[i]["content"].strip() or turns[i].get("tool_calls")]
        wanted = full if train_on == "assistant" else [i for i in said[-1:] if i in full]
        if not has_assistant(turns) or not (wanted or (train_on == "all" and full)):
            raise CannotRender("no_answer", "no assistant turn has anything to train on", "Add the answer; empty ones are not trained.")
        if len(full) < len(said):
            words = f"{len(said) - len(full)} empty assistant turns are not trained"
            notes = [*notes, Note("empty_answer", words, "Fill them in.")]
        if train_on == "all":
            pieces, more = self.template.everything(turns)
            return Rendered("", [pieces], "document", notes=[*notes, *more])
        before, pieces, more = self.template.turns(turns, wanted)
        return Rendered(before, [pieces], notes=[*notes, *more])

    def _spelled(self, texts: Sequence[Any]) -> list[Note]:
        found = {s for text in texts for s in self.encoder.spelled(plain(text))}
        if not found:
            return []
        names = ", ".join(sorted(found))
        if self.encoder.control_text == "parse":
            return [Note("control_text", f"the text spells {names}: read as control tokens", "As control_text: parse asks for.")]
        if single := [s for s in found if len(s) < 2]:
            return [
                Note("control_text", f"the text holds {single[0]!r}, a control token that cannot be told from text", "Reword it.", "drop")
            ]
        return [Note("control_text", f"the text spells {names}: kept as text, not as control tokens", "Give messages, not rendered text.")]

    # -- text -> ids ---------------------------------------------------------------------------------------------------

    def examples(self, rendered: Sequence[Rendered]) -> list[Example]:
        """Token ids of many rows, with two calls of the tokenizer for all of them."""
        heads = [r.prompt if r.start != "document" else r.answers[0][0].text for r in rendered]
        tails = [p.text for r in rendered for i, a in enumerate(r.answers) for p in (a if r.start != "document" or i else a[1:])]
        encoded_heads = self.encoder.encode(heads, tails=False)
        encoded_tails = iter(self.encoder.encode(tails, tails=True))
        ends, out = self.end_ids, []
        for row, head in zip(rendered, encoded_heads, strict=True):
            answers: list[list[int]] = []
            trained: list[list[bool]] = []
            for i, pieces in enumerate(row.answers):
                ids: list[int] = []
                mask: list[bool] = []
                for j, piece in enumerate(pieces):
                    new = head if row.start == "document" and i == j == 0 else next(encoded_tails)
                    if piece.needs_end and not (new and new[-1] in ends):
                        new = [*new, self.encoder.end()]
                    ids += new
                    mask += [piece.trained] * len(new)
                answers.append(ids)
                trained.append(mask)
            if row.start == "text":
                head = self.encoder.plain_prompt(head)
            elif row.start == "document":
                head = self.encoder.start if row.plain and answers[0][: len(self.encoder.start)] != self.encoder.start else []
                if not head:  # no start of the tokenizer's own: the first token has no past, so it is the prompt
                    n = max(1, len(self.encoder.start) if row.plain else 0)
                    head, answers[0], trained[0] = answers[0][:n], answers[0][n:], trained[0][n:]
            out.append(Example(list(head) or self.encoder.first(), answers, trained))
        return out
