"""One exchange between the server and its clients, whatever it is about."""

from collections.abc import Iterator
from typing import Any

from fedprotip.federation.aggregate import combine
from fedprotip.federation.engines.base import Engine
from fedprotip.federation.journal import Journal
from fedprotip.federation.parcels import Reply, Request
from fedprotip.federation.server import Direction, Server
from fedprotip.messages import BadMessage, Message
from fedprotip.methods.exchange import Exchange
from fedprotip.store.events import Remark

Crossed = dict[int, list[tuple[Direction, Message]]]
"""Client → what crossed for the question under way, but for the reply."""


def converse(
    server: Server, engine: Engine, journal: Journal, exchange: Exchange, round_: int | None = None
) -> dict[int, dict[str, Any]]:
    """One exchange: ask, check, combine, digest. The metadata of every usable reply, by client."""
    server.progress.step += 1
    used: dict[int, dict[str, Any]] = {}
    if exchange.who == "nobody":
        server.digest(exchange, None)
        return used
    crossed: Crossed = {client: [] for client in server.clients(exchange, round_)}

    def request(client: int) -> Request:
        return server.request(client, exchange, round_, lambda way, message: crossed[client].append((way, message)))

    requests = map(request, list(crossed))
    replies = entered(engine.ask(requests), crossed, server, journal, round_)
    checked = usable(replies, server, journal, exchange, round_, used)
    combined = combine(exchange, checked, server.site)
    if combined is not None:
        server.digest(exchange, combined)
    for _ in checked:  # every reply is checked and counted, also those that nothing is made of
        pass
    return used


def entered(
    replies: Iterator[Reply], crossed: Crossed, server: Server, journal: Journal, round_: int | None
) -> Iterator[Reply]:
    """The same replies; what crossed before each of them is entered into the ledger when it is its turn.

    However far ahead an engine works, the ledger has the order of clients.
    """
    task = server.site.task
    for reply in replies:
        for way, message in crossed.pop(reply.client):
            journal.message(server.progress, way, reply.client, task, round_, message.kind, message.nbytes)
            if way == "up":
                text = "it has lost what it was told, and is sent everything anew; what it kept for itself may be gone"
                journal.event(Remark(event="lost", task=task, client=reply.client, text=text))
        yield reply


def usable(
    replies: Iterator[Reply],
    server: Server,
    journal: Journal,
    exchange: Exchange,
    round_: int | None,
    used: dict[int, dict[str, Any]],
) -> Iterator[tuple[int, Message]]:
    """The replies that can be used, one at a time; the others are left out, reported and counted.

    A reply is judged by what was asked, not by what it calls itself.
    """
    task, last = server.site.task, -1
    for reply in replies:
        assert reply.client > last, "an engine must yield replies in the order of clients"
        last, refused = reply.client, reply.error
        if reply.message is not None:
            refused = _refusal(reply.message, exchange, server)
            size = reply.message.nbytes  # under the name of what was asked: a client cannot fill the ledger with others
            journal.message(server.progress, "up", reply.client, task, round_, exchange.name, size, refused)
        if refused or reply.message is None:
            journal.failure(server.progress, reply.client, task, round_, refused)
            continue
        if remark := exchange.remark(reply.message, task, reply.client):
            journal.event(remark)
        used[reply.client] = reply.message.meta
        yield reply.client, reply.message


def _refusal(message: Message, exchange: Exchange, server: Server) -> str:
    """Why a reply cannot be used; empty when it can."""
    try:
        if message.kind != exchange.name:
            raise BadMessage(f"a {exchange.name!r} message was expected, a {message.kind!r} message came")
        exchange.check(message, server.site)
    except BadMessage as error:
        return str(error)
    except Exception as error:  # whatever a client sends, it must not stop the server
        return f"it cannot be checked ({type(error).__name__}: {error})"
    return ""
