"""Small runs with `method.secure`, and what they leave."""

import json

import fedprotip
from fedprotip.methods import base
from tests.small import results

OPTIONS = {"fedprotip": {"merge": "sketch", "sketch": 16}, "fot": {"width": 32}}
LESS = {"stream": {"tasks": 2, "task_size": 2}, "train": {"rounds": 2, "epochs": 1, "batch": 32, "lr": 0.05}}
REGISTERED = sorted(name for name, cls in base._methods.items() if cls.__module__.startswith("fedprotip."))
REFUSED = ("glfc", "gpm", "lga")


def settings(method, *overrides, secure=True, clients=4):
    own = {"name": method, "secure": secure, **OPTIONS.get(method, {})}
    plain = {} if secure else {"statistics": {"minimum": 1}}
    held = {"count": clients, "held_back": 0.1}
    raw = {**LESS, **plain, "method": own, "clients": held, "model": {"width": 24, "depth": 2}, "run": {"threads": 1}}
    return fedprotip.load_settings(raw, overrides)


def run(folder, method, *overrides, **changes):
    summary = fedprotip.run(settings(method, *overrides, **changes), out=folder)
    return summary, results(folder) | {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def events(folder, kind):
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]
