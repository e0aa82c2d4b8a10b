"""Training progress in a browser, while a run works and afterwards; reads only a run folder, and writes nothing.

fedprotip watch DIR
"""

from fedprotip.watch.server import WatchServer
from fedprotip.watch.view import Watched

__all__ = ["WatchServer", "Watched"]
