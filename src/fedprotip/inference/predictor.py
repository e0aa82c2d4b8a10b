"""Asking a finished run: a label for every image, how sure it is, and whether the image looks like anything learned.

import fedprotip
predictor = fedprotip.load("runs/mine")
for answer in predictor.predict(["photo.jpg", "another.png"]):
    print(answer.label, answer.probability, answer.unusual)
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from fedprotip.errors import RunError, UnknownName, UsageError
from fedprotip.inference.answers import Heard, Inference, Routed
from fedprotip.inference.assemble import assemble
from fedprotip.inference.experts import BIRTH
from fedprotip.inference.parts import EXPERTS, ROUTERS
from fedprotip.inference.pictures import Pictures, as_pixels
from fedprotip.inference.routers import Vote
from fedprotip.inference.soundness import check_knowledge, check_model
from fedprotip.models import Network, new_network
from fedprotip.models.freeze import frozen_prefixes
from fedprotip.models.heads import Features, without_memory
from fedprotip.models.state import full_state, load_state
from fedprotip.models.steps import Inputs
from fedprotip.settings import known
from fedprotip.store.files import Tensors, parsed
from fedprotip.store.folder import DATA, RunFolder
from fedprotip.store.memory import machine_bytes
from fedprotip.store.records import one_line
from fedprotip.stream.plan import Plan

Group = bool | Sequence[str | int] | np.ndarray | Tensor | None
"""Which images came together: none, all, or those of the same name."""
SUFFIX, BACKBONE = ".safetensors", "backbone."
RELEVANCE = "cosine"
"""The way whose evidence is the energy of a sample in the subspace of every task."""
TOGETHER = 512
"""Images of one forward pass."""
BYTES_PER_PIXEL = 64
"""What answering an image takes at least, for each of its numbers: the image and a few maps of it."""
DEEP = 1000
"""Layers that a backbone may have without a tensor for each of them."""
MISFITS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What files that do not belong together, or were not made by a run, can lead to."""


@dataclass(frozen=True)
class Answer:
    """What the model says about one image."""

    label: str
    """Empty: nothing is known about the task that was given."""
    probability: float
    task: int
    """The likeliest one, counted from 0."""
    task_probability: float
    unusual: float
    """The share of held-back samples (`clients.held_back`) that look less strange; above 0.95 better say: unknown."""


@dataclass(frozen=True)
class Predictor:
    """A model and all that its answers need; what evaluation uses, and what `load` makes of a run folder."""

    network: Network
    inference: Inference
    plan: Plan

    @property
    def classes_(self) -> list[str]:
        """Names of all classes that were learned: the columns of `predict_proba`."""
        return [self.plan.classes[int(label)] for label in self.inference.candidates.known[0]]

    def predict(self, images: Pictures, group: Group = None, task: int | None = None) -> list[Answer]:
        """Answers for images: files, Pillow images, arrays or tensors, one or several, of any size; see `as_pixels`.

        A method that predicts no task answers agnostically: the largest output of all heads.

        Args:
            group: which images came together, so that they may be of one task and their evidence adds up: True for
                all of them, or a name for each. By default each decides alone.
            task: the task of the images, counted from 0, where it is known.
        """
        return self.answers(self.hear(images), group, task)

    def predict_proba(self, images: Pictures, group: Group = None, task: int | None = None) -> np.ndarray:
        """The probability of every class (n, L), in the order of `classes_`; arguments as for `predict`."""
        heard = self.hear(images)
        found = np.zeros((len(heard), len(self.classes_)), np.float32)
        for members, part, routed in self.routed(heard, group, task):
            found[members.numpy()] = self.inference.by_label(part, routed).numpy()
        return found

    def answers(self, heard: Heard, group: Group = None, task: int | None = None) -> list[Answer]:
        """What is to be said about images that were heard; arguments as for `predict`."""
        answers: dict[int, Answer] = {}
        for members, part, routed in self.routed(heard, group, task):
            found = self.worded(part, routed, self.inference.by_label(part, routed))
            answers |= zip(members.tolist(), found, strict=True)
        return [answers[place] for place in range(len(heard))]

    def worded(self, heard: Heard, routed: Routed, by_label: Tensor) -> list[Answer]:
        """What is to be said about images whose tasks have been decided, from p(label) of every label (n, L)."""
        names = [*self.plan.classes, ""]  # −1 is the last one
        tasks = self.inference.tasks(by_label, routed).max(1)
        sure, strange = self.inference.sureness(by_label, routed), self.inference.strangeness(heard)
        found = (part.tolist() for part in (routed.labels, sure, tasks.indices, tasks.values, strange))
        return [Answer(names[label], *numbers) for label, *numbers in zip(*found, strict=True)]

    def relevance(self, heard: Heard) -> Tensor | None:
        """Where images lie relative to the subspaces of the tasks, (n, T) from 0 to 1; None without subspaces (Eq. 11).

        1 stands for the task whose subspace holds the largest part of an image's features. That is often the first one,
        which has the directions all images share; which task an image is like, `similarity` tells.
        """
        if RELEVANCE not in heard.evidence:
            return None
        found = heard.evidence[RELEVANCE].sqrt()
        return found / found.amax(1, keepdim=True).clamp_min(torch.finfo(found.dtype).tiny)

    def similarity(self, heard: Heard) -> Tensor | None:
        """How like those of each task the relevance of images is, (n, T) cosines (Eq. 12); None without subspaces."""
        way = self.inference.ways.get(RELEVANCE)
        if way is None or not isinstance(way.router, Vote):
            return None
        return way.router.cosine.similarity(heard.evidence[RELEVANCE].sqrt())

    def read(self, paths: Sequence[str | Path]) -> Tensor:
        """Image files of any size as images (n, c, h, w) uint8, brought to shape as in training."""
        return as_pixels(list(paths), self.plan.pixels)

    def routed(
        self, heard: Heard, group: Group = None, task: int | None = None
    ) -> Iterator[tuple[Tensor, Heard, Routed]]:
        """Places of samples that are answered at once, what was heard of them, and their tasks and labels."""
        if task is not None and (not isinstance(task, int | np.integer) or not 0 <= task < len(self.plan.tasks)):
            raise UsageError(
                f"task = {task!r}: tasks count from 0, and this run has learned {len(self.plan.tasks)} of them."
            )
        if group is None or isinstance(group, bool):
            yield torch.arange(len(heard)), heard, self.route(heard, bool(group), task)
            return
        if isinstance(group, Tensor | np.ndarray):
            group = group.tolist()  # numbers, of which equal ones are one group
        if not hasattr(group, "__len__") or isinstance(group, str) or not all(isinstance(n, Hashable) for n in group):
            raise UsageError(f"group = {group!r}: give True for all images, or a name for each of them.")
        if len(group) != len(heard):
            raise UsageError(f"group names {len(group)} images, and there are {len(heard)}; give a name for each.")
        members: dict[str | int, list[int]] = {}
        for place, name in enumerate(group):
            members.setdefault(name, []).append(place)
        for places in map(torch.tensor, members.values()):
            part = heard.some(places)
            yield places, part, self.route(part, True, task)

    def route(self, heard: Heard, together: bool = False, task: int | None = None) -> Routed:
        """Tasks and labels of all samples, each decided alone, all `together`, or of a known task."""
        inference, samples = self.inference, torch.arange(len(heard))
        if task is not None:
            tasks = torch.full((len(heard), len(self.plan.tasks)), -torch.inf)
            tasks[:, task] = 0.0
            labels = inference.aware(heard, torch.full_like(samples, task))
            return Routed(samples, samples, tasks, inference.answerer(heard), labels)
        if not inference.ways:
            tasks = inference.candidates.by_task(heard.scores[heard.own])
            return Routed(samples, samples, tasks, heard.own, inference.agnostic(heard))
        way = inference.ways[inference.chosen]
        if together and way.router.adds:
            tasks = inference.mixed(heard.evidence[inference.chosen])
            labels = inference.labels(tasks, samples, heard.opinion(way.expert), samples, hard=False)
            return Routed(samples, samples, tasks, way.expert, labels)
        return inference.route(heard, inference.chosen, [samples] if together else None)

    def look(self, inputs: Inputs) -> Features:
        """What experts and routers are to see of images, or of what a frozen prefix made of them."""
        return self.inference.look(self.network, inputs)

    @torch.no_grad()
    def hear(self, images: Pictures) -> Heard:
        """What experts and routers say about images."""
        pixels = self.plan.pixels
        given = as_pixels(images, pixels)
        network = self.network.eval()
        device = next(network.parameters()).device
        parts = (pixels.normalised(part.float() / 255).to(device) for part in given.split(TOGETHER))
        return self.inference.hear(Features.joined([self.look(part) for part in parts]))


def load(folder: str | Path) -> Predictor:
    """The predictor of a finished run, from its folder alone.

    Every file is compared with its hash before use. The folder may be a stranger's, who can make hashes too: so its
    content is checked as well, and one image is answered, before anything is handed out.
    """
    run = RunFolder.open(Path(folder))
    manifest = run.manifest()
    if manifest.status != "finished":
        raise UsageError(f"{run.path} is not finished; finish it first with: fedprotip resume {run.path}.")
    files = manifest.files
    if "plan.json" not in files:
        raise UsageError(f"{run.path} has no plan.json: it is of an early version, and does not answer alone.")
    try:
        plan = Plan.model_validate_json(run.read_verified("plan.json"))
    except ValidationError as error:
        problem = error.errors()[0]
        told = one_line(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}", 300)
        raise RunError(f"{run.path / 'plan.json'} is of another version: {told}.") from None
    if "model" + SUFFIX not in files:
        raise RunError(f"{run.path / 'manifest.json'} names no model{SUFFIX}: the folder is not whole.")
    pixels = max(math.prod(plan.pixels.shape), math.prod(plan.pixels.given))
    if BYTES_PER_PIXEL * pixels > machine_bytes():
        raise RunError(f"{run.path / 'plan.json'}: images of {pixels:,} numbers are too large for this machine.")
    try:
        _have_parts(run, plan)
        predictor = _put_together(run, plan, files)
        predictor.predict(torch.zeros(1, *plan.pixels.given))
        return predictor
    except MISFITS as error:
        told = one_line(f"{type(error).__name__}: {error}", 200)
        raise RunError(f"{run.path}: plan.json and the tensors do not fit together ({told}).") from None


def _have_parts(run: RunFolder, plan: Plan) -> None:
    """Routers and experts come with the module of a method, which an installed package may have."""
    ways = plan.answering.ways.values()
    if any(way.router not in ROUTERS for way in ways) or any(name not in EXPERTS for name in plan.answering.experts):
        with suppress(UnknownName, AttributeError):
            known("method.name", str(run.manifest_settings().get("method", {}).get("name")))


def _put_together(run: RunFolder, plan: Plan, files: Iterable[str]) -> Predictor:
    groups = [name.removesuffix(SUFFIX) for name in files if name.endswith(SUFFIX) and name != DATA]
    tensors = {g: parsed(run.read_verified(g + SUFFIX), str(run.path / (g + SUFFIX))) for g in groups}
    network = _filled(plan, tensors.pop("model"))
    knowledge = {f"{group}/{name}": tensor for group, found in tensors.items() for name, tensor in found.items()}
    knowledge = {name: tensor.clone() for name, tensor in knowledge.items()}  # aligned like any other tensor
    check_knowledge(knowledge, plan, network)
    inference = assemble(plan.answering, network, knowledge, [task.classes for task in plan.tasks])
    return Predictor(network, inference.lean(), plan)


def ask(folder: str | Path, images: Pictures, group: Group = None) -> list[Answer]:
    """Answers of a finished run; whoever asks more than once keeps what `load` gives."""
    return load(folder).predict(images, group)


def _filled(plan: Plan, weights: Tensors) -> Network:
    """The network that a plan describes, with these weights; extras are for learning only."""
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith("extras.")}
    _refuse_what_has_no_weights(plan, weights)
    backbone = {name.removeprefix(BACKBONE): tensor for name, tensor in weights.items() if name.startswith(BACKBONE)}
    network = new_network(plan.model, plan.pixels.shape, plan.seed, plan.model.head == "shared", backbone)
    for index, task in enumerate(plan.tasks):
        network.add_head(task.classes, plan.seed, index)
    if BIRTH in plan.answering.experts:
        network.remember_birth(frozen_prefixes(plan.model, task=0))
    own = full_state(network)
    _refuse_another(plan, own, weights)
    check_model(own, weights)
    load_state(network, weights)
    return network.eval()


def _refuse_what_has_no_weights(plan: Plan, weights: Tensors) -> None:
    """Compare sizes before there is any memory for a network: a plan can ask for more than a machine has."""
    heads = 1 if plan.model.head == "shared" else len(plan.tasks)
    if plan.model.depth > max(DEEP, len(weights)) or heads > len(weights):
        raise ValueError(f"{heads} heads and model.depth = {plan.model.depth} for {len(weights)} tensors")
    backbone = None
    with suppress(*MISFITS):
        backbone = without_memory(plan.model, plan.pixels.shape)
    if backbone is not None:  # one of one's own may need real numbers
        own = {BACKBONE + name: tensor for name, tensor in full_state(backbone).items()}
        _refuse_another(plan, own, {name: tensor for name, tensor in weights.items() if name.startswith(BACKBONE)})


def _refuse_another(plan: Plan, own: Tensors, weights: Tensors) -> None:
    unlike = {name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape}
    if wrong := sorted(unlike | (own.keys() ^ weights.keys())):
        raise UsageError(
            f"model.name = {plan.model.name!r} as it is registered in this process is not the backbone of the run: "
            f"{wrong[0]} differs."
        )
