"""What the server makes of many replies, one after another: their mean (Eq. 6), their sum, or each by itself."""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fedprotip.messages import Message
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.site import Site

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
    """Streaming Σ of the clients' tensors, in the order of clients: floats in float64, integers as they are."""

    def __init__(self) -> None:
        self._sum: dict[str, Tensor] = {}
        self._count = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        self._count += 1
        for name, tensor in tensors.items():
            wide = tensor.double() if tensor.is_floating_point() else tensor
            self._sum[name] = self._sum[name] + wide if name in self._sum else wide

    def __bool__(self) -> bool:
        return self._count > 0

    def result(self) -> dict[str, Tensor]:
        return self._sum


def combine(exchange: Exchange, replies: Iterable[tuple[int, Message]], site: Site) -> Any:
    """What `Exchange.digest` is given; None when there is no reply. At most one reply at a time is in memory."""
    checked = iter(replies)
    if exchange.combine == "each":
        first = next(checked, None)
        return None if first is None else chain(iter([first]), checked)  # a list would be held to the end
    mean, total = Average(), Sum()
    for _, message in checked:
        if exchange.combine == "mean":
            mean.add(message.tensors, exchange.weight(message, site))
        else:
            total.add(message.tensors)
    made = mean if exchange.combine == "mean" else total
    return Message(exchange.name, made.result()) if made else None
