"""What the terminal says at the end of a run."""

import io
from pathlib import Path

from fedprotip.cli.display import Console, print_reproduction, print_summary
from fedprotip.paper import costs
from fedprotip.store.results import Summary


def test_the_way_that_answers_is_named_beside_the_others():
    figures = {"method": "fedprotip", "scenario": "class", "tasks": 1, "clients": 2, "seed": 0, "matrix": {}}
    figures |= {"accuracy": {"single": 75.9}, "forgetting": {"single": 0.0}, "bytes": {"up": {}, "down": {}}}
    ways = {"birth": {"single": 75.9}, "statistics": {"single": 62.5}}
    text = io.StringIO()
    print_summary(
        Console(file=text, width=100), Path("r"), Summary.model_validate(figures | {"router": "birth", "routers": ways})
    )
    said = "birth, by the network before any training (75.9 %); the others would have had: statistics 62.5 %."
    assert said in text.getvalue().replace("\u00a0", " ")
    assert "fedprotip, 1 task, seed 0" in text.getvalue()


def test_a_narrow_terminal_breaks_no_figure():
    """Twelve columns side by side would show an accuracy as three lines of two digits."""
    headings = ["row", "single", "aware", "agnostic", "batch64", *costs.HEADINGS]
    row = ["cifar100-a0.5-100each-lander", "61.5 (9.9)", "87.7 (0.2)", "39.6 (18.5) [48.4 (15.6)]", "87.7 (0.1)"]
    costly = ["103 %", "1,024 synthetic", "model 120, basis 7.51", "model 124", "1882 (wall)", "1.47", "1.13"]
    console = Console(width=80, file=(shown := io.StringIO()))
    print_reproduction(console, (headings, [[*row, *costly]]), [], [Path("table.md")])
    text = shown.getvalue()
    assert "[published]" in text
    words = {word for line in text.splitlines() for word in line.replace("│", " ").split()}
    assert set(" ".join([*row[1:], *costly]).split()) <= words
