"""What a run needs at least in memory, before it is tried: settings can be possible one by one and absurd together."""

from dataclasses import dataclass

from fedprotip.errors import UsageError
from fedprotip.methods.base import Method
from fedprotip.methods.parts.statistics import KIND as STATISTICS
from fedprotip.models.heads import without_memory
from fedprotip.models.prefix import PIECE
from fedprotip.settings import Settings
from fedprotip.store.memory import machine_bytes
from fedprotip.stream import Stream
from fedprotip.stream.transforms import TRIES

PROCESS = 100 * 2**20
"""A worker process with nothing but torch."""


@dataclass(frozen=True)
class Need:
    """Bytes that something takes for certain, and the settings that make them fewer."""

    what: str
    nbytes: int
    keys: str


def check_memory(found: list[Need]) -> None:
    """Refuse what this machine has too little memory for, whatever else happens; the rest may still run out of it."""
    largest, most = max(found, key=lambda need: need.nbytes), machine_bytes()
    if largest.nbytes > most:
        raise UsageError(
            f"This run needs at least {_gib(largest.nbytes)} GiB of memory for {largest.what}, and this machine has "
            f"{_gib(most)}; choose a smaller {largest.keys}."
        )


def needs(settings: Settings, method: Method, stream: Stream) -> list[Need]:
    """What is known before there is a network. Lower bounds: each is held at one moment of the run."""
    run, evaluate = settings.run, settings.evaluate
    channels, height, width = stream.dataset.image_shape
    tests = [len(task.test) for task in stream.tasks if len(task.test)]
    pixels = min(PIECE, evaluate.batch, max(tests)) * channels * height * width
    weights = _weights(settings, stream) * (2 if run.engine == "local" else 1)
    found = [
        Need(f"images of {height}×{width}", 2 * 4 * pixels, "data.size or evaluate.batch"),
        Need(f"the model {settings.model.name!r}", weights, "model.width or data.size"),
    ]
    if method.answering().ways and evaluate.group * evaluate.draws > min(tests):
        drawn = 8 * evaluate.group * evaluate.draws
        found.append(Need("the groups of mode batch64", drawn, "evaluate.group or evaluate.draws"))
    if stream.views:
        chance = 8 * (4 + 2 * TRIES) * stream.views * max(len(task.train) for task in stream.tasks)
        found.append(Need("the chance behind all views", chance, "train.views"))
    if run.engine == "pool":
        workers = min(run.workers, max(len(stream.clients(task.index)) for task in stream.tasks))
        found.append(Need(f"{workers} worker processes", workers * PROCESS, "run.workers"))
    return found


def products(settings: Settings, method: Method, features: int) -> Need:
    """The second moment of so many features, where the method has class statistics."""
    keys = "statistics.features" if settings.statistics.features else "model.width, or set statistics.features"
    features = settings.statistics.features or features
    if own := getattr(settings.method, "features", 0):
        keys, features = "method.features", own
    held = any(exchange.name == STATISTICS for exchange in method.exchanges)
    return Need(f"products of {features:,} features", 8 * features**2 if held else 0, keys)


def _weights(settings: Settings, stream: Stream) -> int:
    """Bytes of a backbone, which is built without its memory; 0 where that cannot be done."""
    try:
        backbone = without_memory(settings.model, stream.dataset.image_shape)
        return sum(tensor.numel() * tensor.element_size() for tensor in backbone.state_dict().values())
    except UsageError:
        raise
    except Exception:  # someone's own, which needs real tensors: it is tried as it is
        return 0


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:,.1f}"
