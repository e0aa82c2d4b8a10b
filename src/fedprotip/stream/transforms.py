"""Augmentation and resizing, vectorised on the batch.

All chance is drawn first, one row of numbers per sample (`draw`); what follows is pure. So a sample's result
depends on its own row alone, never on its neighbours or on which thread decoded it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Size = tuple[int, int]
"""(height, width)"""
TRIES = 10
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""A random resized crop covers this share of the image, with this range of width : height."""


@dataclass(frozen=True)
class Augmentation:
    """What `train.augment = "standard"` does to the images of a dataset; the default is that of CIFAR-100."""

    pad: int = 4  # random crop of the former size after padding with black
    flip: bool = True  # left and right
    brightness: float = 63 / 255  # a factor from 1 − b to 1 + b
    resized: bool = False  # a random resized crop while decoding; only for images in files

    def mirrored(self) -> "Augmentation":
        """No more of it than left and right (`train.augment = "flip"`)."""
        return Augmentation(pad=0, flip=self.flip, brightness=0.0)


SMALL_PHOTOS = Augmentation()
LARGE_PHOTOS = Augmentation(pad=0, brightness=0.0, resized=True)


@dataclass(frozen=True)
class Draws:
    """Uniform numbers in [0, 1), one row per sample."""

    position: Tensor  # (n, 2) row and column of a crop
    flip: Tensor  # (n,)
    brightness: Tensor  # (n,)
    boxes: Tensor  # (n, TRIES, 2) share of the area and ratio of a resized crop

    def __getitem__(self, rows: Tensor) -> "Draws":
        return Draws(self.position[rows], self.flip[rows], self.brightness[rows], self.boxes[rows])


def draw(n: int, generator: torch.Generator) -> Draws:
    return _rows(torch.rand(n, 4 + 2 * TRIES, generator=generator, dtype=torch.float64))


def _rows(numbers: Tensor) -> Draws:
    return Draws(numbers[:, :2], numbers[:, 2], numbers[:, 3], numbers[:, 4:].unflatten(1, (TRIES, 2)))


def both_ways(n: int) -> Draws:
    """So many samples as they are, then all of them mirrored: every view that flips can make."""
    numbers = torch.zeros(2 * n, 4 + 2 * TRIES, dtype=torch.float64)
    numbers[:n, 2] = 1
    return _rows(numbers)


def augment(images: Tensor, draws: Draws, how: Augmentation) -> Tensor:
    """Images (n, c, h, w) uint8 → cropped, flipped and lit, (n, c, h, w) float in 0…1."""
    images = random_crop(images, how.pad, draws.position)
    if how.flip:
        images = flip(images, draws.flip < 0.5)
    scaled = images.float() / 255
    return brighten(scaled, 1 + how.brightness * (2 * draws.brightness - 1)) if how.brightness else scaled


def random_crop(images: Tensor, pad: int, position: Tensor) -> Tensor:
    """Pad (n, c, h, w) with zeros and cut (h, w) out at `position` (n, 2) in [0, 1), each its own."""
    if not pad:
        return images
    n, _, height, width = images.shape
    corner = (position * (2 * pad + 1)).long()
    rows = corner[:, :1] + torch.arange(height)
    columns = corner[:, 1:] + torch.arange(width)
    padded = F.pad(images, [pad] * 4)
    cut = padded[torch.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # (n, h, w, c)
    return cut.permute(0, 3, 1, 2).contiguous()


def flip(images: Tensor, chosen: Tensor) -> Tensor:
    """Mirror the chosen (n,) of the images (n, c, h, w) left and right."""
    return torch.where(chosen.view(-1, 1, 1, 1), images.flip(3), images)


def brighten(images: Tensor, factors: Tensor) -> Tensor:
    """Multiply each image (n, c, h, w) of 0…1 by its factor (n,) and clip."""
    return (images * factors.to(images.dtype).view(-1, 1, 1, 1)).clamp(0, 1)


def resized_box(
    width: int, height: int, position: Sequence[float], boxes: Sequence[Sequence[float]], aspect: float = 1.0
) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of a random resized crop: the first try that fits, else the middle.

    Args:
        position: row and column in [0, 1). boxes: (TRIES, 2) share of the area and ratio in [0, 1).
        aspect: width : height of what the crop becomes.
    """
    for share, stretch in boxes:
        area = width * height * (AREA[0] + share * (AREA[1] - AREA[0]))
        ratio = aspect * math.exp(math.log(RATIO[0]) + stretch * math.log(RATIO[1] / RATIO[0]))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            top, left = int(position[0] * (height - h + 1)), int(position[1] * (width - w + 1))
            return left, top, left + w, top + h
    widest, highest = round(height * RATIO[1] * aspect), round(width / RATIO[0] / aspect)
    w, h = min(width, max(1, widest)), min(height, max(1, highest))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def fitted(images: Tensor, size: Size, fit: str) -> Tensor:
    """Float images (n, c, h, w) at `size` as `data.fit` says, bilinear and free of aliasing."""
    if images.shape[2:] == size:
        return images
    if fit == "crop":
        images = _middle(images, size)
    inner = within((images.shape[2], images.shape[3]), size) if fit == "pad" else size
    resized = F.interpolate(images, inner, mode="bilinear", antialias=True, align_corners=False)
    top, left = (size[0] - inner[0]) // 2, (size[1] - inner[1]) // 2
    return F.pad(resized, [left, size[1] - inner[1] - left, top, size[0] - inner[0] - top])


def within(given: Size, size: Size) -> Size:
    """The largest shape inside `size` that has the proportions of `given`."""
    scale = min(size[0] / given[0], size[1] / given[1])
    height, width = (max(1, min(most, round(side * scale))) for side, most in zip(given, size, strict=True))
    return height, width


def _middle(images: Tensor, size: Size) -> Tensor:
    """The largest part of images (n, c, h, w), around their middle, that has the proportions of `size`."""
    height, width = images.shape[2:]
    high = min(height, max(1, round(width * size[0] / size[1])))
    wide = min(width, max(1, round(height * size[1] / size[0])))
    top, left = (height - high) // 2, (width - wide) // 2
    return images[:, :, top : top + high, left : left + wide]


def grey(images: Tensor) -> Tensor:
    """RGB images (n, 3, h, w) uint8 → (n, 1, h, w) uint8, weighted as the eye does (ITU-R 601)."""
    weights = torch.tensor([299, 587, 114]).view(1, 3, 1, 1)
    return ((images.int() * weights).sum(1, keepdim=True) // 1000).to(torch.uint8)


def resize_area(images: np.ndarray, size: int) -> np.ndarray:
    """Grey images (n, h, w) uint8 → (n, size, size) uint8: each new pixel is the exact mean of the area it covers."""
    if images.shape[1:] == (size, size):
        return images
    rows, columns = (_coverage(old, size) for old in images.shape[1:])
    resized = np.empty((len(images), size, size), np.uint8)
    for start in range(0, len(images), 4096):
        part = images[start : start + 4096].astype(np.float64)
        resized[start : start + 4096] = np.rint(rows @ part @ columns.T)
    return resized


def _coverage(old: int, new: int) -> np.ndarray:
    """(new, old): the share of each new pixel that lies on each old one; rows sum to 1."""
    edges = np.arange(new + 1) * (old / new)
    overlap = np.minimum(edges[1:, None], np.arange(1, old + 1)) - np.maximum(edges[:-1, None], np.arange(old))
    return np.maximum(overlap, 0) * (new / old)
