"""How a model travels: only what moves, and of that only what is new."""

import torch
from torch import Tensor

from fedprotip.messages import PRECISIONS, Spec
from fedprotip.models.capture import Layer
from fedprotip.store.files import Tensors
from fedprotip.subspace.coordinates import Complement
from fedprotip.subspace.project import Projector


class TaskView:
    """What a method works out once per task, the same at both ends; FedAvg needs none of it."""

    @property
    def projectors(self) -> list[tuple[Layer, Projector]]:
        """The layers whose updates are kept out of a subspace during the task."""
        return []

    @property
    def complements(self) -> list[tuple[Layer, Complement]]:
        """The layers that travel as coordinates outside a subspace, because nothing inside it may change."""
        return []


class Wire:
    """Packs and unpacks the moving tensors of a model, the same way at both ends.

    A layer that keeps out of Φ travels as coordinates C of its change since the task began, W = W^(t,0) + C·Nᵀ:
    d − r numbers per row instead of d. Both ends hold W^(t,0) and Φ, and the average of the C is the C of the
    average. Other tensors travel as they are in float32, and as their change since W^(t,0) in less, so that
    rounding is small against the change and not against the weight.
    """

    def __init__(self, precision: str, view: TaskView, start: Tensors) -> None:
        """`start`: W^(t,0) by name, filled by `begin`."""
        self._precision, self._start = PRECISIONS[precision], start
        layers: dict[str, list[tuple[Layer, Complement]]] = {}
        for layer, complement in view.complements:
            layers.setdefault(f"backbone.{layer.parameter}", []).append((layer, complement))
        self._layers = {
            name: parts for name, parts in layers.items() if any(outside.width < layer.d for layer, outside in parts)
        }

    def begin(self, state: Tensors, everything: bool = False) -> None:
        """Remember W^(t,0) of every tensor that travels as a change, or of `everything`."""
        for name, tensor in state.items():
            if everything or self._as_change(name, tensor):
                self._start[name] = tensor.detach().clone(memory_format=torch.contiguous_format)

    def _as_change(self, name: str, tensor: Tensor) -> bool:
        narrowed = tensor.is_floating_point() and tensor.itemsize > self._precision.itemsize
        return narrowed or name in self._layers

    def is_change(self, name: str) -> bool:
        """Whether a tensor travels as its change since W^(t,0)."""
        start = self._start.get(name)
        return start is not None and self._as_change(name, start)

    def pack(self, state: Tensors) -> Tensors:
        """What is sent of a model, with memory of its own on the CPU."""
        return {name: self._pack(name, tensor.detach()) for name, tensor in state.items()}

    def unpack(self, sent: Tensors) -> Tensors:
        """The model that `pack` was given, to float precision; without what lay inside Φ."""
        return {name: self._unpack(name, tensor) for name, tensor in sent.items()}

    def specs(self, state: Tensors) -> dict[str, Spec]:
        """What `pack` makes of such a model looks like this."""
        return {name: self._spec(name, tensor) for name, tensor in state.items()}

    def _pack(self, name: str, tensor: Tensor) -> Tensor:
        if not self._as_change(name, tensor):
            return tensor.cpu().clone()
        start = self._start[name]
        change = (tensor - start).contiguous()
        if name in self._layers:
            parts = [complement.encode(_rows(layer, change)).flatten() for layer, complement in self._layers[name]]
            change = torch.cat(parts)
        return change.to("cpu", self._precision)

    def _unpack(self, name: str, tensor: Tensor) -> Tensor:
        if not self.is_change(name):
            return tensor
        start = self._start[name]
        change = tensor.to(start)
        if name not in self._layers:
            return start + change
        weight = start.clone()
        for layer, complement in self._layers[name]:
            rows = _rows(layer, weight)
            count = len(rows) * complement.width
            rows += complement.decode(change[:count].view(len(rows), -1))
            change = change[count:]
        return weight

    def _spec(self, name: str, tensor: Tensor) -> Spec:
        if not self._as_change(name, tensor):
            return Spec(tuple(tensor.shape), tensor.dtype)
        if name in self._layers:
            size = sum(len(_rows(layer, tensor)) * complement.width for layer, complement in self._layers[name])
            return Spec((size,), self._precision)
        return Spec(tuple(tensor.shape), self._precision)


def _rows(layer: Layer, tensor: Tensor) -> Tensor:
    """A view (out, d) of the layer's part of its parameter."""
    return layer.weight({layer.parameter: tensor})
