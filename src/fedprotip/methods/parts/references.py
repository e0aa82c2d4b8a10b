"""Task identity, federated: what clients tell about their relevance (Eq. 11), and what the server makes of it."""

from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor, nn

from fedprotip.errors import RunError
from fedprotip.inference.route import references
from fedprotip.messages import SAMPLES, BadMessage, Message, Spec
from fedprotip.methods.exchange import Exchange, Sender
from fedprotip.methods.local import Local
from fedprotip.methods.parts.moments import kept_moments
from fedprotip.methods.site import Site
from fedprotip.methods.state import Form, Kept, Knowledge
from fedprotip.subspace.bank import SubspaceBank

PARTS = ("values", "variances", "counts")
"""Tensors of a reference message."""
TOLD = "told"
"""Where a client keeps what it told last."""
TOGETHER = 2**20
"""Numbers of second moments that are looked at together: many of few features, few of many."""
ROUNDED = 1e-6
"""Error of an energy, as a share of the largest one of its task."""

_OWN = {"values": Form("t t"), "variances": Form("t t"), "counts": Form("t", torch.int64)}
_ALL = {"clients": Form("k", torch.int64), "values": Form("k t t"), "variances": Form("k t t")}
STATE = (
    Kept("references", "server", _ALL | {"counts": Form("k t", torch.int64)}, artefact=True),
    Kept(TOLD, "private", _OWN),
)


class References(Exchange):
    """Every client's references against the global bases of all tasks so far: after the merge, of everyone."""

    name, who = "reference", "everyone"

    def answer(self, local: Local) -> Message:
        return refer(local)

    def check(self, message: Message, site: Site) -> None:
        """Of energies with the mean e, normal features have a variance of 2·e² at most: 2·tr(C²) + 4·mᵀCm."""
        check_references(message, site.task)
        check_spread(message.tensors["values"].double().square(), message.tensors["variances"].double(), 2)

    def check_sender(self, message: Message, site: Site, sender: Sender) -> None:
        """It refers to samples that it has; what it told about earlier tasks stays, or was lost."""
        counts, values = message.tensors["counts"], message.tensors["values"]
        if counts[site.task] > (sender.samples or 0):
            raise BadMessage(f"it refers to {counts[site.task]} samples of a task of which it has {sender.samples}")
        clients = site.known["references/clients"].tolist() if "references/clients" in site.known else []
        if sender.client not in clients:
            return  # it may have been left out, or away, until now
        row = clients.index(sender.client)
        before, old = site.known["references/counts"][row], site.known["references/values"][row]
        same = (counts[: len(before)] > 0) & (before > 0)
        if (counts[: len(before)] > before)[before > 0].any():
            raise BadMessage("it refers to more samples of an earlier task than it did before")
        told, known = values[: len(before), : len(before)][same], old[same]
        if not torch.allclose(torch.where(known.isnan(), known, told), known, rtol=1e-3, equal_nan=True):
            raise BadMessage("its references to earlier tasks are others than before")

    def sizes(self, message: Message, site: Site) -> dict[str, float]:
        return {"reference": float(message.tensors["values"].max())} if message.tensors["counts"].any() else {}

    def digest(self, combined: Iterable[tuple[int, Message]], site: Site) -> None:
        site.known.update(collected(combined, site.known, site.task))


class SharedReferences(References):
    """One reference per task, of the samples of all clients together: what a sum can tell.

    A vote over clients needs each of them; here it is a vote of one. What was summed at an earlier task is not summed
    again: of two sums of the same, the second without a client, the difference is that client's part.
    """

    combine, fraction = "sum", 16

    def answer(self, local: Local) -> Message:
        """Sums of ‖U_t U_tᵀ a‖² and of its square over the client's features a of every task, where one is new."""
        told = refer(local).tensors
        values, variances, counts = (told[part].double() for part in PARTS)
        energies, n = values.square(), counts[:, None]
        sums = n * energies, n * (variances + energies.square())
        for table in sums:
            table[: local.task, : local.task] = 0
        return Message(self.name, dict(zip(PARTS, (*sums, counts.long()), strict=True)))

    def check(self, message: Message, site: Site) -> None:
        """Σ n·(variance + e²) ≤ Σ 3·n·e² ≤ 3·(Σ n·e)², also over clients; both sums are rounded for each of them."""
        check_references(message, site.task, torch.float64)
        energies, squares, counts = (message.tensors[part].double() for part in PARTS)
        rounded = counts[:, None] * 2.0**-self.fraction
        check_spread(energies + rounded, squares - rounded, 3)

    def check_sender(self, message: Message, site: Site, sender: Sender) -> None:
        counts = message.tensors["counts"]
        if counts[site.task] > (sender.samples or 0):
            raise BadMessage(f"it refers to {counts[site.task]} samples of a task of which it has {sender.samples}")

    def sizes(self, message: Message, site: Site) -> dict[str, float]:
        samples = message.tensors["counts"].sum().item()
        return {"reference": (float(message.tensors["values"].max()) / samples) ** 0.5} if samples else {}

    def digest(self, combined: Message, site: Site) -> None:  # type: ignore[override]
        site.known.update(pooled(combined, site.known))


def pooled(combined: Message, knowledge: Knowledge) -> dict[str, Tensor]:
    """The references (1, T, T) that sums over all clients lead to: new tasks and new bases; the others stay."""
    counts = combined.tensors["counts"]
    n = counts.double().clamp_min(1)[:, None]
    energies, squares = combined.tensors["values"].double() / n, combined.tensors["variances"].double() / n
    values, variances = energies.clamp_min(0).sqrt(), (squares - energies.square()).clamp_min(0)
    values[counts == 0], variances[counts == 0] = torch.nan, torch.nan
    if "references/counts" in knowledge:
        before = knowledge["references/counts"][0]
        for part, table in (("values", values), ("variances", variances)):
            table[: len(before), : len(before)] = knowledge[f"references/{part}"][0].double()
        counts = torch.cat([before, counts[len(before) :]])
    found = {"clients": torch.zeros(1, dtype=torch.int64), "values": values[None], "variances": variances[None]}
    return {f"references/{part}": table for part, table in (found | {"counts": counts[None]}).items()}


def refer(local: Local) -> Message:
    """Eq. 11 for every task this client has seen, against the global bases of all tasks so far.

    Moments and bases of earlier tasks stay as they are, so only entries of new tasks or new bases are computed.
    """
    routing = SubspaceBank.from_tensors(local.known).routing
    values, variances = torch.zeros(2, len(routing), len(routing))
    counts = torch.zeros(len(routing), dtype=torch.int64)
    before = local.own.get(TOLD)
    known = len(before["counts"]) if before else 0
    if before:
        values[:known, :known], variances[:known, :known] = before["values"], before["variances"]
    together = max(1, TOGETHER // len(routing[0]) ** 2)
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
    local.own.put(TOLD, told)
    return Message(References.name, told)


def check_references(message: Message, task: int, dtype: torch.dtype = torch.float32) -> None:
    """Raise BadMessage unless these are references of all tasks up to this one."""
    table = Spec((task + 1, task + 1), dtype)
    message.check(References.name, {"values": table, "variances": table, "counts": Spec((task + 1,), torch.int64)})
    message.check_meta()
    if any((tensor < 0).any() for tensor in message.tensors.values()):
        raise BadMessage("a reference, a variance or a count is negative")
    if (message.tensors["counts"] > SAMPLES).any():
        raise BadMessage("a count is impossible")


def check_spread(energies: Tensor, squares: Tensor, most: float) -> None:
    """Raise BadMessage where a variance or a mean square (S, T) is more than `most` times the energy² it is of."""
    energies = energies + ROUNDED * energies.amax(1, keepdim=True)
    if (squares > (1 + 1e-3) * most * energies.square() + torch.finfo(torch.float32).tiny).any():
        raise BadMessage("a variance is larger than features of such references can have")


def collected(replies: Iterable[tuple[int, Message]], knowledge: Knowledge, task: int) -> dict[str, Tensor]:
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
    if not table:
        raise RunError(f"No client with data delivered its references at the end of task {tasks}; resume the run.")
    clients = sorted(table)
    parts = zip(*(table[client] for client in clients), strict=True)
    named = {f"references/{part}": torch.stack(rows) for part, rows in zip(PARTS, parts, strict=True)}
    return {"references/clients": torch.tensor(clients), **named}
