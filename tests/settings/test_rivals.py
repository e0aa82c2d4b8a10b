"""The cpu variants of rival methods are settings that exist."""

import tomllib
from importlib.resources import files

import pytest

from fedprotip.settings import load

TABLES = tomllib.loads((files("fedprotip") / "configs" / "rivals-cpu.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("method", TABLES)
def test_a_cpu_variant_changes_settings_that_the_method_has(method):
    found = load({"method": {"name": method, **TABLES[method]}}).method
    assert found.name == method
    assert {key: getattr(found, key) for key in TABLES[method]} == TABLES[method]
