"""One file per method. A new file here that ends in a class with `@register` is a new `method.name`."""

from importlib import import_module
from pkgutil import iter_modules

from fedprotip.methods.base import About, Method, create_method, described, register
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.local import Local
from fedprotip.methods.site import Site
from fedprotip.methods.state import Form, Kept

__all__ = ["About", "Exchange", "Form", "Kept", "Local", "Method", "Site", "create_method", "described", "register"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
