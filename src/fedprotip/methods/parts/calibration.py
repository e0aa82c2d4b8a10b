"""Which way to answer and how sure to be, federated: sums over samples that clients did not train on."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

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
    networks,
)
from fedprotip.inference.experts import BIRTH, BIRTH_SHARED, feature_map
from fedprotip.inference.statistics import GROUP, Sums, recall
from fedprotip.messages import SAMPLES, BadMessage, Message, Spec
from fedprotip.methods.exchange import Exchange, Sender
from fedprotip.methods.local import Local
from fedprotip.methods.parts.robust import is_robust, middle, usual
from fedprotip.methods.parts.statistics import as_knowledge, combination, enter, feature_options, least, numbers
from fedprotip.methods.parts.wear import WAYS, as_earlier_tasks_see_it
from fedprotip.methods.site import Site
from fedprotip.methods.state import Form, Kept
from fedprotip.models.heads import Features
from fedprotip.settings import TrainSettings
from fedprotip.store.files import Tensors
from fedprotip.stream.plan import Answering, Options

CALIBRATION = Kept(
    "calibration",
    "server",
    {
        "right": Form("w", torch.float64),
        "apart": Form("w w", torch.float64),
        "loss": Form(f"w {len(TEMPERATURES)}", torch.float64),
        "hits": Form(f"w {len(TEMPERATURES)} 2 {SURE}", torch.float64),
        "distances": Form(f"m {BINS}", torch.float64),
        "asked": Form("1", torch.float64),
    },
    artefact=True,
)


class Calibrating(Exchange):
    """Clients score held-back samples with what they can answer by themselves, had these never been summed."""

    name, fraction, settles = "calibration", 24, False

    def __init__(self, answering: Answering, train: TrainSettings, secure: bool = False) -> None:
        self._answering, self._train = answering, train
        self.combine = "sum" if secure else "each"

    def answer(self, local: Local) -> Message:
        network, newborn = local.network, BIRTH in self._answering.experts
        batches = local.held_back(local.settings.evaluate.batch)
        seen = [(network.look(inputs, newborn), labels) for inputs, labels in batches]  # once, for all uses
        known = dict(local.known)
        for born in (False, True):
            known |= without_held_back(local, seen, feature_options(local.settings, born), BIRTH if born else GROUP)
        inference = local.site.inference(self._answering, local.task, known)
        message = calibrate(seen, inference, self._answering)
        message.tensors["still"] = self._still(local, seen, inference, message.tensors["right"])
        return message

    def _still(
        self, local: Local, seen: Sequence[tuple[Features, Tensor]], inference: Inference, right: Tensor
    ) -> Tensor:
        """How many answers are right as earlier tasks see the network, on both ways together, (w,)."""
        found = []
        for way in WAYS:
            with as_earlier_tasks_see_it(local, way) as worn:
                if not worn:
                    return len(WAYS) * right
                batches = local.held_back(local.settings.evaluate.batch)
                again = (local.network.look(inputs) for inputs, _ in batches)
                moved = [
                    (replace(now, newborn=was.newborn), labels) for now, (was, labels) in zip(again, seen, strict=True)
                ]
                found.append(rightly(moved, inference, self._answering.tried))
        return torch.stack(found).sum(0)

    def check(self, message: Message, site: Site) -> None:
        check_calibration(message, self._answering)

    def check_sender(self, message: Message, site: Site, sender: Sender) -> None:
        """Of all its samples `clients.held_back` are held back, rounded down; one of few, perhaps."""
        samples = sender.samples or 0
        if int(message.tensors["distances"][0].sum()) > held_back(site, samples):
            raise BadMessage(f"it has {samples} samples to train on, so more were scored than it can have held back")

    def digest(self, combined: Message | Iterable[tuple[int, Message]], site: Site) -> None:
        """Add what clients found to what is known; how sure to be depends on how many classes there are by now.

        A sum in private is taken as it is; else:

        How far a way is ahead of the simplest one, or behind it, is `capped` for every client: one of them can neither
        rule a way out, nor make up for what the others found wrong with another one. So are wrong answers. A right one
        has a loss of log C at most, whatever the temperature; that bounds losses. They are summed; where single clients
        are not trusted, the middle of those per sample counts. Nobody counts for more samples than could be held back
        of `site.most`, nor, where single clients are not trusted, than the usual one.

        Right answers about earlier tasks count as far as they would still be right after this one (`parts/wear.py`).
        """
        if isinstance(combined, Message):
            told = [combined.tensors]
        else:
            told = [lighter(message.tensors, held_back(site, site.most)) for _, message in combined]
            if is_robust(self._train.aggregate):
                told = evened(told)
        distances = torch.stack([one["distances"] for one in told])
        right, loss, sure = (torch.stack([one[name].double() for one in told]) for name in ("right", "loss", "hits"))
        samples = scored(told)
        wrong = capped((samples[:, None] - right).clamp_min(0))  # rounded, where a client counts for fewer samples
        guessing = math.log(sum(map(len, site.classes[: site.task + 1])))
        most = (samples[:, None] - wrong) * guessing + wrong * MOST_LOSS
        per_sample = {"loss": loss.minimum(most[:, :, None]), "hits": sure}
        found = {name: tensor.sum(0) for name, tensor in per_sample.items()}
        seen = samples > 0
        if is_robust(self._train.aggregate) and seen.any():
            for name, tensor in per_sample.items():
                rates = tensor[seen].flatten(1) / samples[seen, None]
                rate = middle(rates, self._train.aggregate, self._train.trim)
                found[name] = (rate * samples.sum()).view(tensor.shape[1:])
        apart = torch.stack([one["apart"].double() for one in told])
        ahead = right - right[:, :1]
        gained = (ahead.sign() * capped(ahead.abs())).sum(0)
        found |= {"distances": distances.sum(0).double(), "right": samples.sum() - wrong[:, 0].sum() + gained}
        found |= {"apart": capped(apart).sum(0), "asked": samples.sum().double()[None]}
        lasting = self._lasting(told, found["right"])
        shares: dict[str, float | Tensor] = {"right": lasting, "apart": 1.0, "asked": 1.0}
        for name, tensor in found.items():
            known = site.known.get(f"calibration/{name}")
            site.known[f"calibration/{name}"] = tensor if known is None else known * shares.get(name, FADING) + tensor

    def _lasting(self, told: Sequence[Tensors], right: Tensor) -> Tensor:
        """The share of right answers about earlier tasks that outlast this one, by way; all where nothing moves.

        What one client loses or gains counts for no more than what the client with the next largest difference does.
        """
        lost = torch.stack([one["right"].double() - one["still"].double() / len(WAYS) for one in told])
        lost = (lost.sign() * capped(lost.abs())).sum(0)
        ways = [self._answering.ways[name] for name in self._answering.tried]
        moves = torch.tensor([way.router not in (BIRTH, BIRTH_SHARED) for way in ways])
        return (1 - moves * lost / right.clamp_min(1)).clamp(0, 1)


def held_back(site: Site, samples: float) -> float:
    """How many samples a client can have held back, at most, that trains on so many: one of a few."""
    share = site.settings.clients.held_back
    return max(share * (samples + 1) / (1 - share), min(samples, 1.0))


def scored(told: Sequence[Tensors]) -> Tensor:
    """How many samples each client scored, (K,)."""
    return torch.stack([one["distances"][0].sum() for one in told])


def lighter(told: Tensors, most: float) -> Tensors:
    """What a client found, as if it had scored no more samples than these."""
    samples = int(told["distances"][0].sum())
    if not samples > most:
        return told
    scaled = {name: tensor.double() * (most / samples) for name, tensor in told.items()}
    return scaled | {"distances": scaled["distances"].round().long()}


def evened(told: list[Tensors]) -> list[Tensors]:
    """What clients found, as if none had scored more samples than the usual one of those that scored any."""
    some = [count for count in scored(told).tolist() if count]
    return [lighter(one, usual(torch.tensor(some)).max().item()) for one in told] if some else told


def capped(counts: Tensor) -> Tensor:
    """Counts of clients (K, …), none more than the next most of its kind."""
    return counts if len(counts) < 2 else counts.minimum(counts.topk(2, dim=0).values[1])


def calibrate(seen: Sequence[tuple[Features, Tensor]], inference: Inference, answering: Answering) -> Message:
    """How right every way is about held-back samples, by sums: hits, the loss at every temperature, and distances.

    apart: how often one of two ways was right and the other was not, (w, w).
    """
    tried, seeing = answering.tried, networks(answering)
    right = torch.zeros(len(tried), dtype=torch.int64)
    apart = torch.zeros(len(tried), len(tried), dtype=torch.int64)
    loss = torch.zeros(len(tried), len(TEMPERATURES), dtype=torch.float64)
    found = torch.zeros(len(tried), len(TEMPERATURES), 2, SURE, dtype=torch.int64)
    distances = torch.zeros(len(seeing) * len(MEASURES), BINS, dtype=torch.int64)
    for features, labels in seen:
        heard, good = inference.hear(features), torch.zeros(len(tried), len(labels), dtype=torch.bool)
        for place, way in enumerate(tried):
            routed = inference.route(heard, way)
            good[place], joint = routed.labels == labels, inference.joint(heard, routed)
            loss[place] += losses(joint, inference.candidates.labels == labels[:, None])
            for row, temperature in zip(found[place], TEMPERATURES.tolist(), strict=True):
                row += hits(inference.candidates.probabilities(joint, temperature).amax(1), good[place])
        right += good.sum(1)
        apart += (good[:, None] != good).sum(2)
        distances += torch.cat([count_bins(inference.strange(features, heard.scores, name)) for name in seeing])
    told = {"right": right, "apart": apart, "loss": loss, "hits": found, "distances": distances}
    return Message(Calibrating.name, told)


def rightly(seen: Sequence[tuple[Features, Tensor]], inference: Inference, tried: Sequence[str]) -> Tensor:
    """How many answers of every way are right, (w,)."""
    right = torch.zeros(len(tried), dtype=torch.int64)
    for features, labels in seen:
        heard = inference.hear(features)
        right += torch.stack([(inference.route(heard, way).labels == labels).sum() for way in tried])
    return right


def without_held_back(
    local: Local, seen: Iterable[tuple[Features, Tensor]], options: Options, group: str = GROUP
) -> Tensors:
    """Class statistics, as if nobody had been told of the samples that this client holds back of the task under way.

    Answers about these are then what they would be about any others. Sums of low rank, and those that trust no single
    client, have none of them in the first place.
    """
    known = {name: tensor for name, tensor in local.known.items() if name.startswith(f"{group}/")}
    if combination(local.settings) != "sum" or not known:
        return known
    change, whole = feature_map(local.network, options), recall(known, group)
    told = numbers(local, held_back=True) >= least(local.settings)
    own, last = Sums.zeros(len(whole.counts), change.out, change.columns), len(whole.counts) - len(told)
    enter(own, local, seen, change, told, last)
    return as_knowledge(whole.without(own), group)


def check_calibration(message: Message, answering: Answering) -> None:
    """Raise BadMessage unless these are hits and losses of the ways that are tried, and counts of distances."""
    ways, rows = len(answering.tried), len(networks(answering)) * len(MEASURES)
    specs = {"loss": Spec((ways, len(TEMPERATURES)), torch.float64), "right": Spec((ways,), torch.int64)}
    specs |= {"still": specs["right"], "apart": Spec((ways, ways), torch.int64)}
    specs["hits"] = Spec((ways, len(TEMPERATURES), 2, SURE), torch.int64)
    message.check(Calibrating.name, specs | {"distances": Spec((rows, BINS), torch.int64)})
    message.check_meta()
    if any((tensor < 0).any() for tensor in message.tensors.values()):
        raise BadMessage("a loss or a count is negative")
    totals = message.tensors["distances"].sum(1)
    samples = totals[0]
    if (message.tensors["distances"] > SAMPLES).any() or samples > SAMPLES or (totals != samples).any():
        raise BadMessage("a count is impossible")
    if (message.tensors["right"] > samples).any():
        raise BadMessage("more answers are right than samples were scored")
    if (message.tensors["still"] > len(WAYS) * samples).any():
        raise BadMessage("more answers are still right than samples were scored")
    right, apart = message.tensors["right"], message.tensors["apart"]
    both = right + right[:, None]
    fitting = (apart >= (right - right[:, None]).abs()) & (apart <= both.minimum(2 * samples - both))
    if not fitting.all() or apart.diagonal().any() or not apart.equal(apart.T):
        raise BadMessage("two ways are not apart as often as their right answers say")
    scored, good = message.tensors["hits"].unbind(2)
    if (scored > samples).any() or (scored.sum(2) != samples).any() or (good > scored).any():
        raise BadMessage("more answers are right at a sureness than were given, or not every sample was answered")
    if (message.tensors["loss"] > MOST_LOSS * samples * (1 + 1e-6)).any():
        raise BadMessage("a loss is larger than so many samples can have")
