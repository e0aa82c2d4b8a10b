"""Dataset → tasks → clients. Only indices: no sample is copied per task or client."""

from fedprotip.stream.stream import Batch, Stream, Task, build_stream, check_clients

__all__ = ["Batch", "Stream", "Task", "build_stream", "check_clients"]
