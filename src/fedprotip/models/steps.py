"""A backbone as a chain of steps, so that the part that cannot move any more runs only once per image."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Step:
    """One link of the chain."""

    names: tuple[str, ...]  # prefixes of its parameters and buffers; empty: it has none
    modules: tuple[nn.Module, ...]
    run: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Hidden:
    """What the first `steps` steps of a backbone made of a batch of images."""

    values: Tensor
    steps: int
    pooled: Tensor | None = None  # (n, …) pooled outputs of the stages on the way that statistics see

    def __len__(self) -> int:
        return len(self.values)

    def to(self, device: torch.device) -> "Hidden":
        pooled = None if self.pooled is None else self.pooled.to(device)
        return Hidden(self.values.to(device), self.steps, pooled)

    def __getitem__(self, rows: slice) -> "Hidden":
        return Hidden(self.values[rows], self.steps, None if self.pooled is None else self.pooled[rows])

    def flat(self) -> Tensor:
        """A row of numbers for every image."""
        values = self.values.flatten(1)
        return values if self.pooled is None else torch.cat([values, self.pooled], 1)

    def filled(self, rows: Tensor) -> "Hidden":
        """The same of other images, from their `flat` rows."""
        if self.pooled is None:
            return Hidden(rows.view(-1, *self.values.shape[1:]), self.steps)
        values, pooled = rows.split([rows.shape[1] - self.pooled.shape[1], self.pooled.shape[1]], 1)
        return Hidden(values.reshape(-1, *self.values.shape[1:]), self.steps, pooled.contiguous())


Inputs = Tensor | Hidden
"""Images, or what a frozen prefix made of them: `Network.embed` takes both."""


def channels_last(inputs: Inputs) -> Inputs:
    """The same images or maps with channels last in memory; other inputs as they are."""
    values = inputs.values if isinstance(inputs, Hidden) else inputs
    if values.dim() != 4:
        return inputs
    values = values.contiguous(memory_format=torch.channels_last)
    return Hidden(values, inputs.steps, inputs.pooled) if isinstance(inputs, Hidden) else values


def steps_of(backbone: nn.Module) -> list[Step]:
    """The chain from images to features; empty for a module that neither is a Sequential nor has `steps()`."""
    if isinstance(backbone, nn.Sequential):
        return [Step((f"{name}.",), (part,), part) for name, part in backbone.named_children()]
    steps = getattr(backbone, "steps", None)
    return steps() if steps else []


def still_steps(backbone: nn.Module, moving: Collection[str]) -> int:
    """How many steps at the beginning hold none of the `moving` parameters and buffers.

    Steps without parameters count when one with parameters stands before them, else there is nothing to gain.
    """
    owned = {name for name, _ in (*backbone.named_parameters(), *backbone.named_buffers())}
    still, found = 0, False
    for index, step in enumerate(steps_of(backbone)):
        if step.names and any(name.startswith(step.names) for name in moving):
            break
        found = found or bool(step.names and any(name.startswith(step.names) for name in owned))
        still = index + 1 if found else 0
    return still


def run_steps(backbone: nn.Module, values: Tensor, first: int, last: int | None = None) -> Tensor:
    """Apply the steps first … last − 1."""
    for step in steps_of(backbone)[first:last]:
        values = step.run(values)
    return values


def advance(backbone: nn.Module, inputs: Inputs, last: int, taps: Collection[int]) -> Hidden:
    """Go on until `last` steps are done, and pool what comes after as many steps as each of the `taps` says."""
    hidden = inputs if isinstance(inputs, Hidden) else Hidden(inputs, 0)
    values, found = hidden.values, [] if hidden.pooled is None else [hidden.pooled]
    for done, step in enumerate(steps_of(backbone)[hidden.steps : last], hidden.steps + 1):
        values = step.run(values)
        if done in taps:
            found.append(pool(values))
    return Hidden(values, max(last, hidden.steps), torch.cat(found, 1) if found else None)


def pool(values: Tensor) -> Tensor:
    """(n, c) of maps (n, c, h, w) or tokens (n, tokens, c): the mean over positions; vectors as they are."""
    if values.dim() == 4:
        return values.mean((2, 3))
    return values.mean(1) if values.dim() == 3 else values.flatten(1)
