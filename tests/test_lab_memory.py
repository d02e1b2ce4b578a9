"""The lab's memory table is that of `tether plan --parameters`, and its sums are bytes times parameters."""

from __future__ import annotations

import math
import re

import pytest

from tests.lab_docs import rows_missing
from tether import cli
from tether.commands.plan_lines import gib, size_lines
from tether.lab import memory as lab
from tether.lab.memory import CARD, SIZES, cards_for, largest, need_of, sampler_bytes
from tether.plan_sizes import METHODS, lora_share, needs

RESULT = lab.EXPERIMENT.run("both")
MODELS, FULL, LORA, CARDS = RESULT.tables


def planned(name: str) -> dict[str, tuple[str, str, str]]:
    """What `tether plan --parameters` prints of each method: models, full, LoRA."""
    found = {}
    for line in size_lines(SIZES[name]):
        row = re.match(r"  (\S.*?) +(\d) +([\d.]+ [GM]iB) +([\d.]+ [GM]iB)   ", line)
        if row:
            found[row[1]] = (row[2], row[3], row[4])
    return found


@pytest.mark.parametrize("size", SIZES)
def test_every_number_is_the_one_that_plan_prints(size: str) -> None:
    of_plan = planned(size)
    assert list(of_plan) == [m.name for m in METHODS]
    column = list(SIZES).index(size) + 1
    for (name, (models, full, lora)), row, full_row, lora_row in zip(of_plan.items(), MODELS.rows, FULL.rows, LORA.rows, strict=False):
        assert row[:2] == [name, models]
        for printed, cells in ((full, full_row), (lora, lora_row)):
            assert cells[0] == name
            value, unit = printed.split()
            if unit == "GiB":
                assert cells[column].replace(",", "") == value
            else:
                assert float(cells[column]) == pytest.approx(float(value) / 1024, abs=0.051)


def test_the_command_prints_those_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "--parameters", "671e9"]) == 0
    printed = capsys.readouterr().out
    for need in needs(671e9):
        assert gib(need.full) in printed
        assert gib(need.lora) in printed


# A trained model 16 bytes a parameter, a frozen one 2; the lecture counts 2 for DPO, 3 to 4 for PPO, 2 for GRPO.
COUNTS = {
    "sft": (1, "16"),
    "reward": (1, "16"),
    "dpo": (1, "16"),
    "dpo, reference kept": (2, "18"),
    "grpo, beta 0": (1, "16 + 2"),
    "grpo": (2, "18 + 2"),
    "ppo, shared critic": (3, "20 + 2"),
    "ppo": (4, "36 + 2"),
}


@pytest.mark.parametrize("name", COUNTS)
def test_models_and_bytes_a_parameter(name: str) -> None:
    row = next(row for row in MODELS.rows if row[0] == name)
    assert (int(row[1]), row[3]) == COUNTS[name]
    base, _, copy = COUNTS[name][1].partition(" + ")
    for parameters in SIZES.values():
        assert need_of(name, parameters).full == int(base) * parameters
        assert sampler_bytes(need_of(name, parameters).method, parameters) == (2 * parameters if copy else 0)


def test_the_critic_at_671_billion() -> None:
    """16 bytes x 671e9 = 10.736e12 bytes: 134.2 cards of 80e9 bytes; PPO 36 bytes: 301.95; GRPO 18 bytes: 150.975; shared 20: 167.75."""
    critic = 16 * 671e9
    assert need_of("ppo", 671e9).full - critic == need_of("ppo, shared critic", 671e9).full
    assert cards_for(critic) == 135
    assert [cards_for(need_of(n, 671e9).full) for n in ("ppo", "grpo", "ppo, shared critic")] == [302, 151, 168]
    for number in ("9,998.7 GiB", "44 %", "135 cards", "151 cards", "302"):
        assert number in RESULT.see[1]
    assert (RESULT.differences[3].true, "168" in RESULT.differences[3].why) == ("9,998.7 GiB more", True)


@pytest.mark.parametrize("row", range(len(METHODS)), ids=[m.name for m in METHODS])
def test_the_largest_model_fills_its_cards_and_no_more(row: int) -> None:
    method = METHODS[row]
    each = 16 * method.trained + 2 * method.frozen + (2 if method.name.startswith(("grpo", "ppo")) else 0)
    for i, cards in enumerate((1, 8, 64)):
        assert float(CARDS.rows[row][1 + i].replace(",", "")) == pytest.approx(cards * 80 / each, abs=0.051)
        found = largest(cards, lambda p: need_of(method.name, p).lora)
        assert need_of(method.name, found).lora <= cards * CARD < need_of(method.name, found * 1.000001).lora


def test_fewer_than_one_card_is_one_card() -> None:
    assert (cards_for(1.0), cards_for(CARD), cards_for(CARD + 1)) == (1, 1, 2)
    assert math.isclose(largest(1, lambda p: 16 * p), 5e9, rel_tol=1e-12)


def test_what_the_lecture_counts_stands_beside_what_is_held() -> None:
    assert [(d.printed, d.true) for d in RESULT.differences[:3]] == [("2", "1 or 2"), ("3 to 4", "3 or 4"), ("2", "1 or 2")]
    assert len(RESULT.charts) == 3
    assert not lab.EXPERIMENT.has_variants


def test_the_docs_show_the_page_s_numbers() -> None:
    assert rows_missing("memory", RESULT.tables) == []


def test_the_lora_column_is_what_the_page_says_it_is() -> None:
    """8e9 parameters: 4 x 8e9 = 32e9 bytes of policy, 16 bytes for each adapter parameter, 2 x 8e9 for a reward model."""
    adapter = 16 * lora_share(8e9) * 8e9
    assert need_of("grpo", 8e9).lora == pytest.approx(4 * 8e9 + adapter)
    assert need_of("ppo", 8e9).lora == pytest.approx(4 * 8e9 + 2 * adapter + 2 * 8e9)
    (text,) = RESULT.sections[0].text
    assert "LoRA: 4 bytes for every parameter of the policy" in text
    assert "16 for those of its adapters, 2 for the reward model's" in text
    assert "without a reward model" in RESULT.see[1]
