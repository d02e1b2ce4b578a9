"""How far the votes of a desk can be trusted: agreement, self-consistency, favoured sides, hasty votes, and what they say of the models.

Everything is counted in pairs of answers: a vote on two answers is one pair, a ranking of k answers k (k - 1) / 2. Repeats measure
self-consistency alone; skips are no opinion. Intervals are over prompts, which are what is independent.

Which of two answers is stored first means nothing, though files often hold the better one there. So for agreement by chance each pair
counts both ways round, as it is and with first and second exchanged: else people who all see the better answer would seem to agree
because "first" is what everybody says, and the coefficients would depend on the order in a file.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tether import stats
from tether.agreement import (
    Agreement,
    Position,
    Speed,
    cohen_kappa,
    fleiss_kappa,
    krippendorff_alpha,
    percent,
    position_bias,
    speed_outliers,
)
from tether.bradley_terry import BradleyTerry, bradley_terry
from tether.collect.ballots import Vote
from tether.collect.items import Item
from tether.messages import plain

Place = tuple[str, int, int]  # item, and the places of two of its answers
SHARE = {"first": 1.0, "tie": 0.5, "bad": 0.5, "second": 0.0}  # of a win for the first answer: both bad prefers neither
SCALE = ("second", "tie", "first")
EXCHANGED = {"first": "second", "second": "first"}
FEWEST_SHARED = 10  # items that two annotators both judged, below which their kappa is noise


@dataclass(frozen=True)
class Person:
    """One annotator. `agreement`: share of the others' verdicts on the same pairs that are the same; `consistent`: of own repeats."""

    name: str
    votes: int
    skips: int
    ties: int
    bad: int
    agreement: stats.Interval | None
    consistent: stats.Interval | None
    position: Position
    speed: Speed
    hasty_votes: tuple[int, ...]  # ids of votes that were unread or hasty


@dataclass(frozen=True)
class Quality:
    """A desk's votes in figures. `pairs_rated_twice` rests on pairs of answers with two opinions or more."""

    items: int
    voted_items: int
    votes: int
    repeats: int
    outcomes: dict[str, int]
    people: tuple[Person, ...]
    percent: Agreement
    alpha: Agreement  # nominal: first, second, tie, both bad
    ordinal_alpha: Agreement  # second < tie < first; both bad counts as a tie
    fleiss: Agreement
    cohen: dict[tuple[str, str], Agreement]
    consistent: stats.Interval | None
    position: Position
    models: BradleyTerry | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what is not known is null, with the reason beside it."""
        plain_fields = ("items", "voted_items", "votes", "repeats", "outcomes")
        coefficients = {name: asdict(getattr(self, name)) for name in ("percent", "alpha", "ordinal_alpha", "fleiss")}
        return {
            **{name: getattr(self, name) for name in plain_fields},
            "agreement": {**coefficients, "cohen": [{"annotators": list(pair), **asdict(a)} for pair, a in self.cohen.items()]},
            "self_consistency": interval_as_dict(self.consistent),
            "position": asdict(self.position),
            "annotators": [_person_as_dict(p) for p in self.people],
            "models": None if self.models is None else [asdict(s) for s in self.models.strengths],
        }


def assess(items: Mapping[str, Item], votes: Sequence[Vote], *, seed: int = 0) -> Quality:
    """All figures of a desk's votes; undone votes are left out. `seed` decides the bootstraps."""
    live = [v for v in votes if not v.undone]
    opinions = [v for v in live if v.counts]
    rated = rated_pairs(items, opinions)
    ratings, prompts = [list(by.values()) for by in rated.values()], [prompt_key(items[p[0]]) for p in rated]
    both, groups = both_ways(ratings), prompts * 2
    sides = [first for v in live if (first := chose_first(v)) is not None]
    again = repeated(items, live)
    return Quality(
        items=len(items),
        voted_items=len({v.item for v in opinions}),
        votes=len(live),
        repeats=sum(v.repeat for v in live),
        outcomes=dict(Counter(v.outcome for v in live)),
        people=tuple(_person(name, items, live, rated, again) for name in sorted({v.annotator for v in live})),
        percent=percent(ratings, groups=prompts),
        alpha=_once(krippendorff_alpha(both, groups=groups, seed=seed)),
        ordinal_alpha=_once(krippendorff_alpha([list(map(on_scale, r)) for r in both], "ordinal", order=SCALE, groups=groups, seed=seed)),
        fleiss=_fleiss(ratings, prompts, seed),
        cohen=_cohen(rated, items, seed),
        consistent=_share([(key, same) for by in again.values() for key, same in by]),
        position=position_bias(sum(sides), len(sides)),
        models=strengths(items, opinions),
    )


# -- votes as pairs of answers -------------------------------------------------------------------------------------------


def pair_outcomes(vote: Vote, n_answers: int) -> dict[tuple[int, int], str]:
    """What a vote says about each two answers: first, second, tie or bad. Pairs with an answer that was left unranked are not there.

    A skip says nothing.
    """
    pairs = list(itertools.combinations(range(n_answers), 2))
    if vote.outcome == "skip":
        return {}
    if vote.outcome != "ranking":
        return dict.fromkeys(pairs, str(vote.outcome))
    ranks = vote.ranks or ()
    found = {}
    for i, j in pairs:
        a, b = ranks[i], ranks[j]
        if a is not None and b is not None:
            found[i, j] = "tie" if a == b else "first" if a < b else "second"
    return found


def rated_pairs(items: Mapping[str, Item], opinions: Sequence[Vote]) -> dict[Place, dict[str, str]]:
    """Every pair of answers that somebody judged: annotator -> outcome."""
    found: defaultdict[Place, dict[str, str]] = defaultdict(dict)
    for vote in opinions:
        for (i, j), outcome in pair_outcomes(vote, len(items[vote.item].answers)).items():
            found[vote.item, i, j][vote.annotator] = outcome
    return dict(found)


def on_scale(outcome: str) -> str:
    return "tie" if outcome == "bad" else outcome


def both_ways(ratings: Sequence[Sequence[str]]) -> list[list[str]]:
    """The ratings, and after them all of them again with first and second exchanged."""
    return [list(r) for r in ratings] + [[EXCHANGED.get(v, v) for v in r] for r in ratings]


def _once(a: Agreement) -> Agreement:
    """What came of `both_ways`, with each pair counted once."""
    return replace(a, items=a.items // 2, ratings=a.ratings // 2)


def prompt_key(item: Item) -> str:
    return plain(item.prompt).strip()


def chose_first(vote: Vote) -> bool | None:
    """Whether the answer that was shown first won over the one shown last. None where neither did, or where the order is not known."""
    if len(vote.order) < 2:
        return None
    first, last = vote.order[0], vote.order[-1]
    if vote.outcome == "ranking":
        a, b = (vote.ranks or ())[first], (vote.ranks or ())[last]
        return None if a is None or b is None or a == b else a < b
    return {"first": first == 0, "second": first == 1}.get(vote.outcome)


def repeated(items: Mapping[str, Item], live: Sequence[Vote]) -> dict[str, list[tuple[str, float]]]:
    """For each annotator the items judged twice: (prompt, share of pairs on which both verdicts are the same)."""
    first = {(v.annotator, v.item): v for v in live if v.counts}
    found: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
    for vote in live:
        before = first.get((vote.annotator, vote.item))
        if not vote.repeat or vote.outcome == "skip" or before is None:
            continue
        item = items[vote.item]
        one, other = pair_outcomes(before, len(item.answers)), pair_outcomes(vote, len(item.answers))
        if both := one.keys() & other.keys():
            found[vote.annotator].append((prompt_key(item), sum(one[p] == other[p] for p in both) / len(both)))
    return dict(found)


# -- figures -------------------------------------------------------------------------------------------------------------


def strengths(items: Mapping[str, Item], opinions: Sequence[Vote]) -> BradleyTerry | None:
    """Models by the answers they gave; None where fewer than two are named. Ties and both bad are half a win each.

    Two models on one prompt are one comparison, however many people voted on it: its votes are averaged.
    """
    met: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)  # prompt, two models in order -> wins of the first
    for (item_id, i, j), by in rated_pairs(items, opinions).items():
        item = items[item_id]
        a, b = item.answers[i].model, item.answers[j].model
        if a is None or b is None or a == b:
            continue
        shares = [SHARE[outcome] for outcome in by.values()]
        met[prompt_key(item), min(a, b), max(a, b)] += shares if a < b else [1 - s for s in shares]
    names = sorted({m for _, a, b in met for m in (a, b)})
    if len(names) < 2:
        return None
    place = {name: i for i, name in enumerate(names)}
    wins = np.zeros((len(names), len(names)))
    for (_, a, b), shares in met.items():
        wins[place[a], place[b]] += sum(shares) / len(shares)
        wins[place[b], place[a]] += 1 - sum(shares) / len(shares)
    return bradley_terry(wins, names)


def _person(
    name: str, items: Mapping[str, Item], live: Sequence[Vote], rated: Mapping[Place, Mapping[str, str]], again: Mapping[str, Any]
) -> Person:
    own = [v for v in live if v.annotator == name]
    timed = [v for v in own if v.seconds is not None and v.outcome != "skip" and not v.repeat]
    words = [sum(len(a.text.split()) for a in items[v.item].answers) for v in timed]
    speed = speed_outliers([v.seconds or 0.0 for v in timed], words)
    with_others = []
    for place, by in rated.items():
        if name in by and len(by) > 1:
            equal = sum(outcome == by[name] for outcome in by.values()) - 1
            with_others.append((prompt_key(items[place[0]]), equal / (len(by) - 1)))
    sides = [first for v in own if (first := chose_first(v)) is not None]
    outcomes = Counter(v.outcome for v in own)
    return Person(
        name=name,
        votes=len(own),
        skips=outcomes["skip"],
        ties=outcomes["tie"],
        bad=outcomes["bad"],
        agreement=_share(with_others),
        consistent=_share(again.get(name, [])),
        position=position_bias(sum(sides), len(sides)),
        speed=speed,
        hasty_votes=tuple(timed[i].id for i in sorted({*speed.unread, *speed.hasty})),
    )


def _share(values: Sequence[tuple[str, float]]) -> stats.Interval | None:
    """Mean of shares with their interval over prompts; None where there are none."""
    return stats.share_interval([v for _, v in values], prompts=[p for p, _ in values]) if values else None


def _fleiss(ratings: Sequence[Sequence[str]], prompts: Sequence[str], seed: int) -> Agreement:
    """Over the pairs that were rated as often as most are: Fleiss' kappa needs equal numbers, and `items` says how many these are."""
    sizes = Counter(len(r) for r in ratings if len(r) > 1)
    if not sizes:
        return fleiss_kappa(ratings)
    usual = max(sizes, key=lambda size: (sizes[size], size))
    kept = [i for i, r in enumerate(ratings) if len(r) == usual]
    return _once(fleiss_kappa(both_ways([ratings[i] for i in kept]), groups=[prompts[i] for i in kept] * 2, seed=seed))


def _cohen(rated: Mapping[Place, Mapping[str, str]], items: Mapping[str, Item], seed: int) -> dict[tuple[str, str], Agreement]:
    """Of every two annotators with enough pairs in common."""
    shared: defaultdict[tuple[str, str], list[Place]] = defaultdict(list)
    for place, by in rated.items():
        for two in itertools.combinations(sorted(by), 2):
            shared[two[0], two[1]].append(place)
    found = {}
    for (a, b), places in sorted(shared.items()):
        if len(places) >= FEWEST_SHARED:
            groups = [prompt_key(items[p[0]]) for p in places] * 2
            both = both_ways([[rated[p][a], rated[p][b]] for p in places])
            found[a, b] = _once(cohen_kappa([x for x, _ in both], [y for _, y in both], groups=groups, seed=seed))
    return found


def interval_as_dict(x: stats.Interval | None) -> dict[str, Any] | None:
    """For JSON: an end that is infinite is null."""
    if x is None:
        return None
    low, high = (None if math.isinf(v) else v for v in (x.low, x.high))
    return {"value": x.value, "low": low, "high": high, "n": x.n}


def _person_as_dict(p: Person) -> dict[str, Any]:
    return {
        "name": p.name,
        "votes": p.votes,
        "skips": p.skips,
        "ties": p.ties,
        "bad": p.bad,
        "agreement": interval_as_dict(p.agreement),
        "self_consistency": interval_as_dict(p.consistent),
        "position": asdict(p.position),
        "median_seconds": p.speed.median_s,
        "unread": len(p.speed.unread),
        "hasty": len(p.speed.hasty),
        "slow": len(p.speed.slow),
        "hasty_votes": list(p.hasty_votes),
    }
