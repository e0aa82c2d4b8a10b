"""All runs of secure sums are small and quick."""

import pytest

from tests.small import quick


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    quick(monkeypatch)
