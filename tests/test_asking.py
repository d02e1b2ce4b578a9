"""Whom a judge asks: an endpoint, with its key and its failures, or a model in this process."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import save_tiny
from tether.engines.local import LocalSampler
from tether.errors import UserError
from tether.models import load_model
from tether.rewards.asking import Endpoint, LocalModel
from tether.rewards.judge import PairJudge, PrincipleJudge


class Handler(http.server.BaseHTTPRequestHandler):
    plan: Any = None

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, reply = type(self).plan(self.path, self.headers, body)
        data = reply.encode()
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}/v1"
    httpd.shutdown()
    httpd.server_close()


def chat_reply(text: Any) -> str:
    return json.dumps({"choices": [{"message": {"content": text}}]})


def test_an_endpoint_is_asked_with_its_key_and_tried_again(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def plan(path: str, headers: Any, body: Any) -> tuple[int, str]:
        seen.append((path, headers["Authorization"], body["model"], body["messages"][0]["content"]))
        return (503, "busy") if len(seen) == 1 else (200, chat_reply("[[A]]"))

    Handler.plan = staticmethod(plan)
    monkeypatch.setenv("JUDGE_KEY", "k")
    ask = Endpoint(server, "m", key_env="JUDGE_KEY", wait_s=0.01)
    assert ask([[{"role": "user", "content": "hi"}]]) == ["[[A]]"]
    assert seen == [("/v1/chat/completions", "Bearer k", "m", "hi")] * 2
    assert "k" not in [str(v) for v in vars(ask).values()]


@pytest.mark.parametrize(
    "reply, why",
    [
        ((503, "busy"), "HTTP 503"),
        ((401, "no"), "HTTP 401"),
        ((302, ""), "HTTP 302"),
        ((200, "no json"), "JSONDecodeError"),
        ((200, "{}"), "KeyError"),
        ((200, chat_reply(None)), "no text"),
    ],
)
def test_failures_of_an_endpoint_are_no_replies(server: str, reply: tuple[int, str], why: str) -> None:
    Handler.plan = staticmethod(lambda *_: reply)
    ask = Endpoint(server, "m", retries=1, wait_s=0.01)
    assert ask([[{"role": "user", "content": "hi"}]]) == [None]
    assert why in ask.failures[0]
    with pytest.raises(UserError, match=f"no reply at all.*{why}"):
        PairJudge(ask).judge([("p", "a", "b")])


def test_an_endpoint_that_is_not_there() -> None:
    ask = Endpoint("http://127.0.0.1:9", "m", retries=0, timeout_s=2)
    assert ask([[{"role": "user", "content": "hi"}]] * 2) == [None, None]
    with pytest.raises(UserError, match="no http address"):
        Endpoint("file:///etc/passwd", "m")
    with pytest.raises(UserError, match="holds no key"):
        Endpoint("http://x", "m", key_env="A_VARIABLE_THAT_IS_NOT_SET")


def test_a_model_in_this_process_can_be_asked(tmp_path: Path) -> None:
    from tether.chat import Codec

    model, tokenizer = load_model(save_tiny(tmp_path / "m"))
    asker = LocalModel(LocalSampler(model, tokenizer, precision="fp32"), Codec(tokenizer), max_tokens=4)
    question = [{"role": "user", "content": "w6 w7"}]
    replies = asker([question, question, question])  # type: ignore[list-item]
    assert replies == asker([question, question, question])  # type: ignore[list-item]
    assert len(set(replies)) > 1  # three votes, not one three times
    judge = PrincipleJudge(asker, ["x"], max_invalid=1.0)
    assert judge(["p"], ["a"]) == [None]  # a tiny model says nothing that is a vote
