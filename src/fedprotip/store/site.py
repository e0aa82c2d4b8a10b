"""A client's own folder: what it was told and what it keeps for itself, as it stood after each question.

A server that was interrupted goes back to its last checkpoint and asks again; so a client keeps its state after every
question since then, and goes back too. What did not change between two questions is one object on disk.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fedprotip.errors import RunError
from fedprotip.store.clients import ClientStore, StoreError
from fedprotip.store.files import Tensors
from fedprotip.store.objects import Index, ObjectFolder, ObjectName, sealed, unsealed
from fedprotip.store.plain import TEXT, UNFINISHED, PlainFolder

STEP = r"[0-9]{8}\.json"
SECRETS = "sum.json"
"""Of a client while a secure sum is under way."""


class SiteIndex(Index):
    """The state of a client after a question."""

    private: dict[str, ObjectName]

    @property
    def names(self) -> set[str]:
        return super().names | set(self.private.values())


class SiteFolder:
    """States by the number of the question after which they stood."""

    def __init__(self, path: Path, budget_mb: int = 64) -> None:
        self.path = path
        self._files = PlainFolder(path, path.parent)
        self._objects = ObjectFolder(path / "objects", path.parent)
        self._objects.create()
        self.store = ClientStore(self._objects, budget_mb * 2**20)

    def steps(self) -> list[int]:
        """The questions whose states are here, in order."""
        return sorted(int(name[:8]) for name in self._files.names() if re.fullmatch(STEP, name))

    def save(self, step: int, state: Mapping[str, Any], groups: Mapping[str, Tensors], keep: int) -> None:
        """The state after a question; those older than the newest one up to `keep` are forgotten."""
        try:
            index = {
                "state": dict(state),
                "groups": {name: self._objects.write_group(name, tensors) for name, tensors in groups.items()},
                "private": self.store.flush(),
            }
            self._files.write(_name(step), sealed(index))
        except OSError as error:
            raise StoreError(error.errno, error.strerror) from error
        needed = max((old for old in self.steps() if old <= keep), default=0)
        self._forget(lambda old: old < needed)

    def restore(self, step: int, life: str = "") -> tuple[dict[str, Any], dict[str, Tensors]] | None:
        """State and groups after a question, and the private state with them; None where they are not here or damaged.

        life: of the server that asked it; its number alone may be that of one which the server has gone back behind.
        What came after that question is forgotten: the server has gone back and asks anew.
        """
        index = self._index(step)
        if index is None or index.state.get("life", "") != life or not self._intact(index.names):
            return None
        try:
            groups = {name: self._objects.read(name_of) for name, name_of in index.groups.items()}
        except RunError:
            return None
        self._forget(lambda other: other > step)
        self.store.restore(index.private)
        return index.state, groups

    def keep_newest(self) -> None:
        """Forget all states but the last, if it is whole, and secrets: the server will not go back any more."""
        remove_secrets(self._files)
        newest = max(self.steps(), default=0)
        index = self._index(newest)
        if index is not None and self._intact(index.names):
            self._forget(lambda step: step < newest)

    def keep_private(self, before: int) -> dict[str, Any]:
        """Take up the newest good private state of a question before this one, and forget what came later.

        For a site that is told everything anew. A server that begins again has no such question: then nothing is kept.
        The state after the newest question that is kept, without its tensors; empty where there is none.
        """
        self._forget(lambda step: step >= before)
        kept = [index for step in reversed(self.steps()) if (index := self._index(step))]
        good = (index.private for index in kept if self._intact(index.private.values()))
        self.store.restore(next(good, {}))
        return kept[0].state if kept else {}

    def _intact(self, names: Iterable[str]) -> bool:
        try:
            self._objects.verify(names)
        except (RunError, OSError):
            return False
        return True

    def _index(self, step: int) -> SiteIndex | None:
        try:
            return self._read(step)
        except (RunError, OSError):
            return None

    def _read(self, step: int) -> SiteIndex:
        return _read(self._files, _name(step))

    def _forget(self, which: Callable[[int], bool]) -> None:
        gone = [step for step in self.steps() if which(step)]
        if not gone:
            return
        for name in [*map(_name, gone), *self._files.names(f"*{UNFINISHED}")]:
            self._files.remove(name)
        left = [index for step in self.steps() if (index := self._index(step))]
        self._objects.keep_only({name for index in left for name in index.names})


def remove_secrets(folder: PlainFolder) -> None:
    """Those of a secure sum, and what a kill has left of writing them."""
    for name in (SECRETS, SECRETS + UNFINISHED):
        folder.remove(name)


def check_site(folder: PlainFolder) -> None:
    """Raise RunError where the newest state of a client's folder is not whole; nothing is written."""
    for name in [name for name in folder.names() if re.fullmatch(STEP, name)][-1:]:
        ObjectFolder(folder.path / "objects", folder.top).verify(sorted(_read(folder, name).names), mend=False)


def _read(folder: PlainFolder, name: str) -> SiteIndex:
    try:
        return SiteIndex.model_validate(unsealed(folder.read(name, TEXT)))
    except ValueError:
        raise RunError(f"{folder.path / name} is no state of a client of this version") from None


def _name(step: int) -> str:
    return f"{step:08d}.json"
