"""Sampling in this process: continuous batching over any causal language model of transformers.

A prompt is prefilled once for all its completions. Live sequences occupy slots; a finished one leaves and waiting ones enter
at every step. Every completion draws from its own generator, so it does not depend on its neighbours or on the number of slots.
Tokens are never decoded and encoded again, nothing is padded, and the model handed in is not changed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil
import torch
from torch import Tensor, nn

from tether.engines.fitting import Precision, config_of, fit
from tether.engines.kv import round_up
from tether.engines.runners import Entering, Runner
from tether.engines.sampling import Sampling, draw
from tether.errors import UserError

FinishReason = Literal["stop", "length", "stop_string"]
OnToken = Callable[[int, int, int], None]  # request, sample, token id
OnDone = Callable[["Completion"], None]


@dataclass(frozen=True)
class Request:
    """A prompt to continue `n` times. Completion i of a request depends on prompt, sampling, seed and i alone.

    `where` is what errors call it, such as the file and line it comes from; left out, its place among the requests.
    """

    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    seed: int | str = 0
    where: str = ""

    @property
    def total(self) -> int:
        """Tokens of prompt and completion at most."""
        return len(self.prompt) + self.sampling.max_new_tokens


@dataclass(frozen=True)
class Completion:
    """One continuation. `tokens`, `logps` and `sampling_logps` are aligned; an end token is the last of them."""

    request: int  # index in the list given to `sample`
    sample: int  # 0..n-1 within the request
    tokens: list[int]
    logps: list[float]  # under the training distribution: softmax(logits / temperature), without penalty or filters
    sampling_logps: list[float]  # under the distribution drawn from; 0 when greedy
    finish_reason: FinishReason
    text: str | None  # without special tokens, cut before a stop string; None without a tokenizer


@dataclass
class _Group:
    """A request whose completions are not all live yet."""

    index: int
    request: Request
    entered: int = 0
    kept: Any = None  # the prompt's keys and values, while some completions wait for slots
    scores: Tensor | None = None  # (V,) after the prompt, kept likewise


@dataclass
class _Live:
    """The completion in a slot."""

    group: _Group
    sample: int
    uniform: random.Random
    stored: int  # tokens whose keys are in the slot
    row: int  # of this step's scores
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    sampling_logps: list[float] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def sampling(self) -> Sampling:
        return self.group.request.sampling


class LocalSampler:
    """Samples from `model`; keep one, and call `refresh()` when the weights have changed.

    `ends` is a tokenizer or a `Codec` (its end tokens and those of the model's generation settings end a completion, and
    completions get their text), or the end token ids themselves. `slots` is how many sequences are computed at once; `cache_tokens` bounds
    the tokens kept for all of them, by default what half of the free memory holds; `prefill_tokens` bounds the prompt tokens
    of one step. `notice` says in words when the model takes the slow path.
    """

    def __init__(
        self,
        model: nn.Module,
        ends: Any | Collection[int],
        *,
        precision: Precision,
        slots: int = 128,
        cache_tokens: int | None = None,
        prefill_tokens: int = 4096,
    ) -> None:
        if precision not in ("fp32", "bf16"):
            raise ValueError(f"precision is fp32 or bf16, got {precision!r}")
        if slots < 1 or prefill_tokens < 1:
            raise ValueError(f"need at least one slot and one token to prefill, got {slots} and {prefill_tokens}")
        self.model, self.precision, self.slots, self.prefill_tokens = model, precision, slots, prefill_tokens
        self.tokenizer = getattr(ends, "tokenizer", ends) if hasattr(ends, "decode") else None
        self.end_ids = end_ids(model, ends) if self.tokenizer is not None else frozenset(int(i) for i in ends)
        self._cache_tokens = cache_tokens
        self._runners: dict[bool, Runner] = {}  # plain or not
        self._fit, passed = fit(model, precision)
        if passed is not None:
            passed.close()
            self._runners[False] = passed

    @property
    def notice(self) -> str | None:
        return self._fit.notice

    @property
    def positions(self) -> int | None:
        """How many tokens prompt and completion may have together, if the model says."""
        return getattr(config_of(self.model), "max_position_embeddings", None)

    def refresh(self) -> None:
        """Take up the model's weights as they are now. (In float32 they are shared: nothing to do.)"""
        self._runners.clear()

    # -- the one question ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def sample(self, requests: Sequence[Request], on_token: OnToken | None = None, on_done: OnDone | None = None) -> list[Completion]:
        """Completions in the order of the requests, each request's `n` in a row.

        `on_token` is called for every token as it is drawn (to show a reply while it grows), `on_done` for every completion as it
        ends (to keep it, whatever happens to the others).
        Raises UserError for an empty prompt, a prompt that leaves no room, or scores that are not numbers.
        """
        self._check(requests)
        # Longest first: slots are as long as the longest sequence that waits, and long ones should not start last.
        waiting = deque(sorted((_Group(i, r) for i, r in enumerate(requests) if r.n), key=lambda g: -g.request.total))
        if not waiting:
            return []
        longest = waiting[0].request.total
        runner = self._runner_for(longest)
        budget = self._budget(longest, runner.device)
        rows = min(self.slots, budget // round_up(longest), sum(g.request.n for g in waiting))
        runner.open(rows)
        live: list[_Live] = []
        done: list[Completion] = []
        try:
            while waiting or live:
                # 1. Waiting sequences enter free slots.
                if waiting and len(live) == rows:
                    rows = self._widen(runner, rows, live, waiting[0], budget)
                n = len(live)
                entering, resumed = self._admit(runner, waiting, live, rows)
                # 2. One pass: a token of every live sequence, and the prompts that enter.
                scores = _forward(runner, live[:n], entering, waiting, resumed)
                order = [s.row for s in live]
                if order != list(range(len(scores))):
                    scores = scores[order]
                # 3. Draw, and let the finished leave.
                self._draw(scores, live, on_token)
                before = len(done)
                self._retire(runner, live, done)
                if on_done is not None:
                    for completion in done[before:]:
                        on_done(completion)
        finally:
            runner.close()
        return sorted(done, key=lambda c: (c.request, c.sample))

    # -- slots ---------------------------------------------------------------------------------------------------------

    def _budget(self, longest: int, device: torch.device) -> int:
        budget = self._cache_tokens or free_bytes(device) // 2 // max(1, self._fit.bytes_per_token)
        if budget < round_up(longest):
            source = "cache_tokens" if self._cache_tokens else "free memory"
            raise UserError(
                f"a prompt and its completion of together {longest} tokens do not fit the cache of {budget} tokens ({source})",
                remedy="Lower max_new_tokens, shorten the prompt, or allow more memory.",
            )
        return budget

    def _widen(self, runner: Runner, rows: int, live: list[_Live], group: _Group, budget: int) -> int:
        """More, shorter slots once the long sequences are done; only when it pays for moving the live ones."""
        longest = max([group.request.total] + [s.group.request.total for s in live])
        possible = min(self.slots, budget // round_up(longest))
        if possible < rows * 5 // 4 + 1:
            return rows
        runner.widen(possible, len(live))
        return possible

    def _admit(self, runner: Runner, waiting: deque[_Group], live: list[_Live], rows: int) -> tuple[list[Entering], Tensor | None]:
        """Fill free slots. Returns the prompts to prefill, and the scores of a group that was split before."""
        entering: list[Entering] = []
        resumed: Tensor | None = None
        n = len(live)
        for i, s in enumerate(live):
            s.row = i
        while waiting and len(live) < rows:
            group = waiting[0]
            prompt = group.request.prompt
            left = group.request.n - group.entered
            count = min(left, rows - len(live))
            if group.kept is not None:
                runner.insert(group.kept, len(live), count)
                resumed, row = group.scores, -1
            elif entering and sum(len(e.tokens) for e in entering) + len(prompt) > self.prefill_tokens:
                break
            else:
                row = n + len(entering)
                entering.append(Entering(prompt, len(live), count, keep=count < left))
            for sample in range(group.entered, group.entered + count):
                live.append(_Live(group, sample, random.Random(f"{group.request.seed}/{sample}"), len(prompt), row))
            group.entered += count
            if count == left:
                waiting.popleft()
        return entering, resumed

    def _retire(self, runner: Runner, live: list[_Live], done: list[Completion]) -> None:
        """Finished sequences leave; the last live one moves into each gap."""
        for i in reversed(range(len(live))):
            s = live[i]
            if s.finish is None:
                continue
            done.append(Completion(s.group.index, s.sample, s.tokens, s.logps, s.sampling_logps, s.finish, self._text(s)))
            last = live.pop()
            if i < len(live):
                runner.move(len(live), i, last.stored)
                live[i] = last

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _draw(self, scores: Tensor, live: list[_Live], on_token: OnToken | None) -> None:
        settings = [s.sampling for s in live]
        history = [[*s.group.request.prompt, *s.tokens] if s.sampling.repetition_penalty != 1 else () for s in live]
        try:
            drawn = draw(scores, settings, history, [s.uniform.random() for s in live])
        except FloatingPointError as error:
            s = live[int(str(error))]
            raise UserError(
                f"the model's scores after {len(s.tokens)} tokens of the completion are not numbers",
                where=place_of(s.group.request, s.group.index),
                remedy="Its weights are broken (look for NaN in the run that made them), or bf16 overflows: try fp32.",
            ) from None
        for s, token, logp, sampling_logp in zip(
            live, drawn.tokens.tolist(), drawn.logps.tolist(), drawn.sampling_logps.tolist(), strict=True
        ):
            s.tokens.append(token)
            s.logps.append(logp)
            s.sampling_logps.append(sampling_logp)
            if on_token is not None:
                on_token(s.group.index, s.sample, token)
            if token in self.end_ids and not s.sampling.ignore_end:
                s.finish = "stop"
            elif s.sampling.stop and self._stopped(s) is not None:
                s.finish = "stop_string"
            elif len(s.tokens) >= s.sampling.max_new_tokens:
                s.finish = "length"

    def _stopped(self, s: _Live) -> str | None:
        """The completion's text before a stop string, once it holds one."""
        # Only a tail can have become a match; a token is at least one byte, a character at most four.
        tail = self._decode(s.tokens[-(4 * max(map(len, s.sampling.stop)) + 4) :], skip_special_tokens=False)
        if not any(stop in tail for stop in s.sampling.stop):
            return None
        text = self._decode(s.tokens, skip_special_tokens=False)
        places = [at for stop in s.sampling.stop if (at := text.find(stop)) >= 0]
        return text[: min(places)] if places else None

    def _text(self, s: _Live) -> str | None:
        if self.tokenizer is None:
            return None
        if s.finish == "stop_string":
            # Cut in the text that has special tokens, as that is where the stop string was looked for.
            before = self._stopped(s) or ""
            for token in getattr(self.tokenizer, "all_special_tokens", ()):
                before = before.replace(token, "")
            return before
        return self._decode(s.tokens[:-1] if s.finish == "stop" else s.tokens, skip_special_tokens=True)

    def _decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    # -- set-up --------------------------------------------------------------------------------------------------------

    def _runner_for(self, longest: int) -> Runner:
        plain = self._fit.needs_plain(longest)
        if plain not in self._runners:
            self._runners[plain] = self._fit.runner(self.model, plain=plain)
        return self._runners[plain]

    def _check(self, requests: Sequence[Request]) -> None:
        limit = self.positions
        vocabulary = getattr(config_of(self.model), "vocab_size", None)
        for i, request in enumerate(requests):
            where = place_of(request, i)
            if not request.prompt:
                raise UserError("the prompt has no tokens", where=where, remedy="Give at least one token, such as the begin token.")
            if request.n < 0:
                raise UserError(f"n must be 0 or more, got {request.n}", where=where)
            if vocabulary is not None and not 0 <= min(request.prompt) <= max(request.prompt) < vocabulary:
                raise UserError(
                    f"the prompt has token {max(request.prompt, key=abs)}, outside the model's vocabulary of {vocabulary}",
                    where=where,
                    remedy="Use the tokenizer that belongs to the model.",
                )
            if limit is not None and request.total > limit:
                raise UserError(
                    f"a prompt of {len(request.prompt)} tokens and max_new_tokens {request.sampling.max_new_tokens} exceed the model's "
                    f"{limit} positions",
                    where=where,
                    remedy="Lower max_new_tokens or shorten the prompt.",
                )
            if request.sampling.stop and self.tokenizer is None:
                raise UserError("stop strings need a tokenizer", where=where, remedy="Make the sampler with a tokenizer.")


def place_of(request: Request, index: int) -> str:
    """What errors call a request."""
    return request.where or f"request {index}"


def _forward(runner: Runner, live: Sequence[_Live], entering: Sequence[Entering], waiting: deque[_Group], resumed: Tensor | None) -> Tensor:
    """Scores (n + g, V) of n live sequences and g prompts, with `resumed` as one more row at the end."""
    parts = []
    if live or entering:
        scores, kept = runner.step([s.tokens[-1] for s in live], [s.stored for s in live], entering)
        for s in live:
            s.stored += 1
        if kept is not None:
            waiting[0].kept, waiting[0].scores = kept, scores[-1].clone()
        parts.append(scores)
    if resumed is not None:
        parts.append(resumed[None])
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a completion: the tokenizer's (or codec's), and those of the model's generation settings and config."""
    found: set[int] = set(getattr(tokenizer, "end_ids", ()))
    for source in (tokenizer, getattr(model, "generation_config", None), config_of(model)):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(found)


def free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
