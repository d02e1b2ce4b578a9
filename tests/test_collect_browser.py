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

    def __init__(self, file: Path, desk: Path) -> None:
        words = ["collect", str(file), "--desk", str(desk), "--port", "0", "--no-open", "--repeats", "0"]
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

    def start(file: Path) -> Served:
        running.append(Served(file, tmp_path / f"desk{len(running)}"))
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
