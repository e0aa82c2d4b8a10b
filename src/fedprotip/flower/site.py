"""The program of a site: it holds the site's data, model and private state, and answers what its SuperNode passes on.

Data stays here. The server learns how many samples of every class there are, task by task; with `method.secure` not
even that.
"""

import json
import os
import re
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedprotip import settings as settings_file
from fedprotip.envelopes import HELLO, Envelope
from fedprotip.errors import UsageError, nearest
from fedprotip.federation.client import Client
from fedprotip.federation.engines.simulation import answered_by, reason_of
from fedprotip.federation.secure.demands import NONE, Demands
from fedprotip.settings import DataSettings, Settings, tomltext
from fedprotip.store.plain import PlainFolder
from fedprotip.store.site import remove_secrets
from fedprotip.stream import Stream, build_stream
from fedprotip.stream.datasets import load_dataset
from fedprotip.stream.holdings import Holding
from fedprotip.stream.kept import Settled

if TYPE_CHECKING:
    from fedprotip.federation.secure.signed import Signer

Tell = Callable[[str], None]
"""Told what happens, in sentences."""


class SiteProgram:
    """One client with its data. A plan tells it about tasks and names; with another one it reads its data anew."""

    def __init__(
        self,
        client: int,
        folder: Path,
        data: DataSettings,
        own: bool,
        tell: Tell,
        signer: "Signer | None" = None,
        demands: Demands = NONE,
    ) -> None:
        """`own`: all that `data` names is this client's; else it has its share of it, as in one process.

        `signer`: of a site that has a key, for secure sums; `demands`: what it asks of every plan.
        """
        self._signer, self._demands = signer, demands
        self._number, self._folder, self._data, self._own, self._tell = client, folder, data, own, tell
        self._plan = ""
        self._client: Client | None = None
        self._holding: Holding | None = None
        self._secure = False
        folder.mkdir(parents=True, exist_ok=True)

    def answer(self, envelope: Envelope) -> Envelope:
        """The answer to a message; whatever goes wrong is told here, and to the server."""
        mine = {"client": self._number}
        try:
            client, holding = self._prepared(envelope.head["plan"])
            if envelope.head.get("type") == HELLO:
                self._tell("The server asks who is here.")
                return Envelope({**mine, "holds": {} if self._secure else holds(holding)})
            if envelope.head.get("client") != self._number:
                raise UsageError(f"This is client {self._number}, not {envelope.head.get('client')}.")
        except Exception as error:  # whatever is sent, this program stays
            self._tell(f"Refused: {reason_of(error)}.")
            return Envelope({**mine, "failed": reason_of(error)})
        reply = answered_by(lambda: client, envelope)
        failed = reply.head.get("failed")
        self._tell(f"Failed: {failed}." if failed else f"Answered: {reply.head['kind']}.")
        return reply

    def _prepared(self, plan: dict[str, Any]) -> tuple[Client, Holding]:
        text = json.dumps(plan, sort_keys=True)
        if (theirs := plan["version"]) != version("fedprotip"):
            raise UsageError(
                f"This site has fedprotip {version('fedprotip')}, the server has {theirs}; install the same."
            )
        if self._client is None or self._holding is None or text != self._plan:
            told = settings_file.load(tomltext.loads(plan["settings"]))
            self._demands.check(told.method, "this site")
            settings = told.model_copy(update={"data": self._data})
            kept = Settled.of(plan["kept"], plan["learned"])
            stream = own_stream(settings, self._number, kept) if self._own else build_stream(settings, kept=kept)
            folder = self._folder / run_name(plan["run"])
            self.close()
            self._forget_secrets(folder.name)
            self._holding = Holding(stream, self._number)
            self._client = Client(folder, self._holding, signer=self._signer, demands=self._demands)
            self._plan, self._secure = text, told.method.secure
            self._tell(f"A run of {told.method.name}; what this site keeps for it is in {folder}.")
        return self._client, self._holding

    def _forget_secrets(self, run: str) -> None:
        """Of sums of other runs, in whose middle this site was killed; nobody asks it about them any more."""
        site = PlainFolder(self._folder)
        for other in site.folders("?" * len(run)):
            if other != run:
                remove_secrets(site.inner(other))

    def close(self) -> None:
        if self._client:
            self._client.close()
        self._client = None


def run_name(name: Any) -> str:
    """The folder of a run among those of a site, which the server names: no path out of it."""
    if not isinstance(name, str) or not re.fullmatch("[0-9a-f]{32}", name):
        raise UsageError("The plan of the server names no run.")
    return name


def own_stream(settings: Settings, client: int, kept: Settled) -> Stream:
    """A stream whose samples are all this client's; it may lack classes of a task, and have none of a whole task.

    UsageError where it has a class that the plan does not know.
    """
    dataset = load_dataset(kept.sized(settings.data), kept)
    strange = dataset.classes[len(kept.classes) :]
    if strange:
        raise UsageError(
            f"The data of client {client} has the class {strange[0]!r}, which is in no task of the plan; "
            f"{nearest(strange[0], kept.classes)}."
        )
    if tuple(dataset.image_shape) != kept.shape:
        raise UsageError(
            f"The images of client {client} are {dataset.image_shape} (channels, height, width), those of the plan "
            f"{kept.shape}."
        )
    alone = settings.clients.model_copy(update={"roster": {"0": str(client)}, "partition": "iid"})
    everything = Settled(kept.classes, kept.domains, kept.clients, kept.tasks, kept.shape, learned=len(kept.tasks))
    mine = settings.model_copy(update={"clients": alone})
    return build_stream(mine, dataset, everything)


def holds(holding: Holding) -> dict[str, dict[str, int]]:
    """Task → class → how many samples there are, for a server that may see what one client has."""
    stream = holding.stream
    found = {}
    for task in stream.tasks:
        labels = [*holding.labels(task.index).tolist(), *holding.held_back_labels(task.index).tolist()]
        found[task.name] = {stream.dataset.classes[label]: count for label, count in sorted(Counter(labels).items())}
    return found


def serve(program: SiteProgram, place: Path, ready: Callable[[], None]) -> None:
    """Answer at a socket, one message after another, until the process is ended."""
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(place))
        os.chmod(place, 0o600)
        door.listen()
        ready()
        while True:
            connection, _ = door.accept()
            gone = suppress(EOFError, OSError, ValueError)  # whoever asked; also when the rest of an answer is sent
            with gone, connection, connection.makefile("rwb") as stream:
                program.answer(Envelope.read(stream)).write(stream)
