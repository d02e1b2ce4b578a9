"""`tether export`: the votes of a desk as rows to train on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tether.errors import UserError
from tether.progress import say

TRAIN_WITH = {
    "preferences": "tether reward data={0}  or  tether dpo data={0}",
    "feedback": "tether dpo loss_type=kto data={0}",
    "rankings": "tether reward data={0}",
}


def export(
    desk: Annotated[Path, typer.Argument(metavar="DESK", help="The folder of a desk.")],
    kind: Annotated[str, typer.Option("--as", help="preferences (pairs), feedback (answers labelled good or bad), rankings, or votes.")] = (
        "preferences"
    ),
    votes: Annotated[
        str | None, typer.Option(help="majority (more than half, the default), all (a row for each vote), or soft (shares and margins).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The JSONL file to write; standard output if left out.")] = None,
    test_share: Annotated[
        float | None, typer.Option(help="Share of the prompts to hold out, in a file of their own beside --out: NAME.test.jsonl.")
    ] = None,
    min_votes: Annotated[int, typer.Option(help="Leave out items with fewer opinions than this.")] = 1,
    seed: Annotated[int, typer.Option(help="Decides which prompts are held out.")] = 0,
) -> None:
    """The votes of a desk as preference pairs, labelled answers, rankings, or as they are; each row says where it comes from."""
    _check(kind, votes, out, test_share, min_votes)
    from tether.collect.desk import Desk
    from tether.collect.export import export as exported
    from tether.collect.export import split

    opened = Desk.open(desk)
    try:
        items, given = opened.items(), opened.votes()
    finally:
        opened.close()
    found = exported(items, given, kind, votes or "majority", min_votes=min_votes)
    reasons = ", ".join(f"{n} {why}" for why, n in found.without.most_common())
    if not found.rows:
        remedy = f"Of {len(items)} items: {reasons}." if reasons else "`tether collect` is where people vote."
        raise UserError(f"the {len(given)} votes of the desk give no row", where=str(desk), remedy=remedy)
    files: dict[Path, list[dict[str, Any]]] = {}
    if out is not None and test_share is not None:
        train, test = split(found.rows, test_share, seed)
        files = {out: train, out.with_name(f"{out.stem}.test{out.suffix}"): test}
    elif out is not None:
        files = {out: found.rows}
    _write(files, found.rows)
    where = "" if not files else " -> " + ", ".join(f"{path} ({len(rows)})" for path, rows in files.items())
    told = (
        _number(len(found.rows), "vote") if kind == "votes" else f"{_number(len(found.rows), 'row')} out of {_number(len(given), 'vote')}"
    )
    say(f"{told} on {_number(len(items), 'item')}{where}")
    if reasons:
        say(f"without a row: {reasons}")
    for note in found.notes:
        say(note)
    if out is not None and kind in TRAIN_WITH:
        say("next: " + TRAIN_WITH[kind].format(out))


def _number(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _check(kind: str, votes: str | None, out: Path | None, test_share: float | None, min_votes: int) -> None:
    if kind == "votes" and votes is not None:
        raise UserError("votes are exported as they are", where=f"--votes {votes}", remedy="Leave it out with --as votes.")
    if test_share is not None and out is None:
        raise UserError("two files need a name", where="--test-share", remedy="Give --out, such as --out votes.jsonl.")
    if min_votes < 1:
        raise UserError(f"must be at least 1, got {min_votes}", where="--min-votes")
    if out is not None and out.suffix.lower() not in (".jsonl", ".ndjson"):
        raise UserError("rows are written as JSONL", where=f"--out {out}", remedy=f"Call it {out.stem or 'votes'}.jsonl.")
    if out is not None and out.is_dir():
        raise UserError("this is a folder", where=f"--out {out}", remedy="Name a file, such as votes.jsonl.")


def _write(files: dict[Path, list[dict[str, Any]]], rows: list[dict[str, Any]]) -> None:
    from tether.atomic import write_file

    if not files:
        for row in rows:
            print(_line(row))
    for path, part in files.items():
        try:
            write_file(path, "".join(_line(row) + "\n" for row in part))
        except OSError as error:
            raise UserError(f"the file cannot be written: {error.strerror}", where=str(path), remedy="Name another place.") from error


def _line(row: dict[str, Any]) -> str:
    """One line of JSON. What cannot be written as UTF-8 (half of a character) is escaped, as are line ends of other kinds."""
    text = json.dumps(row, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(row)
    return text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x85", "\\u0085")
