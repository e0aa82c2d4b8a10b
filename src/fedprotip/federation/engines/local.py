"""Engine `local`: all clients in this process, one after another, on one shared workspace."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from fedprotip.errors import FedprotipError
from fedprotip.federation.client import Workspace, full_state, load_state
from fedprotip.messages import Message
from fedprotip.methods.base import Knowledge
from fedprotip.models import Network
from fedprotip.store.files import StoreError


@dataclass(frozen=True)
class Reply:
    """A client's answer, or why there is none."""

    client: int
    message: Message | None = None
    error: str = ""


class LocalEngine:
    """Runs clients in the order of their ids and yields their replies as they come.

    A client that has received its parcel holds the server's model and knowledge. So simulated clients share
    one model, which is set back to the server's before each of them, and read the server's knowledge: memory
    does not grow with their number. The parcels themselves are only counted here.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace

    def begin_task(self, task: int, network: Network, knowledge: Knowledge) -> None:
        self._network = network
        self.workspace.knowledge = knowledge
        self.workspace.begin_task(task)
        load_state(self.workspace.network, full_state(network))  # also what moved in earlier tasks only

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
            parcel(client)
            self.workspace.copy_from(self._network)
            try:
                reply = Reply(client, work(client))
            except (FedprotipError, StoreError):
                raise
            except Exception as error:  # a failing client must not stop the others
                reply = Reply(client, error=f"{type(error).__name__}: {error}")
            yield reply
