"""Engine `flower`: clients behind a grid of Flower, on other machines or in its simulation.

Around `Engine.ask` only; the other end is `Client.handle`, in `simulation.py` or in the program of a site
(`fedprotip/flower`). A client that fails, says nothing in time or is not there is left out of the exchange and named:
over a network nothing of a client stops the others.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol

from fedprotip.envelopes import ASK, HELLO, Envelope
from fedprotip.errors import RunError, shortened
from fedprotip.federation.engines.base import reason
from fedprotip.federation.parcels import LOST, Ask, Reply, Request
from fedprotip.federation.spool import Spool
from fedprotip.messages import SAMPLES, BadMessage, Message
from fedprotip.settings import DataSettings, Settings, to_toml
from fedprotip.store.plain import PlainFolder
from fedprotip.store.records import one_line, read_json
from fedprotip.stream import Stream
from fedprotip.stream.plan import TaskPlan

if TYPE_CHECKING:
    from flwr.app import Message as FlowerMessage
    from flwr.serverapp import Grid

ROOM = 256
"""Questions that are under way at once: so many replies wait on disk at most, each in an open file."""
HANDFUL = 4
"""Replies that are asked for at once: Flower holds all of them that have arrived in memory, each more than once."""
PAUSE = 0.2
"""Seconds between two looks for replies."""
LAG = 300.0
"""Seconds that an answer may wait to be taken: for up to 180 Flower waits for one whose site died while it sent it."""
HELLO_AGAIN = 600.0
"""Seconds after which a site that has not said which client it is is asked again; it reads its data for that."""
MEETING = 60.0
"""Seconds that a run without patience has, too, for a site that it sees for the first time to say who it is."""
AGAIN = 30.0
"""Seconds after which a site that was refused is asked again."""
MOST_CLIENTS = 10**9
"""Clients are numbered below this."""
SITES = "sites.json"
"""Of the run folder: what sites have said about themselves."""
MACHINE_GONE = 5
GONE = {3: "its answer is not complete", MACHINE_GONE: "its machine is gone", 8: "its process ended"}
"""Errors of Flower in words."""

over: ContextVar["Reachable | None"] = ContextVar("over", default=None)
"""The network over which runs of this process go; None: a simulation."""


@dataclass(frozen=True)
class Reachable:
    """A grid with real sites behind it."""

    grid: "Grid"
    keyed: bool = False  # whether its sites are known by keys
    bound: Callable[[], Mapping[int, str]] = dict  # client → the key (hex) that was admitted for it, and only for it


@contextmanager
def across(network: Reachable) -> Iterator[None]:
    """Runs inside go over this network, if their engine is `flower`."""
    token = over.set(network)
    try:
        yield
    finally:
        over.reset(token)


class Nodes(Protocol):
    """Who is where."""

    def of(self, client: int, began: float, meanwhile: Callable[[], None]) -> int | str:
        """The node that has this client, or why there is none; `meanwhile` is done as long as it is waited for.

        `began`: when the exchange did, from which it is known how long all of its clients are waited for.
        """


class FlowerEngine:
    """Puts questions to nodes and hands their replies back in the order of clients; they wait on disk for that."""

    def __init__(
        self,
        grid: "Grid",
        nodes: Nodes,
        timeout: float,
        plan: dict[str, Any] | None = None,
        room: int = ROOM,
        closing: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`timeout`: seconds that an answer may take; `plan`: for sites that read data of their own.

        `check` raises where nobody can answer any more.
        """
        self._grid, self._nodes, self._timeout, self._room = grid, nodes, timeout, room
        self._plan, self._closing, self._check = plan, closing, check

    def ask(self, requests: Iterable[Request]) -> Iterator[Reply]:
        source, order, more = iter(requests), list[int](), True
        round_, began = Round(self._grid, self._timeout), time.monotonic()
        while True:
            while more and len(order) < self._room:
                request = next(source, None)
                more = request is not None
                if request:
                    order.append(request.client)
                    round_.send(request, self._nodes.of(request.client, began, round_.collect), self._plan)
            if not order:
                return
            while order[0] not in round_.done:
                self._check()
                round_.collect()
            yield round_.reply(order.pop(0))

    def close(self) -> None:
        self._closing()


@dataclass(frozen=True)
class Sent:
    """A question that is under way."""

    request: Request
    node: int
    plan: dict[str, Any] | None
    until: float


class Waiting:
    """A reply on disk, in a file of its own: its room is free again when its turn has come."""

    def __init__(self, data: bytes) -> None:
        self._spool = Spool()
        self._place = self._spool.put_bytes(data)

    def message(self) -> Message:
        """The reply; BadMessage where its bytes were none. It can be had once."""
        with self._spool as spool:
            return spool.get(self._place)


class Round:
    """The questions of one exchange and what has come of them."""

    def __init__(self, grid: "Grid", timeout: float) -> None:
        self._grid, self._timeout = grid, timeout
        self._under_way: dict[str, Sent] = {}
        self.done: dict[int, Waiting | str] = {}  # client → its reply, or why there is none

    def send(self, request: Request, node: int | str, plan: dict[str, Any] | None) -> None:
        if isinstance(node, str):
            request.unsent()
            self.done[request.client] = node
            return
        head = {"client": request.client} | ({"plan": plan} if plan else {})
        envelope = Envelope(head, [message.to_bytes() for message in request.parcel])
        kept = replace(request, parcel=request.parcel[:1])  # no model for every question that is under way
        sent = Sent(kept, node, plan, time.monotonic() + self._timeout)
        if name := push(self._grid, node, ASK, envelope, self._timeout):
            self._under_way[name] = sent
        else:
            request.unsent()
            self.done[request.client] = "the question could not be sent"

    def collect(self) -> None:
        """Take what has arrived; wait a moment where nothing has."""
        if not self._under_way:
            return
        began, arrived = time.monotonic(), False
        for message in pull(self._grid, list(self._under_way)):
            arrived = True
            if sent := self._under_way.pop(message.metadata.reply_to_message_id, None):
                self._take(sent, message)
        late = [name for name, sent in self._under_way.items() if began > sent.until]  # all others were asked for
        for name in late:
            client = self._under_way.pop(name).request.client
            self.done[client] = f"no answer within {self._timeout:g} seconds (run.timeout)"
        if not arrived:
            time.sleep(PAUSE)

    def reply(self, client: int) -> Reply:
        found = self.done.pop(client)
        if isinstance(found, str):
            return Reply(client, error=found)
        try:
            return Reply(client, found.message())
        except BadMessage as error:
            return Reply(client, error=reason(error))

    def _take(self, sent: Sent, message: "FlowerMessage") -> None:
        request = sent.request
        try:
            envelope = opened(message)
            (part,) = envelope.parts
            if envelope.head.get("kind") == LOST and Ask.of(request.parcel[0]).since is not None:
                anew = request.anew(Message.from_bytes(part))
                self.send(replace(request, parcel=anew), sent.node, sent.plan)
            else:
                self.done[request.client] = Waiting(part)
        except (ValueError, BadMessage) as error:
            self.done[request.client] = str(error)


def push(grid: "Grid", node: int, kind: str, envelope: Envelope, timeout: float) -> str | None:
    """The name under which the answer comes; None where it could not be sent."""
    from flwr.app import Message as FlowerMessage

    names = list(grid.push_messages([FlowerMessage(envelope.records(), node, kind, ttl=timeout + LAG)]))
    return names[0] if names and names[0] else None


def pull(grid: "Grid", names: list[str]) -> Iterator["FlowerMessage"]:
    """What has arrived of the answers of these names, a handful in memory at a time."""
    for first in range(0, len(names), HANDFUL):
        found = list(grid.pull_messages(names[first : first + HANDFUL]))
        while found:
            yield found.pop()


def received(message: "FlowerMessage") -> Envelope:
    """What has come from a node; a ValueError says why nothing has."""
    if message.has_error():
        told = shortened(str(message.error.reason or ""))
        raise ValueError(f"{GONE.get(message.error.code, 'it failed')} (Flower's error {message.error.code}: {told})")
    return Envelope.of(message.content)


def opened(message: "FlowerMessage") -> Envelope:
    """What a node has answered; a ValueError says why it has not."""
    envelope = received(message)
    if failed := envelope.head.get("failed"):
        raise ValueError(shortened(str(failed), 500))
    return envelope


def plan_of(settings: Settings, stream: Stream, learned: int, run: str) -> dict[str, Any]:
    """What a site has to know to read data of its own: all settings but for the data, names, and what is settled.

    `run`: by which a site tells what it keeps for this run from what it keeps for others.
    """
    told = settings.model_copy(update={"data": DataSettings()})
    kept = stream.kept
    tasks = [TaskPlan(name=task.name, classes=task.classes) for task in stream.tasks]
    record = {
        "classes": list(stream.dataset.classes),
        "domains": list(stream.dataset.domains or kept.domains),
        "clients": list(stream.dataset.clients or kept.clients),
        "tasks": [{"name": task.name, "labels": list(task.classes)} for task in tasks],
        "shape": list(stream.dataset.image_shape),
    }
    plan = {"run": run, "settings": to_toml(told), "kept": record, "learned": learned}
    return {"version": version("fedprotip"), **plan}


@dataclass(frozen=True)
class Refusal:
    """A node that is not taken, and why."""

    client: int | None  # who it is; None: nobody knows
    why: str
    until: float = field(default_factory=lambda: time.monotonic() + AGAIN)  # then it is asked again: it may be mended


@dataclass(frozen=True)
class Hello:
    """A node that was asked who it is."""

    node: int
    key: bytes
    until: float


class Sites:
    """Programs of sites, each of which says which client it is; what they said is in the run folder.

    Nobody is waited for who does not speak: answers are taken whenever somebody is looked for.
    """

    def __init__(self, network: Reachable, plan: dict[str, Any], folder: PlainFolder, patience: float) -> None:
        """`patience`: seconds of an exchange in which the run waits for clients that are not there."""
        self._network, self._plan, self._folder, self._patience = network, plan, folder, patience
        self._clients: dict[int, int] = {}  # node → the client it is
        self._refused: dict[int, Refusal] = {}
        self._asked: dict[str, Hello] = {}  # name of the answer → whose it is
        self._met: dict[int, float] = {}  # node → when it was seen first
        self._missed: set[int] = set()  # clients that were waited for in vain
        self._told = _said_before(folder)

    def of(self, client: int, began: float, meanwhile: Callable[[], None]) -> int | str:
        end = began + (0 if client in self._missed else self._patience)
        while True:
            online = {node.node_id: node.public_key for node in self._network.grid.get_nodes()}
            self._meet(online)
            here = [node for node, known in self._clients.items() if known == client and node in online]
            if here:
                self._missed.discard(client)
                return here[-1]  # the last one that came: an earlier one may be about to be missed
            for node, refusal in self._refused.items():
                if refusal.client == client and node in online:
                    return refusal.why
            silent = [hello.node for hello in self._asked.values() if hello.node in online]
            if time.monotonic() > max([end, *(self._met[node] + MEETING for node in silent)]):
                self._missed.add(client)
                return self._absent(online, len(silent))
            meanwhile()  # answers of others do not wait forever
            time.sleep(PAUSE if silent else 1)

    def _meet(self, online: dict[int, bytes]) -> None:
        """Ask nodes that nobody knows who they are; take what those say that were asked before."""
        grid, now = self._network.grid, time.monotonic()
        self._refused = {node: refusal for node, refusal in self._refused.items() if now < refusal.until}
        self._asked = {name: hello for name, hello in self._asked.items() if hello.node in online and now < hello.until}
        known = {*self._clients, *self._refused, *(hello.node for hello in self._asked.values())}
        for node in [node for node in online if node not in known]:
            if name := push(grid, node, HELLO, Envelope({"plan": self._plan}), HELLO_AGAIN):
                self._met.setdefault(node, now)
                self._asked[name] = Hello(node, online[node], now + HELLO_AGAIN)
        for message in pull(grid, list(self._asked)):
            if hello := self._asked.pop(message.metadata.reply_to_message_id, None):
                self._note(hello, message)

    def _note(self, hello: Hello, message: "FlowerMessage") -> None:
        try:
            head = received(message).head
        except ValueError as error:
            if not message.has_error() or message.error.code != MACHINE_GONE:  # that one is asked when it is back
                self._refused[hello.node] = Refusal(None, str(error))
            return
        client = head.get("client")
        key = hello.key.hex() if self._network.keyed else ""
        bound = self._network.bound() if self._network.keyed else {}
        known = self._told.get(str(client), {}).get("key", "")
        if type(client) is not int or not 0 <= client < MOST_CLIENTS:
            self._refused[hello.node] = Refusal(None, "it does not say which client it is")
        elif other := [one for one, its in self._keys(bound).items() if key and its == key and one != client]:
            self._refused[hello.node] = Refusal(None, f"it says it is client {client} and has the key of {other[0]}")
        elif client in bound and bound[client] != key:
            why = f"it says it is client {client} and does not have the key that was admitted for that one"
            self._refused[hello.node] = Refusal(None, why)
        elif client not in bound and known not in ("", key):
            why = f"it says it is client {client} and has another key than before"
            self._refused[hello.node] = Refusal(None, why)
        else:
            holds = believable(head.get("holds"), self._plan)
            self._told[str(client)] = {"key": key, "holds": holds}
            self._folder.write(SITES, json.dumps(self._told, indent=1, ensure_ascii=False) + "\n")
            if failed := head.get("failed"):
                self._refused[hello.node] = Refusal(client, shortened(str(failed), 500))
            else:
                self._clients[hello.node] = client

    def _keys(self, bound: Mapping[int, str]) -> dict[int, str]:
        """Client → its key: as it was when it came, or as it was admitted since."""
        return {int(client): told.get("key", "") for client, told in self._told.items()} | dict(bound)

    def _absent(self, online: dict[int, bytes], silent: int) -> str:
        """Why there is no such client, with what is known of sites that may be it."""
        nameless = [refusal.why for node, refusal in self._refused.items() if refusal.client is None and node in online]
        told = ["it is not connected"]
        told += [f"sites that have not said yet which client they are: {silent}"] if silent else []
        return "; ".join([*told, *(f"a site that is no client yet: {why}" for why in nameless[:3])])


def _said_before(folder: PlainFolder) -> dict[str, dict[str, Any]]:
    """What sites have said when the run was at work before; of a stranger's folder perhaps nothing of the kind."""
    told = read_json(folder.path / SITES) if folder.has(SITES) else {}
    for client, said in told.items():
        if not (client.isdecimal() and isinstance(said, dict) and isinstance(said.get("key"), str)):
            raise RunError(
                f"{folder.path / SITES} is damaged: {one_line(client, 40)!r} is no site that said something."
            )
    return told


def believable(holds: Any, plan: dict[str, Any]) -> dict[str, dict[str, int]]:
    """What a site says it has, as far as the plan knows tasks and classes of these names: no more than that is kept."""
    tasks, classes = {task["name"] for task in plan["kept"]["tasks"]}, set(plan["kept"]["classes"])
    found: dict[str, dict[str, int]] = {}
    for task, counts in holds.items() if isinstance(holds, dict) else ():
        if task in tasks and isinstance(counts, dict):
            found[task] = {
                name: count
                for name, count in counts.items()
                if name in classes and type(count) is int and 0 <= count <= SAMPLES
            }
    return found
