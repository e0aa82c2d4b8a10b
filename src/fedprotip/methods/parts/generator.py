"""Images out of a trained network alone: a generator learns to make what the network takes for its classes.

Three things are asked of an image: the network (the teacher) sees the class it was to be; its layers see the statistics
that they saw in training (`NormMatch`); and a student that learns from the images made so far does not understand it
yet, though it names the same class (`disagreement`). What comes of it is a pool of images as uint8.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedprotip.methods.parts.distillation import distillation, earlier
from fedprotip.methods.site import Site
from fedprotip.models.heads import Network, new_network
from fedprotip.seeds import ambient_stream, derive
from fedprotip.settings import MethodSettings

BETAS = (0.5, 0.999)
"""Of Adam, for generators."""
FALL = 200
"""Rounds of synthesis in which the student's learning rate falls to 0 by half a cosine."""
VIT_SIDE = 32
"""Side of images that are made for a transformer: it has no norm statistics that could guide larger ones."""

Score = Callable[[Tensor], Tensor]
"""The loss of images (n, c, h, w) of 0…1."""


class SynthesisOptions(MethodSettings):
    """How images are made; every method that makes some has these settings."""

    synthesis_rounds: int = Field(40, ge=1, description="Rounds of synthesis after a task that each add a batch.")
    synthesis_batch: int = Field(256, ge=2, description="Images made in a round of synthesis.")
    generator_steps: int = Field(40, ge=1, description="Steps of the generator in a round of synthesis.")
    generator_lr: float = Field(2e-3, gt=0, description="Adam's learning rate of the generator.")
    width: int = Field(64, ge=1, le=4096, description="Channels of the generator's last block; earlier ones: twice.")
    side: int = Field(
        0,
        ge=0,
        le=2**12,
        description="Longest side of synthetic images, resized for the model; 0: as the data, 32 with a vit.",
    )
    pool: int = Field(8000, ge=1, description="Synthetic images that clients are sent, the newest ones, at most.")
    warmup: int = Field(10, ge=0, description="Rounds of synthesis before the student begins to learn.")
    bn: float = Field(10.0, ge=0, description="Weight of L_bn: the statistics that norm layers saw in training.")
    onehot: float = Field(0.5, ge=0, description="Weight of the cross-entropy of the teacher's answer.")
    adversarial: float = Field(1.0, ge=0, description="Weight of L_adv: what the student does not understand yet.")
    student_steps: int = Field(400, ge=1, description="Steps of the student after a round of synthesis.")
    student_lr: float = Field(0.005, gt=0, description="Learning rate of the student.")
    student_decay: float = Field(2e-4, ge=0, description="Weight decay of the student.")
    student_temperature: float = Field(20.0, gt=0, description="Temperature at which the student learns.")


def unheard(options: SynthesisOptions, first: int, rounds: int) -> Sequence[str]:
    """A warning where the student takes part in none of so many rounds, because it would first in round `first`."""
    if not options.adversarial or first < rounds:
        return ()
    kept = options.synthesis_rounds
    return (
        f"No image is made against the student: method.warmup = {options.warmup} and method.synthesis_rounds = {kept} "
        f"leave it no round, so L_adv is 0; choose method.synthesis_rounds of {first - rounds + kept + 1} or more.",
    )


class Decoder(nn.Module):
    """Vectors (n, d) → images (n, c, h, w) of 0…1: a small map, doubled in size between convolutions."""

    def __init__(self, inside: int, shape: tuple[int, int, int], width: int, doublings: int = 2) -> None:
        """`width`: channels of the last block; `doublings`: 2, or 4 for large images."""
        super().__init__()
        channels, self.height, self.wide = shape
        first, scale = 2 * width, 2**doublings
        self.map = first, math.ceil(self.height / scale), math.ceil(self.wide / scale)
        self.project = nn.Linear(inside, math.prod(self.map))
        layers: list[nn.Module] = [nn.BatchNorm2d(first)]
        blocks = [(first, True), (width, True)]
        if doublings > 2:
            blocks = [(first, False), (first, True), *[(width, True)] * (doublings - 1)]
        size = first
        for out, doubles in blocks:
            layers += [nn.Upsample(scale_factor=2)] if doubles else []
            layers += [nn.Conv2d(size, out, 3, padding=1), nn.BatchNorm2d(out), nn.LeakyReLU(0.2)]
            size = out
        self.layers = nn.Sequential(*layers, nn.Conv2d(size, channels, 3, padding=1), nn.Sigmoid())

    def forward(self, vectors: Tensor) -> Tensor:
        images: Tensor = self.layers(self.project(vectors).view(-1, *self.map))
        return images[:, :, : self.height, : self.wide]


class NormMatch:
    """L_bn: how far what batch norms see is from their running statistics; 0 for a network without any.

    A batch says little about 256 channels: its statistics count one tenth, those of rounds before it nine.
    """

    past = 0.9

    def __init__(self, network: nn.Module) -> None:
        norms = [m for m in network.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
        self._seen: dict[_BatchNorm, tuple[Tensor, Tensor]] = {}  # norm → mean and variance of the last batch
        self._average: dict[_BatchNorm, tuple[Tensor, Tensor]] = {}
        for norm in norms:
            norm.register_forward_pre_hook(self._note)

    def _note(self, norm: nn.Module, inputs: tuple[Tensor]) -> None:
        assert isinstance(norm, _BatchNorm)
        axes = [axis for axis in range(inputs[0].dim()) if axis != 1]
        self._seen[norm] = inputs[0].mean(axes), inputs[0].var(axes, unbiased=False)

    def loss(self) -> Tensor | float:
        """Of the last batch that passed: Σ over layers ‖running mean − mean‖ + ‖running variance − variance‖."""
        total: Tensor | float = 0.0
        for norm, seen in self._seen.items():
            assert norm.running_mean is not None
            assert norm.running_var is not None
            for held, found, before in zip(
                (norm.running_mean, norm.running_var), seen, self._average.get(norm, (None, None)), strict=True
            ):
                blended = found if before is None else self.past * before + (1 - self.past) * found
                total = total + (held - blended).norm()
        return total

    def remember(self) -> None:
        """A round is over: its last batch joins the average."""
        for norm, seen in self._seen.items():
            mean, variance = (found.detach() for found in seen)
            before = self._average.get(norm, (mean, variance))
            self._average[norm] = (
                self.past * before[0] + (1 - self.past) * mean,
                self.past * before[1] + (1 - self.past) * variance,
            )


def disagreement(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher ‖ student) of outputs (n, C), only where both name the same class; the mean over n."""
    apart = F.kl_div(student.log_softmax(1), teacher.log_softmax(1), reduction="none", log_target=True).sum(1)
    return (apart * (student.argmax(1) == teacher.argmax(1))).mean()


class Synthesis:
    """Makes the pool of the tasks before the one that the site has begun, from the model it begins with."""

    unkept: int = 0
    """Rounds before those that add to the pool."""
    first_adversarial: int
    """The round from which on the student takes part."""

    def __init__(self, site: Site, options: SynthesisOptions) -> None:
        self.site, self.options, self.look, self.device = site, options, site.look, site.device
        self.teacher = deepcopy(site.network).requires_grad_(False).eval()
        self.match = NormMatch(self.teacher.backbone)
        self.first_adversarial = options.warmup
        with torch.no_grad():
            self.outputs = self.heard(self.teacher, torch.zeros(1, *site.image_shape, device=self.device))[1].shape[1]
        self.chance = site.chance("synthesis")
        self.student = self._new_student()
        self._lessons = torch.optim.SGD(
            self.student.parameters(), options.student_lr, momentum=0.9, weight_decay=options.student_decay
        )
        self._falling = torch.optim.lr_scheduler.CosineAnnealingLR(self._lessons, FALL)

    # What a method decides

    def make(self, targets: Tensor, score: Score) -> Tensor:
        """The best images (n, c, h, w) of 0…1 of one round, which should be these outputs of the teacher (n,)."""
        raise NotImplementedError(f"{type(self).__name__} does not say how images are made")

    def targets(self) -> Tensor:
        """Outputs of the teacher that the images of a round are to be (n,): any of them, as likely as any other."""
        return torch.randint(self.outputs, (self.options.synthesis_batch,), generator=self.chance).to(self.device)

    def aim(self, features: Tensor, targets: Tensor) -> Tensor | float:
        """What else is asked of images, by the teacher's features of them (n, d)."""
        return 0.0

    def lesson(self, features: Tensor, taught: Tensor) -> Tensor | float:
        """What else the student learns: by its features and the teacher's (n, d)."""
        return 0.0

    # What is the same for all

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of synthetic images."""
        channels, height, width = self.site.image_shape
        side = self.options.side or (VIT_SIDE if self.site.settings.model.name.startswith("vit") else 0)
        return (channels, side, side) if side and side < max(height, width) else (channels, height, width)

    @torch.enable_grad()
    def run(self) -> tuple[Tensor, Tensor]:
        """The pool (n, c, h, w) uint8, and what its images were to be (n,)."""
        options, made, wanted = self.options, list[Tensor](), list[Tensor]()
        rounds = self.unkept + options.synthesis_rounds
        for round_ in range(rounds):
            targets = self.targets()
            images = self.make(targets, self._score(targets, against=round_ >= self.first_adversarial))
            self.match.remember()
            if round_ >= self.unkept:
                made.append((images * 255).round().to("cpu", torch.uint8))
                wanted.append(targets.cpu())
            if round_ >= options.warmup:
                self._teach(torch.cat(made))
            self.site.on_progress("synthesis", round_ + 1, rounds)
        return torch.cat(made)[-options.pool :], torch.cat(wanted)[-options.pool :]

    def heard(self, network: Network, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Features, and outputs of all heads that the teacher has learned."""
        features = network.embed(inputs)
        return features, earlier(network, features, self.site.task)

    def _score(self, targets: Tensor, against: bool) -> Score:
        options = self.options

        def score(images: Tensor) -> Tensor:
            inputs = self.look.inputs(self.look.shaken(images, self.chance))
            features, said = self.heard(self.teacher, inputs)
            loss = options.onehot * F.cross_entropy(said, targets) + options.bn * self.match.loss()
            if against and options.adversarial:
                loss = loss - options.adversarial * disagreement(self.heard(self.student, inputs)[1], said)
            return loss + self.aim(features, targets)

        return score

    def _new_student(self) -> Network:
        """The same network with new weights, all of which learn."""
        settings, network = self.site.settings, self.site.network
        seed = derive(settings.run.seed, "student", self.site.task)
        student = new_network(settings.model, self.site.image_shape, seed, network.shared_head)
        for index, labels in enumerate(network.labels[: self.site.task]):
            student.add_head(labels, seed, index)
        with ambient_stream(seed, "extras"):
            student.add_extras(self.site.method.networks(self.site))
        return student.to(self.device).eval().requires_grad_(False)

    def _teach(self, pool: Tensor) -> None:
        """Steps of the student towards what the teacher says about the images made so far."""
        self.student.train().requires_grad_(True)
        batches = endless(pool, self.options.synthesis_batch, self.chance)
        for _ in range(self.options.student_steps):
            images = next(batches).to(self.device).float() / 255
            inputs = self.look.inputs(self.look.shaken(images, self.chance))
            with torch.no_grad():
                taught, told = self.heard(self.teacher, inputs)
            features, said = self.heard(self.student, inputs)
            loss = distillation(said, told, self.options.student_temperature) + self.lesson(features, taught)
            self._lessons.zero_grad()
            loss.backward()
            self._lessons.step()
        self._falling.step()
        self.student.eval().requires_grad_(False)


def endless(images: Tensor, batch: int, chance: torch.Generator) -> Iterator[Tensor]:
    """Shuffled batches of whole size, over and over; of all images where there are fewer."""
    batch = min(batch, len(images))
    while True:
        order = torch.randperm(len(images), generator=chance)
        for start in range(0, len(images) - batch + 1, batch):
            yield images[order[start : start + batch]]
