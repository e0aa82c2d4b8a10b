"""TensorBoard: event files in the folder `tensorboard` of the run.

tensorboard --logdir runs
"""

from collections.abc import Mapping
from pathlib import Path

from fedprotip.settings import Settings, to_toml
from fedprotip.store.plain import PlainFolder


class TensorBoard:
    """Curves as event files. A resumed run writes a further file, which begins where the last checkpoint was."""

    def __init__(self, folder: Path, settings: Settings, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # of the extra `track`

        place = PlainFolder(folder).inner("tensorboard").make()
        resumed = bool(place.names("events.out.tfevents.*"))
        self._writer = SummaryWriter(str(place.path), purge_step=first if resumed else None)
        if not resumed:
            self._writer.add_text("settings", "".join(f"    {line}\n" for line in to_toml(settings).splitlines()))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, finished: bool) -> None:
        self._writer.close()
