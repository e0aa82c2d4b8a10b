"""Draws way.svg, the data's way through the house: python docs/images/way.py"""

from html import escape
from pathlib import Path

BLUE, GREEN, ORANGE, GREY = "#0072B2", "#009E73", "#C77700", "#555555"
WIDTH, HEIGHT, LINE = 1160, 665, 19
parts: list[str] = []


def text(
    x: float, y: float, words: str, size: int = 13, colour: str = "#222", weight: str = "normal", at: str = "start"
) -> None:
    style = f'font-size="{size}" fill="{colour}" font-weight="{weight}" text-anchor="{at}"'
    parts.append(f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>')


def box(x: int, y: int, width: int, height: int, title: str, colour: str, lines: list[str], behind: int = 0) -> None:
    """A titled box with lines of text; `behind`: so many more of its kind."""
    for step in range(behind, -1, -1):
        place = f'x="{x + 6 * step}" y="{y - 6 * step}" width="{width}" height="{height}"'
        parts.append(f'<rect {place} rx="8" fill="#fff" stroke="{colour}" stroke-width="1.6"/>')
    text(x + 14, y + 25, title, 15, colour, "bold")
    for index, line in enumerate(lines):
        text(x + 14, y + 49 + LINE * index, line)


def arrow(points: list[tuple[int, int]], colour: str, words: str = "", at: tuple[int, int] = (0, 0)) -> None:
    path = " ".join(f"{x},{y}" for x, y in points)
    parts.append(
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" marker-end="url(#m{colour[1:]})"/>'
    )
    if words:
        text(*at, words, 13, colour, "bold", "middle")


box(20, 30, 220, 76, "settings", GREY, ["TOML, --set, defaults"])
box(
    20,
    160,
    220,
    130,
    "stream",
    GREY,
    ["tasks, classes, pixels", "fingerprint of the data", "holdings: which samples", "one client can read"],
)
box(330, 30, 290, 270, "server", BLUE, [
    "Site: model W, knowledge, task",
    "Progress: who was told what",
    "",
    "loop.py: Algorithm 1",
    "converse: one exchange",
    "1  request: what the client lacks",
    "4  check: by what was asked",
    "5  combine: mean, sum or each",
    "6  digest: what follows from it",
    "7  receive: take it in",
])  # fmt: skip
box(862, 30, 272, 270, "clients", GREEN, [
    "Site: the same, from bytes alone",
    "Belongings: private, never sent",
    "Holding: the only samples it sees",
    "",
    "Client.handle",
    "2  take in what the parcel brings",
    "3  answer: train, sum up, extract",
    "",
    "the exchange says what is asked;",
    "the method says how to train",
], behind=2)  # fmt: skip
box(692, 70, 100, 190, "engine", GREY, ["local", "pool", "apart", "", "all the", "same bytes"])
box(330, 420, 290, 225, "run folder", ORANGE, [
    "settings.toml, manifest.json",
    "plan.json, data.safetensors",
    "events.jsonl, ledger.jsonl",
    "checkpoint/, clients/",
    "model.safetensors",
    "a file for each declared artefact",
    "summary.json, geometry.json",
    "report.html, plots/, tables/",
])  # fmt: skip
box(862, 420, 272, 225, "Predictor", BLUE, [
    "from plan.json and tensors alone",
    "",
    "images → pixels → features",
    "experts: scores of classes",
    "routers: evidence of tasks",
    "a way joins one of each → label",
    "",
    "evaluation asks the same one",
])  # fmt: skip
box(20, 500, 220, 96, "report", ORANGE, ["tables, plots, one page", "reads a run folder only"])

arrow([(130, 106), (130, 156)], GREY)
arrow([(240, 68), (326, 68)], GREY)
arrow([(240, 220), (326, 220)], GREY, "tasks", (281, 212))
arrow([(130, 290), (130, 345), (1000, 345), (1000, 304)], GREY, "samples: each client reads its own", (800, 337))
arrow([(620, 120), (688, 120)], BLUE, "parcel", (654, 111))
arrow([(792, 120), (858, 120)], BLUE)
arrow([(862, 220), (796, 220)], GREEN)
arrow([(692, 220), (624, 220)], GREEN, "reply", (660, 211))
arrow([(400, 300), (400, 416)], ORANGE, "journal, checkpoints", (484, 404))
arrow([(590, 300), (590, 374), (1000, 374), (1000, 416)], BLUE, "after each task: Server.predictor", (800, 394))
arrow([(620, 500), (858, 500)], ORANGE, "fedprotip.load: hashes first", (738, 490))
arrow([(862, 610), (624, 610)], BLUE, "accuracy matrix", (742, 600))
arrow([(330, 548), (244, 548)], ORANGE)

markers = "".join(
    f'<marker id="m{colour[1:]}" markerWidth="9" markerHeight="9" refX="7" refY="4" orient="auto">'
    f'<path d="M0,0 L8,4 L0,8 z" fill="{colour}"/></marker>'
    for colour in (BLUE, GREEN, ORANGE, GREY)
)
SVG = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="Helvetica, sans-serif">'
    f'<defs>{markers}</defs><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>' + "\n".join(parts) + "</svg>\n"
)

if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(SVG, encoding="utf-8")
