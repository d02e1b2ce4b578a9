"""Whom a judge asks: an OpenAI-compatible endpoint over plain HTTP, or a model in this process.

An asker takes conversations and gives back one reply each, None where it failed. A failure is never made into a reply.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tether import http_json
from tether.errors import UserError
from tether.messages import Message

Asker = Callable[[Sequence[list[Message]]], Sequence[str | None]]
MAX_REPLY = 4 << 20


class Endpoint:
    """`url` is the base of the API ("http://localhost:8000/v1") or the full address of its chat completions.

    `key_env` names the environment variable that holds the key; the key itself is kept nowhere. Each question gets `timeout_s`
    seconds and `retries` more tries, with growing waits, for failures that may pass (429, 5xx, no connection). `failures` lists the
    last reasons. Redirects to another host are refused: the key goes with them.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key_env: str | None = None,
        temperature: float = 1.0,
        max_tokens: int = 512,
        timeout_s: float = 60.0,
        retries: int = 2,
        parallel: int = 8,
        wait_s: float = 1.0,
    ) -> None:
        if not http_json.is_address(url):
            raise UserError(f"{url!r} is no http address", where="url", remedy="Such as http://localhost:8000/v1")
        http_json.check_key(key_env, "key_env")
        self.url = url if url.rstrip("/").endswith("/chat/completions") else url.rstrip("/") + "/chat/completions"
        self.model, self.key_env, self.temperature, self.max_tokens = model, key_env, temperature, max_tokens
        self.timeout_s, self.retries, self.parallel, self.wait_s = timeout_s, retries, parallel, wait_s
        self.failures: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, conversations: Sequence[list[Message]]) -> list[str | None]:
        if not conversations:
            return []
        with ThreadPoolExecutor(min(self.parallel, len(conversations))) as pool:
            return list(pool.map(self._one, conversations))

    def _one(self, conversation: list[Message]) -> str | None:
        for attempt in range(self.retries + 1):
            try:
                return self._post(conversation)
            except http_json.Final as error:
                self._failed(str(error))
                return None
            except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
                if attempt == self.retries:
                    self._failed(f"{type(error).__name__}: {error}")
                    return None
                time.sleep(self.wait_s * 2**attempt)
        return None

    def _post(self, conversation: list[Message]) -> str:
        body = {"model": self.model, "messages": conversation, "temperature": self.temperature, "max_tokens": self.max_tokens}
        reply = http_json.ask(self.url, body, timeout_s=self.timeout_s, key_env=self.key_env, limit=MAX_REPLY)
        content = reply["choices"][0]["message"]["content"]
        if not isinstance(content, str):
            raise ValueError("the reply has no text")
        return content

    def _failed(self, why: str) -> None:
        with self._lock:
            self.failures = [*self.failures[-19:], why]


def local_model(
    model: str,
    *,
    temperature: float = 1.0,
    max_tokens: int = 128,
    seed: int = 0,
    slots: int = 16,
    precision: str = "auto",
    chat_template: str | None = None,
    trust_remote_code: bool = False,
) -> LocalModel:
    """The model of this name (folder, hub id, GGUF file, "smollm2") as the one asked: a copy of its own, which no training moves.

    `chat_template` is a Jinja file in place of the tokenizer's template; the other settings are those of `LocalModel` and of sampling.
    """
    import torch

    from tether.codec import Codec
    from tether.engines.local import LocalSampler
    from tether.models import load_model
    from tether.precision import choose

    template = None
    if chat_template is not None:
        if not Path(chat_template).is_file():
            raise UserError(
                "there is no such template file", where=f"chat_template: {chat_template}", remedy="Give the path of a Jinja file."
            )
        template = Path(chat_template).read_text(encoding="utf-8")
    loaded: Any
    loaded, tokenizer = load_model(model, trust_remote_code=trust_remote_code)
    codec = Codec(tokenizer, template, generation_config=getattr(loaded, "generation_config", None))
    loaded.to("cuda" if torch.cuda.is_available() else "cpu")
    sampler = LocalSampler(loaded, codec, precision=choose(precision), slots=slots)
    return LocalModel(sampler, codec, temperature=temperature, max_tokens=max_tokens, seed=seed)


class LocalModel:
    """A model in this process as the one asked: a frozen snapshot, not the weights that are being trained.

    `sample` is a `LocalSampler` (or anything with its `sample(requests)`), `codec` the model's `Codec`. A reply depends on
    the conversation, `seed` and how often it was asked in one call, so a resumed run hears the same. A question that leaves no room
    for a reply gets none; `failures` lists the last of them. Over several ranks, which all ask the same, each writes its share of the replies.
    """

    computes = True

    def __init__(self, sampler: Any, codec: Any, *, temperature: float = 1.0, max_tokens: int = 128, seed: int = 0) -> None:
        if max_tokens < 1:
            raise UserError(f"a reply needs at least one token, got {max_tokens}", where="max_tokens")
        self.sampler, self.codec, self.seed = sampler, codec, seed
        self.temperature, self.max_tokens = temperature, max_tokens
        self.failures: list[str] = []

    def __call__(self, conversations: Sequence[list[Message]]) -> list[str | None]:
        from tether.engines.local import Request
        from tether.engines.sampling import Sampling
        from tether.engines.together import sample_together

        sampling = Sampling(max_new_tokens=self.max_tokens, temperature=self.temperature)
        limit = getattr(self.sampler, "positions", None)
        seen: Counter[str] = Counter()  # the same question twice is two votes, with two seeds
        requests: dict[int, Request] = {}
        for i, conversation in enumerate(conversations):
            key = hashlib.sha256(json.dumps(conversation).encode()).hexdigest()
            seen[key] += 1
            request = Request(self.codec.prompt_ids(conversation), sampling, 1, f"{self.seed}/{key}/{seen[key]}")
            if limit is None or request.total <= limit:
                requests[i] = request
            else:
                words = (
                    f"a question of {len(request.prompt)} tokens leaves no room for {self.max_tokens} more in the judge's {limit} positions"
                )
                self.failures = [*self.failures[-19:], words]
        places = list(requests)
        replies: list[str | None] = [None] * len(conversations)
        for completion in sample_together(self.sampler, list(requests.values())) if requests else ():
            replies[places[completion.request]] = self.codec.decode(completion.tokens)
        return replies
