"""LANDER (Tran et al. 2024): TARGET's idea, with the names of classes as anchors.

A mapping takes features to where a text encoder puts the name of their class; within a radius around it they are free.
The same anchors say to the server's generator what it is to make, so that synthetic images of a class lie where real
ones do. Clients distil outputs and mapped features of the last model on the synthetic images.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedprotip.messages import Message
from fedprotip.methods.base import About, Method, register
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.local import Local
from fedprotip.methods.parts import pool, text
from fedprotip.methods.parts.distillation import earlier, soft_cross_entropy
from fedprotip.methods.parts.generator import BETAS, Decoder, Score, Synthesis, SynthesisOptions, unheard
from fedprotip.methods.site import Site
from fedprotip.methods.state import Form, Kept, Knowledge
from fedprotip.models import Network
from fedprotip.models.steps import Inputs
from fedprotip.seeds import ambient_stream
from fedprotip.settings import PathText, Settings

TEXT, MAPPING = "text", "mapping"
SHARE = 10
"""Images of a round that share a layer of noise."""
CLIP = 512
"""Numbers of the embeddings to which `radius` and `scale` belong."""
LARGE = 64
"""Images with longer sides are made in four doublings instead of two."""
AFTER = 2
"""Rounds of synthesis in which the student learns before images are made against it."""
LOOKS, LOOKS_LR = (0.5, 0.2), 0.01
"""Mean and standard deviation of the generator's outputs before the first round, and how fast they learn."""


class LanderOptions(SynthesisOptions):
    name: str = Field("lander", description="Method; its own settings follow.")
    embeddings: PathText = Field(
        "",
        description="Text embeddings: .npz or .safetensors, a vector under the name of each class; empty: surrogate.",
    )
    surrogate: Literal["random", "text"] = Field(
        "random",
        description="Without a file: a random direction for each class, or the sentence encoder of extra text.",
    )
    prompt: str = Field(
        "A photo of a {}", description="What the sentence encoder is given, with the name of a class for {}."
    )
    alike: float = Field(
        0.78,
        ge=0,
        lt=1,
        description="Cosine of any two random directions; at 0.78 they are as far apart as CLIP's, to which radius "
        "belongs.",
    )
    dim: int = Field(512, ge=1, le=10**5, description="Numbers of an embedding (the sentence encoder: 384).")
    scale: float = Field(
        9.7,
        ge=0,
        description="Length of an embedding of 512 numbers, as CLIP's are; one of d numbers is √(d/512) times as long, "
        "so that radius means the same. 0: as given.",
    )
    radius: float = Field(
        0.015, ge=0, description="r: mean squared distance from its anchor within which nothing pulls."
    )
    bounding: float = Field(0.5, ge=0, description="Weight of the pull towards anchors, of clients and generator.")
    new: float = Field(0.3, ge=0, description="Weight of the new task.")
    old: float = Field(0.3, ge=0, description="Weight of what is kept on synthetic images.")
    temperature: float = Field(2.0, gt=0, description="Temperature of the distillation.")
    batch: int = Field(64, ge=1, description="Synthetic images beside every batch of a client's own.")
    noise: int = Field(
        256, ge=1, description="Size of the vectors that the generator's layers of noise make of anchors."
    )
    pool: int = Field(10000, ge=1, description="Synthetic images that clients are sent, the newest ones, at most.")
    bn: float = Field(1.0, ge=0, description="Weight of L_bn: the statistics that norm layers saw in training.")
    student_steps: int = Field(50, ge=1, description="Steps of the student after a round of synthesis.")


class Anchors(Exchange):
    """A step of the server alone: embeddings of the names of a task's classes, in the order of its head."""

    name, when, who = TEXT, "begin", "nobody"

    def __init__(self, options: LanderOptions) -> None:
        self._options = options

    def digest(self, combined: None, site: Site) -> Message:
        if site.task == 0:  # what a later task lacks is said before any work
            for classes in site.classes:
                self._vectors(site, classes)
        return Message(self.name, {"vectors": self._vectors(site, site.classes[site.task])})

    def receive(self, message: Message, site: Site) -> None:
        site.known[f"{TEXT}/{site.task}"] = message.tensors["vectors"]

    def _vectors(self, site: Site, classes: Sequence[int]) -> Tensor:
        options, names = self._options, [site.look.classes[label] for label in classes]
        if options.embeddings:
            vectors = text.from_file(options.embeddings, names, options.dim)
        elif options.surrogate == "text":
            vectors = text.encoded(names, options.dim, options.prompt)
        else:
            vectors = text.directions(names, options.dim, options.alike)
        length = options.scale * math.sqrt(options.dim / CLIP)
        return text.lengthened(vectors, length) if length else vectors


def beyond(mapped: Tensor, anchors: Tensor, radius: float) -> Tensor:
    """L_b: how far mapped features (n, d) are outside the radius around their anchors (n, d), as a batch."""
    return (F.mse_loss(mapped, anchors) - radius).relu()


class Speaker(nn.Module):
    """Anchors (n, d) → images: layers of noise, new in every round, make different vectors of the same anchor."""

    def __init__(self, dim: int, noise: int, shape: tuple[int, int, int], width: int) -> None:
        super().__init__()
        self.noise = noise
        self.norm = nn.BatchNorm1d(dim)
        self.decoder = Decoder(noise, shape, width, doublings=4 if max(shape[1:]) > LARGE else 2)

    def layers(self, images: int, chance: torch.Generator) -> list[nn.Parameter]:
        """Weights (g, d, noise) and biases (g, 1, noise) of the layers of noise for so many images."""
        groups, device = math.ceil(images / SHARE), self.norm.weight.device
        weights = torch.randn(groups, self.norm.num_features, self.noise, generator=chance)
        return [nn.Parameter(each.to(device)) for each in (weights, torch.zeros(groups, 1, self.noise))]

    def forward(self, anchors: Tensor, layers: Sequence[Tensor]) -> Tensor:
        count, groups = len(anchors), len(layers[0])
        rows = F.pad(self.norm(anchors), [0, 0, 0, groups * SHARE - count]).view(groups, SHARE, -1)
        vectors = torch.baddbmm(layers[1], rows, layers[0]).flatten(0, 1)[:count]
        images: Tensor = self.decoder(vectors)
        return images


class TextSynthesis(Synthesis):
    """Images of anchors; every round has its own noise. The generator and the looks of its images go on learning."""

    def __init__(self, site: Site, options: LanderOptions) -> None:
        super().__init__(site, options)
        self._own, self.unkept = options, options.warmup
        self.first_adversarial = options.warmup + AFTER
        heads = sorted({site.network.head_of(task) for task in range(site.task)})
        self.anchors = torch.cat([site.known[f"{TEXT}/{head}"] for head in heads]).to(self.device)
        with ambient_stream(site.settings.run.seed, "generator", site.task):
            self.generator = Speaker(options.dim, options.noise, self.shape, options.width).to(self.device)
        self.looks = [nn.Parameter(torch.full((1, self.shape[0], 1, 1), each, device=self.device)) for each in LOOKS]
        self._mean, self._std = (
            torch.tensor(each, device=self.device).view(1, -1, 1, 1)
            for each in (self.look.pixels.mean, self.look.pixels.std)
        )

    def targets(self) -> Tensor:
        """As many of every class, and any for the rest."""
        count = self.options.synthesis_batch
        even = torch.arange(self.outputs).repeat(count // self.outputs)
        rest = torch.randint(self.outputs, (count - len(even),), generator=self.chance)
        return torch.cat([even, rest])[torch.randperm(count, generator=self.chance)].to(self.device)

    def make(self, targets: Tensor, score: Score) -> Tensor:
        options, anchors = self._own, self.anchors[targets]
        layers = self.generator.layers(len(targets), self.chance)
        groups: list[dict[str, Any]] = [
            {"params": [*self.generator.parameters(), *layers]},
            {"params": self.looks, "lr": LOOKS_LR},
        ]
        optimizer = torch.optim.Adam(groups, options.generator_lr, betas=BETAS)
        best, lowest = torch.empty(0), torch.inf
        for _ in range(options.generator_steps):
            normal = (self.generator(anchors, layers) - self.looks[0]) / self.looks[1]
            images = (normal * self._std + self._mean).clamp(0, 1)
            loss = score(images)
            if loss.item() < lowest or not len(best):
                best, lowest = images.detach(), loss.item()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return best

    def aim(self, features: Tensor, targets: Tensor) -> Tensor:
        mapped = self.teacher.extras[MAPPING](features)
        return self._own.bounding * beyond(mapped, self.anchors[targets], self._own.radius)

    def lesson(self, features: Tensor, taught: Tensor) -> Tensor:
        mapped, told = self.student.extras[MAPPING](features), self.teacher.extras[MAPPING](taught)
        return self._own.bounding * F.mse_loss(mapped, told)


@register
class Lander(Method):
    name = "lander"
    about = About(
        "TARGET with the names of classes as anchors of features and of synthetic images",
        stores="the last model, a pool of synthetic images, text embeddings",
        sends="the model with its mapping, every round; synthetic images and embeddings to clients, once a task",
        needs="a generator trained by the server; text embeddings of class names",
    )
    remembers = True
    state = (pool.KEPT, Kept(TEXT, "shared", {"*": Form("c d")}, artefact=True))
    Options = LanderOptions

    def __init__(self, settings: Settings) -> None:
        assert isinstance(settings.method, LanderOptions)
        self.options = settings.method
        super().__init__(settings)

    def check_known(self, site: Site) -> None:
        for task, classes in enumerate(site.classes):
            found = site.known.get(f"{TEXT}/{task}")
            if found is not None and found.shape != (len(classes), self.options.dim):
                raise ValueError(f"{TEXT}/{task} has shape {tuple(found.shape)}, not {len(classes), self.options.dim}")

    def cautions(self) -> Sequence[str]:
        options = self.options
        quiet = unheard(options, options.warmup + AFTER, options.warmup + options.synthesis_rounds)
        if options.embeddings:
            return quiet
        kind = {"random": "random directions", "text": "vectors of a sentence encoder"}[options.surrogate]
        sentence = f"LANDER runs with surrogate text embeddings, {kind}; method.embeddings names a file of real ones."
        return (sentence, *quiet)

    def networks(self, site: Site) -> dict[str, nn.Module]:
        mapping = nn.Linear(site.network.features, self.options.dim)
        nn.init.xavier_normal_(mapping.weight)
        return {MAPPING: mapping}

    def at_begin(self) -> Sequence[Exchange]:
        return (Anchors(self.options), pool.Pool(lambda site: TextSynthesis(site, self.options)))

    def begin_round(self, local: Local) -> None:
        local.scratch[TEXT] = local.known[f"{TEXT}/{local.task}"].to(local.site.device)
        if local.task:
            local.scratch[pool.POOL] = pool.synthetic(local, self.options.batch)

    def loss(self, local: Local, inputs: Inputs, labels: Tensor) -> Tensor:
        """New samples near their anchors; with tasks behind, old outputs and mapped features as they were.

        The weights follow the number of classes C and C_old: α = log₂(C/2 + 1), β = √(C_old/C).
        """
        options, network = self.options, local.network
        features, targets = network.embed(inputs), network.targets(labels, local.task)
        learning = F.cross_entropy(network.logits(features, local.task), targets)
        anchors = local.scratch[TEXT][targets]
        learning = learning + options.bounding * beyond(network.extras[MAPPING](features), anchors, options.radius)
        if not local.task:
            return learning
        alpha, beta = balance(*class_counts(network, local.task))
        keeping = self.keeping(local)
        return options.new * (1 + 1 / alpha) / beta * learning + options.old * alpha * beta * keeping

    def keeping(self, local: Local) -> Tensor:
        """Distillation of earlier outputs and of mapped features on the next synthetic batch."""
        images, before = next(local.scratch[pool.POOL]), local.before
        with torch.no_grad():
            taught = before.embed(images)
            told, placed = earlier(before, taught, local.task), before.extras[MAPPING](taught)
        features = local.network.embed(images)
        said = earlier(local.network, features, local.task)
        return soft_cross_entropy(said, told, self.options.temperature) + F.mse_loss(
            local.network.extras[MAPPING](features), placed
        )

    def samples(self, known: Knowledge) -> dict[str, int]:
        return pool.samples(known)


def class_counts(network: Network, task: int) -> tuple[int, int]:
    """Outputs of the heads before this task, and of all heads."""
    old = sum(len(network.labels[head]) for head in {network.head_of(past) for past in range(task)})
    return old, sum(map(len, network.labels))


def balance(old: int, total: int) -> tuple[float, float]:
    """(α, β) of so many old classes among all."""
    return math.log2(total / 2 + 1), math.sqrt(old / total)
