"""The desk over HTTP: whom it answers, what it saves, and what it gives away."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests import desks
from tether.collect.app import LiveState, make_app
from tether.collect.desk import Desk
from tether.collect.guard import LOOPBACK, Keys, desk_secret
from tether.collect.items import make_item
from tether.collect.serving import listen
from tether.errors import UserError

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


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = desks.desk(
        tmp_path / "desk", [desks.item(i, models=["model-x", "model-y"]) for i in range(4)], guidelines="# Be fair\n\nRead both."
    )
    yield made
    made.close()


def browser(desk: Desk, **options: Any) -> Browser:
    return Browser(make_app(desk, hosts=LOOPBACK, secret=SECRET, **options))


# -- voting by plain forms -----------------------------------------------------------------------------------------------


def test_name_guidelines_votes_undo_and_the_end(desk: Desk) -> None:
    ada = browser(desk)
    assert "Which answer is better?" in ada.get()
    assert "Be fair" in ada.post("/join", name="Ada"), "the guidelines come first"
    ada.get()
    first, assignment = ada.sides, ada.field("assignment")
    assert "Saved." in ada.vote("left", strength="2", tag=[], reason="It is\r\nright")
    assert ada.field("assignment") != assignment
    assert "Taken back" in ada.post("/undo")
    assert (ada.sides, ada.field("assignment")) == (first, assignment)
    for choice in ("right", "tie", "bad", "skip"):
        ada.vote(choice)
    assert "That was all" in ada.page
    assert "You gave 4 votes" in ada.page
    votes = desk.votes(undone=True)
    assert [v.undone for v in votes] == [True, False, False, False, False]
    assert (votes[0].strength, votes[0].reason) == (2, "It is\nright")
    assert votes[0].outcome != votes[1].outcome, "left and right of the same page are the two answers"
    assert [v.outcome for v in votes[2:]] == ["tie", "bad", "skip"]


def test_left_is_the_answer_that_stood_on_the_left(desk: Desk) -> None:
    ada = browser(desk)
    ada.join()
    orders = set()
    for _ in range(4):
        left = ada.sides[0]
        ada.vote("left")
        vote = desk.votes()[-1]
        item = desk.items()[vote.item]
        assert item.answers[0 if vote.outcome == "first" else 1].text in left
        orders.add(vote.order)
    assert orders == {(0, 1), (1, 0)}, "sides are shuffled"


def test_a_ballot_sent_twice_is_one_vote(desk: Desk) -> None:
    ada = browser(desk)
    page = ada.join()
    ada.vote("left")
    ada.page = page  # the back button
    ada.vote("left")
    assert len(desk.votes()) == 1
    ada.page = page
    assert "first vote stays" in ada.vote("right")
    assert len(desk.votes()) == 1


def test_a_reload_and_a_restart_show_the_same_page(desk: Desk) -> None:
    ada = browser(desk)
    first = ada.join()
    assert ada.get() == first
    again = browser(Desk.open(desk.folder))
    again.client.cookies = ada.client.cookies
    assert again.get() == first
    again.page = first
    assert "Saved." in again.vote("tie"), "a page from before the restart still votes"


def test_reasons_that_are_offered_and_own_words_are_kept_together(tmp_path: Path) -> None:
    desk = desks.desk(tmp_path / "desk", [desks.item(0)], reasons=("more <correct>", "clearer"), strength=False)
    ada = browser(desk)
    ada.join()
    assert "more &lt;correct&gt;" in ada.page
    assert 'name="strength"' not in ada.page
    ada.vote("left", tag=["1", "0", "77"], reason="and kind")
    assert desk.votes()[0].reason == "more <correct>; clearer; and kind"


def test_a_reason_that_is_too_long_is_not_lost_and_nothing_is_saved(desk: Desk) -> None:
    ada = browser(desk)
    ada.join()
    ada.vote("left", reason="x" * 4001, strength="3")
    assert ada.status == 422
    assert "Not saved: the reason has 4001 characters" in ada.page
    assert "x" * 4001 in ada.page
    assert re.search(r'value="3" checked', ada.page)
    assert desk.votes() == []


@pytest.mark.parametrize(
    "fields",
    [
        {"choice": "both"},
        {"choice": ""},
        {"choice": "left", "assignment": "-1"},
        {"choice": "left", "assignment": "9" * 40},
        {"choice": "ranking", "rank_0": "1"},
    ],
)
def test_a_ballot_that_says_nothing_clear_is_refused_in_words(fields: dict[str, str], desk: Desk) -> None:
    ada = browser(desk)
    ada.join()
    ada.post("/vote", **fields)
    assert ada.status in (409, 422)
    assert "othing was saved" in ada.page or "Not saved" in ada.page
    assert desk.votes() == []


def test_nobody_votes_on_a_page_of_somebody_else(desk: Desk) -> None:
    ada, ben = browser(desk), browser(desk)
    ada.join("Ada")
    ben.join("Ben")
    theirs = ada.field("assignment")
    ben.vote("left", assignment=theirs)
    assert ben.status == 409
    assert desk.votes() == []


# -- rankings ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ranked(tmp_path: Path) -> Desk:
    return desks.desk(tmp_path / "desk", [desks.item(i, answers=["one", "two", "three", "four"]) for i in range(2)])


def test_answers_are_put_in_order_by_plain_fields(ranked: Desk) -> None:
    ada = browser(ranked)
    ada.join()
    sides = ada.sides
    assert len(sides) == 4
    ada.vote("ranking", rank_0="3", rank_1="1", rank_2="", rank_3="3")
    (vote,) = ranked.votes()
    item = ranked.items()[vote.item]
    assert vote.ranks is not None
    by_text = {answer.text: rank for answer, rank in zip(item.answers, vote.ranks, strict=True)}
    assert [by_text[re.sub(r"<[^>]*>", "", s).strip()] for s in sides] == [2, 1, None, 2], "places without gaps"


def test_all_equal_is_a_ranking_and_no_order_is_refused(ranked: Desk) -> None:
    ada = browser(ranked)
    ada.join()
    empty = {f"rank_{i}": "" for i in range(4)}
    assert "Not saved" in ada.vote("ranking", **empty)
    ada.vote("tie", **empty)
    assert [(v.outcome, v.ranks) for v in ranked.votes()] == [("ranking", (1, 1, 1, 1))]


# -- blind ---------------------------------------------------------------------------------------------------------------


def test_a_page_does_not_tell_whose_answers_they_are(desk: Desk) -> None:
    told = make_item(
        "q", ["a one", "a two"], models=["model-x", "model-y"], source="secret.jsonl:3", extra={"chosen_by_author": "hidden-extra"}
    )
    desk.add_items([told])
    ada = browser(desk)
    ada.join()
    for _ in range(5):
        for item in desk.items().values():
            hidden = [item.id, item.source, *(a.id for a in item.answers), "model-x", "model-y", "hidden-extra", "random"]
            assert not [h for h in hidden if h in ada.page]
        ada.vote("tie")


# -- who may -------------------------------------------------------------------------------------------------------------


def test_every_reply_forbids_what_is_not_the_desks(desk: Desk) -> None:
    client = TestClient(make_app(desk, hosts=LOOPBACK, secret=SECRET), base_url=BASE)
    for path in ("/", "/guidelines", "/nothing", "/static/style.css", "/static/../app.py", "/as/x", "/join/x"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert policy == (
            "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; form-action 'self'; "
            "frame-ancestors 'none'; base-uri 'none'"
        )
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        assert headers["cache-control"] == ("public, max-age=31536000, immutable" if path.endswith("css") else "no-store")
    cookie = client.get("/").headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie


def test_pages_hold_no_script_or_style_of_their_own(desk: Desk) -> None:
    ada = browser(desk)
    pages = [ada.get(), ada.post("/join", name="Ada"), ada.get(), ada.vote("left"), ada.get("/nothing")]
    for page in pages:
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! src=\"/static/)", page)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8321", "127.0.0.1.evil.example", "", "localhost, evil.example", "[::1", "localhost@evil.example"]
)
def test_a_foreign_host_name_reaches_nothing(host: str, desk: Desk) -> None:
    client = TestClient(make_app(desk, hosts=LOOPBACK, secret=SECRET), base_url=BASE)
    answer = client.get("/", headers={"host": host})
    assert answer.status_code == 400
    assert "csrf" not in answer.text


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1", "[::1]:80", "LOCALHOST"])
def test_this_machines_own_names_and_forwarded_ports_are_answered(host: str, desk: Desk) -> None:
    client = TestClient(make_app(desk, hosts=LOOPBACK, secret=SECRET), base_url=BASE)
    assert client.get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "http://127.0.0.1:8321.evil.example"},
        {"origin": "", "referer": "http://evil.example/127.0.0.1:8321"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_another_sites_page_cannot_vote(headers: dict[str, str], desk: Desk) -> None:
    ada = browser(desk)
    ada.join()
    form = {"csrf": ada.field("csrf"), "assignment": ada.field("assignment"), "choice": "left"}
    assert ada.client.post("/vote", data=form, headers=headers).status_code == 403
    assert desk.votes() == []
    assert ada.client.post("/vote", data=form, headers={"origin": "", "referer": f"{BASE}/"}).status_code == 200
    assert len(desk.votes()) == 1


def test_a_form_without_its_sessions_token_saves_nothing(desk: Desk) -> None:
    ada, ben = browser(desk), browser(desk)
    ada.join("Ada")
    ben.join("Ben")
    for csrf in ("", "x", ben.field("csrf")):
        assert ada.client.post("/vote", data={"csrf": csrf, "assignment": ada.field("assignment"), "choice": "left"}).status_code == 403
        assert ada.client.post("/undo", data={"csrf": csrf}).status_code == 403
    assert desk.votes() == []


def test_a_form_without_a_cookie_saves_nothing_and_says_why(desk: Desk) -> None:
    ada = browser(desk)
    ada.join()
    form = {"csrf": ada.field("csrf"), "assignment": ada.field("assignment"), "choice": "left"}
    ada.client.cookies.clear()
    answer = ada.client.post("/vote", data=form)
    assert answer.status_code == 403
    assert "cookie" in answer.text
    assert desk.votes() == []


def test_an_odd_cookie_of_another_program_does_no_harm(desk: Desk) -> None:
    ada = browser(desk)
    ada.join()
    ours = "; ".join(f"{n}={v}" for n, v in ada.client.cookies.items())
    answer = ada.client.get("/", headers={"cookie": f'odd="[{{;=; a,b ;{ours}; ="'})
    assert "ballot" in answer.text


def test_a_session_is_new_once_somebody_has_a_name(desk: Desk) -> None:
    ada = browser(desk)
    ada.get()
    before = dict(ada.client.cookies)
    ada.post("/join", name="Ada")
    (name,) = before
    assert ada.client.cookies[name].partition(".")[0] != before[name].partition(".")[0]


@pytest.mark.parametrize("size", [65_537, 200_000])
@pytest.mark.parametrize("told", [True, False])
def test_more_than_the_limit_is_refused(size: int, told: bool, desk: Desk) -> None:
    ada = browser(desk)
    ada.join()
    body = b"x" * size
    content: Any = body if told else iter([body[:60_000], body[60_000:]])  # without a stated length it is counted
    headers = {"content-type": "application/x-www-form-urlencoded"}
    assert ada.client.post("/vote", content=content, headers=headers).status_code == 413
    assert desk.votes() == []


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"choice=left", "text/plain", 415),
        (b'{"choice": "left"}', "application/json", 415),
        (b"&".join(b"a=1" for _ in range(300)), "application/x-www-form-urlencoded", 400),
        (b"csrf=%ff%fe\xff\x00&choice=%00left", "application/x-www-form-urlencoded", 403),
    ],
)
def test_what_is_no_form_is_refused(content: bytes, kind: str, status: int, desk: Desk) -> None:
    ada = browser(desk)
    ada.join()
    assert ada.client.post("/vote", content=content, headers={"content-type": kind}).status_code == status
    assert desk.votes() == []


def test_broken_bytes_in_a_reason_are_kept_as_signs(desk: Desk) -> None:
    ada = browser(desk)
    ada.join()
    body = f"csrf={ada.field('csrf')}&assignment={ada.field('assignment')}&choice=left&reason=a%00b%ff%E2%80%AEc"
    ada.client.post("/vote", content=body.encode(), headers={"content-type": "application/x-www-form-urlencoded"})
    assert desk.votes()[0].reason == "a[U+0000]b\ufffd[U+202E]c"


@pytest.mark.parametrize("name", ["", "   ", "\x00", "x" * 81])
def test_a_name_that_is_none_is_asked_again(name: str, desk: Desk) -> None:
    ada = browser(desk)
    ada.get()
    assert "1 to 80 printable characters" in ada.post("/join", name=name)
    assert desk.annotators() == []


def test_a_name_with_markup_is_shown_as_text(desk: Desk) -> None:
    ada = browser(desk)
    ada.join('<img src=x onerror=alert(1)> "Ada"')
    assert "<img" not in ada.page
    assert "&lt;img" in ada.page


def test_leaving_forgets_who_it_was(desk: Desk) -> None:
    ada = browser(desk)
    ada.join()
    ada.post("/leave")
    assert 'name="name"' in ada.get()


# -- a desk that others can reach ----------------------------------------------------------------------------------------


def test_a_shared_desk_opens_by_its_link_alone(desk: Desk) -> None:
    eve = browser(desk, shared=True)
    for path in ("/", "/guidelines", "/join/", "/join/wrong", "/as/wrong"):
        assert eve.client.get(path).status_code in (403, 404)
    link = f"/join/{Keys(SECRET).access}"
    page = eve.get(link)
    csrf = eve.field("csrf")
    assert eve.client.post("/join", data={"csrf": csrf, "name": "Eve", "access": "wrong"}).status_code == 403
    assert desk.annotators() == []
    eve.page = page
    assert "Be fair" in eve.post("/join", name="Eve")
    assert "ballot" in eve.get(), "the cookie is enough from here on"


def test_a_name_on_a_shared_desk_is_claimed_once_and_its_own_link_opens_it(desk: Desk) -> None:
    link = f"/join/{Keys(SECRET).access}"
    ada, eve = browser(desk, shared=True), browser(desk, shared=True)
    ada.get(link)
    own = re.search(r"/as/[\w-]+", ada.post("/join", name="Ada"))
    assert own is not None
    eve.get(link)
    assert "votes as ADA already" in eve.post("/join", name="ADA")
    assert eve.status == 409
    again = browser(desk, shared=True)
    assert "<b>Ada</b>" in again.get(own.group())
    again.post("/join")
    assert "Ada" in again.get()
    assert len(desk.annotators()) == 1


def test_the_secret_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    made = desk_secret(tmp_path)
    assert desk_secret(tmp_path) == made
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0
    (tmp_path / "secret").write_bytes(b"short")
    with pytest.raises(UserError, match="not whole"):
        desk_secret(tmp_path)


def test_tokens_differ_from_desk_to_desk_and_from_session_to_session() -> None:
    one, other = Keys(SECRET), Keys(bytes(reversed(SECRET)))
    assert len({one.access, other.access, one.cookie_name, other.cookie_name}) == 4


# -- the address ---------------------------------------------------------------------------------------------------------


def test_it_listens_on_this_machine_unless_told_otherwise() -> None:
    address = listen(port=0)
    assert address.socket.getsockname()[0] == "127.0.0.1"
    assert address.link(Keys(SECRET)) == f"{address.url}/"
    assert not address.shared
    address.socket.close()


def test_another_bind_has_a_token_in_its_link() -> None:
    address = listen("0.0.0.0", 0, names=["desk.example"])
    assert address.shared
    assert address.link(Keys(SECRET)).startswith("http://desk.example:")
    assert address.link(Keys(SECRET)).endswith(f"/join/{Keys(SECRET).access}")
    assert {"desk.example", "localhost"} <= address.hosts
    address.socket.close()


def test_a_port_that_is_taken_is_told_and_the_usual_one_gives_way() -> None:
    first = listen()
    second = listen()
    assert first.url != second.url
    with pytest.raises(UserError, match="Name another --port"):
        listen(port=first.socket.getsockname()[1])
    for port in (-1, 70_000):
        with pytest.raises(UserError):
            listen(port=port)
    with pytest.raises(UserError, match="--host"):
        listen("203.0.113.7", 0)
    first.socket.close()
    second.socket.close()


# -- many at once --------------------------------------------------------------------------------------------------------


def test_twenty_people_vote_at_once(tmp_path: Path) -> None:
    desk = desks.desk(tmp_path / "desk", [desks.item(i) for i in range(5)], votes_per_item=20)
    app = make_app(desk, hosts=LOOPBACK, secret=SECRET)
    acknowledged: list[tuple[str, str]] = []

    def person(n: int) -> None:
        me = Browser(app)
        me.join(f"person {n}")
        while assignment := me.field("assignment"):
            if "Saved." in me.vote(["left", "right", "tie"][n % 3]):
                acknowledged.append((f"person {n}", assignment))

    people = [threading.Thread(target=person, args=(n,)) for n in range(20)]
    for p in people:
        p.start()
    for p in people:
        p.join()
    votes = desk.votes()
    assert len(votes) == 100
    assert sorted((v.annotator, str(v.assignment)) for v in votes) == sorted(acknowledged)


# -- answers that are made meanwhile -------------------------------------------------------------------------------------


class Slowly:
    """A source of answers that has one more ready whenever it is told to."""

    def __init__(self, desk: Desk, total: int) -> None:
        self.desk, self.ready, self.total, self.asked = desk, 0, total, [0]
        self.failed = ""

    def more(self) -> None:
        self.desk.add_items([desks.item(self.ready)])
        self.ready += 1

    def state(self) -> LiveState:
        return LiveState(self.ready, self.total, self.ready == self.total or bool(self.failed), self.failed)

    def wanted(self, left: int) -> None:
        self.asked.append(left)


def test_the_page_waits_for_answers_and_goes_on(tmp_path: Path) -> None:
    desk = desks.desk(tmp_path / "desk", [])
    live = Slowly(desk, 2)
    ada = browser(desk, live=live)
    assert "are being written" in ada.join()
    live.more()
    assert "ballot" in ada.get()
    assert "of 2" in re.sub(r"<[^>]*>", "", ada.page), "what is to come counts"
    assert "are being written" in ada.vote("left")
    live.more()
    ada.get()
    assert "That was all" in ada.vote("left")
    assert set(live.asked) == {0, 1}


def test_a_model_that_fails_is_told_on_the_page(tmp_path: Path) -> None:
    desk = desks.desk(tmp_path / "desk", [])
    live = Slowly(desk, 2)
    live.failed = "Sampling ended: out of memory"
    assert "out of memory" in browser(desk, live=live).join()


def test_a_desk_that_cannot_be_written_says_that_nothing_was_saved(desk: Desk, monkeypatch: Any) -> None:
    ada = browser(desk)
    ada.join()

    def full(*_: Any) -> None:
        raise UserError("the desk cannot be read or written: disk full", remedy="Is there room on the disk?")

    monkeypatch.setattr(desk, "vote", full)
    answer = ada.vote("left")
    assert ada.status == 503
    assert "Nothing was saved" in answer
    assert "disk full" in answer


def test_a_request_is_quick(desk: Desk) -> None:
    long = make_item("q", ["word " * 5000, "**b** " * 5000])
    desk.add_items([long, *(desks.item(i) for i in range(10, 40))])
    ada = browser(desk)
    ada.join()
    began = time.monotonic()
    for _ in range(30):
        ada.vote("tie")
    assert (time.monotonic() - began) / 30 < 0.5
