"""`tether compare`: which of two models (or files of answers) is better, with intervals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tether.errors import UserError
from tether.progress import say

if TYPE_CHECKING:
    from rich.console import Console

    from tether.answers import Answer
    from tether.best_of import BestOf
    from tether.compare import Comparison
    from tether.stats import Interval


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A model (folder, hub id, .gguf, adapter folder) or a file of answers.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    judge: Annotated[
        str,
        typer.Option(help="A reward model (folder or hub id), vader, longer, shorter, human, regex:PATTERN, module:function or a reward."),
    ] = "",
    prompts: Annotated[str | None, typer.Option(help="A file of prompts that models answer; not needed for two files.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many prompts.")] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Answers to each prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="Of the answers; 0 takes the likeliest token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens that together reach this probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Decides the answers, the shuffling of the sides and the bootstrap.")] = 0,
    best_of: Annotated[int | None, typer.Option(help="B answers with the best of so many samples, by --by.")] = None,
    by: Annotated[str | None, typer.Option(help="Who chooses among them: a scorer as for --judge, or a reward such as math.")] = None,
    best_of_side: Annotated[str, typer.Option(help="Which side answers so: b, a or both.")] = "b",
    draw: Annotated[int | None, typer.Option(help="Samples drawn for it; more than --best-of make the estimate steadier.")] = None,
    margin: Annotated[float, typer.Option(help="Scores within this of each other are a tie.")] = 0.0,
    out: Annotated[Path | None, typer.Option(help="Write every pair with its verdict to this JSONL file.")] = None,
    samples: Annotated[int, typer.Option(help="How many pairs to show side by side.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
    precision: Annotated[str, typer.Option(help="auto, bf16 or fp32.")] = "auto",
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that comes with a model.")] = False,
) -> None:
    """Win rate of A over B on the same prompts, with intervals; score difference and length beside it."""
    chooses = _chooses(best_of, by, best_of_side, draw, n)
    judge = judge or (by or "")
    if not judge:
        raise UserError("no judge was named", where="--judge", remedy="Name a reward model, vader, longer, shorter, human, ....")
    from tether.answers import is_answers_file
    from tether.best_of import best_of as chosen
    from tether.best_of import make_scorer
    from tether.compare import compare as compared
    from tether.compare import interval_as_dict
    from tether.engines.sampling import Sampling

    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p)
    if not (is_answers_file(a) and is_answers_file(b)) and prompts is None:
        raise UserError("a model needs prompts to answer", where="--prompts", remedy="Name a file of prompts.")
    if chooses and temperature == 0:
        raise UserError("samples at temperature 0 are all the same", where="--temperature", remedy="Use 1.0 to have a choice.")
    columns = _columns(prompts)
    asked = make_scorer(judge, columns, margin=margin, precision=precision)
    choosing = None if by is None else asked if by == judge else make_scorer(by, columns, precision=precision)
    questions = None if prompts is None else _questions(prompts, limit)
    options = {"precision": precision, "trust_remote_code": trust_remote_code}
    sides, chances, best = [], [], {}
    for side, name in (("a", a), ("b", b)):
        # Where a side chooses, the two draw from generators of their own: their samples must not be the same luck.
        stream: int | str = f"{seed}/{side}" if chooses else seed
        answers = _answers(name, questions, sampling, (draw or best_of or n) if side in chooses else n, stream, limit, options)
        if side in chooses and best_of is not None and choosing is not None:
            best[side] = chosen(answers, best_of, choosing, asked, name=name, seed=seed)
        sides.append(answers)
        chances.append(best[side].chances if side in best else None)
    result = compared(asked, *sides, names=(a, b), seed=seed, chances=(chances[0], chances[1]) if chooses else None)
    if out is not None:
        from tether import atomic

        atomic.write_file(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in result.rows()))
    if as_json:
        told = result.as_dict()
        if best:
            told["best_of"] = {side: found.as_dict(interval_as_dict) for side, found in best.items()}
        typer.echo(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        from rich.console import Console

        console = Console(soft_wrap=False)
        show(result, console, samples)
        for side, found in best.items():
            show_best_of(found, side.upper(), result.judge, console)
    if not result.judged:
        raise UserError(f"the judge decided none of {len(result.pairs)} pairs", where=f"judge {judge}", remedy="See the reasons above.")


def _chooses(best_of: int | None, by: str | None, side: str, draw: int | None, n: int) -> str:
    """The sides that answer with the best of several samples: "", "a", "b" or "ab"."""
    if best_of is None:
        for name, value in (("--by", by), ("--draw", draw), ("--best-of-side", None if side == "b" else side)):
            if value is not None:
                raise UserError("it only acts with --best-of", where=name, remedy="Say of how many samples the best is taken: --best-of 8.")
        return ""
    if best_of < 2:
        raise UserError(f"must be at least 2, got {best_of}: of one sample there is no choice", where="--best-of")
    if by is None:
        raise UserError("it is not said who chooses the best", where="--by", remedy="Name a reward model, a rule or a function.")
    if side not in ("a", "b", "both"):
        raise UserError(f"there is no side {side!r}", where="--best-of-side", remedy="Use b, a or both.")
    if draw is not None and draw < best_of:
        raise UserError(f"the best of {best_of} cannot be taken of {draw}", where="--draw", remedy=f"Draw at least {best_of}.")
    if side == "both" and n != 1:
        raise UserError("both sides answer with the best of their samples", where="--n", remedy="Say with --draw how many are drawn.")
    return "ab" if side == "both" else side


def _columns(path: str | None) -> dict[str, dict[str, Any]]:
    """The columns of the prompts' file by question, for rewards that look at them."""
    from tether.answers import same_question

    if path is None or path.lower().endswith(".txt"):
        return {}
    from tether import prompts

    return {same_question(p.prompt): p.extra for p in prompts.load(path).rows}


def _questions(path: str, limit: int | None) -> tuple[list[Any], list[Any]]:
    from tether.answers import read_prompts

    texts, sources, _ = read_prompts(path)
    return texts[:limit], sources[:limit]


def _answers(
    name: str,
    questions: tuple[list[Any], list[Any]] | None,
    sampling: Any,
    n: int,
    seed: int | str,
    limit: int | None,
    options: dict[str, Any],
) -> list[Answer]:
    """Read from a file, or asked of a model. Both models draw the same uniform numbers."""
    from tether.answers import Speaker, is_answers_file, read_answers, same_question

    if is_answers_file(name):
        answers = read_answers(name)
        if questions is None or answers[0].prompt is None:
            return answers[:limit]
        wanted = {same_question(q) for q in questions[0]}
        return [x for x in answers if same_question(x.prompt or "") in wanted]
    assert questions is not None
    speaker = Speaker(name, **options)
    for notice in speaker.notices:
        say(notice)
    return speaker.answer(questions[0], sampling, n=n, seed=seed, sources=questions[1])


# -- what is shown -----------------------------------------------------------------------------------------------------


def show(result: Comparison, console: Console, samples: int) -> None:
    from rich.table import Table
    from rich.text import Text as RichText

    counts, rate = result.counts, result.win_rate
    table = Table(title=f"{result.name_a} (A) against {result.name_b} (B), judge {result.judge}", title_justify="left")
    for column in ("", "A", "B", "A less B"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("win rate, ties half", *(("-", "-") if rate is None else (f"{rate.value:.1%}", f"{1 - rate.value:.1%}")), "")
    table.add_row(
        "95 % interval", *(("-", "-") if rate is None else (_percents(rate.low, rate.high), _percents(1 - rate.high, 1 - rate.low))), ""
    )
    table.add_row("wins", str(counts["a"]), str(counts["b"]), "")
    if result.score_difference is not None:
        table.add_row("mean score", f"{result.mean_score('a'):.3f}", f"{result.mean_score('b'):.3f}", _signed(result.score_difference))
    for unit in ("words", "tokens"):
        if (length := result.length(unit)) is not None:
            table.add_row(f"mean length, {unit}", f"{length[0]:.1f}", f"{length[1]:.1f}", _signed(length[2], 1))
    if (cut_a := result.cut("a")) is not None and (cut_b := result.cut("b")) is not None:
        table.add_row("cut at the limit", str(cut_a), str(cut_b), "")
    console.print(table)
    for line in sentences(result):
        console.print(RichText(line))
    for i, pair in enumerate(_spread(result, samples), 1):
        from tether.messages import plain

        side = Table(title=RichText(f"{i}. {plain(pair.prompt)[-300:]}"), title_justify="left", show_lines=True)
        for name, score in (("A", pair.verdict.score_a), ("B", pair.verdict.score_b)):
            won = " (won)" if pair.verdict.winner == name.lower() else ""
            side.add_column(f"{name}{won}" + (f"  {score:.3f}" if score is not None else ""), ratio=1)
        side.add_row(RichText(pair.a.text), RichText(pair.b.text))
        console.print(side)


def show_best_of(found: BestOf, side: str, judge: str, console: Console) -> None:
    """What choosing does on its own: scores by the one who chooses and by the judge, against the bound of the KL."""
    from rich.table import Table
    from rich.text import Text as RichText

    from tether.best_of import kl_bound

    same = found.by == judge
    table = Table(title=RichText(f"{side} with the best of n by {found.by}: mean scores"), title_justify="left")
    for column in ("n", "KL, upper bound", f"by {found.by}", *(() if same else (f"judge {judge}",))):
        table.add_column(RichText(column), justify="right")
    for s in found.steps:
        cells = [s.chosen_by] if same else [s.chosen_by, s.judged]
        table.add_row(str(s.n), f"{s.kl_upper_bound:.3f} nats", *("-" if x is None else _plain(x) for x in cells))
    console.print(table)
    fewest, most = found.samples
    drawn = str(fewest) if fewest == most else f"{fewest} to {most}"
    lines = [
        f"{side} answers with the best of {found.n} by {found.by}, from {drawn} samples of each prompt"
        + (": every sample counts by its chance to be chosen." if most > found.n else "."),
        f"KL(best of {found.n} || one sample) is at most {kl_bound(found.n):.3f} nats: log n - (n-1)/n is an upper bound, not the KL itself.",
    ]
    if same:
        lines.append("Watch: the scorer that chooses is also the judge, so it finds what it looked for; name another with --judge.")
    if found.unscored:
        lines.append(f"{found.unscored} samples have no score and never win; in {found.undecided} prompts none has: the first one answers.")
    for line in lines:
        console.print(RichText(line))


def sentences(result: Comparison) -> list[str]:
    """What the numbers say, and what to be careful about."""
    counts, rate = result.counts, result.win_rate
    lines = [f"{len(result.pairs)} pairs: {counts['a']} won by A, {counts['b']} by B, {counts['tie']} ties, {counts['invalid']} invalid."]
    if len({round(p.weight, 9) for p in result.pairs}) > 1:
        lines.append("Rates and means weigh each pair by the chance that its answers are those given; the counts above do not.")
    if rate is not None and rate.n > 1:
        clear = rate.low > 0.5 or rate.high < 0.5
        better = "A" if rate.value > 0.5 else "B"
        lines.append(f"{better} is better." if clear else "The interval includes 50 %: no difference that stands out from chance.")
    if counts["invalid"]:
        reasons = sorted({p.verdict.reason or "no reason given" for p in result.pairs if p.verdict.winner == "invalid"})
        lines.append(f"Invalid pairs are left out of the rates ({'; '.join(reasons[:3])}).")
    longer, decided = result.longer_wins
    if decided >= 10:
        lines.append(f"The longer answer won {longer / decided:.0%} of {decided} decided pairs.")
    if result.position_matters:
        first, decided = result.first_wins
        lines.append(f"Watch: the side shown first won {first} of {decided} decided pairs; the judge may favour a place.")
    return lines


def _spread(result: Comparison, samples: int) -> list[Any]:
    """Pairs from all over the list, not only its beginning."""
    if samples <= 0:
        return []
    step = max(1, len(result.pairs) // samples)
    return result.pairs[::step][:samples]


def _percents(low: float, high: float) -> str:
    return f"{low:.1%} to {high:.1%}"


def _plain(x: Interval) -> str:
    return f"{x.value:.3f}" if abs(x.low) == float("inf") else f"{x.value:.3f} ({x.low:.3f} to {x.high:.3f})"


def _signed(x: Interval, digits: int = 3) -> str:
    if abs(x.low) == float("inf"):
        return f"{x.value:+.{digits}f}"
    return f"{x.value:+.{digits}f} ({x.low:+.{digits}f} to {x.high:+.{digits}f})"
