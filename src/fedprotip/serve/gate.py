"""What stands before the application: who may ask, how much at once, how long; what browsers may do with answers."""

import asyncio
import hmac
import json
from collections.abc import Callable, Collection
from time import monotonic
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedprotip.serve.limits import Limits, Refused
from fedprotip.serve.metrics import Metrics

OPEN = ("/", "/health", "/docs", "/favicon.ico")
"""What needs no key: nothing there tells about the run."""
ASSETS = "/page/"
SWALLOWED = 8
"""So many times the largest body is read and thrown away, so that whoever sends more hears why it was too much."""
WAITING = 400
"""Bodies on their way at most, however small: with as many idle connections below the 1,024 files of a process."""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Gate:
    """An ASGI application around another one: every request is checked and counted, its body read whole."""

    def __init__(
        self, app: ASGIApp, limits: Limits, metrics: Metrics, key: str, hosts: Collection[str], known: Collection[str]
    ) -> None:
        self.app, self._limits, self._metrics = app, limits, metrics
        self._key, self._hosts, self._known = key.encode(), {host.lower() for host in hosts}, known
        self.inside = 0
        self._arriving: dict[asyncio.Timeout, int] = {}  # bodies on their way, the oldest first, and their bytes so far

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._request(scope, receive, send)

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, status = monotonic(), 500

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
            await send(message)

        try:
            self._may_ask(scope)
            await self._admitted(scope, receive, answer, started)
        except Refused as refused:
            await _say(answer, refused)
        finally:
            path = scope["path"] if scope["path"] in self._known else "other"
            self._metrics.request(path, status, monotonic() - started)

    async def _admitted(self, scope: Scope, receive: Receive, send: Send, started: float) -> None:
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body = await self._body(receive, started)
        if self.inside >= self._limits.concurrency:
            raise Refused(503, f"{self.inside} requests are being answered, which is the most; try again in a second.")
        self.inside += 1
        try:
            await self.app({**scope, "fedprotip.until": started + self._limits.seconds}, _replay(body, receive), send)
        finally:
            self.inside -= 1

    def _may_ask(self, scope: Scope) -> None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        host = headers.get(b"host", b"").decode("latin-1").lower()
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if self._hosts and name not in self._hosts:
            raise Refused(421, "This server does not go by that name; fedprotip serve --allow-host NAME lets it.")
        if scope["method"] == "POST" and headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site"):
            raise Refused(403, "A page of another site may not ask here.")
        if not self._key or scope["path"] in OPEN or scope["path"].startswith(ASSETS):
            return
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        if kind.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._key):
            raise Refused(401, "This needs the key of the server: send it as Authorization: Bearer KEY.")

    async def _body(self, receive: Receive, started: float) -> bytes:
        """All of the body; one that is too large is read on for a while, and forgotten.

        Whoever sends slowly holds nobody up: it takes no place among those that are answered, and where too many bytes
        are on their way the oldest of these bodies makes room.
        """
        most, parts, size = self._limits.body, list[bytes](), 0
        arriving = asyncio.timeout(max(started + self._limits.seconds - monotonic(), 0))
        try:
            async with arriving:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refused(400, "The request ended before its body did.")
                    part = message.get("body", b"")
                    size += len(part)
                    if size <= most:
                        parts.append(part)
                    else:
                        parts.clear()
                    if not message.get("more_body") or size > SWALLOWED * most:
                        break
                    self._arriving[arriving] = size if size <= most else 0
                    self._make_room()
        except TimeoutError:
            late = monotonic() - started >= self._limits.seconds
            why = f"did not arrive within {self._limits.seconds:g} seconds" if late else "gave way to others; try again"
            raise Refused(408 if late else 503, f"The request {why}.") from None
        finally:
            self._arriving.pop(arriving, None)
        if size > most:
            raise Refused(413, f"The request is larger than {most:,} bytes, which is the most.")
        return b"".join(parts)

    def _make_room(self) -> None:
        """End the oldest bodies on their way while all of them have more bytes than they may."""
        left = sum(self._arriving.values())
        for one, size in list(self._arriving.items())[:-1]:
            if left <= self._limits.arriving * self._limits.body and len(self._arriving) <= WAITING:
                return
            left -= size
            del self._arriving[one]
            one.reschedule(0)  # long ago


def _replay(body: bytes, receive: Receive) -> Callable[[], Any]:
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _say(send: Send, refused: Refused) -> None:
    body = json.dumps({"error": refused.sentence}, ensure_ascii=False).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += {503: [(b"retry-after", b"1")], 401: [(b"www-authenticate", b"Bearer")]}.get(refused.status, [])
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
