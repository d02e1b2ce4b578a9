"""Sampling by vLLM servers: the questions of `LocalSampler`, answered over HTTP by one or more servers that get the weights handed over.

Each request goes to the server that has least to do, all completions of a prompt together, so that its prefix cache computes the prompt
once. A server that fails is tried three times, with growing pauses, then dropped with a message, and another one is asked. An adapter is
loaded beside those in use; whole weights replace those of a server while nothing is sampled.

A completion depends on prompt, settings, seed, weights and on what else the server computes at the same time: its kernels round
differently in other company. So a step that is made again is the same step up to such rounding, not bit for bit.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tether.engines import wire
from tether.engines.gate import Gate
from tether.engines.local import Completion, OnDone, OnToken, Request, place_of
from tether.engines.server import Server
from tether.errors import UserError
from tether.http_json import Final, Passing

TRIES = 3
PARALLEL = 256  # requests under way at once; a server queues what it cannot compute
T = TypeVar("T")
R = TypeVar("R")


class HandedOver(Protocol):
    """`tether.engines.weights.Weights`, or what stands in for it."""

    @property
    def adapted(self) -> bool: ...
    def write(self, version: int) -> tuple[str, Path]: ...
    def forget(self, keep: Collection[str]) -> None: ...


class VLLMSampler:
    """Samples from `servers`, which have been met. `codec` gives the end tokens and reads completions; `pause_s` is the first pause.

    `version` says which weights are handed over; `seconds` what handing over has taken so far; `messages` what should be told, to be taken
    by the main thread (`told`). `sample` may be called from several threads, `refresh` from one.
    """

    remote = True

    def __init__(
        self, servers: Sequence[Server], codec: Any, weights: HandedOver, end_ids: frozenset[int], *, pause_s: float = 1.0
    ) -> None:
        self.servers, self.codec, self.weights, self.end_ids, self.pause_s = list(servers), codec, weights, end_ids, pause_s
        self.version: int | None = None
        self.seconds = 0.0
        self.notice: str | None = None
        self._gate = Gate()
        self._current: str | None = None
        self._folders: dict[str, Path] = {}
        self._lock = threading.Lock()
        self._messages: list[str] = []
        self._dropped: list[str] = []

    @property
    def positions(self) -> int | None:
        """How many tokens prompt and completion may have together, on every server."""
        known = [s.positions for s in self.servers if s.positions is not None]
        return min(known) if known else None

    def told(self) -> list[str]:
        """What has happened since the last call, in sentences."""
        with self._lock:
            out, self._messages = self._messages, []
        return out

    # -- weights -------------------------------------------------------------------------------------------------------

    def refresh(self, version: int | None = None) -> None:
        """Hand the policy's weights over, unless those of this version have been. None: another version than any before."""
        if version is None:
            version = -1 if self.version is None else self.version + 1
        if version == self.version:
            return
        began = time.perf_counter()
        # Whole weights replace others in place: an answer must not be begun with the old and ended with the new.
        with nullcontext() if self.weights.adapted else self._gate.closed():
            name, folder = self.weights.write(version)
            self._folders[name] = folder
            in_threads(lambda server: self._tries(server, lambda: self._give(server, name)), self._living())
            self._current, self.version = name, version
        self._living()
        keep = self._gate.names() | {name}
        self._folders = {n: f for n, f in self._folders.items() if n in keep}
        if self.weights.adapted:
            in_threads(lambda server: server.forget(keep), self._living())
        self.weights.forget(keep)
        self.seconds += time.perf_counter() - began

    def _give(self, server: Server, name: str) -> bool:
        (server.take_adapter if self.weights.adapted else server.take_weights)(name, self._folders[name])
        return True

    # -- sampling ------------------------------------------------------------------------------------------------------

    def sample(self, requests: Sequence[Request], on_token: OnToken | None = None, on_done: OnDone | None = None) -> list[Completion]:
        """Completions in the order of the requests, each request's `n` in a row, as `LocalSampler.sample`.

        `on_token` and `on_done` are called when a request's answers are there. UserError where no server is left.
        """
        completions = self.begin(requests)()
        for c in completions:
            if on_token is not None:
                for token in c.tokens:
                    on_token(c.request, c.sample, token)
            if on_done is not None:
                on_done(c)
        return completions

    def begin(self, requests: Sequence[Request]) -> Callable[[], list[Completion]]:
        """The same in two halves: from here on the weights are settled; the function that is returned asks and waits, and must be called."""
        self._check(requests)
        if self._current is None:
            raise RuntimeError("refresh() hands the weights over before the first request")
        name, wanted = self._current, [i for i, request in enumerate(requests) if request.n]
        self._gate.enter(name)

        def ask() -> list[Completion]:
            try:
                made = in_threads(lambda i: self._one(i, requests[i], name), wanted)
            finally:
                self._gate.leave(name)
            return [c for some in made for c in some]

        return ask

    def _one(self, index: int, request: Request, name: str) -> list[Completion]:
        tokens = request.n * request.sampling.max_new_tokens
        while True:
            server = self._least_loaded(tokens)
            try:
                made = self._tries(server, lambda server=server: self._asked(server, index, request, name))  # type: ignore[misc]
            finally:
                with self._lock:
                    server.load -= tokens
            if made is not None:
                return made

    def _asked(self, server: Server, index: int, request: Request, name: str) -> list[Completion]:
        if name not in server.holds:  # it was gone for a while: whoever answers now may have been started anew
            self._give(server, name)
        model = name if self.weights.adapted else str(server.model)
        try:
            reply = server.complete(wire.question(request, model, self.end_ids, salt=name))
        except Final as error:
            if error.status == 404 and self.weights.adapted:
                raise Passing(f"it has lost the adapter ({error})") from None
            raise UserError(f"the server at {server.url} refuses it ({error})", where=place_of(request, index)) from None
        return wire.answers(reply, request, index, self.end_ids, self._decode, server.url)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.codec.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _check(self, requests: Sequence[Request]) -> None:
        limit = self.positions
        for i, request in enumerate(requests):
            where = place_of(request, i)
            wire.check_sampling(request.sampling, where)
            if not request.prompt:
                raise UserError("the prompt has no tokens", where=where, remedy="Give at least one token, such as the begin token.")
            if limit is not None and request.total > limit:
                raise UserError(
                    f"a prompt of {len(request.prompt)} tokens and max_new_tokens {request.sampling.max_new_tokens} exceed the "
                    f"{limit} positions of the servers",
                    where=where,
                    remedy="Start them with a larger --max-model-len, or shorten the prompt.",
                )

    # -- servers that fail ---------------------------------------------------------------------------------------------

    def _tries(self, server: Server, question: Callable[[], R]) -> R | None:
        """The answer, after three tries at most; None where the server has been dropped, by these tries or meanwhile."""
        for number in range(TRIES):
            if not server.alive:
                return None
            if number:
                time.sleep(self.pause_s * 2 ** (number - 1))
            try:
                return question()
            except (Passing, wire.Unfinished, ValueError, KeyError, TypeError, IndexError) as error:
                server.holds.clear()
                reason = str(error) if isinstance(error, (Passing, wire.Unfinished)) else f"an answer that is none ({error!r})"
        self._drop(server, reason)
        return None

    def _drop(self, server: Server, reason: str) -> None:
        with self._lock:
            if not server.alive:
                return
            server.alive = False
            left = sum(s.alive for s in self.servers)
            log = f"; its log: {server.log}" if server.log is not None else ""
            self._dropped.append(f"{server.url} ({reason}{log})")
            self._messages.append(
                f"the vLLM server at {server.url} has failed {TRIES} times ({reason}) and is left aside for the rest of the run; "
                f"{left} {'is' if left == 1 else 'are'} left"
            )

    def _living(self) -> list[Server]:
        living = [s for s in self.servers if s.alive]
        if not living:
            raise UserError(
                f"no vLLM server is left: {'; '.join(self._dropped)}",
                where="engine",
                remedy="Start them again (or let the run start its own), then continue with `tether resume`.",
            )
        return living

    def _least_loaded(self, tokens: int) -> Server:
        with self._lock:
            server = min(self._living(), key=lambda s: s.load)
            server.load += tokens
        return server


def in_threads(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """`work` on every item, side by side, in their order; the first failure is raised. For work that waits for an answer.

    The threads are daemons: a run that is stopped does not wait for answers that nobody wants any more.
    """
    if len(items) == 1:
        return [work(items[0])]
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, R | None, BaseException | None]] = queue.SimpleQueue()
    for i in range(len(items)):
        todo.put(i)

    def worker() -> None:
        while True:
            try:
                i = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((i, work(items[i]), None))
            except BaseException as error:
                done.put((i, None, error))

    for _ in range(min(PARALLEL, len(items))):
        threading.Thread(target=worker, daemon=True).start()
    out: dict[int, Any] = {}
    for _ in items:
        i, value, error = done.get()
        if error is not None:
            while not todo.empty():  # nobody waits for the rest
                try:
                    todo.get_nowait()
                except queue.Empty:
                    break
            raise error
        out[i] = value
    return [out[i] for i in range(len(items))]
