import pytest

from fedprotip import api, settings
from fedprotip.models import freeze, heads
from fedprotip.stream import datasets


@pytest.fixture
def registries(monkeypatch):
    """What a test registers is forgotten after it."""
    for key in ("model.name", "data.name"):
        monkeypatch.setitem(settings.KNOWN, key, dict(settings.KNOWN[key]))
    monkeypatch.setattr(heads, "_builders", dict(heads._builders))
    monkeypatch.setattr(freeze, "_stages", dict(freeze._stages))
    monkeypatch.setattr(datasets, "_loaders", dict(datasets._loaders))


@pytest.fixture
def no_report(monkeypatch):
    """Runs without plots, which take longer than these runs themselves."""
    monkeypatch.setattr(api, "write_report", lambda folder: None)
