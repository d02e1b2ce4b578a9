"""Active choice: what an ensemble is least sure of comes first, the spread being that of the gap between two answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import desks
from tests.tiny import save_tiny
from tether.collect.desk import Desk
from tether.collect.items import make_item
from tether.collect.uncertainty import item_spreads, spreads
from tether.errors import UserError
from tether.scalar import ScalarModel


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = save_tiny(tmp_path / "tiny")
    ScalarModel.load(folder, heads=3, fresh_head=True, precision="fp32").save(tmp_path / "reward")
    return tmp_path / "reward"


def test_the_spread_is_that_of_the_gap_between_answers_over_the_heads(model: Path) -> None:
    """Each head's score by its own: a model of one head at a time, asked for the two answers apart."""
    items = [
        make_item("w10 w11", ["w12 w13", "w14"]),
        make_item([{"role": "user", "content": "w20"}], ["w21", "w22 w23 w24"]),
        make_item("w30", ["w31", "w32 w33", "w34 w35 w36"]),
    ]
    found = spreads({i.id: i for i in items}, str(model), precision="fp32")
    loaded = ScalarModel.load(model, precision="fp32")
    head = loaded.model.score.weight.detach().clone()
    for item in items:
        by_head = []
        for h in range(3):
            loaded.model.score.weight.data[:] = head[h]  # all heads alike: their mean is this head, their spread nothing
            by_head.append(loaded.score_texts([(item.prompt, item.answer(i)) for i in range(len(item.answers))]))
        n = len(item.answers)
        widest = 0.0
        for a in range(n):
            for b in range(a):
                gaps = [s[a] - s[b] for s in by_head]
                mean = sum(gaps) / 3
                widest = max(widest, (sum((g - mean) ** 2 for g in gaps) / 3) ** 0.5)
        assert widest > 1e-3
        assert found[item.id] == pytest.approx(widest, rel=1e-4)


def test_micro_batches_do_not_change_it(model: Path) -> None:
    items = {i.id: i for i in (desks.item(n, answers=["w10 w11 " * n, "w12"]) for n in range(1, 9))}
    loaded = ScalarModel.load(model, precision="fp32")
    one, many = (item_spreads(loaded, items, tokens_per_micro_batch=n) for n in (40, 4000))
    assert list(one) == list(many) or set(one) == set(many)
    assert all(one[i] == pytest.approx(many[i], rel=1e-4) for i in items)


def test_the_least_sure_item_is_shown_first(model: Path, tmp_path: Path) -> None:
    items = [make_item(f"w{10 + n}", [f"w{20 + n} w{30 + n}", f"w{40 + n}"]) for n in range(6)]
    desk = desks.desk(tmp_path / "desk", items, choice="uncertain")
    found = spreads(desk.items(), str(model), precision="fp32")
    desk.set_spreads(found)
    desk.close()
    again = Desk.open(tmp_path / "desk")
    shown = again.next(again.annotator("Ann").id)
    assert shown is not None
    assert shown.item.id == max(found, key=lambda i: found[i])
    assert shown.chosen_by == "uncertain"


def test_one_head_is_refused(tmp_path: Path) -> None:
    ScalarModel.load(save_tiny(tmp_path / "tiny"), fresh_head=True, precision="fp32").save(tmp_path / "reward")
    item = desks.item(0)
    with pytest.raises(UserError, match="one head does not know"):
        spreads({item.id: item}, str(tmp_path / "reward"))
