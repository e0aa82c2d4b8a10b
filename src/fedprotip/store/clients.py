"""State of clients that lasts between rounds, within a memory budget."""

import sys
from collections import OrderedDict
from collections.abc import Mapping

from fedprotip.store.files import Tensors, own_copy, size_of
from fedprotip.store.memory import hand_back_memory
from fedprotip.store.objects import ObjectFolder

MOVED_OUT = 2**25
"""Bytes of client state that go to disk before freed memory is handed back to the system."""


class StoreError(OSError):
    """The store cannot write: a problem of this machine, not of the client whose state it is."""


class ClientStore:
    """State of clients that lasts between rounds: one group of tensors per (client, name).

    Entries within the memory budget stay in memory, the others live on disk, so the memory of a simulation
    does not grow with the number of clients. What goes in and what comes out are copies.
    """

    def __init__(self, objects: ObjectFolder, budget_bytes: int) -> None:
        self._objects = objects
        self._budget = budget_bytes
        self._cache: OrderedDict[str, Tensors] = OrderedDict()
        self._index: dict[str, str] = {}  # "client/name" → object, for entries that are on disk
        self.cached_bytes = 0
        self._moved_out = 0  # bytes, since freed memory was handed back last

    def put(self, client: int, name: str, tensors: Tensors) -> None:
        key = f"{client}/{name}"
        self._drop(key)
        self._index.pop(key, None)
        self._remember(key, {name: own_copy(tensor) for name, tensor in tensors.items()})

    def get(self, client: int, name: str) -> Tensors | None:
        key = f"{client}/{name}"
        if key in self._cache:
            self._cache.move_to_end(key)
            return {name: own_copy(tensor) for name, tensor in self._cache[key].items()}
        if key not in self._index:
            return None
        tensors = self._objects.read(self._index[key])
        self._remember(key, {name: own_copy(tensor) for name, tensor in tensors.items()})
        return tensors

    def flush(self) -> dict[str, str]:
        """Write what is not on disk yet; the index of every entry."""
        for key in self._cache:
            self._persist(key)
        return dict(sorted(self._index.items()))

    def restore(self, index: Mapping[str, str]) -> None:
        self._cache.clear()
        self.cached_bytes = 0
        self._index = dict(index)

    def glance(self) -> "ClientStore":
        """The same entries, to look at: what is put there is forgotten with it."""
        other = ClientStore(self._objects, sys.maxsize)
        other._index, other._cache, other.cached_bytes = dict(self._index), self._cache.copy(), self.cached_bytes
        return other

    def _remember(self, key: str, tensors: Tensors) -> None:
        self._cache[key] = tensors
        self.cached_bytes += size_of(tensors)
        while self.cached_bytes > self._budget:
            oldest = next(iter(self._cache))
            self._persist(oldest)
            self._moved_out += size_of(self._cache[oldest])
            self._drop(oldest)
        if self._moved_out > MOVED_OUT:  # what so many clients leave behind is scattered over the heap
            self._moved_out = 0
            hand_back_memory()

    def _persist(self, key: str) -> None:
        if key not in self._index:
            try:
                self._index[key] = self._objects.write(self._cache[key])
            except OSError as error:
                raise StoreError(error.errno, error.strerror) from error

    def _drop(self, key: str) -> None:
        if key in self._cache:
            self.cached_bytes -= size_of(self._cache.pop(key))
