"""How sure answers are, federated: sums over samples that clients did not train on."""

import torch

from fedprotip.inference.answers import Inference
from fedprotip.inference.calibration import BINS, TEMPERATURES, bin_of, losses
from fedprotip.messages import SAMPLES, BadMessage, Message, Spec
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.local import Local
from fedprotip.methods.site import Site
from fedprotip.methods.state import Form, Kept
from fedprotip.stream.plan import Answering

CALIBRATION = Kept(
    "calibration",
    "server",
    {"loss": Form(str(len(TEMPERATURES)), torch.float64), "distances": Form(str(BINS), torch.int64)},
    artefact=True,
)


class Calibrating(Exchange):
    """Clients score held-back samples with what they can answer by themselves."""

    name, combine = "calibration", "sum"

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def answer(self, local: Local) -> Message:
        inference = local.site.inference(self._answering, local.task)
        return calibrate(local, inference, local.settings.evaluate.batch)

    def check(self, message: Message, site: Site) -> None:
        check_calibration(message)

    def digest(self, combined: Message, site: Site) -> None:
        """Add what clients found to what is known."""
        for name, tensor in combined.tensors.items():
            known = site.known.get(f"calibration/{name}")
            site.known[f"calibration/{name}"] = tensor if known is None else known + tensor


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
    if any((tensor < 0).any() for tensor in message.tensors.values()):
        raise BadMessage("a loss or a count is negative")
    if (message.tensors["distances"] > SAMPLES).any():
        raise BadMessage("a count is impossible")
