"""tasks: what the hundredth task costs, compared with the first ones."""

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from safetensors.torch import load_file, save_file

from fedprotip import api
from fedprotip.bench import federated, inputs, textbook
from fedprotip.bench.base import Agreement, Benchmark, Case, Machine, Measured, Row, Side, Size, Target, row
from fedprotip.federation.client import full_state
from fedprotip.models import build_network
from fedprotip.paper.anchors import EPOCHS, rounds
from fedprotip.settings import Settings, load
from fedprotip.store.events import Event
from fedprotip.store.files import size_of
from fedprotip.stream import build_stream

TRAINING = Target("times the first tasks' time, training and task end", "lower", 1.5)
WHOLE = Target("times the first tasks' time, with the evaluation of all tasks so far", "lower", 1.5)
CHECKPOINT = Target("times the first tasks' checkpoint bytes per byte kept", "lower", 1.1)
ARTEFACT = Target("artefact bytes per byte of the tensors in it", "lower", 1.1)
PLAIN = Target("times the first tasks' time, textbook", "lower")


@dataclass(frozen=True)
class TasksSize(Size):
    repeats: int = 1  # its figures compare tasks of one run
    tasks: int = 100
    rounds: int = rounds("cifar100", "resnet18")  # of a task, and epochs of a round: the paper's
    epochs: int = EPOCHS
    window: int = 5  # tasks at either end whose median is compared; the very first one has no bases yet
    width: int = 64
    train: int = 40  # images per class, two classes a task
    test: int = 20
    clients: int = 3


def cases(size: TasksSize) -> list[Case]:
    return [Case(f"{size.tasks} tasks", partial(_sides, size), _same_model, prepare=partial(_data, size), apart=True)]


def rows(measured: list[Measured], machine: Machine, size: TasksSize) -> list[Row]:
    (case,) = measured
    ours, plain = case.results["ours"], case.results["textbook"]
    return [
        row(case, TRAINING, _growth(ours["training"], size)),
        row(case, WHOLE, _growth(ours["whole"], size)),
        row(case, CHECKPOINT, _growth([a / b for a, b in zip(ours["saved"], ours["kept"], strict=False)], size)),
        row(case, ARTEFACT, ours["artefact"] / ours["tensors"]),
        row(case, PLAIN, _growth(plain["whole"], size)),
        row(case),
    ]


BENCHMARK = Benchmark(
    "tasks",
    "From one to a hundred tasks: a perceptron, three clients",
    TasksSize(),
    TasksSize(tasks=24, rounds=2, epochs=2),
    cases,
    rows,
)


def _growth(values: list[float], size: TasksSize) -> float:
    return median(values[-size.window :]) / median(values[1 : 1 + size.window])


def _data(size: TasksSize, folder: Path) -> Path:
    return inputs.write_dataset(folder, 2 * size.tasks, size.train, size.test, side=8, channels=1)


def _settings(size: TasksSize, folder: Path) -> Settings:
    wanted = {
        "data": {"name": "own", "source": str(_data(size, folder))},
        "stream": {"tasks": size.tasks, "task_size": 2},
        "clients": {"count": size.clients, "partition": "iid"},
        "model": {"name": "mlp", "width": size.width, "depth": 2},
        "train": {"rounds": size.rounds, "epochs": size.epochs, "batch": 16, "lr": 0.02},
        "method": {"name": "fedprotip", "threshold": 0.9, "rank_rule": "energy", "increment": 0.0},
    }
    return load(wanted)


def _sides(size: TasksSize, folder: Path) -> dict[str, Side]:
    settings = _settings(size, folder)
    return {"ours": partial(_ours, settings, folder), "textbook": partial(_plain, settings, folder)}


def _ours(settings: Settings, folder: Path) -> dict[str, Any]:
    run, growth = folder / "tasks", Growth(settings, folder / "tasks" / "checkpoint")
    shutil.rmtree(run, ignore_errors=True)
    api.run(settings, out=run, observers=[growth])
    growth.weigh()
    artefact = list(run.glob("*.safetensors"))
    return {
        "seconds": sum(growth.whole),
        "training": growth.training,
        "whole": growth.whole,
        "saved": growth.saved,
        "kept": growth.kept,
        "tensors": sum(size_of(load_file(path)) for path in artefact),
        "artefact": sum(path.stat().st_size for path in artefact),
        "folder": str(folder),
    }


class Growth:
    """An observer that notes for every task its seconds, what is kept after it and how large its checkpoint is."""

    def __init__(self, settings: Settings, checkpoints: Path) -> None:
        self._settings, self._checkpoints = settings, checkpoints
        self.training: list[float] = []
        self.whole: list[float] = []
        self.kept: list[int] = []
        self.saved: list[int] = []

    def __call__(self, event: Event) -> None:
        if event["event"] != "task":
            return
        if self.kept:
            self.weigh()  # this task's checkpoint comes after the event: the one there is of the task before
        seconds = event["seconds"]
        self.training.append(seconds["train"] + seconds["task_end"])
        self.whole.append(sum(seconds.values()))
        self.kept.append(self._shared(event) + self._own(event["task"] + 1))

    def weigh(self) -> None:
        self.saved.append(sum(path.stat().st_size for path in self._checkpoints.rglob("*") if path.is_file()))

    def _shared(self, event: Event) -> int:
        """Bytes of model and heads, bases, references and class statistics after a task."""
        tasks, width, clients = event["task"] + 1, self._settings.model.width, self._settings.clients.count
        model = 4 * ((64 + 1) * width + (width + 1) * width + tasks * 2 * (width + 1))
        bases = 4 * sum(rank * event["dims"][name] for name, rank in event["ranks"].items())
        statistics = 8 * (tasks * 2 * (width + 1) + width * (width + 1) // 2)
        return model + bases + statistics + clients * (self._table(tasks) + 8)

    def _own(self, tasks: int) -> int:
        """Bytes that clients keep: moments of their features in every task, and the references they told last."""
        width = self._settings.model.width
        return self._settings.clients.count * (tasks * 8 * (width**2 + width + 1) + self._table(tasks))

    def _table(self, tasks: int) -> int:
        """References of one client: values, variances and numbers of samples."""
        return 2 * 4 * tasks**2 + 8 * tasks


def _plain(settings: Settings, folder: Path) -> dict[str, Any]:
    stream = build_stream(settings)
    network = build_network(settings, stream.dataset.image_shape, routes=True)
    save_file(full_state(network), folder / "start.safetensors")
    seconds = textbook.run_tasks(network, stream, settings, folder / "textbook-kept.safetensors")
    save_file(full_state(network), folder / "textbook.safetensors")
    return {"seconds": sum(seconds), "whole": seconds}


def _same_model(results: dict[str, Any]) -> Agreement:
    folder = Path(results["ours"]["folder"])
    paths = folder / "tasks" / "model.safetensors", folder / "textbook.safetensors", folder / "start.safetensors"
    return Agreement("relative difference of the models' changes", federated.change(*paths), 5e-2)
