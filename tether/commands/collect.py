"""`tether collect`: people compare answers in a browser or at a terminal, and every vote is kept."""

from __future__ import annotations

import signal
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tether.errors import UserError
from tether.progress import say

if TYPE_CHECKING:
    from tether.collect.desk import Desk
    from tether.collect.imported import ImportedVote
    from tether.collect.live import LiveAnswers
    from tether.collect.serving import Address
    from tether.files import Loaded


def collect(
    prompts_or_pairs: Annotated[
        str, typer.Argument(help="A file of answers to compare; with --model a file of prompts; or a desk's folder.")
    ],
    model: Annotated[list[str] | None, typer.Option(help="Sample the answers from this model; give it twice to compare two.")] = None,
    desk: Annotated[Path | None, typer.Option(help="The desk's folder; by default the file's name with .desk.")] = None,
    votes: Annotated[int | None, typer.Option(help="Votes wanted of each item, from as many people.")] = None,
    guidelines: Annotated[Path | None, typer.Option(help="What people read first: a Markdown file.")] = None,
    reason: Annotated[list[str] | None, typer.Option(help="A reason to offer for a choice; may be given several times.")] = None,
    strength: Annotated[bool | None, typer.Option(help="Ask how much better the better answer is.")] = None,
    repeats: Annotated[float | None, typer.Option(help="Share of items shown twice to the same person, to measure consistency.")] = None,
    uncertain_first: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Begin with what this reward model (of several heads) is least sure of.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Decides the order of items, the sides and sampled answers.")] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; other than this machine's own, the link holds a token.")
    ] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="The port; by default 8321 or the next that is free.")] = None,
    name: Annotated[list[str] | None, typer.Option(help="Another name under which browsers reach this machine.")] = None,
    invite: Annotated[list[str] | None, typer.Option(help="Print a link of their own for this person; may be given several times.")] = None,
    open_browser: Annotated[
        bool | None, typer.Option("--open/--no-open", help="Open the page; by default where there is a terminal.")
    ] = None,
    earlier: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="FILE", help="Take over the votes of this file, with their items; may be given several times."),
    ] = None,
    on_bad_rows: Annotated[str, typer.Option(help="refuse, or drop rows of the files that cannot be used.")] = "refuse",
    terminal: Annotated[bool, typer.Option("--terminal", help="Vote here by keys instead of in a browser.")] = False,
    annotator: Annotated[str, typer.Option(help="With --terminal: the name under which votes are kept.")] = "me",
    max_new_tokens: Annotated[int, typer.Option(help="With --model: tokens of an answer at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="With --model: scores are divided by it.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="With --model: keep the likeliest tokens that together reach this probability.")] = 1.0,
    precision: Annotated[str, typer.Option(help="Of a model: auto, bf16 or fp32.")] = "auto",
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that comes with the model.")] = False,
) -> None:
    """Two answers side by side, blind: people choose, and the votes become training data."""
    _check_installed(terminal)
    models = model or []
    if len(models) > 2:
        raise UserError(f"two models can be compared, got {len(models)}", where="--model", remedy="Give one or two.")
    if on_bad_rows not in ("refuse", "drop"):
        raise UserError(f"there is no {on_bad_rows!r}", where="--on-bad-rows", remedy="Use refuse or drop.")
    changes = _changes(votes, guidelines, reason, strength, repeats, seed, uncertain_first)
    imported = _earlier_votes(earlier or [], on_bad_rows)
    opened, items = _desk(prompts_or_pairs, models, desk, changes, on_bad_rows)
    live: LiveAnswers | None = None
    try:
        if items is not None:
            _add(opened, items)
        if imported is not None:
            _take_over(opened, imported)
        if uncertain_first is not None:
            _score(opened, uncertain_first, precision)
        if models:
            live = _live(opened, prompts_or_pairs, models, (max_new_tokens, temperature, top_p), precision, trust_remote_code, on_bad_rows)
            live.start()
        if terminal:
            _at_terminal(opened, annotator, live)
        else:
            _in_browser(opened, live, host, port, name or [], invite or [], open_browser)
    finally:
        if live is not None:
            live.stop()
        _tell_where(opened)
        opened.close()


def _check_installed(terminal: bool) -> None:
    from importlib.util import find_spec

    wanted = [] if terminal else ["starlette", "uvicorn", "markdown_it", "latex2mathml"]
    if missing := [m for m in wanted if find_spec(m) is None]:
        remedy = "pip install 'tether-lm[desk]', or vote at the terminal: --terminal."
        raise UserError(f"the desk needs packages that are not installed: {', '.join(missing)}", where="tether collect", remedy=remedy)


# -- the desk ------------------------------------------------------------------------------------------------------------


def _changes(
    votes: int | None,
    guidelines: Path | None,
    reasons: list[str] | None,
    strength: bool | None,
    repeats: float | None,
    seed: int | None,
    uncertain: str | None,
) -> dict[str, Any]:
    """The desk's settings that were given; a desk that is opened again keeps its others."""
    given = {"votes_per_item": votes, "strength": strength, "repeat_share": repeats, "seed": seed}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if reasons:
        changes["reasons"] = tuple(reasons)
    if uncertain is not None:
        changes["choice"] = "uncertain"
    if guidelines is not None:
        try:
            changes["guidelines"] = guidelines.expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the guidelines cannot be read: {error}", where=str(guidelines), remedy="Wanted: a UTF-8 text file.") from None
    return changes


def _desk(path: str, models: list[str], folder: Path | None, changes: dict[str, Any], on_bad_rows: Any) -> tuple[Desk, Any]:
    """The desk, made or opened, and the items to put on it: None with models, and where a desk was named."""
    from tether.collect.desk import SETTINGS_FILE, Desk, DeskSettings
    from tether.collect.guidelines import default_guidelines
    from tether.collect.items import load_items

    named = Path(path).expanduser()
    if (named / SETTINGS_FILE).exists():
        if folder is not None:
            raise UserError("a desk was named already", where=f"--desk {folder}", remedy=f"Leave one of {path} and --desk out.")
        if models:
            raise UserError("a desk holds no prompts to ask", where=path, remedy="Name the file of prompts, and the desk by --desk.")
        folder, items = named, None
    elif models:
        items = None
    else:
        items = load_items(path)  # before a folder is made: a mistake in the file leaves nothing behind
        items.enforce(on_bad_rows)
    place = folder or Path(f"{Path(path).name.split('.')[0] or 'votes'}.desk")
    if (place / SETTINGS_FILE).exists():
        desk = Desk.open(place)
        if changes:
            desk.change(**changes)
        return desk, items
    settings = DeskSettings(**{"guidelines": default_guidelines(), **changes})
    return Desk.create(place, settings), items


def _add(desk: Desk, items: Any) -> None:
    new = desk.add_items(items.rows)
    left_out = sum(p.action in ("reject", "drop") for p in items.problems)
    say(f"{new} new items, {len(items.rows)} in the file" + (f"; {left_out} rows hold nothing to compare" if left_out else ""))
    for problem in items.problems[:5]:
        say(f"  {problem}")
    if len(items.problems) > 5:
        say(f"  and {len(items.problems) - 5} more")
    if not desk.items():
        raise UserError("the desk has nothing to vote on", where=str(desk.folder), remedy="Add a file with answers to compare.")


def _earlier_votes(files: list[str], on_bad_rows: Any) -> Loaded[ImportedVote] | None:
    if not files:
        return None
    from tether.collect.imports import load_votes

    loaded = load_votes(files)  # before a folder is made: a mistake in the file leaves nothing behind
    loaded.enforce(on_bad_rows)
    return loaded


def _take_over(desk: Desk, votes: Loaded[ImportedVote]) -> None:
    added = desk.add_votes(votes.rows)
    more = [f"{n} {what}" for n, what in ((added.repeats, "of them repeats"), (added.known, "there already")) if n]
    say(f"{added.votes} votes taken over, {added.items} new items" + "".join(f", {m}" for m in more))
    for kind, n in votes.counts().items():
        say(f"  {n} rows: {kind}, such as {next(p for p in votes.problems if p.kind == kind)}")


def _score(desk: Desk, model: str, precision: str) -> None:
    from tether.collect.uncertainty import spreads

    desk.set_spreads(spreads(desk.items(), model, precision=precision))


def _live(
    desk: Desk, path: str, models: list[str], how: tuple[int, float, float], precision: str, trust_remote_code: bool, on_bad_rows: Any
) -> LiveAnswers:
    say("loading " + " and ".join(dict.fromkeys(models)))
    from tether.answers import Speaker, read_prompts
    from tether.collect.live import LiveAnswers
    from tether.engines.sampling import Sampling

    max_new_tokens, temperature, top_p = how
    prompts, sources, left_out = read_prompts(path, on_bad_rows=on_bad_rows)
    if left_out:
        say(f"{left_out} rows of {path} were left out; `tether data {path} --kind prompt` names them")
    sampling = Sampling(max_new_tokens, temperature, top_p=top_p)

    def load(name: str) -> Speaker:
        speaker = Speaker(name, precision=precision, trust_remote_code=trust_remote_code)
        for notice in speaker.notices:
            say(notice)
        return speaker

    return LiveAnswers(desk, list(zip(prompts, sources, strict=True)), models, sampling, load, seed=desk.settings.seed)


# -- voting --------------------------------------------------------------------------------------------------------------


def _in_browser(
    desk: Desk, live: LiveAnswers | None, host: str, port: int | None, names: list[str], invited: list[str], open_browser: bool | None
) -> None:
    from tether.collect.guard import Keys, desk_secret
    from tether.collect.serving import listen, serve

    address = listen(host, port, names=names)
    link = address.link(Keys(desk_secret(desk.folder)))
    print(link, flush=True)
    _print_invitations(desk, address, invited)
    say("Ctrl-C ends the desk; every vote that was confirmed is saved.")
    if open_browser if open_browser is not None else sys.stdout.isatty():
        webbrowser.open(link)
    with _until_stopped():
        serve(desk, address, live=live)


def _print_invitations(desk: Desk, address: Address, invited: list[str]) -> None:
    for person in invited:
        found = desk.annotator(person)
        print(f"{found.name}: {address.own_link(found.token)}", flush=True)


def _at_terminal(desk: Desk, annotator: str, live: LiveAnswers | None) -> None:
    from tether.collect.terminal import run_terminal

    if live is not None:
        from tether.collect.live import PatientDesk

        desk = PatientDesk(desk, live)
    run_terminal(desk, desk.annotator(annotator), sys.stdin, sys.stdout)


class _until_stopped:
    """SIGTERM ends the desk as Ctrl-C does, so that it says where the votes are."""

    def __enter__(self) -> None:
        def stop(*_: Any) -> None:
            raise KeyboardInterrupt

        self._before: Callable[..., Any] | int | None = signal.signal(signal.SIGTERM, stop)

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        signal.signal(signal.SIGTERM, self._before)
        return isinstance(error, KeyboardInterrupt)


def _tell_where(desk: Desk) -> None:
    votes = desk.votes()
    people = len({v.annotator for v in votes})
    kept = f"{len(votes)} {'vote' if len(votes) == 1 else 'votes'} of {people} {'person' if people == 1 else 'people'}"
    say(f"{kept} in {desk.folder}. Go on: tether collect {desk.folder}. Use them: tether export {desk.folder} --out votes.jsonl")
