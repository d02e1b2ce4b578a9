"""What is in a data file, and what a run would make of it: the contents of `tether data`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tether import chat, conversations, feedback, preferences, prompts
from tether.batch import Example
from tether.chat import Encoded, Truncation
from tether.codec import Codec
from tether.errors import UserError
from tether.files import Loaded, Problem
from tether.messages import Text, plain
from tether.readers import Row, read_rows
from tether.shapes import Shape
from tether.stats import pearson

# The order is the order of preference: a file of comparisons has prompts too.
KINDS: dict[str, tuple[Callable[..., Loaded[Any]], Sequence[Shape[Any]]]] = {
    "preference": (preferences.load, preferences.SHAPES),
    "feedback": (feedback.load, feedback.SHAPES),
    "sft": (conversations.load, conversations.SHAPES),
    "prompt": (prompts.load, prompts.SHAPES),
}
LENGTH_SHARE, LENGTH_CORRELATION = 0.7, 0.3  # beyond either, length alone would tell the better answer often enough to be learnt


@dataclass(frozen=True)
class Spread:
    """Of lengths: smallest, median, 95th percentile, largest."""

    min: int
    median: float
    p95: float
    max: int

    @classmethod
    def of(cls, values: Sequence[int]) -> Spread:
        ordered = sorted(values)
        return cls(ordered[0], _quantile(ordered, 0.5), _quantile(ordered, 0.95), ordered[-1])


def _quantile(ordered: Sequence[int], q: float) -> float:
    """Linear between neighbours.

    >>> _quantile([1, 2, 4], 0.5), _quantile([0, 10], 0.95)
    (2.0, 9.5)
    """
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return round(ordered[low] + (ordered[high] - ordered[low]) * (at - low), 4)


@dataclass(frozen=True)
class LengthBias:
    """How much the length of an answer tells about its label.

    `better_longer`: share of pairs whose chosen answer is the longer one, `worse_longer` the other way round, the rest are equal
    (pairs only, else None). `correlation`: Pearson's between label (1 good, 0 bad) and length over all answers (point-biserial).
    """

    better_longer: float | None
    worse_longer: float | None
    mean_better: float
    mean_worse: float
    correlation: float | None

    @property
    def strong(self) -> bool:
        far = self.better_longer is not None and max(self.better_longer, self.worse_longer or 0) >= LENGTH_SHARE
        return far or abs(self.correlation or 0) >= LENGTH_CORRELATION


@dataclass
class DataReport:
    kind: str
    shape: str
    files: list[str]
    fingerprint: str
    rows_in_file: int
    rows_loaded: int  # after reading; a ranking gives several
    rows_usable: int  # after encoding with the tokenizer and max_length, where those were given
    columns: dict[str, int]
    unit: str  # of lengths: "tokens" or "characters"
    lengths: dict[str, Spread]
    length_bias: LengthBias | None
    max_length: int | None
    too_long: int | None  # rows that exceed max_length
    problems: list[Problem]
    notes: list[str] = field(default_factory=list)

    def counts(self) -> dict[tuple[str, str], int]:
        """(action, kind) -> rows."""
        return dict(Counter((action, kind) for action, kind, _ in {(p.action, p.kind, p.source) for p in self.problems}))

    def as_dict(self) -> dict[str, Any]:
        out = asdict(self)
        out["problems"] = [
            {
                "file": p.source.file,
                "line": p.source.line,
                "action": p.action,
                "kind": p.kind,
                "field": p.field,
                "what": p.what,
                "remedy": p.remedy,
            }
            for p in self.problems
        ]
        out["counts"] = [{"action": a, "kind": k, "rows": n} for (a, k), n in sorted(self.counts().items())]
        return out


def make_report(
    paths: str | list[str],
    *,
    kind: str | None = None,
    codec: Codec | None = None,
    max_length: int | None = None,
    truncation: Truncation = "keep_start",
) -> tuple[DataReport, Loaded[Any]]:
    """The report, and the loaded rows it is about. `kind` None looks at the columns. Raises UserError for a file that holds no data."""
    if kind is not None and kind not in KINDS:
        raise UserError(f"there is no kind {kind!r}", where="kind", remedy=f"Use {', '.join(KINDS)}, or leave it out.")
    if max_length is not None and codec is None:
        raise UserError("max_length counts tokens", where="max_length", remedy="Name the model whose tokenizer is meant: --model.")
    raw = read_rows(paths)
    kind = kind or _kind(raw.rows)
    loaded = KINDS[kind][0](paths)
    rows = loaded.rows
    report = DataReport(
        kind=kind,
        shape=loaded.shape,
        files=loaded.files,
        fingerprint=loaded.fingerprint,
        rows_in_file=len(raw.rows) + len(raw.problems),
        rows_loaded=len(rows),
        rows_usable=len(rows),
        columns=dict(Counter(str(name) for row in raw.rows for name in row.data)),
        unit="characters",
        lengths={},
        length_bias=None,
        max_length=max_length,
        too_long=None,
        problems=list(loaded.problems),
    )
    if codec is None:
        _measure(report, [_characters(row) for row in rows])
    elif rows:
        whole = _encode(kind, loaded, codec, None, truncation)
        _measure(report, [_tokens(kind, e) for e in whole.examples])
        report.unit = "tokens"
        used = whole if max_length is None else _encode(kind, loaded, codec, max_length, truncation)
        report.rows_usable = len(used.examples)
        report.problems += used.problems
        if max_length is not None:
            report.too_long = sum(len(e.prompt) + max(map(len, e.answers), default=0) > max_length for e in whole.examples)
        if codec.notice:
            report.notes.append(codec.notice)
        if codec.has_template and kind != "prompt" and any(_is_plain(row) for row in rows):
            report.notes.append(
                "plain strings are encoded as they are, without the model's chat template; write messages to have it applied"
            )
    if report.length_bias and report.length_bias.strong:
        report.notes.append("length tells the label: a model trained on this may learn length instead of quality")
    return report, loaded


def _kind(rows: Sequence[Row]) -> str:
    """The first kind that fits at least half of the rows, else the one that fits most."""
    if not rows or sum("chosen" in r.data or "rejected" in r.data for r in rows) * 2 >= len(rows):
        return "preference"
    fits = {kind: sum(any(s.names(r.data) is not None for s in shapes) for r in rows) for kind, (_, shapes) in KINDS.items()}
    return next((kind for kind, n in fits.items() if n * 2 >= len(rows)), max(fits, key=lambda kind: fits[kind]))


def _encode(kind: str, loaded: Loaded[Any], codec: Codec, max_length: int | None, truncation: Truncation) -> Encoded:
    if kind == "prompt":
        return chat.encode_prompts(loaded, codec, max_length=max_length)
    encode: Any = {
        "preference": chat.encode_preferences,
        "feedback": chat.encode_feedback,
        "sft": chat.encode_conversations,
    }[kind]
    encoded: Encoded = encode(loaded, codec, max_length=max_length, truncation=truncation)
    return encoded


# -- lengths ---------------------------------------------------------------------------------------------------------


def _answer_names(row: Any) -> dict[str, Text]:
    """The parts of a loaded row by name; the name of an answer says whether it is the better one."""
    if isinstance(row, preferences.Preference):
        return {"prompt": row.prompt, "chosen": row.chosen, "rejected": row.rejected}
    if isinstance(row, feedback.Feedback):
        return {"prompt": row.prompt, "good" if row.label else "bad": row.completion}
    if isinstance(row, conversations.Conversation):
        if row.text is not None:
            return {"text": row.text}
        if row.messages is not None:
            return {"answers": [m for m in row.messages if m["role"] == "assistant"], "whole": row.messages}
        return {"prompt": row.prompt or "", "answer": row.completion or ""}
    return {"prompt": row.prompt}


def _is_plain(row: Any) -> bool:
    return all(isinstance(text, str) for text in _answer_names(row).values()) and getattr(row, "text", None) is None


def _characters(row: Any) -> dict[str, int]:
    return {name: len(plain(text)) for name, text in _answer_names(row).items()}


def _tokens(kind: str, example: Example) -> dict[str, int]:
    sizes = {"prompt": len(example.prompt)}
    if kind == "preference":
        sizes |= {"chosen": len(example.answers[0]), "rejected": len(example.answers[1])}
    elif kind == "feedback":
        sizes["good" if example.extra["label"] else "bad"] = len(example.answers[0])
    elif kind == "sft":
        sizes |= {"answer": sum(example.trained[0]), "whole": example.n_tokens}
    return sizes


def _measure(report: DataReport, sizes: list[dict[str, int]]) -> None:
    names = list(dict.fromkeys(name for row in sizes for name in row))
    report.lengths = {name: Spread.of([row[name] for row in sizes if name in row]) for name in names}
    if report.kind == "preference" and sizes:
        report.length_bias = length_bias([r["chosen"] for r in sizes], [r["rejected"] for r in sizes], paired=True)
    elif report.kind == "feedback" and {"good", "bad"} <= set(names):
        report.length_bias = length_bias([r["good"] for r in sizes if "good" in r], [r["bad"] for r in sizes if "bad" in r], paired=False)


def length_bias(better: Sequence[int], worse: Sequence[int], *, paired: bool) -> LengthBias:
    """
    >>> bias = length_bias([3, 5], [1, 5], paired=True)
    >>> bias.better_longer, bias.worse_longer, bias.mean_better, bias.mean_worse
    (0.5, 0.0, 4.0, 3.0)
    """
    longer = shorter = None
    if paired:
        longer = sum(a > b for a, b in zip(better, worse, strict=True)) / len(better)
        shorter = sum(a < b for a, b in zip(better, worse, strict=True)) / len(better)
    correlation = pearson([1.0] * len(better) + [0.0] * len(worse), [float(v) for v in [*better, *worse]])
    return LengthBias(longer, shorter, sum(better) / len(better), sum(worse) / len(worse), correlation)
