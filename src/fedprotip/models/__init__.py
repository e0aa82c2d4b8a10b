"""Backbones with growing heads. A new file that calls `register` is a new `model.name`."""

from importlib import import_module
from pkgutil import iter_modules

from fedprotip.models.heads import Network, build_network, new_network, register

__all__ = ["Network", "build_network", "new_network", "register"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
