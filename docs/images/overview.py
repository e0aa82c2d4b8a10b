"""Draws overview.svg, FedProTIP in three steps (the paper's Fig. 1, drawn anew): python docs/images/overview.py"""

from html import escape
from math import cos, hypot, radians, sin
from pathlib import Path

BLUE, GREEN, ORANGE, GREY, INK = "#0072B2", "#009E73", "#C77700", "#777777", "#222222"
WIDTH, HEIGHT, PANEL, TOP = 1200, 560, 372, 20
parts: list[str] = []


def text(
    x: float, y: float, words: str, size: int = 14, colour: str = INK, weight: str = "normal", at: str = "middle"
) -> None:
    """A line of text; `A_b` and `A^b` put one character b below or above the line."""
    spans, level, rest = "", 0, words
    while rest:
        mark, shift = rest[0], {"_": 4, "^": -6}.get(rest[0], 0)
        if shift and len(rest) > 1:
            spans += f'<tspan dy="{shift - level}" font-size="{size - 4}">{escape(rest[1])}</tspan>'
            level, rest = shift, rest[2:]
        else:
            spans += f'<tspan dy="{-level}">{escape(mark)}</tspan>' if level else escape(mark)
            level, rest = 0, rest[1:]
    style = f'font-size="{size}" fill="{colour}" font-weight="{weight}" text-anchor="{at}"'
    parts.append(f'<text x="{x:g}" y="{y:g}" {style} xml:space="preserve">{spans}</text>')


def rect(x: float, y: float, width: float, height: float, colour: str, fill: str = "#fff", thick: float = 1.6) -> None:
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    parts.append(f'<rect {place} rx="8" fill="{fill}" stroke="{colour}" stroke-width="{thick}"/>')


def box(x: float, y: float, width: float, height: float, title: str, colour: str, lines: list[str]) -> None:
    rect(x, y, width, height, colour)
    text(x + width / 2, y + 22, title, 14, colour, "bold")
    for index, line in enumerate(lines):
        text(x + width / 2, y + 44 + 20 * index, line, 13)


def line(
    points: list[tuple[float, float]], colour: str, arrow: bool = True, dashes: str = "", thick: float = 2
) -> None:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    end = f' marker-end="url(#m{colour[1:]})"' if arrow else ""
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{thick}"{end}{dashed}/>')


def ray(x: float, y: float, degrees: float, length: float, colour: str, thick: float = 2) -> tuple[float, float]:
    """An arrow from a point; where it ends. Angles go up from the right."""
    end = x + length * cos(radians(degrees)), y - length * sin(radians(degrees))
    line([(x, y), end], colour, thick=thick)
    return end


def panel(index: int, title: str) -> float:
    """The frame of a step; its left edge."""
    x = 20 + index * (PANEL + 22)
    rect(x, TOP, PANEL, HEIGHT - 2 * TOP, "#cccccc", "#fafafa", 1)
    text(x + PANEL / 2, TOP + 32, f"{index + 1}   {title}", 17, INK, "bold")
    return x


# 1: the local step
x = panel(0, "Learn outside the past")
box(x + 106, 76, 160, 66, "server", BLUE, ["W ← Σ p_k W_k"])
for number, left in enumerate((20, 138, 256), start=1):
    rect(x + left, 216, 96, 46, GREEN)
    text(x + left + 48, 244, f"client {number}", 14, GREEN, "bold")
    middle = x + left + 48
    aim = x + 186 + (number - 2) * 46
    line([(middle - 9, 212), (aim - 9, 148)], GREEN)
    line([(aim + 9, 144), (middle + 9, 208)], BLUE)
text(x + 44, 178, "W_k up", 13, GREEN, "bold")
text(x + 330, 178, "W down", 13, BLUE, "bold")
cx, cy = x + 110, 425
parts.append(
    f'<polygon points="{cx - 70},{cy + 44} {cx + 130},{cy + 44} {cx + 204},{cy - 22} {cx + 4},{cy - 22}" '
    f'fill="{ORANGE}" fill-opacity="0.16" stroke="{ORANGE}"/>'
)
text(cx + 76, cy + 33, "Φ: earlier tasks", 13, ORANGE, "bold")
ox, oy = cx + 30, cy + 6
gx, gy = ray(ox, oy, 48, 146, GREY)
line([(ox, oy), (ox, gy)], GREEN, thick=3)
line([(ox, gy), (gx - 6, gy)], GREY, arrow=False, dashes="5 4", thick=1.4)
line([(gx, gy + 6), (gx, oy)], GREY, arrow=False, dashes="5 4", thick=1.4)
text(gx + 16, gy + 4, "gradient", 13, GREY, "bold", "start")
text(ox - 12, (gy + oy) / 2, "its part", 13, GREEN, "bold", "end")
text(ox - 12, (gy + oy) / 2 + 18, "outside Φ", 13, GREEN, "bold", "end")
text(x + PANEL / 2, HEIGHT - 38, "ΔW · Φ = 0: old outputs stay (Eq. 4–6)", 14)

# 2: bases
x = panel(1, "Keep what the task used")
box(x + 86, 76, 200, 66, "server", BLUE, ["Φ ← [Φ, what is new in U_k]"])
for number, left in enumerate((20, 138, 256), start=1):
    rect(x + left, 216, 96, 46, GREEN)
    text(x + left + 48, 244, f"client {number}", 14, GREEN, "bold")
    middle = x + left + 48
    line([(middle, 212), (x + 186 + (number - 2) * 60, 148)], GREEN)
text(x + 44, 178, "U_k", 14, GREEN, "bold")
cx, cy = x + 116, 366
spots = [(-62, -12), (-44, 10), (-30, -26), (-18, 16), (-4, -8), (8, 24), (22, -18), (34, 6), (48, -24), (64, 12)]
tilt = radians(28)
for a, b in spots:
    px, py = a * cos(tilt) + b * sin(tilt), -a * sin(tilt) + b * cos(tilt)
    parts.append(f'<circle cx="{cx + px:g}" cy="{cy + py:g}" r="4" fill="{GREY}" fill-opacity="0.6"/>')
ray(cx, cy, 28, 96, GREEN, 3)
ray(cx, cy, 118, 50, GREEN, 3)
text(cx, 446, "inputs of a layer,", 13)
text(cx, 463, "without the past", 13)
sizes = (74, 40, 17, 9, 6)
for place, height in enumerate(sizes):
    colour = GREEN if place < 2 else "#bbbbbb"
    parts.append(f'<rect x="{x + 236 + 22 * place}" y="{424 - height}" width="15" height="{height}" fill="{colour}"/>')
line([(x + 230, 424.5), (x + 348, 424.5)], GREY, arrow=False, thick=1.2)
text(x + 290, 446, "singular values:", 13)
text(x + 290, 463, "a share ε is kept", 13)
text(x + PANEL / 2, HEIGHT - 38, "bases travel, samples do not (Eq. 7–10)", 14)

# 3: task identity
x = panel(2, "Find the task of an input")
rect(x + 20, 86, 96, 46, GREY)
text(x + 68, 114, "input", 14, GREY, "bold")
rect(x + 146, 86, 96, 46, BLUE)
text(x + 194, 114, "backbone", 14, BLUE, "bold")
line([(x + 116, 109), (x + 142, 109)], GREY)
line([(x + 242, 109), (x + 268, 109)], BLUE)
text(x + 312, 106, "features", 13, BLUE, "bold")
text(x + 312, 123, "a", 14, BLUE, "bold")
line([(x + 312, 132), (x + 312, 168)], BLUE)
text(x + 60, 178, "how much of a lies in", 13, at="start")
text(x + 60, 196, "each task's U: relevance", 13, at="start")


def profile(left: float, top: float, heights: list[float], colour: str) -> None:
    for place, height in enumerate(heights):
        place_of = f'x="{left + 17 * place:g}" y="{top + 46 - height:g}" width="12" height="{height:g}"'
        parts.append(f'<rect {place_of} fill="{colour}"/>')
    line([(left - 4, top + 46.5), (left + 51, top + 46.5)], GREY, arrow=False, thick=1.2)


profile(x + 288, 174, [14, 40, 18], BLUE)
references = ([44, 12, 16], [15, 43, 16], [12, 19, 44])
for task, heights in enumerate(references, start=1):
    left = x + 52 + (task - 1) * 112
    chosen = task == 2
    rect(left - 26, 278, 100, 100, ORANGE, "#fff4e0" if chosen else "#fff", 2.4 if chosen else 1.2)
    profile(left, 290, list(heights), ORANGE)
    text(left + 24, 366, f"task {task}", 13, ORANGE, "bold")
    alike = [14.0, 40.0, 18.0]
    cosine = sum(a * b for a, b in zip(alike, heights, strict=True)) / (hypot(*alike) * hypot(*heights))
    text(left + 24, 400, f"cos {cosine:.2f}", 13, INK if chosen else GREY, "bold" if chosen else "normal")
line([(x + 312, 224), (x + 312, 244), (x + 188, 244), (x + 188, 274)], BLUE)
text(x + 60, 250, "nearest reference?", 13, at="start")
line([(x + 188, 408), (x + 188, 436)], ORANGE)
rect(x + 88, 440, 200, 44, BLUE)
text(x + 188, 467, "head of task 2 answers", 13, BLUE, "bold")
text(x + PANEL / 2, HEIGHT - 38, "each client votes (Eq. 11–12)", 14)

markers = "".join(
    f'<marker id="m{colour[1:]}" markerWidth="9" markerHeight="9" refX="6" refY="4" orient="auto" '
    f'markerUnits="userSpaceOnUse"><path d="M0,0 L8,4 L0,8 z" fill="{colour}"/></marker>'
    for colour in (BLUE, GREEN, ORANGE, GREY)
)
SVG = (
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="Helvetica, sans-serif">'
    f'<defs>{markers}</defs><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>' + "\n".join(parts) + "</svg>\n"
)

if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(SVG, encoding="utf-8")
