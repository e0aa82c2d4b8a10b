"""A run that takes about a second: three tasks of two digits, three clients, a narrow network."""

import builtins
import json
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import pytest
from safetensors.torch import load_file

import fedprotip
from fedprotip.evaluation.sweeps import Sweep
from fedprotip.store.records import SEAL, seal_of

SMALL = {
    "stream": {"tasks": 3, "task_size": 2},
    "clients": {"count": 3, "held_back": 0.0},
    "model": {"width": 24, "depth": 2},
    "train": {"rounds": 3, "epochs": 1, "batch": 32, "lr": 0.05, "head_start": "random", "fall": "none"},
    "method": {
        "name": "fedprotip",
        "threshold": 0.9,
        "rank_rule": "energy",
        "merge": "union",
        "budget": "none",
        "router": "fused",
    },
    "run": {"threads": 1},
}
"""Every step of the paper, each plain to see: no exchange before the first round or after the last basis, Eq. 10, all
ways of answering. What the defaults add is tested where it is made, and by runs with nothing but defaults."""
TENSORS = ("model.safetensors", "subspaces.safetensors", "references.safetensors")
USED = {
    "stream": {"tasks": 2, "task_size": 2},
    "clients": {"count": 2},
    "model": {"name": "mlp", "width": 32},
    "train": {"rounds": 2, "epochs": 2, "batch": 16},
    "run": {"threads": 1},
}
"""Defaults but for their size: a run for those who only ask it."""
NOT_EXACT = ("seconds", "cpu_seconds", "peak_rss_mb", "peak_gpu_mb")


MAKING = {"synthesis_rounds": 3, "synthesis_batch": 8, "generator_steps": 2, "warmup": 1, "student_steps": 2}
MADE = {**MAKING, "width": 4, "noise": 8, "pool": 20, "batch": 16}
PROXY = {"memory": 24, "disturb_steps": 2, "steps": 3, "iterates": 2}
REDUCED = {
    "fot": {"width": 32},
    "stsa": {"features": 48},
    "glfc": PROXY,
    "lga": {**PROXY, "ignored": 1},
    "target": {**MADE, "reuse": True},
    "lode": MADE,
    "lander": MADE,
    "pec": {"width": 4, "outputs": 8, "teacher": 3, "batch": 4, "lr": 0.01},
    "scr": {"buffer": 40, "retrieve": 16, "projection": 8},
}
"""Methods whose defaults are large: every part of them at smaller size."""


def small(*overrides, **sections):
    """The small settings with changed sections and `key=value` overrides."""
    raw = deepcopy(SMALL)
    for name, values in sections.items():
        raw[name] = {**raw.get(name, {}), **values}
    return fedprotip.load_settings(raw, overrides)


def used(folder):
    """A finished run of the settings `USED`."""
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        fedprotip.run(USED, out=folder)
    return folder


def missing(monkeypatch, module, package):
    """Importing `module` fails from here on because `package` is not installed."""
    real = builtins.__import__

    def look(name, *rest, **more):
        if name == module:
            raise ModuleNotFoundError(f"no {package} here", name=package)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", look)


def quick(monkeypatch):
    """Runs without a report and without sweeps over group sizes: for tests that look at neither."""
    monkeypatch.setattr("fedprotip.api.write_report", lambda path: None)
    monkeypatch.setattr(Sweep, "add", lambda self, heard, labels, portion: None)
    monkeypatch.setattr(Sweep, "result", lambda self: {})


def results(folder: Path, without=()):
    """Everything of a run that must be the same when it is run again: bytes of tensors, metrics, logs.

    without: kinds of messages that may differ, and are left out of the ledger and its totals.
    """
    files = (*TENSORS, "answers.json")
    found = {name: (folder / name).read_bytes() for name in files if (folder / name).exists()}
    summary = json.loads((folder / "summary.json").read_text())
    found["summary"] = {key: value for key, value in summary.items() if key not in NOT_EXACT}
    lines = (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    found["ledger"] = b"".join(line for line in lines if json.loads(line)["kind"] not in without)
    for totals in summary["bytes"].values():
        for kind in without:
            totals.pop(kind, None)
    found["events"] = [
        {key: value for key, value in json.loads(line).items() if key != "seconds"}
        for line in (folder / "events.jsonl").read_text().splitlines()
    ]
    return found


@contextmanager
def forged(folder: Path):
    """The manifest of a run folder, to be changed as somebody would who knows how it is sealed."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    yield manifest
    path.write_text(json.dumps(manifest | {SEAL: seal_of(manifest)}))


def tensors(folder: Path, name: str):
    return load_file(folder / f"{name}.safetensors")
