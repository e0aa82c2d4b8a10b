"""How sure answers are, federated: sums over samples that clients did not train on."""

from collections.abc import Iterable
from typing import Any

import torch

from fedprotip.inference.answers import Inference
from fedprotip.inference.calibration import BINS, MOST_LOSS, TEMPERATURES, bin_of, losses
from fedprotip.messages import SAMPLES, BadMessage, Message, Spec
from fedprotip.methods.exchange import Combine, Exchange, Sender
from fedprotip.methods.local import Local
from fedprotip.methods.parts.robust import is_robust, middle
from fedprotip.methods.site import Site
from fedprotip.methods.state import Form, Kept
from fedprotip.settings import TrainSettings
from fedprotip.store.files import Tensors
from fedprotip.stream.plan import Answering

CALIBRATION = Kept(
    "calibration",
    "server",
    {"loss": Form(str(len(TEMPERATURES)), torch.float64), "distances": Form(str(BINS), torch.int64)},
    artefact=True,
)


class Calibrating(Exchange):
    """Clients score held-back samples with what they can answer by themselves."""

    name = "calibration"

    def __init__(self, answering: Answering, train: TrainSettings) -> None:
        self._answering, self._train = answering, train
        self.combine: Combine = "each" if is_robust(train.aggregate) else "sum"

    def answer(self, local: Local) -> Message:
        inference = local.site.inference(self._answering, local.task)
        return calibrate(local, inference, local.settings.evaluate.batch)

    def check(self, message: Message, site: Site) -> None:
        check_calibration(message)

    def check_sender(self, message: Message, site: Site, sender: Sender) -> None:
        """Of all its samples `clients.held_back` are held back, rounded down."""
        share, samples = site.settings.clients.held_back, sender.samples or 0
        if int(message.tensors["distances"].sum()) > share * (samples + 1) / (1 - share):
            raise BadMessage(f"it has {samples} samples to train on, so more were scored than it can have held back")

    def digest(self, combined: Any, site: Site) -> None:
        """Add what clients found to what is known."""
        for name, tensor in self._summed(combined).items():
            known = site.known.get(f"calibration/{name}")
            site.known[f"calibration/{name}"] = tensor if known is None else known + tensor

    def _summed(self, combined: Message | Iterable[tuple[int, Message]]) -> Tensors:
        """Sums over all clients; where single ones are not trusted, the middle of their losses per sample."""
        if isinstance(combined, Message):
            return combined.tensors
        told = [message.tensors for _, message in combined]
        counts = torch.stack([one["distances"].sum() for one in told])
        distances = torch.stack([one["distances"] for one in told]).sum(0)
        if not counts.any():
            return {"loss": torch.zeros_like(told[0]["loss"]), "distances": distances}
        seen = counts > 0
        losses = torch.stack([one["loss"] for one in told])[seen] / counts[seen, None]
        return {
            "loss": middle(losses, counts[seen], self._train.aggregate, self._train.trim) * counts.sum(),
            "distances": distances,
        }


def calibrate(local: Local, inference: Inference, batch: int) -> Message:
    """How right answers are about held-back samples, by sums: the loss at every temperature, and distances."""
    loss, distances = torch.zeros(len(TEMPERATURES), dtype=torch.float64), torch.zeros(BINS, dtype=torch.int64)
    for inputs, labels in local.held_back(batch):
        heard = inference.hear(local.network.embed(inputs))
        joint = inference.joint(heard, inference.route(heard, inference.chosen))
        loss += losses(joint, inference.candidates.labels == labels[:, None])
        distances += torch.bincount(bin_of(inference.unusual(heard.scores)["mahalanobis"]), minlength=BINS)
    return Message(Calibrating.name, {"loss": loss, "distances": distances})


def check_calibration(message: Message) -> None:
    """Raise BadMessage unless these are sums of losses and counts of distances."""
    specs = {"loss": Spec((len(TEMPERATURES),), torch.float64), "distances": Spec((BINS,), torch.int64)}
    message.check(Calibrating.name, specs)
    message.check_meta()
    if any((tensor < 0).any() for tensor in message.tensors.values()):
        raise BadMessage("a loss or a count is negative")
    samples = message.tensors["distances"].sum()
    if (message.tensors["distances"] > SAMPLES).any() or samples > SAMPLES:
        raise BadMessage("a count is impossible")
    if (message.tensors["loss"] > MOST_LOSS * samples * (1 + 1e-6)).any():
        raise BadMessage("a loss is larger than so many samples can have")
