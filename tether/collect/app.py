"""The desk as a web application: pages made on the server, plain forms, and a few lines of script for keys.

A vote is said to be saved after `Desk.vote` has returned, which is after it is on the disk. Everything that waits for the disk or
takes long runs beside the event loop, so that one slow page does not hold up twenty people.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tether.collect import pages
from tether.collect.ballots import MAX_REASON, AlreadyVoted, BadBallot, Ballot
from tether.collect.desk import Annotator, Desk
from tether.collect.guard import Guard, Keys, Session, equal, new_visit
from tether.collect.marks import one_line, visible
from tether.collect.pages import Entered, Notice
from tether.collect.render import render
from tether.errors import UserError

NOTICES = {
    "saved": Notice("Saved."),
    "undone": Notice("Taken back: here it is again."),
    "nothing": Notice("There is no vote to take back.", "watch"),
    "already": Notice("That page was voted on before, and the first vote stays. Here is what comes next.", "watch"),
    "stale": Notice("That page was out of date and nothing was saved. Here is what is yours to vote on now.", "watch"),
}
YEAR_S = 31_536_000


@dataclass(frozen=True)
class LiveState:
    """Answers that are sampled while people vote: `ready` of `total` prompts have theirs."""

    ready: int
    total: int
    finished: bool
    failed: str = ""


class Live(Protocol):
    """Whoever makes more answers; `wanted` says how many items are left for whoever looks at the desk just now."""

    def state(self) -> LiveState: ...
    def wanted(self, left: int) -> None: ...


class Stop(Exception):
    """A page in place of the one that was asked for."""

    def __init__(self, response: Response) -> None:
        self.response = response


Form = Mapping[str, list[str]]


class Site:
    """`shared`: more than this machine reaches the desk, so its link or an annotator's own is needed, and a name is claimed once."""

    def __init__(self, desk: Desk, secret: bytes, *, shared: bool, live: Live | None) -> None:
        self.desk, self.keys, self.shared, self.live = desk, Keys(secret), shared, live
        self._claiming = threading.Lock()

    # -- pages ---------------------------------------------------------------------------------------------------------

    async def front(self, request: Request) -> Response:
        session, annotator = await self._who(request)
        if annotator is None:
            return self._start(session, access="")
        return await self._turn(session, annotator, notice=NOTICES.get(request.query_params.get("was", "")))

    async def guidelines(self, request: Request) -> Response:
        session, annotator = await self._who(request)
        if annotator is None:
            return self._start(session, access="")
        made = await run_in_threadpool(render, self.desk.settings.guidelines, under=0, breaks=False)
        progress = await run_in_threadpool(self._progress, annotator.id)
        link = f"{request.url.scheme}://{request.headers['host']}/as/{annotator.token}" if self.shared else ""
        return self._page("guidelines.html", session, annotator, guidelines=made, progress=progress, link=link)

    async def by_link(self, request: Request) -> Response:
        """The desk's own link. A button follows, because a browser would not send back a cookie set on the way from another site."""
        session, _ = await self._who(request)
        return self._start(session, access=request.path_params["access"])

    async def by_own_link(self, request: Request) -> Response:
        session, _ = await self._who(request)
        token = request.path_params["token"]
        known = await run_in_threadpool(self.desk.by_token, token)
        if known is None:
            return self._closed("This link is not known", "Ask whoever runs the desk for a new one.", 404)
        return self._start(session, access="", known=known.name, token=token)

    async def file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in pages.STATIC:
            raise HTTPException(404)
        return Response(
            pages.static_files()[name],
            media_type=pages.STATIC[name],
            headers={"cache-control": f"public, max-age={YEAR_S}, immutable"},
        )

    # -- forms ---------------------------------------------------------------------------------------------------------

    async def join(self, request: Request) -> Response:
        session, form = await self._form(request)
        access, token = _one(form, "access"), _one(form, "token")
        if token:
            annotator = await run_in_threadpool(self.desk.by_token, token)
            if annotator is None:
                return self._closed("This link is not known", "Ask whoever runs the desk for a new one.", 404)
        elif self.shared and not equal(access, self.keys.access):
            return self._needs_link()
        else:
            name = one_line(_one(form, "name"))
            try:
                annotator = await run_in_threadpool(self._claim, name)
            except UserError as error:
                return self._start(session, access=access, name=name, notice=Notice(_sentence(error), "bad"), status=422)
            if annotator is None:
                words = f"Somebody votes as {name} already. If that is you, use your own link; if not, choose another name."
                return self._start(session, access=access, name=name, notice=Notice(words, "bad"), status=409)
        # A new visit: nobody can have planted this session.
        joined = Session(new_visit(), annotator.token)
        response = RedirectResponse("/guidelines" if self.desk.settings.guidelines.strip() else "/", 303)
        response.headers["set-cookie"] = self.keys.set_cookie(joined)
        return response

    def _claim(self, name: str) -> Annotator | None:
        with self._claiming:
            if self.shared and any(a.name.casefold() == name.casefold() for a in self.desk.annotators()):
                return None
            return self.desk.annotator(name)

    async def vote(self, request: Request) -> Response:
        session, form = await self._form(request)
        annotator = await self._annotator(session)
        entered = _entered(form)
        try:
            ballot = self._ballot(form, entered)
            await run_in_threadpool(self.desk.vote, annotator.id, ballot)
        except AlreadyVoted:
            return RedirectResponse("/?was=already", 303)
        except BadBallot as error:
            notice = Notice(f"Not saved: {_sentence(error)}", "bad")
            return await self._turn(session, annotator, notice=notice, entered=entered, about=_one(form, "assignment"))
        return RedirectResponse("/?was=saved", 303)

    def _ballot(self, form: Form, entered: Entered) -> Ballot:
        reasons = [self.desk.settings.reasons[i] for i in sorted(entered.tags) if i < len(self.desk.settings.reasons)]
        own = visible(entered.reason).strip()
        reason = "; ".join([*reasons, *([own] if own else [])])
        if len(reason) > MAX_REASON:
            raise BadBallot(f"the reason has {len(reason)} characters, and {MAX_REASON} is the most", remedy="Shorten it.")
        choice: Any = _one(form, "choice")
        ranks = None
        count = sum(map(_is_rank, form))
        if choice == "ranking":
            ranks = _dense(tuple(entered.ranks.get(number) for number in range(1, count + 1)))
        elif choice == "tie" and count:
            choice, ranks = "ranking", (1,) * count
        strength = int(entered.strength) if choice in ("left", "right") and entered.strength else None
        if choice in ("", "none"):
            raise BadBallot("nothing was chosen", remedy="Choose one of the buttons below.")
        assignment = _one(form, "assignment")
        if not (assignment.isascii() and assignment.isdigit() and len(assignment) < 16):
            raise BadBallot("the page did not say what it was about", remedy="Load it again.")
        return Ballot(int(assignment), choice, ranks, strength, reason)

    async def undo(self, request: Request) -> Response:
        session, _ = await self._form(request)
        annotator = await self._annotator(session)
        shown = await run_in_threadpool(self.desk.undo, annotator.id)
        return RedirectResponse("/?was=undone" if shown is not None else "/?was=nothing", 303)

    async def leave(self, request: Request) -> Response:
        await self._form(request)
        response = RedirectResponse("/", 303)
        response.headers["set-cookie"] = self.keys.set_cookie(Session(new_visit()))
        return response

    # -- what they are made of -----------------------------------------------------------------------------------------

    async def _turn(
        self, session: Session, annotator: Annotator, *, notice: Notice | None, entered: Entered | None = None, about: str = ""
    ) -> Response:
        """The page that is next for an annotator; what they `entered` on page `about` is filled in if that is the one."""
        return await run_in_threadpool(self._turn_now, session, annotator, notice, entered, about)

    def _turn_now(self, session: Session, annotator: Annotator, notice: Notice | None, entered: Entered | None, about: str) -> Response:
        # The state first: what is ready by then is found on the desk.
        state = self.live.state() if self.live is not None else None
        shown = self.desk.next(annotator.id)
        if self.live is not None:
            self.live.wanted(self.desk.progress(annotator.id).left)
        status = 200
        if entered is not None:
            status = 422
            if shown is None or str(shown.assignment) != about:
                entered, notice, status = None, NOTICES["stale"], 409
        more: dict[str, Any] = {"progress": self._progress(annotator.id), "notice": notice, "status": status}
        if shown is not None:
            template, values = pages.ballot_page(shown, self.desk.settings, entered or Entered())
            return self._page(template, session, annotator, **values, **more)
        if state is not None and not state.finished:
            return self._page("waiting.html", session, annotator, live=state, **more)
        return self._page("finished.html", session, annotator, failed=state.failed if state else "", **more)

    def _progress(self, annotator: int) -> Mapping[str, int]:
        found = self.desk.progress(annotator)
        total = found.total
        if self.live is not None:
            state = self.live.state()
            total = max(total, total + (state.total - state.ready) * self.desk.settings.votes_per_item)
        return {"done": found.done, "total": total, "mine": found.mine}

    def _page(self, template: str, session: Session, annotator: Annotator | None, *, status: int = 200, **values: Any) -> Response:
        made = pages.page(template, annotator=annotator, csrf=self.keys.csrf(session), **values)
        return HTMLResponse(made, status, {"set-cookie": self.keys.set_cookie(session)})

    def _start(
        self,
        session: Session,
        *,
        access: str,
        known: str = "",
        token: str = "",
        name: str = "",
        notice: Notice | None = None,
        status: int = 200,
    ) -> Response:
        if self.shared and not known and not equal(access, self.keys.access):
            return self._needs_link()
        return self._page(
            "start.html", session, None, status=status, access=access, known=known, token=token, name=visible(name), notice=notice
        )

    def _needs_link(self) -> Response:
        return self._closed(
            "This desk opens by its link", "Use the whole link that you were given, or ask whoever runs the desk for it.", 403
        )

    def _closed(self, heading: str, text: str, status: int, *, back: bool = False) -> Response:
        return HTMLResponse(pages.page("closed.html", heading=heading, text=text, back=back), status)

    async def _who(self, request: Request) -> tuple[Session, Annotator | None]:
        session = self.keys.session(request.headers.get("cookie", ""))
        if session is None:
            return Session(new_visit()), None
        annotator = await run_in_threadpool(self.desk.by_token, session.token) if session.token else None
        return session if annotator else Session(session.visit), annotator

    async def _annotator(self, session: Session) -> Annotator:
        found = await run_in_threadpool(self.desk.by_token, session.token) if session.token else None
        if found is None:
            raise Stop(RedirectResponse("/", 303))
        return found

    async def _form(self, request: Request) -> tuple[Session, Form]:
        """The session and the fields of a form that came from a page of this session."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/x-www-form-urlencoded":
            raise Stop(self._closed("That was no form of the desk", "Nothing was saved.", 415, back=True))
        raw = (await request.body()).decode("ascii", "replace")
        try:
            form = parse_qs(raw, keep_blank_values=True, errors="replace", max_num_fields=200)
        except ValueError:
            raise Stop(self._closed("That was no form of the desk", "It has too many fields. Nothing was saved.", 400, back=True)) from None
        session = self.keys.session(request.headers.get("cookie", ""))
        if session is None:
            words = "Nothing was saved, because the browser did not send the desk's cookie. Allow cookies for this page, then begin again."
            raise Stop(self._closed("The desk does not know this browser", words, 403, back=True))
        if not self.keys.is_csrf(session, _one(form, "csrf")):
            words = "Nothing was saved, because the page was opened under another name or before the desk was moved. Open it again."
            raise Stop(self._closed("That page was out of date", words, 403, back=True))
        return session, form


def _one(form: Form, name: str) -> str:
    return form.get(name, [""])[0].replace("\r\n", "\n")


def _sentence(error: UserError) -> str:
    return " ".join(part if part.endswith((".", "!", "?")) else f"{part}." for part in (error.what, error.remedy) if part)


def _entered(form: Form) -> Entered:
    strength = _one(form, "strength")
    ranks = {int(name[5:]) + 1: int(_one(form, name)) for name in form if _is_rank(name) and _small(_one(form, name))}
    tags = frozenset(int(t) for t in form.get("tag", []) if _small(t))
    return Entered(strength if strength in ("1", "2", "3") else "", _one(form, "reason"), tags, ranks)


def _is_rank(name: str) -> bool:
    return name.startswith("rank_") and _small(name[5:])


def _small(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 3


def _dense(ranks: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Places without gaps: 2, 5, 5 says the same as 1, 2, 2.

    >>> _dense((5, None, 2, 5))
    (2, None, 1, 2)
    """
    levels = sorted({r for r in ranks if r is not None})
    return tuple(None if r is None else levels.index(r) + 1 for r in ranks)


# -- the application -----------------------------------------------------------------------------------------------------

Handler = Callable[[Request], Awaitable[Response]]


def make_app(desk: Desk, *, hosts: frozenset[str], secret: bytes, shared: bool = False, live: Live | None = None) -> ASGIApp:
    """The desk as an ASGI application that answers to the host names in `hosts`, behind its `Guard`."""
    site = Site(desk, secret, shared=shared, live=live)

    def told(handler: Handler) -> Handler:
        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except Stop as stop:
                return stop.response
            except UserError as error:
                return site._closed("The desk could not do that", f"Nothing was saved: {_sentence(error)}", 503, back=True)

        return handle

    async def missing(request: Request, error: Exception) -> Response:
        return site._closed("There is no such page", "The desk has one page, and it knows what is next.", 404, back=True)

    get = {"/": site.front, "/guidelines": site.guidelines, "/join/{access}": site.by_link, "/as/{token}": site.by_own_link}
    get["/static/{name}"] = site.file
    post = {"/join": site.join, "/vote": site.vote, "/undo": site.undo, "/leave": site.leave}
    routes = [Route(path, told(f), methods=["GET"]) for path, f in get.items()]
    routes += [Route(path, told(f), methods=["POST"]) for path, f in post.items()]
    handlers: Any = {404: missing, 405: missing}
    return Guard(Starlette(routes=routes, exception_handlers=handlers), hosts)
