"""What stands between the desk and the network: which hosts, which origins, how much, and who somebody is.

- A Host header that is not the desk's is refused: a foreign name that resolves to this machine (DNS rebinding) reaches nothing.
- A POST must come from a page of the desk itself (Origin, or Referer where a browser leaves that out), holds at most 64 KiB, and
  carries the token of its session (CSRF). The session is a cookie that scripts cannot read and other sites cannot send.
- Every reply forbids scripts, styles, pictures and frames from anywhere else.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tether.errors import UserError

MAX_BODY = 64 * 1024  # bytes
BODY_WAIT_S = 15.0
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not no-referrer: with it browsers send "Origin: null" from our own forms.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=(), payment=(), usb=()",
}
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
SECRET_FILE = "secret"


class Guard:
    """The desk's application behind its checks (ASGI)."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # the desk has no websockets: the server closes what nobody accepts

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        headers = Headers(scope=scope)
        refusal = self._refusal(scope["method"], headers)
        body = b""
        if refusal is None and scope["method"] == "POST":
            try:
                body = await asyncio.wait_for(_body(headers, receive), BODY_WAIT_S)
            except _TooLarge:
                refusal = 413, f"More than {MAX_BODY // 1024} KiB were sent. Nothing was saved."
            except asyncio.TimeoutError:
                refusal = 408, "The request did not end. Nothing was saved."
        if refusal is not None:
            status, words = refusal
            closing = {"connection": "close"} if status in (408, 413) else None
            await PlainTextResponse(words + "\n", status, closing)(scope, receive, guarded)
            return
        await self.app(scope, _replay(body, receive) if scope["method"] == "POST" else receive, guarded)

    def _refusal(self, method: str, headers: Headers) -> tuple[int, str] | None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or host_name(hosts[0]) not in self.hosts:
            return 400, "This desk does not answer to that host name. Use the address that `tether collect` printed."
        if method not in ("GET", "HEAD", "POST"):
            return 405, "The desk knows GET and POST."
        if method == "POST":
            page = headers.get("origin") or headers.get("referer") or ""
            if urlsplit_netloc(page) != hosts[0].lower():
                return 403, "This was not sent from a page of the desk. Nothing was saved."
            if headers.get("sec-fetch-site", "same-origin") != "same-origin":
                return 403, "This was sent by another site. Nothing was saved."
        return None


class _TooLarge(Exception):
    pass


async def _body(headers: Headers, receive: Receive) -> bytes:
    stated = headers.get("content-length", "0")
    if not stated.isdigit() or int(stated) > MAX_BODY:
        raise _TooLarge
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY:
            raise _TooLarge
        if not message.get("more_body", False):
            break
    return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    given = False

    async def again() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again


def urlsplit_netloc(address: str) -> str:
    """Host and port of an address, "" where it is none.

    >>> urlsplit_netloc("http://Localhost:8321/vote"), urlsplit_netloc("null")
    ('localhost:8321', '')
    """
    try:
        parts = urlsplit(address)
    except ValueError:
        return ""
    return parts.netloc.lower() if parts.scheme in ("http", "https") else ""


def host_name(host: str) -> str:
    """The name in a Host header, without the port. A forwarded port (ssh -L) is another one, so the port is not looked at.

    >>> host_name("localhost:8321"), host_name("[::1]:80"), host_name("evil.example:80")
    ('localhost', '::1', 'evil.example')
    """
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


# -- who somebody is -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Session:
    """`visit` is random for each browser; `token` is the annotator's, "" before they have a name."""

    visit: str
    token: str = ""

    @property
    def cookie(self) -> str:
        return f"{self.visit}.{self.token}"


class Keys:
    """What is made of the desk's secret: the cookie's name, tokens of sessions, the token of the desk's link."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < 32:
            raise ValueError(f"a secret of at least 32 bytes is wanted, got {len(secret)}")
        self._secret = secret
        # Ports of one host share their cookies: two desks on one machine need two names.
        self.cookie_name = f"tether_desk_{self._made('cookie')[:10]}"
        self.access = self._made("access")[:32]

    def _made(self, *parts: str) -> str:
        return hmac.new(self._secret, "\0".join(parts).encode("utf-8", "replace"), hashlib.sha256).hexdigest()

    def csrf(self, session: Session) -> str:
        return self._made("csrf", session.visit, session.token)

    def is_csrf(self, session: Session, given: str) -> bool:
        return bool(session.visit) and equal(given, self.csrf(session))

    def session(self, cookie_header: str) -> Session | None:
        # Read by hand: one odd cookie of another program on this host would make a parser drop ours.
        pairs = (part.strip().partition("=") for part in cookie_header.split(";"))
        value = next((v for name, _, v in pairs if name == self.cookie_name), "")
        visit, _, token = value.partition(".")
        return Session(visit, token) if len(visit) >= 20 else None

    def set_cookie(self, session: Session, *, days: int = 60) -> str:
        """The value of a Set-Cookie header."""
        return f"{self.cookie_name}={session.cookie}; Path=/; HttpOnly; SameSite=Strict; Max-Age={days * 86_400}"


def new_visit() -> str:
    return secrets.token_urlsafe(18)


def equal(one: str, other: str) -> bool:
    """In a time that does not tell how much of it is right."""
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode("utf-8", "replace"))


def desk_secret(folder: Path) -> bytes:
    """The secret of a desk, made once, readable by its owner alone: links and open pages stay valid when the desk is started again."""
    path = folder / SECRET_FILE
    try:
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            known = path.read_bytes()
            if len(known) < 32:
                remedy = "Remove it: a new one is made, and links that were handed out must be handed out again."
                raise UserError("the secret of the desk is not whole", where=str(path), remedy=remedy) from None
            return known
        made = secrets.token_bytes(32)
        with os.fdopen(handle, "wb") as file:
            file.write(made)
            file.flush()
            os.fsync(file.fileno())
        return made
    except OSError as error:
        raise UserError(f"the secret of the desk cannot be kept: {error.strerror}", where=str(path)) from error
