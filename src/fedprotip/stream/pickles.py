"""A reader for the pickles of CIFAR-100 that builds bytes, numbers, lists, dicts and uint8 arrays, nothing else.

A pickle is a program. Here every name it may call leads to one of two passive classes below; any other is refused
before it is looked up, so a pickle that was tampered with can do nothing.
"""

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from fedprotip.errors import UsageError


class _Dtype:
    """Stands for numpy.dtype: remembers its name."""

    def __init__(self, name: Any = "", *flags: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        pass  # byte order and the like, which uint8 does not have


class _Array:
    """Stands for a numpy array: takes its state, and makes the array itself from plain bytes."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if dtype.name not in (b"u1", "u1") or fortran or math.prod(shape) != len(data):
            raise pickle.UnpicklingError("an array is not of bytes in C order")
        self.array = np.frombuffer(data, np.uint8).reshape(shape)


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ALLOWED[module, name]


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary of a CIFAR-100 pickle; keys as text, arrays as uint8; anything unexpected is a UsageError."""
    try:
        with path.open("rb") as file:
            raw = _Unpickler(file, encoding="bytes").load()
        found = {key.decode() if isinstance(key, bytes) else key: value for key, value in raw.items()}
        return {key: value.array if isinstance(value, _Array) else value for key, value in found.items()}
    except Exception as error:  # damaged or hostile bytes fail in any way
        reason = str(error).rstrip(".") or type(error).__name__
        raise UsageError(
            f"{path} is refused, as it is not a file of the official CIFAR-100 archive: {reason}."
        ) from None
