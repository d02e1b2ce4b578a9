"""Many examples as one token stream without padding, a shared prompt computed once.

The stream is cut into segments. A segment attends to the segment of its prompt (if it has one) and causally to itself, so

    example 0: prompt p0 p1 p2, answers a0 a1 and b0       stream    p0 p1 p2 a0 a1 b0
                                                           position   0  1  2  3  4  3

gives every answer the hidden states that it would have had alone behind its own copy of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tether import ranks
from tether.batch import Example


@dataclass(frozen=True)
class Segment:
    """Tokens `start..end` of the stream; they see `prompt_start..prompt_end` whole, and themselves causally."""

    start: int
    end: int
    prompt_start: int
    prompt_end: int


@dataclass(frozen=True)
class Packed:
    """A packed stream of N tokens with A answers, of which M tokens are trained.

    `predict`, `targets`, `answer`, `last` and `lengths` are the only shift by one in the package: hidden state
    `predict[j]` is the one whose next token is `targets[j]`.
    """

    tokens: Tensor  # (N,) int64
    positions: Tensor  # (N,) int64, continue from the prompt
    segments: tuple[Segment, ...]
    predict: Tensor  # (M,) index in the stream of the hidden state that predicts trained token j
    targets: Tensor  # (M,) its token id
    answer: Tensor  # (M,) which answer it belongs to, 0..A-1 in order of examples, then answers
    last: Tensor  # (A,) index in the stream of each answer's last token
    lengths: Tensor  # (A,) trained tokens per answer
    n_answers: int

    @property
    def n_tokens(self) -> int:
        """Tokens of the examples; the one token of an empty stream stands for none."""
        return len(self.tokens) if self.n_answers else 0

    def sum_by_answer(self, values: Tensor) -> Tensor:
        """Sums per trained token (M,) to sums per answer (A,); an answer without trained tokens gets 0."""
        return values.new_zeros(self.n_answers).index_add(0, self.answer, values)


class _Stream:
    """The lists a `Packed` is made of, while they grow."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.segments: list[Segment] = []
        self.predict: list[int] = []
        self.targets: list[int] = []
        self.answer: list[int] = []
        self.last: list[int] = []
        self.lengths: list[int] = []

    def add_segment(self, tokens: list[int], prompt: tuple[int, int]) -> int:
        """Append tokens that see the stream's `prompt` range; return the index of the first of them."""
        start = len(self.tokens)
        if tokens:
            offset = prompt[1] - prompt[0]
            self.tokens += tokens
            self.positions += range(offset, offset + len(tokens))
            self.segments.append(Segment(start, start + len(tokens), *prompt))
        return start

    def add_answer(self, tokens: list[int], trained: list[bool], start: int, before: int) -> None:
        """Register the answer that lies at `start`; `before` is the index of the token ahead of it, -1 if there is none."""
        predict = [start + t - 1 if t else before for t in range(len(tokens))]
        chosen = [t for t, wanted in enumerate(trained) if wanted and predict[t] >= 0]
        self.predict += [predict[t] for t in chosen]
        self.targets += [tokens[t] for t in chosen]
        self.answer += [len(self.last)] * len(chosen)
        self.lengths.append(len(chosen))
        self.last.append(start + len(tokens) - 1 if tokens else before)


def pack(examples: Sequence[Example], *, share_prompts: bool = True, device: torch.device | str | None = None) -> Packed:
    """Lay examples out as one stream.

    An example with several answers has its prompt once (`share_prompts=False` repeats it: the same numbers, more work).
    With an empty prompt an answer's first token has nothing that predicts it and is left out of the trained tokens.
    Without any example it is a single token that nothing is read from: a rank with nothing to do still takes part in a forward and a
    backward pass, and adds 0. Raises ValueError for an example without any token, or whose mask is not as long as its answer.

    >>> packed = pack([Example(prompt=[5, 6], answers=[[7, 8], [9]], trained=[[True, True], [True]])])
    >>> packed.tokens.tolist(), packed.predict.tolist(), packed.targets.tolist(), packed.last.tolist()
    ([5, 6, 7, 8, 9], [1, 2, 1], [7, 8, 9], [3, 4])
    """
    stream = _Stream()
    for row, example in enumerate(examples):
        if len(example.answers) != len(example.trained):
            raise ValueError(f"example {row} has {len(example.answers)} answers but {len(example.trained)} masks")
        for answer, trained in zip(example.answers, example.trained, strict=True):
            if len(answer) != len(trained):
                raise ValueError(f"example {row} has an answer of {len(answer)} tokens with a mask of {len(trained)}")
            if not answer and not example.prompt:
                raise ValueError(f"example {row} has an answer without any token behind an empty prompt")
        _add_example(stream, example, share_prompts)
    if not stream.tokens:
        if examples:
            raise ValueError("nothing to pack: no example has a token")
        stream.add_segment([0], (0, 0))

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Packed(
        tokens=tensor(stream.tokens),
        positions=tensor(stream.positions),
        segments=tuple(stream.segments),
        predict=tensor(stream.predict),
        targets=tensor(stream.targets),
        answer=tensor(stream.answer),
        last=tensor(stream.last),
        lengths=tensor(stream.lengths),
        n_answers=len(stream.last),
    )


def _add_example(stream: _Stream, example: Example, share_prompts: bool) -> None:
    prompt, length = example.prompt, len(example.prompt)
    if share_prompts and len(example.answers) > 1:
        start = stream.add_segment(prompt, (0, 0))
        before = start + length - 1 if prompt else -1
        for answer, trained in zip(example.answers, example.trained, strict=True):
            # An empty prompt leaves nothing to attend to; (0, 0) is the empty range.
            begin = stream.add_segment(answer, (start, start + length) if prompt else (0, 0))
            stream.add_answer(answer, trained, begin, before)
        return
    for answer, trained in zip(example.answers, example.trained, strict=True):
        start = stream.add_segment(prompt + answer, (0, 0))
        stream.add_answer(answer, trained, start + length, start + length - 1 if prompt else -1)


def micro_batches(examples: Sequence[Example], tokens_per_micro_batch: int) -> list[list[int]]:
    """Indices of examples in groups of at most `tokens_per_micro_batch` computed tokens each.

    Longest first into the first group with room (first-fit decreasing); an example longer than the budget has a group of
    its own. Inside a group indices ascend, groups are ordered by their first index: a pure function of the lengths.

    >>> long, short = Example([1] * 6, [[2]], [[True]]), Example([1], [[2]], [[True]])
    >>> micro_batches([short, long, short], 9)
    [[0, 1], [2]]
    """
    if tokens_per_micro_batch < 1:
        raise ValueError(f"tokens_per_micro_batch must be at least 1, got {tokens_per_micro_batch}")
    groups: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(examples)), key=lambda i: (-examples[i].n_tokens, i)):
        size = examples[index].n_tokens
        fitting = next((g for g, free in enumerate(room) if free >= size), None)
        if fitting is None:
            groups.append([index])
            room.append(tokens_per_micro_batch - size)
        else:
            groups[fitting].append(index)
            room[fitting] -= size
    return sorted(sorted(group) for group in groups)


def own_parts(examples: Sequence[Example], tokens_per_micro_batch: int) -> list[list[int]]:
    """This rank's micro-batches of all the examples, balanced by tokens over the ranks; `micro_batches` where there is one rank.

    All ranks have the same number of them, the last ones empty where need be: a pass through a sharded model is a meeting of all ranks.
    """
    if ranks.size() == 1:
        return micro_batches(examples, tokens_per_micro_batch)
    cuts = []
    for share in ranks.own([e.n_tokens for e in examples]):
        parts = micro_batches([examples[i] for i in share], tokens_per_micro_batch)
        cuts.append([[share[j] for j in part] for part in parts])
    most = max(len(cut) for cut in cuts)
    return cuts[ranks.rank()] + [[] for _ in range(most - len(cuts[ranks.rank()]))]
