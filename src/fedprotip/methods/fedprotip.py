"""FedProTIP (section 4): projected local training, merged subspaces, task identity from the same subspaces."""

import math
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from fedprotip.errors import UsageError
from fedprotip.inference.assemble import assemble
from fedprotip.inference.experts import HEADS, STATISTICS
from fedprotip.messages import PRECISIONS, BadMessage, Message, Spec
from fedprotip.methods.base import START, ClientTask, Constraint, Exchange, Knowledge, Method, register
from fedprotip.methods.parts import identity, statistics
from fedprotip.methods.parts.projection import ProjectGradient, ProjectUpdate, linear_decay
from fedprotip.models import Network
from fedprotip.models.capture import Layer, capture, find_layers
from fedprotip.models.freeze import frozen_prefixes
from fedprotip.models.steps import Inputs
from fedprotip.settings import MethodSettings, Settings
from fedprotip.stream.plan import Answering, Options, WayPlan
from fedprotip.subspace.bank import SubspaceBank
from fedprotip.subspace.basis import FAINT, Core, Earlier, core_basis, core_of_moment, orthonormalise, residual
from fedprotip.subspace.coordinates import Complement, complement_of
from fedprotip.subspace.merge import DEPENDENT, EnergyMerge, Merger, UnionMerge
from fedprotip.subspace.project import Anchored, Projector

ROUTING = "routing"
"""Name of the final-layer basis U_L in messages; layers of the backbone are named after their weight."""
SIGMA = "sigma/"
"""Prefix of singular values in messages, sent only where bases are merged by energy."""
ROUNDED = 1e-2
"""Bases in bf16 are off by up to 0.5 %: directions closer than this (sine of the angle) count as the same."""


RouterName = Literal["cosine", "gaussian", "statistics", "shared", "statistics-heads", "fused"]
BOTH = ("statistics-heads", "fused")
"""Ways in which class statistics choose a head, or weigh all of them."""
Watch = Callable[[Tensor], None]
SMALL = 32
"""Images per pass of extraction, with and without a cache: how many images are seen depends on it."""


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
    images: int = Field(1280, ge=1, description="m: images per client that activations are taken from, at most.")
    per_image: int = Field(
        4,
        ge=1,
        description="Columns per image: no more images are used than give m_s columns of a layer at this rate.",
    )
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
    statistics: bool = Field(
        True, description="Clients send class statistics at the end of a task; all routers but the first two need them."
    )
    router: RouterName = Field(
        "fused",
        description="How the task is found: cosine and vote (Eq. 12); gaussian likelihood of the relevance; class "
        "statistics, which answer themselves or choose a head; fused: p(task) by statistics, p(class) by heads; "
        "shared, for domains: statistics of a class in all domains together.",
    )
    voters: int = Field(0, ge=0, description="Clients that vote on the task of a sample; 0: all.")

    @model_validator(mode="after")
    def _router_has_its_statistics(self) -> "FedProTIPOptions":
        if self.router not in ("cosine", "gaussian") and not self.statistics:
            raise ValueError(f"router = {self.router!r} needs statistics = true; without them: 'cosine' or 'gaussian'")
        return self

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
    Options: ClassVar[type[MethodSettings]] = FedProTIPOptions

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.calibrates = self.options.statistics and settings.clients.held_back > 0
        self.task_end = self._exchanges()
        self.shared = ("subspaces/", "statistics/") if self.calibrates else ("subspaces/",)
        self._made: tuple[int, Knowledge, list[tuple[Layer, Projector]]] | None = None
        self._begun: tuple[list[tuple[Layer, Projector]], dict[str, Anchored]] | None = None
        self._outside: tuple[list[tuple[Layer, Projector]], list[tuple[Layer, Complement]]] | None = None
        self._known: tuple[list[tuple[Layer, Projector]], dict[str, Projector]] | None = None

    def check(self) -> None:
        super().check()
        if self.options.router == "shared" and self.settings.stream.scenario != "domain":
            raise UsageError(
                'method.router = "shared" is not possible with stream.scenario = "class": there it is "statistics".'
            )

    @property
    def options(self) -> FedProTIPOptions:
        assert isinstance(self.settings.method, FedProTIPOptions)
        return self.settings.method

    @property
    def precision(self) -> torch.dtype:
        """What bases travel as."""
        return PRECISIONS[self.settings.train.wire]

    def threshold(self, layer: str, task: int) -> float:
        """ε_l of a layer in a task (counted from 0): the start value + 0.001 per task, at most 1."""
        patterns = self.options.layer_thresholds.items()
        start = next((value for pattern, value in patterns if fnmatchcase(layer, pattern)), self.options.threshold)
        return min(start + self.options.increment * task, 1.0)

    def _exchanges(self) -> tuple[Exchange, ...]:
        told = (Exchange(statistics.KIND),) if self.options.statistics else ()
        asked = (Exchange(identity.CALIBRATION),) if self.calibrates else ()
        return (*told, Exchange("basis"), Exchange(identity.REFERENCE, everyone=True), *asked)

    # Training: Eq. 4–5

    def trainable(self, network: Network, knowledge: Knowledge, task: int) -> set[str]:
        """After the first task only weights with an input subspace move, and the current head.

        Where Φ spans all inputs and every step is projected, a weight cannot move: it needs no gradient either.
        """
        names, options = super().trainable(network, knowledge, task), self.options
        if task == 0 or options.projection == "none":
            return names
        strict = options.projection == "local" and options.project_on == "update"
        made = self.projectors(network, knowledge, task)
        protected = {f"backbone.{layer.parameter}" for layer, outside in made if outside.room or not strict}
        return {name for name in names if name.startswith("heads.") or name in protected}

    def constraint(self, network: Network, knowledge: Knowledge, task: int) -> Constraint | None:
        if task == 0 or self.options.projection != "local":
            return None
        projectors = self.projectors(network, knowledge, task)
        if self.options.project_on == "gradient":
            return ProjectGradient(network.backbone, projectors)
        anchors = self._anchors(projectors, knowledge)
        return ProjectUpdate(network.backbone, projectors, linear_decay(self.settings.train), anchors)

    def _anchors(self, projectors: list[tuple[Layer, Projector]], knowledge: Knowledge) -> dict[str, Anchored]:
        """W^(t,0) of every layer with its projector, once per task: no round moves W·Φ."""
        if self._begun is None or self._begun[0] is not projectors:
            anchors = {}
            for layer, projector in projectors:
                weight = knowledge.get(f"{START}backbone.{layer.parameter}")
                if weight is not None:  # it travels as a change since then
                    anchors[layer.name] = projector.anchor(layer.weight({layer.parameter: weight}))
            self._begun = projectors, anchors
        return self._begun[1]

    def projectors(self, network: Network, knowledge: Knowledge, task: int) -> list[tuple[Layer, Projector]]:
        """Eq. 4 for every layer that has a basis; made once per task, from those of the task before."""
        if self._made is None or self._made[0] != task or self._made[1] is not knowledge:
            follows = self._made and self._made[0] == task - 1 and self._made[1] is knowledge
            before = {layer.name: projector for layer, projector in self._made[2]} if self._made and follows else {}
            bank, device = SubspaceBank.from_tensors(knowledge), next(network.parameters()).device
            bank.layers = {name: basis.to(device) for name, basis in bank.layers.items()}
            layers = [layer for group in find_layers(network.backbone, False).values() for layer in group]
            made = [(lay, bank.projector(lay.name, before.get(lay.name))) for lay in layers if lay.name in bank.layers]
            self._made = task, knowledge, made
        return self._made[2]

    def complements(self, network: Network, knowledge: Knowledge, task: int) -> list[tuple[Layer, Complement]]:
        """The complement of Φ for every layer that has a basis: changes inside Φ do not occur, or are not wanted.

        Global projection is just this: the average of coordinates is the projected average.
        """
        options = self.options
        escapes = options.projection == "local" and options.project_on == "gradient"  # decay acts inside Φ too
        if task == 0 or options.projection == "none" or escapes:
            return []
        projectors = self.projectors(network, knowledge, task)
        if self._outside is None or self._outside[0] is not projectors:
            self._outside = projectors, [(layer, complement_of(projector)) for layer, projector in projectors]
        return self._outside[1]

    def receive(self, knowledge: Knowledge, message: Message, task: int) -> None:
        """Append Φ^(t) of every layer and U_L^(t); what was rounded on its way is made orthonormal again."""
        if message.kind == statistics.KIND:
            statistics.received(knowledge, message)
            return
        bank = SubspaceBank.from_tensors(knowledge)
        for name, basis in message.tensors.items():
            if basis.dtype != torch.float32:
                earlier = basis[:, :0] if name == ROUTING else bank.basis(name, len(basis))
                basis = orthonormalise(residual(basis, earlier)).float()
            if name == ROUTING:
                bank.routing.append(basis)
            else:
                bank.extend(name, basis, task)
        knowledge.update(bank.to_tensors())

    # Task end, client: Eq. 7–9, then Eq. 11

    def summarise(self, kind: str, local: ClientTask) -> Message:
        if kind == statistics.KIND:
            return self._count(local)
        if kind == identity.REFERENCE:
            return identity.refer(local)
        if kind == identity.CALIBRATION:
            classes = [task.classes for task in local.stream.tasks[: local.task + 1]]
            answers = assemble(self._by_statistics(), local.network, local.knowledge, classes)
            return identity.calibrate(local, answers, self.settings.evaluate.batch)
        return self._extract(local)

    def _count(self, local: ClientTask) -> Message:
        """Class statistics of all samples; the moments of their features stay with the client, for routing."""
        moments = identity.Moments(local.network.features)
        message = statistics.gather(local, self.settings, also=moments.add)
        moments.keep(local)
        return message

    def _extract(self, local: ClientTask) -> Message:
        """Core bases of every layer, and of the final features, whose moments stay with the client."""
        self._begun = None  # no more steps in this task
        options, earlier = self.options, self._earlier(local.network, local.knowledge, local.task)
        cores = {name: Core(torch.zeros(len(p.basis), 0), torch.zeros(0), 0.0) for name, p in earlier.items()}
        known = identity.kept_moments(local, local.task) if options.statistics else None  # what `_count` left
        moments = identity.Moments(local.network.features)
        cores |= self.layer_cores(local, None if known else moments.add)
        known = known or self._complete(moments, local).keep(local)
        cores[ROUTING] = core_of_moment(
            known["moment"],
            int(known["samples"]),
            earlier[ROUTING],
            self.threshold(ROUTING, local.task),
            options.rank_rule,
            options.routing_rank,
        )
        tensors = {name: core.basis.to(self.precision) for name, core in cores.items()}
        weighed = {name: core for name, core in cores.items() if self._by_energy(name)}
        tensors |= {SIGMA + name: core.sigma.float() for name, core in weighed.items()}
        rest = {name: [core.captured, core.tail] for name, core in weighed.items()}
        return Message("basis", tensors, {"rest": rest} if rest else {})

    def _earlier(self, network: Network, knowledge: Knowledge, task: int) -> dict[str, Projector]:
        """What earlier tasks hold of every layer and of the final features; on the CPU, where bases are made."""
        projectors = self.projectors(network, knowledge, task)
        if self._known is None or self._known[0] is not projectors:
            known = {layer.name: Projector(p.basis.cpu(), p.is_complement) for layer, p in projectors}
            known[ROUTING] = Projector.outside(SubspaceBank.from_tensors(knowledge).routed(network.features))
            self._known = projectors, known
        return self._known[1]

    def layer_cores(self, local: ClientTask, watch: Watch | None = None) -> dict[str, Core]:
        """Eq. 7–9 for every layer that later tasks may move; `watch` is shown the features of the images used."""
        earlier, cores = self._earlier(local.network, local.knowledge, local.task), {}
        columns = self.sample_columns(local, watch)
        for name in list(columns):
            a = columns.pop(name).cpu()
            threshold = self.threshold(name, local.task)
            cores[name] = core_basis(a, earlier.get(name, a[:, :0]), threshold, self.options.rank_rule)
        return cores

    def sample_columns(self, local: ClientTask, watch: Watch | None = None) -> dict[str, Tensor]:
        """m_s input columns of every such layer (d, m_s), of as few images as give a fair sample of them."""
        options, network = self.options, local.network
        if options.projection == "none":  # only routing needs a basis
            return {}
        earlier = self._earlier(network, local.knowledge, local.task)
        frozen = frozen_prefixes(self.settings.model, local.task + 1)  # needs no protection from later tasks
        full = {name for name, projector in earlier.items() if not projector.room}
        layers = {
            name: group
            for name, group in find_layers(network.backbone, False).items()
            if not name.startswith(frozen) and not full.issuperset(layer.name for layer in group)
        }
        seed = (local.seed, "columns", local.task, local.client)

        def forward(batch: Inputs) -> None:
            features = network.embed(batch)
            if watch:
                watch(features)

        batches = local.batches(self._images, min(SMALL, options.columns))
        return capture(network.backbone, batches, options.columns, seed, layers, forward, options.per_image)

    def _complete(self, moments: identity.Moments, local: ClientTask) -> identity.Moments:
        """Moments of the final features of m images, of which some have been added already."""
        for batch in local.batches(self._images, self.settings.evaluate.batch, after=moments.samples):
            moments.add(local.network.embed(batch))
        return moments

    @property
    def _images(self) -> int:
        """No more images of a client are looked at than there are columns to fill."""
        return min(self.options.images, self.options.columns)

    # Task end, server: Eq. 10, then the references of all clients

    def validate(self, message: Message, network: Network, knowledge: Knowledge, task: int) -> None:
        if message.kind == identity.REFERENCE:
            identity.check_references(message, task)
            return
        if message.kind == identity.CALIBRATION:
            identity.check_calibration(message)
            return
        if message.kind == statistics.KIND:
            width = statistics.feature_map(network, self.settings).out
            classes = len(network.labels[network.head_of(task)])
            statistics.check(message, classes, width, self.settings.statistics.rank)
            return
        bank, features = SubspaceBank.from_tensors(knowledge), network.features
        layers = {lay.name: lay.d for group in find_layers(network.backbone, False).values() for lay in group}
        names = {name for name in message.tensors if not name.startswith(SIGMA) and name != ROUTING}
        if not names <= layers.keys() or (bank.layers and names != bank.layers.keys()):
            raise BadMessage(f"bases of {sorted(names)} came, expected {sorted(bank.layers or layers)}")
        widths = {name: layers[name] for name in names} | {ROUTING: features}
        specs = {name: Spec((d, -1), self.precision, orthonormal=True, at_most=d) for name, d in widths.items()}
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
        if kind == identity.REFERENCE:
            knowledge.update(identity.collected(replies, knowledge, task))
            return None
        if kind == statistics.KIND:
            statistics.remember(knowledge, statistics.added(replies))
            names = (statistics.COUNTS, statistics.SUMS, statistics.MOMENT)
            told = {name.removeprefix("statistics/"): knowledge[name] for name in names}
            return Message(statistics.KIND, told) if self.calibrates else None
        if kind == identity.CALIBRATION:
            identity.add_calibration(replies, knowledge)
            return None
        return self._merge(replies, network, knowledge, task)

    def _merge(
        self, replies: Iterable[tuple[int, Message]], network: Network, knowledge: Knowledge, task: int
    ) -> Message:
        """Eq. 10 for every layer, one client after another."""
        earlier = self._earlier(network, knowledge, task)
        mergers = {ROUTING: self._merger(ROUTING, earlier[ROUTING], task)}
        nothing = torch.zeros(network.features, 0)
        inside = self._merger(ROUTING, nothing, task)  # for a task whose features lie in the earlier bases
        for _, message in replies:
            rest = message.meta.get("rest", {})
            for name, basis in message.tensors.items():
                if name.startswith(SIGMA):
                    continue
                sigma = message.tensors.get(SIGMA + name, torch.zeros(basis.shape[1]))
                core = Core(basis, sigma.double(), *rest.get(name, (0.0, 0.0)))
                if name not in mergers:
                    mergers[name] = self._merger(name, earlier.get(name, torch.zeros(len(basis), 0)), task)
                mergers[name].add(core)
                if name == ROUTING:
                    inside.add(core)
        merged = {name: merger.result() for name, merger in mergers.items()}
        if merged[ROUTING].shape[1] == 0:
            merged[ROUTING] = inside.result()
        if merged[ROUTING].shape[1] == 0:  # all features are zero: any direction serves
            merged[ROUTING] = torch.eye(network.features, 1)
        return Message("basis", {name: basis.to(self.precision) for name, basis in merged.items()})

    def _check_energies(self, name: str, message: Message) -> None:
        """Singular values, captured energy and tail of a basis must be finite and not negative."""
        rest = message.meta.get("rest", {}).get(name)
        numbers = rest if isinstance(rest, list) and len(rest) == 2 else [torch.nan]
        numbers = [*numbers, *message.tensors[SIGMA + name].tolist()]
        if not all(isinstance(number, float) and math.isfinite(number) and number >= 0 for number in numbers):
            raise BadMessage(f"the energies of {name} are not finite numbers ≥ 0")

    def _by_energy(self, name: str) -> bool:
        return self.options.merge == "energy" or (name == ROUTING and self.options.routing_rank > 0)

    def _merger(self, name: str, earlier: Earlier, task: int) -> Merger:
        if not self._by_energy(name):
            rounded = 0.0 if self.precision == torch.float32 else ROUNDED
            return UnionMerge(earlier, max(FAINT if name == ROUTING else DEPENDENT, rounded))
        fixed, at_least = (self.options.routing_rank, 1) if name == ROUTING else (0, 0)
        return EnergyMerge(earlier, self.threshold(name, task), self.options.rank_rule, fixed, at_least)

    # Answers

    def answering(self) -> Answering:
        """All routers; the paper's need references, the others class statistics."""
        statistical = self._by_statistics()
        vote: Options = {"voters": self.options.voters, "seed": self.settings.run.seed}
        ways = {
            "cosine": WayPlan(router="cosine", expert=HEADS, options=vote),
            "gaussian": WayPlan(router="gaussian", expert=HEADS),
        }
        return Answering(experts=statistical.experts, ways=ways | statistical.ways, chosen=self.options.router)

    def _by_statistics(self) -> Answering:
        """What a client can answer too, and calibrates: heads, class statistics and the two together."""
        own = super().answering()
        if not self.options.statistics:
            return own
        told = statistics.answering(self.settings)
        both = {name: WayPlan(router=STATISTICS, expert=HEADS, hard=name != "fused") for name in BOTH}
        ways = told.ways | both
        chosen = self.options.router if self.options.router in ways else "fused"
        return Answering(experts=own.experts | told.experts, ways=ways, chosen=chosen)

    def ranks(self, knowledge: Knowledge) -> tuple[dict[str, int], dict[str, int]]:
        bank = SubspaceBank.from_tensors(knowledge)
        shapes = {name: basis.shape for name, basis in bank.layers.items()}
        if bank.routing:
            shapes[ROUTING] = bank.routed(len(bank.routing[0])).shape
        return {name: shape[1] for name, shape in shapes.items()}, {name: shape[0] for name, shape in shapes.items()}
