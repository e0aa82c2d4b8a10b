"""Class statistics, federated: what a client tells about its classes, and how the server adds it up."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fedprotip.inference.experts import SHARED, STATISTICS
from fedprotip.inference.statistics import COUNTS, MOMENT, SUMS, FeatureMap, Sums, low_rank, pack, recall, unpack
from fedprotip.messages import SAMPLES, BadMessage, Message, Spec
from fedprotip.methods.exchange import Combine, Exchange
from fedprotip.methods.local import Local
from fedprotip.methods.site import Site
from fedprotip.methods.state import Form, Kept, Knowledge
from fedprotip.models import Network
from fedprotip.settings import Settings
from fedprotip.store.events import Event, Withheld
from fedprotip.stream.plan import Answering, Options, WayPlan

KIND = "statistics"


def kept(shared: bool) -> Kept:
    """The statistics as state of a method; `shared` where clients calibrate answers by them."""
    forms = {"counts": Form("c", torch.float64), "sums": Form("c m", torch.float64), "moment": Form("p", torch.float64)}
    return Kept(KIND, "shared" if shared else "server", forms, artefact=True)


class Statistics(Exchange):
    """Sums of every client's features at the end of a task.

    Args:
        rank: as in the settings; sums of low rank cannot be added up by somebody who does not see each of them.
        tells: clients are told the sums of all (they calibrate answers by them).
    """

    name = KIND

    def __init__(self, rank: int, tells: bool = False) -> None:
        self._rank, self._tells = rank, tells
        self.combine: Combine = "each" if rank else "sum"

    def answer(self, local: Local) -> Message:
        return gather(local, self.name)

    def check(self, message: Message, site: Site) -> None:
        width = feature_map(site.network, site.settings).out
        check(message, self.name, len(site.network.labels[site.network.head_of(site.task)]), width, self._rank)

    def remark(self, message: Message, task: int, client: int) -> Event | None:
        return withheld(message, task, client)

    def digest(self, combined: Any, site: Site) -> Message | None:
        remember(site.known, summed(combined))
        told = {name.removeprefix("statistics/"): site.known[name] for name in (COUNTS, SUMS, MOMENT)}
        return Message(KIND, told) if self._tells else None

    def receive(self, message: Message, site: Site) -> None:
        site.known.update({f"statistics/{name}": tensor for name, tensor in message.tensors.items()})


def feature_map(network: Network, settings: Settings) -> FeatureMap:
    return FeatureMap(network.features, settings.statistics.features, settings.run.seed)


def gather(local: Local, kind: str, mapped: bool = True) -> Message:
    """Sums over all training samples of a client, with the model as it stands.

    The sum of very few samples would be close to a feature itself: classes with fewer than `statistics.minimum`
    samples are left out of everything, and the message says how many they were.
    """
    settings = local.settings
    classes = torch.tensor(local.site.classes[local.task])
    labels = local.labels()
    counts = (labels[:, None] == classes).sum(0)
    told = counts >= settings.statistics.minimum
    change = feature_map(local.network, settings) if mapped else FeatureMap(local.network.features, 0, 0)
    sums = Sums.zeros(len(classes), change.out)
    for inputs, known in local.labelled(settings.evaluate.batch):
        rows = (known[:, None] == classes).int().argmax(1)
        keep = told[rows]
        features = local.network.embed(inputs)
        sums.add(change(features[keep.to(features.device)]), rows[keep])
    tensors = {"counts": sums.counts.long(), "sums": sums.sums.float()}
    if rank := _rank(change.out, settings.statistics.rank):
        factor, rest = low_rank(sums.scatter(), rank)
        tensors |= {"factor": factor.float(), "rest": rest.float()}
    else:
        tensors["moment"] = pack(sums.moment).float()
    return Message(kind, tensors, {"withheld": int(((counts > 0) & ~told).sum())})


def withheld(message: Message, task: int, client: int) -> Event | None:
    """For events.jsonl: how many classes a client left out."""
    classes = message.meta["withheld"]
    return Withheld(task=task, client=client, kind=message.kind, classes=classes) if classes else None


def _rank(d: int, wanted: int) -> int:
    """Directions of the scatter that travel; 0 where the packed moment is no larger."""
    return wanted if 2 * wanted < d else 0


def check(message: Message, kind: str, classes: int, d: int, rank: int = 0) -> None:
    """Raise BadMessage unless these are statistics of so many classes with so many features.

    `rank`: as in the settings.
    """
    rank = _rank(d, rank)
    products = {"factor": Spec((d, rank)), "rest": Spec((d,))} if rank else {"moment": Spec((d * (d + 1) // 2,))}
    message.check(kind, {"counts": Spec((classes,), torch.int64), "sums": Spec((classes, d)), **products})
    if type(message.meta.get("withheld")) is not int or not 0 <= message.meta["withheld"] <= classes:
        raise BadMessage(f"withheld is not a number of classes up to {classes}")
    if (message.tensors["counts"] < 0).any() or (message.tensors["counts"] > SAMPLES).any():
        raise BadMessage("a count is negative or impossible")
    counts, sums = message.tensors["counts"].double(), message.tensors["sums"].double()
    if sums[counts == 0].any():
        raise BadMessage("a class without samples has a sum")
    if rank:
        if (message.tensors["rest"] < 0).any():
            raise BadMessage("a variance is negative")
        return
    squares = unpack(message.tensors["moment"], d).diagonal().double()
    if (squares < (sums.square() / counts.clamp_min(1)[:, None]).sum(0) * (1 - 1e-4)).any():
        raise BadMessage("a second moment is smaller than its sums allow")


def summed(combined: Message | Iterable[tuple[int, Message]]) -> Sums:
    """The sums of all clients: from one message that holds them, or from each client's own."""
    if isinstance(combined, Message):
        return _sums(combined)
    total: Sums | None = None
    for _, message in combined:
        one = _sums(message)
        total = one if total is None else total + one
    assert total is not None
    return total


def _sums(message: Message) -> Sums:
    counts, sums = message.tensors["counts"].double(), message.tensors["sums"].double()
    return Sums(counts, sums, _moment(message, counts, sums))


def _moment(message: Message, counts: Tensor, sums: Tensor) -> Tensor:
    """The second moment (d, d) that a message tells: as it is, or the scatter of low rank around its class means."""
    if "moment" in message.tensors:
        return unpack(message.tensors["moment"].double(), sums.shape[1])
    factor, rest = message.tensors["factor"].double(), message.tensors["rest"].double()
    return factor @ factor.T + rest.diag() + sums.T @ (sums / counts.clamp_min(1)[:, None])


def remember(knowledge: Knowledge, new: Sums) -> None:
    """Add the statistics of a task to what is known, in place: new rows, one moment for all."""
    if COUNTS in knowledge:
        old = recall(knowledge)
        counts, sums = torch.cat([old.counts, new.counts]), torch.cat([old.sums, new.sums])
        new = Sums(counts, sums, old.moment + new.moment)
    knowledge.update({COUNTS: new.counts, SUMS: new.sums, MOMENT: pack(new.moment)})


def feature_options(settings: Settings) -> Options:
    """What rebuilds the feature map, for whoever answers."""
    return {"features": settings.statistics.features, "seed": settings.run.seed}


def answering(settings: Settings) -> Answering:
    """Class statistics answer alone.

    A class seen again adds up. With domains every one has class means of its own, and a second expert knows the classes
    of all domains together: it needs no domain.
    """
    features, domains = feature_options(settings), settings.stream.scenario == "domain"
    experts = {STATISTICS: {**features, "pooled": not domains}} | ({SHARED: features} if domains else {})
    ways = {name: WayPlan(router=name, expert=name, hard=False) for name in experts}
    return Answering(experts=experts, ways=ways, chosen=STATISTICS)
