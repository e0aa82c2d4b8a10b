"""Fixed point over the integers modulo 2^64: how a reply becomes numbers that can be summed in secret, and back.

Sums in the ring are exact, so a sum does not depend on masks, on the order of clients or on the engine.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedprotip.messages import BadMessage, Message
from fedprotip.store.files import Tensors

WHOLE = 2.0**62
"""The absolute value of a sum stays below this: a quarter of the ring, so that what cannot be a sum is noticed."""
COUNTER = 2.0**8
"""Instead of 2^fraction for integers in a mean: it is rounded to one of them, and they may be large."""
FINE = 2.0**30
"""Numbers in float64 have a second word each, for what the first one rounds off: 30 further bits behind the point."""
COUNT, WEIGHT = 0, 1
"""The first places of every vector: one for each client, and its weight."""
DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64)}


@dataclass(frozen=True)
class Layout:
    """What stands where in a vector; all clients of a sum have the same."""

    numbers: tuple[tuple[str, str], ...]  # of the metadata: name, int or float
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]  # name, dtype, shape

    @classmethod
    def of(cls, message: Message) -> "Layout":
        """Of a reply; BadMessage where something in it cannot be summed."""
        numbers = []
        for name, value in sorted(message.meta.items()):
            if type(value) not in (int, float):
                raise BadMessage(f"{name} = {value!r} of a reply is no number, so it cannot be summed in secret")
            numbers.append((name, type(value).__name__))
        tensors = []
        for name, tensor in sorted(message.tensors.items()):
            if str(tensor.dtype) not in DTYPES:
                raise BadMessage(f"{name} of a reply is {tensor.dtype}, which cannot be summed in secret")
            tensors.append((name, str(tensor.dtype), tuple(tensor.shape)))
        return cls(tuple(numbers), tuple(tensors))

    @property
    def length(self) -> int:
        return 2 + len(self.numbers) + sum(math.prod(shape) * _words(kind) for _, kind, shape in self.tensors)

    def text(self) -> str:
        return json.dumps([self.numbers, self.tensors])

    @classmethod
    def read(cls, text: Any) -> "Layout":
        """As a client told it; BadMessage where it is none."""
        try:
            numbers, tensors = json.loads(text)
            shapes = [(str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in tensors]
            layout = cls(tuple((str(name), str(kind)) for name, kind in numbers), tuple(shapes))
        except (ValueError, TypeError, RecursionError):
            raise BadMessage("it does not say what its numbers are") from None
        kinds = {kind for _, kind in layout.numbers} <= {"int", "float"}
        if not kinds or any(dtype not in DTYPES or min(shape, default=0) < 0 for _, dtype, shape in shapes):
            raise BadMessage("it says of its numbers what cannot be")
        return layout


def _words(kind: str) -> int:
    return 2 if DTYPES[kind] == torch.float64 else 1


def encode(message: Message, weight: float, clients: int, mean: bool, fraction: int = 32) -> np.ndarray:
    """A reply with its weight, as integers modulo 2^64; BadMessage where the sum of so many clients could overflow.

    mean: everything but metadata is multiplied by the weight, to be divided by the sum of all weights. Else integers
    stay integers. `fraction`: bits behind the point of other numbers.
    """
    most, one = WHOLE / clients, 2.0**fraction
    parts = [np.ones(1, dtype=np.uint64), _fixed("the weight", torch.tensor([weight], dtype=torch.float64), one, most)]
    for name, value in sorted(message.meta.items()):
        scale = one if isinstance(value, float) else 1.0
        parts.append(_fixed(name, torch.tensor([value], dtype=torch.float64), scale, most))
    for name, tensor in sorted(message.tensors.items()):
        flat = tensor.detach().cpu().reshape(-1)
        if tensor.is_floating_point() or mean:
            scale = one if tensor.is_floating_point() else COUNTER
            parts.append(_fixed(name, flat.double(), weight * scale, most))
            if _words(str(tensor.dtype)) == 2:
                scaled = flat * (weight * scale)
                parts.append(_fixed(name, scaled - scaled.round(), FINE, most))
        else:
            parts.append(_whole(name, flat.long(), most))
    return np.concatenate(parts)


def _fixed(name: str, values: Tensor, factor: float, most: float) -> np.ndarray:
    scaled = values * factor
    largest = scaled.abs().max().item() if scaled.numel() else 0.0
    if not largest <= most:  # also where it is not a number
        raise BadMessage(f"{name} reaches {largest / factor:.3g}, at most {most / factor:.3g} can be summed in secret")
    return scaled.round().long().numpy().view(np.uint64)


def _whole(name: str, values: Tensor, most: float) -> np.ndarray:
    largest = values.double().abs().max().item() if values.numel() else 0.0
    if largest > most:
        raise BadMessage(f"{name} reaches {largest:.3g}, at most {most:.3g} can be summed in secret")
    return values.numpy().view(np.uint64)


def decode(total: np.ndarray, layout: Layout, clients: int, mean: bool, fraction: int = 32) -> tuple[Message, Tensors]:
    """The sum of so many replies: as one reply of their dtypes, and its tensors in float64 (integers in int64).

    Metadata: integers are summed, other numbers averaged. BadMessage where it cannot be such a sum.
    """
    signed, one = total.view(np.int64), 2.0**fraction
    if len(signed) != layout.length or signed[COUNT] != clients:
        raise BadMessage("what was summed is not what clients said: masks do not cancel out")
    if len(signed) and max(abs(int(signed.max())), abs(int(signed.min()))) > WHOLE:
        raise BadMessage("a sum is out of bounds")
    values = torch.from_numpy(signed.copy())
    weight = values[WEIGHT].item() / one
    if mean and not weight > 0:
        raise BadMessage("the weights of all clients together are not positive")
    meta: dict[str, int | float] = {}
    for place, (name, kind) in enumerate(layout.numbers, start=WEIGHT + 1):
        number = int(values[place].item())
        meta[name] = number if kind == "int" else number / one / clients
    exact, rounded, start = Tensors(), Tensors(), WEIGHT + 1 + len(layout.numbers)
    for name, kind, shape in layout.tensors:
        size, dtype, words = math.prod(shape), DTYPES[kind], _words(kind)
        part, fine = values[start : start + size].view(shape), values[start + size : start + words * size]
        start += words * size
        if mean or dtype.is_floating_point:
            scale = one if dtype.is_floating_point else COUNTER
            found = part.double() + fine.double().view(shape) / FINE if words == 2 else part.double()
            part = found / (scale * (weight if mean else 1.0))
        exact[name] = part if dtype.is_floating_point or not mean else part.round().long()
        rounded[name] = exact[name].to(dtype)
    return Message("", rounded, meta), exact
