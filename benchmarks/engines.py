"""What an engine costs beside the work: seconds of a round in one process, in Flower's simulation and over a SuperLink.

python -m benchmarks engines
"""

import json
import socket
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Bench, Case, Figure
from fedprotip import run
from fedprotip.flower import processes, submission
from fedprotip.flower.deployment import Place

ENGINES = ("local", "simulation", "superlink")
DEPLOYMENT = """settings = "run.toml"
out = "superlink"
home = "home"
[superlink]
port = {port}
tls = false
"""


def engines(bench: Bench, width: int = 3300, clients: int = 2, rounds: int = 4, most: float = 1800.0) -> None:
    """Seconds of a round with each engine, for a model of 45 MB: one step of training, so what is left is transport."""
    settings = {
        "stream": {"tasks": 1, "task_size": 2},
        "clients": {"count": clients, "partition": "iid", "held_back": 0.0},
        "model": {"width": width, "depth": 2},
        "train": {"rounds": rounds, "steps": 1, "head_start": "random"},
        "method": {"name": "fedavg"},
        "run": {"threads": 1, "timeout": most, "patience": most},
    }
    _write(bench.folder / "run.toml", settings)
    seconds: dict[str, float] = {}
    for engine in ENGINES:
        folder = bench.folder / engine
        if engine == "superlink":
            _over_superlink(bench.folder, clients, most)
        else:
            run(settings, [f"run.engine={'flower' if engine == 'simulation' else engine}"], out=folder)
        seconds[engine] = median(_rounds(folder)[1:])  # the first one brings the plan and the whole model
    models = {engine: (bench.folder / engine / "model.safetensors").read_bytes() for engine in ENGINES}
    apart = float(sum(model != models["local"] for model in models.values()))
    case = f"{len(models['local']) / 1e6:.0f} MB, {clients} clients"
    bench.cases.append(Case(case, ("engines with other bytes", apart, 0.0), seconds, {}, {}))
    for engine in ENGINES[1:]:
        cost = seconds[engine] - seconds["local"]
        bench.figures.append(Figure(case, f"seconds that a round costs more than locally, {engine}", cost, "≤"))


def _over_superlink(folder: Path, clients: int, most: float) -> None:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        text = DEPLOYMENT.format(port=any_port.getsockname()[1])
    text += "".join(f"[[sites]]\nclient = {client}\n" for client in range(clients))
    (folder / "deployment.toml").write_text(text, encoding="utf-8")
    place = Place(folder / "deployment.toml")
    try:
        processes.up(place)
        submission.wait(place, submission.submit(place), most, lambda text: None)
    finally:
        processes.down(place)


def _rounds(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "events.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["seconds"] for line in lines if line["event"] == "round"]


def _write(path: Path, settings: dict[str, Any]) -> None:
    lines = []
    for section, values in settings.items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
