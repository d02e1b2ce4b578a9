"""The desk in a real browser: voting by keyboard, undo, reload, answers that mean harm, accessibility, and what is exported at the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import save_tiny
from tether import cli
from tether.collect.desk import Desk

BROWSER = os.environ.get("TETHER_BROWSER") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine; TETHER_BROWSER names one")
EVIL = [
    "<script>alert(1)</script>",
    "<svg onload=alert(1)><circle r=9></svg>",
    "[click](javascript:alert(1)) <a href='javascript:alert(2)'>x</a>",
    "![x](http://example.invalid/x.png) <img src=x onerror=alert(3)>",
    "word" * 5000,
    "left \u202eright\u202c \u2066isolated\u2069 nul \x00 end \ufffd",
]


def pairs(path: Path, n: int, answers: list[str] | None = None) -> Path:
    rows = [{"prompt": f"Question {i}?", "chosen": f"A good answer {i}.", "rejected": f"A poor answer {i}."} for i in range(n)]
    for row, text in zip(rows, answers or [], strict=False):
        row["chosen"] = text
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


class Served:
    """`tether collect` in a process of its own."""

    def __init__(self, file: Path, desk: Path, *more: str) -> None:
        words = ["collect", str(file), "--desk", str(desk), "--port", "0", "--no-open", "--repeats", "0", *more]
        self.desk = desk
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tether", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self.process.stdout is not None
        self.url = next(line.strip() for line in self.process.stdout if line.startswith("http"))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(20)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    running: list[Served] = []

    def start(file: Path, *more: str) -> Served:
        running.append(Served(file, tmp_path / f"desk{len(running)}", *more))
        return running[-1]

    yield start
    for served in running:
        served.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


def begin(page: Any, url: str) -> None:
    page.goto(url)
    page.fill("#name", "Ada")
    page.keyboard.press("Enter")
    page.click("#go")
    page.wait_for_selector("#ballot")
    page.wait_for_timeout(300)  # a key pressed twice must not vote on a page that nobody has seen


def press(page: Any, key: str) -> None:
    with page.expect_navigation():
        page.keyboard.press(key)
    page.wait_for_timeout(300)


def shown(page: Any) -> list[str]:
    return [page.inner_text(".asked .text"), *page.locator(".answer .text").all_inner_texts()]


def test_vote_by_keyboard_undo_reload_finish_export(serve: Any, browser: Any, tmp_path: Path, capsys: Any) -> None:
    served = serve(pairs(tmp_path / "pairs.jsonl", 4))
    page = browser.new_page()
    begin(page, served.url)
    first = shown(page)
    press(page, "1")
    second = shown(page)
    assert second != first
    press(page, "u")
    assert shown(page) == first, "the item that was taken back, with the same sides"
    page.reload()
    page.wait_for_timeout(300)
    assert shown(page) == first
    liked = []
    for _ in range(4):
        _, left, right = shown(page)
        key = "1" if "good" in left else "ArrowRight"
        liked.append(left if key == "1" else right)
        press(page, key)
    assert page.query_selector("#ballot") is None
    votes = Desk.open(served.desk).votes()
    assert [v.outcome for v in votes] == ["first"] * 4
    assert len(Desk.open(served.desk).votes(undone=True)) == 5
    page.close()

    out = tmp_path / "out.jsonl"
    assert cli.run(["export", str(served.desk), "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().split("\n") if line]
    assert len(rows) == 4
    assert all("good" in json.dumps(row["chosen"]) and "poor" in json.dumps(row["rejected"]) for row in rows)


def test_a_model_can_be_trained_on_what_was_exported(tmp_path: Path, serve: Any, browser: Any) -> None:
    rows = [{"prompt": f"w{i} w{i + 1}", "chosen": f"w{i + 9} w{i + 5}", "rejected": f"w{i + 20} w{i + 3} w{i}"} for i in range(3)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    served = serve(file)
    page = browser.new_page()
    begin(page, served.url)
    for key in ("1", "2", "1"):
        press(page, key)
    page.close()
    out = tmp_path / "out.jsonl"
    assert cli.run(["export", str(served.desk), "--out", str(out)]) == 0
    model = save_tiny(tmp_path / "tiny")
    settings = [f"model={model}", f"data={out}", "batch_size=2", "max_steps=2", "precision=fp32", "trackers=[]"]
    assert cli.run(["reward", *settings, "--run", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def four_answers(path: Path) -> Path:
    path.write_text(json.dumps({"prompt": "q", "answers": [f"answer {w}" for w in ("one", "two", "three", "four")]}) + "\n")
    return path


def ranks_shown(served: Served, texts: list[str]) -> list[int | None]:
    """The ranks of the only vote, in the order in which the answers stood on the page."""
    desk = Desk.open(served.desk)
    (vote,) = desk.votes()
    assert vote.ranks is not None
    by_text = {a.text: r for a, r in zip(desk.items()[vote.item].answers, vote.ranks, strict=True)}
    return [by_text[text.strip()] for text in texts]


def test_answers_are_ranked_by_keys(serve: Any, browser: Any, tmp_path: Path) -> None:
    served = serve(four_answers(tmp_path / "four.jsonl"))
    page = browser.new_page()
    begin(page, served.url)
    texts = page.locator(".answer .text").all_inner_texts()
    for key in "31=42":
        page.keyboard.press(key)
    assert page.locator(".answer .place").all_inner_texts() == ["Place 2", "Place 3", "Place 1", "Place 2"]
    page.keyboard.press("Backspace")
    press(page, "Enter")
    assert ranks_shown(served, texts) == [2, None, 1, 2]
    page.close()


def test_answers_are_ranked_by_dragging_and_by_buttons(serve: Any, browser: Any, tmp_path: Path) -> None:
    served = serve(four_answers(tmp_path / "four.jsonl"))
    page = browser.new_page(viewport={"width": 1280, "height": 1400})
    begin(page, served.url)
    texts = page.locator(".answer .text").all_inner_texts()
    row = page.locator("#order li")
    start, end = row.nth(3).locator(".grip").bounding_box(), row.nth(0).bounding_box()
    page.mouse.move(start["x"] + 5, start["y"] + 5)
    page.mouse.down()
    page.mouse.move(end["x"] + 20, end["y"] + 40, steps=6)
    page.mouse.move(end["x"] + 20, end["y"] + 4, steps=3)
    page.mouse.up()
    assert [r.get_attribute("data-number") for r in row.all()] == ["4", "1", "2", "3"]
    page.click("[aria-label='Answer 3 up']")
    assert [r.get_attribute("data-number") for r in row.all()] == ["4", "1", "3", "2"]
    assert page.inner_text("#said") == "Answer 3: place 3"
    with page.expect_navigation():
        page.click("text=Save the order")
    assert ranks_shown(served, texts) == [2, 4, 3, 1]
    page.close()


def test_everything_works_without_scripts(serve: Any, browser: Any, tmp_path: Path) -> None:
    served = serve(four_answers(tmp_path / "four.jsonl"), "--reason", "short")
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(served.url)
    page.fill("#name", "Ada")
    page.click("text=Begin")
    with page.expect_navigation():
        page.click("#go")
    assert not page.is_visible("text=Keys")
    page.fill("#reason", "kept")
    page.check("input[name=tag]")
    with page.expect_navigation():
        page.keyboard.press("Enter")
    assert page.is_visible("text=nothing was chosen"), "Enter in a field is no vote"
    assert page.input_value("#reason") == "kept"
    assert page.is_checked("input[name=tag]")
    texts = page.locator(".answer .text").all_inner_texts()
    for place, rank in enumerate("2132"):
        page.select_option(f"#rank-{place}", rank)
    with page.expect_navigation():
        page.click("text=Save the order")
    assert ranks_shown(served, texts) == [2, 1, 3, 2]
    assert Desk.open(served.desk).votes()[0].reason == "short; kept"
    with page.expect_navigation():
        page.click("text=Undo")
    assert page.locator(".answer .text").all_inner_texts() == texts
    with page.expect_navigation():
        page.click("text=All bad")
    assert page.is_visible("text=That was all")
    context.close()


def test_keys_do_not_vote_by_accident(serve: Any, browser: Any, tmp_path: Path) -> None:
    """Not while a reason is written, not on a page that has just come, not by Enter in a field, not when single keys are off."""
    served = serve(pairs(tmp_path / "pairs.jsonl", 3))
    page = browser.new_page()
    begin(page, served.url)

    def votes() -> int:
        page.wait_for_timeout(200)
        return len(Desk.open(served.desk).votes())

    page.keyboard.press("r")
    page.keyboard.type("1 2 t b s u is better\n")
    page.keyboard.press("Escape")
    page.focus("input[name=strength]")
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowRight")
    assert votes() == 0
    page.click("#help")
    page.uncheck("#shortcuts")
    page.click("text=Close")
    page.keyboard.press("1")
    assert votes() == 0
    page.reload()
    page.wait_for_timeout(300)
    page.keyboard.press("1")
    assert votes() == 0, "the choice is remembered"
    page.click("#help")
    page.check("#shortcuts")
    page.click("text=Close")
    page.keyboard.press("+")
    page.keyboard.press("r")
    page.keyboard.type("shorter")
    page.keyboard.press("Escape")
    with page.expect_navigation():
        page.keyboard.press("1")
        page.keyboard.press("1")
    page.keyboard.press("1")
    assert votes() == 1
    vote = Desk.open(served.desk).votes()[0]
    assert (vote.strength, vote.reason) == (1, "shorter")
    page.close()


def test_answers_that_mean_harm_do_none(serve: Any, browser: Any, tmp_path: Path) -> None:
    served = serve(pairs(tmp_path / "pairs.jsonl", len(EVIL), EVIL))
    page = browser.new_page(viewport={"width": 390, "height": 800})
    alarms: list[str] = []
    page.on("dialog", lambda dialog: (alarms.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: None if request.url.startswith(served.url) else alarms.append(request.url))
    begin(page, served.url)
    for _ in EVIL:
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, "nothing pushes the page sideways"
        hrefs = page.eval_on_selector_all(".answer a", "links => links.map(a => a.href)")
        assert not [h for h in hrefs if not h.startswith(("http:", "https:", "mailto:"))]
        assert page.query_selector(".answer script, .answer svg, .answer img, .answer [onerror]") is None
        press(page, "t")
    assert alarms == []
    assert len(Desk.open(served.desk).votes()) == len(EVIL)
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_no_serious_accessibility_fault(scheme: str, width: int, serve: Any, browser: Any, tmp_path: Path) -> None:
    from axe_playwright_python.sync_playwright import Axe

    served = serve(pairs(tmp_path / "pairs.jsonl", 1, ["# Title\n\nText with `code`, **bold**, $x^2$.\n\n| a | b |\n|---|---|\n| 1 | 2 |"]))
    # The check itself is a script that the page's own policy would refuse.
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900}, bypass_csp=True)
    page = context.new_page()
    page.goto(served.url)

    def faults() -> list[str]:
        found = Axe().run(page).response["violations"]
        return [f"{v['id']}: {v['nodes'][0]['html'][:120]}" for v in found if v["impact"] in ("serious", "critical")]

    seen = {"start": faults()}
    page.fill("#name", "Ada")
    page.keyboard.press("Enter")
    page.wait_for_selector("#go")
    seen["guidelines"] = faults()
    page.click("#go")
    page.wait_for_selector("#ballot")
    page.wait_for_timeout(300)
    seen["pair"] = faults()
    press(page, "1")
    seen["finished"] = faults()
    served = serve(four_answers(tmp_path / "four.jsonl"))
    begin(page, served.url)
    seen["ranking"] = faults()
    if width > 760:
        page.keyboard.press("?")
        page.wait_for_timeout(200)
        seen["keys"] = faults()
    assert not any(seen.values()), seen
    context.close()


@pytest.mark.parametrize(
    ("path", "headers", "body", "code"),
    [
        ("/vote", {}, b"choice=left", 403),  # no session, no token
        ("/", {"Host": "evil.example"}, None, 400),
        ("/vote", {"Origin": "http://evil.example"}, b"choice=left", 403),
        ("/vote", {"Origin": "ITS OWN"}, b"x" * 200_000, 413),
    ],
)
def test_a_stranger_is_refused(path: str, headers: dict[str, str], body: bytes | None, code: int, serve: Any, tmp_path: Path) -> None:
    served = serve(pairs(tmp_path / "pairs.jsonl", 1))
    headers = {name: value.replace("ITS OWN", served.url.rstrip("/")) for name, value in headers.items()}
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(served.url.rstrip("/") + path, body, headers))
    assert refused.value.code == code
    assert Desk.open(served.desk).votes() == []
