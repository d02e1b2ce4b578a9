"""One list of requests, sampled by all ranks together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from tether import ranks
from tether.engines.local import Completion, Request


class Sampler(Protocol):
    def sample(self, requests: Sequence[Request], /) -> list[Completion]: ...


def sample_together(sampler: Sampler, requests: Sequence[Request]) -> list[Completion]:
    """The completions of all requests on every rank, in their order; each rank samples its share with a sampler of its own.

    A completion depends on its request alone, so that the shares do not show.
    """
    if ranks.size() == 1:
        return sampler.sample(requests)
    mine = ranks.own([len(r.prompt) + r.n * r.sampling.max_new_tokens for r in requests])[ranks.rank()]
    made = [dataclasses.replace(c, request=mine[c.request]) for c in sampler.sample([requests[i] for i in mine])]
    return sorted((c for part in ranks.gather(made) for c in part), key=lambda c: (c.request, c.sample))
