"""Messages that wait on disk, so that memory does not grow with the number of clients."""

from os import SEEK_END
from tempfile import TemporaryFile

from fedprotip.messages import Message

Place = tuple[int, int]
"""Where a message is: its first byte and its length."""


class Spool:
    """A file without a name: it is gone with the process, however that ends."""

    def __init__(self) -> None:
        self._file = TemporaryFile(prefix="fedprotip-")  # noqa: SIM115 (closed in __exit__)

    def __enter__(self) -> "Spool":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def put(self, message: Message) -> Place:
        return self.put_bytes(message.to_bytes())

    def put_bytes(self, data: bytes) -> Place:
        """A message that has not been read yet."""
        return self._file.seek(0, SEEK_END), self._file.write(data)

    def get(self, place: Place) -> Message:
        """The message; BadMessage where its bytes were none."""
        self._file.seek(place[0])
        return Message.from_bytes(self._file.read(place[1]))
