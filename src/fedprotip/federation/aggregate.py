"""What the server makes of many replies, one after another: their mean (Eq. 6), their sum, or each by itself.

A mean may also be one that a single client cannot move far (`train.aggregate`); then replies wait on disk.
"""

import math
import statistics
from collections.abc import Iterable, Iterator
from itertools import chain
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor

from fedprotip.federation.spool import Place, Spool
from fedprotip.messages import Message
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.parts.robust import is_robust, middle
from fedprotip.methods.site import Site
from fedprotip.settings import TrainSettings
from fedprotip.store.files import Tensors

PIECE = 2**16
"""Numbers that are added at once: few enough that their float64 copy stays in the processor's cache."""


class Average:
    """Streaming Σ p_k W_k in one flat float64 buffer: memory of one model, whatever the number of clients.

    Identical models give exactly that model back. Integer buffers (counters) take the largest value.
    Add models in the order of clients: the last bits of a sum depend on the order.
    """

    def __init__(self) -> None:
        self._like: dict[str, Tensor] = {}  # shapes and dtypes of a model, without its numbers
        self._sum = torch.zeros(0, dtype=torch.float64)
        self._largest: dict[str, Tensor] = {}
        self._weight = 0.0

    def add(self, tensors: dict[str, Tensor], weight: float) -> None:
        """Add a client's model with weight p_k (need not sum to one); every model has the same tensors."""
        if not self._like:
            self._like = {name: tensor.to("meta") for name, tensor in tensors.items()}
            size = sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
            self._sum = torch.full((size,), -0.0, dtype=torch.float64)  # 0.0 would turn a model's -0.0 into 0.0
        self._weight += weight
        start = 0
        for name, like in self._like.items():
            tensor = tensors[name]
            if not like.is_floating_point():
                self._largest[name] = torch.maximum(self._largest.get(name, tensor), tensor)
                continue
            for piece in tensor.reshape(-1).split(PIECE):
                self._sum[start : start + len(piece)].add_(piece, alpha=weight)
                start += len(piece)

    def __bool__(self) -> bool:
        return self._weight > 0

    def result(self) -> dict[str, Tensor]:
        """The average so far, each tensor with memory of its own."""
        average, start = dict[str, Tensor](), 0
        for name, like in self._like.items():
            if not like.is_floating_point():
                average[name] = self._largest[name].clone()
                continue
            part = self._sum[start : start + like.numel()]
            average[name] = (part / self._weight).to(like.dtype).view(like.shape)
            start += like.numel()
        return average


class Sum:
    """Streaming Σ of the clients' tensors, in the order of clients: floats in float64, integers as they are.

    What weighs less than 1 is float64 in any case.
    """

    def __init__(self) -> None:
        self._sum: dict[str, Tensor] = {}
        self._count = 0

    def add(self, tensors: dict[str, Tensor], weight: float = 1.0) -> None:
        self._count += 1
        for name, tensor in tensors.items():
            wide = tensor.double() if tensor.is_floating_point() else tensor
            wide = wide if weight == 1 else wide.double() * weight
            self._sum[name] = self._sum[name] + wide if name in self._sum else wide

    def __bool__(self) -> bool:
        return self._count > 0

    def result(self) -> dict[str, Tensor]:
        return self._sum


class Pile:
    """All replies in a file without a name, to be looked at number by number: memory of one model and K pieces.

    Weights are bounded: how many samples a client says it has can make nobody strong.
    """

    def __init__(self, train: TrainSettings) -> None:
        self._train, self._weights = train, list[float]()
        self._like: dict[str, Tensor] = {}
        self._counters: dict[str, list[Tensor]] = {}
        self._file = TemporaryFile(prefix="fedprotip-")  # noqa: SIM115 (closed by `result`)

    def add(self, tensors: Tensors, weight: float) -> None:
        self._weights.append(weight)
        self._like = self._like or {name: tensor.to("meta") for name, tensor in tensors.items()}
        for name in self._like:
            if tensors[name].is_floating_point():
                self._file.write(tensors[name].double().cpu().contiguous().numpy().data)
            else:
                self._counters.setdefault(name, []).append(tensors[name])

    def __bool__(self) -> bool:
        return bool(self._weights)

    def result(self) -> Tensors:
        """The median or trimmed mean of every number."""
        sizes = [like.numel() for like in self._like.values() if like.is_floating_point()]
        weights = torch.tensor(self._weights, dtype=torch.float64)
        found, start = torch.empty(sum(sizes), dtype=torch.float64), 0
        with self._file:
            for piece in found.split(PIECE):
                rows = [self._read(row * len(found) + start, len(piece)) for row in range(len(weights))]
                piece.copy_(middle(torch.stack(rows), self._train.aggregate, self._train.trim, weights))
                start += len(piece)
        parts = iter(found.split(sizes))
        return {name: self._tensor(name, like, parts) for name, like in self._like.items()}

    def _tensor(self, name: str, like: Tensor, parts: Iterator[Tensor]) -> Tensor:
        if like.is_floating_point():
            return next(parts).to(like.dtype).view(like.shape)
        return torch.stack(self._counters[name]).median(dim=0).values

    def _read(self, place: int, count: int) -> Tensor:
        self._file.seek(place * 8)
        return torch.frombuffer(bytearray(self._file.read(count * 8)), dtype=torch.float64)


def combine(exchange: Exchange, replies: Iterable[tuple[int, Message]], site: Site) -> Any:
    """What `Exchange.digest` is given; None when there is no reply. At most one reply at a time is in memory."""
    checked = iter(replies)
    if exchange.combine == "each":
        first = next(checked, None)
        return None if first is None else chain(iter([first]), checked)  # a list would be held to the end
    if exchange.combine == "sum":
        total = Sum()
        for _, message in checked:
            total.add(message.tensors, exchange.weight(message, site))
        return Message(exchange.name, total.result()) if total else None
    mean = average(exchange, checked, site)
    return Message(exchange.name, mean) if mean else None


def average(exchange: Exchange, replies: Iterable[tuple[int, Message]], site: Site) -> Tensors | None:
    """The mean of replies, as `train.aggregate` says."""
    train = site.settings.train
    if is_robust(train.aggregate):
        pile = Pile(train)
        for _, message in replies:
            pile.add(message.tensors, exchange.weight(message, site))
        return pile.result() if pile else None
    mean, parts = Average(), ((message.tensors, exchange.weight(message, site)) for _, message in replies)
    for tensors, weight in clipped(exchange, replies, site) if train.aggregate == "clipped" else parts:
        mean.add(tensors, weight)
    return mean.result() if mean else None


def clipped(exchange: Exchange, replies: Iterable[tuple[int, Message]], site: Site) -> Iterator[tuple[Tensors, float]]:
    """Replies and their weights; changes longer than the median one are made as long as that."""
    with Spool() as spool:
        waiting: list[tuple[Place, float, float]] = []
        for _, message in replies:
            changes = (exchange.change(name, tensor, site) for name, tensor in message.tensors.items())
            lengths = (
                torch.linalg.vector_norm(part, dtype=torch.float64).item() for part in changes if part is not None
            )
            waiting.append((spool.put(message), math.hypot(*lengths), exchange.weight(message, site)))
        most = statistics.median(length for _, length, _ in waiting) if waiting else 0.0
        for place, length, weight in waiting:
            tensors = spool.get(place).tensors
            if length > most:
                for name, tensor in tensors.items():
                    if (change := exchange.change(name, tensor, site)) is not None:
                        tensors[name] = tensor - (change * (1 - most / length)).to(tensor.dtype)
            yield tensors, weight
