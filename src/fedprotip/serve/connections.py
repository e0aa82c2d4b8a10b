"""Connections that ask nothing: uvicorn alone would wait for them without end, and for as many as there are files."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from fedprotip.serve.limits import Limits

WAITING = 400
"""Connections at most on which nothing is being asked; when there are more, the oldest has to go."""


def connection(limits: Limits) -> type[H11Protocol]:
    """What uvicorn makes of a connection: whose next request has to have begun within `limits.seconds`.

    By h11, which refuses heads of more than 64 KiB; the faster parser, where it is installed, takes them of any length.
    """
    waiting: dict[H11Protocol, asyncio.TimerHandle] = {}  # the oldest first

    class Connection(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._look()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._look()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._look()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            super().connection_lost(exc)

        def _look(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self._forget()  # being answered, which has an end of its own
            elif self not in waiting and not self.transport.is_closing():
                waiting[self] = self.loop.call_later(limits.seconds, self.transport.abort)
                if len(waiting) > WAITING:
                    next(iter(waiting)).transport.abort()

        def _forget(self) -> None:
            if timer := waiting.pop(self, None):
                timer.cancel()

    return Connection
