"""Flower's simulation: `run.engine = "flower"` without a network.

Flower runs a ServerApp and virtual nodes in threads of this process, and Ray processes for what nodes do. The ServerApp
hands its grid to the engine and waits until that is closed. Which Ray process works for which client changes from
question to question: a client has everything in its folder, as one that is killed and started again.
"""

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from fedprotip.envelopes import Envelope, require_flower
from fedprotip.errors import FedprotipError, RunError
from fedprotip.federation.client import Client
from fedprotip.federation.engines.base import reason
from fedprotip.federation.engines.flower import FlowerEngine
from fedprotip.federation.engines.workplace import Workplace, instructions, useful_workers
from fedprotip.messages import Message
from fedprotip.settings import Settings
from fedprotip.store.scratch import Scratch
from fedprotip.stream import Stream

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid

UP = 300.0
"""Seconds in which Ray has to be up, and each of its processes."""
TRIES = 3
"""Ray gives itself 30 seconds to start, which a machine with much to do may not keep; so often it is tried."""

RETRIES = 3
"""How often Ray asks again where one of its processes has died, which is started again: by itself or for memory that
others use too (Ray ends its own first). Flower would go on asking the dead one, whose errors come at once."""


def simulated(stream: Stream, settings: Settings, folder: Path) -> FlowerEngine:
    """The engine, with its simulation running; `folder`: holds a folder for every client."""
    require_flower()
    count, files = useful_workers(settings, stream), Scratch(folder)
    told = instructions(settings, stream, folder, files, count)
    everyone = sorted({client for task in stream.tasks for client in stream.clients(task.index)})
    try:
        simulation = started(client_app(told), len(everyone), count)
    except BaseException:
        files.close()
        raise

    def end() -> None:
        simulation.close()
        files.close()

    nodes = InOrder(simulation.grid, everyone)
    return FlowerEngine(
        simulation.grid, nodes, settings.run.timeout, room=2 * count, closing=end, check=simulation.check
    )


def started(app: "ClientApp", nodes: int, workers: int) -> "Simulation":
    """A simulation that is up; Ray may need more than one try."""
    for _ in range(TRIES - 1):
        with suppress(RunError):
            return Simulation(app, nodes, workers)
    return Simulation(app, nodes, workers)


class InOrder:
    """Every node of a simulation can be any client: the first is the first."""

    def __init__(self, grid: "Grid", clients: list[int]) -> None:
        self._nodes = dict(zip(clients, sorted(grid.get_node_ids()), strict=True))

    def of(self, client: int, began: float, meanwhile: Callable[[], None]) -> int | str:
        return self._nodes[client]


class Simulation:
    """Flower's simulation, from the moment at which its grid can be used until `close`."""

    def __init__(self, app: "ClientApp", nodes: int, workers: int) -> None:
        self._found: queue.Queue[Any] = queue.Queue()
        self._stop, self._home = threading.Event(), TemporaryDirectory(prefix="fedprotip-")
        os.environ["FLWR_HOME"] = self._home.name
        os.environ.setdefault("RAY_worker_register_timeout_seconds", f"{UP:g}")  # its own minute is short for torch
        self._thread = threading.Thread(target=self._run, args=(app, nodes, workers), daemon=True)
        self._thread.start()
        try:
            found = self._found.get(timeout=UP)
        except queue.Empty:
            found = RunError(f"Flower's simulation has not started within {UP:g} seconds.")
        except BaseException:
            self.close()
            raise
        if isinstance(found, BaseException):
            self.close()
            raise RunError(f"Flower's simulation does not start: {reason_of(found)}.") from found
        self.grid: Grid = found
        import ray

        end = time.monotonic() + UP
        while not (ray.is_initialized() and len(list(self.grid.get_node_ids())) == nodes):
            if not self._thread.is_alive() or time.monotonic() > end:
                why = "it takes too long" if self._found.empty() else reason_of(self._found.get())
                self.close()
                raise RunError(f"Flower's simulation does not start: {why}.")
            time.sleep(0.05)

    def check(self) -> None:
        """RunError where Flower or Ray has ended by itself."""
        if not self._thread.is_alive():
            why = "it has ended by itself" if self._found.empty() else reason_of(self._found.get())
            raise RunError(f"Flower's simulation has stopped ({why}); resume the run.")

    def close(self) -> None:
        self._stop.set()
        self._thread.join(UP)
        self._home.cleanup()

    def _run(self, app: "ClientApp", nodes: int, workers: int) -> None:
        from flwr.serverapp import ServerApp
        from flwr.simulation import run_simulation
        from ray._private import ray_constants

        ray_constants.ENABLE_RAY_CLUSTER = False  # of an environment without our switch, if Ray was imported in it
        logging.getLogger("flwr").setLevel(logging.CRITICAL)
        server = ServerApp()

        @server.main()
        def main(grid: "Grid", context: Any) -> None:
            self._found.put(grid)
            self._stop.wait()

        given = {"num_cpus": workers, "log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
        given["address"] = "local"  # whatever cluster RAY_ADDRESS names
        resources = {"num_cpus": 1, "num_gpus": 0.0, "max_restarts": -1, "max_task_retries": RETRIES}
        config: Any = {"init_args": given, "client_resources": resources}  # all of it options of Ray's actors
        try:
            run_simulation(server, app, nodes, backend_config=config)
        except BaseException as error:
            import ray

            ray.shutdown()  # what a start that failed has left
            self._found.put(error)


def client_app(told: dict[str, Any]) -> "ClientApp":
    """What Ray processes run for a node."""
    from flwr.app import Message as FlowerMessage
    from flwr.clientapp import ClientApp

    app, text = ClientApp(), json.dumps(told)

    @app.train("ask")
    def ask(message: FlowerMessage, context: Any) -> FlowerMessage:
        place, envelope = workplace(text), Envelope.of(message.content)
        answer = answered_by(lambda: place.client(envelope.head["client"]), envelope)
        return FlowerMessage(answer.records(), reply_to=message)

    return app


@cache
def workplace(text: str) -> Workplace:
    """That of this Ray process."""
    return Workplace(json.loads(text))


def answered_by(client: Callable[[], Client], envelope: Envelope) -> Envelope:
    """A client's answer, or why there is none: over a network its failure is its own."""
    try:
        reply = client().handle([Message.from_bytes(part) for part in envelope.parts])
    except Exception as error:
        return Envelope({"failed": reason_of(error)})
    return Envelope({"kind": reply.kind}, [reply.to_bytes()])


def reason_of(error: BaseException) -> str:
    """An error, or what led to it, in a sentence without its full stop."""
    while error.__cause__ is not None and not isinstance(error, FedprotipError):
        error = error.__cause__
    if isinstance(error, FedprotipError):
        return str(error).rstrip(".")
    return reason(error) if isinstance(error, Exception) else type(error).__name__
