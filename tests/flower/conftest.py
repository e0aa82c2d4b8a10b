"""Deployments of a test end with it."""

import pytest

from fedprotip.flower.deployment import Place
from fedprotip.flower.processes import down


@pytest.fixture
def place(tmp_path):
    """An empty folder; whatever was started from deployment files in it is ended."""
    yield tmp_path
    for path in [*tmp_path.glob("*/server.toml"), *tmp_path.glob("*/site.toml"), *tmp_path.glob("*.toml")]:
        if "superlink" in path.read_text():
            down(Place(path))
