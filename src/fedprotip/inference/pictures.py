"""Whatever a user calls an image, as the images a run was trained on: files, Pillow's, arrays, tensors, of any size."""

from collections.abc import Iterable, Sequence
from io import IOBase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedprotip.errors import UsageError
from fedprotip.stream.images import FileImages, Unreadable, reason, to_rgb, upright
from fedprotip.stream.pixels import CHANNELS, as_bytes, as_images
from fedprotip.stream.plan import Pixels
from fedprotip.stream.transforms import grey

Picture = str | Path | Image.Image | np.ndarray | Tensor
Pictures = Picture | Sequence[Picture]
"""One image or several."""


def as_pixels(images: Pictures, pixels: Pixels) -> Tensor:
    """Images (n, c, h, w) uint8 of a shape that the run knows.

    Arrays are (n, h, w), (n, h, w, c) or (n, c, h, w), or one image (h, w), (h, w, c), (c, h, w); see `as_images` for
    their values. What has another size is brought to that of the training images, as those were.
    """
    if isinstance(images, str | Path | Image.Image):
        images = [images]
    if isinstance(images, np.ndarray | Tensor):
        return _of_array(images, pixels)
    if not isinstance(images, Iterable) or isinstance(images, bytes | IOBase):
        raise UsageError(f"images must be files, Pillow images, arrays or tensors, not {type(images).__name__}.")
    given = list(images)
    if not given:
        raise UsageError("There is no image to look at.")
    if all(isinstance(one, str | Path) for one in given):
        return _of_files([str(one) for one in given], pixels)
    return torch.cat([_of_one(one, pixels) for one in given])


def _of_one(image: Any, pixels: Pixels) -> Tensor:
    """(1, c, h, w)"""
    if isinstance(image, str | Path):
        return _of_files([str(image)], pixels)
    if isinstance(image, Image.Image):
        try:
            rgb = to_rgb(upright(image))
        except Exception as error:  # Pillow decodes late, and raises whatever a broken file leads it to
            name = getattr(image, "filename", "") or "A Pillow image"
            raise UsageError(f"{name} cannot be read as an image ({reason(error)}).") from None
        return _coloured(_frame(pixels).fitted(rgb)[None], pixels)
    if isinstance(image, np.ndarray | Tensor):
        found = _of_array(image, pixels)
        if len(found) != 1:
            raise UsageError(f"images[…] of shape {tuple(image.shape)} is not one image; give arrays of several alone.")
        return found
    raise UsageError(f"images must be files, Pillow images, arrays or tensors, not {type(image).__name__}.")


def _of_files(paths: list[str], pixels: Pixels) -> Tensor:
    files = _frame(pixels, paths)
    try:
        found = files[torch.arange(len(files))]
    except Unreadable as error:  # nobody is training here, so nothing is to be resumed
        raise Unreadable(f"{error.path} cannot be read as an image ({error.why}).", error.path, error.why) from None
    return _coloured(found, pixels)


def _of_array(images: np.ndarray | Tensor, pixels: Pixels) -> Tensor:
    if isinstance(images, Tensor):
        images = (images.detach().float() if images.is_floating_point() else images.detach()).cpu().numpy()
    known = (pixels.shape, pixels.given)
    numbers = images[None] if _is_one(images, pixels) else images
    if not numbers.size:
        raise UsageError(f"Images of shape {tuple(images.shape)}: there is no image to look at.")
    if numbers.shape[1:] in known:
        return torch.from_numpy(np.ascontiguousarray(as_bytes(numbers, "images")))
    found = torch.from_numpy(as_images(numbers, "images"))
    if tuple(found.shape[2:]) not in [shape[1:] for shape in known]:
        frame = _frame(pixels)
        rgb = (found if found.shape[1] == 3 else found.expand(-1, 3, -1, -1)).permute(0, 2, 3, 1).numpy()
        found = torch.stack([frame.fitted(Image.fromarray(one)) for one in rgb])
    return _coloured(found, pixels)


def _is_one(images: np.ndarray, pixels: Pixels) -> bool:
    """Whether an array is a single image and not a row of them."""
    if images.ndim == 3 and images.shape not in (pixels.shape, pixels.given):
        first, last = images.shape[0] in CHANNELS, images.shape[2] in CHANNELS
        return last or (first and images.shape[0] > 1 and pixels.shape[0] > 1)
    return images.ndim in (2, 3)


def _coloured(images: Tensor, pixels: Pixels) -> Tensor:
    """Images (n, 1 or 3, h, w) with as many channels as the run knows."""
    channels = pixels.given[0]
    if images.shape[1] == channels:
        return images
    return grey(images) if channels == 1 else images.expand(-1, channels, -1, -1).contiguous()


def _frame(pixels: Pixels, paths: Sequence[str] = ()) -> FileImages:
    height, width = pixels.given[1:]
    return FileImages(list(paths), (height, width), pixels.resize or (height, width), pixels.fit)
