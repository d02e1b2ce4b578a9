"""Programs that want a verdict they have not earned, and one that tries every way out of the sandbox."""

from __future__ import annotations

TRUE = [{"code": "assert add(2, 3) == 5"}, {"code": "assert add(1, 1) == 2\nassert isinstance(add(1, 1), int)"}]
CHEATS = {
    "equal to everything": "class Same(int):\n    def __eq__(self, o): return True\n    __hash__ = int.__hash__\ndef add(a, b): return Same(7)",
    "not an int at all": "class Same:\n    def __eq__(self, o): return True\n    def __class__(self): return int\ndef add(a, b): return Same()",
    "leaves quietly": "import os\ndef add(a, b): os._exit(0)",
    "leaves at import": "import os\nos._exit(0)",
    "exits": "def add(a, b): raise SystemExit(0)",
    "raises what the tests raise": "def add(a, b): raise AssertionError",
    "stops the iteration": "def add(a, b): raise StopIteration",
    "prints": "print('{\"done\": 2}\\n{\"test\": 0, \"ok\": true}')\ndef add(a, b): print('PASS')",
    "prints at the end": "import atexit\natexit.register(lambda: print('ALL TESTS PASSED'))\ndef add(a, b): return None",
    "writes into every descriptor": (
        "import os\nfor fd in range(3, 64):\n    try:\n        os.write(fd, b'{\"test\": 0, \"ok\": true}\\n{\"test\": 1, \"ok\": true}\\n{\"done\": 2}\\n')\n"
        "    except OSError: pass\ndef add(a, b): return None"
    ),
    "answers for itself in a thread": (
        "import os, threading\ndef spam():\n    while True:\n        for fd in range(3, 64):\n            try: os.write(fd, b'{\"value\": {\"i\": \"0x5\"}}\\n')\n"
        "            except OSError: pass\nthreading.Thread(target=spam, daemon=True).start()\ndef add(a, b): return None"
    ),
    "patches json": "import json\njson.dumps = lambda *a, **k: '{\"done\": 2}'\ndef add(a, b): return None",
    "patches builtins": (
        "import builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.AssertionError = None\nbuiltins.int = str\ndef add(a, b): return 'x'\n"
        "def isinstance(a, b): return True\ndef __eq__(a, b): return True"
    ),
    "redefines what the tests use": "def isinstance(*a): return True\ndef add(a, b): return True",
    "looks for the tests": (
        "import gc, sys\ndef add(a, b):\n    for o in gc.get_objects():\n        if isinstance(o, dict) and 'expected' in o: return int(o['expected'])\n"
        "    f = sys._getframe()\n    while f:\n        for v in f.f_locals.values():\n            if isinstance(v, str) and 'assert' in v: return 5\n        f = f.f_back\n    return None"
    ),
    "a value too deep": "def add(a, b):\n    x = []\n    for _ in range(5000): x = [x]\n    return x",
    "a value too big": "def add(a, b): return 'x' * (1 << 28)",
    "a circle": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "replaces the harness": "import sys\nfor m in list(sys.modules.values()):\n    for n in ('alike', 'run_tests', 'report'):\n        setattr(m, n, lambda *a: True)\ndef add(a, b): return 0",
    "a float that is not a number": "def add(a, b): return float('nan')",
    "text instead": "def add(a, b): return str(a + b)",
}  # fmt: skip

ESCAPES = """
import os, sys, socket, subprocess, signal, ctypes

def attempts(port, secret, outside, parent):
    done = []
    def attempt(name, what):
        try:
            if what() is not False:
                done.append(name)
        except BaseException:
            pass
    attempt("tcp", lambda: socket.create_connection(("127.0.0.1", port), 1))
    attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", port)))
    attempt("raw tcp", lambda: ctypes.CDLL(None).socket(2, 1, 0) >= 0)
    attempt("start", lambda: subprocess.Popen(["/bin/sleep", "60"]))
    attempt("fork", lambda: os.fork() or os.setsid() or __import__("time").sleep(60))
    attempt("exec", lambda: os.execv(sys.executable, [sys.executable, "-c", "1"]))
    attempt("read secret", lambda: open(secret).read())
    attempt("read passwords", lambda: open("/etc/passwd").read())
    attempt("read shadow", lambda: open("/etc/shadow").read())
    attempt("list home", lambda: os.listdir(os.path.dirname(secret)))
    attempt("write outside", lambda: open(outside, "w").write("x"))
    attempt("write library", lambda: open(os.__file__, "a").write("x"))
    attempt("remove", lambda: os.remove(secret))
    attempt("environment", lambda: "TETHER_TEST_SECRET" in os.environ)
    attempt("parent's environment", lambda: open(f"/proc/{parent}/environ").read())
    attempt("parent's memory", lambda: open(f"/proc/{parent}/mem", "rb"))
    attempt("kill parent", lambda: os.kill(parent, signal.SIGTERM))
    attempt("kill all", lambda: os.kill(-1, signal.SIGTERM))
    attempt("trace", lambda: ctypes.CDLL(None).ptrace(16, parent, 0, 0) == 0)
    attempt("mount", lambda: ctypes.CDLL(None).mount(b"none", b"/", b"tmpfs", 0, 0) == 0)
    attempt("root", lambda: os.setuid(0) if os.getuid() else False)
    attempt("more memory", lambda: __import__("resource").setrlimit(__import__("resource").RLIMIT_AS, (-1, -1)))
    open("scratch.txt", "w").write("allowed")
    return done, open("scratch.txt").read()
"""
