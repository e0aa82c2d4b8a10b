"""fedprotip: federated continual learning without replay.

import fedprotip
summary = fedprotip.run("configs/demo.toml", overrides=["run.seed=1"], out="runs/mine")
answers = fedprotip.load("runs/mine").predict(images)

What trains is imported when it is first asked for: a process that only answers never has it.
"""

import os
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: threads that wait sleep, and burn no CPU

from fedprotip.errors import FedprotipError, RunError, UsageError
from fedprotip.lazy import lazily

if TYPE_CHECKING:
    from fedprotip.api import extend, resume, run
    from fedprotip.inference.predictor import Answer, Predictor, ask, load
    from fedprotip.settings import Settings
    from fedprotip.settings import load as load_settings

__all__ = [
    "Answer",
    "FedprotipError",
    "Predictor",
    "RunError",
    "Settings",
    "UsageError",
    "ask",
    "extend",
    "load",
    "load_settings",
    "resume",
    "run",
]

_PLACES = {
    **dict.fromkeys(("extend", "resume", "run"), "fedprotip.api"),
    **dict.fromkeys(("Answer", "Predictor", "ask", "load"), "fedprotip.inference.predictor"),
    "Settings": "fedprotip.settings",
    "load_settings": "fedprotip.settings:load",
}
__getattr__ = lazily(__name__, _PLACES)


def __dir__() -> list[str]:
    return sorted(globals().keys() | _PLACES.keys())
