"""A run directory as the parts of its page."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tether.report import curves, sampling
from tether.report.charts import Chart, Estimate, calibration_chart, interval_chart
from tether.report.findings import findings
from tether.report.numbers import number, percent, plural, seconds
from tether.report.view import Finding, Listing, RunView, Section, Table, is_number

NAMES = {
    "sft": "Supervised fine-tuning",
    "reward": "Reward model",
    "dpo": "Preference optimisation",
    "grpo": "Group-relative policy optimisation",
    "ppo": "Proximal policy optimisation",
}
LINES_SHOWN = 12  # of each kind of notice


@dataclass(frozen=True)
class Part:
    """One run's share of the page."""

    title: str
    facts: Sequence[tuple[str, str]]
    findings: Sequence[Finding]
    sections: Sequence[Section]


@dataclass(frozen=True)
class Page:
    title: str
    lead: str
    parts: Sequence[Part]
    brand: str = "Tether report"
    foot: str = "Made from the run directory; everything on this page is in its files. It can be made again with `tether report`."


def run_page(view: RunView) -> Page:
    part = run_part(view)
    return Page(part.title, f"The run in {view.folder}.", [part])


def run_part(view: RunView, title: str = "") -> Part:
    """`title`: what to call the run; by default its method."""
    sampled = view.command in sampling.COMMANDS
    made = [
        evaluation(view),
        sampling.learning(view) if sampled else curves.learning(view),
        curves.displacement(view),
        sampling.answers(view.folder) if sampled else None,
        samples_section(view.samples),
        curves.machinery(view),
        notices(view),
        settings(view),
    ]
    loss = view.settings.get("loss_type") or view.settings.get("preset")
    method = NAMES.get(view.command, view.command) + (f" ({loss})" if loss else "")
    return Part(title or method, facts(view), findings(view), [s for s in made if s is not None])


def facts(view: RunView) -> list[tuple[str, str]]:
    """What, when, on which machine: only what the run recorded."""
    record, summary = view.record, view.summary or {}
    rows = next(((summary[k], k) for k in ("pairs", "prompts", "rows") if is_number(summary.get(k))), None)
    machine = record.get("machine") or {}
    data = view.settings.get("data")
    version = " ".join(str(x) for x in (record.get("version"), f"({str(record['commit'])[:9]})" if record.get("commit") else None) if x)
    said = [
        ("Command", f"tether {view.command}"),
        ("Model", str(view.settings.get("model") or "–")),
        ("Data", ", ".join(data) if isinstance(data, list) else str(data or "–")),
        ("Rewards", ", ".join(str(r.get("reward", r)) if isinstance(r, dict) else str(r) for r in view.settings.get("rewards") or [])),
        ("Trained on", plural(int(rows[0]), rows[1].removesuffix("s")) if rows else ""),
        ("Steps", number(view.metrics[-1]["step"]) if view.metrics else "none yet"),
        ("Time", seconds(summary["seconds"]) if is_number(summary.get("seconds")) else ""),
        ("Precision", str(record.get("precision") or view.settings.get("precision") or "")),
        ("Started", _when(record.get("started"))),
        ("Machine", ", ".join(_machine(machine))),
        ("Version", f"tether {version}" if version else ""),
        ("Seed", str(view.settings.get("seed", ""))),
    ]
    return [(name, value) for name, value in said if value]


def _machine(machine: Mapping[str, Any]) -> list[str]:
    system = str(machine.get("system") or "").partition("-")[0]
    parts = [" ".join(x for x in (system, str(machine.get("processor") or "")) if x)] if system else []
    if machine.get("cores"):
        parts.append(plural(int(machine["cores"]), "core"))
    if machine.get("memory_gib"):
        parts.append(f"{number(machine['memory_gib'])} GiB")
    return parts


def _when(text: Any) -> str:
    try:
        return datetime.fromisoformat(str(text)).strftime("%d %B %Y, %H:%M UTC").lstrip("0")
    except ValueError:
        return ""


def evaluation(view: RunView) -> Section | None:
    """What a reward model does on comparisons it has not seen."""
    charts: list[Chart] = []
    accuracy, bins = view.held_out.get("accuracy"), view.held_out.get("calibration")
    if isinstance(accuracy, dict):
        row = Estimate("reward model", accuracy["value"], accuracy["low"], accuracy["high"])
        caption = f"{percent(accuracy['value'])} of {accuracy['n']} held-out comparisons; the bar is the 95 % interval."
        charts.append(
            interval_chart(
                [row],
                title="Agreement with the people",
                x_label="share of comparisons",
                caption=caption,
                mark=0.5,
                mark_label="guessing",
                limits=(0.0, 1.0),
            )
        )
    if isinstance(bins, list) and bins:
        charts.append(calibration_chart(bins, title="Calibration", caption="Below the diagonal the model is too sure of itself."))
    rest = [[label, number(view.held_out[key])] for key, label in EVALUATED.items() if is_number(view.held_out.get(key))]
    tables = [Table(["on held-out rows", "value"], rest, numeric=frozenset({1}))] if rest else []
    return Section("On rows it has not seen", charts=charts, tables=tables) if charts or tables else None


EVALUATED = {
    "length_correlation": "correlation of score and length",
    "prefers_longer": "share of pairs in which it prefers the longer answer",
    "mean_margin": "mean margin",
    "eval_reward": "reward, sampled as in training",
    "eval_greedy_reward": "reward of the greedy answers",
    "eval_completions/clipped_ratio": "share of sampled answers that were cut off",
    "eval_loss": "loss",
    "eval_perplexity": "perplexity",
    "eval_mean_token_accuracy": "token accuracy",
    "eval_rewards/accuracies": "pairs ordered right",
    "eval_rewards/margins": "margin (beta x nats)",
    "eval_displacement/chosen": "change of the chosen answers (nats)",
    "eval_displacement/rejected": "change of the rejected answers (nats)",
}
ACTIONS = {"drop": "left out", "reject": "left out as unusable", "truncate": "cut at max_length", "warn": "kept with a warning"}


def notices(view: RunView) -> Section | None:
    """What was warned about, dropped or cut, by kind, with the first lines of each."""
    by_kind: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in view.notices:
        by_kind[str(row.get("kind", "notice")), str(row.get("action", ""))].append(str(row.get("text", "")))
    if not by_kind:
        return None
    listings = []
    for (kind, action), lines in by_kind.items():
        words = kind.replace("_", " ")
        title = f"{words}: {plural(len(lines), 'row')} {ACTIONS[action]}" if action in ACTIONS else words
        listings.append(Listing(title, lines[:LINES_SHOWN], len(lines)))
    return Section("Notices", listings=listings)


def settings(view: RunView) -> Section | None:
    rows = [[key, _shown(value)] for key, value in _flat(view.settings)]
    versions = [[name, str(version)] for name, version in (view.record.get("packages") or {}).items()]
    tables = [Table(["setting", "value"], rows, "The whole recipe", folded=True)] if rows else []
    if versions:
        tables.append(Table(["package", "version"], versions, "Packages", folded=True))
    return Section("Recipe", tables=tables) if tables else None


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for key, value in values.items():
        out += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [(f"{prefix}{key}", value)]
    return out


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def samples_section(
    samples: Sequence[Mapping[str, Any]],
    most: int = 8,
    *,
    title: str = "Answers before and after",
    sides: Sequence[str] = ("before", "after"),
) -> Section | None:
    """Rows of samples.jsonl, {"prompt", "before": {"text", "numbers"}, "after": ...}: the answers of `sides`, the last of which is always there."""
    shown = [s for s in samples if isinstance(s.get(sides[-1]), dict)][:most]
    if not shown:
        return None
    more = f"The first {len(shown)} of {len(samples)}; all of them are in samples.jsonl." if len(samples) > len(shown) else ""
    kept = [{key: value for key, value in s.items() if key == "prompt" or key in sides} for s in shown]
    return Section(title, [more] if more else [], samples=kept)
