"""Runs over a SuperLink with real processes: methods give the numbers of one process, faults are named and survived."""

import json
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

import fedprotip
from fedprotip.flower.keys import site_key
from fedprotip.settings import to_toml
from tests.flower.loopback import environment, events, finished, free_port, rounds, shell, wait_for
from tests.small import REDUCED, small, tensors
from tests.watchdog import in_time

pytest.importorskip("flwr", reason="the extra flower")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deployments")]  # minutes; two at a time are too much


def deployment(place, name, port, sites, run="run", link="tls = false", entry=""):
    """The file NAME.toml, whose run has the settings RUN-settings.toml and the folder RUN; all of them share a home."""
    text = f'settings = "{run}-settings.toml"\nout = "{run}"\nhome = "home"\n[superlink]\nport = {port}\n{link}\n'
    text += "".join(f"[[sites]]\nclient = {client}\n{entry}\n" for client in sites)
    (place / f"{name}.toml").write_text(text)


def settings(place, name, *overrides, **sections):
    given = small("stream.tasks=2", "run.engine=flower", "run.timeout=900", *overrides, **sections)
    (place / f"{name}-settings.toml").write_text(to_toml(given))
    return given


def connected(*logs):
    """Wait until the SuperNodes of sites are known to the SuperLink, so that the run need not be patient."""
    wait_for(lambda: all("SuperNode ID" in log.read_text() for log in logs), 600)


def summary_of(place, name):
    return json.loads((place / name / "summary.json").read_text())


METHODS = {"plain": 1, "fot": 2, "scr": 2}
"""And how many tasks are needed to see what is theirs."""
PLAIN = """
from fedprotip.methods import register
from fedprotip.methods.fedavg import FedAvg


@register
class Plain(FedAvg):
    name = "plain"
"""
"""A file of one's own: FedAvg by another name."""


def test_methods_over_a_superlink_give_the_numbers_of_one_process(place):
    """FedAvg from a file, with bases, and with samples that clients keep; one deployment, three runs."""
    port, file = free_port(), "--import own/plain.py"
    (place / "own").mkdir()
    (place / "own" / "plain.py").write_text(PLAIN)
    for method, tasks in METHODS.items():
        deployment(place, method, port, range(2), run=method)
        own = {"name": "fedavg" if method == "plain" else method, **REDUCED.get(method, {})}
        settings(place, method, f"stream.tasks={tasks}", "train.rounds=1", "clients.count=2", method=own)
    told = place / "plain-settings.toml"
    told.write_text(told.read_text().replace('"fedavg"', '"plain"'))
    with in_time(3000):
        shell(f"fedprotip flower up plain.toml {file}", place)
        for method in METHODS:
            given = file if method == "plain" else ""
            shell(f"fedprotip flower submit {method}.toml --most 1800 {given}", place)
            near = f"--set run.engine=local --out {method}-local {given}"
            shell(f"fedprotip run {method}-settings.toml {near}", place)
    for method in METHODS:
        far, near = summary_of(place, method), summary_of(place, f"{method}-local")
        assert far["failures"]["count"] == 0
        assert far["accuracy"] == pytest.approx(near["accuracy"], abs=1e-6)
        ours, theirs = (tensors(place / name, "model") for name in (method, f"{method}-local"))
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6)


def test_a_secure_run_of_sites_with_keys_finishes_although_one_is_killed_in_a_sum(place):
    """By id, with its SuperNode, after it has told keys and shares; it never comes back. Keys are pinned by rosters."""
    pytest.importorskip("cryptography")
    pytest.importorskip("Crypto")
    lines = [f"{client} {site_key(place / 'home' / f'site-{client}.key').read_text()}" for client in range(3)]
    (place / "roster").write_text("".join(lines))
    port = free_port()
    for name, sites in {"up": range(2), "run": range(3)}.items():
        deployment(place, name, port, sites, link="keys = true", entry='roster = "roster"')
    options = ("stream.tasks=1", "train.rounds=2", "train.epochs=5", "run.patience=30", "run.timeout=900")
    given = settings(place, "run", *options, method={"name": "fedavg", "secure": True})
    with in_time(3000):
        shell("fedprotip flower up up.toml && fedprotip flower admit run.toml home/site-2.key.pub --client 2", place)
        with odd_site(place, 2, "doomed") as site:
            connected(*(place / "home" / f"site-{client}.log" for client in range(2)), place / "odd-2.log")
            shell("fedprotip flower submit run.toml --detach", place)
            wait_for(lambda: finished(place / "run"), 1200)
            assert site.poll() == -signal.SIGKILL
        near = fedprotip.run(given, ["run.engine=local"], out=place / "local")
    assert {event["client"] for event in events(place / "run", "failure")} == {2}
    assert not events(place / "run", "unsummed")
    assert [event["clients"] for event in rounds(place / "run")] == [3, 2]
    assert near["accuracy"]["aware"] > 90
    assert summary_of(place, "run")["accuracy"]["aware"] >= near["accuracy"]["aware"] - 2


@contextmanager
def odd_site(place, client, way):
    """A site of its own, which goes wrong; it is ended by its id."""
    command = [sys.executable, "-m", "tests.flower.odd_site", "run.toml", str(client), way]
    with (place / f"odd-{client}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=place, env=environment(), stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


LEARNS = ("train.epochs=5", "train.lr=0.2", "train.batch=16")
LIES = [
    (0, 0, "has values that are not finite"),
    (0, 1, "has shape"),
    (0, None, "128 columns, at most 64 are possible"),
    (1, 0, "it does not answer question"),
    (1, 1, "1000000000 samples are stated"),
    (1, None, "is not orthonormal"),
]
"""Task, round, and what the run says about the liar's answer."""


def test_faults_of_sites_are_named_and_the_run_finishes(place):
    """One lies in six ways, the SuperNode of one dies while it extracts and comes back, one answers too late, one comes
    late."""
    port = free_port()
    deployment(place, "up", port, [0])
    deployment(place, "run", port, range(5))
    deployment(place, "late", port, [3])
    options = ("clients.count=5", "train.rounds=2", "run.patience=15", "run.timeout=180")
    given = settings(place, "run", *LEARNS, *options)
    with in_time(3000):
        shell("fedprotip flower up up.toml", place)
        with odd_site(place, 1, "mortal"), odd_site(place, 2, "liar"), odd_site(place, 4, "slow"):
            connected(place / "home" / "site-0.log", *(place / f"odd-{client}.log" for client in (1, 2, 4)))
            shell("fedprotip flower submit run.toml --detach", place)
            wait_for(lambda: rounds(place / "run"), 900)
            shell("fedprotip flower up late.toml", place)
            wait_for(lambda: finished(place / "run"), 1500)
        near = fedprotip.run(given, ["run.engine=local"], out=place / "local")
    failures = events(place / "run", "failure")
    by_client = {one: [event for event in failures if event["client"] == one] for one in (1, 2, 3, 4)}
    assert len(failures) == sum(map(len, by_client.values()))
    gone, *away = by_client[1]
    assert (gone["task"], gone["round"], "its machine is gone" in gone["reason"]) == (0, None, True)
    assert all("it is not connected" in event["reason"] for event in away)  # as long as it takes to come back
    for event, (task, round_, sentence) in zip(by_client[2], LIES, strict=True):
        assert (event["task"], event["round"], sentence in event["reason"]) == (task, round_, True)
    assert {event["task"] for event in by_client[3]} == {0}
    assert all("it is not connected" in event["reason"] for event in by_client[3])
    late = by_client[4]  # again in the next exchange, where that begins before it is done
    assert {(event["task"], event["round"]) for event in late} == {(0, None)}
    assert {event["reason"] for event in late} == {"no answer within 180 seconds (run.timeout)"}
    assert rounds(place / "run")[-1]["clients"] == 4  # all but the liar
    assert 3 not in {event["client"] for event in events(place / "run", "lost")}  # it never had anything
    assert near["accuracy"]["aware"] > 90
    assert summary_of(place, "run")["accuracy"]["aware"] >= near["accuracy"]["aware"] - 2
