"""The first thing that runs in a sandboxed process: it shuts itself in, then runs the harness. Standard library only.

Started as `python -I -S sandbox_child.py` with a JSON message on standard input. Every step that fails ends the process with a word
on the status pipe: nothing runs half shut in. What is shut:

    limits      processor seconds, address space, file size, open files, processes and threads, no core file
    namespaces  own mounts (a root that holds Python's library, the system's libraries, four devices and a small scratch folder in
                memory), own network without any interface, own process table
    landlock    files: read Python's and the system's libraries, write the scratch folder; no TCP; no signals outside
    seccomp     no sockets, no new processes or programs, no signals to others, no tracing, no mounts, no kernel extras
    user        no capabilities; a user of its own when started by root
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import stat
import struct
import sys
import types
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP = 1, 4, 22, 38, 24
SCRATCH = "/scratch"

# System calls: name -> (x86_64, aarch64); None where an architecture has none.
CALLS: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242),
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "kill": (62, 129), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97), "setns": (308, 268),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432), "mount_setattr": (442, 442),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "settimeofday": (164, 170), "clock_settime": (227, 112), "quotactl": (179, 60),
    "personality": (135, 92), "acct": (163, 89), "syslog": (103, 116), "iopl": (172, None), "ioperm": (173, None),
    "setsid": (112, 157), "setpgid": (109, 154), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
}  # fmt: skip
CLONE, CLONE3, TGKILL = (56, 220), (435, 435), (234, 131)
ARCHES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


class Refused(Exception):
    """A layer could not be put in place."""


def call(name: str, result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise Refused(f"{name}: {os.strerror(code)}")
    return result


def main() -> None:
    config = json.loads(sys.stdin.buffer.read())
    status = config["status_fd"]
    try:
        stdin = os.memfd_create("input") if config.get("stdin") else os.open("/dev/null", os.O_RDONLY)
        if config.get("stdin"):
            os.write(stdin, config["stdin"].encode())
            os.lseek(stdin, 0, os.SEEK_SET)
        os.dup2(stdin, 0)
        os.close(stdin)
        isolate(config)
    except (Refused, OSError, KeyError, ValueError) as error:
        os.write(status, f"refused: {error}".encode())
        os._exit(97)
    os.write(status, b"ok")
    os.close(status)
    for name, text in config["modules"]:
        module = types.ModuleType(name)
        sys.modules[name] = module  # so that the next one can import it, without any file
        exec(compile(text, f"<{name}>", "exec"), module.__dict__)
    module.start(config)


def isolate(config: dict[str, Any]) -> None:
    """All layers, in the order in which each still allows the next. Returns in the process that will run the program."""
    limits(config["limits"])
    root = os.getuid() == 0
    own_user = 1_000_000 + int.from_bytes(os.urandom(3), "big")
    if config["isolation"] == "namespaces":
        namespaces(config, root)
    else:
        os.chdir(config["scratch"])
    call("prctl(NO_NEW_PRIVS)", LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    landlocked = landlock(config)
    if config["isolation"] == "landlock" and not landlocked:
        raise Refused("landlock: this kernel has it switched off")
    become(own_user, root, config)
    call("prctl(PDEATHSIG)", LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))  # a change of user clears it
    filtered = seccomp()
    if config["isolation"] == "landlock" and not filtered:
        raise Refused("seccomp: this kernel or processor has none that is known here")
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def limits(wanted: dict[str, int]) -> None:
    """All but the number of processes, which counts everything that our user runs; `become` sets that."""
    for name, value in (
        ("CPU", wanted["cpu_s"]),
        ("AS", wanted["memory"]),
        ("FSIZE", wanted["file_size"]),
        ("NOFILE", wanted["open_files"]),
        ("CORE", 0),
    ):
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (most, most))


# -- namespaces --------------------------------------------------------------------------------------------------------


def namespaces(config: dict[str, Any], root: bool) -> None:
    """Own mounts, network, process table. Continues in a child, the first process of its table; the parent waits and passes on how it ended."""
    uid, gid = os.getuid(), os.getgid()
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    if root and LIBC.unshare(flags) == 0:
        pass
    else:
        call("unshare", LIBC.unshare(flags | CLONE_NEWUSER))
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child:
        _wait_for(child, config)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    call("prctl(PDEATHSIG)", LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != 0:  # in a new table the parent is not to be seen; a number means that it is not new
        raise Refused("the process table is not our own")
    new_root(config)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _wait_for(child: int, config: dict[str, Any]) -> None:
    """Told to end, kill the child first and see it off: whoever becomes its parent next may not."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    for fd in [config["status_fd"], *config["fds"], 0, 1, 2]:
        os.close(fd)
    ended = os.waitpid(child, 0)[1]
    os._exit(os.WEXITSTATUS(ended) if os.WIFEXITED(ended) else 128 + os.WTERMSIG(ended))


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if x is None else x.encode() for x in (source, target, kind)]
    call(f"mount {target}", LIBC.mount(*encoded, ctypes.c_ulong(flags), None if data is None else data.encode()))


def new_root(config: dict[str, Any]) -> None:
    """A root folder with nothing in it but what running Python needs, read only, and a scratch folder in memory."""
    at = config["scratch"]
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", at, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=4096,mode=755")
    for path in config["readable"]:
        bind(path, at)
    for name in ("null", "zero", "urandom", "random"):
        target = f"{at}/dev/{name}"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        mount(f"/dev/{name}", target, None, MS_BIND)
    os.makedirs(at + SCRATCH)
    size = config["limits"]["scratch"]
    mount("tmpfs", at + SCRATCH, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, f"size={size},nr_inodes=1024,mode=1777")
    os.symlink(SCRATCH, at + "/tmp")
    os.makedirs(at + "/old")
    number = _number("pivot_root")
    if number is None:
        raise Refused(f"pivot_root is not known for {os.uname().machine}")
    call("pivot_root", LIBC.syscall(number, at.encode(), (at + "/old").encode()))
    os.chdir("/")
    call("umount2", LIBC.umount2(b"/old", 2))
    os.rmdir("/old")
    mount("none", "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.chdir(SCRATCH)


def bind(path: str, root: str) -> None:
    """Show `path` at the same place below `root`, read only; a symbolic link is made again."""
    target = root + path
    if os.path.islink(path):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.lexists(target):
            os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.exists(target):
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    mount(path, target, None, MS_BIND | MS_REC)
    held = os.statvfs(target).f_flag  # flags that may not be dropped in a user namespace
    kept = sum(
        flag for bit, flag in ((2, MS_NOSUID), (4, MS_NODEV), (8, MS_NOEXEC), (1024, 1024), (2048, 2048), (4096, 1 << 21)) if held & bit
    )
    mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | kept)


# -- user and capabilities ---------------------------------------------------------------------------------------------


def become(user: int, root: bool, config: dict[str, Any]) -> None:
    """Another user than root, without capabilities, and the limit on this user's processes."""
    if root and config["isolation"] == "namespaces":
        _switch(user)
    elif root and _could_read(user):
        os.chown(config["scratch"], user, user)
        _switch(user)
    for capability in range(64):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = struct.pack("Ii", 0x20080522, 0)
    call("capset", LIBC.capset(header, struct.pack("6I", 0, 0, 0, 0, 0, 0)))
    threads = config["limits"]["threads"]
    if os.getuid() == user:  # nobody else's processes are counted
        resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))


def _switch(user: int) -> None:
    try:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    except OSError as error:
        if error.errno != errno.EINVAL:  # in a user namespace of one user there is no other
            raise


def _could_read(user: int) -> bool:
    """Whether that user could still import Python's library, which may lie in root's own home."""
    os.seteuid(user)
    try:
        with open(os.__file__, "rb"):
            return True
    except OSError:
        return False
    finally:
        os.seteuid(0)


# -- landlock ----------------------------------------------------------------------------------------------------------

FS_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # interface version -> how many rights on files it knows
READ = (1 << 0) | (1 << 2) | (1 << 3)  # execute (shared libraries are mapped so), read file, read folder
FILE_RIGHTS = (1 << 0) | (1 << 1) | (1 << 2) | (1 << 14)


def landlock(config: dict[str, Any]) -> bool:
    version = LIBC.syscall(444, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    every = (1 << FS_RIGHTS[min(version, 5)]) - 1
    attributes = struct.pack("QQQ", every, 3 if version >= 4 else 0, 3 if version >= 6 else 0)  # files, TCP, signals and sockets
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = call("landlock_create_ruleset", LIBC.syscall(444, attributes, ctypes.c_size_t(size), 0))
    scratch = SCRATCH if config["isolation"] == "namespaces" else config["scratch"]
    devices = ["/dev/null", "/dev/zero", "/dev/urandom", "/dev/random"]
    for path, rights in [(p, READ) for p in config["readable"]] + [(d, READ | 2) for d in devices] + [(scratch, every)]:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= FILE_RIGHTS
        rule = struct.pack("=QI", rights & every, fd)
        call(f"landlock {path}", LIBC.syscall(445, ruleset, 1, rule, 0))
        os.close(fd)
    call("landlock_restrict_self", LIBC.syscall(446, ruleset, 0))
    os.close(ruleset)
    return True


# -- seccomp -----------------------------------------------------------------------------------------------------------


def _number(name: str) -> int | None:
    found = ARCHES.get(os.uname().machine)
    return None if found is None else CALLS[name][found[0]]


def seccomp() -> bool:
    """A filter over system calls: the denied ones fail with "operation not permitted"."""
    found = ARCHES.get(os.uname().machine)
    if found is None or sys.byteorder != "little":
        return False
    column, arch = found
    load, equal, above, both, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, deny, no_such, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
    code: list[tuple[int, int, int, int]] = [(load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, kill), (load, 0, 0, 0)]
    if column == 0:
        code += [(above, 0, 1, 0x40000000), (give, 0, 0, kill)]  # the x32 numbers would pass by the list
    for numbers in CALLS.values():
        if numbers[column] is not None:
            code += [(equal, 0, 1, numbers[column] or 0), (give, 0, 0, deny)]
    code += [(equal, 0, 1, CLONE3[column]), (give, 0, 0, no_such)]  # its flags cannot be seen here; libc then uses clone
    code += [(equal, 0, 4, CLONE[column]), (load, 0, 0, 16), (both, 1, 0, 0x10000), (give, 0, 0, deny), (give, 0, 0, allow)]  # threads only
    code += [(equal, 0, 4, TGKILL[column]), (load, 0, 0, 16), (equal, 1, 0, os.getpid()), (give, 0, 0, deny), (give, 0, 0, allow)]
    code += [(give, 0, 0, allow)]
    packed = b"".join(struct.pack("HBBI", op, yes, no, value) for op, yes, no, value in code)
    buffer = ctypes.create_string_buffer(packed, len(packed))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    program = Program(len(code), ctypes.addressof(buffer))
    return bool(LIBC.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0) == 0)


if __name__ == "__main__":
    main()
