"""A server that runs until it is told to stop: signals, the socket, and what is said about it."""

import asyncio
import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
import uvicorn

from fedprotip.errors import RunError, UsageError
from fedprotip.serve.app import LOOPBACK, Service, create_app
from fedprotip.serve.connections import connection
from fedprotip.serve.limits import Limits
from fedprotip.serve.source import Source

KEY = "FEDPROTIP_API_KEY"
"""Environment variable with what requests must bring."""
THREADS = "OMP_NUM_THREADS"
"""Environment variable by which torch has so many threads."""
BACKLOG = 256


class Server(uvicorn.Server):
    """Signals are ours: the first ends it after the requests that are inside, SIGHUP looks for a newer run."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    folder: str | Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    every: float = 5.0,
    hosts: Collection[str] = (),
    say: Callable[[str], object] = print,
) -> None:
    """Answer until SIGTERM or Ctrl-C; then finish what was asked, and end.

    Args:
        hosts: further names by which the server may be called; where it listens to loopback only, others are refused.
    """
    limits, key = limits or Limits(), _key(os.environ.get(KEY, ""))
    if not limits.threads and THREADS not in os.environ:  # one core reads requests meanwhile
        limits = replace(limits, threads=max(1, torch.get_num_threads() - 1))
    source = Source(folder)
    listener = _listen(host, port)
    local = _is_loopback(listener)
    known = (*LOOPBACK, *hosts) if local or hosts else ()
    app = create_app(source, limits, key, known, every)
    config = uvicorn.Config(
        app,
        http=connection(limits),
        log_level="error",
        access_log=False,
        server_header=False,
        lifespan="on",
        ws="none",
        backlog=BACKLOG,
        timeout_graceful_shutdown=int(limits.seconds) + 1,
    )
    server = Server(config)
    address = listener.getsockname()
    name = f"[{address[0]}]" if ":" in address[0] else address[0]
    say(f"Serving {source.now.name} at http://{name}:{address[1]}; Ctrl-C stops it.")
    if not local and not key:
        say(f"Anybody who reaches {host} can ask: set {KEY} to a secret, or put a gateway in front.")
    asyncio.run(_until_told(server, listener, app.service))


async def _until_told(server: Server, listener: socket.socket, service: Service) -> None:
    loop, reloads = asyncio.get_running_loop(), set[asyncio.Task[bool]]()

    def reload() -> None:
        task = loop.create_task(service.reload())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.handle_exit, number, None)
    with suppress(AttributeError):  # there is none on Windows
        loop.add_signal_handler(signal.SIGHUP, reload)
    await server.serve(sockets=[listener])


def _key(given: str) -> str:
    """What requests must bring: one that no header can hold would let nobody in, and an empty one everybody."""
    key = given.strip()
    if given and not (key and key.isascii() and key.isprintable()):
        raise UsageError(f"{KEY} must be letters, digits and signs of ASCII, as it comes in a header; set another.")
    return key


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, asyncio sends at once
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # from now on nobody is turned away, though answers come a moment later
    except socket.gaierror:
        raise UsageError(f"--host {host} is no address of a machine.") from None
    except (OSError, OverflowError) as error:
        told = getattr(error, "strerror", None) or error
        raise RunError(f"{host}, port {port}: {told}; choose another with --port.") from None
    return listener


def _is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
