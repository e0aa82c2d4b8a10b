"""Look of the plots: colours that colour-blind readers can tell apart, sizes a phone can show."""

import functools
import io
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from PIL import Image

from fedprotip.store.records import Number

DPI = 150
COLOURS = 96  # of a picture, with all shades of its lines and letters
WIDTH = 4.9  # inches: scaled to a 360 px phone the 10 pt text is still about 8 pt

# One colour per meaning on a page. Modes have Okabe and Ito's colours; methods and ways to find the task Tol's muted
# ones (a method and its way the same); phases are greys, kinds of bytes browns, layers purples.
MODE_COLOURS = {"aware": "#0072B2", "agnostic": "#D55E00", "single": "#009E73", "batch64": "#E69F00"}
MODE_MARKERS = {"aware": "o", "agnostic": "s", "single": "^", "batch64": "D"}
METHOD_COLOURS = {
    "fedprotip": "#332288",
    "fedavg": "#777777",
    "lda": "#882255",
    "ridge": "#CC79A7",
    "fedprox": "#999933",
    "fedlwf": "#56B4E9",
    "gpm": "#AA4499",
}
WAY_LOOKS = {  # way to find the task → colour and marker
    "cosine": ("#999933", "s"),
    "gaussian": ("#56B4E9", "D"),
    "statistics": (METHOD_COLOURS["lda"], "o"),
    "shared": ("#000000", "X"),
    "statistics-heads": ("#AA4499", "v"),
    "fused": (METHOD_COLOURS["fedprotip"], "^"),
    "ridge": (METHOD_COLOURS["ridge"], "P"),
}
OTHER_WAY = ("#777777", "X")
PHASE_COLOURS = {"train": "#2F3E46", "task_end": "#84949E", "evaluate": "#C3CDD3"}
INK, SAND, STRAW = "#222222", "#A1662F", "#D2B48C"  # what was measured, and its bounds
PALETTE = tuple(METHOD_COLOURS.values())
"""For what has no colour of its own."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", ":", "-.")

MOST_NUMBERS = 20  # a heatmap with more columns shows colours only; the numbers are in the CSV

# Start from matplotlib's own defaults, so that a reader's matplotlibrc changes nothing.
_STYLE: Any = {
    **{k: v for k, v in matplotlib.rcParamsDefault.items() if not k.startswith(("backend", "interactive"))},
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.axisbelow": True,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}

_P = ParamSpec("_P")


def styled(draw: Callable[_P, Figure]) -> Callable[_P, Figure]:
    """Run a drawing function under the report's style, whatever the caller's settings are."""

    @functools.wraps(draw)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> Figure:
        with matplotlib.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return wrapped


def new_figure(
    height: float = 3.3, width: float = WIDTH, rows: int = 1, heights: Sequence[float] | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure with `rows` panels (of relative `heights`) that share their x axis; no global pyplot state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])


def square(cells: int) -> tuple[Figure, Axes]:
    """A figure for a heatmap with so many rows and columns."""
    crowded = cells > MOST_NUMBERS
    side = WIDTH if crowded else max(WIDTH - 0.9, 0.42 * cells + 0.9)
    figure, (axes,) = new_figure(0.86 * side, side)
    return figure, axes


def png(figure: Figure) -> bytes:
    """The figure as PNG of few colours, a third of the size: the same bytes for the same numbers."""
    drawn, small = io.BytesIO(), io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(drawn, format="png", dpi=DPI, facecolor="white", metadata={"Software": None})
    few = Image.open(drawn).convert("RGB").quantize(COLOURS, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    few.save(small, "PNG", optimize=True)
    return small.getvalue()


def task_axis(axes: Axes, tasks: int, label: str = "task") -> None:
    """Whole task numbers from 1 to `tasks` on the x axis."""
    middle, half = (tasks + 1) / 2, max(tasks, 3) / 2 + 0.1  # the bar of a single task stays a bar
    axes.set_xlim(middle - half, middle + half)
    if tasks <= 12:
        axes.set_xticks(range(1, tasks + 1))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    axes.set_xlabel(label)


def legend_above(axes: Axes, columns: int, handles: Sequence[Patch] | None = None) -> None:
    """A legend over the plot, where it can hide no data; `handles`: in place of what was drawn."""
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=columns,
        borderaxespad=0.2,
        handlelength=1.6,
        columnspacing=1.2,
    )


def series(index: int) -> dict[str, Any]:
    """Colour, marker and dash of the n-th series; dashes tell apart what shares a colour."""
    return {
        "color": PALETTE[index % len(PALETTE)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index // len(PALETTE) % len(DASHES)],
    }


def looks(methods: Sequence[str]) -> list[dict[str, Any]]:
    """The look of each series of one method: its colour is the method's, dashes tell its variants apart.

    Where all are of one method, the colours tell the variants apart.
    """
    if len(set(methods)) == 1:
        return [series(index) for index in range(len(methods))]
    spare = [colour for colour in PALETTE if colour not in {METHOD_COLOURS.get(method) for method in methods}]
    strangers = [method for method in dict.fromkeys(methods) if method not in METHOD_COLOURS]
    colours = METHOD_COLOURS | {
        method: (spare or PALETTE)[i % len(spare or PALETTE)] for i, method in enumerate(strangers)
    }
    known, found = list(dict.fromkeys(methods)), []
    for index, method in enumerate(methods):
        variant = methods[:index].count(method)
        marker = MARKERS[(known.index(method) + variant) % len(MARKERS)]
        found.append({"color": colours[method], "marker": marker, "linestyle": DASHES[variant % len(DASHES)]})
    return found


def shades(name: str, count: int) -> list[str]:
    """So many colours of one of matplotlib's maps, the first the darkest."""
    return [to_hex(matplotlib.colormaps[name](place)) for place in np.linspace(0.95, 0.45, max(count, 2))[:count]]


def as_floats(values: Sequence[Number]) -> np.ndarray:
    """Numbers for matplotlib: what was not measured becomes a gap."""
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def heatmap(
    figure: Figure,
    axes: Axes,
    values: np.ndarray,
    limits: tuple[float, float],
    write: Callable[[float], str],
    cell_text: np.ndarray | None = None,
) -> None:
    """Cells (rows, columns) with their numbers; NaN cells stay empty.

    `cell_text` replaces the value where another number should stand in the cell. Cells too many for
    numbers get a colour bar instead.
    """
    low, high = limits
    rows, columns = values.shape
    crowded = columns > MOST_NUMBERS
    axes.set_facecolor("#f4f4f4")
    image = axes.imshow(np.ma.masked_invalid(values), cmap="Blues", vmin=low, vmax=high, aspect="auto")
    axes.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=0.3 if crowded else 1.2)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    if crowded:
        figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05)
        return
    shown = values if cell_text is None else cell_text
    for i, j in np.argwhere(np.isfinite(values)):
        dark = (values[i, j] - low) / max(high - low, 1e-12) > 0.6
        colour, size = "white" if dark else "#1a1a1a", 10 if columns <= 8 else 8.5
        axes.text(j, i, write(shown[i, j]), ha="center", va="center", fontsize=size, color=colour)


def cell_ticks(axis: Axis, cells: int, first: int = 1) -> None:
    """Task numbers from `first` on an axis of a heatmap; every n-th when there are many."""
    places = range(0, cells, 1 if cells <= MOST_NUMBERS else -(-cells // 10))
    axis.set_ticks(places, labels=[str(first + place) for place in places])
