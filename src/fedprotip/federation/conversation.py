"""One exchange between the server and its clients, whatever it is about."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from fedprotip.federation.aggregate import combine
from fedprotip.federation.engines.base import Engine
from fedprotip.federation.journal import Crossed, Journal
from fedprotip.federation.line import Judged, in_agreement, in_line
from fedprotip.federation.parcels import Reply, Request, answers
from fedprotip.federation.secure.sums import secure_sum
from fedprotip.federation.server import Server
from fedprotip.messages import BadMessage, Message
from fedprotip.methods.exchange import Exchange

MOST_META = 2**16
"""Characters of JSON beside the tensors of a reply."""
LOUD = 1e4
"""Losses of training below this are not told apart: what they are of, a method says."""


def converse(
    server: Server, engine: Engine, journal: Journal, exchange: Exchange, round_: int | None = None
) -> dict[int, dict[str, Any]]:
    """One exchange: ask, check, combine, digest. The metadata of every usable reply, by client."""
    used: dict[int, dict[str, Any]] = {}
    if server.settings.method.secure and exchange.who != "nobody" and not exchange.in_clear:
        return secure_sum(server, engine, journal, exchange, round_)
    server.progress.step += 1
    if exchange.who == "nobody":
        server.digest(exchange, None)
        return used
    crossed: Crossed = {client: [] for client in server.clients(exchange, round_)}

    def request(client: int) -> Request:
        return server.request(client, exchange, round_, crossed[client])

    asked = engine.ask(map(request, list(crossed)))
    line = server.progress.line.setdefault(exchange.name, {}) if exchange.when == "round" else {}
    judged = in_line(map(partial(judge, exchange=exchange, server=server), asked), exchange.slack, line)
    judged = in_agreement(judged, exchange.consensus(server.site))
    checked = usable(judged, crossed, server, journal, exchange, round_, used)
    combined = combine(exchange, checked, server.site)
    if combined is not None:
        server.digest(exchange, combined)
    for _ in checked:  # every reply is checked and counted, also those that nothing is made of
        pass
    return used


def usable(
    replies: Iterator[Judged],
    crossed: Crossed,
    server: Server,
    journal: Journal,
    exchange: Exchange,
    round_: int | None,
    used: dict[int, dict[str, Any]],
) -> Iterator[tuple[int, Message]]:
    """The replies that can be used, one at a time; the others are left out, reported and counted.

    However far ahead an engine works, the ledger has the order of clients.
    """
    task, last = server.site.task, -1
    for judged in replies:
        client, message, refused = judged.reply.client, judged.reply.message, judged.refused
        assert client > last, "an engine must yield replies in the order of clients"
        last = client
        journal.crossed(server.progress, client, task, round_, crossed.pop(client))
        if message is not None:  # under the name of what was asked: a client cannot fill the ledger with others
            journal.message(server.progress, "up", client, task, round_, exchange.name, judged.nbytes, refused)
        if refused or message is None:
            journal.failure(server.progress, client, task, round_, refused)
            continue
        if remark := exchange.remark(message, task, client):
            journal.event(remark)
        used[client] = message.meta
        yield client, message


def judge(reply: Reply, exchange: Exchange, server: Server) -> Judged:
    """A reply judged by what was asked, not by what it calls itself; and how large it is, for `in_line`."""
    if reply.message is None:
        return Judged(reply, refused=reply.error)
    size, site = reply.message.nbytes, server.site
    try:
        message = answers(reply.message, server.progress.step)
        if message.kind != exchange.name:
            raise BadMessage(f"a {exchange.name!r} message was expected, a {message.kind!r} message came")
        if len(json.dumps(message.meta)) > MOST_META:
            raise BadMessage(f"its metadata are longer than {MOST_META} characters")
        exchange.check(message, site)
        if exchange.trains:
            message.check_numbers("loss")
        sender = server.sender(reply.client)
        exchange.check_sender(message, site, sender)
        sizes, least = dict(exchange.sizes(message, site)), dict(exchange.least(message, site))
        if exchange.trains:
            sizes["loss"], least["loss"] = abs(float(message.meta["loss"])), LOUD
        return Judged(Reply(reply.client, message), "", size, sizes, least, exchange.effort(message, site, sender))
    except BadMessage as error:
        why = str(error)
    except Exception as error:  # whatever a client sends, it must not stop the server
        why = f"it cannot be checked ({type(error).__name__}: {error})"
    return Judged(reply, why, size)
