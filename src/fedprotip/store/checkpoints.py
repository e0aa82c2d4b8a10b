"""Checkpoints of a run: where it stood, so that it goes on from there.

A checkpoint is an index that names immutable objects by their hash. Objects are written first, the index last, each
atomically, so a crash leaves the old checkpoint or the new one and never half of one. What did not change since the
last checkpoint is neither read nor written again; what two checkpoints share is kept twice.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from fedprotip.errors import RunError
from fedprotip.store.clients import ClientStore
from fedprotip.store.files import Tensors, hash_of
from fedprotip.store.objects import Index, ObjectFolder, ObjectName, sealed, unsealed
from fedprotip.store.plain import TEXT, UNFINISHED, PlainFolder

CHECKPOINT = "checkpoint"
INDEX = "[0-9]" * 8 + ".json"
LOGS = ("events.jsonl", "ledger.jsonl")
Log = Literal["events.jsonl", "ledger.jsonl"]
END = 2**16
"""Bytes at the end of a log by which a checkpoint knows it again: what a run took for seconds, no other one did."""


class CheckpointIndex(Index):
    """`checkpoint/00000042.json`"""

    clients: dict[str, ObjectName]  # "client/name" → its private state
    logs: dict[Log, Annotated[int, Field(ge=0)]]  # their lengths
    ends: dict[Log, str] = {}  # hashes of their ends; checkpoints from before have none


@dataclass(frozen=True)
class Named:
    """The objects that a checkpoint names."""

    groups: set[str] = field(default_factory=set)
    clients: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, index: CheckpointIndex) -> "Named":
        return cls(index.names, set(index.clients.values()))


class Checkpoints:
    """The last two checkpoints of a run, and the logs of its folder, which are cut back to the one it goes on from."""

    def __init__(self, run: PlainFolder) -> None:
        self._run, self.folder = run, run.inner(CHECKPOINT)
        self.objects = ObjectFolder(self.folder.path / "objects", run.top)
        self._step = 0
        self._named: dict[int, Named] = {}  # by the number of each checkpoint that is kept

    @property
    def there(self) -> bool:
        """Whether the run has any place for them: one that only answers may have none."""
        return CHECKPOINT in self._run.folders()

    def names(self) -> list[str]:
        return self.folder.names(INDEX)

    def check(self, name: str) -> None:
        """Raise RunError unless a checkpoint, its objects and the logs up to it are whole; nothing is written."""
        index = self._read(name)
        self.objects.verify(sorted({*index.names, *index.clients.values()}), mend=False)
        self._check_logs(index)

    def save(self, state: Mapping[str, Any], groups: Mapping[str, Tensors], store: ClientStore) -> None:
        """Save a state (JSON) and groups of tensors so that `restore` gives exactly them back."""
        sizes = {log: self._run.size(log, synced=True) for log in LOGS}
        index = {
            "state": dict(state),
            "groups": {name: self.objects.write_group(name, tensors) for name, tensors in groups.items()},
            "clients": store.flush(),
            "logs": sizes,
            "ends": {log: self._end(log, size) for log, size in sizes.items()},
        }
        named = Named(set(index["groups"].values()), set(index["clients"].values()))
        self.objects.duplicate(sorted(named.groups & self._named.get(self._step, Named()).groups))
        self._step += 1
        self.folder.write(_name(self._step), sealed(index))
        self._named = {step: kept for step, kept in self._named.items() if step == self._step - 1}
        self._named[self._step] = named
        self._clean()

    def restore(
        self, store: ClientStore, warn: Callable[[str], None]
    ) -> tuple[dict[str, Any], dict[str, Tensors]] | None:
        """The newest good checkpoint (state, groups), or None when there is none yet.

        A damaged index or object is recognised by its hash; then the checkpoint before it is used and
        `warn` says so. Private state of clients is kept once: where no checkpoint has all of it, clients go on
        without what is lost, as one would that lost its folder, and `warn` says that.
        """
        found = sorted(self.names(), reverse=True)
        partly: tuple[str, CheckpointIndex, dict[str, Tensors]] | None = None
        for name in found:
            try:
                index = self._read(name)
                self.objects.verify(sorted(index.names))
                self._check_logs(index)
                groups = {group: self.objects.read(obj) for group, obj in index.groups.items()}
                partly = partly or (name, index, groups)
                self.objects.verify(sorted(index.clients.values()))
            except (RunError, OSError) as error:
                warn(f"Checkpoint {name} is damaged ({error}); the one before it is used.")
                continue
            return self._stand_at(name, index, groups, store)
        if partly:
            name, index, groups = partly
            good = {key: obj for key, obj in index.clients.items() if self._is_good(obj)}
            lost = sorted(index.clients.keys() - good.keys())
            warn(f"So {name} is used after all, without what is lost: private state of clients ({', '.join(lost)}).")
            return self._stand_at(name, index.model_copy(update={"clients": good}), groups, store)
        if found:
            raise RunError(f"No checkpoint of {self._run.path} can be read; start again with: fedprotip run.")
        return None

    def begin(self) -> None:
        """Before the first checkpoint: nothing that was logged counts."""
        self._cut_logs(dict.fromkeys(LOGS, 0))
        self._clean()

    def drop_spares(self) -> None:
        """Keep the newest alone, once: older states and all second copies go."""
        self._named = {step: named for step, named in self._named.items() if step == self._step}
        if self._named:
            self._clean(spares=False)

    def _stand_at(
        self, name: str, index: CheckpointIndex, groups: dict[str, Tensors], store: ClientStore
    ) -> tuple[dict[str, Any], dict[str, Tensors]]:
        self._cut_logs(index.logs)
        self._step = int(name[:8])
        self._named = {self._step: Named.of(index)} | self._older()
        self._clean()
        store.restore(index.clients)
        return index.state, groups

    def _is_good(self, obj: str) -> bool:
        try:
            self.objects.verify([obj])
        except RunError:
            return False
        return True

    def _older(self) -> dict[int, Named]:
        """The objects of the checkpoint before the current one, kept in case the current one is damaged later."""
        with suppress(RunError, OSError):
            return {self._step - 1: Named.of(self._read(_name(self._step - 1)))}
        return {}

    def _read(self, name: str) -> CheckpointIndex:
        return CheckpointIndex.model_validate(unsealed(self.folder.read(name, TEXT)))

    def _check_logs(self, index: CheckpointIndex) -> None:
        """Raise RunError unless the logs begin as they did when it was saved."""
        for log, size in index.logs.items():
            if self._run.size(log) < size:
                raise RunError(f"{log} is shorter than it should be")
            if log in index.ends and self._end(log, size) != index.ends[log]:
                raise RunError(f"{log} is not the one that it was saved beside")

    def _end(self, log: str, size: int) -> str:
        """The hash of the last bytes of a log, had it this length."""
        start = max(size - END, 0)
        return hash_of(self._run.piece(log, start, size - start))

    def _cut_logs(self, sizes: Mapping[Any, int]) -> None:
        for log, size in sizes.items():
            self._run.cut(log, size)

    def _clean(self, spares: bool = True) -> None:
        """Remove every checkpoint, object and half-written file that is no longer needed."""
        for name in self.names():
            if int(name[:8]) not in self._named:
                self.folder.remove(name)
        groups, clients = ([getattr(named, kind) for named in self._named.values()] for kind in ("groups", "clients"))
        shared = set.intersection(*groups) if groups and spares else set[str]()
        self.objects.keep_only(set[str]().union(*groups, *clients), twice=shared)
        for folder in (self.folder, self._run):
            for name in folder.names(f"*{UNFINISHED}"):
                folder.remove(name)


def _name(step: int) -> str:
    return f"{step:08d}.json"
