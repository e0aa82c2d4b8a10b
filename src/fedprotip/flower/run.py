"""What Flower starts at the SuperLink for a run: our run, whose questions go over its grid.

The run folder is the truth. A submission begins it, continues it from its last checkpoint, or adds tasks to it.
"""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedprotip.envelopes import require_flower
from fedprotip.flower.keys import bound

if TYPE_CHECKING:
    from fedprotip.federation.engines.flower import Reachable


def server_app() -> Any:
    """The ServerApp."""
    require_flower()
    from flwr.serverapp import ServerApp

    from fedprotip.federation.engines.flower import Reachable
    from fedprotip.settings import bring_in

    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        told = context.run_config
        for module in filter(None, str(told["modules"]).split(os.pathsep)):
            bring_in(module)
        network = Reachable(grid, bool(told["keyed"]), lambda: bound(Path(told["home"])))
        go(network, Path(told["out"]), Path(told["settings"]), int(told["tasks"]), str(told["clients"]))

    return app


def go(network: "Reachable", out: Path, settings: Path, tasks: int, clients: str) -> dict[str, Any]:
    """Bring the run folder to its end; `tasks`: that many further ones, if it has reached it."""
    from fedprotip import api
    from fedprotip.federation.engines.flower import across
    from fedprotip.store.folder import is_run

    with across(network):
        if not is_run(out):
            return api.run(settings, ["run.engine=flower"], out, [_log])
        if tasks and api.inspect(out)["status"] == "finished":
            return api.extend(out, tasks, clients or None, [_log])
        return api.resume(out, [_log])


def _log(event: Any) -> None:
    """Into Flower's log of the run."""
    if event["event"] != "step":
        logging.getLogger("flwr").info("%s", event.plain())
