"""Where clients run: `run.engine`."""

from pathlib import Path

from fedprotip.federation.engines.apart import ApartEngine
from fedprotip.federation.engines.base import Engine
from fedprotip.federation.engines.local import LocalEngine
from fedprotip.federation.engines.pool import PoolEngine
from fedprotip.federation.server import Server
from fedprotip.models import build_network
from fedprotip.store.clients import ClientStore
from fedprotip.store.plain import PlainFolder


def build_engine(server: Server, store: ClientStore, folder: Path) -> Engine:
    """The engine that the settings name; `store`, `folder`: for the private state of clients."""
    settings, stream = server.settings, server.stream
    if settings.run.engine == "local":
        plain = settings.model_copy(update={"model": settings.model.model_copy(update={"weights": ""})})
        network = build_network(plain, stream.dataset.image_shape, server.method.routes).to(server.site.device)
        return LocalEngine(server, network, store, server.cache)
    sites = PlainFolder(folder).inner("clients").make().path
    return PoolEngine(stream, settings, sites) if settings.run.engine == "pool" else ApartEngine(stream, sites)
