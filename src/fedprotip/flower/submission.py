"""A run over a deployment: handed to the SuperLink, watched until its end, continued by handing it in again."""

import json
import os
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedprotip import settings as settings_file
from fedprotip.envelopes import require_flower
from fedprotip.errors import RunError
from fedprotip.flower.deployment import Place
from fedprotip.flower.processes import SUPERLINK, connection, flwr, in_home, running
from fedprotip.methods import create_method
from fedprotip.settings import tomltext
from fedprotip.store.folder import RunFolder, is_run

LOOK = (2.0, 20.0)
"""Seconds between two looks at a run, which begin with its folder; and between two questions to Flower about it."""
APP = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedprotip-run"
version = "{version}"
description = "A run of fedprotip, which is installed where this runs"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedprotip"

[tool.flwr.app.components]
serverapp = "fedprotip_run.server:app"
clientapp = "fedprotip_run.client:app"

[tool.flwr.app.config]
out = ""
settings = ""
tasks = 0
clients = ""
keyed = false
home = ""
modules = ""
"""
MODULES = {
    "__init__": "",
    "server": "from fedprotip.flower.run import server_app\n\napp = server_app()\n",
    "client": "from fedprotip.flower.relay import client_app\n\napp = client_app()\n",
}


@in_home
def submit(place: Place, tasks: int = 0, clients: str = "", modules: Sequence[str] = ()) -> str:
    """Hand the run to the SuperLink: begin it, continue it, or add tasks to a finished one; the id it has there.

    `modules`: what the run imports beside this package.
    """
    require_flower()
    settings, out = place.needed("settings"), place.needed("out")
    if not is_run(out):  # what is wrong is said here, and not in the log of a run that ended at once
        create_method(settings_file.load(settings, ["run.engine=flower"]))
    given = {"out": str(out), "settings": str(settings), "tasks": tasks, "clients": clients, "home": str(place.home)}
    given["modules"] = os.pathsep.join(modules)
    config = " ".join(f"{key}={tomltext.write(value)}" for key, value in given.items())
    config += f" keyed={tomltext.write(place.what.superlink.keys)}"
    done = flwr(place, "run", str(_app(place.home)), connection(place), "--run-config", config, "--format", "json")
    told = _told(done.stdout)
    if done.returncode or not told.get("success"):
        why = told.get("error-message") or (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise RunError(f"The SuperLink at {place.address} does not take the run: {why}")
    return str(told["run-id"])


def wait(place: Place, run: str, seconds: float, tell: Callable[[str], None]) -> Path:
    """Wait for the end of a run; its folder. RunError where it failed, with what Flower says about it."""
    out, end, before, asked = place.needed("out"), time.monotonic() + seconds, "", 0.0
    at_work = False
    while time.monotonic() < end:
        over = at_work and _finished(out)
        at_work = at_work or not _finished(out)
        if time.monotonic() - asked < LOOK[1] and not over:
            time.sleep(LOOK[0])
            continue
        state, details = state_of(place, run)
        asked = time.monotonic()
        if state != before:
            tell(f"The run is {state}.")
            before = state
        if state == "finished:completed":
            return out
        if state.startswith("finished"):
            raise RunError(f"The run has ended early ({state}): {details} Hand it in again to continue it.")
        time.sleep(LOOK[0])
    raise RunError(f"The run has not ended within {seconds:g} seconds; fedprotip flower status shows where it is.")


def _finished(out: Path) -> bool:
    return is_run(out) and RunFolder.open(out).manifest().status == "finished"


def state_of(place: Place, run: str) -> tuple[str, str]:
    """What Flower says about a run, and why it ended."""
    for told in runs(place, run):
        details = str(told.get("status-details", "")).strip()
        return str(told["status"]), details if details.endswith(".") else f"{details}."
    if place.what.superlink.here and not running(place, SUPERLINK):
        raise RunError("The SuperLink has ended; start it again with fedprotip flower up, and hand the run in again.")
    return "unknown", ""


def runs(place: Place, run: str = "") -> list[dict[str, Any]]:
    """Runs that the SuperLink knows, the newest first."""
    which = ["--run-id", run] if run else []
    done = flwr(place, "list", connection(place), *which, "--format", "json")
    return list(_told(done.stdout).get("runs", []))


def status(place: Place) -> dict[str, Any]:
    """What runs on this machine, the runs at the SuperLink, and where our run folder stands."""
    names = [*([SUPERLINK] if place.what.superlink.here else []), *(f"site-{site.client}" for site in place.what.sites)]
    facts: dict[str, Any] = {name: _word(running(place, name)) for name in names}
    if place.what.superlink.here and running(place, SUPERLINK):
        facts["runs"] = [f"{told['run-id']} {told['status']}" for told in runs(place)]
    if place.what.out and is_run(place.at(place.what.out)):
        facts["run folder"] = RunFolder.open(place.at(place.what.out)).manifest().status
    return facts


def _word(pid: int | None) -> str:
    return f"runs as process {pid}" if pid else "does not run"


def _app(home: Path) -> Path:
    """The app that Flower sends to sites: two lines for each end."""
    folder = home / "app"
    (folder / "fedprotip_run").mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(APP.format(version=version("fedprotip")), encoding="utf-8")
    for name, text in MODULES.items():
        (folder / "fedprotip_run" / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


def _told(text: str) -> dict[str, Any]:
    try:
        told = json.loads(text[text.index("{") :])
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
