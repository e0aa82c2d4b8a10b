"""The stream of a run: every task's classes, test samples, and each client's training samples."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from fedprotip.errors import UsageError, shortened
from fedprotip.seeds import numpy_stream, torch_stream
from fedprotip.settings import Settings
from fedprotip.stream.datasets import Dataset, load_dataset
from fedprotip.stream.images import FileImages, Images, ahead
from fedprotip.stream.kept import NOTHING, Settled
from fedprotip.stream.look import Look
from fedprotip.stream.partition import split_by_owner, split_dirichlet, split_iid
from fedprotip.stream.plan import Answering, Pixels, Plan, TaskPlan
from fedprotip.stream.tasks import class_tasks, further, ordered, too_few
from fedprotip.stream.transforms import Augmentation, Draws, augment, both_ways, draw

Batch = tuple[Tensor, Tensor]
"""Normalised images (n, c, h, w) and global labels (n,)."""


@dataclass(frozen=True)
class Task:
    """One task: its classes (global labels, in the order of its head) and its samples (indices)."""

    index: int
    name: str
    classes: tuple[int, ...]
    train: np.ndarray
    test: np.ndarray

    @property
    def place(self) -> str:
        """As a sentence names it; its name may be that of all its classes."""
        return f"Task {self.index + 1} ({shortened(self.name, 80)})"


class Stream:
    """Tasks over one dataset, and who holds which sample. Holds indices; images stay in the dataset."""

    def __init__(self, dataset: Dataset, tasks: list[Task], settings: Settings, kept: Settled = NOTHING) -> None:
        self.dataset = dataset
        self.tasks = tasks
        self.settings = settings
        self.kept = kept
        scales = {"dataset": (dataset.mean, dataset.std), "half": ((0.5,), (0.5,)), "none": ((0.0,), (1.0,))}
        mean, std = (tuple(map(float, values)) for values in scales[settings.data.normalize])
        channels, height, width = dataset.train_images.shape[1:]
        files = dataset.train_images if isinstance(dataset.train_images, FileImages) else dataset
        self.pixels = Pixels(
            shape=dataset.image_shape,
            given=(channels, height, width),
            mean=mean,
            std=std,
            fit=settings.data.fit,
            resize=files.resize,
        )
        self._shares = lru_cache(maxsize=2)(self._partition)
        self._views = lru_cache(maxsize=1)(self._draw_views)

    @property
    def look(self) -> Look:
        """What a method that makes images of its own has to know about those of the data."""
        return Look(self.pixels, self.dataset.augmentation, self.varied, tuple(self.dataset.classes))

    @property
    def varied(self) -> Augmentation | None:
        """What `train.augment` does to the images that are trained on; None: nothing."""
        how, kind = self.dataset.augmentation, self.settings.train.augment
        return None if kind == "none" else how.mirrored() if kind == "flip" else how

    @property
    def views(self) -> int:
        """Fixed views of every image that is trained on; 0: it is new every time, or never anything else."""
        kind = self.settings.train.augment
        return 2 if kind == "flip" else self.settings.train.views if kind == "standard" else 0

    @property
    def owners(self) -> np.ndarray | None:
        """Client ids of all training samples (n,) where the data says them and is asked for them."""
        return self._named(self.dataset.train_clients)

    @property
    def test_owners(self) -> np.ndarray | None:
        """Client ids of all test samples (n,), likewise."""
        return self._named(self.dataset.test_clients)

    @cached_property
    def client_names(self) -> Mapping[int, str]:
        """Names of clients, likewise, as far as they have one beside their id."""
        names = self.dataset.clients if self.owners is not None else ()
        return {client: name for client, name in enumerate(names) if name != str(client)}

    def _named(self, clients: Tensor | None) -> np.ndarray | None:
        return clients.numpy() if clients is not None and self.settings.stream.source == "columns" else None

    @property
    def coming(self) -> list[Task]:
        """The tasks that are still to be learned."""
        return self.tasks[self.kept.learned :]

    @property
    def newcomers(self) -> list[str]:
        """Names that `stream.order` could not list, because the run did not know them when it was last at work."""
        stream, data = self.settings.stream, self.dataset
        by_name = stream.scenario == "domain" or (stream.source == "columns" and bool(data.domains))
        return list(data.domains[len(self.kept.domains) :] if by_name else data.classes[len(self.kept.classes) :])

    def clients(self, task: int) -> list[int]:
        """Ids of the clients that take part in a task."""
        return self.settings.clients.active(task)

    def with_clients(self, count: int) -> "Stream":
        """The same tasks, shared out among so many clients."""
        clients = self.settings.clients.model_copy(update={"count": count, "roster": {}})
        return Stream(self.dataset, self.tasks, self.settings.model_copy(update={"clients": clients}), self.kept)

    def client_samples(self, task: int, client: int) -> np.ndarray:
        """Training samples of a client in a task; empty when it has none."""
        return self._share(task, client)[0]

    def held_back(self, task: int, client: int) -> np.ndarray:
        """Samples of a client in a task that it does not train on (`clients.held_back`)."""
        return self._share(task, client)[1]

    def _share(self, task: int, client: int) -> tuple[np.ndarray, np.ndarray]:
        """What a client holds of a task: to train on, and held back. At least one sample is trained on.

        Where the share is less than one sample, chance holds one back as often: of many small clients some do.
        """
        held = self._shares(task).get(client, self.tasks[task].train[:0])
        chance = numpy_stream(self.settings.run.seed, "held_back", task, client)
        wanted = self.settings.clients.held_back * len(held)
        count = int(chance.random() < wanted) if wanted < 1 else int(wanted)
        count = min(count, max(len(held) - 1, 0))
        if not count:
            return held, held[:0]
        order = chance.permutation(len(held))
        return held[np.sort(order[count:])], held[np.sort(order[:count])]

    def train_batch(self, task: int, indices: np.ndarray, generator: torch.Generator | None = None) -> Batch:
        """Training samples; with a generator they are augmented as `train.augment` asks."""
        return next(self.train_batches(task, [indices], generator))

    def train_batches(
        self, task: int, batches: Iterable[np.ndarray], generator: torch.Generator | None = None
    ) -> Iterator[Batch]:
        """The same batch after batch, and while one is used the image files of the next are decoded."""
        images, labels = self.dataset.train_images, self.dataset.train_labels
        chance = generator if self.varied else None
        return ahead(
            self._request(task, images, labels, indices, draw(len(indices), chance) if chance else None)
            for indices in batches
        )

    def view_batches(self, task: int, batches: Iterable[tuple[np.ndarray, np.ndarray]]) -> Iterator[Batch]:
        """Training samples in fixed augmented views (`train.views`): batches of (samples, which view of each)."""
        images, labels, everyone = self.dataset.train_images, self.dataset.train_labels, self.tasks[task].train
        draws = self._views(task)
        for_batch = ((s, torch.from_numpy(np.searchsorted(everyone, s) + len(everyone) * v)) for s, v in batches)
        return ahead(self._request(task, images, labels, samples, draws[rows]) for samples, rows in for_batch)

    def test_batch(self, task: int, indices: np.ndarray) -> Batch:
        return self._request(task, self.dataset.test_images, self.dataset.test_labels, indices)()

    def test_batches(self, task: int, batches: Iterable[np.ndarray]) -> Iterator[Batch]:
        images, labels = self.dataset.test_images, self.dataset.test_labels
        return ahead(self._request(task, images, labels, indices) for indices in batches)

    def plan(self, answering: Answering, shared_head: bool, tasks: int) -> Plan:
        """What whoever answers for the first `tasks` tasks has to know, without the data."""
        model = {"weights": "", "head": "shared" if shared_head else "per_task"}
        return Plan(
            classes=tuple(self.dataset.classes),
            tasks=tuple(TaskPlan(name=task.name, classes=task.classes) for task in self.tasks[:tasks]),
            scenario=self.settings.stream.scenario,
            pixels=self.pixels,
            model=self.settings.model.model_copy(update=model),
            seed=self.settings.run.seed,
            answering=answering,
        )

    def _request(
        self,
        task: int,
        images: Images,
        labels: Tensor,
        indices: np.ndarray,
        draws: Draws | None = None,
    ) -> Callable[[], Batch]:
        """Start to read a batch, augmented by `draws`; the function returned finishes it."""
        chosen, how = torch.from_numpy(indices), self.varied or Augmentation()
        files = images.request(chosen, draws if how.resized else None) if isinstance(images, FileImages) else None

        def finish() -> Batch:
            raw = files() if files else images[chosen]
            scaled = augment(raw, draws, how) if draws else raw.float() / 255
            return self._shift(self.pixels.normalised(scaled), task), labels[chosen]

        return finish

    def _shift(self, images: Tensor, task: int) -> Tensor:
        """Made domains: quarter turns, or a pixel permutation of its own for every task but the first."""
        kind = self.settings.stream.domains
        if self.settings.stream.scenario != "domain" or kind == "labelled" or task == 0:
            return images
        if kind == "rotate":
            return torch.rot90(images, task % 4, dims=(2, 3))
        flat = images.flatten(2)
        order = torch.randperm(flat.shape[2], generator=torch_stream(self.settings.run.seed, "permute", task))
        return flat[:, :, order].view_as(images)

    def _draw_views(self, task: int) -> Draws:
        """The chance behind every fixed view of a task: all samples in their first view, then in their second …"""
        count = len(self.tasks[task].train)
        if self.settings.train.augment == "flip":
            return both_ways(count)
        return draw(count * self.views, torch_stream(self.settings.run.seed, "views", task))

    def _partition(self, task: int) -> dict[int, np.ndarray]:
        clients, indices = self.clients(task), self.tasks[task].train
        if self.owners is not None:
            return split_by_owner(indices, self.owners[indices], clients)
        rng = numpy_stream(self.settings.run.seed, "partition", task)
        if self.settings.clients.partition == "iid":
            shares = split_iid(indices, len(clients), rng)
        else:
            labels = self.dataset.train_labels.numpy()[indices]
            shares = split_dirichlet(indices, labels, len(clients), self.settings.clients.alpha, rng)
        return dict(zip(clients, shares, strict=True))


def build_stream(settings: Settings, dataset: Dataset | None = None, kept: Settled = NOTHING) -> Stream:
    """The stream that the settings describe; impossible settings are a UsageError.

    Args:
        kept: of a run that goes on. Its tasks keep their classes; those it has learned need no data any more.
    """
    dataset = dataset or load_dataset(kept.sized(settings.data), kept)
    if settings.stream.source == "columns":
        _refuse_columns(dataset, settings)
    if settings.stream.source == "columns" and dataset.domains:
        tasks = _tasks_of_data(dataset, settings, kept, "task")
    elif settings.stream.scenario == "class":
        if settings.stream.domains != "labelled" and not kept.tasks:
            raise UsageError(
                f"stream.domains = {settings.stream.domains!r} makes domains, which stream.scenario = 'class' does not "
                "have; choose 'domain' there, or leave stream.domains at 'labelled'."
            )
        tasks = _class_incremental(dataset, settings, kept)
    else:
        tasks = _domain_incremental(dataset, settings, kept)
    tasks = [_within_classes(task, dataset, learned=task.index < kept.learned) for task in tasks]
    for task in tasks[kept.learned :]:
        if not len(task.train) or not len(task.test):
            part, every = ("test", dataset.test_labels) if len(task.train) else ("training", dataset.train_labels)
            advice = "leave it out with stream.order" if len(every) else "the data has none at all, and needs some"
            raise UsageError(f"{task.place} has no {part} samples; {advice}.")
    if settings.stream.scenario == "class":
        _refuse_empty_classes(dataset, tasks[kept.learned :])
    if settings.train.augment == "flip" and not dataset.augmentation.flip:
        raise UsageError(f"train.augment = 'flip': {dataset.name!r} mean something else mirrored; choose another.")
    return Stream(dataset, tasks, settings, kept)


def _within_classes(task: Task, dataset: Dataset, learned: bool) -> Task:
    """A task has samples of its own classes alone: others that came later are refused where it is still to be learned.

    What is left of a learned task serves as a test.
    """
    labels = dataset.train_labels.numpy()[task.train]
    known = np.isin(labels, task.classes)
    if not learned and not known.all():
        name = dataset.classes[labels[~known].min()]
        raise UsageError(
            f"{task.place} has no class {name!r} in this run, and the data has samples of it "
            "there; take them out, or start another run."
        )
    tested = np.isin(dataset.test_labels.numpy()[task.test], task.classes)
    return replace(task, train=task.train[known], test=task.test[tested])


def _refuse_empty_classes(dataset: Dataset, tasks: list[Task]) -> None:
    """Every class of a task that is still to be learned can be learned and tested."""
    for part, labels in (("training", dataset.train_labels), ("test", dataset.test_labels)):
        there = set(labels.tolist())
        for task in tasks:
            absent = next((label for label in task.classes if label not in there), None)
            if absent is not None:
                raise UsageError(
                    f"Class {dataset.classes[absent]!r} of task {task.index + 1} has no {part} samples; add some."
                )


def _refuse_columns(dataset: Dataset, settings: Settings) -> None:
    """Columns that are not there, or that contradict other settings."""
    stream, clients = settings.stream, settings.clients
    if not dataset.domains and dataset.train_clients is None:
        raise UsageError(
            f"stream.source = 'columns': dataset {dataset.name!r} says nothing about tasks or clients; "
            "add a column task or client, or choose 'settings'."
        )
    if dataset.domains and (stream.overlap or stream.task_size or stream.domains != "labelled"):
        raise UsageError(
            "stream.source = 'columns' takes the tasks from the data; leave stream.overlap and stream.task_size at 0 "
            "and stream.domains at 'labelled', or choose stream.source = 'settings'."
        )
    largest = -1 if dataset.train_clients is None else int(dataset.train_clients.max())
    if largest >= clients.count and not clients.roster:
        raise UsageError(
            f"clients.count = {clients.count}: the data names client {largest}, counted from 0; "
            f"the nearest valid value is {largest + 1}."
        )


def _tasks_of_data(dataset: Dataset, settings: Settings, kept: Settled, what: str) -> list[Task]:
    """The tasks or domains that the data names; in scenario 'class' each has the classes that it trains."""
    stream, names = settings.stream, list(dataset.domains)
    assert dataset.train_domains is not None
    assert dataset.test_domains is not None
    columns = dataset.train_domains.numpy(), dataset.test_domains.numpy()
    order, planned = ordered(names, stream, settings.run.seed, what), kept.tasks[: stream.tasks]
    if planned:
        settled = [names.index(task.name) for task in planned]
        gone = set(range(len(kept.domains))) - set(columns[0].tolist())
        left = further(order, stream, gone.union(settled), kept.domains, names)
        if len(left) < stream.tasks - len(planned):
            count = stream.tasks - len(planned)
            raise UsageError(too_few(count, count, len(left), f"{what}(s)"))
        order = settled + left
    elif stream.tasks > len(order):
        raise UsageError(
            f"stream.tasks = {stream.tasks}: the data names {len(order)} {what}s; the nearest valid value is that."
        )
    tasks = []
    for index, place in enumerate(order[: stream.tasks]):
        train, test = (np.flatnonzero(column == place) for column in columns)
        if index < len(planned):
            classes = planned[index].classes
        elif stream.scenario == "domain":
            classes = _same_classes(dataset, kept)
        else:
            classes = tuple(sorted(set(dataset.train_labels[train].tolist())))
            _refuse_untrained(dataset, names[place], classes, test)
        tasks.append(Task(index, names[place], classes, train, test))
    return tasks


def _refuse_untrained(dataset: Dataset, task: str, classes: tuple[int, ...], test: np.ndarray) -> None:
    untrained = set(dataset.test_labels[test].tolist()) - set(classes)
    if untrained:
        name = dataset.classes[min(untrained)]
        raise UsageError(f"Task {task!r} tests class {name!r}, but has no training samples of it.")


def _same_classes(dataset: Dataset, kept: Settled) -> tuple[int, ...]:
    """The classes of every task in scenario 'domain'."""
    return kept.tasks[0].classes if kept.tasks else tuple(range(len(dataset.classes)))


def _class_incremental(dataset: Dataset, settings: Settings, kept: Settled) -> list[Task]:
    train_labels, test_labels = dataset.train_labels.numpy(), dataset.test_labels.numpy()
    gone = set(range(len(kept.classes))) - set(train_labels.tolist())
    left: dict[int, np.ndarray] = {}  # samples of a class that no task has taken yet
    tasks = []
    for index, classes in enumerate(class_tasks(dataset.classes, settings.stream, settings.run.seed, kept, gone)):
        parts = []
        for place, label in enumerate(classes):
            rng = numpy_stream(settings.run.seed, "overlap", label)
            samples = left.pop(label, None)
            samples = rng.permutation(np.flatnonzero(train_labels == label)) if samples is None else samples
            if place >= len(classes) - settings.stream.overlap:
                # Half is for the next task, also while there is none yet: so a run can be extended exactly.
                samples, left[label] = np.array_split(samples, 2)
            parts.append(samples)
        name = ", ".join(dataset.classes[label] for label in classes)
        test = np.flatnonzero(np.isin(test_labels, classes))
        tasks.append(Task(index, name, tuple(classes), np.sort(np.concatenate(parts)), test))
    return tasks


def _domain_incremental(dataset: Dataset, settings: Settings, kept: Settled) -> list[Task]:
    stream = settings.stream
    if stream.overlap or stream.task_size:
        raise UsageError("stream.overlap and stream.task_size belong to stream.scenario = 'class'; leave them at 0.")
    if stream.domains == "labelled":
        if dataset.train_domains is None or dataset.test_domains is None:
            raise UsageError(
                f"stream.domains = 'labelled': dataset {dataset.name!r} has no domains; choose 'rotate' or 'permute'."
            )
        return _tasks_of_data(dataset, settings, kept, "domain")
    if stream.domains == "rotate" and stream.tasks > 4:
        raise UsageError(f"stream.tasks = {stream.tasks}: 'rotate' makes quarter turns, the nearest valid value is 4.")
    if stream.domains == "rotate" and dataset.image_shape[1] != dataset.image_shape[2]:
        height, width = dataset.image_shape[1:]
        raise UsageError(
            f"stream.domains = 'rotate' needs square images, those of {dataset.name!r} are {height}×{width}; "
            "choose 'permute'."
        )
    if stream.order != "natural":
        raise UsageError(f"stream.order = {stream.order!r}: made domains have no order; the only choice is 'natural'.")
    train, test = np.arange(len(dataset.train_labels)), np.arange(len(dataset.test_labels))
    everything = _same_classes(dataset, kept)
    return [Task(i, f"{stream.domains} {i}", everything, train, test) for i in range(stream.tasks)]
