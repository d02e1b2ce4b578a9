"""JSON over plain HTTP: one question, one answer. Redirects are refused: a key would go with them. Torch-free."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from tether.errors import UserError

MAX_ANSWER = 1 << 30  # bytes; more is no answer of a model


class Passing(OSError):
    """A failure that may pass: no connection, no answer in time, a busy or broken server (429, 5xx)."""


class Final(Exception):
    """A refusal that trying again does not mend. `status` is the HTTP status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def is_address(url: str) -> bool:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme in ("http", "https") and bool(parts.netloc)


def check_key(key_env: str | None, where: str) -> None:
    """UserError unless the environment variable, if one is named, holds something."""
    if key_env is not None and not os.environ.get(key_env):
        raise UserError(f"the environment variable {key_env} holds no key", where=where, remedy=f"export {key_env}=...")


def ask(url: str, body: Any = None, *, timeout_s: float, key_env: str | None = None, limit: int = MAX_ANSWER) -> Any:
    """What the address answers, read as JSON: GET, or POST with a `body`.

    `key_env` names the environment variable that holds the bearer key; `limit` bounds the answer in bytes. Raises Passing, Final, or
    ValueError for an answer that is not JSON.
    """
    return json.loads(tell(url, body, timeout_s=timeout_s, key_env=key_env, limit=limit))


def tell(url: str, body: Any = None, *, timeout_s: float, key_env: str | None = None, limit: int = MAX_ANSWER) -> str:
    """As `ask`, for an answer that is any text, or none."""
    headers = {"Content-Type": "application/json"}
    if key_env is not None:
        headers["Authorization"] = f"Bearer {os.environ[key_env]}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method="GET" if data is None else "POST")
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            return str(response.read(limit).decode("utf-8", errors="replace"))
    except urllib.error.HTTPError as error:
        reason = f"HTTP {error.code}{_reason(error)}"
        if error.code == 429 or error.code >= 500:
            raise Passing(reason) from None
        raise Final(reason, error.code) from None
    except urllib.error.URLError as error:
        raise Passing(str(error.reason)) from None
    except TimeoutError:
        raise Passing(f"no answer in {timeout_s:g} s") from None
    except (OSError, http.client.HTTPException) as error:  # a connection that broke while it answered
        raise Passing(f"{type(error).__name__}: {error}") from None


def _reason(error: urllib.error.HTTPError) -> str:
    """What the server says of a refusal, at most a line of it."""
    try:
        told: Any = json.loads(error.read(1 << 16))
    except (OSError, ValueError):
        return ""
    finally:
        error.close()
    for key in ("error", "detail", "message"):
        told = told.get(key, told) if isinstance(told, dict) else told
    text = told.get("message") if isinstance(told, dict) else told
    return f": {str(text).strip().splitlines()[0][:300]}" if text else ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None  # becomes an HTTPError


_OPENER = urllib.request.build_opener(_NoRedirect)
