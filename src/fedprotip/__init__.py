"""fedprotip: federated continual learning without replay.

import fedprotip
summary = fedprotip.run("configs/demo.toml", overrides=["run.seed=1"], out="runs/mine")
answers = fedprotip.load("runs/mine").predict(images)
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: threads that wait sleep, and burn no CPU

from fedprotip.api import extend, resume, run
from fedprotip.errors import FedprotipError, RunError, UsageError
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
