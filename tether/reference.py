"""What the reference says of fixed answers: summed once, kept on disk, found again by what they were made from.

A score is keyed by the reference's weights, the precision and the exact token ids of its prompt and answer with their training
mask. So another tokenizer, template, length limit, model or row gives other keys; row order, batching and file names do not. A
row that was edited is worked out anew, the others are reused, and both numbers are said.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from tether import atomic, ranks
from tether.batch import Example
from tether.models import cache_dir
from tether.packing import own_parts, pack
from tether.policy import Policy

FOLDER = ".tether"  # beside the data
VERSION = 1  # of how scores are computed; a new number makes all old ones stale


def reference_logps(
    policy: Policy,
    examples: Sequence[Example],
    *,
    cache: bool = True,
    beside: Path | None = None,
    tokens_per_micro_batch: int = 4096,
    say: Callable[[str], Any] | None = None,
    progress: Callable[[int, int], Any] | None = None,
) -> Tensor:
    """Summed log-probs (A,) float32, CPU, of every answer under the policy's reference, in order of examples then answers.

    With `cache` they are read from and kept in a file in `.tether/` next to `beside` (the data), or in `cache_dir()` where that
    cannot be written. `say` hears how many were reused and how many made new, `progress` answers done and to do. The global
    random state is not moved.
    """
    keys = [answer_key(e, i) for e in examples for i in range(len(e.answers))]
    name = f"reference-v{VERSION}-{policy.reference_fingerprint()}-{policy.precision}.safetensors"
    folders = [*([beside.resolve().parent / FOLDER] if beside is not None else []), cache_dir() / "reference"]
    known, complaint = ranks.share(_read_all(folders, name) if cache and ranks.first() else ({}, None))

    starts = np.cumsum([0, *(len(e.answers) for e in examples)])
    new = [i for i, e in enumerate(examples) if any(k not in known for k in keys[starts[i] : starts[i + 1]])]
    made = len({k for k in keys if k not in known})
    if new:
        _score(policy, [examples[i] for i in new], [keys[starts[i] : starts[i + 1]] for i in new], known, tokens_per_micro_batch, progress)
        if cache and ranks.first():
            _write(folders, name, known)
    if say is not None:
        why = f" ({complaint})" if complaint else ""
        say(f"reference scores: {len(set(keys)) - made} reused, {made} made new{why}")
    return torch.tensor([known[k] for k in keys], dtype=torch.float32)


def answer_key(example: Example, answer: int) -> bytes:
    """16 bytes that stand for one prompt, one answer and which of its tokens are trained."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (example.prompt, example.answers[answer], example.trained[answer]):
        ids = np.asarray(part, dtype=np.int64)
        digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
    return digest.digest()


def _score(
    policy: Policy,
    examples: list[Example],
    keys: list[list[bytes]],
    known: dict[bytes, float],
    tokens_per_micro_batch: int,
    progress: Callable[[int, int], Any] | None,
) -> None:
    total, done = sum(len(k) for k in keys), 0
    with policy.as_loaded() as reference:
        for part in own_parts(examples, tokens_per_micro_batch):
            packed = pack([examples[i] for i in part], device=policy.device)
            sums = packed.sum_by_answer(reference.logprobs(packed)).float().cpu()
            made = dict(zip([k for i in part for k in keys[i]], sums.tolist(), strict=True))
            for others in ranks.gather(made):
                known.update(others)
                done += len(others)
            if progress is not None:
                progress(done, total)


def _read_all(folders: Sequence[Path], name: str) -> tuple[dict[bytes, float], str | None]:
    """Scores kept earlier, and what was wrong with a file that cannot be used."""
    known: dict[bytes, float] = {}
    complaint = None
    for folder in folders:
        try:
            content = load((folder / name).read_bytes())
            keys, sums = content["keys"], content["sums"]
            if keys.shape != (len(sums), 16):
                raise ValueError("keys and scores do not match")
            known.update(zip([bytes(k) for k in keys.numpy()], sums.tolist(), strict=True))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            complaint = f"the cache {folder / name} is broken and was made again: {error}"
    return known, complaint


def _write(folders: Sequence[Path], name: str, known: dict[bytes, float]) -> None:
    keys = torch.from_numpy(np.frombuffer(b"".join(known), dtype=np.uint8).reshape(-1, 16).copy())
    content = save({"keys": keys, "sums": torch.tensor(list(known.values()), dtype=torch.float64)})
    for folder in folders:
        try:
            atomic.write_file(folder / name, content)
            return
        except OSError:  # a read-only data folder: the next place
            continue
