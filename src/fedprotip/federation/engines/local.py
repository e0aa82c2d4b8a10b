"""Engine `local`: all clients in this process, one after another, on one shared model."""

import json
from collections.abc import Iterable, Iterator
from functools import partial

import torch

from fedprotip.federation.engines.base import answered
from fedprotip.federation.parcels import Ask, Reply, Request, answering
from fedprotip.federation.secure.desk import Desk
from fedprotip.federation.server import Server
from fedprotip.messages import Message, Parcel
from fedprotip.methods.local import Belongings, Local
from fedprotip.methods.site import Site
from fedprotip.models import Network
from fedprotip.models.prefix import PrefixCache
from fedprotip.models.state import full_state, load_state
from fedprotip.store.clients import ClientStore
from fedprotip.stream.holdings import Holding


class LocalEngine:
    """A shortcut, proven equal to real clients by the conformance suite (`tests/conformance`).

    A client that has received its parcel holds the server's model and knowledge. So simulated clients share one model,
    which is set back to the server's before each of them, and read the server's knowledge: memory does not grow with
    their number, and parcels need not be opened.
    """

    def __init__(self, server: Server, network: Network, store: ClientStore, cache: PrefixCache) -> None:
        """`network`: the one that clients share; `store`: their private state."""
        self._server, self._store, self._cache = server, store, cache
        self._desks: dict[int, Desk] = {}
        theirs = server.site
        self._site = Site(
            server.settings, server.method, network, theirs.classes, theirs.image_shape, server.stream.look
        )

    def ask(self, requests: Iterable[Request]) -> Iterator[Reply]:
        for request in requests:
            yield answered(request.client, partial(self._answer, request.client, request.parcel))

    def close(self) -> None:
        self._cache.close()

    def _answer(self, client: int, parcel: Parcel) -> Message:
        ask = Ask.of(parcel[0])
        exchange = self._server.method.exchange(ask.exchange)
        if exchange.needs_model and not ask.bare:
            self._stand_where_the_server_stands()
        self._site.network.eval()
        holding = Holding(self._server.stream, client)
        own = Belongings(self._store, client, self._server.method.state)
        with torch.no_grad():
            local = Local(self._site, holding, self._cache, own, ask.task, ask.round)
            answer = self._desks.setdefault(client, Desk()).answer(exchange, local, ask, parcel)
        reply = answering(answer, ask)
        return Message(reply.kind, reply.tensors, json.loads(json.dumps(reply.meta)))  # as it is after a journey

    def _stand_where_the_server_stands(self) -> None:
        mine, theirs = self._site, self._server.site
        if mine.task != theirs.task:
            mine.follow(theirs)
            load_state(mine.network, full_state(theirs.network))  # also what moved in earlier tasks only
        elif not theirs.start:  # nothing is remembered, or not any more
            mine.settle()
        mine.known, mine.news = theirs.known.told(), theirs.news
        load_state(mine.network, theirs.changeable())
