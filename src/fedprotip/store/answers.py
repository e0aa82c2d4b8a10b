"""`answers.json`: what test samples were taken for, class by class, and how good answers are at each site."""

import base64
import binascii
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from fedprotip.store.records import BadRecord, Count, Part, Percent, Record, one_line

PAIRS = 10
"""Pairs of classes that are shown as the most confused."""
SIDE = 48
"""Of the largest picture of a sample that is kept."""
Name = Annotated[str, AfterValidator(lambda text: one_line(text, 60))]
Side = Annotated[int, Field(ge=1, le=SIDE)]
Taken = tuple[Count, Count, Count]
"""A true class, the class that was said, and how many samples."""


def most_confused(taken: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Wrong pairs of `Taken`, the most frequent first."""
    return sorted((pair for pair in taken if pair[0] != pair[1]), key=lambda pair: (-pair[2], pair[0], pair[1]))


class Sites(Part):
    """Accuracy (%) at each client, one sample at a time.

    Measured on test samples of its own; else expected, from the accuracy of every class and its mix of them.
    """

    measured: bool = False
    names: list[Name] = []
    accuracy: list[Percent] = []
    samples: list[Count] = []  # that were tested, or make the mix

    @model_validator(mode="after")
    def _columns_are_whole(self) -> "Sites":
        if not len(self.names) == len(self.accuracy) == len(self.samples):
            raise ValueError("names, accuracy and samples are not of one length")
        return self


class Example(Part):
    """A small picture of a test sample of class `true` that was taken for class `said`."""

    true: Count
    said: Count
    shape: tuple[Side, Side, Literal[1, 3]]
    pixels: str  # (height, width, channels) bytes, in base64

    @model_validator(mode="after")
    def _pixels_fill_the_shape(self) -> "Example":
        height, width, channels = self.shape
        try:
            found = len(self.raw)
        except binascii.Error:
            found = -1
        if found != height * width * channels:
            raise ValueError(f"pixels are not those of a picture of shape {self.shape}")
        return self

    @property
    def raw(self) -> bytes:
        return base64.b64decode(self.pixels, validate=True)


class Answers(Record):
    """`answers.json`: what test samples were taken for at the end, one at a time (mode single, else agnostic)."""

    classes: list[Name]
    taken: list[Taken]
    sites: Sites = Sites()
    examples: Annotated[list[Example], Field(max_length=3 * PAIRS)] = []

    @model_validator(mode="after")
    def _every_class_has_a_name(self) -> "Answers":
        used = [label for pair in self.taken for label in pair[:2]]
        used += [label for example in self.examples for label in (example.true, example.said)]
        if max(used, default=-1) >= len(self.classes):
            raise BadRecord(f"class {max(used)} has no name.")
        return self

    @property
    def samples(self) -> dict[int, int]:
        """Class → its test samples."""
        found: Counter[int] = Counter()
        for true, _, count in self.taken:
            found[true] += count
        return {label: count for label, count in sorted(found.items()) if count}

    @property
    def accuracy(self) -> dict[int, float]:
        """Class → accuracy (%)."""
        right = {true: count for true, said, count in self.taken if true == said}
        return {label: 100 * right.get(label, 0) / count for label, count in self.samples.items()}
