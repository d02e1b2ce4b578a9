"""`tether collect --terminal`: the desk by keys, blind, in a terminal; or by lines from a pipe, one for each vote.

Answers are shown as they are written, with control characters made visible: rendering would hide what is not Markdown, and an escape
sequence in an answer must not move the cursor. A pair takes one key; a ranking is typed as an order and Enter.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TextIO

from tether.collect.ballots import AlreadyVoted, BadBallot, Ballot, Choice
from tether.collect.desk import Annotator, Desk, Shown
from tether.collect.keyboard import Keyboard, ranks_of
from tether.collect.marks import visible
from tether.messages import Text

SIDE_BY_SIDE = 100  # columns of the terminal from which two answers stand beside each other
CHOICES: dict[str, Choice] = {
    "1": "left",
    "left": "left",
    "2": "right",
    "right": "right",
    "t": "tie",
    "b": "bad",
    "s": "skip",
}
STRENGTHS = {1: "slightly", 2: "clearly", 3: "much"}


def run_terminal(desk: Desk, annotator: Annotator, stdin: TextIO, stdout: TextIO) -> int:
    """Until nothing is left for this annotator, they quit, or the input ends; returns how many votes stand that were given here.

    A vote is on the disk before it is confirmed, so stopping at any point loses nothing.
    """
    return Turns(desk, annotator, Keyboard(stdin, stdout), Screen(stdout)).run()


@dataclass
class Turns:
    """One annotator at one terminal. `draft` holds strength and reason of the item in front of them, until they choose."""

    desk: Desk
    annotator: Annotator
    keys: Keyboard
    screen: Screen
    given: int = 0
    stopped: bool = False
    draft: Ballot = field(default_factory=lambda: Ballot(0, "skip"))

    def run(self) -> int:
        if not self._welcome():
            return 0
        shown = self.desk.next(self.annotator.id)
        while not self.stopped:
            if shown is None and (shown := self._finished()) is None:
                self.screen.say(f"Done. {self._count()}")
                return self.given
            self.screen.item(shown, *self._progress())
            self.draft = Ballot(shown.assignment, "skip")
            shown = self._turn(shown)
        self.screen.say(f"Stopped. {self._count()}")
        return self.given

    def _welcome(self) -> bool:
        """Guidelines first. False when they go at once."""
        self.screen.guidelines(self.desk.settings.guidelines)
        self.screen.say(self._help())
        return not self.keys.single or self.keys.key("Any key begins, q stops: ") not in (None, "q")

    def _turn(self, shown: Shown) -> Shown | None:
        """Asks until something is decided; returns what comes after it: the next item, or one that was taken back."""
        while True:
            typed = self._ask(shown)
            if typed is None or typed.lower() == "q":
                self.stopped = True
                return None
            if typed.lower() == "u":
                if (back := self._undo()) is not None:
                    return back
                continue
            try:
                if self._vote(shown, typed):
                    return self.desk.next(self.annotator.id)
            except AlreadyVoted as error:  # in another window, say
                self.screen.say(str(error))
                return self.desk.next(self.annotator.id)
            except BadBallot as error:
                self.screen.say(str(error))

    def _ask(self, shown: Shown) -> str | None:
        n = len(shown.order)
        if n > 2:
            return self.keys.line(f"Best to worst of 1 to {n} (? for help): ")
        noted = [STRENGTHS[self.draft.strength]] if self.draft.strength else []
        noted += ["with a reason"] if self.draft.reason else []
        return self.keys.key(f"Better: 1 or 2{' (' + ', '.join(noted) + ')' if noted else ''} (? for help): ")

    def _vote(self, shown: Shown, typed: str) -> bool:
        """Whether a vote was given; other keys show or note something."""
        command = typed.lower()
        if command in ("?", "h", ""):
            self.screen.say(self._help() if command else "Please choose; ? lists the keys.")
        elif command == "g":
            self.screen.guidelines(self.desk.settings.guidelines or "This desk has no guidelines.")
        elif command == "a":
            self.screen.item(shown, *self._progress())
        elif command == "+" and self.desk.settings.strength:
            self.draft = replace(self.draft, strength=(self.draft.strength or 0) % 3 + 1)
        elif command == "r":
            for i, reason in enumerate(self.desk.settings.reasons, 1):
                self.screen.say(f"  {i}  {visible(reason)}")
            self.draft = replace(self.draft, reason=self._reason(self.keys.line("Reason: ") or ""))
        else:
            self.desk.vote(self.annotator.id, self._ballot(typed, len(shown.order)))
            self.given += 1
            self.screen.say("Saved.")
            return True
        return False

    def _ballot(self, typed: str, n: int) -> Ballot:
        """One line as a ballot: "1", "2 3 it is right", "t", or of more answers "2 1=3 : the first is false"."""
        word, _, rest = typed.partition(" ")
        choice = CHOICES.get(word.lower())
        if n > 2 and choice not in ("tie", "bad", "skip"):
            order, _, reason = typed.partition(":")
            return replace(self.draft, choice="ranking", ranks=ranks_of(order, n), strength=None, reason=self._reason(reason))
        if choice is None:
            raise BadBallot(f"{visible(word)!r:.40} is no key here", remedy="? lists the keys.")
        if n > 2 and choice == "tie":  # one way to say it: all have the best rank
            return replace(self.draft, choice="ranking", ranks=(1,) * n, reason=self._reason(rest))
        strength, rest = self.draft.strength, rest.strip()
        first, _, after = rest.partition(" ")
        if choice in ("left", "right") and self.desk.settings.strength and first in ("1", "2", "3"):
            strength, rest = int(first), after.strip()
        return replace(
            self.draft,
            choice=choice,
            strength=strength if choice in ("left", "right") else None,
            reason=self._reason(rest) or self.draft.reason,
        )

    def _reason(self, text: str) -> str:
        """A number stands for an offered reason, everything else for itself."""
        offered, text = self.desk.settings.reasons, text.strip()
        if not offered or not text.removeprefix("#").isdecimal():
            return text
        number = int(text.removeprefix("#"))
        if not 1 <= number <= len(offered):
            raise BadBallot(f"there is no reason {number}", remedy=f"Choose 1 to {len(offered)}, or use your own words.")
        return offered[number - 1]

    def _undo(self) -> Shown | None:
        back = self.desk.undo(self.annotator.id)
        self.screen.say("Taken back." if back else "There is no vote to take back.")
        self.given -= back is not None and self.given > 0
        return back

    def _finished(self) -> Shown | None:
        """Nothing is left: the last vote can still be taken back."""
        self.screen.say("Nothing is left for you.")
        typed = self.keys.key("u takes the last vote back, any other key ends: ")
        return self._undo() if typed == "u" else None

    def _progress(self) -> tuple[int, int]:
        now = self.desk.progress(self.annotator.id)
        return now.mine, now.left

    def _count(self) -> str:
        return f"{self.given} {'vote' if self.given == 1 else 'votes'} given; all of them are on the disk."

    def _help(self) -> str:
        """The keys. Lines from a pipe take more on the same line."""
        lines = [
            "1 or 2    this answer is better (arrows too); of more answers an order, best first: 2 1=3, -3 leaves the third out",
            "t         a tie",
            "b         all of them are bad",
            "s         skip: I cannot judge it",
            "u         take the last vote back",
            "r         give a reason, before choosing",
        ]
        if self.desk.settings.strength:
            lines.append("+         how much better: slightly, clearly, much; before choosing")
        if not self.keys.single:
            lines.append("On one line: the choice, then 1 to 3 for how much, then a reason; after an order a reason follows a colon.")
        return "\n".join([*lines, "a         show it again", "g         the guidelines", "q         stop; everything is saved"])


class Screen:
    """Shows items: in boxes on a terminal, as plain lines elsewhere."""

    def __init__(self, stdout: TextIO) -> None:
        from rich.console import Console

        if hasattr(stdout, "reconfigure"):
            stdout.reconfigure(errors="backslashreplace")  # a terminal without Unicode still shows that something is there
        self.stdout = stdout
        self.console = Console(file=stdout, highlight=False)

    def say(self, text: str) -> None:
        self.stdout.write(f"{text}\n")
        self.stdout.flush()

    def guidelines(self, text: str) -> None:
        """Ours, or the desk's owner's: Markdown on a terminal."""
        if not text.strip():
            return
        if self.console.is_terminal:
            from rich.markdown import Markdown

            self.console.print(Markdown(visible(text), hyperlinks=False))
            self.console.print()
        else:
            self.say(visible(text).rstrip() + "\n")

    def item(self, shown: Shown, mine: int, left: int) -> None:
        """The prompt and its answers in the order shown. Nothing tells who wrote them, or that an item comes a second time."""
        answers = [visible(shown.item.answers[place].text) for place in shown.order]
        asked = [(visible(role), visible(text)) for role, text in _turns(shown.item.prompt)]
        heading = f"{mine} done, {left} left"
        if not self.console.is_terminal:
            prompt = [f"{role}: {text}" if role else text for role, text in asked]
            parts = [f"== {heading} ==", *prompt, *(f"-- {i} --\n{a}" for i, a in enumerate(answers, 1))]
            self.say("\n" + "\n\n".join(parts) + "\n")
            return
        from rich.panel import Panel
        from rich.rule import Rule
        from rich.table import Table
        from rich.text import Text as Styled

        self.console.print(Rule(heading, align="left"))
        for role, text in asked:
            self.console.print(Panel(Styled(text), title=Styled(role) if role else None, title_align="left", border_style="dim"))
        boxes = [Panel(Styled(a), title=f" {i} ", title_align="left", border_style="cyan") for i, a in enumerate(answers, 1)]
        if len(boxes) == 2 and self.console.width >= SIDE_BY_SIDE:
            beside = Table.grid(expand=True)
            beside.add_column(ratio=1)
            beside.add_column(ratio=1)
            beside.add_row(*boxes)
            self.console.print(beside)
        else:
            for box in boxes:
                self.console.print(box)


def _turns(prompt: Text) -> list[tuple[str, str]]:
    """(role, text); a prompt of plain text has no role."""
    return [("", prompt)] if isinstance(prompt, str) else [(m["role"], m["content"]) for m in prompt]
