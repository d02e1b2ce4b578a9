"""The desk over HTTP: whom it answers, and where it listens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.desk_visits import BASE, SECRET, browser, four_pairs
from tether.collect.app import make_app
from tether.collect.desk import Desk
from tether.collect.guard import LOOPBACK, Keys, desk_secret
from tether.collect.serving import listen
from tether.errors import UserError


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = four_pairs(tmp_path)
    yield made
    made.close()


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
