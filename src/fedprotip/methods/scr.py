"""Fed+SCR: supervised contrastive replay (Mai et al. 2021) in a federation.

The backbone learns by a contrastive loss over two views of new samples and of samples that a client has kept in a
reservoir. No head answers, but the nearest class mean of the features of kept samples: it has no bias to new classes.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedprotip.inference.prototypes import PROTOTYPES
from fedprotip.messages import SAMPLES, BadMessage, Message, Spec
from fedprotip.methods.base import About, Method, register
from fedprotip.methods.exchange import Exchange, Sender
from fedprotip.methods.local import Local
from fedprotip.methods.parts import reservoir
from fedprotip.methods.parts.contrast import contrast
from fedprotip.methods.parts.memory import varied
from fedprotip.methods.parts.stored import KEPT, Stored
from fedprotip.methods.parts.training import falling
from fedprotip.methods.parts.views import Views, second_look
from fedprotip.methods.site import Site
from fedprotip.methods.state import Form, Kept
from fedprotip.models.prefix import InputBatch
from fedprotip.models.steps import Inputs
from fedprotip.settings import MethodSettings
from fedprotip.store.files import Tensors
from fedprotip.stream.plan import Answering

RESERVOIR, PROJECTION = "reservoir", "projection"
LONGER = 1e-4
"""How much longer than their number a sum of unit vectors may be, as a share, by rounding."""


class SCROptions(MethodSettings):
    name: str = Field("scr", description="Method; its own settings follow.")
    buffer: int = Field(1000, ge=1, le=10**7, description="Samples that a client keeps, of all tasks together.")
    retrieve: int = Field(100, ge=1, le=10**6, description="Kept samples that join every batch of new ones.")
    temperature: float = Field(0.1, gt=0, description="τ of the contrastive loss.")
    projection: int = Field(128, ge=1, le=10**5, description="Outputs of the projection that the loss compares.")
    review: bool = Field(
        True, description="After the last round of a task one more, of one pass over kept samples with gradients / 10."
    )
    crop: float = Field(0.2, gt=0, le=1, description="Second view: smallest share of the image that is cut out.")
    flip: float = Field(0.5, ge=0, le=1, description="Second view: chance of being mirrored.")
    jitter: float = Field(0.8, ge=0, le=1, description="Second view: chance of other colours.")
    grey: float = Field(0.2, ge=0, le=1, description="Second view: chance of losing all colour.")


def options_of(site: Site) -> SCROptions:
    options = site.settings.method
    assert isinstance(options, SCROptions)
    return options


def labels_so_far(site: Site) -> Tensor:
    return torch.tensor(sorted({label for known in site.classes[: site.task + 1] for label in known}))


def filled(local: Local) -> Tensors:
    """A client's reservoir, once all its samples of the task have passed by, each once."""
    kept = local.own.get(RESERVOIR) or reservoir.empty(local.site.image_shape)
    if int(kept["task"]) < local.task and len(local.samples):
        kept["task"] = torch.tensor(local.task)
        chance, size = local.chance("reservoir"), options_of(local.site).buffer
        for images, labels in local.labelled(local.settings.evaluate.batch):
            assert isinstance(images, Tensor)
            kept = reservoir.offered(kept, images.cpu(), labels, size, chance)
        local.own.put(RESERVOIR, kept)
    return kept


class Prototypes(Exchange):
    """At the end of a task, with its last model: sums of unit features of all that clients keep, by class.

    Who was not drawn in any round has its samples pass by now. A class of which nobody keeps a sample any more has no
    prototype.
    """

    name, who, combine = PROTOTYPES, "everyone", "sum"

    def answer(self, local: Local) -> Message:
        known = labels_so_far(local.site)
        sums, counts = torch.zeros(len(known), local.network.features), torch.zeros(len(known), dtype=torch.int64)
        kept, size = filled(local), local.settings.evaluate.batch
        for images, labels in zip(kept["images"].split(size), kept["labels"].split(size), strict=True):
            mine = labels == known[:, None]  # (classes, n)
            sums += mine.float() @ F.normalize(local.network.embed(images.to(local.site.device))).cpu()
            counts += mine.sum(1)
        return Message(self.name, {"sums": sums, "counts": counts})

    def check(self, message: Message, site: Site) -> None:
        classes = len(labels_so_far(site))
        specs = {"sums": Spec((classes, site.network.features)), "counts": Spec((classes,), torch.int64)}
        message.check(self.name, specs)
        message.check_meta()
        sums, counts = message.tensors["sums"], message.tensors["counts"]
        if (counts < 0).any() or (counts > SAMPLES).any():
            raise BadMessage("a count is negative or impossible")
        if (sums.norm(dim=1) > counts * (1 + LONGER)).any():
            raise BadMessage("a sum of unit vectors is longer than their number")
        if site.positive_features() and (sums < 0).any():
            raise BadMessage("features that cannot be negative have negative sums")

    def check_sender(self, message: Message, site: Site, sender: Sender) -> None:
        """It keeps no more samples than it may; of classes that only this task has, no more than it has of the task."""
        counts = message.tensors["counts"]
        if (most := options_of(site).buffer) < counts.sum():
            raise BadMessage(f"it keeps {int(counts.sum())} samples, and may keep {most}")
        before = torch.tensor([label for known in site.classes[: site.task] for label in known], dtype=torch.int64)
        kept = int(counts[~torch.isin(labels_so_far(site), before)].sum())
        if kept > (sender.samples or 0):
            raise BadMessage(f"it keeps {kept} samples of a task of which it has {sender.samples}")

    def digest(self, combined: Message, site: Site) -> None:
        """Clients need not know."""
        known = combined.tensors["counts"] > 0
        site.known[f"{PROTOTYPES}/labels"] = labels_so_far(site)[known]
        site.known[f"{PROTOTYPES}/means"] = F.normalize(combined.tensors["sums"][known])


@register
class SCR(Method):
    name = "scr"
    about = About(
        "contrastive learning with kept samples, nearest class mean",
        stores="raw samples, in a reservoir at each client",
        sends="the model and a projection, every round; class prototypes, once a task",
        needs="clients that may keep samples",
    )
    sees_images = True
    state = (
        Kept(RESERVOIR, "private", reservoir.FORMS),
        Kept(PROTOTYPES, "server", {"labels": Form("p", torch.int64), "means": Form("p d")}, artefact=True),
        KEPT,
    )
    Options = SCROptions

    def networks(self, site: Site) -> dict[str, nn.Module]:
        d = site.network.features
        return {PROJECTION: nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, options_of(site).projection))}

    def trainable(self, site: Site) -> set[str]:
        """No head: none answers."""
        return {name for name in super().trainable(site) if not name.startswith("heads.")}

    def rounds(self, task: int) -> int:
        assert isinstance(self.settings.method, SCROptions)
        return super().rounds(task) + self.settings.method.review

    def rate(self, task: int, done: float) -> float:
        """It falls within the rounds before the review."""
        train = self.settings.train
        return train.lr if done >= train.rounds else falling(train, done / train.rounds)

    def reviews(self, local: Local) -> bool:
        return local.round == self.settings.train.rounds

    def at_end(self) -> Sequence[Exchange]:
        assert isinstance(self.settings.method, SCROptions)
        return (Prototypes(), Stored(RESERVOIR, self.settings.method.buffer))

    def begin_round(self, local: Local) -> None:
        local.scratch["views"] = local.chance("views")
        local.scratch["kept"] = filled(local)

    def batches(self, local: Local, own: Iterator[InputBatch]) -> Iterator[InputBatch]:
        """New samples with kept ones; in a review one pass over those that are kept."""
        kept, chance, retrieve = local.scratch["kept"], local.chance("retrieval"), options_of(local.site).retrieve
        look = local.site.look if local.site.look.varied else None

        def again(rows: Tensor) -> tuple[Tensor, Tensor]:
            images = kept["images"][rows]
            return varied(images, look, chance) if look else images, kept["labels"][rows]

        if self.reviews(local):
            for rows in torch.randperm(len(kept["labels"]), generator=chance).split(retrieve):
                yield again(rows)
            return
        for images, labels in own:
            assert isinstance(images, Tensor)
            old, known = again(torch.randperm(len(kept["labels"]), generator=chance)[:retrieve])
            yield torch.cat([images, old.to(images)]), torch.cat([labels, known])

    def loss(self, local: Local, inputs: Inputs, labels: Tensor) -> Tensor:
        assert isinstance(inputs, Tensor)
        options, network, pixels = options_of(local.site), local.network, local.site.look.pixels
        look = Views(options.crop, options.flip, options.jitter, grey=options.grey)
        other = pixels.normalised(second_look(pixels.scaled(inputs), look, local.scratch["views"]))
        features = network.embed(torch.cat([inputs, other]))
        views = F.normalize(network.extras[PROJECTION](features))
        loss = contrast(views, labels.repeat(2), options.temperature)
        return loss / 10 if self.reviews(local) else loss

    def answering(self) -> Answering:
        return Answering(experts={PROTOTYPES: {}})
