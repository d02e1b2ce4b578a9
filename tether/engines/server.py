"""`Server`: one vLLM server as the sampler sees it: what it serves, which weights it holds, whether it still answers."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tether import http_json
from tether.engines import wire
from tether.errors import UserError
from tether.http_json import Final, Passing

QUICK_S = 30.0  # for questions that cost a server nothing
LORA_NEEDS = "Start it with --enable-lora --max-lora-rank RANK, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment."
RELOAD_NEEDS = "Start it with VLLM_SERVER_DEV_MODE=1 in its environment, within reach of nobody else; or train an adapter (lora)."
# Says more than a tokenizer's kind: blanks, digits, accents, what lies outside the basic plane.
SENTENCE = "The quick brown fox:  12 + 345 = 357;\n\tna\u00efve caf\u00e9 \u2014 \U0001f98a done."


class Server:
    """`url` is the address without /v1. `model` is the name that it serves the model under; None: the first that it lists.

    `holds` names the weights that it has been given; empty: whoever answers there may have any. `load` counts the tokens that it is asked
    for at the moment. `log` is the file that a server which was started by the run writes to.
    """

    def __init__(
        self, url: str, *, model: str | None = None, key_env: str | None = None, timeout_s: float = 600.0, log: Path | None = None
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model, self.key_env, self.timeout_s, self.log = model, key_env, timeout_s, log
        self.positions: int | None = None
        self.holds: set[str] = set()
        self.load = 0
        self.alive = True
        self._lock = threading.Lock()  # weights arrive one at a time
        self._adapters: set[str] = set()

    # -- at the start --------------------------------------------------------------------------------------------------

    def meet(self, tokenizer: Any, prompt: Sequence[int], temperature: float) -> dict[int, float]:
        """Find out what it serves. Returns the log-probs of the likeliest tokens after the prompt, at temperature 1.

        UserError, in one sentence, for another vocabulary, or without what sampling needs. Raises Passing when it does not answer.
        """
        try:
            self._choose_model(self._ask("/v1/models", timeout_s=QUICK_S))
            self._compare_tokens(tokenizer)
            assert self.model is not None
            bodies = [wire.probe(prompt, self.model, t) for t in (temperature, 1.0)]
            warm, plain = (self._ask("/v1/completions", body) for body in bodies)
            wire.check_probe(warm, plain, prompt, temperature, self.url)
            return wire.likeliest(plain, prompt, self.url)
        except Final as error:
            raise UserError(f"the server refuses a first question ({error})", where=self.url, remedy="Is it vLLM's own server?") from None
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise UserError(
                f"what answers there is not vLLM's server ({type(error).__name__}: {error})", where=self.url, remedy="Check engine.urls."
            ) from None

    def _choose_model(self, listed: Mapping[str, Any]) -> None:
        models = [m for m in listed["data"] if not m.get("parent")]  # an adapter has a parent
        names = [str(m["id"]) for m in models]
        if self.model is None and names:
            self.model = names[0]
        if self.model not in names:
            raise UserError(
                f"the server has no model {self.model!r}",
                where=self.url,
                remedy=f"It serves: {', '.join(names) or 'none'}; set engine.model.",
            )
        self.positions = models[names.index(self.model)].get("max_model_len")

    def _compare_tokens(self, tokenizer: Any) -> None:
        """The same words must be the same tokens. A server without /tokenize shows it by its log-probs at the first step."""
        try:
            body = {"model": self.model, "prompt": SENTENCE, "add_special_tokens": False}
            theirs = self._ask("/tokenize", body, timeout_s=QUICK_S)["tokens"]
        except Final:
            return
        ours = tokenizer.encode(SENTENCE, add_special_tokens=False)
        if list(theirs) != list(ours):
            raise UserError(
                f"the server's model {self.model!r} has another vocabulary than the model that is trained",
                where=self.url,
                remedy="Start it with the model that the recipe names.",
            )

    # -- weights -------------------------------------------------------------------------------------------------------

    def take_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter under a name of its own; what is being sampled with others goes on."""
        with self._lock:
            if name in self.holds:
                return
            try:
                self._tell("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
            except Final as error:
                if "already been loaded" not in str(error):  # by a try whose answer was lost
                    raise UserError(f"the server does not take an adapter ({error})", where=self.url, remedy=LORA_NEEDS) from None
            self._adapters.add(name)
            self.holds.add(name)

    def take_weights(self, name: str, folder: Path) -> None:
        """Put a model folder's weights over its own. Nothing may be sampled from it meanwhile."""
        with self._lock:
            if name in self.holds:
                return
            self.holds.clear()
            try:
                self._tell("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
                self._tell("/reset_prefix_cache", {})
            except Final as error:
                raise UserError(f"the server does not take weights ({error})", where=self.url, remedy=RELOAD_NEEDS) from None
            self.holds.add(name)

    def forget(self, keep: Collection[str]) -> None:
        """Let go of adapters that nobody samples with any more."""
        for name in sorted(self._adapters - set(keep)):
            try:
                self._tell("/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=QUICK_S)
            except (Final, Passing):
                continue  # it takes memory there and harms nothing
            self._adapters.discard(name)
            self.holds.discard(name)

    # -- sampling ------------------------------------------------------------------------------------------------------

    def complete(self, body: Mapping[str, Any]) -> Any:
        """The reply to `wire.question`."""
        return self._ask("/v1/completions", body)

    def _ask(self, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        return http_json.ask(self.url + path, body, timeout_s=timeout_s or self.timeout_s, key_env=self.key_env)

    def _tell(self, path: str, body: Any, timeout_s: float | None = None) -> None:
        http_json.tell(self.url + path, body, timeout_s=timeout_s or self.timeout_s, key_env=self.key_env)
