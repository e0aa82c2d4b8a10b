"""The proxy of GLFC and LGA: a server's own few images, seen through gradients, tell which model was best.

Clients that notice a new task send, for each of its classes, the gradient of a small encoder at a disturbed prototype.
The server finds labels and images again, and judges every round's model by them. The best model of a task is the
teacher of the next.
"""

from collections.abc import Iterable
from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from fedprotip.messages import BadMessage, Message, Spec
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.local import Local
from fedprotip.methods.parts import inversion
from fedprotip.methods.site import Site
from fedprotip.methods.state import Form, Kept, Where
from fedprotip.models import Network
from fedprotip.models.state import full_state, load_state

if TYPE_CHECKING:
    from fedprotip.methods.parts.transition import Transitions

TRANSITION, TEACHER, BEST, MONITOR, PROXY = "transition", "teacher", "best", "monitor", "proxy"
WEIGHTS = {"weights": Form("n"), "heads": Form("", torch.int64)}
"""A model as one row of numbers (`flat`), and how many heads it has."""
STEEPEST = 1e6
"""No honest gradient of the encoder has a larger number: its weights are below ½, its inner values below 1."""
PIECE = 64
"""Images that are reconstructed side by side."""
ROUNDED = 1e-4


def kept(best: Where) -> tuple[Kept, ...]:
    """State of a method with a proxy; `best`: who holds the best model so far."""
    whole, several = Form("", torch.int64), Form("n", torch.int64)
    return (
        Kept(TEACHER, "shared", WEIGHTS),
        Kept(BEST, best, WEIGHTS),
        Kept(MONITOR, "server", {"images": Form("n c h w"), "labels": several, "clients": several, "task": whole}),
        Kept(PROXY, "server", {"performance": Form("", torch.float64), "radius": Form(""), "rounds": whole}),
    )


def flat(network: Network) -> Tensor:
    """All numbers of a model in one row, on the CPU; counters are none."""
    parts = [tensor.reshape(-1) for tensor in full_state(network).values() if tensor.is_floating_point()]
    return torch.cat(parts).float().cpu()


def model_of(network: Network, weights: Tensor, heads: int) -> Network:
    """The model that `flat` was given, of the same kind as this network, which must have at least as many heads."""
    model = deepcopy(network).requires_grad_(False).eval()
    model.heads, model.labels = cast(nn.ModuleList, model.heads[:heads]), model.labels[:heads]
    held = {name: tensor for name, tensor in full_state(model).items() if tensor.is_floating_point()}
    parts = weights.split([tensor.numel() for tensor in held.values()])
    load_state(model, {name: part.view(held[name].shape) for name, part in zip(held, parts, strict=True)})
    return model


def seen_labels(network: Network) -> list[int]:
    """Every class so far, once; the outputs of the encoder."""
    return list(dict.fromkeys(label for labels in network.labels for label in labels))


def encoder_of(site: Site) -> nn.Sequential:
    """The encoder of the task under way, which needs not travel."""
    return inversion.new_encoder(site.image_shape, len(seen_labels(site.network)), site.settings.run.seed)


class Teacher(Exchange):
    """At the beginning of a task: the best model of the one before becomes the teacher of all clients."""

    name, when, who = TEACHER, "begin", "nobody"

    def due(self, site: Site) -> bool:
        return site.task > 0

    def digest(self, combined: Any, site: Site) -> Message | None:
        return succeed(self.name, site)

    def receive(self, message: Message, site: Site) -> None:
        take_teacher(message, site)


def succeed(kind: str, site: Site) -> Message | None:
    """The best model so far, to be the teacher; the search for the next one begins anew."""
    method = cast("Transitions", site.method)
    method.succeeding(site)
    site.known.update({f"{PROXY}/performance": torch.tensor(0.0), f"{PROXY}/rounds": torch.tensor(0)})
    if f"{BEST}/heads" not in site.known:
        return None
    return Message(kind, {name: site.known[f"{BEST}/{name}"] for name in WEIGHTS})


def take_teacher(message: Message, site: Site) -> None:
    site.known.update({f"{TEACHER}/{name}": tensor for name, tensor in message.tensors.items()})


class Prototypes(Exchange):
    """After a round: the gradients of those who noticed a new task in it."""

    name, when, combine, needs_model = "prototypes", "round", "each", False

    def answer(self, local: Local) -> Message:
        found = local.own.get(TRANSITION)
        return Message(self.name, {"gradients": found["gradients"]} if found and len(found["gradients"]) else {})

    def check(self, message: Message, site: Site) -> None:
        message.check_meta()
        if not message.tensors:
            return
        encoder, classes = encoder_of(site), site.classes[site.task]
        message.check(self.name, {"gradients": Spec((-1, inversion.size_of(encoder)))})
        gradients = message.tensors["gradients"]
        if not 1 <= len(gradients) <= len(classes):
            raise BadMessage(f"{len(gradients)} prototypes of {len(classes)} classes")
        if gradients.abs().max() > STEEPEST:
            raise BadMessage("a gradient is impossibly steep")
        weights, biases = inversion.last_layer(encoder, gradients)
        if max(weights.abs().max(), biases.abs().max()) > 1 + ROUNDED or (biases.sum(1).abs() > ROUNDED).any():
            raise BadMessage("the last layer has no gradient of a cross-entropy")
        seen = seen_labels(site.network)
        labels = [seen[row] for row in inversion.recovered(encoder, gradients).tolist()]
        if not set(labels) <= set(classes) or len(set(labels)) < len(labels):
            raise BadMessage("its prototypes are not of different classes of this task")

    def digest(self, combined: Iterable[tuple[int, Message]], site: Site) -> Message | None:
        """New images for the monitor; where clients notice the task by themselves, this tells the server of it too.

        A client is heard once in a task: it could have images made for ever.
        """
        method, known = cast("Transitions", site.method), site.known
        first = f"{MONITOR}/task" not in known or int(known[f"{MONITOR}/task"]) != site.task
        heard = [] if first else known[f"{MONITOR}/clients"].tolist()
        told = [(client, message.tensors["gradients"]) for client, message in combined if message.tensors]
        told = [(client, gradients) for client, gradients in told if client not in heard]
        if not told:
            return None
        images, labels = reconstructed(told, site)
        message = succeed(self.name, site) if first and not method.told else None
        if not first:
            images = torch.cat([known[f"{MONITOR}/images"], images])
            labels = torch.cat([known[f"{MONITOR}/labels"], labels])
        clients = torch.tensor([*heard, *(client for client, _ in told)])
        found = {"images": images, "labels": labels, "task": torch.tensor(site.task), "clients": clients}
        known.update({f"{MONITOR}/{name}": tensor for name, tensor in found.items()})
        return message

    def receive(self, message: Message, site: Site) -> None:
        take_teacher(message, site)


def reconstructed(told: list[tuple[int, Tensor]], site: Site) -> tuple[Tensor, Tensor]:
    """Images behind the gradients of clients, and their labels."""
    options, device = cast("Transitions", site.method).options, site.device
    encoder = encoder_of(site).to(device)
    starts = [
        torch.randn(len(rows), *site.image_shape, generator=site.chance("proxy", client)) for client, rows in told
    ]
    start, gradients = torch.cat(starts), torch.cat([rows for _, rows in told])
    pieces = list(zip(start.split(PIECE), gradients.split(PIECE), strict=True))
    images, labels, total = [], [], len(pieces) * options.steps
    for index, (begin, wanted) in enumerate(pieces):

        def on_step(done: int, before: int = index * options.steps) -> None:
            site.on_progress("prototypes", before + done, total)

        made, rows = inversion.reconstruct(
            encoder,
            wanted.to(device),
            begin.to(device),
            *(options.solver, options.steps, options.rate, options.iterates),
            on_step=on_step,
        )
        images.append(made.cpu())
        labels.append(rows.cpu())
    return torch.cat(images), torch.tensor(seen_labels(site.network))[torch.cat(labels)]


class Monitor(Exchange):
    """After a round: is this the best model of the task so far? Without images to tell it by, the newest is."""

    name, when, who = MONITOR, "round", "nobody"

    def digest(self, combined: Any, site: Site) -> Message | None:
        method, known = cast("Transitions", site.method), site.known
        rounds, best = (known.get(f"{PROXY}/{name}", torch.tensor(0.0)) for name in ("rounds", "performance"))
        known[f"{PROXY}/rounds"] = rounds + 1
        judged = bool(rounds >= method.ignored and len(known.get(f"{MONITOR}/labels", ())))
        found = method.performance(site) if judged else 0.0
        if judged and found < best:
            return None
        known[f"{PROXY}/performance"] = torch.tensor(found, dtype=torch.float64)
        network = site.network
        message = Message(self.name, {"weights": flat(network), "heads": torch.tensor(len(network.labels))})
        if not method.told:
            return message
        self.receive(message, site)
        return None

    def receive(self, message: Message, site: Site) -> None:
        site.known.update({f"{BEST}/{name}": tensor for name, tensor in message.tensors.items()})


@torch.no_grad()
def accuracy(network: Network, features: Tensor, labels: Tensor) -> float:
    """Share of features (n, d) that all heads together give their label (n,)."""
    logits = torch.cat([head(features) for head in network.heads], 1)
    outputs = torch.tensor([label for known in network.labels for label in known], device=logits.device)
    return (outputs[logits.argmax(1)] == labels.to(logits.device)).double().mean().item()


@torch.no_grad()
def monitor_features(site: Site) -> tuple[Tensor, Tensor]:
    """Features (n, d) of the server's images as the model sees them now, and their labels."""
    network, batch = site.network.eval(), site.settings.evaluate.batch
    images, labels = site.known[f"{MONITOR}/images"], site.known[f"{MONITOR}/labels"]
    return torch.cat([network.embed(part.to(site.device)) for part in images.split(batch)]), labels
