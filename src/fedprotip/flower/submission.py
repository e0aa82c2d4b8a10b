"""A run over a deployment: handed to the SuperLink, watched until its end, continued by handing it in again."""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from fedprotip import settings as settings_file
from fedprotip.envelopes import require_flower
from fedprotip.errors import RunError, UsageError
from fedprotip.flower.deployment import Place
from fedprotip.flower.processes import SUPERLINK, connection, flwr, in_home, last_word, running
from fedprotip.methods import create_method
from fedprotip.settings import parse_ids, tomltext
from fedprotip.store.folder import RunFolder, is_run, refuse_unless_blank
from fedprotip.store.plain import PlainFolder

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
    _check(settings, out, tasks, clients)
    given = {"out": str(out), "settings": str(settings), "tasks": tasks, "clients": clients, "home": str(place.home)}
    given["modules"] = os.pathsep.join(modules)
    config = " ".join(f"{key}={tomltext.write(value)}" for key, value in given.items())
    config += f" keyed={tomltext.write(place.what.superlink.keys)}"
    done = flwr(place, "run", str(_app(place.home)), connection(place), "--run-config", config, "--format", "json")
    return str(_told(place, done, "take the run")["run-id"])


def _check(settings: Path, out: Path, tasks: int, clients: str) -> None:
    """What is wrong is said here, and not in the log of a run that ended at once."""
    if clients and not tasks:
        raise UsageError("--clients says who takes part in further tasks; say with --tasks how many these are.")
    try:
        parse_ids(clients or "0")
    except ValueError as error:
        raise UsageError(f"--clients: {error}.") from None
    if not is_run(out):
        refuse_unless_blank(out, "name another one in the file (out)")
        create_method(settings_file.load(settings, ["run.engine=flower"]))
        return
    run = RunFolder.open(out, to_continue=True).manifest_settings().get("run")
    if (engine := run.get("engine") if isinstance(run, dict) else None) != "flower":
        raise UsageError(
            f"{out} is a run with run.engine = {engine!r}, which asks no sites; name another folder in the file (out)."
        )


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
    with suppress(RunError):  # it is asked again
        for told in runs(place, run):
            details = str(told.get("status-details", "")).strip()
            return str(told["status"]), details if details.endswith(".") else f"{details}."
    if place.what.superlink.here and not running(place, SUPERLINK):
        raise RunError("The SuperLink has ended; start it again with fedprotip flower up, and hand the run in again.")
    return "unknown", ""


def runs(place: Place, run: str = "") -> list[dict[str, Any]]:
    """Runs that the SuperLink knows, the newest first; RunError where it does not say."""
    which = ["--run-id", run] if run else []
    done = flwr(place, "list", connection(place), *which, "--format", "json")
    return list(_told(place, done, "say what it runs").get("runs", []))


@in_home
def status(place: Place) -> dict[str, Any]:
    """What runs on this machine, the runs at the SuperLink, and where our run folder stands."""
    names = [*([SUPERLINK] if place.what.superlink.here else []), *(f"site-{site.client}" for site in place.what.sites)]
    facts: dict[str, Any] = {name: _word(running(place, name)) for name in names}
    if place.what.superlink.here and running(place, SUPERLINK):
        try:
            facts["runs"] = [f"{told['run-id']} {told['status']}" for told in runs(place)]
        except RunError as error:
            facts["runs"] = str(error)
    if place.what.out and is_run(place.at(place.what.out)):
        facts["run folder"] = RunFolder.open(place.at(place.what.out)).manifest().status
    return facts


def _word(pid: int | None) -> str:
    return f"runs as process {pid}" if pid else "does not run"


def _app(home: Path) -> Path:
    """The app that Flower sends to sites: two lines for each end."""
    folder = PlainFolder(home / "app").make()
    folder.write("pyproject.toml", APP.format(version=version("fedprotip")))
    code = folder.inner("fedprotip_run").make()
    for name, text in MODULES.items():
        code.write(f"{name}.py", text)
    return folder.path


def _told(place: Place, done: CompletedProcess[str], what: str) -> dict[str, Any]:
    """What a command of Flower has answered; RunError, with the reason, where the SuperLink does not do it."""
    try:
        told = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        told = None
    if done.returncode or not isinstance(told, dict) or not told.get("success"):
        why = last_word(str(told.get("error-message")) if isinstance(told, dict) else done.stderr)
        raise RunError(f"The SuperLink at {place.address} does not {what}: {why}")
    return told
