"""One file per method. A new file here that ends in a class with `@register` is a new `method.name`."""

from importlib import import_module
from pkgutil import iter_modules

from fedprotip.methods.base import ClientTask, Method, create_method, register

__all__ = ["ClientTask", "Method", "create_method", "register"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
