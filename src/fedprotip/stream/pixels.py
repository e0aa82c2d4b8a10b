"""Arrays of numbers as images: which value is white, which axis holds the colours, what lies behind a clear pixel.

Data in arrays and questions to a finished run both come through here, so what one accepts the other does too.
"""

from collections.abc import Iterator

import numpy as np

from fedprotip.errors import UsageError

CHANNELS = (1, 2, 3, 4)
"""Grey, grey and alpha, RGB, RGB and alpha."""
DIM = 32
"""Images that get no brighter than this, of 255, are hardly meant so: their white is another."""
TOGETHER = 1024
"""Images that are converted at once: arrays of floats are large."""


def as_images(numbers: np.ndarray, what: str) -> np.ndarray:
    """Images (n, c, h, w) uint8 with 1 or 3 channels, of (n, h, w), (n, h, w, c) or (n, c, h, w).

    bool is black and white; white of uint16 is 65535, of other whole numbers 255, of floats 1 or 255, whichever they
    can only mean. Alpha lies over white.

    Args:
        what: what the numbers are called when they are refused.
    """
    return np.ascontiguousarray(over_white(as_bytes(channels_first(numbers, what), what)))


def as_bytes(numbers: np.ndarray, what: str) -> np.ndarray:
    """The same images with values of 0…255; what cannot be told, or is no number, is a UsageError."""
    if numbers.dtype == np.uint8:
        return numbers
    if numbers.dtype.kind not in "biuf":
        raise UsageError(f"{what} must be images of whole numbers or floats; it is {numbers.dtype} {numbers.shape}.")
    white = _white(numbers, what)
    found = np.empty(numbers.shape, np.uint8)
    for part in _parts(len(numbers)):
        found[part] = np.rint(numbers[part] * (255 / white))
    return found


def channels_first(images: np.ndarray, what: str) -> np.ndarray:
    """Images (n, c, h, w) of (n, h, w), (n, h, w, c) or (n, c, h, w); what could be either is a UsageError."""
    if images.ndim == 3:
        return images[:, None]
    first, last = (images.ndim == 4 and images.shape[axis] in CHANNELS for axis in (1, 3))
    if not first and not last:
        raise UsageError(
            f"{what} must be (n, h, w), (n, h, w, c) or (n, c, h, w) with 1 to 4 channels; it is {images.shape}."
        )
    if first and last and images.shape[1:] != (1, 1, 1):
        raise UsageError(
            f"{what} of shape {images.shape} may have its channels first or last; grey images can be (n, h, w), "
            f"others need at least {max(CHANNELS) + 1} pixels on every side."
        )
    return images if first else images.transpose(0, 3, 1, 2)


def over_white(images: np.ndarray) -> np.ndarray:
    """Images (n, c, h, w) uint8 without their alpha, if they have one: what they look like on white paper."""
    if images.shape[1] in (1, 3):
        return images
    found = np.empty((len(images), images.shape[1] - 1, *images.shape[2:]), np.uint8)
    for part in _parts(len(images)):
        colour, alpha = images[part, :-1].astype(np.uint32), images[part, -1:].astype(np.uint32)
        found[part] = (colour * alpha + 255 * (255 - alpha) + 127) // 255
    return found


def _white(numbers: np.ndarray, what: str) -> float:
    """The value of white."""
    if numbers.dtype.kind == "b":
        return 1.0
    low, high = 0.0, 0.0
    for part in _parts(len(numbers)):
        if not np.isfinite(numbers[part]).all():
            raise UsageError(f"{what} holds NaN or infinite values; mend these images, or leave them out.")
        low = min(low, float(numbers[part].min(initial=0)))
        high = max(high, float(numbers[part].max(initial=0)))
    if numbers.dtype == np.uint16:
        return 65535.0
    is_float = numbers.dtype.kind == "f"
    if low < 0 or high > 255 or (is_float and 1 < high <= DIM):
        raise UsageError(
            f"{what} is {numbers.dtype} with values from {low:g} to {high:g}, and what is black or white cannot be "
            "told; give uint8, uint16 (white is 65535), or floats from 0 to 1 or from 0 to 255."
        )
    return 1.0 if is_float and high <= 1 else 255.0


def _parts(count: int) -> Iterator[slice]:
    return (slice(start, start + TOGETHER) for start in range(0, count, TOGETHER))
