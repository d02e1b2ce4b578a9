"""`tether evaluate`: how often a model solves tasks that can be checked."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tether.errors import UserError
from tether.progress import say

if TYPE_CHECKING:
    from rich.console import Console

    from tether.attempts import Attempt, Folder
    from tether.evaluate import Evaluation
    from tether.pass_rates import Measure
    from tether.tasks import Tasks

KS = (1, 4, 8)
CUT_SHARE = 0.05  # above this share of answers at the length limit their number is said to matter
LABELS = {
    "greedy": "greedy accuracy",
    "cut": "cut at the length limit",
    "greedy cut": "cut, greedy",
    "length": "mean length, tokens",
    "greedy length": "mean length, greedy",
    "reward": "mean reward",
}


def evaluate(
    model: Annotated[str, typer.Argument(help="A model (folder, hub id, .gguf, adapter folder, smollm2) or a file of answers.")],
    data: Annotated[str, typer.Argument(metavar="TASKS", help="A data file of tasks: questions, and what answers are judged by.")],
    reward: Annotated[str, typer.Option(help="Who judges: math, code, another reward, file.py:function, or a recipe's block.")] = "",
    gold: Annotated[str | None, typer.Option(help="The column with the gold answers (math) or the tests (code).")] = None,
    ask: Annotated[str | None, typer.Option(help="The question, with columns in braces: '{question} Think first.'; or a file.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message before every question.")] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write; runs/evaluate-TASKS-1, ... if left out.")] = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Samples for each question.")] = 8,
    k: Annotated[str | None, typer.Option(help="For pass@k and maj@k, such as 1,4,8; each at most n.")] = None,
    greedy: Annotated[bool, typer.Option(help="Also answer greedily, once.")] = True,
    threshold: Annotated[float | None, typer.Option(help="A sample passes with at least this reward.")] = None,
    category: Annotated[str | None, typer.Option(help="A column: figures for each of its values too.")] = None,
    bins: Annotated[int | None, typer.Option(help="Cut a category of numbers into so many bins of equally many questions.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many questions.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(help="Of the samples; above 0.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens that together reach this probability.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; may be given several times.")] = None,
    seed: Annotated[int, typer.Option(help="Decides the samples and the bootstrap.")] = 0,
    slots: Annotated[int, typer.Option(help="Answers computed at once.")] = 128,
    on_bad_rows: Annotated[str, typer.Option(help="refuse, or drop rows without a question or a gold answer.")] = "refuse",
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
    precision: Annotated[str, typer.Option(help="auto, bf16 or fp32.")] = "auto",
    trust_remote_code: Annotated[bool, typer.Option(help="Run Python code that comes with the model.")] = False,
) -> None:
    """pass@k, majority votes and greedy accuracy on tasks with checkable answers, with intervals."""
    for name, value in (("n", n), ("slots", slots), ("limit", limit), ("bins", bins)):
        if value is not None and value < 1:
            raise UserError(f"must be at least 1, got {value}", where=f"--{name}")
    if on_bad_rows not in ("refuse", "drop"):
        raise UserError(f"there is no {on_bad_rows!r}", where="--on-bad-rows", remedy="Use refuse or drop.")
    if bins is not None and category is None:
        raise UserError("bins are made of a category of numbers", where="--bins", remedy="Name its column with --category.")
    if not reward:
        raise UserError(
            "it is not said who judges the answers", where="--reward", remedy="Use math, code, or a function: file.py:function."
        )
    if temperature <= 0:
        raise UserError(
            f"{n} samples at temperature {temperature:g} would all be the same",
            where="--temperature",
            remedy="The greedy pass is made anyway.",
        )
    from tether.answers import is_answers_file
    from tether.attempts import Folder, read_attempts, refuse_used
    from tether.engines.sampling import Sampling
    from tether.evaluate import by_task, judge
    from tether.evaluate import evaluate as evaluated
    from tether.tasks import load_tasks, make_reward

    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, stop=tuple(stop or ()))
    judged_by = make_reward(reward, gold)
    rules: Any = on_bad_rows
    tasks = load_tasks(data, judged_by, ask=ask, system=system, category=category, bins=bins, limit=limit, on_bad_rows=rules)
    asked = {"ask": ask, "system": system, "limit": limit, "tasks": tasks.fingerprint}
    target = out or _next(data)
    refuse_used(target)
    from_file = is_answers_file(model)
    if from_file:
        attempts, notices = read_attempts(model, tasks.rows)
        n = min(sum(not a.greedy for a in group) for group in by_task(attempts))
        ks = _ks(k, n)
        notices.insert(0, f"{len(attempts)} answers are read from {model}: nothing is sampled, and options of sampling play no part")
        folder = Folder(target, {"answers": model, **asked})
    else:
        ks = _ks(k, n)
        folder, attempts, notices = _sampled(
            model, tasks, sampling, target, asked, n=n, greedy=greedy, seed=seed, slots=slots, precision=precision,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
    try:
        judged = judge(tasks.rows, attempts, judged_by, say)
        result = evaluated(tasks.rows, judged, judged_by, ks, threshold=threshold, seed=seed)
    except BaseException:
        if not from_file:
            say(f"{len(attempts)} answers are kept in {folder.path}; judge them with: {_again(folder)}")
        raise
    notices = [*tasks.notices, *notices, *judged.notices, *_warnings(result, None if from_file else max_new_tokens, threshold)]
    told: dict[str, Any] = {
        "model": model,
        "data": tasks.files,
        "reward": reward,
        "gold": gold,
        "n": n,
        "k": list(ks),
        "threshold": threshold,
    }
    told |= {"seed": seed, "settings": folder.settings, "result": result.as_dict(), "reward_counts": judged.report, "notices": notices}
    folder.write(judged.attempts, tasks.rows)
    folder.finish(told | {"record": _record()})
    if as_json:
        typer.echo(json.dumps(told, indent=2, ensure_ascii=False))
    else:
        from rich.console import Console

        show(result, Console(soft_wrap=False), title=f"{model} on {data}, judged by {reward}", notices=notices)
    say(f"every sample with its reward: {folder.path / 'samples.jsonl'}; all figures: {folder.path / 'evaluation.json'}")
    if not result.measures or result.unscored == result.samples:
        raise UserError(f"the reward scored none of {result.samples} samples", where=f"reward {reward}", remedy="See the reasons above.")


def _sampled(
    model: str,
    tasks: Tasks,
    sampling: Any,
    out: Path,
    asked: dict[str, Any],
    *,
    n: int,
    greedy: bool,
    seed: int,
    slots: int,
    precision: str,
    trust_remote_code: bool,
) -> tuple[Folder, list[Attempt], list[str]]:
    """Answers of a model, each in the folder as soon as it ends."""
    from dataclasses import asdict

    from tether.answers import Speaker
    from tether.attempts import Folder, sample
    from tether.models import fingerprint

    speaker = Speaker(model, precision=precision, slots=slots, trust_remote_code=trust_remote_code)
    settings = {"model": model, "weights": fingerprint(speaker.sampler.model), **asked, "n": n, "greedy": greedy}
    folder = Folder(out, settings | {"sampling": asdict(sampling), "seed": seed, "precision": speaker.sampler.precision})
    made = folder.made(tasks.rows, speaker.codec, n, greedy)
    if made:
        say(f"{len(made)} answers are in {folder.path} already; going on with the other questions")

    def keep(attempt: Attempt) -> None:
        folder.add(attempt, tasks.rows[attempt.task])

    try:
        attempts = sample(speaker, tasks.rows, sampling, n=n, greedy=greedy, seed=seed, made=made, keep=keep)
    except KeyboardInterrupt:
        say(
            f"stopped: {folder.count()} of {len(tasks.rows) * (n + greedy)} answers are kept in {folder.path / 'samples.jsonl'}. Questions with all "
            f"their answers are not asked again by: {_again(folder)}"
        )
        raise
    notices = list(speaker.notices)
    if speaker.codec.has_template and any(isinstance(t.prompt, str) for t in tasks.rows):
        notices.append(
            "plain strings are continued as they are, without the model's chat template; --ask '{prompt}' puts them as a user's message"
        )
    return folder, attempts, notices


def _again(folder: Folder) -> str:
    """The same command line, with the folder named."""
    words = [*sys.argv[1:]]
    named = any(w == "--out" or w.startswith("--out=") for w in words)
    return shlex.join(["tether", *words, *([] if named else ["--out", str(folder.path)])])


def _next(data: str) -> Path:
    from tether.run import next_folder

    return next_folder("evaluate", Path(data).name.split(".")[0] or "tasks")


def _ks(k: str | None, n: int) -> tuple[int, ...]:
    if k is None:
        return tuple(x for x in KS if x <= n) or (1,)
    try:
        ks = tuple(sorted({int(word) for word in k.split(",")}))
    except ValueError:
        raise UserError(f"{k!r} is no list of whole numbers", where="--k", remedy="Write it as 1,4,8.") from None
    if ks[0] < 1 or ks[-1] > n:
        raise UserError(f"k must lie between 1 and the {n} samples, got {k}", where="--k", remedy="Draw more with --n.")
    return ks


def _record() -> dict[str, Any]:
    from tether.record import record

    return record()


# -- what is shown -----------------------------------------------------------------------------------------------------


def _warnings(result: Evaluation, max_new_tokens: int | None, threshold: float | None) -> list[str]:
    out = []
    found = {m.name: m for m in result.measures}
    for name, whose in (("cut", "samples"), ("greedy cut", "greedy answers")):
        if (cut := found.get(name)) is not None and cut.value.value > CUT_SHARE:
            limit = "the length limit" if max_new_tokens is None else f"{max_new_tokens} tokens"
            remedy = "" if max_new_tokens is None else ": raise --max-new-tokens"
            out.append(f"{cut.value.value:.0%} of the {whose} were cut at {limit} and seldom hold an answer{remedy}")
    if "reward" in found and threshold is None:
        out.append("the reward gives other values than 0 and 1: --threshold says from which on a sample passes, for pass@k")
    for m in result.measures:
        if m.name.startswith("maj@") and m.more["tied"] > 0:
            out.append(f"{m.name}: {m.more['tied']:.0%} of the votes are tied; answers that share first place count by equal chance")
        if m.left_out:
            out.append(f"{LABELS.get(m.name, m.name)}: {m.left_out} prompts have too few scored samples and are left out")
    if result.spread:
        s = result.spread
        out.append(f"{s['never']} prompts were never passed, {s['sometimes']} sometimes, {s['always']} always")
    return out


def show(result: Evaluation, console: Console, *, title: str, notices: list[str]) -> None:
    from rich.table import Table
    from rich.text import Text as RichText

    from tether.pass_rates import SHARE

    table = Table(title=RichText(title), title_justify="left")
    for column in ("", "", "95 % interval", "prompts"):
        table.add_column(column, justify="right" if table.columns else "left")
    for m in result.measures:
        value, interval = _told(m)
        table.add_row(LABELS.get(m.name, m.name), value, interval, str(m.value.n))
    console.print(table)
    if result.categories:
        _show_categories(result.categories, console)
    methods = {m.interval: "shares" if m.interval == SHARE else "lengths and rewards" for m in result.measures}
    for line in ["intervals: " + "; ".join(f"{what}: {how}" for how, what in methods.items()), *notices]:
        console.print(RichText(line))


def _show_categories(categories: dict[str, list[Measure]], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text as RichText

    every = list(dict.fromkeys(m.name for ms in categories.values() for m in ms))
    best, votes = [n for n in every if n.startswith(("pass@", "reward", "best@"))], [n for n in every if n.startswith("maj@")]
    names = list(dict.fromkeys([*best[:1], *best[-1:], *votes[-1:], *(n for n in ("greedy", "greedy reward", "cut") if n in every)]))
    table = Table(title="by category, with 95 % intervals (more in evaluation.json)", title_justify="left")
    for column in ("category", "prompts", *names):
        table.add_column(column, justify="left" if column == "category" else "right")
    for category, measures in categories.items():
        found = {m.name: m for m in measures}
        prompts = max(m.value.n + m.left_out for m in measures) if measures else 0
        cells = ["\n".join(_told(found[name])) if name in found else "-" for name in names]
        table.add_row(RichText(category), str(prompts), *cells)
    console.print(table)


def _told(m: Measure) -> tuple[str, str]:
    """A figure and its interval in words: shares as per cent, lengths with one digit, rewards with three."""
    from tether.pass_rates import SHARE

    form = ".1%" if m.interval == SHARE else ".1f" if m.name.endswith("length") else ".3f"
    value, low, high, _ = m.value
    interval = "-" if abs(low) == float("inf") else f"{low:{form}} to {high:{form}}"
    return f"{value:{form}}", interval
