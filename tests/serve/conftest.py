import shutil

import pytest

from tests.small import used


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    return used(tmp_path_factory.mktemp("served") / "run")


@pytest.fixture
def run(made, tmp_path):
    """A run folder that a test may change."""
    return shutil.copytree(made, tmp_path / "run")
