"""Engine `apart`: every client is a client of its own in this process, and nothing but bytes passes between them.

What `local` does in less memory and time, and what other machines do over a network; for tests, and to see it work.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from fedprotip.federation.client import Client
from fedprotip.federation.engines.base import answered
from fedprotip.federation.parcels import LOST, Reply, Request
from fedprotip.messages import Message, Parcel, pack_parcel, unpack_parcel
from fedprotip.stream import Stream
from fedprotip.stream.holdings import Holding


class ApartEngine:
    def __init__(self, stream: Stream, folder: Path) -> None:
        """`folder`: holds a folder for every client."""
        self._stream, self._folder = stream, folder
        self._clients: dict[int, Client] = {}

    def ask(self, requests: Iterable[Request]) -> Iterator[Reply]:
        for request in requests:
            yield answered(request.client, partial(self._answer, request))

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def _answer(self, request: Request) -> Message:
        reply = self._deliver(request.client, request.parcel)
        return self._deliver(request.client, request.anew(reply)) if reply.kind == LOST else reply

    def _deliver(self, client: int, parcel: Parcel) -> Message:
        if client not in self._clients:
            self._clients[client] = Client(self._folder / str(client), Holding(self._stream, client))
        arrived = unpack_parcel(pack_parcel(parcel))
        return Message.from_bytes(self._clients[client].handle(arrived).to_bytes())
