"""Requests to the application without a socket."""

import asyncio
import io
import json
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import numpy as np
from PIL import Image


@dataclass
class Reply:
    status: int = 0
    headers: dict = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self):
        return json.loads(self.body)


async def ask(app, path, body=b"", method="POST", headers=(), chunks=None, pause=0.0, raised=()):
    """One request.

    Args:
        chunks: the body in parts instead, with a pause before each. raised: what the server gets to hear.
    """
    given = {"host": "127.0.0.1:8000", **dict(headers)}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
        "scheme": "http",
    }
    parts, reply = list(chunks or [body]), Reply()

    async def receive():
        if not parts:
            await asyncio.sleep(3600)
        await asyncio.sleep(pause)
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message):
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            reply.body += message.get("body", b"")

    with suppress(raised):
        await app(scope, receive, send)
    return reply


@asynccontextmanager
async def living(app):
    """The application between its start and its end."""
    told, said = asyncio.Queue(), asyncio.Queue()
    life = asyncio.create_task(app({"type": "lifespan", "asgi": {"version": "3.0"}}, told.get, said.put))
    await told.put({"type": "lifespan.startup"})
    assert (await said.get())["type"] == "lifespan.startup.complete"
    try:
        yield app
    finally:
        await told.put({"type": "lifespan.shutdown"})
        assert (await said.get())["type"] == "lifespan.shutdown.complete"
        await life


def form(*files, **fields):
    """Headers and body of a form; files: (name, bytes)."""
    lines = [
        b'--edge\r\nContent-Disposition: form-data; name="images"; filename="%s"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n%s\r\n" % (name.encode(), data)
        for name, data in files
    ]
    lines += [
        b'--edge\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name.encode(), str(value).encode())
        for name, value in fields.items()
    ]
    return {
        "headers": {"content-type": "multipart/form-data; boundary=edge"},
        "body": b"".join(lines) + b"--edge--\r\n",
    }


def as_json(value):
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return {"headers": {"content-type": "application/json"}, "body": body}


def picture(seed=0, size=(8, 8), kind="PNG"):
    """An image file."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)).save(file, kind)
    return file.getvalue()
