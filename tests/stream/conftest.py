"""The command as a user types it, and a file server on loopback that can break off."""

import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fedprotip import cli


@pytest.fixture
def command(monkeypatch, capsys):
    """Run `fedprotip` in this process: (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedprotip", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        return code, *capsys.readouterr()

    return run


class Handler(BaseHTTPRequestHandler):
    """Serves `files`; `breaks`: so many answers stop after `after` bytes; `ranges`: whether it can continue.

    `skew`: how far it continues from another place than was asked for.
    """

    def __init__(self, state, *arguments):
        self.state = state
        super().__init__(*arguments)

    def do_GET(self):
        state, content = self.state, self.state["files"].get(self.path)
        wanted = self.headers.get("Range", "")
        state["asked"].append(wanted)
        if content is None:
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) + state["skew"] if wanted and state["ranges"] else 0
        if start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.end_headers()
            return
        body = content[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if state["breaks"]:
            state["breaks"] -= 1
            body = body[: state["after"]]
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    state = {"files": {}, "breaks": 0, "after": 1000, "ranges": True, "skew": 0, "asked": []}
    running = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, state))
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    state["url"] = f"http://127.0.0.1:{running.server_port}"
    yield state
    running.shutdown()
    running.server_close()
    thread.join()
