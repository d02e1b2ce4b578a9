"""Sums from nothing: people's mistakes are copied by SFT, mended by the rule, and by the vote only where the majority is right."""

from __future__ import annotations

import pytest

from tether.lab.math import World, trained
from tether.lab.sums import majority, questions


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> list[World]:
    return trained(tmp_path_factory.mktemp("sums"))


def sampled(world: World) -> list[float]:
    return [stage.seen.sampled.value for stage in world.stages]


def test_no_question_is_both_trained_on_and_unseen() -> None:
    train, held_out = questions()
    assert (len(train), len(held_out), len({*train, *held_out})) == (80, 20, 100)


def test_a_vote_of_equals_goes_to_the_one_given_first() -> None:
    assert majority(["p"] * 4, ["9", "4", "4", "9"]) == ["9"] * 4
    assert majority(["p", "q", "q"], ["= ", "7", "8"]) == ["", "7", "7"]


def test_sft_copies_the_share_of_mistakes(worlds: list[World]) -> None:
    honest, wrong = worlds
    assert sampled(honest)[0] < 0.15
    assert sampled(honest)[1] == pytest.approx(0.5, abs=0.07)
    assert sampled(wrong)[1] == pytest.approx(0.35, abs=0.07)


def test_the_rule_mends_both_worlds_and_the_vote_the_one_whose_majority_is_right(worlds: list[World]) -> None:
    for world in worlds:
        _, tuned, by_rule, _ = world.stages
        assert by_rule.seen.sampled.low > tuned.seen.sampled.high
    (_, before, _, after), (_, wrong_before, by_rule, wrong_after) = (world.stages for world in worlds)
    assert before.seen.vote > 0.9
    assert after.seen.sampled.low > before.seen.sampled.high
    assert wrong_before.seen.vote < 0.35
    assert wrong_after.seen.sampled.value < wrong_before.seen.sampled.value
    assert wrong_after.seen.sampled.high < by_rule.seen.sampled.low


def test_what_the_curves_show_is_the_reward_that_was_logged(worlds: list[World]) -> None:
    for world in worlds:
        assert [step for step, _ in world.rule] == [step for step, _ in world.vote] == list(range(1, 41))
        assert [step for step, _ in world.agreement] == list(range(1, 41))
        assert world.rule[-1][1] > world.rule[0][1]


def test_the_reward_by_vote_rises_whether_or_not_the_majority_is_right(worlds: list[World]) -> None:
    for world in worlds:
        first, last = (sum(v for _, v in part) / 5 for part in (world.agreement[:5], world.agreement[-5:]))
        assert last > first + 0.1
        assert all(agree >= right for (_, agree), (_, right) in zip(world.agreement, world.vote, strict=True))


def test_a_reward_of_zero_or_one_helps_on_sums_that_were_never_trained_on(worlds: list[World]) -> None:
    untrained, tuned, by_rule, _ = (stage.unseen.sampled.value for stage in worlds[0].stages)
    assert untrained < tuned < by_rule
