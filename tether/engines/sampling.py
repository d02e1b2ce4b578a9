"""How the next token is drawn from scores: settings, filters, and one uniform number per token.

A token is drawn by inverting the cumulative distribution in token-id order at a uniform number from the completion's own
generator. So a completion depends on its prompt, its settings and its seed, and not on its neighbours in the batch: rounding
in the scores can move the choice only when the uniform number lies within that rounding of a boundary.

Filters are applied in the order transformers applies them: repetition penalty, temperature, top-k, top-p, min-p.
Where several tokens tie for the last place of top-k, exactly k are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.errors import UserError

CANDIDATES = 1024  # how many of the best tokens top-p and min-p look at before they look at the whole vocabulary
CHUNK = 2**19  # scores drawn from at a time on CPU: float32 copies of them stay in cache
BLOCK = 256  # the cumulative distribution is built from sums of this many tokens


@dataclass(frozen=True)
class Sampling:
    """How to continue a prompt. The defaults sample from the model as it is.

    >>> Sampling(temperature=0.7, top_p=0.9).greedy
    False
    """

    max_new_tokens: int = 256  # tokens of a completion at most, its end token included
    temperature: float = 1.0  # scores are divided by it; 0 always takes the likeliest token
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the likeliest tokens that together reach this probability
    min_p: float = 0.0  # keep tokens with at least this share of the likeliest one's probability
    repetition_penalty: float = 1.0  # above 1 makes tokens of the prompt and the completion less likely (Keskar et al. 2019)
    stop: tuple[str, ...] = ()  # the completion ends when its text contains one of these
    ignore_end: bool = False  # go on past end tokens, to `max_new_tokens`

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        for name, fine, allowed in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or above"),
            ("top_k", self.top_k >= 0, "0 (off) or above"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0; 1 is off"),
        ):
            if not fine:
                raise UserError(f"{name} must be {allowed}, got {getattr(self, name)}", where=name)
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise UserError("a stop string must be a text that is not empty", where="stop")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True)
class Drawn:
    """One token for each row."""

    tokens: Tensor  # (n,) int64
    logps: Tensor  # (n,) float32: log-probability under the training distribution, softmax(logits / temperature)
    sampling_logps: Tensor  # (n,) float32: under the distribution it was drawn from, after penalty and filters; 0 if greedy


def draw(logits: Tensor, settings: Sequence[Sampling], history: Sequence[Sequence[int]], uniforms: Sequence[float]) -> Drawn:
    """The next token of every row.

    logits (n, V) of any type; history: prompt and completion so far, read only by rows with a repetition penalty;
    uniforms: one number in [0, 1) a row. Raises FloatingPointError naming the first row whose scores are not numbers.
    """
    rows = CHUNK // logits.shape[1] + 1
    if len(logits) > rows and logits.device.type == "cpu":
        spans = [slice(start, start + rows) for start in range(0, len(logits), rows)]
        parts = []
        for span in spans:
            try:
                parts.append(_draw(logits[span], settings[span], history[span], uniforms[span]))
            except FloatingPointError as error:
                raise FloatingPointError(str(span.start + int(str(error)))) from None
        return Drawn(*(torch.cat([getattr(p, f) for p in parts]) for f in ("tokens", "logps", "sampling_logps")))
    return _draw(logits, settings, history, uniforms)


def _draw(logits: Tensor, settings: Sequence[Sampling], history: Sequence[Sequence[int]], uniforms: Sequence[float]) -> Drawn:
    # Without filters the training distribution of a greedy row is the model at temperature 1.
    temperature = torch.tensor([s.temperature or 1.0 for s in settings], device=logits.device)
    z = logits.to(torch.float32)
    if any(s.temperature not in (0, 1) for s in settings):
        z = z / temperature[:, None]
    penalised = _penalised(z, settings, history)
    high = penalised.amax(-1, keepdim=True)
    table = _BlockTable(penalised, high)
    lse = high[:, 0] + table.total.log().to(torch.float32)
    train_lse = lse if penalised is z else torch.logsumexp(z, -1)
    broken = ~torch.isfinite(train_lse)
    if bool(broken.any()):
        raise FloatingPointError(str(int(broken.nonzero()[0])))

    u = torch.tensor(list(uniforms), dtype=torch.float64, device=logits.device)
    tokens = table.invert(u)
    greedy = [i for i, s in enumerate(settings) if s.greedy]
    if greedy:
        tokens[greedy] = penalised[greedy].argmax(-1)
    at = tokens[:, None]
    sampling_logps = penalised.gather(1, at)[:, 0] - lse
    filtered = [i for i, s in enumerate(settings) if s.filters]
    if filtered:
        chosen, chosen_logps = _draw_filtered(penalised[filtered], lse[filtered], [settings[i] for i in filtered], u[filtered])
        tokens[filtered], sampling_logps[filtered] = chosen, chosen_logps
        at = tokens[:, None]
    if greedy:
        sampling_logps[greedy] = 0.0
    return Drawn(tokens, z.gather(1, at)[:, 0] - train_lse, sampling_logps)


def _penalised(z: Tensor, settings: Sequence[Sampling], history: Sequence[Sequence[int]]) -> Tensor:
    """Scores after the repetition penalty: the same tensor where no row has one."""
    rows = [i for i, s in enumerate(settings) if s.repetition_penalty != 1]
    if not rows:
        return z
    z = z.clone()
    for i in rows:
        seen = torch.tensor(sorted(set(history[i])), device=z.device)
        scores, penalty = z[i, seen], settings[i].repetition_penalty
        z[i, seen] = torch.where(scores < 0, scores * penalty, scores / penalty)
    return z


class _BlockTable:
    """Unnormalised probabilities with sums of blocks: the cumulative distribution without V additions in a row."""

    def __init__(self, z: Tensor, high: Tensor) -> None:
        n, vocabulary = z.shape
        n_blocks = -(-vocabulary // BLOCK)
        e = torch.empty(n, n_blocks * BLOCK, device=z.device)
        e[:, vocabulary:] = 0
        torch.sub(z, high, out=e[:, :vocabulary])
        e[:, :vocabulary].exp_()
        self.e = e.view(n, n_blocks, BLOCK)
        self.cumulative = self.e.sum(-1).to(torch.float64).cumsum(-1)  # (n, blocks)
        self.total = self.cumulative[:, -1]  # (n,)

    def invert(self, u: Tensor) -> Tensor:
        """The token in whose interval u lies, u (n,) in [0, 1)."""
        rows = torch.arange(len(u), device=u.device)
        target = u * self.total
        block = torch.searchsorted(self.cumulative, target[:, None], right=True)[:, 0].clamp_(max=self.cumulative.shape[1] - 1)
        below = torch.where(block > 0, self.cumulative[rows, (block - 1).clamp(min=0)], 0.0)
        size = self.cumulative[rows, block] - below
        return block * BLOCK + _invert(self.e[rows, block], ((target - below) / size))


def _invert(weights: Tensor, u: Tensor) -> Tensor:
    """Index in whose interval u (n,) lies, for unnormalised weights (n, k); never one of weight 0."""
    cumulative = weights.to(torch.float64).cumsum(-1)
    # Below the last sum by more than its rounding, so that the index found always has weight.
    target = u.clamp(0.0, 1.0 - 1e-12) * cumulative[:, -1]
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp_(max=weights.shape[1] - 1)


def _draw_filtered(z: Tensor, lse: Tensor, settings: Sequence[Sampling], u: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (m,) and their log-probabilities after top-k, top-p and min-p, for scores (m, V) with log-sum-exp lse (m,)."""
    vocabulary = z.shape[1]
    top_k = torch.tensor([s.top_k or vocabulary for s in settings], device=z.device)
    top_p = torch.tensor([s.top_p for s in settings], dtype=torch.float64, device=z.device)
    min_p = torch.tensor([s.min_p for s in settings], device=z.device)
    size = min(vocabulary, max([CANDIDATES] + [s.top_k for s in settings]))
    while True:
        values, ids = torch.topk(z, size)  # (m, size), falling
        kept = torch.arange(size, device=z.device) < top_k[:, None]
        # Probabilities after top-k. Without it the total is over the whole vocabulary, which is known: lse.
        masked = values.masked_fill(~kept, -math.inf)
        total = torch.where(top_k < vocabulary, torch.logsumexp(masked, -1), lse)
        p = (masked - total[:, None]).to(torch.float64).exp()
        before = p.cumsum(-1) - p
        kept = kept & ((before < top_p[:, None]) | (top_p[:, None] >= 1)) & (p >= min_p[:, None] * p[:, :1])
        kept[:, 0] = True
        # A row whose last candidate is still kept, top-k aside, may have more beyond.
        if size == vocabulary or not bool((kept[:, -1] & (top_k > size)).any()):
            break
        size = vocabulary
    # Back to token-id order: two tokens whose scores differ by rounding must not swap their intervals.
    ids, order = ids.sort(-1)
    values = values.masked_fill(~kept, -math.inf).gather(1, order)
    logp = values - torch.logsumexp(values, -1, keepdim=True)
    at = _invert(logp.exp(), u)[:, None]
    return ids.gather(1, at)[:, 0], logp.gather(1, at)[:, 0]
