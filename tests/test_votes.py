"""Majority votes and rates over prompts, against lists of every choice of samples."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tether import stats
from tether.pass_rates import Tried, binned, by_category, is_pass_or_fail, measure, spread
from tether.votes import Vote, majority_at_k


def by_listing(votes: list[int], right: list[bool], k: int, silent: int) -> Vote:
    """Every choice of k samples, one after another."""
    samples = [i for i, v in enumerate(votes) for _ in range(v)] + [None] * silent
    scores, ties, empties, total = 0.0, 0, 0, 0
    for chosen in itertools.combinations(samples, k):
        total += 1
        counts = Counter(a for a in chosen if a is not None)
        if not counts:
            empties += 1
            continue
        winners = [a for a, c in counts.items() if c == max(counts.values())]
        ties += len(winners) > 1
        scores += sum(right[a] for a in winners) / len(winners)
    return Vote(scores / total, ties / total, empties / total)


@given(votes=st.lists(st.integers(0, 4), max_size=4).filter(lambda v: sum(v) <= 9), silent=st.integers(0, 3), data=st.data())
@settings(max_examples=80, deadline=None)
def test_majority_is_the_mean_over_every_choice_of_samples(votes: list[int], silent: int, data: st.DataObject) -> None:
    n = sum(votes) + silent
    if n == 0:
        return
    right = data.draw(st.lists(st.booleans(), min_size=len(votes), max_size=len(votes)))
    k = data.draw(st.integers(1, n))
    assert majority_at_k(votes, right, k, silent=silent) == pytest.approx(by_listing(votes, right, k, silent))


def test_a_vote_of_one_is_a_sample() -> None:
    """maj@1 = pass@1 when the right answers are one answer: 3 of 8."""
    assert majority_at_k([3, 4, 1], [True, False, False], 1).right == pytest.approx(stats.pass_at_k(8, 3, 1))


def test_ties_are_split_and_silence_has_no_vote() -> None:
    assert majority_at_k([2, 2, 1], [True, False, False], 5) == Vote(0.5, 1.0, 0.0)
    assert majority_at_k([1], [True], 3, silent=2) == Vote(1.0, 0.0, 0.0)
    assert majority_at_k([], [], 2, silent=2) == Vote(0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="k <= 2"):
        majority_at_k([2], [True], 3)


def test_many_samples_stay_exact_and_quick() -> None:
    """64 different answers, one right: whoever wins is one of k, each with equal chance."""
    assert majority_at_k([1] * 64, [True] + [False] * 63, 32).right == pytest.approx(1 / 64)
    assert math.isclose(majority_at_k([40, 24], [True, False], 63).right, 1.0)


def test_rates_by_hand() -> None:
    """Two prompts of four samples, 1 and 4 right. pass@1 (1/4 + 1)/2; pass@2 (1 - C(3,2)/C(4,2) + 1)/2 = (1/2 + 1)/2."""
    tried = [
        Tried([1, 0, 0, 0], lengths=[2, 4, 4, 2], cut=[False, True, True, False], votes=[1, 3], right=[True, False], greedy=1.0),
        Tried([1, 1, 1, 1], lengths=[5, 5, 5, 5], cut=[False] * 4, votes=[4], right=[True], greedy=0.0),
    ]
    found = {m.name: m for m in measure(tried, [1, 2, 4])}
    wanted = {
        "pass@1": 0.625,
        "pass@2": 0.75,
        "pass@4": 1.0,
        "maj@2": (0.25 + 1) / 2,
        "maj@4": 0.5,
        "greedy": 0.5,
        "cut": 0.25,
        "length": 4.0,
    }
    assert {name: found[name].value.value for name in wanted} == pytest.approx(wanted)
    assert found["maj@2"].more["tied"] == pytest.approx(0.25)  # of the first prompt's 6 pairs 3 are split, of the second's none
    assert spread(tried) == {"never": 0, "sometimes": 1, "always": 1}


def test_unscored_samples_are_in_no_rate_and_too_few_leave_a_prompt_out() -> None:
    found = {m.name: m for m in measure([Tried([1.0, 0.0, 0.0]), Tried([1.0])], [1, 3])}
    assert found["pass@1"].value.value == pytest.approx((1 / 3 + 1) / 2)
    assert (found["pass@3"].value.value, found["pass@3"].value.n, found["pass@3"].left_out) == (1.0, 1, 1)
    assert "greedy" not in found
    assert measure([Tried([])], [1]) == []


def test_other_rewards_are_means_until_a_threshold_says_what_passes() -> None:
    tried = [Tried([0.25, 0.75]), Tried([0.5, 0.5])]
    assert not is_pass_or_fail(tried)
    means = {m.name: m.value.value for m in measure(tried, [1, 2])}
    assert means == pytest.approx({"reward": 0.5, "best@2": 0.625})
    passes = {m.name: m.value.value for m in measure(tried, [1, 2], threshold=0.6)}
    assert passes == pytest.approx({"pass@1": 0.25, "pass@2": 0.5})


def test_categories_and_bins() -> None:
    groups = by_category([Tried([1.0], category="a"), Tried([0.0]), Tried([0.0], category="a")])
    assert {name: len(g) for name, g in groups.items()} == {"(none)": 1, "a": 2}
    assert list(by_category([Tried(category=c) for c in ("10 to 12", "b", "2 to 9", "a")])) == ["2 to 9", "10 to 12", "a", "b"]
    assert binned([5.0] * 4, 3) == ["5 to 5"] * 4
    assert Counter(binned(list(range(10)), 5)).most_common(1)[0][1] == 2


@pytest.mark.parametrize("a, b, prompts", [(0.3, 0.5, 30), (0.05, 1.0, 100), (5, 5, 40), (2, 0.2, 60)])
@pytest.mark.parametrize("samples", [1, 8])
def test_intervals_cover_the_true_rate(a: float, b: float, prompts: int, samples: int) -> None:
    """Prompts of all kinds of difficulty (a beta distribution): 95 % of the intervals hold its mean. 600 draws: within 3 points."""
    rng = np.random.default_rng(int(a * 100) + samples)
    inside = 0
    for _ in range(600):
        rates = rng.binomial(samples, rng.beta(a, b, prompts)) / samples
        x = stats.share_interval(rates)
        inside += x.low <= a / (a + b) <= x.high
        assert 0 <= x.low <= x.value <= x.high <= 1
    assert inside / 600 > 0.92


def test_shares_of_coins_have_the_interval_of_agresti_and_coull() -> None:
    """4 of 10: n~ = 10 + z^2, p~ = (4 + z^2/2)/n~, half = z sqrt(p~(1 - p~)/n~)."""
    z = stats.normal_quantile(0.975)
    n, p = 10 + z * z, (4 + z * z / 2) / (10 + z * z)
    x = stats.share_interval([1.0] * 4 + [0.0] * 6)
    assert x[:3] == pytest.approx((0.4, p - z * math.sqrt(p * (1 - p) / n), p + z * math.sqrt(p * (1 - p) / n)))


def test_samples_of_a_prompt_do_not_pass_for_prompts() -> None:
    many = stats.share_interval([1.0, 1.0, 0.0, 0.0] * 50, prompts=["p", "p", "q", "q"] * 50)
    assert many == stats.share_interval([1.0, 0.0])
