"""Core bases at the end of a task: clients extract them (Eq. 7–9), the server merges them (Eq. 10)."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedprotip.messages import PRECISIONS, BadMessage, Message, Spec
from fedprotip.methods.exchange import Exchange, Sender
from fedprotip.methods.local import Local
from fedprotip.methods.parts.moments import Moments
from fedprotip.methods.parts.protection import ROUTING, append_bases, protection
from fedprotip.methods.parts.robust import is_robust, supported
from fedprotip.methods.parts.wear import LEFT
from fedprotip.methods.site import Site
from fedprotip.models.capture import Layer, capture, find_layers
from fedprotip.models.freeze import frozen_prefixes
from fedprotip.models.steps import Inputs
from fedprotip.settings import Settings
from fedprotip.store.files import Tensors
from fedprotip.subspace.basis import Core, Earlier, core_basis, core_of_moment
from fedprotip.subspace.merge import EnergyMerge, Merger, UnionMerge
from fedprotip.subspace.project import Projector

if TYPE_CHECKING:
    from fedprotip.methods.fedprotip import FedProTIPOptions

SIGMA = "sigma/"
"""Prefix of singular values in messages, sent only where bases are merged by energy."""
SMALL = 32
"""Images per pass of extraction, with and without a cache: how many images are seen depends on it."""
FEW = 16
"""Ranks below d/16 are not told apart when those of clients are compared."""
ENERGY = torch.finfo(torch.float32).max
"""The largest energy that a client may tell: its square is finite."""

Watch = Callable[[Tensor], None]


class Bases(Exchange):
    """Bases of every layer that later tasks may move, and of the final features."""

    name = "basis"
    slack = 2.0  # ranks of honest clients were at most 1.4 times the others': docs/threats.md

    def __init__(self, options: "FedProTIPOptions", settings: Settings) -> None:
        self.options = options
        self.precision, self._tasks = PRECISIONS[settings.train.wire], settings.stream.tasks
        self._aggregate = settings.train.aggregate

    def threshold(self, layer: str, task: int) -> float:
        """ε_l of a layer in a task (counted from 0): the start value + 0.001 per task, at most 1."""
        patterns = self.options.layer_thresholds.items()
        start = next((value for pattern, value in patterns if fnmatchcase(layer, pattern)), self.options.threshold)
        return min(start + self.options.increment * task, 1.0)

    def most(self, d: int, room: int, task: int) -> int:
        """How many directions a task may add to a basis with `room` of d left (`method.budget`): at least one."""
        if self.options.budget == "none":
            return room
        return min(max(d * (task + 1) // (self._tasks + 1) - (d - room), 1), room)

    # Client: Eq. 7–9

    def answer(self, local: Local) -> Message:
        cores = self.cores(local)
        tensors = {name: core.basis.to(self.precision) for name, core in cores.items()}
        weighed = {name: core for name, core in cores.items() if self._by_energy(name)}
        tensors |= {SIGMA + name: core.sigma.float() for name, core in weighed.items()}
        rest = {name: [core.captured, core.tail] for name, core in weighed.items()}
        return Message(self.name, tensors, {"rest": rest} if rest else {})

    def cores(self, local: Local) -> dict[str, Core]:
        """Core bases of every layer, and of the final features, whose moments stay with the client."""
        options, view = self.options, protection(local.site)
        view.forget_anchors()
        # of a full layer, or one that nothing passes, no direction
        cores = {name: Core(torch.zeros(d, 0), torch.zeros(0), 0.0) for name, d in self.widths(local.site).items()}
        moments = Moments(local.network.features)
        cores |= self.layer_cores(local, moments.add)
        self._complete(moments, local).keep(local)
        cores[ROUTING] = core_of_moment(
            moments.moment,
            moments.samples,
            view.earlier[ROUTING],
            self.threshold(ROUTING, local.task),
            options.rank_rule,
            options.routing_rank,
        )
        rooms = {name: Projector.of(known).room for name, known in view.earlier.items()}
        for name, core in cores.items():
            d = len(core.basis)
            if room := rooms.get(name, d):  # without any, a routing basis lies within the earlier ones
                cores[name] = core.first(self.most(d, room, local.task), options.rank_rule)
        return cores

    def layer_cores(self, local: Local, watch: Watch | None = None) -> dict[str, Core]:
        """Eq. 7–9 for every layer that later tasks may move; `watch` is shown the features of the images used."""
        earlier, cores = protection(local.site).earlier, {}
        columns = self.sample_columns(local, watch)
        for name in list(columns):
            a = columns.pop(name).cpu()
            threshold = self.threshold(name, local.task)
            cores[name] = core_basis(a, earlier.get(name, a[:, :0]), threshold, self.options.rank_rule)
        return cores

    def sample_columns(self, local: Local, watch: Watch | None = None) -> dict[str, Tensor]:
        """m_s input columns of every such layer (d, m_s), of as few images as give a fair sample of them."""
        options, network, layers = self.options, local.network, self.layers(local.site)
        if not layers:
            return {}
        seed = (local.settings.run.seed, "columns", local.task, local.client)

        def forward(batch: Inputs) -> None:
            features = network.embed(batch)
            if watch:
                watch(features)

        batches = local.images(options.columns, min(SMALL, options.columns))
        return capture(network.backbone, batches, options.columns, seed, layers, forward, options.per_image)

    def layers(self, site: Site) -> dict[str, list[Layer]]:
        """Weights that later tasks may move and whose bases have room, each with its layers."""
        if self.options.projection == "none":  # only routing needs a basis
            return {}
        frozen = frozen_prefixes(site.settings.model, site.task + 1)  # needs no protection from later tasks
        full = {name for name, projector in protection(site).earlier.items() if not projector.room}
        return {
            name: group
            for name, group in find_layers(site.network.backbone, False).items()
            if not name.startswith(frozen) and not full.issuperset(layer.name for layer in group)
        }

    def widths(self, site: Site) -> dict[str, int]:
        """The bases that a client tells, with their widths d: of layers with room, and of all that had some before."""
        earlier = {name: len(projector.basis) for name, projector in protection(site).earlier.items()}
        return {layer.name: layer.d for group in self.layers(site).values() for layer in group} | earlier

    def _complete(self, moments: Moments, local: Local) -> Moments:
        """Moments of the final features of m_s images, of which some have been added already."""
        for batch in local.images(self.options.columns, local.settings.evaluate.batch, after=moments.samples):
            moments.add(local.network.embed(batch))
        return moments

    # Server: Eq. 10

    def check(self, message: Message, site: Site) -> None:
        widths = self.widths(site)
        most = self.options.columns  # no more directions than columns
        specs = {
            name: Spec((d, -1), self.precision, orthonormal=True, at_most=min(d, most)) for name, d in widths.items()
        }
        ranks = {name: message.tensors[name].shape[-1] for name in specs if name in message.tensors}
        specs |= {SIGMA + name: Spec((rank,)) for name, rank in ranks.items() if self._by_energy(name)}
        message.check(self.name, specs)
        weighed = {name for name in ranks if self._by_energy(name)}
        message.check_meta(*(["rest"] if weighed else []))
        if weighed and (not isinstance(message.meta["rest"], dict) or message.meta["rest"].keys() != weighed):
            raise BadMessage("energies of other layers came than those that are asked for")
        for name in ranks:
            if self._by_energy(name):
                self._check_energies(name, message)
        if ranks[ROUTING] == 0:
            raise BadMessage("the routing basis is empty")

    def sizes(self, message: Message, site: Site) -> dict[str, float]:
        """Ranks, and energies where they decide: of what a basis holds, and of all that it says there was."""
        bases = {name: basis for name, basis in message.tensors.items() if not name.startswith(SIGMA)}
        ranks = {f"rank of {name}": float(basis.shape[1]) for name, basis in bases.items()}
        sigmas = {name: message.tensors[SIGMA + name].double().norm().item() for name in bases if self._by_energy(name)}
        wholes = {name: self._whole(sigma, *message.meta["rest"][name]) for name, sigma in sigmas.items()}
        heights = [(f"energy of {name}", height) for name, height in sigmas.items()]
        heights += [(f"whole energy of {name}", height) for name, height in wholes.items()]
        return ranks | {what: height for what, height in heights if height}

    def _whole(self, length: float, captured: float, tail: float) -> float:
        """The root of the energy of singular values of this length, of what was captured before and of what was cut."""
        return math.sqrt(length**2 + captured + (tail if self.options.rank_rule == "energy" else tail**2))

    def least(self, message: Message, site: Site) -> dict[str, float]:
        return {f"rank of {name}": len(basis) / FEW for name, basis in message.tensors.items()}

    def effort(self, message: Message, site: Site, sender: Sender) -> float:
        return min(max(sender.samples or 1, 1), site.most)

    def digest(self, combined: Any, site: Site) -> Message:
        """Eq. 10 for every layer, one client after another."""
        earlier = protection(site).earlier
        mergers = {ROUTING: self._merger(ROUTING, earlier[ROUTING], site.task)}
        nothing = torch.zeros(site.network.features, 0)
        inside = self._merger(ROUTING, nothing, site.task)  # for a task whose features lie in the earlier bases
        for name, core in self._told(combined):
            if name not in mergers:
                mergers[name] = self._merger(name, earlier.get(name, torch.zeros(len(core.basis), 0)), site.task)
            mergers[name].add(core)
            if name == ROUTING:
                inside.add(core)
        merged = {name: merger.result() for name, merger in mergers.items()}
        if merged[ROUTING].shape[1] == 0:
            merged[ROUTING] = inside.result()
        if merged[ROUTING].shape[1] == 0:  # all features are zero: any direction serves
            merged[ROUTING] = torch.eye(site.network.features, 1)
        left = {name: merger.left for name, merger in mergers.items() if name != ROUTING}
        return Message(self.name, {name: basis.to(self.precision) for name, basis in merged.items()}, {"left": left})

    def _told(self, combined: Any) -> Iterator[tuple[str, Core]]:
        """The bases of all layers of one client after another."""
        for _, message in self._supported(list(combined)) if is_robust(self._aggregate) else combined:
            rest = message.meta.get("rest", {})
            for name, basis in message.tensors.items():
                if not name.startswith(SIGMA):
                    sigma = message.tensors.get(SIGMA + name, torch.zeros(basis.shape[1]))
                    yield name, Core(basis, sigma.double(), *rest.get(name, (0.0, 0.0)))

    def _supported(self, replies: list[tuple[int, Message]]) -> list[tuple[int, Message]]:
        """Without the directions that only one client asks for."""
        kept: list[Tensors] = [{} for _ in replies]
        for name in sorted({name for _, message in replies for name in message.tensors if not name.startswith(SIGMA)}):
            senders = [place for place, (_, message) in enumerate(replies) if name in message.tensors]
            rotations = supported([replies[place][1].tensors[name] for place in senders])
            for place, rotation in zip(senders, rotations, strict=True):
                told = replies[place][1].tensors
                kept[place][name] = (told[name].double() @ rotation).to(told[name].dtype)
                if self._by_energy(name):
                    energies = rotation.square().T @ told[SIGMA + name].double().square()
                    kept[place][SIGMA + name] = energies.sqrt().float()
        return [(client, replace(message, tensors=kept[place])) for place, (client, message) in enumerate(replies)]

    def _check_energies(self, name: str, message: Message) -> None:
        """Singular values, captured energy and tail of a basis must not be negative, and have finite squares."""
        rest = message.meta.get("rest")
        numbers = rest.get(name) if isinstance(rest, dict) else None
        numbers = numbers if isinstance(numbers, list) and len(numbers) == 2 else [torch.nan]
        numbers = [*numbers, *message.tensors[SIGMA + name].tolist()]
        if not all(isinstance(number, float) and 0 <= number <= ENERGY for number in numbers):
            raise BadMessage(f"the energies of {name} are not finite numbers ≥ 0")

    def _by_energy(self, name: str) -> bool:
        return self.options.merge != "union" or (name == ROUTING and self.options.routing_rank > 0)

    def _merger(self, name: str, earlier: Earlier, task: int) -> Merger:
        if not self._by_energy(name):
            return UnionMerge(earlier)
        fixed, at_least = (self.options.routing_rank, 1) if name == ROUTING else (0, 0)
        known = Projector.of(earlier)
        most = self.most(len(known.basis), known.room, task)
        return EnergyMerge(earlier, self.threshold(name, task), self.options.rank_rule, fixed, at_least, most)

    # Both

    def receive(self, message: Message, site: Site) -> None:
        append_bases(message.tensors, site)
        site.known.update(
            {f"{LEFT.name}/{name}": torch.tensor([share]) for name, share in message.meta.get("left", {}).items()}
        )
