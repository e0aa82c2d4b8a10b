"""clients and tasks: how a run grows from ten clients to a thousand, and from the first task to the hundredth."""

import shutil
from pathlib import Path
from statistics import median
from typing import Any

from safetensors.torch import load_file, save_file

import fedprotip
from benchmarks import inputs, inside, runs, textbook
from benchmarks.harness import Bench, Case
from fedprotip.paper.anchors import EPOCHS
from fedprotip.paper.anchors import rounds as paper_rounds
from fedprotip.settings import load


def clients(
    bench: Bench,
    clients: tuple[int, ...] = (10, 100, 1000),
    width: int = 512,  # one model of 512 units is 1.2 MB, one client's moment 2 MB
    samples: int = 1500,  # training images of a task
) -> None:
    """From ten to a thousand clients: two tasks, a perceptron, state of clients on disk."""
    data, few = inputs.write_dataset(bench.folder, 4, samples // 2, 20, side=8, channels=1), 0.0
    train = {"rounds": 1, "epochs": 1, "batch": 32, "lr": 0.05}
    for count in clients:
        wanted = _perceptron(data, 2, count, width, train) | {"run": {"state_mb": 1}}
        case = _both(bench, f"{count} clients", wanted, 1e-2)
        bench.speedup(case)
        if case.peaks:
            few = few or case.peaks["ours"]
            bench.figure(case, "times the peak memory of the fewest clients", case.peaks["ours"] / few, "≤", 1.05)
            less = case.peaks["textbook"] / case.peaks["ours"]
            bench.figure(case, "times less peak memory than the textbook", less)


def tasks(
    bench: Bench,
    tasks: int = 100,
    rounds: int = paper_rounds("cifar100", "resnet18"),  # of a task, and epochs of a round: the paper's
    epochs: int = EPOCHS,
    window: int = 5,  # tasks at either end whose median is compared; the very first one has no bases yet
    width: int = 64,
    train: int = 40,  # images per class, two classes a task
    test: int = 20,
) -> None:
    """From one to a hundred tasks: a perceptron, three clients."""
    data = inputs.write_dataset(bench.folder, 2 * tasks, train, test, side=8, channels=1)
    wanted = _perceptron(data, tasks, 3, width, {"rounds": rounds, "epochs": epochs, "batch": 16, "lr": 0.02})
    wanted["method"]["increment"] = 0.0
    case = _both(bench, f"{tasks} tasks", wanted, 5e-2)
    ours, plain = case.results["ours"], case.results["textbook"]

    def growth(values: list[float]) -> float:
        return median(values[-window:]) / median(values[1 : 1 + window])

    first, per_byte = "times the first tasks'", [a / b for a, b in zip(ours["saved"], ours["kept"], strict=True)]
    bench.figure(case, f"{first} time, training and task end", growth(ours["training"]), "≤", 1.5)
    bench.figure(case, f"{first} time, with the evaluation of all tasks so far", growth(ours["whole"]), "≤", 1.5)
    bench.figure(case, f"{first} checkpoint bytes per byte kept", growth(per_byte), "≤", 1.1)
    bench.figure(case, "artefact bytes per byte of the tensors in it", ours["artefact"] / ours["tensors"], "≤", 1.1)
    bench.figure(case, f"{first} time, textbook", growth(plain["whole"]), "≤")
    bench.speedup(case)


def _perceptron(data: dict[str, str], tasks: int, clients: int, width: int, train: dict[str, Any]) -> dict[str, Any]:
    """The paper's steps, which the textbook takes too, and class statistics of the final features."""
    return {
        "data": data,
        "stream": {"tasks": tasks, "task_size": 2},
        "clients": {"count": clients, "partition": "iid", "held_back": 0.0},
        "model": {"name": "mlp", "width": width, "depth": 2, "stages": []},
        "train": {**train, "head_start": "random", "fall": "none"},
        "statistics": {"root": False, "directions": 0},
        "method": {"name": "fedprotip", "threshold": 0.9, "rank_rule": "energy", "merge": "union"},
    }


def _both(bench: Bench, name: str, wanted: dict[str, Any], tolerance: float) -> Case:
    """Ours and the textbook, which does without routing."""
    run, plain = (str(bench.folder / f"{side} {name}") for side in ("ours", "textbook"))
    Path(plain).mkdir()
    paths = Path(run), Path(plain, "end.safetensors"), Path(plain, "start.safetensors")
    sides = {"ours": (our_run, wanted, run), "textbook": (plain_run, wanted, plain)}
    return bench.measure_apart(name, sides, lambda _: inputs.same_models(*paths, tolerance))


def our_run(wanted: dict[str, Any], run: str) -> dict[str, Any]:
    """Seconds and kept bytes of every task, bytes of its checkpoint and of the artefact in the end."""
    shutil.rmtree(run, ignore_errors=True)
    saved: list[int] = []

    def weigh(event: Any) -> None:
        if dict(event)["event"] == "task":  # its checkpoint comes after it: the one there is of the task before
            saved.append(sum(file.stat().st_size for file in Path(run, "checkpoint").rglob("*") if file.is_file()))

    fedprotip.run(wanted, out=run, observers=[weigh])
    weigh({"event": "task"})
    events = [event for event in runs.records(run, "events.jsonl") if event["event"] == "task"]
    artefact, whole = list(Path(run).glob("*.safetensors")), [sum(event["seconds"].values()) for event in events]
    return {
        "seconds": sum(whole),
        "whole": whole,
        "training": [event["seconds"]["train"] + event["seconds"]["task_end"] for event in events],
        "saved": saved[1:],
        "kept": [kept_bytes(event, wanted["model"]["width"], wanted["clients"]["count"]) for event in events],
        "tensors": sum(tensor.nbytes for file in artefact for tensor in load_file(file).values()),
        "artefact": sum(file.stat().st_size for file in artefact),
    }


def kept_bytes(event: dict[str, Any], width: int, clients: int) -> int:
    """Bytes that last after a task of two classes, at the server and at the clients."""
    tasks = event["task"] + 1
    model = 4 * ((64 + 1) * width + (width + 1) * width + tasks * 2 * (width + 1))
    bases = 4 * sum(rank * event["dims"][name] for name, rank in event["ranks"].items())
    statistics = 8 * (tasks * 2 * (width + 1) + width * (width + 1) // 2)
    references = 2 * 4 * tasks**2 + 8 * tasks  # of one client: values, variances and numbers of samples
    moments = tasks * 8 * (width**2 + width + 1)  # of one client's features in every task
    return model + bases + statistics + clients * (2 * references + 8 + moments)


def plain_run(wanted: dict[str, Any], folder: str) -> dict[str, Any]:
    settings = load(wanted)
    stream = inside.build_stream(settings)
    network = inside.network_of(settings, stream)
    save_file(network.state_dict(), Path(folder, "start.safetensors"))
    seconds = textbook.run_tasks(network, stream, settings, Path(folder, "kept.safetensors"))
    save_file(network.state_dict(), Path(folder, "end.safetensors"))
    return {"seconds": sum(seconds), "whole": seconds}
