"""Images that are decoded when they are needed, by a small pool of threads.

`FileImages` is indexed like a tensor of uint8 (n, 3, h, w), so a dataset holds either. Work is handed out and
collected in the order of the samples: the result never depends on which thread was faster.
"""

import io
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fedprotip.errors import UsageError, shortened
from fedprotip.stream.transforms import Draws, Size, resized_box, within

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
PROGRAMS = ("EPS",)
"""Formats of Pillow that are programs, which another program would run."""
LONGEST = 100
"""Sides of a picture that are more unequal are cut to the middle first: scaled up it would fill the memory."""
SMALL = 64
"""Images of at most this side, or of as many pixels, live in memory; larger ones stay in their files."""
PHOTO = 224
"""The shorter side of photographs, unless a setting says otherwise."""
LOOKED = 64
"""Files whose headers are read to see which shape images have."""
ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)
"""The EXIF tag, and its values that lay a picture on its side."""
CLEAR = ("LA", "La", "PA", "RGBA", "RGBa")
"""Modes of Pillow with an alpha channel."""
T = TypeVar("T")
Crop = tuple[list[float], list[list[float]]]
"""Draws of a random resized crop of one image: `Draws.position` and `Draws.boxes`."""


class Unreadable(UsageError):
    """A file that cannot be decoded, and why."""

    def __init__(self, text: str, path: str, why: str) -> None:
        super().__init__(text)
        self.path, self.why = path, why


@dataclass(frozen=True)
class FileImages:
    """Image files, seen as uint8 (n, 3, height, width)."""

    paths: list[str]
    size: Size
    resize: Size
    """With fit = "crop": what an image is scaled to cover before the middle, of `size`, is cut out."""
    fit: str = "crop"
    workers: int = 4

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.paths), 3, *self.size))

    @property
    def small(self) -> bool:
        """Whether all of them can live in memory."""
        return self.size[0] * self.size[1] <= SMALL**2

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, chosen: Tensor) -> Tensor:
        return self.request(chosen)()

    def take(self, chosen: np.ndarray) -> "FileImages":
        """The chosen files, still undecoded."""
        return replace(self, paths=[self.paths[i] for i in chosen])

    def request(self, chosen: Tensor, draws: Draws | None = None) -> Callable[[], Tensor]:
        """Start decoding; the function returned waits for the images (n, 3, height, width).

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
            images = torch.empty((len(waiting), 3, *self.size), dtype=torch.uint8)
            for place, one in enumerate(waiting):
                images[place] = torch.from_numpy(one.result())
            return images

        return collect

    def faults(self) -> Iterator[str]:
        """Of every file why it cannot be decoded, empty if it can; reads them all."""
        return _pool(self.workers).map(why_unreadable, self.paths)

    def _decode(self, path: str, crop: Crop | None) -> np.ndarray:
        image, (height, width) = open_rgb(path), self.size
        if crop is not None:
            box = resized_box(*image.size, *crop, aspect=width / height)
            return _planes(image.resize((width, height), Image.Resampling.BILINEAR, box=box))
        return self._brought(image)

    def fitted(self, image: Image.Image) -> Tensor:
        """An RGB image that is in memory already, brought to size as files are: (3, height, width) uint8."""
        return torch.from_numpy(self._brought(image))

    def _brought(self, image: Image.Image) -> np.ndarray:
        if self.fit == "crop":
            return middle(image, self.resize, self.size)
        return _planes(_padded(image, self.size) if self.fit == "pad" else _stretched(image, self.size))


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


def photos(paths: list[str], size: Size | None, workers: int, fit: str = "crop") -> FileImages:
    """Large photographs as the paper reads them: shorter side to 256, then the middle 224 (or size, in that ratio)."""
    height, width = size or (PHOTO, PHOTO)
    return FileImages(paths, (height, width), (height * 256 // PHOTO, width * 256 // PHOTO), fit, workers)


def ahead(requests: Iterator[Callable[[], T]]) -> Iterator[T]:
    """Results in order; while one is used, the next is already being made."""
    waiting = next(requests, None)
    while waiting is not None:
        following = next(requests, None)
        yield waiting()
        waiting = following


def decode(data: bytes, formats: tuple[str, ...], most: int) -> Image.Image:
    """A picture that somebody sent, as `open_rgb` would read it from a file; else a UsageError.

    Args:
        formats: names that Pillow has for what may come; most: pixels it may have, compared before any is decoded.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            return _open(io.BytesIO(data), formats, most)
    except Exception as error:  # decoders raise whatever a broken file leads them to
        raise UsageError(f"it cannot be read as an image ({reason(error)})") from None


def open_rgb(path: str) -> Image.Image:
    """A decoded RGB image, turned as its EXIF says, from grey, palette, CMYK or 16 bits; else `Unreadable`."""
    try:
        return _open(path)
    except Exception as error:  # decoders raise whatever a broken file leads them to
        why = reason(error)
        raise Unreadable(
            f"{path} cannot be read as an image ({why}); mend it and run or resume again "
            "(with --accept-data, if it is another file then), or start anew without it "
            "(fedprotip data check finds all such files).",
            path,
            why,
        ) from None


def why_unreadable(path: str) -> str:
    """Empty when the file can be decoded, else why not."""
    try:
        _open(path)
    except Exception as error:
        return reason(error)
    return ""


def middle(image: Image.Image, resize: Size, size: Size) -> np.ndarray:
    """Scaled until it just covers `resize`, then the middle: (3, height, width) uint8."""
    width, height = image.size
    short = min(width, height)
    if max(width, height) > LONGEST * short:
        width, height = min(width, LONGEST * short), min(height, LONGEST * short)
        left, top = (image.width - width) // 2, (image.height - height) // 2
        image = image.crop((left, top, left + width, top + height))
    to, given = (resize[0], height) if resize[0] * width >= resize[1] * height else (resize[1], width)
    high, wide = max(size[0], int(to * height / given)), max(size[1], int(to * width / given))
    image = _stretched(image, (high, wide))
    left, top = round((wide - size[1]) / 2), round((high - size[0]) / 2)
    return _planes(image.crop((left, top, left + size[1], top + size[0])))


def usual_shape(paths: list[str]) -> tuple[Size | None, list[Size]]:
    """The shape that images are brought to when nobody says one, and all shapes seen, the commonest first.

    It is the one that at least half of them have, after photographs were made small; else a square. None: of no file
    could the header be read.
    """
    spread = [paths[len(paths) * place // LOOKED] for place in range(LOOKED)] if len(paths) > LOOKED else paths
    seen = Counter(_shapes(spread)) or Counter(list(_shapes(paths))[:1])
    shapes = [shape for shape, _ in seen.most_common()]
    if not shapes:
        return None, []
    if 2 * seen[shapes[0]] >= seen.total():
        return shapes[0], shapes
    side = min(shapes[0])
    return (side, side), shapes


def _shapes(paths: Iterable[str]) -> Iterator[Size]:
    """Of every file whose header can be read its (height, width) as it is looked at, the shorter side `PHOTO` at most.

    A broken file is reported when it is decoded.
    """
    for path in paths:
        with suppress(Exception), Image.open(path, formats=_formats()) as image:
            width, height = image.size
            with suppress(Exception):  # broken EXIF
                if image.getexif().get(ORIENTATION) in TURNED:
                    width, height = height, width
            short = min(width, height)
            scale, most = min(1.0, PHOTO / short), LONGEST * short
            yield max(1, round(min(height, most) * scale)), max(1, round(min(width, most) * scale))


def _stretched(image: Image.Image, size: Size) -> Image.Image:
    height, width = size
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BILINEAR)


def _padded(image: Image.Image, size: Size) -> Image.Image:
    """As large as it fits, in the middle of a black one."""
    height, width = within((image.height, image.width), size)
    found = Image.new("RGB", (size[1], size[0]))
    found.paste(_stretched(image, (height, width)), ((size[1] - width) // 2, (size[0] - height) // 2))
    return found


def _planes(image: Image.Image) -> np.ndarray:
    return np.asarray(image).transpose(2, 0, 1).copy()


def _open(source: str | io.BytesIO, formats: tuple[str, ...] | None = None, most: int | None = None) -> Image.Image:
    if isinstance(source, str) and os.path.exists(source) and not os.path.isfile(source):
        raise ValueError("it is a folder, a pipe or a device, not a file")  # a pipe would be waited for, for ever
    if isinstance(source, str) and not os.path.getsize(source):
        raise ValueError("it is empty")
    with Image.open(source, formats=formats or _formats()) as image:
        if most is not None and image.width * image.height > most:
            raise ValueError(f"it has {image.width * image.height:,} pixels, and {most:,} are the most")
        image.load()
        return to_rgb(_upright(image))


def upright(image: Image.Image) -> Image.Image:
    """A copy of an image, turned as its EXIF says, as one from a file would be."""
    return _upright(image.copy()) if image.getexif().get(ORIENTATION, 1) != 1 else image


def _upright(image: Image.Image) -> Image.Image:
    with suppress(Exception):  # broken EXIF is no reason to lose the image; in place it is turned before EXIF is
        ImageOps.exif_transpose(image, in_place=True)
    return image


def to_rgb(image: Image.Image) -> Image.Image:
    """16 bits are scaled, not cut off; what is transparent shows white."""
    if image.mode.startswith("I"):  # 16 bits; some versions of Pillow and some TIFF files say I, as for 32
        pixels = np.asarray(image).astype(np.int64)
        if pixels.min() < 0 or pixels.max() >= 2**16:
            raise ValueError("its pixels have 32 bits; save it with 8 or 16")
        return Image.fromarray(((pixels + 128) // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers; save it with 8 or 16 bits")
    if image.mode in CLEAR or "transparency" in image.info:
        paper = Image.new("RGBA", image.size, "white")
        paper.alpha_composite(image.convert("RGBA"))
        image = paper
    return image.convert("RGB")


def reason(error: Exception) -> str:
    """Why an image cannot be decoded, in a few words."""
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
