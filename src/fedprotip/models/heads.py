"""A backbone and its output heads: one per task, or one shared by all domains."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedprotip.errors import UnknownName, UsageError, shortened
from fedprotip.models.freeze import Stages, declare_stages, frozen_prefixes
from fedprotip.models.steps import Hidden, Inputs, advance, run_steps, steps_of
from fedprotip.models.taps import taps_of
from fedprotip.models.weights import load_weights
from fedprotip.seeds import ambient_stream
from fedprotip.settings import ModelSettings, Settings, declare, known

Builder = Callable[[ModelSettings, tuple[int, int, int]], nn.Module]
_builders: dict[str, Builder] = {}
_plain: dict[str, Builder] = {}


def register(
    name: str, stages: Stages | Callable[[ModelSettings], Stages] | None = None, plain: bool = False
) -> Callable[[Builder], Builder]:
    """Make a backbone available as `model.name = NAME`: (settings, image shape) → module (n, c, h, w) → (n, d).

        fedprotip.models.register("mine")(lambda settings, image_shape: my_module)
        fedprotip.run({"model": {"name": "mine"}})

    Any module will do, a ready one too: every run starts from a copy of it. Whoever resumes the run in another
    process registers it there again; its weights then come from the run folder.

    Args:
        stages: the parts that `model.freeze` can freeze, from input to output, by parameter prefix.
        plain: all its numbers are parameters and buffers, so that whoever has those need not draw any.
    """

    def add(builder: Builder) -> Builder:
        _builders[name] = builder
        if plain:
            _plain[name] = builder
        declare_stages(name, stages or {})
        declare("model.name", name, builder)
        return builder

    return add


def builder_of(name: str) -> Builder:
    """What makes the backbone that is registered under this name, here or by an installed package."""
    try:
        known("model.name", name)
        return _builders[name]
    except (KeyError, UnknownName):
        shown = shortened(repr(name), 60)
        raise UsageError(
            f"model.name = {shown} is not registered in this process; "
            f"first import what calls fedprotip.models.register({shown})."
        ) from None


@dataclass(frozen=True)
class Features:
    """What a backbone makes of images."""

    final: Tensor  # (n, d): what heads and routing see
    stacked: Tensor  # (n, D): what class statistics see: pooled outputs of earlier stages, then the final ones
    images: Tensor | None = None  # (n, c, h, w): for experts that see images only; then there are no features
    newborn: Tensor | None = None  # (n, D): `stacked` as the network at birth has it, where somebody asked for it

    def __len__(self) -> int:
        return len(self.final)

    @classmethod
    def joined(cls, parts: Sequence["Features"]) -> "Features":
        """Of several batches, one after another."""

        def cat(name: str) -> Tensor | None:
            found = [value for part in parts if (value := getattr(part, name)) is not None]
            return torch.cat(found) if found else None

        final, stacked = (torch.cat([getattr(part, name) for part in parts]) for name in ("final", "stacked"))
        return cls(final, stacked, cat("images"), cat("newborn"))

    @classmethod
    def none(cls, images: Tensor) -> "Features":
        """Images that no backbone has seen."""
        nothing = images.new_empty(len(images), 0)
        return cls(nothing, nothing, images)


class Network(nn.Module):
    """Images → features (backbone) → logits (heads). The feature a_L is what heads and routing see."""

    def __init__(self, backbone: nn.Module, features: int, shared_head: bool, taps: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.backbone = backbone
        self.newborn: nn.Module | None = None
        self.features = features
        self.taps = taps  # steps after which `look` pools
        self.stacked = self.first = features  # D, with what `look` adds; and how many of them come first
        self.shared_head = shared_head
        self.heads = nn.ModuleList()
        self.extras = nn.ModuleDict()  # networks of a method's own, which learn and travel with the rest
        self.labels: list[tuple[int, ...]] = []  # head → the global labels of its outputs
        self.moving: list[str] = []  # parameters that a task may move; the others need no gradient
        self.longest = 0  # multiplications of the backbone's longest product for one image, where they were counted

    def add_head(self, labels: Sequence[int], seed: int, task: int) -> None:
        """Grow by the head of a new task; a shared head is made once."""
        if self.shared_head and self.heads:
            return
        with ambient_stream(seed, "head", task):
            self.heads.append(nn.Linear(self.features, len(labels)))
        self.heads.to(next(self.backbone.parameters()).device)
        self.labels.append(tuple(labels))

    def add_extras(self, made: Mapping[str, nn.Module]) -> None:
        """Take in networks of a method's own; one of that name may be there already, and stays as it is."""
        device = next(self.backbone.parameters()).device
        for name, module in made.items():
            if next(module.buffers(), None) is not None:
                raise ValueError(f"the network {name!r} of the method has buffers, which would not travel")
            if name not in self.extras:
                self.extras[name] = module.to(device)

    def head_of(self, task: int) -> int:
        """Index of the head that answers for a task."""
        return 0 if self.shared_head else task

    def logits(self, features: Tensor, task: int) -> Tensor:
        return self.heads[self.head_of(task)](features)

    def targets(self, labels: Tensor, task: int) -> Tensor:
        """Global labels (n,) as outputs of the task's head."""
        known = torch.tensor(self.labels[self.head_of(task)], device=labels.device)
        match = labels[:, None] == known
        if not match.any(1).all():
            raise ValueError(f"a label is not among those of task {task + 1}: {self.labels[self.head_of(task)]}")
        return match.int().argmax(1)

    def embed(self, inputs: Inputs) -> Tensor:
        """Features (n, d) of images, or of what a frozen prefix has made of them already."""
        return _run(self.backbone, inputs)

    def look(self, inputs: Inputs, newborn: bool = False) -> Features:
        """Features, and pooled outputs of the stages before them; with `newborn` those of the network at birth too."""
        final, stacked = self._stack(self.backbone, inputs)
        return Features(final, stacked, newborn=self.look_at_birth(inputs) if newborn else None)

    def look_at_birth(self, inputs: Inputs) -> Tensor:
        """`stacked` as the network had it before any training, (n, D)."""
        assert self.newborn is not None, "who asks for it says so when the network is made"
        return self._stack(self.newborn, inputs)[1]

    def remember_birth(self, frozen: tuple[str, ...] = ()) -> None:
        """Keep the backbone as it is now beside the one that learns; what is `frozen` (by prefix) is there once."""
        if self.newborn is not None:
            return
        named = (*self.backbone.named_parameters(), *self.backbone.named_buffers())
        still = {id(tensor): tensor for name, tensor in named if name.startswith(frozen)} if frozen else {}
        self.newborn = deepcopy(self.backbone, dict(still)).requires_grad_(False).eval()

    def changed_since_birth(self) -> set[str]:
        """Parameters of the backbone that may differ from those at birth; none where nobody remembers them."""
        born = dict(self.newborn.named_parameters()) if self.newborn is not None else {}
        own = dict(self.backbone.named_parameters())
        return {name for name, parameter in born.items() if parameter is not own[name]}

    def _stack(self, backbone: nn.Module, inputs: Inputs) -> tuple[Tensor, Tensor]:
        if not self.taps:
            final = _run(backbone, inputs)
            return final, final
        hidden = advance(backbone, inputs, len(steps_of(backbone)), self.taps)
        assert hidden.pooled is not None
        return hidden.values, torch.cat([hidden.pooled, hidden.values], 1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of all heads, one after another (n, ΣC_t)."""
        features = self.embed(images)
        return torch.cat([head(features) for head in self.heads], dim=1)


def _run(backbone: nn.Module, inputs: Inputs) -> Tensor:
    if isinstance(inputs, Hidden):
        return run_steps(backbone, inputs.values, inputs.steps)
    found: Tensor = backbone(inputs)
    return found


def build_network(settings: Settings, image_shape: tuple[int, int, int], routes: bool) -> Network:
    """The network of a run, without heads, with seeded weights. `routes`: the method predicts the task."""
    frozen_prefixes(settings.model, task=1)  # refuses a stage that this backbone does not have
    shared = settings.model.head == "shared" or (
        settings.model.head == "auto" and settings.stream.scenario == "domain" and not routes
    )
    network = new_network(settings.model, image_shape, settings.run.seed, shared)
    if settings.model.weights:
        load_weights(network.backbone, Path(settings.model.weights))
    return network


def new_network(
    model: ModelSettings,
    image_shape: tuple[int, int, int],
    seed: int,
    shared_head: bool,
    weights: Mapping[str, Tensor] | None = None,
) -> Network:
    """A backbone with seeded weights, without heads.

    Args:
        weights: what will stand in the place of all that the backbone draws: where it is plain, nothing is drawn.
    """
    build = builder_of(model.name)
    if weights is not None and _plain.get(model.name) is build:
        backbone = without_memory(model, image_shape)  # to_empty would import torch's compiler
        own = backbone.state_dict()
        filled = {name: tensor.to(own.get(name, tensor).dtype, copy=True) for name, tensor in weights.items()}
        backbone.load_state_dict(filled, assign=True)
    else:
        with ambient_stream(seed, "init"):
            backbone = deepcopy(build(model, image_shape))
    products: list[int] = []
    with _counted(backbone, products):
        features = _feature_width(backbone, model.name, image_shape)
    taps = taps_of(model, backbone)
    network = Network(backbone, features, shared_head, taps)
    network.longest = max(products, default=0)
    if taps:
        with torch.no_grad():
            begun = advance(backbone, torch.zeros(1, *image_shape), taps[0], taps)
            assert begun.pooled is not None
            network.first = begun.pooled.shape[1]
            network.stacked = network.look(begun).stacked.shape[1]
    return network


def without_memory(model: ModelSettings, image_shape: tuple[int, int, int]) -> nn.Module:
    """A backbone that has sizes and no numbers. One of one's own may need real ones: then it fails in its own way."""
    build = builder_of(model.name)
    with torch.random.fork_rng(), torch.device("meta"), _Undrawn():
        return build(model, image_shape)


class _Undrawn(TorchFunctionMode):
    """Inside, no numbers are drawn: for tensors without memory torch would import its compiler for that."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(function, "__module__", "") == "torch.nn.init":
            return given["tensor"] if "tensor" in given else args[0]
        if function in (Tensor.normal_, Tensor.uniform_):
            return args[0]
        if function in (Tensor.mul, Tensor.__mul__) and isinstance(args[1], float):
            return args[0]
        return (torch.empty if function in (torch.rand, torch.randn) else function)(*args, **given)


@contextmanager
def _counted(backbone: nn.Module, products: list[int]) -> Iterator[None]:
    """Note the multiplications of every product that passes in between."""

    def note(layer: nn.Linear | nn.Conv2d, inputs: object, output: Tensor) -> None:
        products.append(output.numel() * layer.weight[0].numel())

    layers = [module for module in backbone.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _feature_width(backbone: nn.Module, name: str, image_shape: tuple[int, int, int]) -> int:
    """d of the features (n, d) that a backbone, left in evaluation mode, makes of images."""
    channels, height, width = image_shape
    what = f"model.name = {name!r} on images of {channels}×{height}×{width}"
    if next(backbone.parameters(), None) is None:
        raise UsageError(f"{what}: the backbone has no parameters, so there is nothing to learn together.")
    try:
        with torch.no_grad():
            shape = backbone.eval()(torch.zeros(1, *image_shape)).shape
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"{what} fails: {str(error).partition(chr(10))[0].rstrip('.')}.") from error
    if len(shape) != 2 or shape[0] != 1:
        raise UsageError(f"{what} gives {tuple(shape)} for one image; a backbone must give one vector, (1, d).")
    return shape[1]
