"""Many people vote at once while the desk's process is killed again and again: is every acknowledged vote there, and none twice?

    python bench/desk_kill.py                        20 annotators, 2,000 votes, 10 kills
    python bench/desk_kill.py --annotators 4 --votes 80 --kills 2

The desk is `tether collect` itself, asked over HTTP as a browser asks it. An annotator sends a ballot until it is acknowledged (after
a kill the same ballot once more, and now and then twice for a nervous finger). While the process is dead the database is opened
and held against what was acknowledged; at the end each acknowledged page has one vote, the one that was sent, and there are no others.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tether.collect.desk import Desk

START_S = 60.0


@dataclass
class Server:
    """`tether collect` in a process of its own."""

    data: Path
    folder: Path
    votes: int
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if not self.port:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = probe.getsockname()[1]
        words = ["collect", str(self.data), "--desk", str(self.folder), "--votes", str(self.votes), "--port", str(self.port), "--no-open"]
        with open(self.folder.with_suffix(".log"), "ab") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "tether", *words], stdout=log, stderr=log)
        started = time.monotonic()
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() - started > START_S:
                    raise RuntimeError(self.folder.with_suffix(".log").read_text()) from None
                time.sleep(0.02)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()  # SIGKILL: nothing is told, nothing is flushed
        self.process.wait()


@dataclass
class Person:
    """An annotator with a browser of their own: a cookie and the page that is open."""

    name: str
    port: int
    rng: random.Random
    cookie: str = ""
    acknowledged: dict[int, str] = field(default_factory=dict)  # assignment -> choice
    retried: int = 0

    def work(self, stop: threading.Event) -> None:
        self._patiently("POST", "/join", lambda: {"name": self.name, "access": "", "token": "", "csrf": self._csrf(self._page("/"))}, stop)
        while not stop.is_set():
            page = self._patiently("GET", "/", None, stop)
            found = re.search(r'name="assignment" value="(\d+)"', page)
            if found is None:
                return
            choice = self.rng.choice(["left", "right", "tie", "bad", "skip"])
            ballot = {"csrf": self._csrf(page), "assignment": found.group(1), "choice": choice, "reason": ""}
            for _ in range(2 if self.rng.random() < 0.1 else 1):
                self._patiently("POST", "/vote", lambda ballot=ballot: ballot, stop)  # type: ignore[misc]
            if not stop.is_set():
                self.acknowledged[int(found.group(1))] = choice

    @staticmethod
    def _csrf(page: str) -> str:
        found = re.search(r'name="csrf" value="([^"]+)"', page)
        assert found, page[:2000]
        return found.group(1)

    def _patiently(self, method: str, path: str, form: object, stop: threading.Event) -> str:
        """Asks until there is an answer. A vote or a name counts as taken only by the redirect that says so."""
        while not stop.is_set():
            try:
                fields = form() if callable(form) else None
                status, location, body = self._ask(method, path, fields)
            except (OSError, http.client.HTTPException):
                self.retried += 1
                time.sleep(0.05)
                continue
            if method == "POST":
                taken = status == 303 and (path != "/vote" or location == "/?was=saved")
                assert taken, f"{path}: {status} {location} {body[:2000]}"
            else:
                assert status == 200, f"{path}: {status} {body[:2000]}"
            return body
        return ""

    def _page(self, path: str) -> str:
        return self._ask("GET", path, None)[2]

    def _ask(self, method: str, path: str, fields: dict[str, str] | None) -> tuple[int, str, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            headers = {
                "Cookie": self.cookie,
                "Origin": f"http://127.0.0.1:{self.port}",
                "Content-Type": "application/x-www-form-urlencoded",
            }
            connection.request(method, path, urllib.parse.urlencode(fields) if fields else None, headers)
            answer = connection.getresponse()
            body = answer.read().decode()
            if cookie := answer.getheader("Set-Cookie"):
                self.cookie = cookie.partition(";")[0]
            return answer.status, answer.getheader("Location") or "", body
        finally:
            connection.close()


def missing(folder: Path, people: list[Person]) -> list[tuple[str, int]]:
    """Acknowledged votes that the database does not hold as they were sent, or holds more than once."""
    before = [(p.name, dict(p.acknowledged)) for p in people]  # first: what is acknowledged while we read is not missing
    desk = Desk.open(folder)
    votes = desk.votes()
    desk.close()
    stored = Counter(v.assignment for v in votes)
    by_page = {v.assignment: v for v in votes}
    lost = []
    for name, acknowledged in before:
        for assignment, choice in acknowledged.items():
            vote = by_page.get(assignment)
            if vote is None or stored[assignment] != 1 or vote.annotator != name or _side(vote.outcome, vote.order) != choice:
                lost.append((name, assignment))
    return lost


def _side(outcome: str, order: tuple[int, ...]) -> str:
    """What was chosen on the page, by the order that it had."""
    if outcome in ("first", "second"):
        return "left" if order[0] == (0 if outcome == "first" else 1) else "right"
    return outcome


def run(folder: Path, *, annotators: int, votes: int, kills: int, seed: int = 0) -> dict[str, int | float]:
    """Figures of one ordeal in a fresh `folder`. AssertionError where a vote was lost, changed or doubled."""
    folder.mkdir(parents=True, exist_ok=True)
    items = -(-votes // annotators)
    rows = [{"prompt": f"Question {i}", "answer_a": f"One {i}", "answer_b": f"Other {i}"} for i in range(items)]
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(r) + "\n" for r in rows))
    server = Server(data, folder / "desk", votes=annotators)
    rng = random.Random(seed)
    server.start()
    people = [Person(f"person {i}", server.port, random.Random(f"{seed}/{i}")) for i in range(annotators)]
    stop, faults = threading.Event(), []

    def work(person: Person) -> None:
        try:
            person.work(stop)
        except BaseException as fault:
            faults.append(fault)
            stop.set()

    threads = [threading.Thread(target=work, args=(p,), daemon=True) for p in people]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    on_disk = []
    try:
        for i in range(kills):
            goal = votes * (i + 1) / (kills + 1)
            while sum(len(p.acknowledged) for p in people) < goal and any(t.is_alive() for t in threads):
                time.sleep(0.002)
            time.sleep(rng.random() * 0.02)
            server.kill()
            lost = missing(server.folder, people)
            assert not lost, f"kill {i + 1}: acknowledged and not on the disk: {lost}"
            desk = Desk.open(server.folder)
            on_disk.append(len(desk.votes()))
            desk.close()
            server.start()
        for thread in threads:
            thread.join()
    finally:
        stop.set()
        server.kill()
    if faults:
        raise faults[0]
    seconds = time.monotonic() - started
    lost = missing(server.folder, people)
    assert not lost, f"acknowledged and not on the disk: {lost}"
    desk = Desk.open(server.folder)
    kept, history = desk.votes(), desk.votes(undone=True)
    wanted = desk.settings.votes_per_item
    desk.close()
    acknowledged = sum(len(p.acknowledged) for p in people)
    assert len(kept) == len(history) == acknowledged, f"{acknowledged} acknowledged, {len(kept)} kept, {len(history)} ever written"
    per_item = Counter(v.item for v in kept if v.counts)
    assert max(per_item.values()) <= wanted
    first_look = Counter((v.item, v.annotator) for v in kept if not v.repeat)
    assert max(first_look.values()) == 1
    return {
        "annotators": annotators,
        "votes": acknowledged,
        "kills": kills,
        "lost": 0,
        "twice": 0,
        "requests_repeated": sum(p.retried for p in people),
        "repeats": sum(v.repeat for v in kept),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--annotators", type=int, default=20)
    parser.add_argument("--votes", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="desk-kill-") as spare:
        figures = run(given.folder or Path(spare), annotators=given.annotators, votes=given.votes, kills=given.kills, seed=given.seed)
    print(json.dumps({**figures, "seed": given.seed}))


if __name__ == "__main__":
    main()
