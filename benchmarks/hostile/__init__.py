"""One hostile client among honest ones: attacks that change its replies, by name.

from benchmarks import hostile

with hostile.among("sign_flip", client=1):
    fedprotip.run(settings, out=folder)
"""

from benchmarks.hostile import bases, replies, statistics, tables, updates
from benchmarks.hostile.door import ATTACKS, EVERY, HONEST, PRESENCE, Attack, Scene, among

__all__ = ["ATTACKS", "EVERY", "HONEST", "PRESENCE", "Attack", "Scene", "among"]
__all__ += [module.__name__.rpartition(".")[2] for module in (bases, replies, statistics, tables, updates)]
