"""A site that goes wrong, as a process: python -m tests.flower.odd_site DEPLOYMENT.toml CLIENT liar|mortal|slow|doomed.

liar: its answers are honest but for one kind of nonsense in every round, and bases that cannot be. mortal: its
SuperNode is killed while it extracts the bases of the first task; as at any site, another one is started. slow: it
answers with them as soon as the run has given it up.
doomed: it dies with its SuperNode where its masked model of the second round is asked for.
"""

import os
import sys
from pathlib import Path

import torch

from fedprotip.envelopes import Envelope
from fedprotip.federation.parcels import Ask
from fedprotip.flower import processes
from fedprotip.flower.deployment import Place
from fedprotip.flower.site import SiteProgram
from fedprotip.messages import Message
from tests.flower.loopback import events, kill_site, kill_supernode, wait_for


def nan(message):
    tensors = {n: torch.full_like(t, torch.nan) if t.is_floating_point() else t for n, t in message.tensors.items()}
    return tensors, message.meta


def longer(message):
    return {name: torch.cat([t.reshape(-1), t.reshape(-1)[:1]]) for name, t in message.tensors.items()}, message.meta


def earlier(message):
    return message.tensors, {**message.meta, "step": message.meta["step"] - 1}


def many(message):
    return message.tensors, {**message.meta, "samples": 10**9}


def oversized(message):
    """Bases with more columns than a layer has inputs."""
    wide = {n: torch.eye(len(t), dtype=t.dtype).repeat(1, 2) if t.dim() == 2 else t for n, t in message.tensors.items()}
    return wide, message.meta


def skewed(message):
    """Bases whose columns are too long."""
    return {name: 2 * t if t.dim() == 2 else t for name, t in message.tensors.items()}, message.meta


LIES = {
    ("model", 0, 0): nan,
    ("model", 0, 1): longer,
    ("basis", 0, None): oversized,
    ("model", 1, 0): earlier,
    ("model", 1, 1): many,
    ("basis", 1, None): skewed,
}
"""Exchange, task, round → what becomes of the answer."""


def lying(ask, answer):
    lie, envelope = LIES.get((ask.exchange, ask.task, ask.round)), answer()
    if lie is None or not envelope.parts:
        return envelope
    message = Message.from_bytes(envelope.parts[0])
    return Envelope(envelope.head, [Message(message.kind, *lie(message)).to_bytes()])


def dying(ask, answer):
    if (ask.exchange, ask.task) == ("basis", 0):
        kill_supernode(os.getpid())
    return answer()


def slow(out, client):
    def change(ask, answer):
        reply = answer()
        if (ask.exchange, ask.task) == ("basis", 0):
            wait_for(lambda: client in {event["client"] for event in events(out, "failure")}, 600)
        return reply

    return change


def doomed(ask, answer):
    if (ask.phase, ask.round) == ("masked", 1):
        kill_site(os.getpid())
    return answer()


def main(file, client, way):
    original, place = SiteProgram.answer, Place(Path(file))
    ways = {"liar": lying, "mortal": dying, "doomed": doomed, "slow": slow(place.needed("out"), int(client))}
    change = ways[way]

    def answer(self, envelope):
        if not envelope.parts:
            return original(self, envelope)
        return change(Ask.of(Message.from_bytes(envelope.parts[0])), lambda: original(self, envelope))

    SiteProgram.answer = answer
    processes.join(place, place.site(int(client)), lambda text: print(text, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
