"""What a server takes from strangers, and how it says no."""

from dataclasses import dataclass

MB = 10**6
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Of pictures that are sent, as Pillow calls them: what training files may have, and no more."""


@dataclass(frozen=True)
class Limits:
    """Bounds on what one request, and all of them together, can make a server do."""

    body: int = 16 * MB
    """Bytes of a request."""
    pixels: int = 25 * 10**6
    """Of an image, compared before it is decoded."""
    total: int = 100 * 10**6
    """Pixels of all images of a request."""
    images: int = 64
    """Of a request."""
    concurrency: int = 32
    """Requests that are answered at a time; the next one is told to come again."""
    arriving: int = 16
    """Of the largest bodies: the bytes of all that are on their way; when there are more, the oldest has to go."""
    seconds: float = 30.0
    """From the first byte of a request to its answer."""
    batch: int = 32
    """Images of one forward pass."""
    wait: float = 0.05
    """Seconds that a busy server waits for more of them, at most."""
    threads: int = 0
    """Of torch; 0: as it has them."""


class Refused(Exception):
    """A request that gets a status and a sentence instead of an answer."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence
