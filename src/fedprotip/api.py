"""From settings to a finished run folder, in Python.

import fedprotip
summary = fedprotip.run({"train": {"rounds": 5}}, out="runs/mine")
summary = fedprotip.extend("runs/mine", tasks=1)
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fedprotip import settings as settings_file
from fedprotip.errors import FedprotipError, RunError, UnknownName, UsageError, shortened
from fedprotip.evaluation.summary import summarise
from fedprotip.federation.engines import build_engine, private_state, refuse_elsewhere
from fedprotip.federation.engines.workplace import modules_of
from fedprotip.federation.geometry import Probe
from fedprotip.federation.journal import Journal
from fedprotip.federation.loop import run_tasks
from fedprotip.federation.needs import check_memory, needs, products
from fedprotip.federation.server import Progress, Server
from fedprotip.inference import predictor
from fedprotip.messages import BadMessage
from fedprotip.methods import create_method
from fedprotip.methods.parts.private import refuse_noisy_norms
from fedprotip.methods.parts.training import build_optimizer
from fedprotip.models import Network, build_network
from fedprotip.models.capture import find_layers
from fedprotip.models.freeze import frozen_prefixes
from fedprotip.models.prefix import PrefixCache
from fedprotip.models.state import device_of, full_state
from fedprotip.report import write_report
from fedprotip.settings import TASKS, Settings, parse_ids, placed, relocated, seen_from, to_toml
from fedprotip.store.answers import Answers
from fedprotip.store.events import Event, Note, Observer, Started, Step, Warned, read_events
from fedprotip.store.folder import ANSWERS, MEMORY, RunFolder, explained, free_path
from fedprotip.store.records import one_line
from fedprotip.store.results import Memory
from fedprotip.stream import Stream, build_stream, check_clients, spelled_out
from fedprotip.stream.advice import alike_warnings
from fedprotip.stream.changes import Standing, check_data
from fedprotip.stream.inspection import check_images
from fedprotip.stream.kept import Settled, grown
from fedprotip.track import require as require_trackers
from fedprotip.track import tracked

SHORT = 2**25
"""Multiplications of a product, about a millisecond of a core, below which a second thread costs more than it brings:
docs/decisions.md."""

Source = Settings | Mapping[str, Any] | str | Path | None


def run(
    settings: Source = None,
    overrides: Iterable[str] = (),
    out: str | Path | None = None,
    observers: Iterable[Observer] = (),
    preset: str = "",
) -> dict[str, Any]:
    """Run all tasks and return the summary (as in summary.json).

    Args:
        settings: Settings, a nested mapping, the path of a TOML file, or None for the defaults.
        overrides: assignments such as "train.rounds=5" on top.
        out: run folder; must be empty or missing. None: `run.out`, or a free name under runs/.
        observers: called with every event as it happens.
        preset: "paper" for the paper's own settings below yours, instead of the defaults.
    """
    observers = list(observers)

    def note(text: str) -> None:
        _notify(observers, Note(text=text))

    wanted = spelled_out(settings_file.load(settings, overrides, note, preset), note)
    path = Path(out or wanted.run.out or free_path(_default_folder(wanted)))
    wanted = wanted.model_copy(update={"run": wanted.run.model_copy(update={"out": str(path)})})
    network = check(settings_file.load(wanted))  # the folder's name is a setting too
    with _threads(wanted.run.threads or sensible_threads(network, wanted)):
        needs = [module for module in modules_of(wanted) if module != "__main__"]
        folder = RunFolder.create(path, to_toml(seen_from(wanted, path)), needs)
        with folder.locked(), tracked(folder.path, wanted, observers) as told:
            return _complete(folder, wanted, told)


def resume(
    path: str | Path, observers: Iterable[Observer] = (), accept_data: bool = False, overrides: Iterable[str] = ()
) -> dict[str, Any]:
    """Continue an interrupted run from its last good checkpoint; a finished one is left as it is.

    Args:
        accept_data: go on although samples were added, removed or changed, where that is honest.
        overrides: where the data is now, such as "data.source=elsewhere/photos"; nothing else can change.
    """
    folder, observers = RunFolder.open(Path(path), to_continue=True), list(observers)
    with explained(folder.path), folder.locked():
        own = _settings_of(folder, folder.settings(lambda text: _notify(observers, Warned(text=text))))
        moved = relocated(own, overrides, folder.path)
        if folder.manifest().status != "finished":
            refuse_elsewhere(own, folder.path)
            _refuse_former_images(folder, own)
        elif moved != own:
            raise UsageError(f"{path} is finished and needs no data; say where it is when you extend the run.")
        text = to_toml(moved) if moved != own else ""
        going_on = placed(moved, folder.path)
        with _threads(folder.manifest().threads or own.run.threads), tracked(folder.path, going_on, observers) as told:
            return _complete(folder, going_on, told, accept_data, text)


def extend(
    path: str | Path,
    tasks: int = 1,
    clients: str | None = None,
    observers: Iterable[Observer] = (),
    accept_data: bool = False,
    overrides: Iterable[str] = (),
) -> dict[str, Any]:
    """Continue a finished run with further tasks, and with other clients if given (such as "0-2,7").

    Data of the new tasks is new; that of former ones is not needed. `overrides`: as for `resume`.
    """
    folder = RunFolder.open(Path(path), to_continue=True)
    old = _settings_of(folder, folder.settings())
    if folder.manifest().status != "finished":
        raise UsageError(f"{path} is not finished; finish it first with: fedprotip resume {path}.")
    refuse_elsewhere(old, folder.path)
    _refuse_former_images(folder, old)
    if tasks < 1:
        raise UsageError(f"--tasks {tasks} adds nothing; the nearest valid value is 1.")
    if tasks > TASKS - old.stream.tasks:
        raise UsageError(f"--tasks {tasks} is more than a run can have; {TASKS - old.stream.tasks} can be added.")
    raw = relocated(old, overrides, folder.path).model_dump()
    raw["stream"]["tasks"] = old.stream.tasks + tasks
    if isinstance(old.stream.task_size, list):
        raw["stream"]["task_size"] = old.stream.task_size + old.stream.task_size[-1:] * tasks
    if clients is not None:
        try:
            parse_ids(clients)
        except ValueError as error:
            raise UsageError(f"--clients: {error}.") from None
        raw["clients"]["roster"] = old.clients.roster | {str(old.stream.tasks): clients}
    settings = placed(settings_file.load(raw), folder.path)
    stream = _stream_of(folder, settings, old.stream.tasks)
    check(_without_weights(settings), stream)
    check_data(folder, stream, Standing(old.stream.tasks, rereads=settings.run.geometry > 0), accept_data)
    observers = list(observers)
    for text in alike_warnings(stream.dataset) if stream.newcomers else ():
        _notify(observers, Warned(text=text))
    if isinstance(old.stream.order, list):
        raw["stream"]["order"] = grown(old.stream.order, stream.newcomers)
    with explained(folder.path), folder.locked():
        folder.change_settings(to_toml(settings_file.load(raw)))
    return resume(path, observers, accept_data)


def inspect(path: str | Path) -> dict[str, Any]:
    """What a run folder holds: where it stands, its result, versions, and whether its files are intact."""
    folder = RunFolder.open(Path(path))
    manifest = folder.manifest()
    settings = _settings_of(folder, folder.manifest_settings())
    facts: dict[str, Any] = {
        "folder": str(folder.path),
        "status": manifest.status,
        "method": settings.method.name,
        "data": settings.data.name,
        "tasks": settings.stream.tasks,
        "clients": settings.clients.count,
        "seed": settings.run.seed,
    }
    if manifest.needs:
        facts["modules"] = ", ".join(manifest.needs)
    if folder.has("summary.json"):
        summary = folder.summary()
        facts["tasks done"] = summary.tasks
        facts["accuracy"] = {mode: round(value, 2) for mode, value in summary.accuracy.items()}
        facts["forgetting"] = {mode: round(value, 2) for mode, value in summary.forgetting.items()}
    facts |= {"versions": manifest.versions, "files": folder.verify(), "to continue": folder.examine()}
    return facts | ({"answers": _answers(folder)} if manifest.status == "finished" else {})


def _answers(folder: RunFolder) -> str:
    """Whether a finished run answers, or the sentence with which it refuses to."""
    try:
        predictor.load(folder.path)
    except FedprotipError as error:
        return str(error)
    return "yes"


def check(settings: Settings, stream: Stream | None = None, images: bool = True) -> Network:
    """Refuse what cannot run, before any work and before anything is written; the network it would run with.

    Args:
        images: decode image files too, if there are not too many.
    """
    method = create_method(settings)
    stream = stream or build_stream(settings)
    check_clients(stream)
    check_memory(needs(settings, method, stream))
    network = build_network(settings, stream.dataset.image_shape, method.routes)
    check_memory([products(settings, method, network.stacked)])
    _check_optimizer(settings)
    refuse_noisy_norms(network, settings)
    if settings.run.geometry and not method.protects:
        raise UsageError(
            f"run.geometry measures subspaces, and {method.name!r} has none; the nearest valid value is 0."
        )
    if settings.run.geometry and all(name.startswith(frozen_prefixes(settings.model, 1)) for name in _weights(network)):
        raise UsageError(
            f"run.geometry measures what is projected, and model.freeze = {settings.model.freeze!r} leaves nothing; "
            "the nearest valid value is 0."
        )
    if settings.model.head == "shared" and settings.stream.scenario == "class" and len(stream.tasks) > 1:
        raise UsageError(
            "model.head = 'shared' needs stream.scenario = 'domain'; the nearest valid choice is 'per_task'."
        )
    if settings.run.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("run.device = 'cuda': torch sees no GPU here; the nearest valid choice is 'cpu'.")
    require_trackers(settings.run.track)
    if images:
        check_images(stream.dataset)
    return network


def _check_optimizer(settings: Settings) -> None:
    """Options may be of the right type and still impossible: a step shows it."""
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    try:
        optimizer = build_optimizer(settings.train, [weight])
        if settings.train.optimizer_options:
            optimizer.step()
    except UsageError:
        raise
    except Exception as error:  # whatever torch makes of impossible numbers
        options = shortened(str(settings.train.optimizer_options))
        raise UsageError(
            f"train.optimizer = {settings.train.optimizer!r} cannot make a step with train.lr = {settings.train.lr} "
            f"and train.optimizer_options = {options}: {str(error).partition(chr(10))[0].rstrip('.')}."
        ) from None


def sensible_threads(network: Network, settings: Settings) -> int:
    """1 for a small network, whose products are too short to be shared; else 0: torch's own choice."""
    return 1 if 0 < settings.train.batch * network.longest < SHORT else 0


def _weights(network: Network) -> list[str]:
    """Names of the backbone's weights that have an input subspace."""
    return list(find_layers(network.backbone, only_trainable=False))


def _complete(
    folder: RunFolder, settings: Settings, observers: list[Observer], accept_data: bool = False, text: str = ""
) -> dict[str, Any]:
    """Bring a run folder from wherever it stands to its end; `text`: its settings, if they are to be written anew."""
    method, store = create_method(settings), folder.store(settings.run.state_mb)
    journal = Journal(folder, store, observers)

    def note(text: str) -> None:
        _notify(observers, Note(text=text))

    def warn(text: str) -> None:
        _notify(observers, Warned(text=text))

    with explained(folder.path):
        folder.sweep()
        finished = folder.manifest().status == "finished"
        if finished:
            folder.require_intact()
        saved = folder.restore(store, warn)
        with _fitting(folder):
            progress = Progress.of(saved[0], settings.stream.tasks) if saved else Progress()
        if finished:
            return _finished(folder, settings, observers)
        stream = _stream_of(folder, settings, progress.task)
        standing = Standing(progress.task, progress.round, rereads=settings.run.geometry > 0)
        folder.write_data(*check_data(folder, stream, standing, accept_data, note, warn))
        if gone := [str(task.index + 1) for task in stream.tasks if not len(task.test)]:
            note(f"There is no test data of task {', '.join(gone)}: it is not evaluated any more.")
        if text:
            folder.change_settings(text)
        shape, device = stream.dataset.image_shape, device_of(settings.run.device)
        initial = _without_weights(settings) if saved else settings  # a checkpoint holds all weights
        network = build_network(initial, shape, method.routes).to(device)
        cache = PrefixCache(stream, settings, folder.path, enabled=not method.sees_images)
        server = Server(settings, method, network, stream, cache)
        server.site.on_progress = lambda what, done, total: _notify(observers, Step(what=what, done=done, total=total))
        if saved:
            with _fitting(folder):
                server.restore(*saved)
        engine = build_engine(server, store, folder.path)
        private = private_state(settings, store, folder.path)
        probe = Probe(server, settings.run.geometry, private) if settings.run.geometry else None
        if probe and saved:
            with _fitting(folder):
                probe.restore(saved[1].get("geometry", {}))
        done, total = server.progress.task, len(stream.tasks)
        rounds = max(settings.train.rounds, method.rounds(0))
        _notify(observers, Started(folder=str(folder.path), tasks=total, rounds=rounds, done=done))
        try:
            run_tasks(server, probe.watch(engine) if probe else engine, journal, probe)
        finally:
            engine.close()
            journal.flush()
            cache.close()
        if probe:
            folder.write_json("geometry.json", probe.report().plain())
        _write_artefacts(folder, server, settings)
        folder.drop_spares()
        write_report(folder.path)
    return folder.summary().plain()


def _finished(folder: RunFolder, settings: Settings, observers: list[Observer]) -> dict[str, Any]:
    """A finished run needs neither its data nor its model to say what it found."""
    total, rounds = settings.stream.tasks, settings.train.rounds
    _notify(observers, Started(folder=str(folder.path), tasks=total, rounds=rounds, done=total))
    folder.drop_spares()
    if not folder.has("report.html"):
        write_report(folder.path)
    return folder.summary().plain()


def _write_artefacts(folder: RunFolder, server: Server, settings: Settings) -> None:
    """The files that report, predict and export read; the manifest with their hashes comes last."""
    for name, tensors in {"model": full_state(server.network), **server.site.known.artefacts()}.items():
        folder.write_tensors(f"{name}.safetensors", tensors)
    folder.write_json("plan.json", server.plan(len(server.stream.tasks) - 1).model_dump(mode="json"))
    folder.remove("report.html")  # an older one must not outlive its numbers
    memory = Memory.model_validate(server.progress.memory)
    folder.write_json(MEMORY, memory.plain())
    if answers := server.progress.routing.get("answers"):
        folder.write(ANSWERS, json.dumps(Answers.model_validate(answers).plain(), ensure_ascii=False) + "\n")
    peak_gpu = max(memory.peaks("gpu").values(), default=None)
    events = read_events(folder.path / "events.jsonl")
    folder.write_json("summary.json", summarise(settings, server.state(), events, peak_gpu).plain())
    folder.write_manifest("finished", folder.manifest().settings, seed=settings.run.seed)


@contextmanager
def _fitting(folder: RunFolder) -> Iterator[None]:
    """A checkpoint that has its hash, and yet was not made by a run with these settings, is a sentence."""
    try:
        yield
    except (ArithmeticError, AttributeError, BadMessage, LookupError, RuntimeError, TypeError, ValueError) as error:
        told = one_line(f"{type(error).__name__}: {error}", 200)
        raise RunError(f"The checkpoint of {folder.path} does not fit its settings ({told}); start again.") from error


def _without_weights(settings: Settings) -> Settings:
    return settings.model_copy(update={"model": settings.model.model_copy(update={"weights": ""})})


def _stream_of(folder: RunFolder, settings: Settings, learned: int) -> Stream:
    """The stream of a run that goes on and has learned so many tasks: by the names it has settled, not by its data."""
    try:
        return build_stream(settings, kept=Settled.of(folder.read_data()[0], learned))
    except UsageError:
        for key in ("source", "root"):
            place = getattr(settings.data, key)
            if place and not os.path.exists(place):
                raise UsageError(
                    f"data.{key} of {folder.path}, {place}, is not there; "
                    f"if it has moved, say where it is now by --set data.{key}=PLACE."
                ) from None
        raise


def _refuse_former_images(folder: RunFolder, settings: Settings) -> None:
    """Before `data.fit` own images were brought to another shape in another way: one run must not see both."""
    data = settings.data
    as_they_are = data.source.lower().endswith(".npz") and not data.sides
    if data.name == "own" and "fit" not in folder.manifest_settings()["data"] and not as_they_are:
        raise UsageError(
            f"{folder.path} was begun by a version that cut own images in another way; "
            "finish it with that one, or start another run."
        )


def _settings_of(folder: RunFolder, raw: Mapping[str, Any]) -> Settings:
    """The settings of a run; what nobody here has registered is named, with the modules that had it."""
    try:
        return settings_file.load(raw)
    except UnknownName as error:
        needs = folder.manifest().needs
        had = f"the run had {shortened(', '.join(needs))}" if needs else "another module had it"
        raise UsageError(
            f"{folder.path} needs {error.key} = {shortened(error.name)!r}, which is not registered here; {had}: "
            "give each with --import, or install the package that has it."
        ) from None


class _threads:
    """Use this many torch threads inside, and the former number after; 0: leave them alone."""

    def __init__(self, wanted: int) -> None:
        self._wanted, self._before = wanted, torch.get_num_threads()

    def __enter__(self) -> None:
        if self._wanted:
            torch.set_num_threads(self._wanted)

    def __exit__(self, *error: object) -> None:
        torch.set_num_threads(self._before)


def _default_folder(settings: Settings) -> Path:
    return Path("runs") / f"{settings.data.name}-{settings.method.name}-s{settings.run.seed}"


def _notify(observers: list[Observer], event: Event) -> None:
    for observer in observers:
        observer(event)
