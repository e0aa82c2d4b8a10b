"""The section about the geometry of projection: section 5 of the paper, measured."""

from fedprotip.report import finding, tables
from fedprotip.report import plots_geometry as plots
from fedprotip.report.parts import Grid, Picture, Section
from fedprotip.report.rundata import RunData
from fedprotip.report.text import significant
from fedprotip.store.results import Geometry

INTRO = (
    "ρ̂ is the share of a task's gradient that projection leaves: high means room to learn. "
    "β̂ is how much a new task still disturbs an old one: low means little forgetting. "
    "Both, and the bounds, are about the layers that are projected."
)
BY_TASK = [
    *("", "ρ̂ min", "ρ̂ mean", "gradient²", "bound, Eq. 13", "Eq. 15", "loss increase", "bound, Eq. 14", "Eq. 31"),
    *("drift²", "bound, Lemma 3"),
]
BY_PAIR = ["", "β̂", "mean", "largest", "bound, Eq. 25"]


def geometry_section(geometry: Geometry, run: RunData) -> Section:
    scalars = {
        "mean β̂": geometry.beta_bar,
        "G²": geometry.gradient_bound_G2,
        "L": geometry.smoothness_L,
        "forgetting in loss": geometry.ft_loss,
        "its bound, Eq. 16": geometry.bounds.ft_loss_canonical,
    }
    constants = [[name, significant(value)] for name, value in scalars.items() if value is not None]
    by_task = [[f"task {row[0]}", *map(_significant, row[1:])] for row in tables.geometry(run).rows]
    by_pair = [
        [f"task {row[0]} on task {row[1]}", *map(_significant, row[2:])] for row in tables.geometry_rounds(run).rows
    ]
    grids = [Grid(BY_TASK, by_task, "Measured and bound", folded=True)]
    grids += [Grid(BY_PAIR, by_pair, "Loss increase of an old task in one round", folded=True)] if by_pair else []
    grids += [Grid(["", ""], constants, "Constants")] if constants else []
    gist = f"mean β̂ {significant(geometry.beta_bar)}" if geometry.beta_bar is not None else ""
    return Section("Geometry of projection", INTRO, _pictures(geometry, run), grids, folded=True, gist=gist)


def _pictures(geometry: Geometry, run: RunData) -> list[Picture]:
    pictures, measured = [], geometry.measured
    known = [value for value in geometry.rho_mean if value is not None]
    if known:
        alt = f"Line chart of ρ̂ for each task; the mean lies between {min(known):.2f} and {max(known):.2f}."
        pictures.append(Picture("geometry_rho", plots.rho(geometry), alt))
    if any(value is not None for row in geometry.beta for value in row):
        alt = f"Heatmap of β̂ between new and old tasks; its mean is {significant(geometry.beta_bar)}."
        pictures.append(Picture("geometry_beta", plots.beta(geometry), alt))
    if len(run.summary.drift) > 1:
        pictures.append(finding.drift_picture(run))
    if measured.gradient_sq_mean or measured.loss_increase or measured.drift:
        alt = "Measured squared gradients, loss increases and drifts beside their bounds; the table has the numbers."
        pictures.append(Picture("geometry_bounds", plots.bounds(geometry), alt))
    if geometry.pairs():
        alt = "Loss increase of every old task in one round of every new one beside its bound; the table has them."
        pictures.append(Picture("geometry_rounds", plots.rounds(geometry), alt))
    return pictures


def _significant(value: object) -> str:
    return significant(value) if isinstance(value, float | int) else "–"
