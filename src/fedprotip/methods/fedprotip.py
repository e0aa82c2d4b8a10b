"""FedProTIP (section 4): projected local training, merged subspaces, task identity from the same subspaces."""

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from fedprotip.capture import Layer, capture, find_layers
from fedprotip.inference.route import CosineRouter, fill_missing, reference
from fedprotip.messages import BadMessage, Message, Spec
from fedprotip.methods.base import ClientTask, Constraint, Exchange, Knowledge, Method, register
from fedprotip.models import Network
from fedprotip.models.freeze import frozen_prefixes
from fedprotip.seeds import numpy_stream
from fedprotip.settings import MethodSettings, Settings
from fedprotip.subspace.bank import SubspaceBank
from fedprotip.subspace.basis import FAINT, Core, core_basis, core_of_moment
from fedprotip.subspace.merge import DEPENDENT, EnergyMerge, Merger, UnionMerge
from fedprotip.subspace.project import Anchored, Projector

ROUTING = "routing"
"""Name of the final-layer basis U_L in messages; layers of the backbone are named after their weight."""
START = "server/start/"
"""Prefix of W^(t,0) in the server's knowledge."""
SIGMA = "sigma/"
"""Prefix of singular values in messages, sent only where bases are merged by energy."""


class FedProTIPOptions(MethodSettings):
    name: str = Field("fedprotip", description="Method; its own settings follow.")
    threshold: float = Field(0.7, gt=0, le=1, description="ε: share of the activations that a basis must hold.")
    layer_thresholds: dict[str, float] = Field(
        {},
        description='ε of single layers by name pattern, for example {"5.*" = 0.95}; the first match counts.',
    )
    increment: float = Field(0.001, ge=0, lt=1, description="Added to ε with every task.")
    rank_rule: Literal["mass", "energy"] = Field(
        "mass",
        description="mass: singular values of the residual (Eq. 9); energy: squares, of the total (GPM).",
    )
    columns: int = Field(512, ge=1, description="m_s: sampled activation columns per layer and client.")
    images: int = Field(1280, ge=1, description="m: images per client that activations are taken from.")
    projection: Literal["local", "global", "none"] = Field(
        "local", description="local: every client step (the method); global: after averaging; none."
    )
    project_on: Literal["update", "gradient"] = Field(
        "update",
        description="update: the whole step, decay and momentum inside; gradient: as published code does.",
    )
    merge: Literal["union", "energy"] = Field(
        "union",
        description="union of the clients' spans (Eq. 10), or the dominant directions of all together.",
    )
    routing_rank: int = Field(0, ge=0, description="Directions of U_L per task; 0: by ε, as the paper does.")
    router: Literal["cosine"] = Field("cosine", description="How references are compared: cosine and vote (Eq. 12).")
    voters: int = Field(0, ge=0, description="Clients that vote on the task of a sample; 0: all.")

    @field_validator("layer_thresholds")
    @classmethod
    def _within_bounds(cls, value: dict[str, float]) -> dict[str, float]:
        for pattern, threshold in value.items():
            if not 0 < threshold <= 1:
                raise ValueError(f"has ε = {threshold} for {pattern!r}, must be above 0 and at most 1")
        return value


@register
class FedProTIP(Method):
    name = "fedprotip"
    routes = True
    protects = True
    task_end: ClassVar[tuple[Exchange, ...]] = (Exchange("basis"), Exchange("reference", everyone=True))
    Options: ClassVar[type[MethodSettings]] = FedProTIPOptions

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._made: tuple[int, Knowledge, list[tuple[Layer, Projector]]] | None = None

    @property
    def options(self) -> FedProTIPOptions:
        assert isinstance(self.settings.method, FedProTIPOptions)
        return self.settings.method

    def threshold(self, layer: str, task: int) -> float:
        """ε_l of a layer in a task (counted from 0): the start value + 0.001 per task, at most 1."""
        patterns = self.options.layer_thresholds.items()
        start = next((value for pattern, value in patterns if fnmatchcase(layer, pattern)), self.options.threshold)
        return min(start + self.options.increment * task, 1.0)

    # Training: Eq. 4–5

    def trainable(self, network: Network, knowledge: Knowledge, task: int) -> set[str]:
        """After the first task only weights with an input subspace move, and the current head."""
        names = super().trainable(network, knowledge, task)
        if task == 0 or self.options.projection == "none":
            return names
        protected = {f"backbone.{layer.parameter}" for layer, _ in self.projectors(network, knowledge, task)}
        return {name for name in names if name.startswith("heads.") or name in protected}

    def constraint(self, network: Network, knowledge: Knowledge, task: int) -> Constraint | None:
        if task == 0 or self.options.projection != "local":
            return None
        weights = dict(network.backbone.named_parameters())
        projectors = self.projectors(network, knowledge, task)
        if self.options.project_on == "gradient":
            return ProjectGradient(projectors, weights)
        return ProjectUpdate(projectors, weights)

    def projectors(self, network: Network, knowledge: Knowledge, task: int) -> list[tuple[Layer, Projector]]:
        """Eq. 4 for every layer that has a basis; made once per task."""
        if self._made is None or self._made[0] != task or self._made[1] is not knowledge:
            bases = SubspaceBank.from_tensors(knowledge).layers
            device = next(network.parameters()).device
            layers = [layer for group in find_layers(network.backbone, False).values() for layer in group]
            made = [(lay, Projector.outside(bases[lay.name].to(device))) for lay in layers if lay.name in bases]
            self._made = task, knowledge, made
        return self._made[2]

    def begin_task(self, network: Network, knowledge: Knowledge, task: int) -> None:
        """Remember W^(t,0), from which every average of the task is kept at ∆W·Φ = 0."""
        weights = dict(network.backbone.named_parameters())
        for layer, _ in self.projectors(network, knowledge, task) if task else []:
            knowledge[START + layer.parameter] = weights[layer.parameter].detach().clone()

    def aggregate(self, network: Network, average: dict[str, Tensor], knowledge: Knowledge, task: int) -> None:
        """W^(t,e) ← W^(t,0) + P(average − W^(t,0)).

        With global projection this is the projection. With local projection the clients' updates are outside
        Φ already, and it only removes the rounding of float32, which would add up over the rounds.
        """
        local = self.options.projection == "local" and self.options.project_on == "update"
        if task == 0 or not (local or self.options.projection == "global"):
            return
        for layer, projector in self.projectors(network, knowledge, task):
            start = layer.weight({layer.parameter: knowledge[START + layer.parameter]}).to(projector.basis)
            view = layer.weight({layer.parameter: average[f"backbone.{layer.parameter}"]})
            weight = view.to(projector.basis)
            projector.anchor(start).pull_back_(weight)
            view.copy_(weight)

    def receive(self, knowledge: Knowledge, message: Message, task: int) -> None:
        """Append Φ^(t) of every layer and U_L^(t)."""
        bank = SubspaceBank.from_tensors(knowledge)
        for name, basis in message.tensors.items():
            if name == ROUTING:
                bank.routing.append(basis)
            else:
                bank.extend(name, basis, task)
        knowledge.update(bank.to_tensors())

    # Task end, client: Eq. 7–9, then Eq. 11

    def summarise(self, kind: str, local: ClientTask) -> Message:
        return self._extract(local) if kind == "basis" else self._refer(local)

    def _extract(self, local: ClientTask) -> Message:
        """Core bases of every layer; the second moment of the final features stays with the client."""
        bank, options, features = (
            SubspaceBank.from_tensors(local.knowledge),
            self.options,
            local.network.features,
        )
        columns, moment, samples = self._observe(local)
        local.store.put(local.client, f"moment-{local.task}", {"moment": moment, "samples": torch.tensor(samples)})
        cores = {
            name: core_basis(a.cpu(), bank.basis(name, len(a)), self.threshold(name, local.task), options.rank_rule)
            for name, a in columns.items()
        }
        cores[ROUTING] = core_of_moment(
            moment,
            bank.routed(features),
            self.threshold(ROUTING, local.task),
            options.rank_rule,
            options.routing_rank,
        )
        tensors = {name: core.basis for name, core in cores.items()}
        weighed = {name: core for name, core in cores.items() if self._by_energy(name)}
        tensors |= {SIGMA + name: core.sigma.float() for name, core in weighed.items()}
        rest = {name: [core.captured, core.tail] for name, core in weighed.items()}
        return Message("basis", tensors, {"rest": rest} if rest else {})

    def _observe(self, local: ClientTask) -> tuple[dict[str, Tensor], Tensor, int]:
        """One pass over m images: sampled columns of the layers; Σ aaᵀ of the final features, and how many."""
        backbone, features = local.network.backbone, local.network.features
        moment, samples = torch.zeros(features, features, dtype=torch.float64), 0

        def remember(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            nonlocal samples
            samples += len(output)
            moment.add_((output.double().T @ output.double()).cpu())

        handle = backbone.register_forward_hook(remember)
        try:
            batches = local.batches(self.options.images, self.settings.evaluate.batch)
            if self.options.projection == "none":  # only routing needs a basis
                for batch in batches:
                    backbone(batch)
                return {}, moment, samples
            seed = (local.seed, "columns", local.task, local.client)
            frozen = frozen_prefixes(self.settings.model, local.task + 1)  # needs no protection from later tasks
            layers = {n: ls for n, ls in find_layers(backbone).items() if not n.startswith(frozen)}
            return capture(backbone, batches, self.options.columns, seed, layers), moment, samples
        finally:
            handle.remove()

    def _refer(self, local: ClientTask) -> Message:
        """Eq. 11 for every task this client has seen, against the global bases of all tasks so far."""
        routing = SubspaceBank.from_tensors(local.knowledge).routing
        values = torch.zeros(len(routing), len(routing))
        counts = torch.zeros(len(routing), dtype=torch.int64)
        for task in range(len(routing)):
            kept = local.store.get(local.client, f"moment-{task}")
            if kept is not None:
                counts[task] = kept["samples"]
                for other, basis in enumerate(routing):
                    values[task, other] = reference(kept["moment"], int(kept["samples"]), basis)
        return Message("reference", {"values": values, "counts": counts})

    # Task end, server: Eq. 10, then the references of all clients

    def validate(self, message: Message, network: Network, knowledge: Knowledge, task: int) -> None:
        if message.kind == "reference":
            message.check("reference", {"values": Spec((task + 1, task + 1)), "counts": Spec((task + 1,), torch.int64)})
            if (message.tensors["values"] < 0).any() or (message.tensors["counts"] < 0).any():
                raise BadMessage("a reference or a count is negative")
            return
        bank, features = SubspaceBank.from_tensors(knowledge), network.features
        layers = {lay.name: lay.d for group in find_layers(network.backbone, False).values() for lay in group}
        names = {name for name in message.tensors if not name.startswith(SIGMA) and name != ROUTING}
        if not names <= layers.keys() or (bank.layers and names != bank.layers.keys()):
            raise BadMessage(f"bases of {sorted(names)} came, expected {sorted(bank.layers or layers)}")
        specs = {name: Spec((layers[name], -1), orthonormal=True, at_most=layers[name]) for name in names}
        specs[ROUTING] = Spec((features, -1), orthonormal=True, at_most=features)
        ranks = {name: message.tensors[name].shape[1] for name in specs if name in message.tensors}
        specs |= {SIGMA + name: Spec((rank,)) for name, rank in ranks.items() if self._by_energy(name)}
        message.check("basis", specs)
        for name in ranks:
            if self._by_energy(name):
                self._check_energies(name, message)
        if ranks[ROUTING] == 0:
            raise BadMessage("the routing basis is empty")

    def digest(
        self,
        kind: str,
        replies: Iterable[tuple[int, Message]],
        network: Network,
        knowledge: Knowledge,
        task: int,
    ) -> Message | None:
        if kind == "reference":
            knowledge.update(_collected(replies, knowledge, task))
            return None
        return self._merge(replies, network, knowledge, task)

    def _merge(
        self, replies: Iterable[tuple[int, Message]], network: Network, knowledge: Knowledge, task: int
    ) -> Message:
        """Eq. 10 for every layer, one client after another."""
        bank, nothing = SubspaceBank.from_tensors(knowledge), torch.zeros(network.features, 0)
        mergers = {ROUTING: self._merger(ROUTING, bank.routed(network.features), task)}
        inside = self._merger(ROUTING, nothing, task)  # for a task whose features lie in the earlier bases
        for _, message in replies:
            rest = message.meta.get("rest", {})
            for name, basis in message.tensors.items():
                if name.startswith(SIGMA):
                    continue
                sigma = message.tensors.get(SIGMA + name, torch.zeros(basis.shape[1]))
                core = Core(basis, sigma.double(), *rest.get(name, (0.0, 0.0)))
                if name not in mergers:
                    mergers[name] = self._merger(name, bank.basis(name, len(basis)), task)
                mergers[name].add(core)
                if name == ROUTING:
                    inside.add(core)
        merged = {name: merger.result() for name, merger in mergers.items()}
        if merged[ROUTING].shape[1] == 0:
            merged[ROUTING] = inside.result()
        if merged[ROUTING].shape[1] == 0:  # all features are zero: any direction serves
            merged[ROUTING] = torch.eye(network.features, 1)
        return Message("basis", merged)

    def _check_energies(self, name: str, message: Message) -> None:
        """Singular values, captured energy and tail of a basis must be finite and not negative."""
        rest = message.meta.get("rest", {}).get(name)
        numbers = rest if isinstance(rest, list) and len(rest) == 2 else [torch.nan]
        numbers = [*numbers, *message.tensors[SIGMA + name].tolist()]
        if not all(isinstance(number, float) and math.isfinite(number) and number >= 0 for number in numbers):
            raise BadMessage(f"the energies of {name} are not finite numbers ≥ 0")

    def _by_energy(self, name: str) -> bool:
        return self.options.merge == "energy" or (name == ROUTING and self.options.routing_rank > 0)

    def _merger(self, name: str, earlier: Tensor, task: int) -> Merger:
        if not self._by_energy(name):
            return UnionMerge(earlier, FAINT if name == ROUTING else DEPENDENT)
        fixed, at_least = (self.options.routing_rank, 1) if name == ROUTING else (0, 0)
        return EnergyMerge(earlier, self.threshold(name, task), self.options.rank_rule, fixed, at_least)

    def router(self, knowledge: Knowledge) -> CosineRouter | None:
        counts, clients = knowledge["references/counts"], knowledge["references/clients"]
        references = fill_missing(knowledge["references/values"], counts)
        if 0 < self.options.voters < len(clients):
            order = numpy_stream(self.settings.run.seed, "voters").permutation(len(clients))
            references = references[torch.from_numpy(order[: self.options.voters]).sort().values]
        return CosineRouter(SubspaceBank.from_tensors(knowledge).routing, references)

    def ranks(self, knowledge: Knowledge) -> tuple[dict[str, int], dict[str, int]]:
        bank = SubspaceBank.from_tensors(knowledge)
        shapes = {name: basis.shape for name, basis in bank.layers.items()}
        if bank.routing:
            shapes[ROUTING] = bank.routed(len(bank.routing[0])).shape
        return {name: shape[1] for name, shape in shapes.items()}, {name: shape[0] for name, shape in shapes.items()}


class ProjectUpdate:
    """Projection last: whatever the optimiser did, the whole step stays outside Φ (Eq. 5)."""

    def __init__(self, projectors: list[tuple[Layer, Projector]], weights: Mapping[str, Tensor]) -> None:
        self._anchored: list[tuple[Anchored, Tensor]] = []
        for layer, projector in projectors:
            weight = layer.weight({layer.parameter: weights[layer.parameter].detach()})
            self._anchored.append((projector.anchor(weight), weight))

    def before_step(self) -> None:
        """Nothing: the optimiser sees the plain gradient."""

    def after_step(self) -> None:
        for anchored, weight in self._anchored:
            anchored.pull_back_(weight)


class ProjectGradient:
    """Projection of the gradient only, as in published code: decay and momentum escape it.

    Unlike there, biases and norm layers stay frozen, so decay does not act on them.
    """

    def __init__(self, projectors: list[tuple[Layer, Projector]], weights: Mapping[str, Tensor]) -> None:
        self._projectors, self._weights = projectors, weights

    def before_step(self) -> None:
        for layer, projector in self._projectors:
            gradient = self._weights[layer.parameter].grad
            if gradient is not None:
                view = layer.weight({layer.parameter: gradient})
                view.copy_(projector(view))

    def after_step(self) -> None:
        """Nothing: what the optimiser adds stays."""


def _collected(replies: Iterable[tuple[int, Message]], knowledge: Knowledge, task: int) -> Knowledge:
    """References of all clients (K, T, T), NaN where a client has none; clients that left keep theirs."""
    tasks = task + 1
    table: dict[int, tuple[Tensor, Tensor]] = {}
    if "references/values" in knowledge:
        old = (knowledge[f"references/{part}"] for part in ("clients", "values", "counts"))
        for client, values, counts in zip(*old, strict=True):
            missing = tasks - len(counts)
            padded = nn.functional.pad(values, (0, missing, 0, missing), value=torch.nan)
            table[int(client)] = padded, nn.functional.pad(counts, (0, missing))
    for client, message in replies:
        values, counts = message.tensors["values"], message.tensors["counts"]
        if counts.any():
            table[client] = torch.where(counts[:, None] > 0, values, torch.nan), counts
    clients = sorted(table)
    return {
        "references/clients": torch.tensor(clients),
        "references/values": torch.stack([table[client][0] for client in clients]),
        "references/counts": torch.stack([table[client][1] for client in clients]),
    }
