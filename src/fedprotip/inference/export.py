"""One ONNX file that answers as a run does: features, routing and heads, for onnxruntime and nothing else.

fedprotip export runs/mine model.onnx

Input `images`: uint8 (n, c, h, w) of the size that the metadata tells, any n; each image decides alone. Outputs:

label, probability (n,): place of the answer among the names in the metadata, and how sure it is
probabilities (n, L): of all classes
task, task_probability (n,), tasks (n, T): likewise
unusual (n,): as in `Answer`; NaN where the run cannot tell
relevance (n, T): `Predictor.relevance`, where the method has task subspaces
"""

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedprotip.errors import FedprotipError, RunError, UsageError
from fedprotip.inference.answers import Heard, Inference, Routed, Way
from fedprotip.inference.candidates import Candidates
from fedprotip.inference.parts import Expert
from fedprotip.inference.predictor import RELEVANCE, Predictor
from fedprotip.inference.route import CosineRouter
from fedprotip.inference.routers import Vote
from fedprotip.inference.students import GRID, StudentsExpert
from fedprotip.inference.students import outputs as students_say
from fedprotip.store.files import Tensors, write_atomic
from fedprotip.store.folder import is_run
from fedprotip.store.records import one_line
from fedprotip.stream.plan import Pixels
from fedprotip.stream.transforms import fitted

OPSET = 18
TOLERANCE = 1e-4
"""How far answers of the file may be from ours on the images that it is tried on."""
TRIED = (1, 5)
"""Sizes of the batches that it is tried on."""
INPUT, SUFFIX = "images", ".onnx"
FILTER = "bilinear"
"""Of Pillow, by which images are scaled to the size that the file takes."""
LARGEST = 2**31 - 2**20
"""Bytes of an ONNX file that is one file."""


class Answers(nn.Module):
    """Images (n, c, h, w) uint8 → answers, every image for itself: what `Predictor.answers` says, as one graph."""

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self.network = predictor.network
        self.predictor = replace(predictor, inference=_portable(predictor.inference))
        self.fit = Fit(predictor.plan.pixels)
        self.names = ["label", "probability", "probabilities", "task", "task_probability", "tasks", "unusual"]
        if RELEVANCE in self.predictor.inference.ways:
            self.names.append("relevance")

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        inference = self.predictor.inference
        seen = self.predictor.plan.pixels.normalised(self.fit(images.float() / 255))
        heard = inference.hear(self.predictor.look(seen))
        routed = self._alone(heard)
        by_label = inference.by_label(heard, routed)
        by_task = inference.tasks(by_label, routed)
        place = (routed.labels[:, None] == inference.candidates.known[0]).int().argmax(1)
        best = by_task.max(1)
        sure = by_label.gather(1, place[:, None])[:, 0].float()
        told = (place, sure, by_label.float(), best.indices, best.values.float(), by_task.float())
        relevance = self.predictor.relevance(heard)
        return (*told, inference.strangeness(heard).float(), *([] if relevance is None else [relevance]))

    def _alone(self, heard: Heard) -> Routed:
        """`Predictor.route` without groups, and without a number of images that would become a constant."""
        inference, own = self.predictor.inference, heard.scores[heard.own]
        samples = torch.arange(own.shape[0])
        if not inference.ways:
            return Routed(samples, samples, inference.candidates.by_task(own), heard.own, inference.agnostic(heard))
        way = inference.ways[inference.chosen]
        decisions = inference.decide(way, heard.evidence[inference.chosen], torch.ones(own.shape[0]))
        labels = inference.labels(decisions, samples, heard.opinion(way.expert), samples, way.hard)
        return Routed(samples, samples, decisions, way.expert, labels)


class Fit(nn.Module):
    """Images (n, c, h, w) from the size that is given to the one that the model sees, as products.

    Scaling without aliasing is linear and treats rows and columns apart; ONNX has no such step of its own.
    """

    def __init__(self, pixels: Pixels) -> None:
        super().__init__()
        height, width = pixels.given[1:]
        self.same = (height, width) == pixels.shape[1:]
        if not self.same:
            self.rows = nn.Buffer(_lines(torch.eye(height)[:, None, :, None].expand(-1, -1, -1, width), pixels, 3))
            self.columns = nn.Buffer(_lines(torch.eye(width)[:, None, None, :].expand(-1, -1, height, -1), pixels, 2))

    def forward(self, images: Tensor) -> Tensor:
        return images if self.same else self.rows @ images @ self.columns.T


def _lines(pictures: Tensor, pixels: Pixels, across: int) -> Tensor:
    """What becomes of pictures (given, 1, h, w) that are white in one line each: (size, given)."""
    parts = [fitted(part.contiguous(), pixels.shape[1:], pixels.fit) for part in pictures.split(64)]
    return torch.cat([part.amax(across)[:, 0] for part in parts]).T.contiguous()


class AllAtOnce(CosineRouter):
    """The vote without parts: a graph has no loop over as many parts as there happen to be."""

    def scores(self, relevance: Tensor) -> Tensor:
        relevance = relevance.double()
        unit = nn.functional.normalize(self.references.to(relevance), dim=2)
        return self._votes(nn.functional.normalize(relevance, dim=1), unit)


class Undivided(StudentsExpert):
    """Students without parts, likewise; their maps are pooled by products, as ONNX cannot where cells overlap."""

    def compared(self, students: Tensors, teacher: Tensors, images: Tensor) -> Tensor:
        rows, columns = (_cells(int(side)) for side in images.shape[2:])

        def pool(maps: Tensor) -> Tensor:
            return rows @ maps @ columns.T

        error = students_say(students, images, pool) - students_say(teacher, images, pool)
        return -error.square().mean(2)


def _cells(side: int) -> Tensor:
    """What pooling makes of a side, as a product: (GRID, side)."""
    found = np.zeros((GRID, side), np.float32)
    for cell in range(GRID):
        first, end = cell * side // GRID, -(-(cell + 1) * side // GRID)
        found[cell, first:end] = 1 / (end - first)
    return torch.from_numpy(found)


class Added(Candidates):
    """Sums over the candidates of a label as a product."""

    def probabilities(self, joint: Tensor, temperature: float = 1.0) -> Tensor:
        joint = joint.masked_fill((joint == -torch.inf).all(1, keepdim=True), 0.0)
        return _summed((joint / temperature).softmax(1), self.known[1], len(self.known[0]))


class Portable(Inference):
    """Sums over the labels of a task as a product."""

    def tasks(self, by_label: Tensor, routed: Routed) -> Tensor:
        if not self.candidates.distinct:
            return (routed.decisions / self.calibration.temperature).softmax(1)
        tasks = self.candidates.tasks
        return _summed(by_label[:, self.candidates.known[1]], tasks, int(tasks.max()) + 1).clamp_max(1)


def _summed(values: Tensor, places: Tensor, count: int) -> Tensor:
    """Values (n, C) added up where they have the same place (C,): (n, count)."""
    return values @ nn.functional.one_hot(places, count).to(values)


def _portable(inference: Inference) -> Inference:
    """The same answers from what a graph can hold, without the ways that have no part in them."""
    candidates = Added(inference.candidates.labels, inference.candidates.tasks)
    ways = {name: _whole(way) for name, way in inference.ways.items() if name in (inference.chosen, RELEVANCE)}
    experts = {name: _undivided(expert) for name, expert in inference.experts.items()}
    return Portable(candidates, experts, ways, inference.chosen, inference.calibration)


def _whole(way: Way) -> Way:
    if not isinstance(way.router, Vote):
        return way
    return replace(way, router=Vote(AllAtOnce(way.router.cosine.bases, way.router.cosine.references)))


def _undivided(expert: Expert) -> Expert:
    if not isinstance(expert, StudentsExpert):
        return expert
    return Undivided(expert.students, expert.teacher, expert.rows, expert.known)


def export(predictor: Predictor, path: str | Path) -> None:
    """Write the ONNX file, once onnxruntime has answered a few images as we do; what cannot be so is a sentence."""
    path = Path(path)
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{path} is a folder, or lies in none; name a file such as model.onnx.")
    if path.suffix.lower() != SUFFIX or is_run(path.parent):
        raise UsageError(f"{path} is no name for an ONNX file, or lies in a run folder; name another, as model.onnx.")
    written = as_onnx(predictor)
    if found := differences(predictor, written):
        raise RunError(f"The ONNX file would not answer as the run does ({found}), so it was not written.")
    try:
        write_atomic(path, written)
    except OSError as error:
        raise RunError(f"{path} cannot be written ({error.strerror or error}).") from None


def as_onnx(predictor: Predictor) -> bytes:
    """The ONNX file of a predictor, with all that a reader of it needs in its metadata."""
    onnx, _ = _packages()
    module = Answers(predictor).eval()
    target: Any = io.BytesIO()
    size = sum(tensor.nbytes for tensor in module.state_dict().values())
    if size > LARGEST:
        raise UsageError(f"A model of {size:,} bytes is too large for one ONNX file.")
    images = torch.zeros(2, *predictor.plan.pixels.given, dtype=torch.uint8)
    names = [INPUT, *module.names]
    try:
        with torch.no_grad(), _quietly():
            torch.onnx.export(
                module,
                (images,),
                target,
                dynamo=False,
                opset_version=OPSET,
                input_names=[INPUT],
                output_names=module.names,
                dynamic_axes={name: {0: "n"} for name in names},
            )
    except FedprotipError:
        raise
    except Exception as error:  # a backbone, expert or router of one's own may do anything
        told = one_line(f"{type(error).__name__}: {error}", 200)
        raise UsageError(f"This run has a part that ONNX cannot express ({told}).") from None
    model = onnx.load_from_string(target.getvalue())
    onnx.helper.set_model_props(model, metadata(predictor))
    return model.SerializeToString()


def metadata(predictor: Predictor) -> dict[str, str]:
    """What stands in the file beside the graph, as JSON; images are brought to `size` by whoever asks."""
    plan, known = predictor.plan, predictor.inference.candidates.known[0].tolist()
    pixels = plan.pixels
    facts = {
        "classes": [plan.classes[label] for label in known],
        "labels": known,
        "tasks": [task.name for task in plan.tasks],
        "size": pixels.given,
        "fit": pixels.fit,
        "resize": pixels.resize,
        "filter": FILTER,
        "mean": pixels.mean,
        "std": pixels.std,
        "way": predictor.inference.chosen,
        "version": version("fedprotip"),
    }
    return {f"fedprotip.{name}": json.dumps(value, ensure_ascii=False) for name, value in facts.items()}


def differences(predictor: Predictor, written: bytes) -> str:
    """What onnxruntime says otherwise than we do about a few images; empty: nothing."""
    _, runtime = _packages()
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # what fails is told below
    session = runtime.InferenceSession(written, options, providers=["CPUExecutionProvider"])
    drawn = np.random.default_rng(0)
    for count in TRIED:
        images = drawn.integers(0, 256, (count, *predictor.plan.pixels.given), dtype=np.uint8)
        try:
            told = session.run(None, {INPUT: images})
        except Exception as error:  # onnxruntime has a class for every kind, and no common one
            return one_line(f"a batch of {count} fails: {error}", 200)
        theirs = dict(zip([one.name for one in session.get_outputs()], told, strict=True))
        ours = outputs(predictor, images)
        for name, expected in ours.items():
            found = theirs[name]
            if found.shape != expected.shape:
                return f"{name} has the shape {found.shape} instead of {expected.shape}"
            if not np.allclose(found, expected, rtol=0, atol=TOLERANCE, equal_nan=True):
                return f"{name} differs by {np.nanmax(np.abs(found - expected)):.1g}"
    return ""


def outputs(predictor: Predictor, images: np.ndarray) -> dict[str, np.ndarray]:
    """Our own answers about images (n, c, h, w) uint8, as the file tells them; labels and tasks only by their chance.

    Where two are equally likely to the last digit, either is right.
    """
    heard = predictor.hear(images)
    routed, inference = predictor.route(heard), predictor.inference
    by_label = inference.by_label(heard, routed)
    by_task = inference.tasks(by_label, routed)
    found = {
        "probability": inference.sureness(by_label, routed),
        "probabilities": by_label,
        "task_probability": by_task.amax(1),
        "tasks": by_task,
        "unusual": inference.strangeness(heard),
    }
    relevance = predictor.relevance(heard)
    if relevance is not None:
        found["relevance"] = relevance
    return {name: tensor.numpy() for name, tensor in found.items()}


def _packages() -> tuple[Any, Any]:
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise UsageError(
            f"The package {error.name} is missing; it comes with: pip install 'fedprotip[export]'."
        ) from None
    return onnx, onnxruntime


@contextmanager
def _quietly() -> Iterator[None]:
    """Exporting warns of every constant; what matters is tried afterwards. What ONNX has not is spelled out."""
    from torch.onnx import register_custom_op_symbolic, unregister_custom_op_symbolic

    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    for name, spelled in SPELLED.items():
        register_custom_op_symbolic(name, spelled, OPSET)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in SPELLED:
            unregister_custom_op_symbolic(name, OPSET)
        logger.setLevel(before)


def _asinh(graph: Any, x: Any) -> Any:
    """sign(x)·log(|x| + √(x² + 1)): onnxruntime has no asinh of float64."""
    one = graph.op("Constant", value_t=torch.tensor(1.0, dtype=torch.float64))
    root = graph.op("Sqrt", graph.op("Add", graph.op("Mul", x, x), one))
    return graph.op("Mul", graph.op("Sign", x), graph.op("Log", graph.op("Add", graph.op("Abs", x), root)))


def _scaled(graph: Any, x: Any, size: Any, *how: Any) -> Any:
    """Images (n, c, h, w) at another size without aliasing, as `Fit` does it: a backbone may have its own size."""
    from torch.onnx.symbolic_helper import _get_tensor_sizes, _parse_arg

    pairs = zip(_get_tensor_sizes(x)[2:], _parse_arg(size, "is"), strict=True)
    rows, columns = (
        nn.functional.interpolate(torch.eye(old)[None, None], (new, old), mode="bilinear", antialias=True)[0, 0]
        for old, new in pairs
    )
    across = graph.op("Constant", value_t=columns.T.contiguous())
    return graph.op("MatMul", graph.op("MatMul", graph.op("Constant", value_t=rows), x), across)


SPELLED: dict[str, Callable[..., Any]] = {"aten::asinh": _asinh, "aten::_upsample_bilinear2d_aa": _scaled}
