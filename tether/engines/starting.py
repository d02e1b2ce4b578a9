"""vLLM servers that a run starts on its own machine, and ends with itself."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from tether import http_json
from tether.engine_recipe import EngineConfig
from tether.engines.server import Server
from tether.engines.wire import NEEDED
from tether.errors import UserError
from tether.launch import free_port

# Ends the server when this process is gone, however it went (Linux); then becomes the server.
LEASH = (
    "import ctypes, os, sys\nlibc = ctypes.CDLL(None)\nif hasattr(libc, 'prctl'): libc.prctl(1, 15)\nos.execv(sys.argv[1], sys.argv[1:])\n"
)
SERVED = "tether"  # the name a started server serves the model under
RANKS_OF_LORA = (8, 16, 32, 64, 128, 256, 320, 512)  # sizes that vLLM makes room for
PREFILL = 4096  # prompt tokens of one step on a CPU
POLL_S = 0.25


def command(
    python: str, model: str, port: int, *, dtype: str, slots: int, positions: int, lora: int | None, adapters: int, cpu: bool
) -> list[str]:
    """How a server is started; `lora` is the rank of the adapters, `adapters` how many are sampled with at the same time.

    `cpu`: vLLM 0.32 on a CPU ends itself when a prompt with a seed is computed in two pieces ("CPU Generator does not use offset").
    """
    # Not `vllm serve`: that asks for the version of a package "vllm", and the build for CPUs has another name.
    out = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", SERVED]
    out += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, "--max-num-seqs", str(slots)]
    out += ["--enable-prefix-caching", "--generation-config", "vllm", *NEEDED.split()]
    out += ["--max-model-len", str(positions)]
    if cpu:
        out += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(PREFILL, positions))]
    if lora is not None:
        room = next((r for r in RANKS_OF_LORA if r >= lora), lora)
        out += ["--enable-lora", "--max-lora-rank", str(room), "--max-loras", str(adapters)]
    return out


def start_servers(
    config: EngineConfig,
    arguments: Callable[[str, int], Sequence[str]],
    folder: Path,
    *,
    whole: bool,
    cpu: bool,
    say: Callable[[str], None],
) -> list[Server]:
    """Start `config.start` servers side by side and wait until all of them answer; they end with the returned servers, or this process.

    `arguments(python, port)` is a server's command line. `whole`: they take all weights, by vLLM's development mode; they listen on
    this machine's own address only. `cpu`: they share this machine's memory with training. Each writes a log under `folder`.
    """
    python = os.path.expanduser(config.python or sys.executable)
    if not (os.path.isfile(python) and os.access(python, os.X_OK)):
        raise UserError("there is no such Python", where=f"engine.python: {python}", remedy="Give the path of a Python that has vLLM.")
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0" if whole else "1"}
    environment["VLLM_SERVER_DEV_MODE"] = "1" if whole else "0"
    if cpu:  # left to itself a server wants nearly all memory for keys and values, and training needs some
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, psutil.virtual_memory().available // (4 * config.start * 2**30))))
    folder.mkdir(parents=True, exist_ok=True)
    began, processes, servers = time.monotonic(), [], []
    say(f"starting {config.start} vLLM server{'s' if config.start > 1 else ''} (a minute or two each) ...")
    try:
        for i in range(config.start):
            port = free_port() if config.port is None else config.port + i
            log = folder / f"server-{port}.log"
            processes.append(_start([*arguments(python, port), *config.options], environment, log))
            server = Server(f"http://127.0.0.1:{port}", model=SERVED, key_env=config.key_env, timeout_s=config.timeout_s, log=log)
            weakref.finalize(server, _end, processes[-1])
            servers.append(server)
        for server, process in zip(servers, processes, strict=True):
            _await(server, process, began + config.start_timeout_s)
    except BaseException:
        for process in processes:
            _end(process)
        raise
    say(f"vLLM answers after {time.monotonic() - began:.0f} s")
    return servers


def _start(words: list[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C in the terminal is for the run, which ends its servers when it is through.
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-c", LEASH, *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )


def _await(server: Server, process: subprocess.Popen[bytes], deadline: float) -> None:
    while True:
        if process.poll() is not None:
            raise UserError(f"the vLLM server ended before it answered{_reason(server.log)}", where=str(server.log), remedy=REMEDY)
        try:
            http_json.tell(f"{server.url}/health", timeout_s=5.0)
            return
        except (http_json.Passing, http_json.Final):
            pass
        if time.monotonic() > deadline:
            raise UserError(
                "the vLLM server does not answer in time", where=str(server.log), remedy="Raise engine.start_timeout_s, or see its log."
            )
        time.sleep(POLL_S)


REMEDY = "Its log says why. Set engine.python to a Python that has vLLM, engine.options to change how it is started, or engine.urls to use one that runs."


def _reason(log: Path | None) -> str:
    """The first error that the log tells of: those after it follow from it."""
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if log is not None else []:
        told = re.search(r"(?:^|[\])] +)((?:\w+\.)*\w*(?:Error|Exception): .+)", line)
        if told and " WARNING " not in line:
            return f": {told[1][:300]}"
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """The server and what it has started."""
    for kind, patience in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            if kind == signal.SIGTERM:
                continue  # a worker may outlive it: the second round is for the rest of the group
            return
