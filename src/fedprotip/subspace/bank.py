"""What the server and every client know about earlier tasks: Φ of each layer, U_L of each task."""

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from fedprotip.subspace.merge import append
from fedprotip.subspace.project import Projector


@dataclass
class SubspaceBank:
    """Bases of all tasks so far. Columns are only ever appended; older ones never change."""

    layers: dict[str, Tensor] = field(default_factory=dict)  # layer → Φ^(1:t), (d, R)
    ranks: dict[str, list[int]] = field(default_factory=dict)  # layer → new columns of each task
    routing: list[Tensor] = field(default_factory=list)  # task → U_L^(t), (d, r)

    def basis(self, layer: str, d: int) -> Tensor:
        """Φ^(1:t) of a layer; (d, 0) while there is none."""
        return self.layers.get(layer, torch.zeros(d, 0))

    def projector(self, layer: str, before: Projector | None = None) -> Projector:
        """Eq. 4 for a layer, made task by task: the same whether or not the one `before` the last task is at hand."""
        phi = self.layers[layer]
        if 2 * phi.shape[1] <= len(phi):
            return Projector(phi, False)
        projector = before or Projector(phi[:, :0], False)
        for stop in accumulate(self.ranks[layer]):
            start = len(phi) - projector.room
            if stop > start:
                projector = projector.without(phi[:, start:stop])
        return projector

    def routed(self, d: int) -> Tensor:
        """An orthonormal basis (d, R) of all routing bases together."""
        whole = torch.zeros(d, 0, dtype=torch.float64)
        for basis in self.routing:
            whole = append(whole, basis)
        return whole

    def extend(self, layer: str, new: Tensor, task: int) -> None:
        """Append the basis Φ^(t) (d, r) of task `task`; r may be 0."""
        past = self.ranks.setdefault(layer, [])
        past.extend([0] * (task - len(past)))  # a layer that was frozen or unseen before
        past.append(new.shape[1])
        self.layers[layer] = torch.cat([self.basis(layer, new.shape[0]), new], dim=1)

    def to_tensors(self) -> dict[str, Tensor]:
        tensors = {f"subspaces/layers/{name}": basis for name, basis in self.layers.items()}
        tensors |= {f"subspaces/ranks/{name}": torch.tensor(ranks) for name, ranks in self.ranks.items()}
        return tensors | {f"subspaces/routing/{task:04d}": basis for task, basis in enumerate(self.routing)}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "SubspaceBank":
        """The bank within a dictionary of knowledge; other entries are left aside."""
        bank = cls()
        for name in sorted(tensors):
            file, _, rest = name.partition("/")
            kind, _, rest = rest.partition("/")
            if file != "subspaces":
                continue
            if kind == "layers":
                bank.layers[rest] = tensors[name]
            elif kind == "ranks":
                bank.ranks[rest] = tensors[name].tolist()
            elif kind == "routing":
                bank.routing.append(tensors[name])
        return bank
