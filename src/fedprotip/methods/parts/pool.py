"""The pool of synthetic images: the server makes it before a task, clients keep earlier outputs by it."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fedprotip.messages import Message
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.local import Local
from fedprotip.methods.parts.generator import Synthesis, endless
from fedprotip.methods.parts.stored import SYNTHETIC
from fedprotip.methods.site import Site
from fedprotip.methods.state import Form, Kept, Knowledge
from fedprotip.models.prefix import still_prefix
from fedprotip.models.steps import Inputs, advance

POOL = "pool"
IMAGES = f"{POOL}/images"
KEPT = Kept(POOL, "shared", {"images": Form("n c h w", torch.uint8)}, artefact=True)
"""State of a method with a pool: only the newest one, which covers all tasks before."""


class Pool(Exchange):
    """A step of the server alone, before the first round of a task; so nothing is made after the last one."""

    name, when, who = POOL, "begin", "nobody"

    def __init__(self, synthesis: Callable[[Site], Synthesis]) -> None:
        self._synthesis = synthesis

    def due(self, site: Site) -> bool:
        return site.task > 0

    def digest(self, combined: None, site: Site) -> Message:
        return Message(self.name, {"images": self._synthesis(site).run()[0]})

    def receive(self, message: Message, site: Site) -> None:
        site.known[IMAGES] = message.tensors["images"]


def synthetic(local: Local, batch: int) -> Iterator[Inputs]:
    """Batches of the pool for this client's steps, as far along the network as nothing moves in this task.

    So the model and the one before it, which are the same there, share that part of the work.
    """
    look, network, chance = local.site.look, local.network, local.chance(POOL)
    still = still_prefix(network, local.settings, local.task)
    for images in endless(local.known[IMAGES], batch, chance):
        inputs = look.batch(images, chance).to(local.site.device)
        with torch.no_grad():
            passed = advance(network.backbone, inputs, still, ()) if still else inputs
        yield passed


def samples(known: Knowledge) -> dict[str, int]:
    """For `Method.samples`."""
    kept: Tensor | None = known.get(IMAGES)
    return {} if kept is None else {SYNTHETIC: len(kept)}
