"""Asking a finished run: a label for every image, how sure it is, and whether the image looks like anything learned.

import fedprotip
for answer in fedprotip.ask("runs/mine", images):
    print(answer.label, answer.probability, answer.unusual)
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fedprotip.errors import UsageError
from fedprotip.inference.groups import mixture
from fedprotip.inference.ways import Inference
from fedprotip.methods import create_method
from fedprotip.models import Network, build_network
from fedprotip.models.state import load_state
from fedprotip.settings import Settings, load
from fedprotip.store.folder import RunFolder
from fedprotip.stream import Stream, build_stream

KNOWLEDGE = ("subspaces", "references", "statistics", "calibration")


@dataclass(frozen=True)
class Answer:
    """What the model says about one image."""

    label: str
    probability: float
    task: int
    task_probability: float
    unusual: float
    """The share of held-back samples (`clients.held_back`) that look less strange; above 0.95 better say: unknown."""


def ask(folder: str | Path, images: Tensor, together: bool = False) -> list[Answer]:
    """Answers of a finished run for images (n, c, h, w) with values from 0 to 255.

    Args:
        together: the images came together, so they may be of one task: evidence adds up. Else each is decided alone.
    """
    network, inference, stream = _opened(RunFolder.open(Path(folder)))
    shape = stream.dataset.image_shape
    if images.dim() != 4 or images.shape[1:] != shape or not len(images):
        raise UsageError(f"Images of shape {tuple(images.shape)}: this run needs (n, {', '.join(map(str, shape))}).")
    with torch.no_grad():
        seen = inference.see(network.embed(stream.normalised(images)))
        way = inference.ways[inference.chosen]
        evidence = way.router.evidence(seen)
        tasks = inference.decide(way, evidence, torch.ones(len(images)))
        if together and way.router.adds:
            tasks = mixture(evidence / inference.calibration.temperature) * inference.calibration.temperature
        elif together:
            tasks = inference.decide(way, evidence.mean(0, keepdim=True), torch.tensor([float(len(images))]))
            tasks = tasks.expand(len(images), -1)
        labels, probabilities = inference.answer(tasks.float(), inference.columns.within_task(seen.scores[way.expert]))
        shares = (tasks / inference.calibration.temperature).softmax(1).max(1)
        strange = inference.strangeness(seen.scores)
    columns = zip(labels, probabilities, shares.indices, shares.values, strange, strict=True)
    return [Answer(stream.dataset.classes[int(k)], float(p), int(t), float(s), float(u)) for k, p, t, s, u in columns]


def _opened(folder: RunFolder) -> tuple[Network, Inference, Stream]:
    """Model, inference and stream of a finished run."""
    if folder.manifest().status != "finished":
        raise UsageError(f"{folder.path} is not finished; finish it first with: fedprotip resume {folder.path}.")
    settings: Settings = load(tomllib.loads(folder.settings_toml(lambda text: None)), ["model.weights=''"])
    method, stream = create_method(settings), build_stream(settings)
    network = build_network(settings, stream.dataset.image_shape, method.routes)
    for task in stream.tasks:
        network.add_head(task.classes, settings.run.seed, task.index)
    load_state(network, load_file(folder.path / "model.safetensors"))
    knowledge: dict[str, Tensor] = {}
    for group in KNOWLEDGE:
        path = folder.path / f"{group}.safetensors"
        if path.exists():
            knowledge |= {f"{group}/{name}": tensor for name, tensor in load_file(path).items()}
    inference = method.inference(network.eval(), knowledge, [task.classes for task in stream.tasks])
    if not inference.ways:
        raise UsageError(f"method {method.name!r} does not predict the task of a sample, so it cannot be asked.")
    return network, inference, stream
