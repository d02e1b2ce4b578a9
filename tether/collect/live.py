"""Answers sampled while people vote: the next pairs are prepared ahead, by one or two models.

All work of torch is done in one thread, which loads the models, too: a second one running it slows torch down badly. The database is
touched only when a pair is whole.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tether.collect.app import LiveState
from tether.collect.desk import Desk, Shown
from tether.collect.items import Item, make_item
from tether.errors import UserError
from tether.files import Source
from tether.messages import BadRow, Text
from tether.progress import say

if TYPE_CHECKING:
    from tether.answers import Speaker
    from tether.engines.sampling import Sampling

AHEAD = 3  # pairs that wait for whoever votes
TRIES = 3  # draws of two answers that differ


class _Stopped(Exception):
    pass


class LiveAnswers:
    """Fills a desk with answers to `prompts`: two of one model, or one of each of two. `load` makes a speaker of a model's name.

    Prompts whose answers are on the desk already are left alone, so a desk can be opened again.
    """

    def __init__(
        self,
        desk: Desk,
        prompts: Sequence[tuple[Text, Source]],
        models: Sequence[str],
        sampling: Sampling,
        load: Callable[[str], Speaker],
        *,
        seed: int = 0,
        ahead: int = AHEAD,
    ) -> None:
        self.desk, self.prompts, self.models, self.sampling, self.load = desk, prompts, list(dict.fromkeys(models)), sampling, load
        self.seed, self.ahead = seed, ahead
        self._change = threading.Condition()
        self._ready, self._made, self._goal = 0, 0, ahead
        self._loaded, self._finished, self._stopping = False, False, False
        self._mistake: UserError | None = None
        self._failed = ""
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)

    # -- for whoever serves the desk -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when the models are loaded. Raises the UserError of one that cannot be."""
        self._thread.start()
        with self._change:
            self._change.wait_for(lambda: self._loaded or self._finished)
            if self._mistake is not None:
                raise self._mistake

    def state(self) -> LiveState:
        with self._change:
            return LiveState(self._ready, len(self.prompts), self._finished, self._failed)

    def wanted(self, left: int) -> None:
        """Somebody has `left` items, with the one they look at: `ahead` more than that are made."""
        with self._change:
            self._goal = max(self._goal, self._made + self.ahead - max(0, left - 1))
            self._change.notify_all()

    def next(self, annotator: int) -> Shown | None:
        """As `Desk.next`, but waits for the next answers rather than saying that nothing is left."""
        while True:
            before = self.state()
            shown = self.desk.next(annotator)
            self.wanted(self.desk.progress(annotator).left)
            if shown is not None or before.finished:
                return shown
            with self._change:
                while self._ready <= before.ready and not self._finished:
                    self._change.wait()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Lets the pair go that is being made."""
        with self._change:
            self._stopping = True
            self._change.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            speakers = [self.load(name) for name in self.models]
            with self._change:
                self._loaded = True
                self._change.notify_all()
            self._fill(speakers)
        except _Stopped:
            pass
        except UserError as error:
            self._mistake, self._failed = error, str(error)
        except Exception as error:
            # The desk goes on with what is there; the page and the terminal say what happened.
            self._failed = f"Sampling ended: {type(error).__name__}: {error}"
        finally:
            with self._change:
                self._finished = True
                self._change.notify_all()
        if self._failed and self._loaded:
            say(f"no more answers are made: {self._failed}")

    def _fill(self, speakers: list[Speaker]) -> None:
        there = {_mark(item.prompt, item.extra.get("prompt_source")) for item in self.desk.items().values()}
        for number, (prompt, source) in enumerate(self.prompts):
            if _mark(prompt, str(source)) in there:
                self._count(new=False)
                continue
            with self._change:
                self._change.wait_for(lambda: self._stopping or self._made < self._goal)
                if self._stopping:
                    return
            try:
                item = self._sampled(speakers, number, prompt, source)
            except UserError as error:
                say(f"left out: {error}")
                item = None
            if item is not None:
                self.desk.add_items([item])
            self._count(new=item is not None)

    def _count(self, *, new: bool) -> None:
        with self._change:
            self._ready += 1
            self._made += new
            self._change.notify_all()

    def _sampled(self, speakers: list[Speaker], number: int, prompt: Text, source: Source) -> Item | None:
        """Two answers that differ; None where the models say the same however often they are asked."""
        names = [s.name for s in speakers] if len(speakers) > 1 else [speakers[0].name] * 2
        origin = f"sampled from {' and '.join(dict.fromkeys(names))}"
        for attempt in range(TRIES):
            seed = f"{self.seed}/{number}/{attempt}"
            said = [a for s in speakers for a in self._answers(s, prompt, source, 2 if len(speakers) == 1 else 1, seed)]
            extra = {"prompt_source": str(source), "finish_reasons": [reason for _, reason in said], "seed": seed}
            try:
                if len({text for text, _ in said}) > 1:
                    return make_item(prompt, [text for text, _ in said], models=names, source=origin, extra=extra)
            except BadRow as bad:
                say(f"left out: {source}: {bad.what}")
                return None
        say(f"left out: {source}: both answers were the same {TRIES} times")
        return None

    def _answers(self, speaker: Speaker, prompt: Text, source: Source, n: int, seed: str) -> list[tuple[str, str]]:
        from tether.engines.local import Request

        def check(*_: int) -> None:
            if self._stopping:
                raise _Stopped

        request = Request(speaker.codec.prompt_ids(prompt, str(source)), self.sampling, n, seed, str(source))
        return [(c.text or "", c.finish_reason) for c in speaker.sampler.sample([request], check)]


class PatientDesk(Desk):
    """A desk whose `next` waits for answers that are being made."""

    def __init__(self, desk: Desk, live: LiveAnswers) -> None:
        super().__init__(desk.folder, desk.settings, desk.store)
        self.live = live

    def next(self, annotator: int) -> Shown | None:
        return self.live.next(annotator)


def _mark(prompt: Text, source: object) -> str:
    return json.dumps([prompt, source], sort_keys=True)
