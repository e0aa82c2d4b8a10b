"""How images look to the model: for methods that make images of their own, and send them as uint8 like any others."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedprotip.stream.plan import Pixels
from fedprotip.stream.transforms import Augmentation, augment, draw, flip, random_crop


@dataclass(frozen=True)
class Look:
    pixels: Pixels
    augmentation: Augmentation
    """What `train.augment = "standard"` does to images of the data."""
    varied: Augmentation | None
    """What is done to those that are trained on; None: nothing."""
    classes: tuple[str, ...]
    """Names of the global labels."""

    def inputs(self, scaled: Tensor) -> Tensor:
        """Images (n, c, h, w) of 0…1, of any size, as the model takes them; gradients pass."""
        return self.pixels.normalised(scaled)

    def shaken(self, scaled: Tensor, chance: torch.Generator) -> Tensor:
        """Images of 0…1 cropped and flipped at random, as far as those of the data may be; gradients pass."""
        draws = draw(len(scaled), chance)
        moved = random_crop(scaled, self.augmentation.pad, draws.position)
        return flip(moved, (draws.flip < 0.5).to(scaled.device)) if self.augmentation.flip else moved

    def batch(self, images: Tensor, chance: torch.Generator | None = None) -> Tensor:
        """Images (n, c, h, w) uint8 as the model takes them; with chance varied like those that are trained on."""
        if chance is None or self.varied is None:
            return self.inputs(images.float() / 255)
        return self.inputs(augment(images, draw(len(images), chance), self.varied))
