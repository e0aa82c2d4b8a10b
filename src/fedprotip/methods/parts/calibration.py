"""Which way to answer and how sure to be, federated: sums over samples that clients did not train on."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

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
from fedprotip.inference.experts import feature_map
from fedprotip.inference.statistics import COUNTS, Sums, recall
from fedprotip.messages import SAMPLES, BadMessage, Message, Spec
from fedprotip.methods.exchange import Exchange, Sender
from fedprotip.methods.local import Local
from fedprotip.methods.parts.robust import is_robust, middle
from fedprotip.methods.parts.statistics import as_knowledge, combination, enter, feature_options, numbers
from fedprotip.methods.site import Site
from fedprotip.methods.state import Form, Kept
from fedprotip.settings import TrainSettings
from fedprotip.store.files import Tensors
from fedprotip.stream.plan import Answering, Options

CALIBRATION = Kept(
    "calibration",
    "server",
    {
        "right": Form("w", torch.float64),
        "loss": Form(f"w {len(TEMPERATURES)}", torch.float64),
        "hits": Form(f"w {len(TEMPERATURES)} 2 {SURE}", torch.float64),
        "distances": Form(f"{len(MEASURES)} {BINS}", torch.float64),
        "asked": Form("1", torch.float64),
    },
    artefact=True,
)


class Calibrating(Exchange):
    """Clients score held-back samples with what they can answer by themselves, had these never been summed."""

    name = "calibration"

    def __init__(self, answering: Answering, train: TrainSettings) -> None:
        self._answering, self._train = answering, train

    def answer(self, local: Local) -> Message:
        known = without_held_back(local, feature_options(local.settings))
        inference = local.site.inference(self._answering, local.task, known)
        return calibrate(local, inference, self._answering.tried, local.settings.evaluate.batch)

    def check(self, message: Message, site: Site) -> None:
        check_calibration(message, len(self._answering.tried))

    def check_sender(self, message: Message, site: Site, sender: Sender) -> None:
        """Of all its samples `clients.held_back` are held back, rounded down."""
        samples = sender.samples or 0
        if int(message.tensors["distances"][0].sum()) > held_back(site, samples):
            raise BadMessage(f"it has {samples} samples to train on, so more were scored than it can have held back")

    def digest(self, combined: Iterable[tuple[int, Message]], site: Site) -> None:
        """Add what clients found to what is known; how sure to be depends on how many classes there are by now.

        Wrong answers are `bounded`: one client can neither rule a way out, nor make up for what the others found wrong
        with another one. A right answer has a loss of log C at most, whatever the temperature; that bounds losses. They
        are summed; where single clients are not trusted, the middle of those per sample counts. Nobody counts for more
        samples than could be held back of `site.most`.
        """
        told = [lighter(message.tensors, held_back(site, site.most)) for _, message in combined]
        distances = torch.stack([one["distances"] for one in told])
        right, loss, sure = (torch.stack([one[name].double() for one in told]) for name in ("right", "loss", "hits"))
        samples = distances[:, 0].sum(1)
        wrong = bounded((samples[:, None] - right).clamp_min(0))  # rounded, where a client counts for fewer samples
        guessing = math.log(sum(map(len, site.classes[: site.task + 1])))
        most = (samples[:, None] - wrong) * guessing + wrong * MOST_LOSS
        per_sample = {"loss": loss.minimum(most[:, :, None]), "hits": sure}
        found = {name: tensor.sum(0) for name, tensor in per_sample.items()}
        seen = samples > 0
        if is_robust(self._train.aggregate) and seen.any():
            for name, tensor in per_sample.items():
                rates = tensor[seen].flatten(1) / samples[seen, None]
                rate = middle(rates, samples[seen], self._train.aggregate, self._train.trim)
                found[name] = (rate * samples.sum()).view(tensor.shape[1:])
        found |= {"distances": distances.sum(0).double(), "right": (samples.sum() - wrong.sum(0)).double()}
        found["asked"] = samples.sum().double()[None]
        for name, tensor in found.items():
            known = site.known.get(f"calibration/{name}")
            share = 1 if name in ("right", "asked") else FADING
            site.known[f"calibration/{name}"] = tensor if known is None else share * known + tensor


def held_back(site: Site, samples: float) -> float:
    """How many samples a client can have held back, at most, that trains on so many."""
    share = site.settings.clients.held_back
    return share * (samples + 1) / (1 - share)


def lighter(told: Tensors, most: float) -> Tensors:
    """What a client found, as if it had scored no more samples than these."""
    samples = int(told["distances"][0].sum())
    if not samples > most:
        return told
    scaled = {name: tensor.double() * (most / samples) for name, tensor in told.items()}
    return scaled | {"distances": scaled["distances"].round().long()}


def bounded(wrong: Tensor) -> Tensor:
    """Wrong answers of clients by way (K, w), none more than the next most of that way."""
    return wrong if len(wrong) < 2 else wrong.minimum(wrong.topk(2, dim=0).values[1])


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


def without_held_back(local: Local, options: Options) -> Tensors:
    """What a client knows, as if nobody had been told of the samples that it holds back of the task under way.

    Answers about these are then what they would be about any others. Sums of low rank, and those that trust no single
    client, have none of them in the first place.
    """
    known = dict(local.known)
    if combination(local.settings) != "sum" or COUNTS not in known:
        return known
    change, whole = feature_map(local.network, options), recall(local.known)
    told = numbers(local, held_back=True) >= local.settings.statistics.minimum
    own, last = Sums.zeros(len(whole.counts), change.out, change.columns), len(whole.counts) - len(told)
    enter(own, local, local.held_back(local.settings.evaluate.batch), change, told, last)
    return known | as_knowledge(whole.without(own))


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
    if (scored > samples).any() or (scored.sum(2) != samples).any() or (good > scored).any():
        raise BadMessage("more answers are right at a sureness than were given, or not every sample was answered")
    if (message.tensors["loss"] > MOST_LOSS * samples * (1 + 1e-6)).any():
        raise BadMessage("a loss is larger than so many samples can have")
