"""How sure answers are, federated: sums over samples that clients did not train on."""

from collections.abc import Callable

import torch

from fedprotip.inference.calibration import BINS, TEMPERATURES, Calibration, bin_of, losses
from fedprotip.inference.ways import Inference
from fedprotip.messages import BadMessage, Message, Spec
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.local import Local
from fedprotip.methods.site import Site
from fedprotip.methods.state import Form, Kept, Knowledge

CALIBRATION = Kept(
    "calibration",
    "server",
    {"loss": Form(str(len(TEMPERATURES)), torch.float64), "distances": Form(str(BINS), torch.int64)},
    artefact=True,
)


class Calibrating(Exchange):
    """Clients score held-back samples with what they can answer by themselves."""

    name, combine = "calibration", "sum"

    def __init__(self, inference: Callable[[Site], Inference]) -> None:
        self._inference = inference

    def answer(self, local: Local) -> Message:
        return calibrate(local, self._inference(local.site), local.settings.evaluate.batch)

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
        seen = inference.see(local.network.embed(inputs))
        evidence = {name: way.router.evidence(seen) for name, way in inference.ways.items()}
        joint = inference.joint(evidence, seen.scores)
        loss += losses(joint, inference.columns.labels == labels[:, None])
        distances += torch.bincount(bin_of(inference.unusual(seen.scores)["mahalanobis"]), minlength=BINS)
    return Message(Calibrating.name, {"loss": loss, "distances": distances})


def check_calibration(message: Message) -> None:
    """Raise BadMessage unless these are sums of losses and counts of distances."""
    specs = {"loss": Spec((len(TEMPERATURES),), torch.float64), "distances": Spec((BINS,), torch.int64)}
    message.check(Calibrating.name, specs)
    if any((tensor < 0).any() for tensor in message.tensors.values()):
        raise BadMessage("a loss or a count is negative")


def calibration(knowledge: Knowledge) -> Calibration:
    """As far as clients have told; neutral before."""
    if "calibration/loss" not in knowledge:
        return Calibration()
    return Calibration.of(knowledge["calibration/loss"], knowledge["calibration/distances"])
