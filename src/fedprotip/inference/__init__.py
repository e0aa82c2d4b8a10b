"""From features to a task and a label (section 4.4)."""

from fedprotip.inference.assemble import assemble
from fedprotip.inference.parts import Context, Expert, Router, Seen, expert, router

__all__ = ["Context", "Expert", "Router", "Seen", "assemble", "expert", "router"]
