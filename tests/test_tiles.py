"""However a stream's attention is cut and joined, every query sees what its segment says, and nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tether.tiles
from tether.batch import Example
from tether.packing import Packed, pack
from tether.tiles import Plan

CPU = torch.device("cpu")

examples = st.lists(
    st.tuples(st.integers(0, 9), st.lists(st.integers(1, 9), min_size=1, max_size=4)).map(
        lambda drawn: Example([1] * drawn[0], [[2] * n for n in drawn[1]], [[True] * n for n in drawn[1]])
    ),
    min_size=1,
    max_size=5,
)


def said(packed: Packed, window: int | None) -> torch.Tensor:
    """(N, N) who sees whom, from the definition of a segment."""
    n = len(packed.tokens)
    seen = torch.zeros(n, n, dtype=torch.bool)
    for s in packed.segments:
        joined = [*range(s.prompt_start, s.prompt_end), *range(s.start, s.end)]
        for place, query in enumerate(joined):
            if query < s.start:
                continue
            for distance, key in enumerate(reversed(joined[: place + 1])):
                seen[query, key] = window is None or distance < window
    return seen


def done(plan: Plan, n: int, window: int | None) -> torch.Tensor:
    """(N, N) who sees whom, from the tiles. A query in two tiles would count twice."""
    seen = torch.zeros(n, n, dtype=torch.int64)
    for segment, tiles in plan.tiles(window, CPU):
        keys = [*range(segment.prompt_start, segment.prompt_end), *range(segment.start, segment.end)]
        for tile in tiles:
            own = keys[tile.first : tile.last]
            visible = torch.ones(tile.end - tile.start, len(own), dtype=torch.int64)
            if tile.bias is not None:
                assert set(tile.bias.unique().tolist()) <= {0.0, float("-inf")}
                visible[:, len(own) - tile.bias.shape[-1] :] = (tile.bias[:, 0] == 0).long()
            seen[tile.start : tile.end, own] += visible
    return seen


@pytest.mark.parametrize("joined", [0, 7, 20, 128])
@pytest.mark.parametrize("window", [None, 1, 3, 12])
@given(rows=examples, share=st.booleans(), per_tile=st.sampled_from([3, 192]))
@settings(max_examples=25, deadline=None)
def test_every_query_sees_what_its_segment_says(joined: int, window: int | None, rows: list[Example], share: bool, per_tile: int) -> None:
    packed = pack(rows, share_prompts=share)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tether.tiles, "JOINED_QUERIES", joined)
        patch.setattr(tether.tiles, "QUERIES_PER_TILE", per_tile)
        found = done(Plan(packed.segments), len(packed.tokens), window)
    assert torch.equal(found, said(packed, window).long())


def test_short_neighbours_share_a_tile_and_long_ones_are_cut() -> None:
    short = pack([Example([1] * 10, [[2] * 20, [2] * 20], [[True] * 20] * 2)] * 4)
    assert [len(tiles) for _, tiles in Plan(short.segments).tiles(None, CPU)] == [1, 1]  # two examples of 50 tokens each
    long = pack([Example([1] * 10, [[2] * 500], [[True] * 500])])
    assert [len(tiles) for _, tiles in Plan(long.segments).tiles(None, CPU)] == [3]
    # Many short answers to one long prompt: the prompt alone, then the answers together.
    group = pack([Example([1] * 150, [[2] * 12] * 8, [[True] * 12] * 8)])
    assert [len(tiles) for _, tiles in Plan(group.segments).tiles(None, CPU)] == [1, 1]
