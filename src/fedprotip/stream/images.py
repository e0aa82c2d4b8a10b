"""Images that are decoded when they are needed, by a small pool of threads.

`FileImages` is indexed like a tensor of uint8 (n, 3, s, s), so a dataset holds either. Work is handed out and
collected in the order of the samples: the result never depends on which thread was faster.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fedprotip.errors import UsageError, shortened
from fedprotip.stream.transforms import Draws, resized_box

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
PROGRAMS = ("EPS",)
"""Formats of Pillow that are programs, which another program would run."""
LONGEST = 100
"""Sides of a picture that are more unequal are cut to the middle first: scaled up it would fill the memory."""
T = TypeVar("T")
Crop = tuple[list[float], list[list[float]]]
"""Draws of a random resized crop of one image: `Draws.position` and `Draws.boxes`."""


@dataclass(frozen=True)
class FileImages:
    """Image files, seen as uint8 (n, 3, size, size): shorter side brought to `resize`, then the middle cut out."""

    paths: list[str]
    size: int
    resize: int
    workers: int = 4

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.paths), 3, self.size, self.size))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, chosen: Tensor) -> Tensor:
        return self.request(chosen)()

    def take(self, chosen: np.ndarray) -> "FileImages":
        """The chosen files, still undecoded."""
        return FileImages([self.paths[i] for i in chosen], self.size, self.resize, self.workers)

    def request(self, chosen: Tensor, draws: Draws | None = None) -> Callable[[], Tensor]:
        """Start decoding; the function returned waits for the images (n, 3, size, size).

        Args:
            chosen: positions (n,). draws: take a random resized crop of each instead of its middle.
        """
        pool = _pool(self.workers)
        crops: Sequence[Crop | None] = [None] * len(chosen)
        if draws is not None:
            crops = list(zip(draws.position.tolist(), draws.boxes.tolist(), strict=True))
        waiting = [
            pool.submit(self._decode, self.paths[i], crop) for i, crop in zip(chosen.tolist(), crops, strict=True)
        ]

        def collect() -> Tensor:
            images = torch.empty((len(waiting), 3, self.size, self.size), dtype=torch.uint8)
            for place, one in enumerate(waiting):
                images[place] = torch.from_numpy(one.result())
            return images

        return collect

    def faults(self) -> Iterator[str]:
        """Of every file why it cannot be decoded, empty if it can; reads them all."""
        return _pool(self.workers).map(why_unreadable, self.paths)

    def _decode(self, path: str, crop: Crop | None) -> np.ndarray:
        image = open_rgb(path)
        if crop is None:
            return middle(image, self.resize, self.size)
        box = resized_box(*image.size, *crop)
        return _planes(image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box))


Images = Tensor | FileImages
"""In memory: uint8 (n, c, h, w). In files: the same, decoded when indexed."""


def is_image(path: Path) -> bool:
    """Whether a file is taken for an image, by its name; hidden ones (macOS leaves ._photo.jpg) are not."""
    return _is_called_image(path) and path.is_file()


def is_no_image(path: Path) -> bool:
    """Whether it has the name of an image but is a link to nothing, a pipe or a device."""
    return _is_called_image(path) and not path.is_file() and not path.is_dir()


def _is_called_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def photos(paths: list[str], size: int, workers: int) -> FileImages:
    """Large photographs as the paper reads them: shorter side to 256, then the middle 224 (or size, in that ratio)."""
    size = size or 224
    return FileImages(paths, size, size * 256 // 224, workers)


def ahead(requests: Iterator[Callable[[], T]]) -> Iterator[T]:
    """Results in order; while one is used, the next is already being made."""
    waiting = next(requests, None)
    while waiting is not None:
        following = next(requests, None)
        yield waiting()
        waiting = following


def open_rgb(path: str) -> Image.Image:
    """A decoded RGB image, turned as its EXIF says, from grey, palette, CMYK or 16 bits; else a UsageError."""
    try:
        return _open(path)
    except Exception as error:  # decoders raise whatever a broken file leads them to
        raise UsageError(
            f"{path} cannot be read as an image ({_reason(error)}); mend it and run or resume again "
            "(with --accept-data, if it is another file then), or start anew without it "
            "(fedprotip data check finds all such files)."
        ) from None


def why_unreadable(path: str) -> str:
    """Empty when the file can be decoded, else why not."""
    try:
        _open(path)
    except Exception as error:
        return _reason(error)
    return ""


def middle(image: Image.Image, resize: int, size: int) -> np.ndarray:
    """Shorter side to `resize`, then the middle square: (3, size, size) uint8."""
    width, height = image.size
    short = min(width, height)
    if max(width, height) > LONGEST * short:
        width, height = min(width, LONGEST * short), min(height, LONGEST * short)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    wide, high = (max(size, int(resize * side / short)) for side in (width, height))
    if (wide, high) != image.size:
        image = image.resize((wide, high), Image.Resampling.BILINEAR)
    left, top = round((wide - size) / 2), round((high - size) / 2)
    return _planes(image.crop((left, top, left + size, top + size)))


def shorter_side(paths: list[str]) -> int:
    """Of the first file whose header can be read; 0: of none."""
    for path in paths:
        try:
            with Image.open(path, formats=_formats()) as image:
                return min(image.size)
        except Exception:  # the next one will do; a broken file is reported when it is decoded
            continue
    return 0


def _planes(image: Image.Image) -> np.ndarray:
    return np.asarray(image).transpose(2, 0, 1).copy()


def _open(path: str) -> Image.Image:
    with Image.open(path, formats=_formats()) as image:
        image.load()
        with suppress(Exception):  # broken EXIF is no reason to lose the image; in place it is turned before EXIF is
            ImageOps.exif_transpose(image, in_place=True)
        return _to_rgb(image)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "I":  # 16 bits too, as some versions of Pillow and some TIFF files say them
        pixels = np.asarray(image)
        if pixels.min() < 0 or pixels.max() >= 2**16:
            raise ValueError("its pixels have 32 bits; save it with 8 or 16")
        return Image.fromarray((pixels >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; save it with 8 or 16 bits")
    if "transparency" in image.info:
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    if isinstance(error, Image.UnidentifiedImageError):
        return "unknown or damaged format"
    return shortened(" ".join(str(error).split()).rstrip(".") or type(error).__name__)


@lru_cache(maxsize=1)
def _formats() -> list[str]:
    Image.init()  # Pillow looks for further formats at the first unknown file, and threads would race for them
    return [name for name in Image.ID if name not in PROGRAMS]


@lru_cache(maxsize=4)
def _pool(workers: int) -> ThreadPoolExecutor:
    _formats()
    return ThreadPoolExecutor(workers, thread_name_prefix="decode")


if hasattr(os, "register_at_fork"):  # threads do not survive a fork
    os.register_at_fork(after_in_child=_pool.cache_clear)
