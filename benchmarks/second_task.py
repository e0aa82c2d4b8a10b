"""round and task: what comes after the first task, beside FedAvg; also beside the code of another checkout.

The CIFAR-100 row of `fedprotip reproduce table1 --scale cpu`, or the same with default settings (`reproduce single`):
the second task of a run of ten, which was stopped after its first.
"""

from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks import inputs, inside, runs, textbook
from benchmarks.apart import SOURCE, run_apart
from benchmarks.harness import Agreement, Bench
from benchmarks.project import operations
from fedprotip import UsageError
from fedprotip.models.capture import find_layers
from fedprotip.paper.anchors import find
from fedprotip.paper.protocols import protocol
from fedprotip.settings import Settings, layered, load

CLASSES = 100
"""In ten tasks, as those of CIFAR-100."""
PAPER, DEFAULTS = "table1", "single"
"""Protocols whose rows have the paper's own settings, or the defaults."""
METHODS = ("fedprotip", "fedavg")
WITHIN = 1.03
"""How much more seconds and memory than another checkout the present code may need."""


class Size(NamedTuple):
    """Of runs whose settings can be changed."""

    train: int = 500  # images per class, made up unless `overrides` names data
    test: int = 100
    rounds: int = 3
    overrides: tuple[str, ...] = ()
    protocol: str = PAPER


def row(method: str, size: Size) -> list[str]:
    """Protocol and name of the row with α = 0.5."""
    return [size.protocol, f"cifar100-a0.5-{method}"]


def changes(folder: Path, size: Size) -> dict[str, Any]:
    """What is changed of its settings at scale cpu."""
    wanted: dict[str, Any] = {"train": {"rounds": size.rounds}}
    if not any(change.startswith("data.name") for change in size.overrides):
        wanted["data"] = inputs.write_dataset(folder, CLASSES, size.train, size.test, side=32)
    return wanted


def cpu_scale(method: str, folder: Path, size: Size) -> dict[str, Any]:
    table, name = row(method, size)
    return layered(protocol(table).row(name).at("cpu"), changes(folder, size))


def round(bench: Bench, size: Size) -> None:
    """The last round of the second task, ResNet-18 at scale cpu.

    It is the last one because in the first the outputs of the frozen prefix are computed.
    """
    if size.protocol == DEFAULTS:
        raise UsageError("The textbook's rounds follow the paper's settings; measure the defaults with: task.")
    base = {method: _learn(bench, method, method, size) for method in METHODS}
    wanted = cpu_scale("fedprotip", bench.folder, size)
    ours, fedavg, plain = (str(bench.folder / name) for name in ("ours", "fedavg", "textbook.safetensors"))
    sides = {
        "ours": (runs.next_task, base["fedprotip"], ours, "round"),
        "textbook": (plain_rounds, wanted, list(size.overrides), base["fedprotip"], plain),
        "fedavg": (runs.next_task, base["fedavg"], fedavg, "round"),
    }
    case = bench.measure_apart(
        "second task", sides, lambda _: inputs.same_models(model(ours), Path(plain), model(base["fedprotip"]))
    )
    sent = [sum(runs.sizes(run, "model", task=1)) for run in (ours, fedavg)]
    bench.speedup(case)
    bench.figure(case, "times a round of FedAvg", case.ratio("ours", "fedavg"), "≤")
    bench.figure(case, "times FedAvg's model bytes per round", sent[0] / sent[1], "≤", 0.85)


def _learn(bench: Bench, side: str, method: str, size: Size, source: Path = SOURCE) -> str:
    """The folder of a run that is stopped after its first task, by the package in `source`."""
    bench.say(f"{bench.name}: first task of {side}")
    base = str(bench.folder / f"base {side}")
    told = row(method, size), changes(bench.folder, size), list(size.overrides), base
    used, _ = run_apart(runs.first_task, *told, source=source)
    if not Path(used).is_relative_to(source):
        raise UsageError(f"{source.parent} is not a checkout: it has no src/fedprotip.")
    return base


def plain_rounds(wanted: dict[str, Any], overrides: list[str], base: str, path: str) -> dict[str, float]:
    """The same rounds from the same model, batches and bases; seconds of the last."""
    settings = load(wanted, overrides)
    stream, bases, seconds = inside.build_stream(settings), _bases(base), 0.0
    network = inside.network_of(settings, stream, task=1)
    textbook.load(network, load_file(model(base)))
    for round_ in range(settings.train.rounds):
        start = perf_counter()
        textbook.load(network, textbook.train_round(network, stream, settings, bases, 1, round_))
        seconds = perf_counter() - start
    save_file(network.state_dict(), path)
    return {"seconds": seconds}


def task(bench: Bench, size: Size) -> None:
    """A whole task after the first, FedProTIP against FedAvg, ResNet-18 at scale cpu."""
    folder, sides = bench.folder, {}
    for side, method in (("ours", "fedprotip"), ("textbook", "fedavg"), ("fedavg", "fedavg")):
        cached = size if side != "textbook" else size._replace(overrides=(*size.overrides, "run.cache_mb=0"))
        sides[side] = runs.next_task, _learn(bench, side, method, cached), str(folder / side)
    places = folder / "fedavg", folder / "textbook", folder / "base textbook"  # the cache must change nothing
    case = bench.measure_apart("second task", sides, lambda _: _same(*places))
    settings = load(cpu_scale("fedprotip", folder, size), list(size.overrides))
    bound, share = _projection(settings, sides["ours"][1])
    beside = case.seconds["fedavg"] + bound / 1e9 / bench.machine["gflops"]
    what = "times FedAvg with the same products and cache"
    bench.figure(case, what, case.ratio("ours", "fedavg"), "≤", 1.3, 1.1)
    bench.figure(case, f"{what}, by CPU seconds", case.cpu["ours"] / case.cpu["fedavg"], "≤", 1.3, 1.1)
    bench.figure(case, "times FedAvg without cache", case.ratio("ours", "textbook"), "≤", 1.0)
    what = "times (FedAvg with the same cache + arithmetic bound of projection)"
    bench.figure(case, what, case.seconds["ours"] / beside, "≤", 1.25, 1.1)
    ours = case.results["ours"]
    bench.figure(case, "% of the training time for the task end", 100 * ours["task_end"] / ours["train"], "≤", 8, 2)
    if case.peaks:
        peak = case.peaks["ours"] / case.peaks["textbook"]
        bench.figure(case, "times FedAvg's peak memory (no cache)", peak, "≤", 1.2)
    sent = [mean(runs.sizes(folder / "ours", "basis", task, ("up",))) / 2**20 for task in range(2)]
    falling = 1.0 if settings.method.model_dump()["rank_rule"] == "energy" else None
    bench.figure(case, "times the first task's basis bytes", sent[1] / sent[0], "≤", falling)
    for place, record in enumerate(find(table=9, method="fedprotip", kind="basis", task=(1, 2))):
        what = f"MiB of bases a client sends in task {place + 1}; goal: the paper's"
        bench.figure(case, what, sent[place], "≤", None, record.value)
    bench.figure(case, "mean r/d of the layers during the task", share, "≤")


def _projection(settings: Settings, base: str) -> tuple[float, float]:
    """Operations that projection needs at least in the second task, all steps of all clients; and the mean r/d."""
    stream = inside.build_stream(settings)
    network, ranks = inside.network_of(settings, stream), {name: phi.shape[1] for name, phi in _bases(base).items()}
    every = [layer for group in find_layers(network.backbone, only_trainable=False).values() for layer in group]
    layers = [layer for layer in every if layer.name in ranks]
    image, _ = stream.train_batch(1, stream.tasks[1].train[:1])
    columns = textbook.unfold_inputs(network, image, [layer.parameter for layer in layers])
    at_once = {layer.name: settings.train.batch * columns[layer.parameter].shape[1] for layer in layers}
    step = sum(operations(layer, ranks[layer.name], at_once[layer.name]) for layer in layers)
    present = [client for client in stream.clients(1) if len(stream.client_samples(1, client))]
    steps = sum(len(list(inside.batches(stream, settings, 1, 0, client))) for client in present)
    return settings.train.rounds * step * steps, mean(ranks[layer.name] / layer.d for layer in layers)


def _bases(run: str | Path) -> dict[str, Tensor]:
    """Φ of every layer, as a run left it that was stopped."""
    known = inside.Checkpoints(Path(run)).groups["known-subspaces"]
    prefix = "subspaces/layers/"
    return {name.removeprefix(prefix): basis for name, basis in known.items() if name.startswith(prefix)}


def model(run: str | Path) -> Path:
    """A file with the model of a run that was stopped after a task."""
    path = Path(f"{run}.safetensors")
    save_file(inside.Checkpoints(Path(run)).groups["model"], path)
    return path


def _same(run: Path, other: Path, start: Path, tolerance: float = 1e-2) -> Agreement:
    return inputs.same_models(model(run), model(other), model(start), tolerance)


def compare(bench: Bench, other: Path, size: Size) -> None:
    """The second task by the present code and by that of another checkout, FedProTIP and FedAvg in turns."""
    folder, sides, sources = bench.folder, {}, {}
    for method in METHODS:
        for side, source in ((method, SOURCE), (f"{method} before", other.resolve() / "src")):
            base, sources[side] = _learn(bench, side, method, size, source), source
            sides[side] = runs.next_task, base, str(folder / side), bench.name

    def agree(results: dict[str, Any]) -> Agreement:
        found = []
        for method in METHODS:
            places = folder / method, folder / f"{method} before", folder / f"base {method} before"
            found.append(_same(*places, tolerance=5e-2))
        return max(found, key=lambda agreement: agreement[1])

    case = bench.measure_apart("now and before", sides, agree, sources)
    for method in METHODS:
        for what, by_side in (("seconds", case.seconds), ("CPU seconds", case.cpu), ("peak memory", case.peaks)):
            if by_side:
                ratio = by_side[method] / by_side[f"{method} before"]
                bench.figure(case, f"{method}: times the {what} of before", ratio, "≤", WITHIN)
