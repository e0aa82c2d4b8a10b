"""Processes of this machine that answer for clients: what each is told, and what its clients have in common there."""

from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from fedprotip import settings as settings_file
from fedprotip.federation.client import Client
from fedprotip.methods import create_method
from fedprotip.models.heads import builder_of
from fedprotip.models.prefix import PrefixCache
from fedprotip.settings import Settings, to_toml, tomltext
from fedprotip.store.scratch import Scratch
from fedprotip.stream import Stream, build_stream
from fedprotip.stream.datasets import loader_of
from fedprotip.stream.holdings import Holding
from fedprotip.stream.kept import Settled


class Workplace:
    """The data, and rows of a frozen prefix; all else clients have in their folders."""

    def __init__(self, told: dict[str, Any]) -> None:
        """`told`: as `instructions` has it."""
        torch.set_num_threads(told["threads"])
        for module in told["modules"]:
            with suppress(ImportError):  # then its names are unknown, which is said
                import_module(module)
        self.settings = settings_file.load(tomltext.loads(told["settings"]))
        method = create_method(self.settings)
        self.stream = build_stream(self.settings, kept=Settled.of(told["kept"], told["learned"]))
        run = self.settings.run.model_copy(update={"cache_mb": told["cache_mb"]})
        share, files = self.settings.model_copy(update={"run": run}), Path(told["files"])
        self._cache = PrefixCache(self.stream, share, files, enabled=not method.sees_images)
        self._folder = Path(told["clients"])

    def client(self, number: int) -> Client:
        """As one that is started again from its folder."""
        return Client(self._folder / str(number), Holding(self.stream, number), self._cache)


def instructions(settings: Settings, stream: Stream, folder: Path, files: Scratch, count: int) -> dict[str, Any]:
    """What each of `count` processes is told; `folder`: holds a folder for every client."""
    return {
        "settings": to_toml(settings),
        "threads": max(1, torch.get_num_threads() // count),
        "cache_mb": -(-settings.run.cache_mb // count),
        "files": str(files.path),
        "clients": str(folder),
        "modules": modules_of(settings),
        "kept": stream.kept.plain(),
        "learned": stream.kept.learned,
    }


def modules_of(settings: Settings) -> list[str]:
    """Where method, model and dataset are registered, as far as that is not this package, and what the user gave."""
    makers = (type(create_method(settings)), builder_of(settings.model.name), loader_of(settings.data.name))
    named = {maker.__module__ for maker in makers}
    return sorted({*settings_file.given(), *(name for name in named if not name.startswith("fedprotip."))})


def useful_workers(settings: Settings, stream: Stream) -> int:
    """As many as the setting says, but no more than there are clients in any task."""
    return min(settings.run.workers, max(len(stream.clients(task.index)) for task in stream.tasks))
