"""Engine `local`: all clients in this process, one after another, on one shared workspace."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from fedprotip.errors import FedprotipError
from fedprotip.federation.client import Workspace
from fedprotip.messages import Message
from fedprotip.methods.base import Knowledge


@dataclass(frozen=True)
class Reply:
    """A client's answer, or why there is none."""

    client: int
    message: Message | None = None
    error: str = ""


class LocalEngine:
    """Runs clients in the order of their ids and yields their replies as they come.

    Simulated clients share one model and read the server's knowledge: between two messages all of them
    would hold the same, so memory does not grow with their number.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def begin_task(self, task: int, knowledge: Knowledge) -> None:
        self.workspace.knowledge = knowledge
        self.workspace.begin_task(task)

    def present(self, clients: Iterable[int]) -> list[int]:
        """The clients that have data of the current task."""
        return [client for client in clients if self.workspace.samples(client)]

    def train(self, clients: list[int], round_: int, parcel: Callable[[int], list[Message]]) -> Iterator[Reply]:
        return self._ask(clients, parcel, lambda client: self.workspace.train(client, round_))

    def summarise(self, clients: list[int], kind: str, parcel: Callable[[int], list[Message]]) -> Iterator[Reply]:
        return self._ask(clients, parcel, lambda client: self.workspace.summarise(client, kind))

    def _ask(
        self, clients: list[int], parcel: Callable[[int], list[Message]], work: Callable[[int], Message]
    ) -> Iterator[Reply]:
        for client in clients:
            for message in parcel(client):
                if message.kind == "model":
                    self.workspace.receive(message)
            try:
                reply = Reply(client, work(client))
            except FedprotipError:
                raise
            except Exception as error:  # a failing client must not stop the others
                reply = Reply(client, error=f"{type(error).__name__}: {error}")
            yield reply
