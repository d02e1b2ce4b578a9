"""Visitors of the desk over HTTP, for tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from tests import desks
from tether.collect.app import make_app
from tether.collect.desk import Desk
from tether.collect.guard import LOOPBACK

BASE = "http://127.0.0.1:8321"
SECRET = bytes(range(32))


class Browser:
    """One visitor, who fills in the form that is on the page."""

    def __init__(self, app: Any) -> None:
        self.client = TestClient(app, base_url=BASE, headers={"origin": BASE})
        self.page = ""
        self.status = 0

    def see(self, answer: Any) -> str:
        self.page, self.status = answer.text, answer.status_code
        return self.page

    def get(self, path: str = "/") -> str:
        return self.see(self.client.get(path))

    def field(self, name: str) -> str:
        found = re.search(rf'name="{name}" value="([^"]*)"', self.page)
        return found.group(1) if found else ""

    def post(self, path: str, **fields: Any) -> str:
        hidden = {n: self.field(n) for n in ("csrf", "assignment", "access", "token")}
        return self.see(self.client.post(path, data={**{n: v for n, v in hidden.items() if v}, **fields}))

    def join(self, name: str = "Ada") -> str:
        self.get()
        self.post("/join", name=name)
        return self.get()

    def vote(self, choice: str, **fields: Any) -> str:
        return self.post("/vote", choice=choice, **fields)

    @property
    def sides(self) -> list[str]:
        return re.findall(r'<article.*?<div class="text" dir="auto">(.*?)</div>', self.page, re.DOTALL)


def four_pairs(folder: Path) -> Desk:
    items = [desks.item(i, models=["model-x", "model-y"]) for i in range(4)]
    return desks.desk(folder / "desk", items, guidelines="# Be fair\n\nRead both.")


def browser(desk: Desk, **options: Any) -> Browser:
    return Browser(make_app(desk, hosts=LOOPBACK, secret=SECRET, **options))
