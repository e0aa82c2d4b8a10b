"""fedprotip: federated continual learning without replay.

import fedprotip
summary = fedprotip.run("configs/demo.toml", overrides=["run.seed=1"], out="runs/mine")
"""

from fedprotip.answers import ask
from fedprotip.api import extend, resume, run
from fedprotip.errors import FedprotipError, RunError, UsageError
from fedprotip.settings import Settings
from fedprotip.settings import load as load_settings

__all__ = ["FedprotipError", "RunError", "Settings", "UsageError", "ask", "extend", "load_settings", "resume", "run"]
