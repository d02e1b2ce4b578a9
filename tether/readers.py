"""File formats: bytes on disk -> rows (plain dicts) with the line each came from. What they mean is decided in `shapes.py`."""

from __future__ import annotations

import csv
import difflib
import gzip
import hashlib
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tether.errors import UserError
from tether.files import Problem, Source

# Files that lie beside data in a data set folder and hold none.
NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
SPLITS = re.compile(r"(?:^|[^a-z])(train|test|valid|validation|val|dev|eval)(?:[^a-z]|$)")


@dataclass(frozen=True)
class Row:
    """One record. `textual`: from a format in which every value is text (CSV), so numbers and labels come as strings."""

    data: dict[str, Any]
    source: Source
    textual: bool = False


@dataclass
class Rows:
    rows: list[Row] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    fingerprint: str = ""


def read_rows(paths: str | list[str]) -> Rows:
    """All rows of one or more files, folders or hub ids, in order. A broken row is a problem with its line; a broken file raises UserError."""
    out, digest = Rows(), hashlib.sha256()
    wanted = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not wanted:
        raise UserError("no data file was named", remedy="Give at least one file, folder or hub id.")
    for path in wanted:
        for name, reader in _expand(str(path)):
            before = len(out.rows) + len(out.problems)
            out.files.append(name)
            for item in reader(digest):
                if isinstance(item, Row):
                    out.rows.append(item)
                else:
                    out.problems.append(item)
            if len(out.rows) + len(out.problems) == before:
                raise UserError("the file holds no row", where=name, remedy="Was it written to the end?")
    out.fingerprint = digest.hexdigest()[:16]
    return out


Digest = Any  # hashlib's hash objects have no public type
Reader = Callable[[Digest], Iterator[Row | Problem]]


def _expand(path: str) -> list[tuple[str, Reader]]:
    """(name, reader) of every file that a path stands for."""
    place = Path(path).expanduser()
    if place.is_dir():
        return [(str(p), _reader(p)) for p in _files_in(place)]
    if place.exists():
        return [(str(place), _reader(place))]
    if re.fullmatch(r"[\w.-]+/[\w.-]+(:\w+)?", path) and not _format(Path(path.partition(":")[0])):
        return [(path, lambda digest: _read_hub(path, digest))]
    raise UserError("there is no such file", where=path, remedy=_nearest(place) or "Check the spelling and the folder you are in.")


def _nearest(place: Path) -> str | None:
    if not place.parent.is_dir():
        return f"The folder {place.parent} does not exist either."
    near = difflib.get_close_matches(place.name, [p.name for p in place.parent.iterdir()], n=1, cutoff=0.5)
    return f"Did you mean {place.parent / near[0]}?" if near else None


def _format(path: Path) -> str | None:
    """The format by the file's name, without .gz: jsonl, json, csv, tsv, parquet or arrow."""
    name = path.name.lower().removesuffix(".gz")
    suffix = name.rpartition(".")[2]
    return {"ndjson": "jsonl"}.get(suffix, suffix) if suffix in {"jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow"} else None


def _files_in(folder: Path) -> list[Path]:
    """Data files of a folder and those below it. Refuses to mix splits: training on a test split is a mistake nobody sees."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and _format(p) and p.name not in NOT_DATA]
    files = [p for p in files if not any(part.startswith(".") for part in p.relative_to(folder).parts)]
    if not files:
        raise UserError(
            "the folder holds no data file", where=str(folder), remedy="Wanted: .jsonl, .json, .csv, .tsv, .parquet or .arrow, also .gz."
        )
    splits = {m.group(1) for p in files if (m := SPLITS.search(str(p.relative_to(folder)).lower()))}
    if len(splits) > 1:
        raise UserError(
            f"the folder holds several splits ({', '.join(sorted(splits))})",
            where=str(folder),
            remedy=f"Name the file you want, such as {files[0]}.",
        )
    return files


def _reader(path: Path) -> Reader:
    kind = _format(path)
    if kind is None:
        with open(path, "rb") as file:
            start = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
        if start[:1] not in (b"{", b"["):
            raise UserError(
                "this kind of file is not known", where=str(path), remedy="Wanted: .jsonl, .json, .csv, .tsv, .parquet or .arrow, also .gz."
            )
        kind = "json"
    readers = {"jsonl": _read_json, "json": _read_json, "csv": _read_csv, "tsv": _read_csv, "parquet": _read_table, "arrow": _read_table}
    return lambda digest: readers[kind](path, digest)


# -- bytes -----------------------------------------------------------------------------------------------------------


def _bytes(path: Path, digest: Digest) -> tuple[bytes, Problem | None]:
    """The file's content, unpacked; and a problem when a compressed file ends too early."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"the file cannot be read: {error.strerror}", where=str(path)) from error
    digest.update(content)
    if path.suffix.lower() != ".gz":
        return content, None
    unpacked: list[bytes] = []
    try:
        with gzip.open(path) as stream:
            while chunk := stream.read1(1 << 16):  # read() would give nothing of a damaged file
                unpacked.append(chunk)
    except gzip.BadGzipFile as error:
        if not unpacked and content[:2] != b"\x1f\x8b":
            raise UserError(
                "the name ends in .gz, but the content is not gzip", where=str(path), remedy="Rename it, or compress it."
            ) from error
        return _until_damage(unpacked, path)
    except (EOFError, zlib.error):
        return _until_damage(unpacked, path)
    return b"".join(unpacked), None


def _until_damage(unpacked: list[bytes], path: Path) -> tuple[bytes, Problem]:
    """Whole lines up to the damage; the rest of the file is lost, and said to be."""
    good = b"".join(unpacked)
    words = "the compressed file is damaged or cut off here; later rows are lost"
    problem = Problem(Source(str(path), good.count(b"\n") + 1), "cut_off", words, "Fetch the file again.", "reject")
    return good[: good.rfind(b"\n") + 1], problem


def _decode(raw: bytes, source: Source) -> str | Problem:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        words = f"byte {raw[error.start]:02X} at position {error.start + 1} of the line is not UTF-8"
        return Problem(source, "not_utf8", words, "Save the file as UTF-8.", "reject")


# -- JSON ------------------------------------------------------------------------------------------------------------


def _read_json(path: Path, digest: Digest) -> Iterator[Row | Problem]:
    content, cut = _bytes(path, digest)
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError("the file is UTF-16", where=str(path), remedy="Save it as UTF-8.")
    content = content.removeprefix(b"\xef\xbb\xbf")
    start = content.lstrip()[:1]
    lines_by_name = _format(path) == "jsonl"
    if start == b"[" and not (lines_by_name and not _is_array_of_objects(content)):
        yield from _json_array(content, path)
    elif start == b"{" and not lines_by_name and (whole := _whole_object(content)) is not None:
        # One object: a wrapper around the rows, or the only row.
        inner = next((whole[k] for k in ("data", "rows", "examples") if isinstance(whole.get(k), list)), None)
        for number, item in enumerate([whole] if inner is None else inner, 1):
            yield _as_row(item, Source(str(path), number))
    else:
        yield from _json_lines(content, path)
    if cut:
        yield cut


def _is_array_of_objects(content: bytes) -> bool:
    """Whether a .jsonl file is in truth one JSON array (its first line alone would be an array either way)."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return content.lstrip()[1:].lstrip()[:1] == b"{" and content.lstrip()[:64].split(b"\n")[0].strip() == b"["
    return isinstance(value, list) and any(isinstance(item, dict) for item in value)


def _whole_object(content: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(content, object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _json_lines(content: bytes, path: Path) -> Iterator[Row | Problem]:
    lines = content.split(b"\n")
    last = max((i for i, line in enumerate(lines) if line.strip()), default=-1)
    for index, raw in enumerate(lines):
        if not raw.strip():
            continue
        source = Source(str(path), index + 1)
        text = _decode(raw.rstrip(b"\r"), source)
        if isinstance(text, Problem):
            yield text
            continue
        try:
            yield _as_row(json.loads(text, object_pairs_hook=_no_repeats), source)
        except (ValueError, RecursionError) as error:
            unfinished = index == last and not content.endswith(b"\n")
            yield Problem(source, "not_json", *_explain(text, error, unfinished), "reject")


def _json_array(content: bytes, path: Path) -> Iterator[Row | Problem]:
    """Elements one by one, so that those before a break are still read. `line` is the element's number."""
    text = _decode(content, Source(str(path), 1))
    if isinstance(text, Problem):
        yield text
        return
    decoder = json.JSONDecoder(object_pairs_hook=_no_repeats)
    space = re.compile(r"\s*")
    at = space.match(text, text.index("[") + 1).end()  # type: ignore[union-attr]
    number = 0
    while text[at : at + 1] != "]":
        number += 1
        source = Source(str(path), number)
        try:
            value, at = decoder.raw_decode(text, at)
            yield _as_row(value, source)
            at = space.match(text, at).end()  # type: ignore[union-attr]
            if text[at : at + 1] == ",":
                at = space.match(text, at + 1).end()  # type: ignore[union-attr]
                if text[at : at + 1] == "]":
                    raise json.JSONDecodeError("comma before the closing bracket", text, at)
            elif text[at : at + 1] != "]":
                raise json.JSONDecodeError("comma or closing bracket wanted", text, at)
        except (ValueError, RecursionError) as error:
            here = error.pos if isinstance(error, json.JSONDecodeError) else at
            words = (
                f"the array breaks after element {number} (line {text.count(chr(10), 0, here) + 1}): {error}; later elements are not read"
            )
            yield Problem(source, "not_json", words, "Mend the file; each element is followed by a comma or the closing bracket.", "reject")
            return


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [k for k, _ in pairs]
        raise ValueError(f"the name {next(k for k in names if names.count(k) > 1)!r} appears twice in one object")
    return out


def _as_row(value: Any, source: Source) -> Row | Problem:
    if isinstance(value, dict):
        return Row(value, source)
    kind = {list: "an array", str: "a bare string", type(None): "null", bool: "true or false"}.get(type(value), "a number")
    return Problem(source, "not_an_object", f"{kind} instead of an object", 'Each row is one JSON object, {"prompt": ...}.', "reject")


def _explain(text: str, error: Exception, unfinished: bool) -> tuple[str, str]:
    """(what, remedy) in words for a line that json refused."""
    if isinstance(error, RecursionError):
        return "nested too deeply", "Flatten the record."
    if not isinstance(error, json.JSONDecodeError):
        return str(error), "Mend the record."
    if error.msg == "Extra data":
        return f"text after the object, from column {error.colno}", "One object per line, nothing behind it."
    if re.match(r"\s*\{\s*'", text):
        return "single quotes are not JSON", "Write rows with json.dumps, not with str()."
    if re.search(r",\s*[}\]]", text[max(0, error.pos - 2) : error.pos + 2]):
        return f"comma before the closing brace, column {error.colno}", "Leave the last comma out."
    if unfinished:
        return "the file is cut off in the middle of its last record", "Fetch or write the file again."
    return f"not JSON: {error.msg}, column {error.colno}", "Mend the line; json.dumps writes it right."


# -- tables ----------------------------------------------------------------------------------------------------------


def _read_csv(path: Path, digest: Digest) -> Iterator[Row | Problem]:
    """Comma, tab or semicolon separated with a header line; `line` is where the record starts. Empty cells are empty text."""
    content, cut = _bytes(path, digest)
    # Undecodable bytes travel as lone surrogates, so that the row that holds them can be named.
    text = content.removeprefix(b"\xef\xbb\xbf").decode("utf-8", errors="surrogateescape")
    head = text.split("\n", 1)[0]
    delimiter = "\t" if _format(path) == "tsv" else ";" if ";" in head and "," not in head else ","
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    reader = csv.reader((part + "\n" for part in text.split("\n")), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    line = 1
    try:
        for cells in reader:
            source, line = Source(str(path), line), reader.line_num + 1
            if not cells:
                continue
            if header is None:
                header = [c.strip() for c in cells]
                if len(set(header)) < len(header) or "" in header:
                    raise UserError("the header has an empty or repeated column name", where=str(source), remedy="Name each column once.")
            elif len(cells) != len(header):
                words = f"{len(cells)} cells where the header has {len(header)} columns"
                yield Problem(source, "ragged", words, "Quote cells that hold the separator.", "reject")
            elif any("\udc80" <= ch <= "\udcff" for cell in cells for ch in cell):
                yield Problem(source, "not_utf8", "a byte that is not UTF-8", "Save the file as UTF-8.", "reject")
            else:
                yield Row({k: _cell(v) for k, v in zip(header, cells, strict=True)}, source, textual=True)
    except csv.Error as error:
        yield Problem(Source(str(path), line), "not_csv", f"the table breaks here: {error}", "Check the quotes around the cell.", "reject")
    if cut:
        yield cut


def _cell(value: str) -> Any:
    """A cell that holds a JSON list or object (messages) is read as such; everything else stays text."""
    if value[:2] in ("[{", '{"'):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _read_table(path: Path, digest: Digest) -> Iterator[Row | Problem]:
    """Parquet and Arrow files, a batch at a time; `line` is the row's number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(1 << 20), b""):
            digest.update(chunk)
    number = 0
    try:
        batches = pq.ParquetFile(path).iter_batches() if _format(path) == "parquet" else _arrow_batches(path)
        for batch in batches:
            for record in batch.to_pylist():
                number += 1
                yield Row(record, Source(str(path), number))
    except (pa.ArrowException, OSError) as error:
        reason = str(error).split("\n")[0][:200]
        raise UserError(f"the file cannot be read: {reason}", where=str(path), remedy="Is it whole, and what its name says?") from error


def _arrow_batches(path: Path) -> Iterator[Any]:
    import pyarrow as pa

    try:
        yield from pa.ipc.open_stream(path.read_bytes())
    except pa.ArrowInvalid:
        stored = pa.ipc.open_file(path)
        yield from (stored.get_batch(i) for i in range(stored.num_record_batches))


def _read_hub(name: str, digest: Digest) -> Iterator[Row | Problem]:
    """A data set of the hub, `owner/name` or `owner/name:split` (train unless said), through the optional library `datasets`."""
    repo, _, split = name.partition(":")
    try:
        import datasets
    except ImportError:
        raise UserError(
            "there is no such file, and data sets of the hub need the library `datasets`",
            where=name,
            remedy="Install it with: pip install 'tether-lm[hub]'. Or check the spelling of the file.",
        ) from None
    try:
        table = datasets.load_dataset(repo, split=split or "train")
    except Exception as error:  # the library raises dozens of kinds: offline, unknown name, unknown split, ...
        raise UserError(f"the data set could not be loaded: {str(error).splitlines()[0]}", where=name) from error
    for number, record in enumerate(table, 1):
        digest.update(json.dumps(record, sort_keys=True, default=str).encode())
        yield Row(dict(record), Source(name, number))
