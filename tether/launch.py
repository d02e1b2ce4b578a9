"""Several processes for one command on this machine, by torch's own launcher: what `torchrun` does, without its noise."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tether.errors import UserError
from tether.peers import VERDICT

# After Ctrl-C the ranks finish their step and save, however long that takes; a rank whose peer is gone ends by itself.
GRACE_S = 24 * 3600


def launch(words: Sequence[str], n: int) -> int:
    """Run `tether WORDS` on `n` ranks and return its exit code: that of the rank that spoke, where one went wrong."""
    if n < 1:
        raise UserError(f"must be 1 or more, got {n}", where="--ranks", remedy="It is how many processes share the work.")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch", "torch.distributed", "torch.distributed.elastic"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // n)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    os.environ.setdefault("GLOO_LOG_LEVEL", "FATAL")
    with tempfile.TemporaryDirectory(prefix="tether-ranks-") as folder:
        verdict = Path(folder) / "verdict"
        os.environ[VERDICT] = str(verdict)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=n,
            run_id=f"tether-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.2,
            shutdown_timeout=GRACE_S,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "tether", *words)
        except ChildFailedError as error:
            code = _code(verdict)
            if code is None:
                _, failure = error.get_first_failure()
                print(f"error: {_how(error, failure.exitcode)}", file=sys.stderr)
            return 1 if code is None else code
        except SignalException as stopped:
            return _code(verdict) or 128 + int(stopped.sigval)
        finally:
            os.environ.pop(VERDICT, None)
    return 0


def _code(verdict: Path) -> int | None:
    try:
        return int(verdict.read_text())
    except (OSError, ValueError):
        return None


def _how(error: object, code: int) -> str:
    if code >= 0:
        return f"a rank ended with exit code {code} and without a word"
    name = signal.Signals(-code).name
    memory = ", most often because memory ran out" if name == "SIGKILL" else ""
    return f"all ranks are gone, the first by {name}{memory}; continue with: tether resume RUN"
