"""A page on this machine alone that shows how far a run is; it asks for new figures by itself.

Only the loopback address, only GET, only a few fixed names; nothing of the run folder is served as a file. A request
that names another host is refused, so that no page of the web can ask in the reader's name.
"""

import errno
import json
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from threading import Lock
from typing import Any

from fedprotip.errors import UsageError
from fedprotip.watch.view import Watched

HOST = "127.0.0.1"
PORT = 8750
ICON = ("serve/page/icon.svg", "image/svg+xml")
FILES = {
    "/": ("watch/watch.html", "text/html; charset=utf-8"),
    "/watch.js": ("watch/watch.js", "text/javascript; charset=utf-8"),
    "/watch.css": ("watch/watch.css", "text/css; charset=utf-8"),
    "/icon.svg": ICON,
    "/favicon.ico": ICON,
}
STATE = "/state.json"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class WatchServer(ThreadingHTTPServer):
    """Serves the page of one run folder until it is closed."""

    daemon_threads = True

    def __init__(self, watched: Watched, port: int = PORT) -> None:
        """`port` 0: any that is free."""
        self._watched, self._one_at_a_time = watched, Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except OverflowError:
            raise UsageError(f"--port {port} is no port; the nearest valid value is 65535.") from None
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "is in use" if taken else f"cannot be used: {error.strerror}"
            raise UsageError(f"--port {port} {why}; choose another one, or 0 for any that is free.") from None

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    @property
    def names(self) -> set[str]:
        """What a browser calls it."""
        return {f"{host}:{self.server_port}" for host in (HOST, "localhost")}

    def state(self) -> bytes:
        with self._one_at_a_time:
            return json.dumps(self._watched.look().model_dump()).encode()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away in the middle is nobody's concern."""


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    server_version, sys_version, timeout = "fedprotip", "", 30

    def do_GET(self) -> None:
        name = self.path.partition("?")[0]
        if self.headers.get("Host") not in self.server.names:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain; charset=utf-8", b"This page is for this machine alone.\n")
        elif name == STATE:
            self._answer(HTTPStatus.OK, "application/json", self.server.state())
        elif name in FILES:
            file, kind = FILES[name]
            self._answer(HTTPStatus.OK, kind, (files("fedprotip") / file).read_bytes())
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"There is no such page.\n")

    do_HEAD = do_GET

    def _answer(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in (HEADERS | {"Content-Type": kind, "Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """The terminal is for the reader."""
