"""The two ends of a federation by themselves, and answers of clients that a test can change."""

from functools import partial
from pathlib import Path

from fedprotip.methods import create_method
from fedprotip.methods.local import Belongings, Local
from fedprotip.methods.parts.bases import Bases
from fedprotip.methods.parts.calibration import Calibrating
from fedprotip.methods.parts.references import References
from fedprotip.methods.parts.start import ClosedStart
from fedprotip.methods.parts.statistics import Statistics
from fedprotip.methods.parts.training import Training
from fedprotip.methods.site import Site
from fedprotip.models import build_network
from fedprotip.models.prefix import PrefixCache
from fedprotip.store.clients import ClientStore
from fedprotip.store.objects import ObjectFolder
from fedprotip.stream import build_stream
from fedprotip.stream.holdings import Holding

ANSWERS = {"train": (Training,), "summarise": (ClosedStart, Statistics, Bases, References, Calibrating)}


def through(monkeypatch, change, verb="train"):
    """Every answer of a client is change(answer, local, name of the exchange); answer() is the true one."""
    for kind in ANSWERS[verb]:

        def changed(self, local, original=kind.answer):
            return change(partial(original, self, local), local, self.name)

        monkeypatch.setattr(kind, "answer", changed)


class Ends:
    """A network as it was born, with knowledge that a test gives it, and clients of it with a store in a folder."""

    def __init__(self, settings, folder: Path):
        self.settings, self.method, self.stream = settings, create_method(settings), build_stream(settings)
        self.network = build_network(settings, self.stream.dataset.image_shape, self.method.routes).eval()
        objects = ObjectFolder(folder / "objects")
        objects.create()
        self.store, self.cache = (
            ClientStore(objects, 2**20),
            PrefixCache(self.stream, settings, enabled=not self.method.sees_images),
        )

    def site(self, known=(), task=0) -> Site:
        """One end at the beginning of a task, with this knowledge."""
        classes, shape = [task.classes for task in self.stream.tasks], self.stream.dataset.image_shape
        site = Site(self.settings, self.method, self.network, classes, shape, self.stream.look)
        site.known.update(dict(known))
        site.begin_task(task)
        return site

    def local(self, client, site=None) -> Local:
        """A client that is asked at the end of the task that the site has begun."""
        site = site or self.site()
        own = Belongings(self.store, client, self.method.state)
        return Local(site, Holding(self.stream, client), self.cache, own, site.task)
