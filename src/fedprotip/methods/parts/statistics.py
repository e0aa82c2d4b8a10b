"""Class statistics, federated: what a client tells about its classes, and how the server adds it up."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedprotip.inference.experts import BIRTH, BIRTH_SHARED, SHARED, STATISTICS, feature_map
from fedprotip.inference.statistics import PARTS, FeatureMap, Sums, low_rank, pack, recall, unpack
from fedprotip.messages import SAMPLES, BadMessage, Message, Spec
from fedprotip.methods.exchange import Combine, Exchange, Sender
from fedprotip.methods.local import Local
from fedprotip.methods.parts.consensus import Consensus
from fedprotip.methods.parts.robust import is_robust, robust_sums
from fedprotip.methods.site import Site
from fedprotip.methods.state import Form, Kept, Knowledge
from fedprotip.models import Network
from fedprotip.models.heads import Features
from fedprotip.models.prefix import InputBatch
from fedprotip.models.steps import Inputs
from fedprotip.settings import Settings, TrainSettings
from fedprotip.store.events import Event, Withheld
from fedprotip.store.files import Tensors
from fedprotip.stream.plan import Answering, Options, WayPlan

KIND = "statistics"
SLACK = 2.0
"""How many times as long as the others' features of a client may be; in honest runs at most 1.4: docs/threats.md."""
ROUNDED = 1e-6
"""Error of a scatter matrix whose moment and sums were rounded to float32, as a share of the moment's trace."""
SKETCHED = 1e-4
"""The same of sketches, which are sums of products of features of any sign."""


def kept(shared: bool, group: str = KIND) -> Kept:
    """The statistics as state of a method; `shared` where clients calibrate answers by them."""
    forms = {"counts": Form("c", torch.float64), "sums": Form("c m", torch.float64), "moment": Form("p", torch.float64)}
    forms["sketches"] = Form("c m k")
    return Kept(group, "shared" if shared else "server", forms, artefact=True)


class Statistics(Exchange):
    """Sums of every client's features at the end of a task.

    Where they are plain sums, samples that were held back are in them: whoever calibrates answers by its own can take
    them out again (`parts/calibration.py::without_held_back`).

    Args:
        tells: clients are told the sums of all (they calibrate answers by them).
        options: of the feature map; by default as the settings say.
        born: of the network at birth, before any training; they are known, and travel, under a name of their own.
    """

    name, slack, fraction, settles = KIND, SLACK, 24, False

    def __init__(
        self, settings: Settings, tells: bool = False, options: Options | None = None, born: bool = False
    ) -> None:
        self._settings, self._tells = settings, tells
        self.name = BIRTH if born else KIND
        self.options = options or feature_options(settings, born)
        self.combine = combination(settings)
        self._held_back = settings.clients.held_back if self.combine == "sum" else 0.0

    def answer(self, local: Local) -> Message:
        return gather(local, self.name, feature_map(local.network, self.options), held_back=self._held_back > 0)

    def check(self, message: Message, site: Site) -> None:
        change = feature_map(site.network, self.options)
        check(message, self.name, classes_of(site), change, self._settings.statistics.rank)
        check_signs(message, positive=bool(change.width) or site.positive_features(change.born))

    def check_sender(self, message: Message, site: Site, sender: Sender) -> None:
        check_counts(message, sender, least(site.settings), self._held_back)

    def sizes(self, message: Message, site: Site) -> dict[str, float]:
        return sizes(message)

    def consensus(self, site: Site) -> Consensus | None:
        return consensus(site, [site.network.head_of(site.task)])

    def weight(self, message: Message, site: Site) -> float:
        return weight(message, site.most / (1 - self._held_back))

    def remark(self, message: Message, task: int, client: int) -> Event | None:
        return withheld(message, task, client)

    def digest(self, combined: Any, site: Site) -> Message | None:
        """The sums of all clients, rounded as they are told."""
        omega = feature_map(site.network, self.options).omega
        sums = summed(combined, self._settings.train, omega, site.most)
        told = Message(self.name, {"counts": sums.counts.ceil().long(), "moment": pack(sums.moment).float()})
        told.tensors.update({"sums": sums.sums.float(), "sketches": sums.sketches.float()})
        if self._tells:
            return told
        self.receive(told, site)
        return None

    def receive(self, message: Message, site: Site) -> None:
        remember(site.known, _sums(message), self.name)


def least(settings: Settings) -> int:
    """Samples that a class must have at a client; where only sums of all clients are seen, one is enough."""
    return 1 if settings.method.secure else settings.statistics.minimum


def combination(settings: Settings) -> Combine:
    """Sums of low rank, and those that trust no single client, can be added by whoever sees each of them only."""
    return "each" if settings.statistics.rank or is_robust(settings.train.aggregate) else "sum"


def classes_of(site: Site) -> int:
    """Classes of the task under way."""
    return len(site.network.labels[site.network.head_of(site.task)])


def gather(
    local: Local, kind: str, change: FeatureMap, tasks: Sequence[int] | None = None, held_back: bool = False
) -> Message:
    """Sums over all training samples of a client, as the feature map sees them, with the model as it stands.

    The sum of very few samples would be close to a feature itself: classes with fewer than `statistics.minimum`
    samples are left out of everything, and the message says how many they were.

    Args:
        tasks: whose samples are summed, their classes one after another; by default those of the task under way.
        held_back: samples that were held back are summed too.
    """
    settings = local.settings
    parts = [replace(local, task=task) for task in ([local.task] if tasks is None else tasks)]
    counts = torch.cat([numbers(part, held_back) for part in parts])
    told, first = counts >= least(settings), 0
    sums = Sums.zeros(len(counts), change.out, change.columns)
    for part in parts:
        batches = part.labelled(settings.evaluate.batch)
        own = told[first : (first := first + len(part.site.classes[part.task]))]
        enter(sums, part, batches, change, own, first - len(own))
        if held_back:
            enter(sums, part, part.held_back(settings.evaluate.batch), change, own, first - len(own))
    tensors = {"counts": sums.counts.long(), "sums": sums.sums.float(), "sketches": sums.sketches.float()}
    if rank := _rank(change.out, settings.statistics.rank):
        factor, rest = low_rank(sums.scatter(), rank)
        tensors |= {"factor": factor.float(), "rest": rest.float()}
    else:
        tensors["moment"] = pack(sums.moment).float()
    return Message(kind, tensors, {"withheld": int(((counts > 0) & ~told).sum())})


def numbers(local: Local, held_back: bool) -> Tensor:
    """How many samples a client has of each class of the task (C,), with or without those it held back."""
    labels = torch.cat([local.labels(), local.holding.held_back_labels(local.task)] if held_back else [local.labels()])
    return (labels[:, None] == torch.tensor(local.site.classes[local.task])).sum(0)


def enter(
    sums: Sums,
    local: Local,
    batches: Iterable[InputBatch | tuple[Features, Tensor]],
    change: FeatureMap,
    told: Tensor,
    first: int = 0,
) -> None:
    """Add samples of a task whose classes have the rows from `first` on, but for classes that are not told (C,)."""
    known = torch.tensor(local.site.classes[local.task])
    for inputs, labels in batches:
        rows = (labels[:, None] == known).int().argmax(1)
        keep = told[rows]
        features = looked_at(local.network, inputs, change)
        sums.add(change(features[keep.to(features.device)]), first + rows[keep], change.omega)


def looked_at(network: Network, inputs: Inputs | Features, change: FeatureMap) -> Tensor:
    """The features that a map is to be applied to, (n, d): of images, or out of what was seen in them already."""
    if isinstance(inputs, Features):
        found = inputs.newborn if change.born else inputs.final if change.final else inputs.stacked
        assert found is not None, "who looks for a map of the network at birth asks for its features"
        return found
    if change.born:
        return network.look_at_birth(inputs)
    return network.embed(inputs) if change.final else network.look(inputs).stacked


def withheld(message: Message, task: int, client: int) -> Event | None:
    """For events.jsonl: how many classes a client left out."""
    classes = message.meta["withheld"]
    return Withheld(task=task, client=client, kind=message.kind, classes=classes) if classes else None


def _rank(d: int, wanted: int) -> int:
    """Directions of the scatter that travel; 0 where the packed moment is no larger."""
    return wanted if 2 * wanted < d else 0


def check(message: Message, kind: str, classes: int, change: FeatureMap, rank: int = 0) -> None:
    """Raise BadMessage unless these are statistics of so many classes with such features.

    `rank`: as in the settings.
    """
    d = change.out
    rank = _rank(d, rank)
    products = {"factor": Spec((d, rank)), "rest": Spec((d,))} if rank else {"moment": Spec((d * (d + 1) // 2,))}
    products["sketches"] = Spec((classes, d, change.columns))
    message.check(kind, {"counts": Spec((classes,), torch.int64), "sums": Spec((classes, d)), **products})
    message.check_meta("withheld")
    check_withheld(message, classes)
    if (message.tensors["counts"] < 0).any() or (message.tensors["counts"] > SAMPLES).any():
        raise BadMessage("a count is negative or impossible")
    found = _sums(message)
    unseen = ~found.seen
    if found.sums[unseen].any() or found.sketches[unseen].any():
        raise BadMessage("a class without samples has a sum")
    if not found.seen.any() and any(message.tensors[name].any() for name in products):
        raise BadMessage("there are products of no samples")
    if rank:
        if (message.tensors["rest"] < 0).any():
            raise BadMessage("a variance is negative")
    else:
        scatter = found.scatter()
        scatter.diagonal().add_(max(ROUNDED * found.moment.trace().item(), torch.finfo(torch.float32).tiny))
        if torch.linalg.cholesky_ex(scatter)[1]:
            raise BadMessage("its second moment is none, or does not fit its sums and counts")
    if change.columns:
        _check_sketches(found, change.omega, whole=not rank)


def check_withheld(message: Message, classes: int) -> None:
    """Raise BadMessage unless it says of how many classes nothing is told."""
    if type(message.meta["withheld"]) is not int or not 0 <= message.meta["withheld"] <= classes:
        raise BadMessage(f"withheld is not a number of classes up to {classes}")


def _check_sketches(found: Sums, omega: Tensor, whole: bool) -> None:
    """Raise BadMessage unless Ωᵀ·S_c·Ω of every class is a scatter matrix, and the sketches fit the second moment.

    whole: they are of all that is in the moment, which is not of low rank.
    """
    inner = omega.T @ found.sketches[found.seen]  # ΩᵀM_cΩ
    size = torch.einsum("ckk->c", inner).clamp_min(torch.finfo(torch.float32).tiny)[:, None, None]
    apart = (inner - inner.mT).abs()
    scatter = omega.T @ found.own_scatter(omega)[found.seen]
    scatter = (scatter + scatter.mT) / 2 + size * SKETCHED * torch.eye(omega.shape[1], dtype=torch.float64)
    if (apart > size * SKETCHED).any() or torch.linalg.cholesky_ex(scatter)[1].any():
        raise BadMessage("the sketch of a class is none, or does not fit its sum and count")
    if whole:
        seen = found.moment @ omega
        if (found.sketches.sum(0) - seen).norm() > SKETCHED * seen.norm():
            raise BadMessage("its sketches do not add up to its second moment")


def check_signs(message: Message, positive: bool) -> None:
    """Raise BadMessage where features that cannot be negative have negative sums or products."""
    parts = [message.tensors[name] for name in ("sums", "moment") if name in message.tensors]
    if positive and any((part < 0).any() for part in parts):
        raise BadMessage("features that cannot be negative have negative sums")


def check_counts(message: Message, sender: Sender, minimum: int, held_back: float = 0.0) -> None:
    """Raise BadMessage unless the counts of classes add up to the samples that the sender has.

    held_back: the share of all its samples, rounded down, that it counts beside those it trains on; of few maybe one.
    """
    counts, withheld, samples = message.tensors["counts"], message.meta["withheld"], sender.samples or 0
    few = samples > 0 and 0 < (samples + 1) * held_back < 1
    most = max(samples + few, math.floor(samples / (1 - held_back) + 1e-9))
    least = max(samples, math.floor((samples - 1) / (1 - held_back) + 1e-9) + 1)
    told = int(counts.sum())
    if told + withheld > most or told + withheld * (minimum - 1) < least:
        raise BadMessage(f"its counts add up to {told}, but it has {samples} samples to train on")
    if ((counts > 0) & (counts < minimum)).any():
        raise BadMessage(f"a class of fewer than {minimum} samples should be left out")


def sizes(message: Message) -> dict[str, float]:
    """The length of a feature (root of the mean square), and its inverse: neither may be far from others'."""
    found = _sums(message)
    samples, trace = found.counts.sum().item(), found.moment.trace().item()
    if not samples or not trace > 0:
        return {}
    length = (trace / samples) ** 0.5
    return {"length of features": length, "inverse length of features": 1 / length}


def consensus(site: Site, heads: Sequence[int]) -> Consensus | None:
    """For classes of these heads, one after another; where single clients are not trusted, sums need none."""
    if is_robust(site.settings.train.aggregate):
        return None
    return Consensus([label for head in heads for label in site.network.labels[head]], _sums)


def weight(message: Message, most: float) -> float:
    """Of a client's sums: 1, or less where they are of more samples than a client counts for."""
    return min(most / max(int(message.tensors["counts"].sum()), 1), 1.0)


def summed(combined: Message | Iterable[tuple[int, Message]], train: TrainSettings, omega: Tensor, most: float) -> Sums:
    """The sums of all clients, sketched by Ω: from one message that holds them, or from each client's own.

    most: samples that a client counts for, where they are its own.
    """
    if isinstance(combined, Message):
        return _sums(combined)
    if is_robust(train.aggregate):
        return robust_sums([_sums(message) for _, message in combined], train.aggregate, train.trim, omega)
    total: Sums | None = None
    for _, message in combined:
        one = _sums(message).times(weight(message, most))
        total = one if total is None else total + one
    assert total is not None
    return total


def _sums(message: Message) -> Sums:
    counts, sums = message.tensors["counts"].double(), message.tensors["sums"].double()
    return Sums(counts, sums, _moment(message, counts, sums), message.tensors["sketches"].double())


def _moment(message: Message, counts: Tensor, sums: Tensor) -> Tensor:
    """The second moment (d, d) that a message tells: as it is, or the scatter of low rank around its class means."""
    if "moment" in message.tensors:
        return unpack(message.tensors["moment"].double(), sums.shape[1])
    factor, rest = message.tensors["factor"].double(), message.tensors["rest"].double()
    return factor @ factor.T + rest.diag() + sums.T @ (sums / counts.clamp_min(1)[:, None])


def remember(knowledge: Knowledge, new: Sums, group: str = KIND) -> None:
    """Add the statistics of a task to what is known, in place: new rows, one moment for all."""
    if f"{group}/counts" in knowledge:
        old = recall(knowledge, group)
        rows = ((getattr(old, part), getattr(new, part)) for part in ("counts", "sums", "sketches"))
        counts, sums, sketches = (torch.cat(pair) for pair in rows)
        new = Sums(counts, sums, old.moment + new.moment, sketches)
    knowledge.update(as_knowledge(new, group))


def as_knowledge(sums: Sums, group: str = KIND) -> Tensors:
    """Statistics by the names under which they are known."""
    parts = (sums.counts, sums.sums, pack(sums.moment), sums.sketches)
    return {f"{group}/{part}": tensor for part, tensor in zip(PARTS, parts, strict=True)}


def feature_options(settings: Settings, born: bool = False) -> Options:
    """What rebuilds the feature map, for whoever answers."""
    how = settings.statistics
    found: Options = {"features": how.features, "seed": settings.run.seed}
    found |= {"root": how.root, "directions": how.directions}
    return found | ({"born": True} if born else {})


def answering(settings: Settings, born: bool = False) -> Answering:
    """Class statistics answer alone; those of the network as it is, or at birth.

    A class seen again adds up. With domains every one has class means of its own, and a second expert knows the classes
    of all domains together: it needs no domain.
    """
    features, domains = feature_options(settings, born), settings.stream.scenario == "domain"
    own, shared = (BIRTH, BIRTH_SHARED) if born else (STATISTICS, SHARED)
    experts = {own: {**features, "pooled": not domains}} | ({shared: features} if domains else {})
    ways = {name: WayPlan(router=name, expert=name, hard=False) for name in experts}
    return Answering(experts=experts, ways=ways, chosen=own, tried=tuple(ways), auto=True)
