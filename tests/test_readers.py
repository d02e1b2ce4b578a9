"""Files of every format and every kind of damage: good rows are read, each bad one is named by its line, nothing is lost in silence."""

from __future__ import annotations

import gzip
import json
import random
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.toy_text import case_file, check_expected, expectations
from tether import preferences
from tether.errors import UserError
from tether.readers import read_rows

ROWS = [{"prompt": f"Question {i}?", "chosen": "yes", "rejected": "no"} for i in range(3)]


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def data_of(path: str | list[str]) -> list[dict[str, Any]]:
    read = read_rows(path)
    assert read.problems == []
    return [row.data for row in read.rows]


def formats(folder: Path) -> dict[str, str]:
    """The same three rows in every format."""
    table = pa.Table.from_pylist(ROWS)
    csv = "prompt,chosen,rejected\r\n" + "".join(f"{r['prompt']},{r['chosen']},{r['rejected']}\r\n" for r in ROWS)
    made = {
        "jsonl": write(folder / "a.jsonl", lines(ROWS)),
        "no newline at the end": write(folder / "b.jsonl", lines(ROWS).rstrip("\n")),
        "crlf": write(folder / "c.jsonl", lines(ROWS).replace("\n", "\r\n")),
        "blank lines": write(folder / "d.jsonl", "\n" + lines(ROWS).replace("\n", "\n \n\r\n")),
        "byte order mark": write(folder / "e.jsonl", b"\xef\xbb\xbf" + lines(ROWS).encode()),
        "json array": write(folder / "f.json", json.dumps(ROWS, indent=2)),
        "json array named jsonl": write(folder / "g.jsonl", json.dumps(ROWS)),
        "jsonl named json": write(folder / "h.json", lines(ROWS)),
        "wrapped array": write(folder / "i.json", json.dumps({"version": 1, "data": ROWS})),
        "jsonl.gz": write(folder / "j.jsonl.gz", gzip.compress(lines(ROWS).encode())),
        "json.gz": write(folder / "k.json.gz", gzip.compress(json.dumps(ROWS).encode())),
        "csv": write(folder / "l.csv", csv),
        "csv.gz": write(folder / "m.csv.gz", gzip.compress(csv.encode())),
        "tsv": write(folder / "n.tsv", csv.replace(",", "\t")),
        "semicolons": write(folder / "o.csv", csv.replace(",", ";")),
        "no suffix": write(folder / "p", lines(ROWS)),
    }
    pq.write_table(table, folder / "q.parquet")
    with pa.OSFile(str(folder / "r.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    with pa.OSFile(str(folder / "s.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as stored:
        stored.write_table(table)
    return made | {"parquet": str(folder / "q.parquet"), "arrow stream": str(folder / "r.arrow"), "arrow file": str(folder / "s.arrow")}


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    for name, path in formats(tmp_path).items():
        assert data_of(path) == ROWS, name


def test_rows_of_line_formats_know_their_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "\n\n" + lines(ROWS[:1]) + "\r\n" + lines(ROWS[1:2]))
    assert [row.source.line for row in read_rows(path).rows] == [3, 5]


def test_a_csv_record_over_several_lines_is_named_by_its_first(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'prompt,chosen,rejected\n"a\nb, c","say ""hi""",no\nq,y,n\n')
    rows = read_rows(path).rows
    assert [row.source.line for row in rows] == [2, 4]
    assert rows[0].data == {"prompt": "a\nb, c", "chosen": 'say "hi"', "rejected": "no"}


def test_messages_inside_csv_cells_are_read(tmp_path: Path) -> None:
    cell = json.dumps([{"role": "user", "content": "Hi"}]).replace('"', '""')
    assert data_of(write(tmp_path / "a.csv", f'prompt,n\n"{cell}",1\n')) == [{"prompt": [{"role": "user", "content": "Hi"}], "n": "1"}]


@pytest.mark.parametrize(
    "content, line, words",
    [
        ("a,b\n1,2\n1\n", 3, "1 cells"),
        ("a,b\n1,2\n1,2,3\n", 3, "3 cells"),
        ('a,b\n1,2\n"open,2\n', 3, "breaks"),
        (b"a,b\n1,2\ncaf\xe9,2\n", 3, "UTF-8"),
    ],
)
def test_bad_csv_rows_are_named(tmp_path: Path, content: str | bytes, line: int, words: str) -> None:
    read = read_rows(write(tmp_path / "a.csv", content))
    assert [row.data for row in read.rows] == [{"a": "1", "b": "2"}]
    (problem,) = read.problems
    assert problem.source.line == line
    assert problem.action == "reject"
    assert words in problem.what


BROKEN = [
    ('{"a": 1,}', "comma before the closing brace"),
    ("{'a': 1}", "single quotes"),
    ('{"a": 1} more', "text after the object"),
    ("[1, 2]", "an array"),
    ('"text"', "a bare string"),
    ("17", "a number"),
    ("null", "null"),
    ('{"a": 1, "a": 2}', "appears twice"),
    ("{" * 50_000, "not JSON"),
    ('{"a": ' + "[" * 50_000, "nested"),
    ('{"a": tru}', "not JSON"),
]


@pytest.mark.parametrize("text, words", BROKEN, ids=[w for _, w in BROKEN])
def test_a_broken_line_is_named_with_its_fault(tmp_path: Path, text: str, words: str) -> None:
    read = read_rows(write(tmp_path / "a.jsonl", f'{{"x": 1}}\n{text}\n{{"x": 2}}\n'))
    assert [row.data for row in read.rows] == [{"x": 1}, {"x": 2}]
    (problem,) = read.problems
    assert problem.source.line == 2
    assert problem.action == "reject"
    assert words in problem.what or words == "nested"
    assert problem.remedy


def test_a_cut_off_last_record_is_said_to_be_that(tmp_path: Path) -> None:
    read = read_rows(write(tmp_path / "a.jsonl", lines(ROWS) + '{"prompt": "half'))
    assert len(read.rows) == 3
    assert "cut off" in read.problems[0].what
    assert read.problems[0].source.line == 4


def test_a_broken_array_gives_the_elements_before_the_break(tmp_path: Path) -> None:
    for tail in ('{"x": 3 oops}]', "17 18]", '{"x": 3}', '{"x": 3},]', ""):
        read = read_rows(write(tmp_path / "a.json", f'[\n{{"x": 1}},\n{{"x": 2}},\n{tail}'))
        assert [row.data["x"] for row in read.rows][:2] == [1, 2]
        assert [p.action for p in read.problems][-1] == "reject", tail
        assert "later elements are not read" in read.problems[-1].what


def test_an_array_with_one_element_of_another_kind_loses_only_that_one(tmp_path: Path) -> None:
    read = read_rows(write(tmp_path / "a.json", '[{"x": 1}, 5, {"x": 2}]'))
    assert [row.source.line for row in read.rows] == [1, 3]
    assert [p.source.line for p in read.problems] == [2]


def test_a_damaged_gz_gives_its_good_rows_and_a_problem(tmp_path: Path) -> None:

    words = [{"prompt": str(random.Random(i).random()), "chosen": "a", "rejected": "b"} for i in range(2000)]
    packed = gzip.compress(lines(words).encode())
    read = read_rows(write(tmp_path / "a.jsonl.gz", packed[: len(packed) // 2]))
    assert 100 < len(read.rows) < 2000
    assert [p.kind for p in read.problems] == ["cut_off"]


UNUSABLE: list[tuple[str, bytes, str]] = [
    ("empty.jsonl", b"", "holds no row"),
    ("blank.jsonl", b"\n \r\n\n", "holds no row"),
    ("empty.json", b"[]", "holds no row"),
    ("header.csv", b"a,b\n", "holds no row"),
    ("twice.csv", b"a,a\n1,2\n", "repeated column"),
    ("no.jsonl.gz", b'{"a": 1}\n', "not gzip"),
    ("utf16.jsonl", '{"a": 1}\n'.encode("utf-16"), "UTF-16"),
    ("no.parquet", b"PAR1 but not really PAR1", "cannot be read"),
    ("no.arrow", b"nothing of the kind", "cannot be read"),
    ("notes.docx", b"PK\x03\x04", "not known"),
]


@pytest.mark.parametrize("name, content, words", UNUSABLE, ids=[n for n, _, _ in UNUSABLE])
def test_an_unusable_file_is_refused_by_name(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(UserError, match=words) as error:
        read_rows(path)
    assert name in str(error.value)


def test_a_missing_file_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    write(tmp_path / "preferences.jsonl", lines(ROWS))
    with pytest.raises(UserError, match=r"preferences\.jsonl"):
        read_rows(str(tmp_path / "preference.jsonl"))
    with pytest.raises(UserError, match="does not exist either"):
        read_rows(str(tmp_path / "nowhere" / "preference.jsonl"))
    with pytest.raises(UserError, match="no data file was named"):
        read_rows([])


def test_a_folder_is_its_data_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path / "b.jsonl", lines(ROWS[1:2]))
    write(tmp_path / "a.jsonl", lines(ROWS[:1]))
    write(tmp_path / "deep" / "c.jsonl.gz", gzip.compress(lines(ROWS[2:]).encode()))
    write(tmp_path / "README.md", "not data")
    write(tmp_path / "dataset_info.json", "{}")
    write(tmp_path / ".hidden.jsonl", "broken")
    read = read_rows(str(tmp_path))
    assert [row.data for row in read.rows] == ROWS
    assert [Path(f).name for f in read.files] == ["a.jsonl", "b.jsonl", "c.jsonl.gz"]


def test_a_folder_without_data_and_one_with_several_splits_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "README.md", "not data")
    with pytest.raises(UserError, match="holds no data file"):
        read_rows(str(tmp_path))
    write(tmp_path / "train-00000.jsonl", lines(ROWS))
    assert len(read_rows(str(tmp_path)).rows) == 3
    write(tmp_path / "test-00000.jsonl", lines(ROWS))
    with pytest.raises(UserError, match="several splits"):
        read_rows(str(tmp_path))


def test_several_paths_are_read_in_the_order_given(tmp_path: Path) -> None:
    one, other = write(tmp_path / "z.jsonl", lines(ROWS[:1])), write(tmp_path / "a.jsonl", lines(ROWS[1:]))
    assert data_of([one, other]) == ROWS


def test_the_fingerprint_follows_the_bytes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines(ROWS))
    before = read_rows(path).fingerprint
    assert read_rows(path).fingerprint == before
    write(tmp_path / "a.jsonl", lines(ROWS).replace("yes", "Yes", 1))
    assert read_rows(path).fingerprint != before


def test_a_hub_name_says_what_to_install_or_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"tether-lm\[hub\]"):
        read_rows("someone/comparisons")
    asked = []

    def load_dataset(name: str, split: str) -> list[dict[str, Any]]:
        asked.append((name, split))
        if name == "someone/gone":
            raise ValueError("no such data set\nlong traceback")
        return ROWS

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert data_of("someone/comparisons") == ROWS
    assert str(read_rows("someone/comparisons:test").rows[1].source) == "someone/comparisons:test:2"
    assert asked == [("someone/comparisons", "train"), ("someone/comparisons", "test")]
    with pytest.raises(UserError, match="no such data set"):
        read_rows("someone/gone")


# -- the handed file of broken lines -----------------------------------------------------------------------------------


def judge(loaded: Any, line: int, expect: str) -> None:
    found = [p for p in loaded.problems if p.source.line == line]
    used = any(row.source.line == line for row in loaded.rows)
    check_expected(expect, {p.action for p in found}, used)
    for problem in found:
        assert problem.what
        assert problem.remedy
        assert f":{line}" in str(problem)


def load_or_refusal(path: str) -> tuple[Any, str]:
    try:
        return preferences.load(path), ""
    except UserError as error:
        return None, str(error)


@pytest.mark.parametrize("case", expectations("jsonl_broken"), ids=lambda c: f"line {c['line']} {c['expect']}")
def test_each_line_of_the_broken_file_gets_what_it_should(case: dict[str, Any], tmp_path: Path) -> None:
    judge(preferences.load(str(case_file("jsonl_broken"))), case["line"], case["expect"])
    # The same line alone in a file.
    raw = case_file("jsonl_broken").read_bytes().split(b"\n")[case["line"] - 1]
    path = write(tmp_path / "alone.jsonl", raw)
    if case["expect"] == "skip":
        with pytest.raises(UserError, match="holds no row"):
            preferences.load(path)
        return
    found, refusal = load_or_refusal(path)
    if found is not None:
        judge(found, 1, case["expect"])
    else:  # as a whole file it may be refused at once, such as one without a column or in another encoding
        assert case["expect"] in ("reject_with_line_number", "policy_documented")
        assert path in refusal


def test_the_whole_broken_file_is_refused_before_training_and_can_be_used_without_its_bad_rows() -> None:
    loaded = preferences.load(str(case_file("jsonl_broken")))
    bad = [c for c in expectations("jsonl_broken") if c["expect"] == "reject_with_line_number"]
    with pytest.raises(UserError) as error:
        loaded.enforce("refuse")
    rejected = {p.source.line for p in loaded.problems if p.action == "reject"}
    assert rejected >= {c["line"] for c in bad}
    assert f"{len(rejected)} row{'s' if len(rejected) > 1 else ''} cannot be used" in str(error.value)
    if loaded.rows:
        loaded.enforce("drop")
