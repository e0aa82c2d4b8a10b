"""What a run is about, without its data: classes, tasks, how images look to the model, how answers are made.

`plan.json` in the run folder is this record. With it the tensors of the folder answer alone: whoever loads them needs
neither the training data nor the training settings.
"""

import math
from functools import cached_property
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedprotip.settings import ModelSettings, Section
from fedprotip.stream.transforms import fitted

Options = dict[str, bool | int | float | str]
Shape = tuple[int, int, int]
"""(channels, height, width)"""
LARGEST = 2**34
"""Numbers of the largest image."""


class WayPlan(Section):
    """A router and the expert that answers once it has spoken, both by name."""

    router: str
    expert: str
    hard: bool = Field(True, description="The best task alone counts; else log p(task) and log p(class | task) add up.")
    options: Options = Field({}, description="Of the router.")


class Answering(Section):
    """How samples are answered: names that `inference/` has builders for."""

    experts: dict[str, Options] = Field(
        {"heads": {}}, description="With their options; the first is the model's own, for the mode agnostic."
    )
    ways: dict[str, WayPlan] = Field({}, description="By name; without any no task is predicted.")
    chosen: str = Field("", description="The way of modes single and batch64; the others are reported beside it.")
    tried: tuple[str, ...] = Field(
        (), description="Ways that clients try on held-back samples, simple ones first; they calibrate each of them."
    )
    auto: bool = Field(False, description="The way that was right most often there is chosen, if anything is known.")

    @model_validator(mode="after")
    def _everything_named_is_there(self) -> "Answering":
        if not self.experts:
            raise ValueError("there is no expert")
        if (self.chosen or self.ways) and self.chosen not in self.ways:
            raise ValueError(f"chosen = {self.chosen!r} is none of the ways")
        if unknown := [name for name in self.tried if name not in self.ways]:
            raise ValueError(f"tried has {unknown[0]!r}, which is none of the ways")
        for name, way in self.ways.items():
            if way.expert not in self.experts:
                raise ValueError(f"the way {name!r} names the expert {way.expert!r}, which is not there")
        return self


class Pixels(Section):
    """How images look to the model."""

    shape: Shape
    given: Shape = Field(description="Of the dataset's own images; they are brought to `shape`.")
    mean: tuple[float, ...] = Field(description="Of every channel or of all, for values from 0 to 1; likewise std.")
    std: tuple[float, ...]
    fit: Literal["crop", "pad", "stretch"] = Field("stretch", description="How images get from `given` to `shape`.")
    resize: tuple[int, int] | None = Field(
        None, description="(height, width) that files are scaled to cover before the middle is cut out; None: `given`."
    )

    @model_validator(mode="after")
    def _is_possible(self) -> "Pixels":
        for name, shape in (("shape", self.shape), ("given", self.given), ("resize", self.resize or (1, 1))):
            if min(shape) < 1 or math.prod(shape) > LARGEST:
                raise ValueError(f"{name} = {shape} is no image, or has more than {LARGEST:,} numbers")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.shape[0]) or not all(map(math.isfinite, values)):
                raise ValueError(f"{name} = {values} does not fit {self.shape[0]} channels")
        if min(self.std) <= 0:
            raise ValueError(f"std = {self.std} is not above 0")
        return self

    def normalised(self, scaled: Tensor) -> Tensor:
        """Images (n, c, h, w) with values from 0 to 1 as the model sees them."""
        if scaled.shape[1:] != self.shape:
            scaled = fitted(scaled, self.shape[1:], self.fit)
        mean, std = (part.to(scaled) for part in self._scale)
        return (scaled - mean) / std

    def scaled(self, normalised: Tensor) -> Tensor:
        """Images as the model sees them with values from 0 to 1 again."""
        mean, std = (part.to(normalised) for part in self._scale)
        return (normalised * std + mean).clamp(0, 1)

    @cached_property
    def _scale(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.mean).view(1, -1, 1, 1), torch.tensor(self.std).view(1, -1, 1, 1)


class TaskPlan(Section):
    """One task: its name and its classes (global labels, in the order of its head)."""

    name: str
    classes: tuple[int, ...]


class Plan(Section):
    """All that answers need beside tensors."""

    classes: tuple[str, ...] = Field(description="Names of the global labels.")
    tasks: tuple[TaskPlan, ...]
    scenario: Literal["class", "domain"]
    pixels: Pixels
    model: ModelSettings = Field(description="What rebuilds the backbone; its weights are a file of the run folder.")
    seed: int
    answering: Answering

    @model_validator(mode="after")
    def _every_class_has_a_name(self) -> "Plan":
        if not self.tasks:
            raise ValueError("there is no task")
        for task in self.tasks:
            if not task.classes or len(set(task.classes)) < len(task.classes):
                raise ValueError(f"the task {task.name!r} has no classes, or one of them twice")
            if min(task.classes) < 0 or max(task.classes) >= len(self.classes):
                raise ValueError(f"the task {task.name!r} has a class without a name")
        return self
