"""Which way to answer and how sure to be, federated: sums over samples that clients did not train on."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fedprotip.inference.answers import Inference
from fedprotip.inference.calibration import (
    BINS,
    FADING,
    MEASURES,
    MOST_LOSS,
    SURE,
    TEMPERATURES,
    count_bins,
    hits,
    losses,
)
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
    {
        "right": Form("w", torch.float64),
        "loss": Form(f"w {len(TEMPERATURES)}", torch.float64),
        "hits": Form(f"w {len(TEMPERATURES)} 2 {SURE}", torch.float64),
        "distances": Form(f"{len(MEASURES)} {BINS}", torch.int64),
    },
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
        return calibrate(local, inference, self._answering.tried, local.settings.evaluate.batch)

    def check(self, message: Message, site: Site) -> None:
        check_calibration(message, len(self._answering.tried))

    def check_sender(self, message: Message, site: Site, sender: Sender) -> None:
        """Of all its samples `clients.held_back` are held back, rounded down."""
        share, samples = site.settings.clients.held_back, sender.samples or 0
        if int(message.tensors["distances"][0].sum()) > share * (samples + 1) / (1 - share):
            raise BadMessage(f"it has {samples} samples to train on, so more were scored than it can have held back")

    def digest(self, combined: Any, site: Site) -> None:
        """Add what clients found to what is known; how sure to be depends on how many classes there are by now."""
        for name, tensor in self._summed(combined).items():
            known = site.known.get(f"calibration/{name}")
            share = FADING if name in ("loss", "hits") else 1
            site.known[f"calibration/{name}"] = tensor if known is None else share * known + tensor

    def _summed(self, combined: Message | Iterable[tuple[int, Message]]) -> Tensors:
        """Sums over all clients; where single ones are not trusted, the middle of their losses per sample."""
        if isinstance(combined, Message):
            return combined.tensors
        told = [message.tensors for _, message in combined]
        counts = torch.stack([one["distances"][0].sum() for one in told])
        distances = torch.stack([one["distances"] for one in told]).sum(0)
        seen, found = counts > 0, {"distances": distances}
        for name in ("right", "loss", "hits"):
            sums = torch.stack([one[name] for one in told]).double()
            if seen.any():
                rates = sums[seen].flatten(1) / counts[seen, None]
                mean = middle(rates, counts[seen], self._train.aggregate, self._train.trim)
                found[name] = (mean * counts.sum()).view(sums.shape[1:])
            else:
                found[name] = sums.sum(0)
        return found


def calibrate(local: Local, inference: Inference, tried: Sequence[str], batch: int) -> Message:
    """How right every way is about held-back samples, by sums: hits, the loss at every temperature, and distances."""
    right = torch.zeros(len(tried), dtype=torch.int64)
    loss = torch.zeros(len(tried), len(TEMPERATURES), dtype=torch.float64)
    found = torch.zeros(len(tried), len(TEMPERATURES), 2, SURE, dtype=torch.int64)
    distances = torch.zeros(len(MEASURES), BINS, dtype=torch.int64)
    for inputs, labels in local.held_back(batch):
        heard = inference.hear(local.network.look(inputs))
        for place, way in enumerate(tried):
            routed = inference.route(heard, way)
            good, joint = routed.labels == labels, inference.joint(heard, routed)
            right[place] += good.sum()
            loss[place] += losses(joint, inference.candidates.labels == labels[:, None])
            for row, temperature in zip(found[place], TEMPERATURES.tolist(), strict=True):
                row += hits(inference.candidates.probabilities(joint, temperature).amax(1), good)
        distances += count_bins(heard.strange)
    return Message(Calibrating.name, {"right": right, "loss": loss, "hits": found, "distances": distances})


def check_calibration(message: Message, ways: int) -> None:
    """Raise BadMessage unless these are hits and losses of so many ways, and counts of distances."""
    specs = {"loss": Spec((ways, len(TEMPERATURES)), torch.float64), "right": Spec((ways,), torch.int64)}
    specs["hits"] = Spec((ways, len(TEMPERATURES), 2, SURE), torch.int64)
    message.check(Calibrating.name, specs | {"distances": Spec((len(MEASURES), BINS), torch.int64)})
    message.check_meta()
    if any((tensor < 0).any() for tensor in message.tensors.values()):
        raise BadMessage("a loss or a count is negative")
    totals = message.tensors["distances"].sum(1)
    samples = totals[0]
    if (message.tensors["distances"] > SAMPLES).any() or samples > SAMPLES or (totals != samples).any():
        raise BadMessage("a count is impossible")
    if (message.tensors["right"] > samples).any():
        raise BadMessage("more answers are right than samples were scored")
    scored, good = message.tensors["hits"].unbind(2)
    if (scored.sum(2) != samples).any() or (good > scored).any():
        raise BadMessage("more answers are right at a sureness than were given, or not every sample was answered")
    if (message.tensors["loss"] > MOST_LOSS * samples * (1 + 1e-6)).any():
        raise BadMessage("a loss is larger than so many samples can have")
