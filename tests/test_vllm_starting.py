"""Servers that a run starts: they answer before it goes on, end with it however it ends, and say why they did not start."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from tether import http_json
from tether.engine_recipe import EngineConfig
from tether.engines.starting import start_servers
from tether.errors import UserError

HEALTHY = """
import http.server, os, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = " ".join([os.environ["VLLM_SERVER_DEV_MODE"], os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"], *sys.argv[1:]]).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(text))); self.end_headers(); self.wfile.write(text)
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
BROKEN = """
import os, sys
print("(APIServer pid=1) WARNING 12-02 [system_utils.py:255] this can cause errors like `OSError: [Errno 24] Too many open files`")
print("(Worker pid=2) ERROR 12-02 [executor.py:953] ValueError: no room for the cache of", os.environ["VLLM_CPU_KVCACHE_SPACE"])
sys.exit("RuntimeError: Engine core initialization failed")
"""


def fake(tmp_path: Path, text: str) -> EngineConfig:
    """A "Python with vLLM" that runs `text`."""
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(text)}")
    path.chmod(0o755)
    return EngineConfig(python=str(path), start=2, options=["--more", "3"], start_timeout_s=20.0)


def arguments(python: str, port: int) -> list[str]:
    return [python, str(port)]


def listening(url: str) -> bool:
    try:
        http_json.tell(f"{url}/health", timeout_s=2.0)
    except http_json.Passing:
        return False
    return True


@pytest.mark.parametrize("whole", [True, False])
def test_servers_answer_before_the_run_goes_on_and_end_with_it(tmp_path: Path, whole: bool) -> None:
    said: list[str] = []
    servers = start_servers(fake(tmp_path, HEALTHY), arguments, tmp_path / "server", whole=whole, cpu=False, say=said.append)
    urls = [s.url for s in servers]
    assert len(set(urls)) == 2
    told = http_json.tell(f"{urls[0]}/health", timeout_s=2.0)
    switches = "1 0" if whole else "0 1"
    assert told == f"{switches} {urls[0].rpartition(':')[2]} --more 3"
    assert all(s.log is not None and s.log.exists() for s in servers)
    assert "vLLM answers" in said[-1]
    del servers
    gc.collect()
    assert not any(listening(url) for url in urls)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ended before it answered: ValueError: no room for the cache of \d+") as error:
        start_servers(fake(tmp_path, BROKEN), arguments, tmp_path / "server", whole=True, cpu=True, say=print)
    assert "server-" in str(error.value)
    with pytest.raises(UserError, match="no such Python"):
        start_servers(EngineConfig(python=str(tmp_path / "nothing")), arguments, tmp_path / "server", whole=True, cpu=True, say=print)


def test_a_server_that_never_answers_is_ended(tmp_path: Path) -> None:
    config = fake(tmp_path, "import time; time.sleep(60)").replace(start_timeout_s=0.5)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(UserError, match="does not answer in time"):
        start_servers(config, arguments, tmp_path / "server", whole=True, cpu=True, say=print)
    assert not [p for p in psutil.Process().children(recursive=True) if p not in before and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="prctl(PR_SET_PDEATHSIG), which ends a server when its parent is killed, is in Linux alone"
)
def test_a_run_that_is_killed_leaves_no_server(tmp_path: Path) -> None:
    config = fake(tmp_path, HEALTHY)
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom tether.engine_recipe import EngineConfig\nfrom tether.engines.starting import start_servers\n"
        f"made = start_servers(EngineConfig(python={config.python!r}), lambda p, port: [p, str(port)], Path({str(tmp_path / 's')!r}), whole=True, cpu=True, say=lambda t: None)\n"
        "print(made[0].url, flush=True)\ntime.sleep(60)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    url = run.stdout.readline().strip()
    assert listening(url)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    end = time.monotonic() + 10
    while listening(url) and time.monotonic() < end:
        time.sleep(0.1)
    assert not listening(url)
