"""A client's part in secure sums: what it answers to each phase. Its secrets last for one sum."""

from collections.abc import Callable
from contextlib import suppress
from secrets import token_bytes
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedprotip.federation.parcels import KEYS, MASKED, SECURE, SHARES, UNMASK, Ask
from fedprotip.federation.secure.ring import Layout, encode
from fedprotip.messages import BadMessage, Message, Parcel
from fedprotip.methods.exchange import Exchange, Sender
from fedprotip.methods.local import Local
from fedprotip.methods.parts.private import normal
from fedprotip.settings import MethodSettings
from fedprotip.store.plain import PlainFolder
from fedprotip.store.site import SECRETS, remove_secrets

if TYPE_CHECKING:
    from fedprotip.federation.secure.masks import Member
    from fedprotip.federation.secure.signed import Signer

CLIENTS, LETTERS, COMMITTED, SUM, LAYOUT = "clients", "letters", "committed", "sum", "layout"
"""Names in the messages of a secure sum."""
QUESTION = "question "


class Desk:
    """At most one sum is under way; a client that lost its secrets has none, and is lost to the sum it was in."""

    def __init__(self, folder: PlainFolder | None = None, signer: "Signer | None" = None) -> None:
        """`folder`: where secrets are kept while a sum is under way, as a client's process may end after any answer.

        `signer`: of a site that has a key.
        """
        self._folder, self._signer = folder, signer
        self._member: Member | None = None
        self.run = ""  # as the plan names it

    def answer(self, exchange: Exchange, local: Local, ask: Ask, parcel: Parcel) -> Message:
        """The answer of a client to a question, as a masked part of a sum where that is asked for."""
        if not ask.phase:
            self.close()
            if local.settings.method.secure and not exchange.in_clear:
                raise BadMessage(f"{exchange.name!r} was asked for in the clear, which method.secure rules out")
            return exchange.answer(local)
        member = self._new(local, ask) if ask.phase == KEYS else self._kept()
        if member.about.rpartition(QUESTION)[0] != about(ask, self.run):
            raise BadMessage(f"{about(ask, self.run)}was asked for in a sum of {member.about}")
        told = next((message for message in parcel if message.kind == SECURE), Message(SECURE))
        steps: dict[str, Callable[[], Message]] = {
            KEYS: lambda: tell_keys(member, self._signer),
            SHARES: lambda: share(member, told, self._signer),
            MASKED: lambda: mask(member, told, exchange, local),
            UNMASK: lambda: unmask(member, told),
        }
        reply = steps[ask.phase]()
        self._keep(None if ask.phase == UNMASK else member)  # before it answers: no step is made twice
        return reply

    def close(self) -> None:
        """No sum is under way any more: one in which this client was lost leaves no secrets behind."""
        self._keep(None)

    def _new(self, local: Local, ask: Ask) -> "Member":
        from fedprotip.federation.secure.masks import Member

        return Member(local.client, local.settings.method.secure_share, f"{about(ask, self.run)}{QUESTION}{ask.step}")

    def _kept(self) -> "Member":
        from fedprotip.federation.secure.masks import Member

        if self._member is None and self._folder is not None and self._folder.has(SECRETS):
            with suppress(ValueError, TypeError):  # damaged: as good as lost
                self._member = Member.read(self._folder.text(SECRETS))
        if self._member is None:
            raise BadMessage("it has no keys of this sum any more")
        return self._member

    def _keep(self, member: "Member | None") -> None:
        self._member = member
        if self._folder is not None and member is not None:
            self._folder.write(SECRETS, member.text(), mode=0o600)
        elif self._folder is not None:
            remove_secrets(self._folder)


def about(ask: Ask, run: str) -> str:
    """What a sum is of. All its clients told it with their keys: nobody can be led to add something else."""
    return f"run {run}, {ask.exchange}, task {ask.task}, round {ask.round}, "


def tell_keys(member: "Member", signer: "Signer | None") -> Message:
    from fedprotip.federation.secure.signed import UNSIGNED

    keys = member.keys()
    return Message(SECURE, {KEYS: as_tensor(keys + (signer.sign(member.about, keys) if signer else UNSIGNED))})


def share(member: "Member", told: Message, signer: "Signer | None") -> Message:
    """Letters to all others, in the order of clients; none where a site with a key finds others not signed."""
    from fedprotip.federation.secure import masks

    entries = rows(told, KEYS)
    if signer:
        signer.check(member.about, entries)
    committed, letters = member.share({client: entry[: masks.KEYS] for client, entry in entries.items()})
    tensors = {COMMITTED: as_tensor(committed), **as_rows(letters, LETTERS)}
    return Message(SECURE, tensors)


def mask(member: "Member", told: Message, exchange: Exchange, local: Local) -> Message:
    """What the exchange asks for, checked by the one client that can, masked."""
    noisy, stood = local.settings.method.secure_noise > 0, dict[str, Tensor | None]()
    if noisy:  # what the exchange changes, as it was
        origins = {name: exchange.origin(name, local.site) for name in local.site.specs}
        stood = {name: None if origin is None else origin.clone() for name, origin in origins.items()}
    message = exchange.answer(local)
    exchange.check(message, local.site)
    exchange.check_sender(message, local.site, Sender(local.client, local.site.method.count(local)))
    if noisy:
        message = blurred(message, stood, local.settings.method, member.least)
    weight = exchange.weight(message, local.site)
    vector = encode(message, weight, member.clients, exchange.combine == "mean", exchange.fraction)
    masked = member.mask(vector, rows(told, LETTERS))
    return Message(exchange.name, {SUM: torch.from_numpy(masked.view(np.int64))}, {LAYOUT: Layout.of(message).text()})


def blurred(message: Message, stood: dict[str, Tensor | None], options: MethodSettings, least: int) -> Message:
    """An update cut to `secure_clip`, with its share of the noise; samples and loss are not told.

    stood: where tensors were before; None: zero. least: how many clients share the noise for certain.
    """
    changes = {
        name: tensor.double() - (0.0 if (origin := stood.get(name)) is None else origin.double())
        for name, tensor in message.tensors.items()
    }
    if not all(tensor.is_floating_point() for tensor in message.tensors.values()):
        raise BadMessage("a model with counters cannot be blurred; choose model.norm = 'frozen' or one without")
    length = torch.cat([change.flatten() for change in changes.values()]).norm().item()
    scale = min(1.0, options.secure_clip / length) if length else 1.0
    deviation = options.secure_noise * options.secure_clip / least**0.5
    told = {}
    for name, tensor in message.tensors.items():
        noise = normal(token_bytes(32), tensor.numel()).view(tensor.shape)
        told[name] = (tensor.double() - changes[name] * (1 - scale) + deviation * noise).to(tensor.dtype)
    return Message(message.kind, told, {name: type(value)(name == "samples") for name, value in message.meta.items()})


def unmask(member: "Member", told: Message) -> Message:
    return Message(SECURE, as_rows(member.reveal(told.tensors[CLIENTS].tolist()), LETTERS))


def as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def as_rows(texts: dict[int, bytes], name: str) -> dict[str, Tensor]:
    """Client → text, all of one length, as two tensors."""
    clients = sorted(texts)
    return {CLIENTS: torch.tensor(clients, dtype=torch.int64), name: as_tensor(b"".join(texts[c] for c in clients))}


def rows(message: Message, name: str) -> dict[int, bytes]:
    """Client → text, as `as_rows` made it; BadMessage where that cannot be."""
    found: Any = {key: message.tensors.get(key) for key in (CLIENTS, name)}
    clients, text = found[CLIENTS], found[name]
    if clients is None or text is None or clients.dtype != torch.int64 or text.dtype != torch.uint8:
        raise BadMessage(f"{name} are missing")
    names, flat = clients.reshape(-1).tolist(), text.reshape(-1).numpy().tobytes()
    if len(set(names)) < len(names) or (len(flat) % max(len(names), 1)):
        raise BadMessage(f"{name} are not one for every client")
    size = len(flat) // max(len(names), 1)
    return {client: flat[place * size : (place + 1) * size] for place, client in enumerate(names)}
