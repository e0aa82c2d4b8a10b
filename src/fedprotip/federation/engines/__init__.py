"""Where clients run: `run.engine`."""

import sys
from pathlib import Path
from secrets import token_hex

from fedprotip.errors import UsageError
from fedprotip.federation.engines import flower
from fedprotip.federation.engines.apart import ApartEngine
from fedprotip.federation.engines.base import Engine, Private
from fedprotip.federation.engines.local import LocalEngine
from fedprotip.federation.engines.pool import PoolEngine
from fedprotip.federation.engines.simulation import simulated
from fedprotip.federation.server import Server
from fedprotip.models import build_network
from fedprotip.settings import Settings
from fedprotip.store.clients import ClientStore
from fedprotip.store.plain import PlainFolder
from fedprotip.store.site import SiteFolder

SITES = "clients"
"""Folder of the run folder that has a folder for every client, where they are clients of their own."""


def build_engine(server: Server, store: ClientStore, folder: Path) -> Engine:
    """The engine that the settings name; `store`, `folder`: for the private state of clients."""
    settings, stream = server.settings, server.stream
    if settings.run.engine == "local":
        plain = settings.model_copy(update={"model": settings.model.model_copy(update={"weights": ""})})
        network = build_network(plain, stream.dataset.image_shape, server.method.routes).to(server.site.device)
        return LocalEngine(server, network, store, server.cache)
    across = flower.over.get()
    if settings.run.engine == "flower" and across:
        if settings.run.geometry:
            raise UsageError("run.geometry looks at what clients keep, which is at their sites; the valid value is 0.")
        server.progress.run = server.progress.run or token_hex(16)
        plan = flower.plan_of(settings, stream, server.progress.task, server.progress.run)
        nodes = flower.Sites(across, plan, PlainFolder(folder), settings.run.patience)
        return flower.FlowerEngine(across.grid, nodes, settings.run.timeout, plan)
    sites = PlainFolder(folder).inner(SITES).make().path
    if settings.run.engine == "flower":
        return simulated(stream, settings, sites)
    return PoolEngine(stream, settings, sites) if settings.run.engine == "pool" else ApartEngine(stream, sites)


def refuse_elsewhere(settings: Settings, folder: Path) -> None:
    """Refuse to go on with a run over sites in Flower's simulation, with data that is not theirs; or the other way."""
    over_sites = PlainFolder(folder).has(flower.SITES)
    if settings.run.engine != "flower" or over_sites == bool(flower.over.get()):
        return
    if over_sites:
        raise UsageError(
            f"{folder} is a run over sites, whose data is not here; continue it with: fedprotip flower submit."
        )
    if SITES in PlainFolder(folder).folders():
        raise UsageError(f"{folder} is a run of Flower's simulation; continue it with: fedprotip resume or extend.")


def private_state(settings: Settings, store: ClientStore, folder: Path) -> Private:
    """Where the engine that the settings name keeps the private state of clients; for instruments only."""

    def of_site(client: int) -> ClientStore:
        site = SiteFolder(folder / SITES / str(client), budget_mb=sys.maxsize)  # nothing of it is written
        site.keep_private(before=sys.maxsize)
        return site.store

    return (lambda client: store.glance()) if settings.run.engine == "local" else of_site
