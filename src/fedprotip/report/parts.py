"""What pages are made of: sections with pictures and tables."""

from dataclasses import dataclass, field

from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """A plot, the name of its file, what it shows for someone who cannot see it, and how to read it."""

    name: str
    figure: Figure
    alt: str
    caption: str = ""


@dataclass(frozen=True)
class Thumb:
    """A small picture in a table: a PNG in base64, what it shows, its pixels."""

    data: str
    alt: str
    width: int
    height: int


@dataclass(frozen=True)
class Grid:
    """A table as text, ready to be shown. The first column names the row."""

    columns: list[str]
    rows: list[list[str]]
    title: str = ""
    folded: bool = False
    best: set[tuple[int, int]] = field(default_factory=set)
    bars: list[float] = field(default_factory=list)
    """Per cent by row, drawn behind the second column."""
    thumbs: list[list[Thumb]] = field(default_factory=list)
    """Small pictures by row, in a last column."""
    note: str = ""


@dataclass(frozen=True)
class Section:
    """`gist`: the figure that stands beside the title of a section that is folded."""

    title: str
    intro: str
    pictures: list[Picture] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    folded: bool = False
    gist: str = ""
