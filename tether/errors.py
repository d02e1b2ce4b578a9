"""The one exception for a user's mistake: printed as one sentence, exit code 2, never a traceback."""

from __future__ import annotations


class UserError(Exception):
    """A mistake the user can mend.

    `what` says what is wrong, `where` names the file, line or key, `remedy` says what to do.

    >>> str(UserError("beta must be above 0", where="dpo.yaml: beta", remedy="Use 0.1, the usual value."))
    'dpo.yaml: beta: beta must be above 0. Use 0.1, the usual value.'
    """

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        self.what, self.where, self.remedy = what, where, remedy
        text = what if what.endswith((".", "!", "?")) else what + "."
        if where:
            text = f"{where}: {text}"
        if remedy:
            text = f"{text} {remedy}"
        super().__init__(text)
