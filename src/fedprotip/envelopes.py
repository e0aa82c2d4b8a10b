"""What crosses in a message of Flower: a head of plain JSON, and parts that are bytes.

Known to both ends of a network, and to the process between them that Flower starts for every message: so neither torch
nor anything that needs it is imported here, and Flower itself only where its records are made.
"""

import json
import os
import struct
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol

from fedprotip.errors import UsageError

ASK, HELLO = "train.ask", "query.hello"
"""Types of messages: a question to a client, and who is there."""
MOST_HEAD = 2**26
"""Bytes of a head."""
SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Environment of everything that is Flower's: nothing is reported, looked up or installed, and Ray, whose processes run
whatever they are sent, listens on loopback alone: it does so on those systems, and by this switch on any."""


class Pipe(Protocol):
    """A line to a process on the same machine."""

    def read(self, size: int, /) -> bytes: ...

    def write(self, data: bytes, /) -> int: ...

    def flush(self) -> None: ...


def require_flower() -> None:
    """UsageError where Flower is not installed; where it is, its switches are set before it is imported."""
    if any(find_spec(name) is None for name in ("flwr", "ray")):
        raise UsageError('Flower is not installed; it comes with the extra: pip install "fedprotip[flower]".')
    os.environ.update(SWITCHES)


@dataclass(frozen=True)
class Envelope:
    """A head, and the messages of a parcel or a reply behind it."""

    head: dict[str, Any]
    parts: list[bytes] = field(default_factory=list)

    def records(self) -> Any:
        """As content of a message of Flower; parts are arrays, which travel in pieces and only once if they are equal.

        A model that goes to many clients is one object of the SuperLink.
        """
        from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

        arrays = {f"{n:04d}": Array("uint8", (len(part),), "safetensors", part) for n, part in enumerate(self.parts)}
        return RecordDict({"head": ConfigRecord({"json": json.dumps(self.head)}), "parts": ArrayRecord(arrays)})

    @classmethod
    def of(cls, records: Any) -> "Envelope":
        """The envelope of `records`; a ValueError where they are something else."""
        try:
            head = json.loads(str(records["head"]["json"]))
            arrays = records["parts"]
            parts = [bytes(arrays[name].data) for name in sorted(arrays)]
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a readable envelope ({type(error).__name__})") from None
        if not isinstance(head, dict):
            raise ValueError("not a readable envelope (head)")
        return cls(head, parts)

    def write(self, stream: Pipe) -> None:
        """To a process on the same machine."""
        head = json.dumps(self.head).encode()
        stream.write(struct.pack("<QQ", len(head), len(self.parts)) + head)
        for part in self.parts:
            stream.write(struct.pack("<Q", len(part)))
            stream.write(part)
        stream.flush()

    @classmethod
    def read(cls, stream: Pipe) -> "Envelope":
        """What `write` has written; EOFError where it ends too early."""
        length, count = struct.unpack("<QQ", _exactly(stream, 16))
        if length > MOST_HEAD:
            raise EOFError("the head is too long")
        head = json.loads(_exactly(stream, length))
        return cls(head, [_exactly(stream, struct.unpack("<Q", _exactly(stream, 8))[0]) for _ in range(count)])


def _exactly(stream: Pipe, count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError("the other end has hung up")
    return data
