"""Text -> token ids, with one rule: words in the data stay words, and only a template or this library places control tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from tether.errors import UserError

# Noncharacters of Unicode: they stand in no text. One of them marks where a spelled control token is cut in two.
CUTS = "\ufdd0\ufdd1\ufdd2"


class TextEncoder:
    """A tokenizer's text side.

    `control` maps the spelling of each control token (`<|im_end|>`) to its id. With `control_text="text"` such a spelling inside
    user data is cut after its first character before tokenising, so that it comes out as ordinary pieces; with "parse" it
    becomes the token, as it does in most libraries.
    """

    def __init__(self, tokenizer: Any, control_text: Literal["text", "parse"] = "text") -> None:
        self.tokenizer, self.control_text = tokenizer, control_text
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.control: dict[str, int] = {str(t): i for i, t in added.items() if t.special}
        self.added: dict[str, int] = {str(t): i for i, t in added.items()}
        for spelling, token in zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=False):
            self.control.setdefault(str(spelling), token)
        self._pattern = _any_of(self.control)
        self.eos: int | None = tokenizer.eos_token_id
        self._anchor = self._find_anchor()
        self.start = self._find_start()

    def protect(self, spelling: str) -> None:
        """Count one more spelling as a control token (an end-of-turn mark that the tokenizer does not call special)."""
        self.control[spelling] = self.added[spelling]
        self._pattern = _any_of(self.control)

    # -- user data -----------------------------------------------------------------------------------------------------

    def spelled(self, text: str) -> list[str]:
        """Control tokens that a text spells out."""
        return self._pattern.findall(text) if self._pattern else []

    def guard(self, value: Any) -> Any:
        """The same text, message or list of them, with spelled control tokens cut in two."""
        if self.control_text == "parse":
            return value
        if isinstance(value, str):
            if self._pattern is None or not self._pattern.search(value):
                return value
            return self._pattern.sub(lambda m: m.group()[0] + CUTS[0] + m.group()[1:], value)
        if isinstance(value, dict):
            return {k: v if k == "role" else self.guard(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.guard(v) for v in value]
        return value

    # -- ids -----------------------------------------------------------------------------------------------------------

    def encode(self, texts: Sequence[str], *, tails: bool) -> list[list[int]]:
        """Token ids of many texts, nothing added. `tails`: the text continues another one, so that a tokenizer which puts a
        blank before the first word (SentencePiece) must not do so here."""
        parts = [text.split(CUTS[0]) for text in texts]
        first = self._batch([p[0] for p in parts], tail=tails)
        rest = iter(self._batch([t for p in parts for t in p[1:]], tail=True))
        return [ids + [i for _ in p[1:] for i in next(rest)] for ids, p in zip(first, parts, strict=True)]

    def _batch(self, texts: list[str], *, tail: bool) -> list[list[int]]:
        if not texts:
            return []
        unique = list(dict.fromkeys(texts))
        anchor = self._anchor if tail else ""
        ids = self._call([anchor + t for t in unique])
        if anchor:
            mark = self._call([anchor])[0]
            for i, text in enumerate(unique):
                if ids[i][: len(mark)] == mark:
                    ids[i] = ids[i][len(mark) :]
                else:  # the anchor merged into the text, which therefore starts with a line feed itself
                    ids[i] = self._call([text])[0]
        known = dict(zip(unique, ids, strict=True))
        return [list(known[t]) for t in texts]

    def _call(self, texts: list[str]) -> list[list[int]]:
        found = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return [list(ids) for ids in found]

    def decode(self, ids: Iterable[int], *, control: bool = False) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=not control, clean_up_tokenization_spaces=False))

    # -- what the tokenizer does by itself -----------------------------------------------------------------------------

    def _find_anchor(self) -> str:
        r"""A line feed to put before continuing text and to take off again, where the tokenizer adds a blank to a first word."""
        line, letter = self._call(["\n", "a"])
        joined = self.tokenizer.decode([*line, *letter], clean_up_tokenization_spaces=False)
        return "" if joined == "\na" else "\n"

    def _find_start(self) -> list[int]:
        """The tokens that the tokenizer puts before plain text, such as a BOS token. What it would put behind is not wanted."""
        bare = self._call(["a"])[0]
        full = list(self.tokenizer("a", verbose=False)["input_ids"])
        for at in range(len(full) - len(bare) + 1):
            if bare and full[at : at + len(bare)] == bare:
                return full[:at]
        return [b for b in [self.tokenizer.bos_token_id] if b is not None and full[:1] == [b]]

    def first(self) -> list[int]:
        """What stands before a text that has no prompt: there must be one token, or the first answer token has no past to be predicted from."""
        if self.start:
            return list(self.start)
        for token in (self.tokenizer.bos_token_id, self.eos):
            if token is not None:
                return [token]
        raise UserError(
            "a row has an empty prompt, and the tokenizer has neither a BOS nor an end token to put first",
            remedy="Give the rows a prompt.",
        )

    def plain_prompt(self, ids: list[int]) -> list[int]:
        """Ids of a plain-text prompt with the tokenizer's own start, once."""
        if self.start and ids[: len(self.start)] != self.start:
            ids = self.start + ids
        return ids or self.first()

    def end(self) -> int:
        if self.eos is None:
            raise UserError(
                "the tokenizer has no end token, so an answer could not be told to stop",
                remedy="Set tokenizer.eos_token, or use a chat template that ends turns with a token.",
            )
        return self.eos


def _any_of(spellings: Iterable[str]) -> re.Pattern[str] | None:
    """Matches any of the spellings, the longest first."""
    known = sorted((s for s in spellings if s), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, known))) if known else None
