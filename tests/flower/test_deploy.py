"""docs/deploy.md, word by word in an empty folder: SuperLink, two sites, TLS, keys, a restart, a further task."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedprotip
from tests.flower.loopback import (
    at_work,
    children,
    environment,
    events,
    finished,
    free_port,
    kill_site,
    kill_supernode,
    rounds,
    shell,
    wait_for,
)
from tests.small import results
from tests.watchdog import in_time

pytest.importorskip("flwr", reason="the extra flower")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deployments")]  # minutes; two at a time are too much

DOCUMENT = Path(__file__).parents[2] / "docs" / "deploy.md"
BLOCKS = re.findall(r"```sh\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.S)


def local(place):
    """The same run in one process that has the data of both sites."""
    parts = [np.load(place / name / "images.npz") for name in ("site-a", "site-b")]
    test = np.load(place / "server" / "images.npz")
    x = np.concatenate([*(part["x_train"] for part in parts), test["x_test"]])
    y = np.concatenate([*(part["y_train"] for part in parts), test["y_test"]])
    counts = [len(part["y_train"]) for part in parts]
    client = np.repeat([0, 1, 0], [*counts, len(test["y_test"])])
    split = np.repeat(["train", "test"], [sum(counts), len(test["y_test"])])
    np.savez(place / "all.npz", x=x, y=y, client=client, split=split)
    changes = ["run.engine=local", f"data.source={place / 'all.npz'}", "stream.source=columns"]
    fedprotip.run(place / "server" / "run.toml", changes, out=place / "local")
    return fedprotip.extend(place / "local", tasks=1)


def come_back(home):
    """Kill a SuperNode that has a key: Flower takes it for its own double for a minute, and the site tries again."""
    log = home / "site-0.log"
    before = log.read_text()
    kill_supernode(json.loads((home / "processes.json").read_text())["site-0"]["pid"])
    wait_for(lambda: "SuperNode ID" in log.read_text()[len(before) :], 1800)
    assert "The SuperNode has ended" in log.read_text()[len(before) :]


def test_the_document_word_by_word(place):
    """The server is restarted in the middle of the first task; a SuperNode is killed before the second one."""
    port, folder, before = str(free_port()), place / "server" / "run", []
    with in_time(3600):
        for block in BLOCKS:
            text = block.replace("9443", port)
            if "flower down server.toml" in text and "submit" in text:
                wait_for(lambda: rounds(folder), 1800)
                down = "cd server\nfedprotip flower down server.toml\n"
                assert text.startswith(down)
                shell(down, place)
                assert not finished(folder)
                before = rounds(folder)
                text = "cd server\n" + text.removeprefix(down)
            if "--tasks 1" in text:
                come_back(place / "site-a" / "site")
            shell(text, place)
        mine = local(place)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["tasks"] == 2
    assert summary["failures"]["count"] == 0
    assert mine["accuracy"]["aware"] > 90
    assert rounds(folder)[: len(before)] == before  # with their seconds: it was continued, not begun anew
    far, near = (results(path, without=("plan",)) for path in (folder, place / "local"))  # it says: columns
    for found in (far, near):
        found["answers.json"] = json.loads(found["answers.json"])
        found["answers.json"].pop("sites")  # whose the test images are: only one process was told, by columns
    for name in near:
        assert far[name] == near[name]
    shell("fedprotip report server/run && fedprotip report local", place)
    report = (folder / "report.html").read_text()
    assert all(f"{value:.1f}" in report for value in mine["accuracy"].values())
    told = json.loads((folder / "sites.json").read_text())
    assert "three" not in told["1"]["holds"]["two, three"]
    assert all(len(site["key"]) > 60 for site in told.values())
    assert not list(place.glob("*/*/processes.json"))  # all is down
    assert not any("images" in path.name for path in folder.rglob("*"))


DEPLOYMENT = """
settings = "run.toml"
out = "run"
home = "home"
[superlink]
port = {port}
tls = false
[[sites]]
client = 0
[[sites]]
client = 1
[[sites]]
client = 2
"""
SETTINGS = """
[stream]
tasks = 2
task_size = 2
[clients]
count = 3
[model]
width = 24
[train]
rounds = 3
epochs = 5
lr = 0.2
batch = 16
head_start = "random"
[method]
name = "fedavg"
[run]
engine = "flower"
timeout = 600
patience = 600
"""


def test_a_site_and_the_server_are_killed_and_the_run_finishes(place):
    """By id: a site at work, which comes back; then the process of the run; then the SuperLink itself."""
    (place / "run.toml").write_text(SETTINGS)
    (place / "fed.toml").write_text(DEPLOYMENT.format(port=free_port()))
    command = [sys.executable, "-m", "fedprotip", "flower"]

    def pid_of(name):
        return json.loads((place / "home" / "processes.json").read_text())[name]["pid"]

    with in_time(3000):
        shell("fedprotip flower up fed.toml", place)
        shell("fedprotip flower submit fed.toml --detach", place)
        wait_for(lambda: rounds(place / "run"), 1800)
        former = at_work(pid_of("site-1"))
        wait_for(lambda: at_work(pid_of("site-1")) - former, 1800)  # it has just been asked something
        kill_site(pid_of("site-1"))
        shell("fedprotip flower up fed.toml", place)
        wait_for(lambda: any(event["task"] == 1 for event in rounds(place / "run")), 1800)
        (run,) = [pid for pid, text in children(pid_of("superlink")) if "flwr-serverapp" in text]
        os.kill(run, signal.SIGKILL)
        assert not finished(place / "run")
        done_before = len(rounds(place / "run"))
        shell("fedprotip flower submit fed.toml --detach", place)
        wait_for(lambda: len(rounds(place / "run")) > done_before, 1800)
        os.kill(pid_of("superlink"), signal.SIGKILL)
        assert not finished(place / "run")
        assert "superlink is started" in shell("fedprotip flower up fed.toml", place)
        done = subprocess.run(
            [*command, "submit", "fed.toml", "--most", "1800"],
            cwd=place,
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        near = fedprotip.run(place / "run.toml", ["run.engine=local"], out=place / "local")
    summary = json.loads((place / "run" / "summary.json").read_text())
    assert summary["tasks"] == 2
    assert {event["client"] for event in events(place / "run", "failure")} == {1}
    assert rounds(place / "run")[-1]["clients"] == 3  # it is back
    assert near["accuracy"]["aware"] > 90
    assert summary["accuracy"]["aware"] >= near["accuracy"]["aware"] - 2
