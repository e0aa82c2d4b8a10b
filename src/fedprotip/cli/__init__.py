"""The command `fedprotip`."""

from fedprotip.cli.app import main

__all__ = ["main"]
