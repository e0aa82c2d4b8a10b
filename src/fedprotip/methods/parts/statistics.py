"""The statistics message: what a client tells about its classes, and how the server adds it up."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fedprotip.inference.experts import SHARED, STATISTICS
from fedprotip.inference.statistics import COUNTS, MOMENT, SUMS, FeatureMap, Sums, low_rank, pack, recall, unpack
from fedprotip.messages import BadMessage, Message, Spec
from fedprotip.methods.base import ClientTask, Knowledge
from fedprotip.models import Network
from fedprotip.settings import Settings
from fedprotip.stream.plan import Answering, Options, WayPlan

KIND = "statistics"
START = "start"
"""What clients are asked for before a task, for a head in closed form: statistics of features as they are."""


def feature_map(network: Network, settings: Settings) -> FeatureMap:
    return FeatureMap(network.features, settings.statistics.features, settings.run.seed)


@torch.no_grad()
def gather(
    local: ClientTask, settings: Settings, mapped: bool = True, also: Callable[[Tensor], None] = lambda features: None
) -> Message:
    """Sums over all training samples of a client, with the model as it stands.

    The sum of very few samples would be close to a feature itself: classes with fewer than `statistics.minimum`
    samples are left out of everything, and the message says how many they were. `also` sees all features on the way.
    """
    classes = torch.tensor(local.stream.tasks[local.task].classes)
    labels = local.labels()
    counts = (labels[:, None] == classes).sum(0)
    told = counts >= settings.statistics.minimum
    change = feature_map(local.network, settings) if mapped else FeatureMap(local.network.features, 0, 0)
    sums = Sums.zeros(len(classes), change.out)
    for inputs, known in local.labelled(settings.evaluate.batch):
        rows = (known[:, None] == classes).int().argmax(1)
        keep = told[rows]
        features = local.network.embed(inputs)
        also(features)
        sums.add(change(features[keep.to(features.device)]), rows[keep])
    tensors = {"counts": sums.counts.long(), "sums": sums.sums.float()}
    if rank := _rank(change.out, settings.statistics.rank):
        factor, rest = low_rank(sums.scatter(), rank)
        tensors |= {"factor": factor.float(), "rest": rest.float()}
    else:
        tensors["moment"] = pack(sums.moment).float()
    return Message(KIND, tensors, {"withheld": int(((counts > 0) & ~told).sum())})


def _rank(d: int, wanted: int) -> int:
    """Directions of the scatter that travel; 0 where the packed moment is no larger."""
    return wanted if 2 * wanted < d else 0


def check(message: Message, classes: int, d: int, rank: int = 0) -> None:
    """Raise BadMessage unless these are statistics of so many classes with so many features.

    `rank`: as in the settings.
    """
    rank = _rank(d, rank)
    products = {"factor": Spec((d, rank)), "rest": Spec((d,))} if rank else {"moment": Spec((d * (d + 1) // 2,))}
    message.check(KIND, {"counts": Spec((classes,), torch.int64), "sums": Spec((classes, d)), **products})
    message.check_numbers("withheld")
    if (message.tensors["counts"] < 0).any():
        raise BadMessage("a count is negative")
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


def added(replies: Iterable[tuple[int, Message]]) -> Sums:
    """The sums of all clients."""
    total: Sums | None = None
    for _, message in replies:
        counts, sums = message.tensors["counts"].double(), message.tensors["sums"].double()
        one = Sums(counts, sums, _moment(message, counts, sums))
        total = one if total is None else total + one
    assert total is not None
    return total


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


def received(knowledge: Knowledge, message: Message) -> None:
    """All statistics so far, as the server sends them to those that calibrate."""
    knowledge.update({f"statistics/{name}": tensor for name, tensor in message.tensors.items()})


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
