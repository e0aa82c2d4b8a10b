"""One file per method. A new file here that ends in a class with `@register` is a new `method.name`."""

from importlib import import_module
from pkgutil import iter_modules

from fedprotip.methods.base import Method, create_method, register
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.local import Local
from fedprotip.methods.site import Site
from fedprotip.methods.state import Form, Kept

__all__ = ["Exchange", "Form", "Kept", "Local", "Method", "Site", "create_method", "register"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
