"""MLflow: a run of the experiment `fedprotip` in `mlflow.db` of the working directory, or where the user says.

fedprotip run my.toml --track mlflow && mlflow ui --backend-store-uri sqlite:///mlflow.db
MLFLOW_TRACKING_URI=http://somewhere fedprotip run my.toml --track mlflow
"""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from fedprotip.errors import RunError
from fedprotip.settings import Settings
from fedprotip.store.folder import RunFolder
from fedprotip.store.records import read_json

EXPERIMENT = "fedprotip"
RECORD = "mlflow.json"
"""In the run folder: the name that MLflow gave to the run. Where the store is, only the user says."""
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # a server that is away must not hold up a run
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
LONGEST = 500
"""Letters of a parameter that MLflow takes."""


class MLflow:
    """Settings as parameters, curves as metrics. A resumed run goes on under its name, if the store still has it."""

    def __init__(self, folder: Path, settings: Settings, first: int) -> None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient  # of the extra `track`
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db")
        self._run = _known(folder)
        if self._run:
            try:
                self._client.update_run(self._run, status="RUNNING")
            except MlflowException:  # another store
                self._run = ""
        if not self._run:
            found = self._client.get_experiment_by_name(EXPERIMENT)
            experiment = found.experiment_id if found else self._client.create_experiment(EXPERIMENT)
            self._run = self._client.create_run(experiment, run_name=folder.name).info.run_id
            RunFolder(folder).write_json(RECORD, {"run_id": self._run})
            flat = {f"{s}.{key}": value for s, part in settings.model_dump().items() for key, value in part.items()}
            params = [Param(key, str(value)[:LONGEST]) for key, value in flat.items()]
            for start in range(0, len(params), 100):
                self._client.log_batch(self._run, params=params[start : start + 100])

    def add(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        metrics = [Metric(re.sub(r"[^\w./ -]", "_", name), value, now, step) for name, value in values.items()]
        for start in range(0, len(metrics), 500):
            self._client.log_batch(self._run, metrics=metrics[start : start + 500])

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")


def _known(folder: Path) -> str:
    """The name of the run in MLflow; empty where there is none that could be one."""
    if not RunFolder(folder).has(RECORD):
        return ""
    try:
        name = read_json(folder / RECORD).get("run_id")
    except RunError:
        return ""
    return name if isinstance(name, str) and re.fullmatch(r"[0-9a-f]{32}", name) else ""
