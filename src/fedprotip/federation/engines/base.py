"""What an engine is: it puts questions to clients, wherever they run, and hands back their replies."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from fedprotip.errors import FedprotipError
from fedprotip.federation.parcels import Reply, Request
from fedprotip.messages import Message
from fedprotip.store.clients import ClientStore, StoreError

Private = Callable[[int], ClientStore]
"""Client → a copy of its private state, to look at."""


class Engine(Protocol):
    """Where clients run. Nothing else differs between engines: the same run gives the same bytes on each of them."""

    def ask(self, requests: Iterable[Request]) -> Iterator[Reply]:
        """The reply to every request, in the order of clients, whoever finished first; sums depend on the order."""

    def close(self) -> None:
        """End what the engine has started."""


def answered(client: int, work: Callable[[], Message]) -> Reply:
    """The reply that `work` gives; a failing client must not stop the others, a failing machine must."""
    try:
        return Reply(client, work())
    except (FedprotipError, StoreError):
        raise
    except Exception as error:
        return Reply(client, error=reason(error))


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
