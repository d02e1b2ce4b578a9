"""`tether data`: a data file, looked at before a run spends hours on it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from tether.chat import refuse_untrained
from tether.data_report import DataReport, make_report
from tether.errors import UserError
from tether.files import Problem

DONE = {"reject": "refused (unusable)", "drop": "dropped", "truncate": "cut", "warn": "kept, but look"}


def data(
    paths: Annotated[list[str], typer.Argument(metavar="FILE...", help="Files, folders or hub ids.")],
    kind: Annotated[str | None, typer.Option(help="preference, feedback, sft or prompt; default: by the columns.")] = None,
    model: Annotated[str | None, typer.Option(help="A model whose tokenizer and template count the tokens.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="A Jinja file that replaces the tokenizer's chat template.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Say what this limit in tokens would cut or drop.")] = None,
    truncation: Annotated[str, typer.Option(help="keep_start or drop, as in a recipe.")] = "keep_start",
    on_bad_rows: Annotated[str, typer.Option(help="refuse or drop, as in a recipe.")] = "refuse",
    show: Annotated[int, typer.Option(help="How many rows to name for each kind of problem.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="The whole report as JSON, every problem with file and line.")] = False,
) -> None:
    """Rows, shape, lengths, duplicates, length bias, and what a run would drop and why. Exit code 2 when a run would refuse the file."""
    if on_bad_rows not in ("refuse", "drop"):
        raise UserError(f"there is no {on_bad_rows!r}", where="on_bad_rows", remedy="Use refuse or drop.")
    policy: Literal["refuse", "drop"] = "drop" if on_bad_rows == "drop" else "refuse"
    report, loaded = make_report(
        paths,
        kind=kind,
        codec=None if model is None else _codec(model, chat_template),
        max_length=max_length,
        truncation=truncation,  # type: ignore[arg-type]  # an unknown word is refused by the encoder
    )
    if as_json:
        print(json.dumps(report.as_dict(), indent=2, ensure_ascii=False))
    else:
        show_report(report, Console(soft_wrap=True), show)
    loaded.enforce(policy)
    refuse_untrained(report.problems, report.rows_usable, policy)
    if report.rows_usable == 0:
        raise UserError("no row is left to train on", where=", ".join(report.files), remedy="The reasons are listed above.")


def _codec(model: str, chat_template: str | None) -> Any:
    from tether.codec import Codec
    from tether.models import fetch_smollm2, load_tokenizer

    if model == "smollm2":
        tokenizer = load_tokenizer(fetch_smollm2())
    elif model.endswith(".gguf"):
        tokenizer = _gguf_tokenizer(Path(model))
    else:
        tokenizer = load_tokenizer(model, local_only=Path(model).exists())
    template = None
    if chat_template is not None:
        try:
            template = Path(chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"the template cannot be read: {error.strerror}", where=chat_template) from error
    return Codec(tokenizer, template)


def _gguf_tokenizer(path: Path) -> Any:
    """The tokenizer alone; the weights of the file are not read."""
    from transformers import AutoTokenizer

    if not path.is_file():
        raise UserError("there is no such GGUF file", where=str(path), remedy="Give the path of an existing .gguf file.")
    try:
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"the tokenizer cannot be read: {str(error).splitlines()[0]}", where=str(path)) from error


def show_report(report: DataReport, console: Console, show: int = 3) -> None:
    """Print a report for people."""
    console.print(f"[bold]{', '.join(report.files)}[/bold]", highlight=False)
    console.print(f"{report.rows_in_file} rows read as {report.kind} data: {report.shape}", highlight=False)
    console.print(f"{report.rows_loaded} loaded, {report.rows_usable} usable", highlight=False)
    console.print(f"columns: {', '.join(f'{name} ({n})' for name, n in report.columns.items())}", highlight=False, markup=False)
    if report.lengths:
        table = Table(title=f"length in {report.unit}", title_justify="left", box=None, pad_edge=False)
        for head in ("", "min", "median", "p95", "max"):
            table.add_column(head, justify="left" if not head else "right")
        for name, spread in report.lengths.items():
            table.add_row(name, str(spread.min), f"{spread.median:g}", f"{spread.p95:g}", str(spread.max))
        console.print(table)
    if report.too_long is not None:
        console.print(f"longer than max_length {report.max_length}: {report.too_long}", highlight=False)
    if bias := report.length_bias:
        pairs = ""
        if bias.better_longer is not None and bias.worse_longer is not None:
            pairs = f"the better answer is longer in {bias.better_longer:.0%} of pairs, shorter in {bias.worse_longer:.0%}; "
        r = "not defined" if bias.correlation is None else f"{bias.correlation:+.2f}"
        console.print(
            f"length and label: {pairs}mean {bias.mean_better:.0f} against {bias.mean_worse:.0f} {report.unit}, correlation {r}",
            highlight=False,
        )
    for note in report.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    _show_problems(report.problems, console, show)


def _show_problems(problems: list[Problem], console: Console, show: int) -> None:
    if not problems:
        console.print("no problems found")
        return
    groups: dict[tuple[str, str], list[Problem]] = defaultdict(list)
    for problem in problems:
        groups[problem.action, problem.kind].append(problem)
    order = list(DONE)
    for (action, kind), group in sorted(groups.items(), key=lambda item: (order.index(item[0][0]), -len(item[1]))):
        console.print(f"{len(group)} {DONE[action]}: {kind}", style="bold", highlight=False)
        for problem in group[:show]:
            console.print(f"  {problem}", highlight=False, markup=False)
        if len(group) > show:
            lines = ", ".join(str(p.source.line) for p in group[show : show + 10])
            console.print(f"  and {len(group) - show} more, lines {lines}{' ...' if len(group) > show + 10 else ''}", highlight=False)
