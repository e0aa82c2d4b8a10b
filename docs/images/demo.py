"""Makes demo.png and the README's table from one run of the demo: python docs/images/demo.py [FOLDER]

FOLDER (runs/demo) is where `fedprotip demo` keeps its runs; what is finished there is not run again.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from fedprotip.report import comparison_rows
from fedprotip.report.text import STAND_IN, method_name
from fedprotip.store.results import MODES, standing_for

ROOT = Path(__file__).parents[2]
METHODS = ("fedavg", "lda", "fedprotip")
TABLE = re.compile(r"(?m)^\| accuracy % \|.*\n(?:\|.*\n)+")


def table(rows: list[dict[str, Any]]) -> str:
    """The accuracies as Markdown; the best of mode single is bold."""
    best = max(_figure(row, "single")[0] for row in rows)
    lines = [f"| accuracy % | {' | '.join(MODES)} |", "|---" * (len(MODES) + 1) + "|"]
    for row in rows:
        cells = []
        for mode in MODES:
            value, mark = _figure(row, mode)
            shown = "–" if value < 0 else f"{value:.1f}{mark}"
            cells.append(f"**{shown}**" if mode == "single" and value == best else shown)
        lines.append(f"| {method_name(row['method'])} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _figure(row: dict[str, Any], mode: str) -> tuple[float, str]:
    """The accuracy that stands under a mode, −1 where there is none, and its mark."""
    shown = standing_for(mode, row["accuracy"])
    return row["accuracy"].get(shown, {"mean": -1.0})["mean"], STAND_IN if shown != mode else ""


def main(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "fedprotip", "demo", "--out", str(folder)], check=True)
    shutil.copy(folder / "plots" / "bars_accuracy.png", ROOT / "docs" / "images" / "demo.png")
    readme = ROOT / "README.md"
    made = table(comparison_rows([folder / method for method in METHODS]))
    text, found = TABLE.subn(made, readme.read_text(encoding="utf-8"))
    assert found == 1, "The README has one table of the demo."
    readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo"))
