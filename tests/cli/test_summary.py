"""What the terminal says at the end of a run."""

import io
from pathlib import Path

from fedprotip.cli.display import Console, print_summary
from fedprotip.store.results import Summary


def test_the_way_that_answers_is_named_beside_the_others():
    figures = {"method": "fedprotip", "scenario": "class", "tasks": 2, "clients": 2, "seed": 0, "matrix": {}}
    figures |= {"accuracy": {"single": 75.9}, "forgetting": {"single": 0.0}, "bytes": {"up": {}, "down": {}}}
    ways = {"birth": {"single": 75.9}, "statistics": {"single": 62.5}}
    text = io.StringIO()
    print_summary(
        Console(file=text, width=100), Path("r"), Summary.model_validate(figures | {"router": "birth", "routers": ways})
    )
    said = "birth, by the network before any training (75.9 %); the others would have had: statistics 62.5 %."
    assert said in text.getvalue().replace("\u00a0", " ")
