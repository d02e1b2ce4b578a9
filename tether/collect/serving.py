"""Serving a desk: the address, who may reach it, and the server around the application."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from tether.collect.app import Live, make_app
from tether.collect.desk import Desk
from tether.collect.guard import LOOPBACK, Keys, desk_secret
from tether.errors import UserError

PORT = 8321
TRIES = 20  # ports after the usual one that are tried when it is taken
WAITING = 128  # connections that the system keeps for us while we are busy
AT_ONCE = 256  # requests answered at once; more are told to come back


@dataclass(frozen=True)
class Address:
    """A socket that listens already. `shared`: other machines may reach it, so the link holds a token."""

    socket: socket.socket
    url: str
    hosts: frozenset[str]
    shared: bool

    def link(self, keys: Keys) -> str:
        return f"{self.url}/join/{keys.access}" if self.shared else f"{self.url}/"

    def own_link(self, token: str) -> str:
        return f"{self.url}/as/{token}"


def listen(host: str = "127.0.0.1", port: int | None = None, *, names: Sequence[str] = ()) -> Address:
    """A listening socket. `port` None takes the usual port, or one of those after it that is free; `names` are more names of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = [port] if port is not None else [*range(PORT, PORT + TRIES), 0]
    for number in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
            listener.listen(WAITING)
        except OverflowError:
            listener.close()
            raise UserError(f"there is no port {number}", where="--port", remedy="Name one from 1024 to 65535, or 0 for any.") from None
        except OSError as error:
            listener.close()
            if number != ports[-1] and error.errno in _TAKEN:
                continue
            remedy = "Name another --port." if error.errno in _TAKEN else "Name an address of this machine as --host."
            raise UserError(f"cannot listen on {host} port {number}: {error.strerror}", where="--host, --port", remedy=remedy) from None
        return _address(listener, host, names)
    raise AssertionError("the last port either listens or raises")


_TAKEN = {98, 48, 10048}  # EADDRINUSE of Linux, macOS, Windows


def _address(listener: socket.socket, host: str, names: Sequence[str]) -> Address:
    port = listener.getsockname()[1]
    shared = not _is_loopback(host)
    every = host in ("0.0.0.0", "::", "")
    shown = (names[0] if names else _own_address()) if every else host
    known = {*LOOPBACK, *(n.lower() for n in names), shown.lower()}
    if every:
        known |= {socket.gethostname().lower(), _own_address()}
        with suppress(OSError):
            known |= {str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None)}
    else:
        known.add(host.lower())
    url = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
    return Address(listener, url, frozenset(known), shared)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _own_address() -> str:
    """The address by which a neighbour would reach this machine. Connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def serve(desk: Desk, address: Address, *, live: Live | None = None) -> None:
    """Answers until Ctrl-C or SIGTERM."""
    import uvicorn

    app = make_app(desk, hosts=address.hosts, secret=desk_secret(desk.folder), shared=address.shared, live=live)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=AT_ONCE,
        backlog=WAITING,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=3,
        lifespan="off",
        ws="none",
        proxy_headers=False,
    )
    server = uvicorn.Server(config)
    # uvicorn raises the signal that stopped it again once it is done.
    with suppress(KeyboardInterrupt):
        server.run(sockets=[address.socket])
    address.socket.close()
