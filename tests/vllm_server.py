"""A stand-in for vLLM's server in tests: its wire format over HTTP, answered by `LocalSampler` from a tiny model.

As vLLM it knows adapters by name, reloads weights from a folder and refuses what it does not know. `calls` keeps what was asked, in
order; what goes wrong is set by attributes.
"""

from __future__ import annotations

import copy
import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import load_file

from tether.engines.local import Completion, LocalSampler, Request
from tether.engines.sampling import Sampling
from tether.models import load_model, load_tokenizer


class FakeVLLM:
    """Serves the model folder under the name `served`; `lora` and `dev` as vLLM's switches for adapters and for weights."""

    def __init__(self, folder: Path, *, served: str = "tiny", lora: bool = True, dev: bool = True) -> None:
        self.model = self.model_of(folder)
        self.tokenizer = load_tokenizer(folder)
        self.end_ids = [self.tokenizer.eos_token_id]
        self.served, self.lora, self.dev = served, lora, dev
        self.adapters: dict[str, Any] = {}
        self.calls: list[tuple[str, Any]] = []
        self.delay_s = 0.0
        self.raw_logprobs = False
        self.ids = True  # whether token ids are returned
        self.shift = 0.0  # added to every log-prob
        self.die_after: int | None = None  # completions until connections are cut
        self.broken: int = 0  # how many of the next completions fail with status 500
        self.vocabulary = 0  # added to what /tokenize says
        self._lock = threading.Lock()
        self._samplers: dict[tuple[int, str], tuple[Any, LocalSampler]] = {}
        self.httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.httpd.server_address[1]}"
        threading.Thread(target=self.httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @staticmethod
    def model_of(folder: Path) -> Any:
        return load_model(folder)[0]

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    def asked(self) -> list[Any]:
        """Bodies of completions that are no probe."""
        return [body for path, body in self.calls if path == "/v1/completions" and body["cache_salt"] != "probe"]

    def forget(self) -> None:
        """As if it had been started anew."""
        self.adapters.clear()

    # -- answers -------------------------------------------------------------------------------------------------------

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/health":
            return 200, ""
        if path == "/v1/models":
            base = {"id": self.served, "root": "somewhere", "parent": None, "max_model_len": 64}
            return 200, {"data": [base, *({"id": name, "parent": self.served} for name in self.adapters)]}
        if path == "/tokenize":
            ids = self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
            return 200, {"tokens": [i + self.vocabulary for i in ids]}
        if path == "/v1/load_lora_adapter" and self.lora:
            if body["lora_name"] in self.adapters:
                return 400, {"error": {"message": f"The lora adapter '{body['lora_name']}' has already been loaded."}}
            self.adapters[body["lora_name"]] = self._adapted(Path(body["lora_path"]))
            return 200, "Success"
        if path == "/v1/unload_lora_adapter" and self.lora:
            return (200, "Success") if self.adapters.pop(body["lora_name"], None) else (404, {"error": {"message": "cannot be found"}})
        if path == "/collective_rpc" and self.dev:
            assert body["method"] == "reload_weights"
            state = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
            self.model.load_state_dict({k: v.float() for k, v in state.items()}, strict=False)
            return 200, {"results": [None]}
        if path == "/reset_prefix_cache" and self.dev:
            return 200, {"success": True}
        if path == "/v1/completions":
            return self._complete(body)
        return 404, {"detail": "Not Found"}

    def _adapted(self, folder: Path) -> Any:
        wrapped = peft.PeftModel.from_pretrained(copy.deepcopy(self.model), str(folder))
        return wrapped.merge_and_unload()

    def _complete(self, body: Any) -> tuple[int, Any]:
        model = self.model if body["model"] == self.served else self.adapters.get(body["model"])
        if model is None:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if self.broken:
            self.broken -= 1
            return 500, {"error": {"message": "EngineCore encountered an issue"}}
        time.sleep(self.delay_s)
        sampling = Sampling(
            max_new_tokens=body["max_tokens"], temperature=body["temperature"], stop=tuple(body["stop"]), ignore_end=body["ignore_eos"]
        )
        ends: Any = self.tokenizer if body["stop"] else [*self.end_ids, *body["stop_token_ids"]]
        with self._lock:
            key = (id(model), str(ends) if isinstance(ends, list) else "")
            if key not in self._samplers:
                self._samplers[key] = (model, LocalSampler(model, ends, precision="fp32"))
            made = self._samplers[key][1].sample([Request(body["prompt"], sampling, body["n"], body["seed"])])
        return 200, {"choices": [self._choice(model, body, c) for c in made]}

    def _choice(self, model: Any, body: Any, c: Completion) -> dict[str, Any]:
        out: dict[str, Any] = {"index": c.sample, "text": c.text or "", "prompt_token_ids": body["prompt"]}
        out["finish_reason"] = "length" if c.finish_reason == "length" else "stop"
        out["stop_reason"] = body["stop"][0] if c.finish_reason == "stop_string" else None
        out["token_ids"] = c.tokens if self.ids else None
        logps = self._table(model, body, c)
        out["logprobs"] = {
            "token_logprobs": [row[t] + self.shift for row, t in zip(logps.tolist(), c.tokens, strict=True)],
            "top_logprobs": [
                {f"token_id:{i}": v for v, i in zip(*(x.tolist() for x in row.topk(max(1, body["logprobs"]))), strict=True)}
                for row in logps
            ],
        }
        return out

    @torch.no_grad()
    def _table(self, model: Any, body: Any, c: Completion) -> torch.Tensor:
        """(T, V) log-probs of every token at every place."""
        ids = torch.tensor([[*body["prompt"], *c.tokens]])
        logits = model(input_ids=ids).logits[0, len(body["prompt"]) - 1 : -1].float()
        heat = 1.0 if self.raw_logprobs or body["temperature"] == 0 else body["temperature"]
        return torch.log_softmax(logits / heat, -1)

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(None)

            def do_POST(self) -> None:
                self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def reply(self, body: Any) -> None:
                if self.path == "/v1/completions" and fake.die_after is not None and body["cache_salt"] != "probe":
                    if fake.die_after == 0:
                        self.close_connection = True
                        self.connection.close()
                        return
                    fake.die_after -= 1
                fake.calls.append((self.path, body))
                status, answer = fake.answer(self.path, body)
                data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler

    def close(self) -> None:
        self.httpd.shutdown()
        self.httpd.server_close()


@contextmanager
def serving(folder: Path, n: int = 1, **settings: Any) -> Iterator[list[FakeVLLM]]:
    fakes = [FakeVLLM(folder, **settings) for _ in range(n)]
    try:
        yield fakes
    finally:
        for fake in fakes:
            fake.close()
