"""An exchange as a secure sum: the server's part. Four questions instead of one, to clients that become fewer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from fedprotip.federation.engines.base import Engine
from fedprotip.federation.journal import Crossed, Journal
from fedprotip.federation.line import Judged, in_line
from fedprotip.federation.parcels import KEYS, MASKED, SECURE, SHARES, UNMASK, Reply, Request, answers
from fedprotip.federation.secure.desk import CLIENTS, COMMITTED, LAYOUT, LETTERS, SUM, as_rows, rows
from fedprotip.federation.secure.ring import Layout, decode
from fedprotip.federation.server import Server
from fedprotip.messages import BadMessage, Message, Spec
from fedprotip.methods.exchange import Exchange, Sender
from fedprotip.store.files import Tensors

Found = TypeVar("Found")
Letters = dict[int, bytes]
EVERYONE = -1
"""Instead of a client: the sum of all."""


def secure_sum(
    server: Server, engine: Engine, journal: Journal, exchange: Exchange, round_: int | None
) -> dict[int, dict[str, Any]]:
    """One exchange of which the server sees the sum: combine and digest it.

    The metadata of all together, by client whose part is in it. Nobody's, where too few clients are left, or the sum
    cannot be one: then everything stays as it was, and the journal says why.
    """
    questions = Questions(server, engine, journal, exchange, round_)
    try:
        whole, exact, arrived = questions.sum()
        check_whole(whole, server, exchange)
    except BadMessage as error:
        journal.unsummed(server.progress, server.site.task, f"no sum of {exchange.name!r}: {error}")
        return {}
    server.digest(exchange, Message(exchange.name, whole.tensors if exchange.combine == "mean" else exact))
    return dict.fromkeys(arrived, whole.meta)


def check_whole(whole: Message, server: Server, exchange: Exchange) -> None:
    """What can still be said about a sum: it must be what one client could have sent, and in line with earlier rounds.

    Whose fault it is nobody can tell.
    """
    site = server.site
    try:
        exchange.check(whole, site)
        sizes, least = dict(exchange.sizes(whole, site)), dict(exchange.least(whole, site))
        effort = exchange.effort(whole, site, Sender(EVERYONE))
    except BadMessage as error:
        raise BadMessage(f"the sum of all clients cannot be used: {error}") from None
    except Exception as error:  # whatever clients sent, it must not stop the server
        raise BadMessage(f"the sum of all clients cannot be checked ({type(error).__name__}: {error})") from None
    if exchange.when == "round":
        known = server.progress.line.setdefault(exchange.name, {})
        reply = Judged(Reply(EVERYONE, whole), "", 0, sizes, least, effort)
        for judged in in_line([reply], exchange.slack, known):
            if judged.refused:
                raise BadMessage(f"the sum of all clients is not like those before: {judged.refused}")


class Questions:
    """The phases of one sum; see `masks.py`."""

    def __init__(
        self, server: Server, engine: Engine, journal: Journal, exchange: Exchange, round_: int | None
    ) -> None:
        self._server, self._engine, self._journal = server, engine, journal
        self._exchange, self._round = exchange, round_
        self._share = server.settings.method.secure_share

    def sum(self) -> tuple[Message, Tensors, list[int]]:
        """The sum as one reply, the same unrounded, and whose it is."""
        from fedprotip.federation.secure import masks
        from fedprotip.federation.secure.masks import threshold, unmask

        asked = self._server.clients(self._exchange, self._round)
        entries = dict(self._ask(KEYS, dict.fromkeys(asked, ()), read_keys))
        roster = {client: entry[: masks.KEYS] for client, entry in entries.items()}
        self._enough(roster, threshold(len(asked), self._share))
        least = threshold(len(roster), self._share)

        told = Message(SECURE, as_rows(entries, KEYS))  # with signatures, which are for the clients to check
        read_all = partial(read_shares, roster=roster)
        sent = dict(self._ask(SHARES, dict.fromkeys(roster, (told,)), read_all))
        self._enough(sent, least)
        commitments = {client: committed for client, (committed, _) in sent.items()}

        totals: dict[Layout, tuple[np.ndarray, list[int]]] = {}
        post = {client: (letters_for(client, sent),) for client in sent}
        for client, (layout, vector) in self._ask(MASKED, post, read_masked):
            total, clients = totals.setdefault(layout, (np.zeros_like(vector), []))
            np.add(total, vector, out=total)
            clients.append(client)
        if not totals:
            self._enough([], least)
        layout = max(totals, key=lambda known: len(totals[known][1]))
        total, arrived = totals.pop(layout)
        for _, others in totals.values():
            for client in others:
                self._failed(client, "its reply has other parts than those of most clients")
        self._enough(arrived, least)

        told = Message(SECURE, {CLIENTS: torch.tensor(arrived, dtype=torch.int64)})
        read = partial(read_revealed, about=set(commitments))
        revealed = dict(self._ask(UNMASK, dict.fromkeys(arrived, (told,)), read))
        self._enough(revealed, least)
        try:
            vector = unmask(total, roster, commitments, arrived, revealed, self._share)
        except ValueError as error:  # a key that is none
            raise BadMessage(f"it cannot be unmasked ({error})") from None
        name, mean, fraction = self._exchange.name, self._exchange.combine == "mean", self._exchange.fraction
        whole, exact = decode(vector, layout, len(arrived), mean, fraction)
        return Message(name, whole.tensors, whole.meta), exact, arrived

    def _enough(self, clients: Sequence[int] | Mapping[int, Any], least: int) -> None:
        if len(clients) < least:
            left = "1 client is left" if len(clients) == 1 else f"{len(clients)} clients are left"
            raise BadMessage(f"{left}, and at least {least} must be, so nothing is revealed")

    def _ask(
        self, phase: str, beside: Mapping[int, Sequence[Message]], read: Callable[[int, Message], Found]
    ) -> Iterator[tuple[int, Found]]:
        """What clients answer, read, in the order of clients; those that fail are left out, reported and counted."""
        server, journal, task = self._server, self._journal, self._server.site.task
        server.progress.step += 1
        kind = self._exchange.name if phase == MASKED else SECURE
        crossed: Crossed = {client: [] for client in beside}

        def request(client: int) -> Request:
            return server.request(client, self._exchange, self._round, crossed[client], phase, beside[client])

        for reply in self._engine.ask(map(request, list(crossed))):
            found, refused = None, reply.error
            journal.crossed(server.progress, reply.client, task, self._round, crossed.pop(reply.client))
            if reply.message is not None:
                try:
                    found = read(reply.client, self._expected(reply.message, kind))
                except BadMessage as error:
                    refused = str(error)
                except Exception as error:  # whatever a client sends, it must not stop the server
                    refused = f"it cannot be read ({type(error).__name__}: {error})"
                size = reply.message.nbytes
                journal.message(server.progress, "up", reply.client, task, self._round, kind, size, refused)
            if found is None:
                self._failed(reply.client, refused)
            else:
                yield reply.client, found

    def _expected(self, reply: Message, kind: str) -> Message:
        message = answers(reply, self._server.progress.step)
        if message.kind != kind:
            raise BadMessage(f"a {kind!r} message was expected, a {message.kind!r} message came")
        return message

    def _failed(self, client: int, why: str) -> None:
        self._journal.failure(self._server.progress, client, self._server.site.task, self._round, why)


def read_keys(client: int, reply: Message) -> bytes:
    from fedprotip.federation.secure import masks, signed

    reply.check(SECURE, {KEYS: Spec((masks.KEYS + signed.SIGNED,), torch.uint8)}).check_meta()
    entry = reply.tensors[KEYS].numpy().tobytes()
    masks.check_keys(entry[: masks.KEYS])
    return entry


def read_shares(client: int, reply: Message, roster: Mapping[int, bytes]) -> tuple[bytes, Letters]:
    """What a client is committed to, and its letters to all others."""
    from fedprotip.federation.secure import masks

    reply.check_meta()
    committed, letters = reply.tensors[COMMITTED].numpy().tobytes(), rows(reply, LETTERS)
    if len(committed) != masks.COMMITMENT or letters.keys() != roster.keys() - {client}:
        raise BadMessage("its letters are not one for every other client")
    if any(len(letter) != masks.LETTER for letter in letters.values()):
        raise BadMessage("its letters do not have the length of letters")
    return committed, letters


def letters_for(client: int, sent: Mapping[int, tuple[bytes, Letters]]) -> Message:
    return Message(SECURE, as_rows({other: to[client] for other, (_, to) in sent.items() if other != client}, LETTERS))


def read_masked(client: int, reply: Message) -> tuple[Layout, np.ndarray]:
    reply.check_meta(LAYOUT)
    layout = Layout.read(reply.meta[LAYOUT])
    reply.check(reply.kind, {SUM: Spec((layout.length + 1,), torch.int64)})
    return layout, reply.tensors[SUM].numpy().view(np.uint64)


def read_revealed(client: int, reply: Message, about: set[int]) -> Letters:
    from fedprotip.federation.secure import masks

    reply.check_meta()
    told = rows(reply, LETTERS)
    if told.keys() != about or any(len(share) != masks.SECRET for share in told.values()):
        raise BadMessage("what it reveals is not a share of every client")
    return told
