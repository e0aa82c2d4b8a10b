"""Task identity, federated: what clients tell about their relevance (Eq. 11) and how sure answers are, and what the
server makes of it. All of it are sums or small tables; features stay where they are."""

from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor, nn

from fedprotip.inference.answers import Inference
from fedprotip.inference.calibration import BINS, TEMPERATURES, bin_of, losses
from fedprotip.inference.route import references
from fedprotip.messages import BadMessage, Message, Spec
from fedprotip.methods.base import ClientTask, Knowledge
from fedprotip.subspace.bank import SubspaceBank

REFERENCE, CALIBRATION = "reference", "calibration"
"""Kinds of messages."""
PARTS = ("values", "variances", "counts")
"""Tensors of a reference message."""
TOLD = "references"
"""Where a client keeps what it told last."""
MOMENTS = 2**20
"""Numbers of second moments that are looked at together: many of few features, few of many."""


class Moments:
    """Number, sum and second moment of a client's features; the features themselves are gone."""

    def __init__(self, d: int) -> None:
        self.samples = 0
        self._sum, self._moment = torch.zeros(d, dtype=torch.float64), torch.zeros(d, d, dtype=torch.float64)

    def add(self, features: Tensor) -> None:
        features = features.double().cpu()
        self.samples += len(features)
        self._sum += features.sum(0)
        self._moment.addmm_(features.T, features)

    def keep(self, local: ClientTask) -> dict[str, Tensor]:
        """Store them with the client, for `refer` in this task and all later ones."""
        tensors = {"samples": torch.tensor(self.samples), "sum": self._sum, "moment": self._moment}
        local.store.put(local.client, _name(local.task), tensors)
        return tensors


def kept_moments(local: ClientTask, task: int) -> dict[str, Tensor] | None:
    """What `Moments.keep` stored in a task, None where the client had no part in it."""
    return local.store.get(local.client, _name(task))


def _name(task: int) -> str:
    return f"moment-{task}"


# References


def refer(local: ClientTask) -> Message:
    """Eq. 11 for every task this client has seen, against the global bases of all tasks so far.

    Moments and bases of earlier tasks stay as they are, so only entries of new tasks or new bases are computed.
    """
    routing = SubspaceBank.from_tensors(local.knowledge).routing
    values, variances = torch.zeros(2, len(routing), len(routing))
    counts = torch.zeros(len(routing), dtype=torch.int64)
    before = local.store.get(local.client, TOLD)
    known = len(before["counts"]) if before else 0
    if before:
        values[:known, :known], variances[:known, :known] = before["values"], before["variances"]
    together = max(1, MOMENTS // len(routing[0]) ** 2)
    for new, tasks in ((slice(known, None), range(known)), (slice(None), range(known, len(routing)))):
        kept = ((task, found) for task in tasks if (found := kept_moments(local, task)) is not None)
        while some := dict(islice(kept, together)):
            rows = list(some)
            moments, sums, counts[rows] = (
                torch.stack([found[part] for found in some.values()]) for part in ("moment", "sum", "samples")
            )
            values[rows, new], variances[rows, new] = (
                part.float() for part in references(moments, sums, counts[rows], routing[new])
            )
    told = dict(zip(PARTS, (values, variances, counts), strict=True))
    local.store.put(local.client, TOLD, told)
    return Message(REFERENCE, told)


def check_references(message: Message, task: int) -> None:
    """Raise BadMessage unless these are references of all tasks up to this one."""
    table = Spec((task + 1, task + 1))
    message.check(REFERENCE, {"values": table, "variances": table, "counts": Spec((task + 1,), torch.int64)})
    if any((tensor < 0).any() for tensor in message.tensors.values()):
        raise BadMessage("a reference, a variance or a count is negative")


def collected(replies: Iterable[tuple[int, Message]], knowledge: Knowledge, task: int) -> Knowledge:
    """References of all clients (K, T, T), NaN where a client has none; clients that left keep theirs."""
    tasks = task + 1
    table: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    if "references/values" in knowledge:
        old = (knowledge[f"references/{part}"] for part in ("clients", *PARTS))
        for client, values, variances, counts in zip(*old, strict=True):
            missing = tasks - len(counts)
            square, line = (0, missing, 0, missing), (0, missing)
            values, variances = (nn.functional.pad(part, square, value=torch.nan) for part in (values, variances))
            table[int(client)] = values, variances, nn.functional.pad(counts, line)
    for client, message in replies:
        values, variances, counts = (message.tensors[part] for part in PARTS)
        if counts.any():
            seen = counts[:, None] > 0
            table[client] = torch.where(seen, values, torch.nan), torch.where(seen, variances, torch.nan), counts
    clients = sorted(table)
    parts = zip(*(table[client] for client in clients), strict=True)
    named = {f"references/{part}": torch.stack(rows) for part, rows in zip(PARTS, parts, strict=True)}
    return {"references/clients": torch.tensor(clients), **named}


# Calibration


def calibrate(local: ClientTask, inference: Inference, batch: int) -> Message:
    """How right answers are about held-back samples, by sums: the loss at every temperature, and distances."""
    loss, distances = torch.zeros(len(TEMPERATURES), dtype=torch.float64), torch.zeros(BINS, dtype=torch.int64)
    for inputs, labels in local.held_back(batch):
        heard = inference.hear(local.network.embed(inputs))
        joint = inference.joint(heard, inference.route(heard, inference.chosen))
        loss += losses(joint, inference.candidates.labels == labels[:, None])
        distances += torch.bincount(bin_of(inference.unusual(heard.scores)["mahalanobis"]), minlength=BINS)
    return Message(CALIBRATION, {"loss": loss, "distances": distances})


def check_calibration(message: Message) -> None:
    """Raise BadMessage unless these are sums of losses and counts of distances."""
    specs = {"loss": Spec((len(TEMPERATURES),), torch.float64), "distances": Spec((BINS,), torch.int64)}
    message.check(CALIBRATION, specs)
    if any((tensor < 0).any() for tensor in message.tensors.values()):
        raise BadMessage("a loss or a count is negative")


def add_calibration(replies: Iterable[tuple[int, Message]], knowledge: Knowledge) -> None:
    """Add what clients found to what is known, in place."""
    for _, message in replies:
        for name, tensor in message.tensors.items():
            known = knowledge.get(f"calibration/{name}")
            knowledge[f"calibration/{name}"] = tensor if known is None else known + tensor
