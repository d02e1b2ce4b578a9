"""A packed stream's attention cut into tiles: which queries are computed against which keys, and what they must not see.

A long segment is cut into tiles along its queries, so that little is computed above the diagonal. Short segments are joined into
one tile, where a mask keeps them apart: each operation on a tile costs some microseconds however little there is to do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.packing import Segment

QUERIES_PER_TILE = 192  # small: little is computed above the diagonal; large: few calls; 128 to 256 measure the same on CPU
JOINED_QUERIES = 128  # short segments are joined up to this many queries


@dataclass(frozen=True)
class Tile:
    """Queries `start..end` of the stream against keys `first..last` of [prompt keys, own keys]."""

    start: int
    end: int
    first: int
    last: int
    bias: Tensor | None  # (queries, 1, keys): -inf where a query must not look; covers the last keys, as many as it has


Tiles = list[tuple[Segment, list[Tile]]]


class Plan:
    """The segments of a stream cut into tiles, once for all layers that share a window."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self._tiles: dict[tuple[int | None, torch.device], Tiles] = {}

    def tiles(self, window: int | None, device: torch.device) -> Tiles:
        key = (window, device)
        if key not in self._tiles:
            triangle = torch.full((QUERIES_PER_TILE, QUERIES_PER_TILE), float("-inf"), device=device).triu(1)[:, None]
            tiles: Tiles = []
            for joined, parts in joined_segments(self.segments, JOINED_QUERIES):
                if len(parts) > 1:
                    tiles.append((joined, [_joined_tile(joined, parts, window, device)]))
                else:
                    tiles.append((joined, [_tile(joined, *ends, window, triangle) for ends in _cuts(joined.start, joined.end)]))
            self._tiles[key] = tiles
        return self._tiles[key]


def joined_segments(segments: Sequence[Segment], most: int) -> Iterator[tuple[Segment, list[Segment]]]:
    """Neighbours as one segment of at most `most` tokens, with the parts it is made of.

    Whole examples are joined where they fit. Of a longer one the prompt stays alone, and short answers that share it are joined.

    >>> [(joined.start, joined.end, len(parts)) for joined, parts in joined_segments([Segment(0, 5, 0, 0), Segment(5, 8, 0, 5)], 128)]
    [(0, 8, 2)]
    """
    for whole in _runs(_examples(segments), most):
        if whole[-1].end - whole[0].start <= most:
            yield Segment(whole[0].start, whole[-1].end, 0, 0), whole
            continue
        answers = [s for s in whole if s.prompt_start < s.prompt_end]
        yield from ((s, [s]) for s in whole if s.prompt_start == s.prompt_end)
        for parts in _runs([[s] for s in answers], most):
            yield Segment(parts[0].start, parts[-1].end, parts[0].prompt_start, parts[0].prompt_end), parts


def _examples(segments: Sequence[Segment]) -> list[list[Segment]]:
    """A segment without a prompt and those after it that have it for a prompt."""
    out: list[list[Segment]] = []
    for segment in segments:
        if segment.prompt_start < segment.prompt_end:
            out[-1].append(segment)
        else:
            out.append([segment])
    return out


def _runs(pieces: Sequence[list[Segment]], most: int) -> Iterator[list[Segment]]:
    """Neighbouring pieces put together as long as they have at most `most` tokens together."""
    run: list[Segment] = []
    for piece in pieces:
        if run and piece[-1].end - run[0].start > most:
            yield run
            run = []
        run = run + piece
    if run:
        yield run


def _joined_tile(joined: Segment, parts: Sequence[Segment], window: int | None, device: torch.device) -> Tile:
    """One tile in which a query sees its own segment up to itself, its prompt, and with a window no further back."""
    before = joined.prompt_end - joined.prompt_start
    n = joined.end - joined.start
    seen = torch.zeros(n, before + n, dtype=torch.bool)
    for part in parts:
        rows = slice(part.start - joined.start, part.end - joined.start)
        length, prompt = part.end - part.start, part.prompt_end - part.prompt_start
        queries = torch.arange(prompt, prompt + length)[:, None]
        near = torch.arange(prompt + length)
        visible = near <= queries
        if window:
            visible &= near > queries - window
        own = before + rows.start
        seen[rows, own : own + length] = visible[:, prompt:]
        if prompt:
            begin = 0 if before else part.prompt_start - joined.start
            seen[rows, begin : begin + prompt] = visible[:, :prompt]
    # A prompt that every part sees whole needs no bias.
    bias = torch.zeros(n, 1, before + n if window else n).masked_fill_(~seen[:, None, 0 if window else before :], float("-inf"))
    return Tile(joined.start, joined.end, 0, before + n, bias.to(device))


def _cuts(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Even pieces of at most QUERIES_PER_TILE."""
    pieces = math.ceil((end - start) / QUERIES_PER_TILE)
    edges = [start + (end - start) * i // pieces for i in range(pieces + 1)]
    yield from itertools.pairwise(edges)


def _tile(segment: Segment, start: int, end: int, window: int | None, triangle: Tensor) -> Tile:
    # Positions run on from the prompt, so an index in the joined keys also measures the distance of a window.
    low = segment.prompt_end - segment.prompt_start + start - segment.start
    high = low + end - start
    first = max(0, low - window + 1) if window else 0
    if not window or high <= window:
        return Tile(start, end, first, high, triangle[: end - start, :, : end - start])
    queries = torch.arange(low, high, device=triangle.device)[:, None, None]
    keys = torch.arange(first, high, device=triangle.device)
    hidden = (keys > queries) | (keys <= queries - window)
    return Tile(start, end, first, high, torch.zeros_like(hidden, dtype=torch.float32).masked_fill_(hidden, float("-inf")))
