"""`Preference`: of two answers to one prompt, the better one. From pairs, votes, verdicts and rankings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from tether import rankings
from tether.files import Loaded, Problem, Source
from tether.messages import BadRow, Message, Text, assistant, has_assistant, is_blank, plain, shared_text, shared_turns, split_dialogue
from tether.rankings import Ranking
from tether.shapes import PROMPT, Fields, Shape, comparable, contradictions, load_rows, nearly, same_form

__all__ = ["Preference", "Ranking", "load", "load_comparisons", "pairs"]


@dataclass(frozen=True)
class Preference:
    prompt: Text
    chosen: Text
    rejected: Text
    margin: float | None
    source: Source
    extra: dict[str, Any]


def load(path: str | list[str]) -> Loaded[Preference]:
    """Comparisons in any shape of docs/data.md; a ranking gives every pair of answers with different ranks.

    Dropped and counted: an empty chosen answer, identical answers, ties. Warned of: answers that differ in blanks only, an empty
    rejected answer, scores that contradict the order, rows that contradict each other.
    """
    return load_rows(path, SHAPES, "comparisons", _check_all)


def load_comparisons(path: str | list[str]) -> Loaded[Ranking]:
    """Pairs and rankings alike, one row per prompt as it stands in the file: a pair is a ranking of two.

    Dropped, counted and warned of as in `load`.
    """

    def check(rows: list[Ranking], problems: list[Problem]) -> None:
        _check_all([pair for row in rows for pair in pairs(row)], problems)

    return load_rows(path, [*map(_as_ranking, PAIRS), *rankings.SHAPES], "comparisons", check)


def _as_ranking(shape: Shape[Preference]) -> Shape[Ranking]:
    def read(fields: Fields, *names: str) -> list[Ranking]:
        return [
            Ranking(p.prompt, [p.chosen, p.rejected], [1, 2], p.source, p.extra if p.margin is None else {**p.extra, "margin": p.margin})
            for p in shape.read(fields, *names)
        ]

    return Shape(shape.name, shape.needs, read, shape.also)


def pairs(ranking: Ranking) -> list[Preference]:
    """Every pair with different ranks, better answer first. Ties write no pair.

    >>> r = Ranking("q", ["a", "b", "c"], [2, 1, 2], Source("x", 1), {})
    >>> [(p.chosen, p.rejected) for p in pairs(r)]
    [('b', 'a'), ('b', 'c')]
    """
    out = []
    order = sorted(range(len(ranking.answers)), key=lambda i: ranking.ranks[i])
    for i, j in combinations(order, 2):
        if ranking.ranks[i] != ranking.ranks[j] and ranking.answers[i] != ranking.answers[j]:
            extra = {**ranking.extra, "rank_chosen": ranking.ranks[i], "rank_rejected": ranking.ranks[j]}
            out.append(Preference(ranking.prompt, ranking.answers[i], ranking.answers[j], None, ranking.source, extra))
    return out


def _check_all(rows: list[Preference], problems: list[Problem]) -> None:
    def key(row: Preference) -> tuple[Any, Any]:
        one, other = comparable(row.chosen), comparable(row.rejected)
        return (comparable(row.prompt), *sorted((one, other))), one < other

    contradictions(rows, key, "the order of these two answers", problems)


# -- checks of one pair ----------------------------------------------------------------------------------------------


def _checked(fields: Fields, prompt: Text, chosen: Text, rejected: Text, names: tuple[str, str]) -> list[Preference]:
    if chosen == rejected:
        raise BadRow("identical", "both answers are the same: no preference", "Remove the row.", field=names[0], action="drop")
    if is_blank(chosen):
        raise BadRow("empty", "the better answer is empty: nothing to learn but to stop", "Fill it in.", field=names[0], action="drop")
    if is_blank(rejected):
        fields.warn("empty_rejected", "the worse answer is empty: it is kept, and its end mark is what is unlearnt", "Fine.", names[1])
    elif plain(chosen).split() == plain(rejected).split():
        fields.warn("identical_but_blanks", "the answers differ in blanks only", "Remove the row unless blanks are the point.", names[0])
    margin = fields.number("margin")
    _check_scores(fields)
    return [Preference(prompt, chosen, rejected, margin, fields.source, fields.rest())]


SCORE_NAME = re.compile(r"(?:(?P<a>score|rating|reward)s?_(?:chosen|rejected)|(?:chosen|rejected)_(?P<b>score|rating|reward)s?)$")


def _check_scores(fields: Fields) -> None:
    """Scores that come along must agree with the order: higher for chosen."""
    for name in fields.row.data:
        if "chosen" not in name or not SCORE_NAME.match(name):
            continue
        other = name.replace("chosen", "rejected")
        better, worse = fields.row.data.get(name), fields.row.data.get(other)
        if fields.row.textual:
            better, worse = _float(better), _float(worse)
        if isinstance(better, (int, float)) and isinstance(worse, (int, float)):
            if better < worse:
                words = f"{name} {better} is below {other} {worse}: the order looks swapped"
                fields.warn("scores_contradict", words, "Check which answer is the better one.", name)
            elif better == worse:
                fields.warn("scores_tie", f"{name} and {other} are both {better}: a tie", "Remove the row if neither is better.", name)


def _float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


# -- shapes ----------------------------------------------------------------------------------------------------------


def _explicit(fields: Fields, prompt_name: str, chosen_name: str, rejected_name: str) -> list[Preference]:
    prompt = fields.prompt(prompt_name)
    chosen, rejected = fields.text(chosen_name), fields.text(rejected_name)
    if isinstance(chosen, list) and isinstance(rejected, list):
        n = _repeats_prompt(prompt, chosen, rejected)
        if n:
            # Some data sets give the prompt again at the start of both answers.
            return _implicit_messages(fields, chosen, rejected, (chosen_name, rejected_name))
    prompt, (chosen, rejected) = same_form(fields, prompt_name, prompt, chosen, rejected)
    _start_with_an_answer(chosen, rejected)
    return _checked(fields, prompt, chosen, rejected, (chosen_name, rejected_name))


def _repeats_prompt(prompt: Text, chosen: list[Message], rejected: list[Message]) -> int:
    n = shared_turns(chosen, rejected)
    asked = [m["content"] for m in chosen[:n] if m["role"] == "user"]
    wanted = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt if m["role"] == "user"]
    return n if asked and wanted and asked[0] == wanted[0] else 0


def _start_with_an_answer(*answers: Text) -> None:
    for answer in answers:
        if not isinstance(answer, str) and answer[0]["role"] != "assistant":
            words = f"the answers part before a turn of {answer[0]['role']!r}: they answer different prompts"
            raise BadRow("different_prompts", words, "Both answers must follow the same prompt.", action="drop")


def _implicit(fields: Fields, chosen_name: str, rejected_name: str) -> list[Preference]:
    """The prompt is what both conversations share."""
    names = (chosen_name, rejected_name)
    chosen, rejected = fields.text(chosen_name), fields.text(rejected_name)
    if isinstance(chosen, str) and isinstance(rejected, str):
        n = shared_text(chosen, rejected)
        return _checked(fields, *((chosen[:n], chosen[n:], rejected[n:]) if chosen != rejected else ("", chosen, rejected)), names)
    if isinstance(chosen, str) or isinstance(rejected, str):
        words = "one answer is messages and the other plain text, without a prompt"
        raise BadRow("mixed_forms", words, "Write both as messages.", field=chosen_name)
    return _implicit_messages(fields, chosen, rejected, names)


def _implicit_messages(fields: Fields, chosen: list[Message], rejected: list[Message], names: tuple[str, str]) -> list[Preference]:
    if chosen == rejected:
        raise BadRow("identical", "both answers are the same: no preference", "Remove the row.", field=names[0], action="drop")
    n = shared_turns(chosen, rejected)
    if n == len(chosen) or n == len(rejected):
        n = min(len(chosen), len(rejected)) - 1  # one goes on where the other stops: they part at the last turn of the shorter
    if not (has_assistant(chosen[n:]) and has_assistant(rejected[n:])):
        raise BadRow("no_answer", "one side has no assistant turn of its own", "Add the answer.", field=names[0], action="drop")
    _start_with_an_answer(chosen[n:], rejected[n:])
    return _checked(fields, chosen[:n], chosen[n:], rejected[n:], names)


def _dialogues(fields: Fields, chosen_name: str, rejected_name: str) -> list[Preference]:
    chosen, rejected = split_dialogue(fields.string(chosen_name)), split_dialogue(fields.string(rejected_name))
    fields.form = "conversational"
    if chosen is None or rejected is None:
        raise BadRow("not_a_dialogue", "one answer has Human and Assistant turns, the other has not", "Write both so.", field=rejected_name)
    return _implicit_messages(fields, chosen, rejected, (chosen_name, rejected_name))


def _both_dialogues(data: Any) -> bool:
    return isinstance(data["chosen"], str) and isinstance(data["rejected"], str) and split_dialogue(data["chosen"]) is not None


def _no_hidden_prompt(data: Any) -> bool:
    """A column `Prompt` or `promt` is a misspelling, not a row without a prompt."""
    return nearly(PROMPT, data) is None


def _sharegpt(fields: Fields, turns_name: str, chosen_name: str, rejected_name: str) -> list[Preference]:
    prompt = [*fields.system_turn(), *fields.messages(turns_name)]
    chosen, rejected = (assistant(a) if isinstance(a, str) else a for a in (fields.text(chosen_name), fields.text(rejected_name)))
    _start_with_an_answer(chosen, rejected)
    return _checked(fields, prompt, chosen, rejected, (chosen_name, rejected_name))


def _verdict(fields: Fields, prompt_name: str, one: str, other: str, verdict_name: str) -> list[Preference]:
    """Two outputs, and which is better: one column of verdicts, or votes (annotator1, annotator2, ...) decided by more than half."""
    if verdict_name.startswith("annotator"):
        names = [n for n in fields.row.data if re.fullmatch(r"annotator_?\d+", n)]
        votes = [which(fields.row.data[n], n, zero_is_tie=True) for n in names]
        better = next((v for v in (1, 2) if votes.count(v) * 2 > len(votes)), 0)
        words = f"no answer has more than half of the votes {votes}"
    else:
        better, words = which(fields.row.data[verdict_name], verdict_name), "a tie: neither is better"
    if better == 0:
        raise BadRow("tie", words, "Ties write no pair.", field=verdict_name, action="drop")
    prompt = fields.prompt(prompt_name)
    prompt, (first, second) = same_form(fields, prompt_name, prompt, fields.text(one), fields.text(other))
    _start_with_an_answer(first, second)
    chosen, rejected, order = (first, second, (one, other)) if better == 1 else (second, first, (other, one))
    return _checked(fields, prompt, chosen, rejected, order)


WORDS = {"1": 1, "2": 2, "a": 1, "b": 2, "first": 1, "second": 2, "model_a": 1, "model_b": 2, "output_1": 1, "output_2": 2}


def which(value: Any, name: str, *, zero_is_tie: bool = False) -> int:
    """1 or 2 for the better side, 0 for a tie. Numbers lie between 1 (first) and 2 (second), 1.5 being a tie."""
    if isinstance(value, str):
        word = value.strip().lower()
        if word in WORDS:
            return WORDS[word]
        if word.startswith("tie") or word in ("both", "neither", "equal"):
            return 0
        if match := re.match(r"([ab])-is-", word):
            return WORDS[match.group(1)]
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if value == 0 and zero_is_tie:
            return 0
        if 1 <= value <= 2:
            return 0 if value == 1.5 else 1 if value < 1.5 else 2
    raise BadRow("bad_verdict", f"the verdict {value!r} is not clear", "Use 1 or 2, a or b, or tie.", field=name)


def _from_ranking(shape: Shape[Ranking]) -> Shape[Preference]:
    def read(fields: Fields, *names: str) -> list[Preference]:
        made = [p for ranking in shape.read(fields, *names) for p in pairs(ranking)]
        kept = [p for p in made if not is_blank(p.chosen)]
        if len(kept) < len(made):
            fields.warn("empty_pair", f"{len(made) - len(kept)} pairs have an empty better answer and are left out", "Fill it in.")
        if not kept:
            raise BadRow("tie", "no pair of different answers with different ranks", "Nothing to do.", action="drop")
        return kept

    return Shape(f"{shape.name} (all pairs)", shape.needs, read, shape.also)


BETTER, WORSE = ("chosen",), ("rejected",)
SIDES = [
    ("output_1", "output_2"),
    ("response1", "response2"),
    ("response_1", "response_2"),
    ("completion_a", "completion_b"),
    ("response_a", "response_b"),
    ("output_a", "output_b"),
    ("answer_a", "answer_b"),
]
VERDICTS = {"votes": ("annotator1", "annotator_1"), "verdict": ("preference", "winner", "label")}

PAIRS: list[Shape[Preference]] = [
    Shape("preference, ShareGPT", (("conversations",), BETTER, WORSE), _sharegpt),
    Shape("preference, explicit prompt", (PROMPT, BETTER, WORSE), _explicit),
    Shape("preference, Human/Assistant dialogues", (BETTER, WORSE), _dialogues, _both_dialogues),
    Shape("preference, implicit prompt", (BETTER, WORSE), _implicit, _no_hidden_prompt),
    *(
        Shape(f"two answers with {'votes (PandaLM)' if kind == 'votes' else 'a verdict'}", (PROMPT, (a,), (b,), names), _verdict)
        for a, b in SIDES
        for kind, names in VERDICTS.items()
    ),
]
SHAPES: list[Shape[Preference]] = [*PAIRS, *map(_from_ranking, rankings.SHAPES)]
