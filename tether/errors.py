"""The one exception for a user's mistake: printed as one sentence, exit code 2, never a traceback."""

from __future__ import annotations


class UserError(Exception):
    """A mistake the user can mend.

    `what` says what is wrong, `where` names the file, line or key, `remedy` says what to do. A `what` that lists several things
    ends in a line end, and the remedy gets a line of its own.

    >>> str(UserError("beta must be above 0", where="dpo.yaml: beta", remedy="Use 0.1, the usual value."))
    'dpo.yaml: beta: beta must be above 0. Use 0.1, the usual value.'
    """

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        self.what, self.where, self.remedy = what, where, remedy
        text = what if what.endswith((".", "!", "?", "\n")) else what + "."
        if where:
            text = f"{where}: {text}"
        if remedy:
            text += remedy if text.endswith("\n") else f" {remedy}"
        super().__init__(text)


class RankLost(Exception):
    """Another rank is gone, and the run cannot go on without it: told in one sentence, exit code 1."""
