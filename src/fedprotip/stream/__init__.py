"""Dataset → tasks → clients. Only indices: no sample is copied per task or client.

Whoever only answers imports `stream.plan` alone, and no dataset.
"""

from typing import TYPE_CHECKING

from fedprotip.lazy import lazily

if TYPE_CHECKING:
    from fedprotip.stream.advice import check_clients
    from fedprotip.stream.readings import spelled_out
    from fedprotip.stream.stream import Batch, Stream, Task, build_stream

__all__ = ["Batch", "Stream", "Task", "build_stream", "check_clients", "spelled_out"]

__getattr__ = lazily(
    __name__,
    {
        "check_clients": "fedprotip.stream.advice",
        "spelled_out": "fedprotip.stream.readings",
        **dict.fromkeys(("Batch", "Stream", "Task", "build_stream"), "fedprotip.stream.stream"),
    },
)
