"""Eq. 6: the average of the clients' models, taken one after another."""

import torch
from torch import Tensor


class Average:
    """Streaming Σ p_k W_k in float64: memory of one model, whatever the number of clients.

    Identical models give exactly that model back. Integer buffers (counters) take the largest value.
    Add models in the order of clients: the last bits of a sum depend on the order.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._weight = 0.0

    def add(self, tensors: dict[str, Tensor], weight: float) -> None:
        """Add a client's model with weight p_k (need not sum to one)."""
        self._weight += weight
        for name, tensor in tensors.items():
            if not tensor.is_floating_point():
                known = self._sums.get(name, tensor)
                self._sums[name] = torch.maximum(known, tensor)
            elif name in self._sums:
                self._sums[name].add_(tensor.double(), alpha=weight)
            else:
                self._sums[name] = tensor.double() * weight
            self._dtypes[name] = tensor.dtype

    def __bool__(self) -> bool:
        return self._weight > 0

    def result(self) -> dict[str, Tensor]:
        return {
            name: (total / self._weight).to(self._dtypes[name]) if total.is_floating_point() else total
            for name, total in self._sums.items()
        }
