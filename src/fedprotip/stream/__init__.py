"""Dataset → tasks → clients. Only indices: no sample is copied per task or client."""

from fedprotip.stream.advice import check_clients
from fedprotip.stream.readings import settled
from fedprotip.stream.stream import Batch, Stream, Task, build_stream

__all__ = ["Batch", "Stream", "Task", "build_stream", "check_clients", "settled"]
