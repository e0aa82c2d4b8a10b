"""A second look at images, as contrastive methods need it: cropped and resized, mirrored, other colours, grey.

All numbers are drawn first, a row for every image; what follows is pure and runs on the images' device.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

RATIO = math.log(4 / 3)
"""A crop is at most 4 : 3 or 3 : 4."""
LIGHT = (0.299, 0.587, 0.114)
"""How bright the eye finds red, green and blue (ITU-R 601)."""


@dataclass(frozen=True)
class Views:
    """What is done to images, and how often."""

    crop: float = 0.2  # the smallest share of the area that a crop has
    flip: float = 0.5  # chance of being mirrored
    jitter: float = 0.8  # chance of other colours: brightness, contrast and saturation by a factor, and hue
    strength: float = 0.4  # those factors are from 1 − strength to 1 + strength; hue moves by a quarter of it at most
    grey: float = 0.2  # chance of losing all colour


def second_look(images: Tensor, how: Views, chance: torch.Generator) -> Tensor:
    """Other views of images (n, c, h, w) with values from 0 to 1. Other than three channels have no colours."""
    numbers = torch.rand(len(images), 11, generator=chance).to(images).unbind(1)
    images = cropped(images, how.crop, torch.stack(numbers[:4], 1), numbers[4] < how.flip)
    changed = coloured(images, how.strength * (2 * torch.stack(numbers[5:9], 1) - 1))
    images = torch.where((numbers[9] < how.jitter).view(-1, 1, 1, 1), changed, images)
    if images.shape[1] == 3:
        images = torch.where((numbers[10] < how.grey).view(-1, 1, 1, 1), brightness(images).expand_as(images), images)
    return images


def cropped(images: Tensor, least: float, numbers: Tensor, mirrored: Tensor) -> Tensor:
    """A part of each image (n, c, h, w) at the former size; `numbers` (n, 4): its area, ratio, column and row."""
    area, ratio, left, top = numbers.unbind(1)
    area = least + (1 - least) * area
    stretch = torch.exp(RATIO * (2 * ratio - 1)).sqrt()
    wide, high = (area.sqrt() * stretch).clamp_max(1), (area.sqrt() / stretch).clamp_max(1)
    zero, sign = torch.zeros_like(wide), 1 - 2 * mirrored.to(wide)
    across = torch.stack([wide * sign, zero, (1 - wide) * (2 * left - 1)], 1)
    down = torch.stack([zero, high, (1 - high) * (2 * top - 1)], 1)
    grid = F.affine_grid(torch.stack([across, down], 1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def coloured(images: Tensor, changes: Tensor) -> Tensor:
    """Images of 0 … 1 in other colours; `changes` (n, 4): of brightness, contrast, saturation, and 4 times of hue."""
    bright, contrast, saturation, hue = (change.view(-1, 1, 1, 1) for change in changes.unbind(1))
    images = (images * (1 + bright)).clamp(0, 1)
    mean = brightness(images).mean((1, 2, 3), keepdim=True)
    images = (mean + (images - mean) * (1 + contrast)).clamp(0, 1)
    if images.shape[1] != 3:
        return images
    grey = brightness(images)
    return turned((grey + (images - grey) * (1 + saturation)).clamp(0, 1), hue / 4).clamp(0, 1)


def turned(images: Tensor, hue: Tensor) -> Tensor:
    """Colours (n, 3, h, w) turned around the axis of greys by a share (n, 1, 1, 1) of the full circle."""
    angle = 2 * math.pi * hue
    mean = images.mean(1, keepdim=True)
    colour, side = images - mean, (images.roll(1, 1) - images.roll(-1, 1)) / math.sqrt(3)
    return mean + colour * angle.cos() + side * angle.sin()


def brightness(images: Tensor) -> Tensor:
    """(n, 1, h, w) of images (n, c, h, w)."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    return (images * torch.tensor(LIGHT).to(images).view(1, 3, 1, 1)).sum(1, keepdim=True)
