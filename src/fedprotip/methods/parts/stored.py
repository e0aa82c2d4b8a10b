"""How many samples of the past clients keep: a number that the server is told and the report shows."""

import torch

from fedprotip.messages import BadMessage, Message, Spec
from fedprotip.methods.exchange import Exchange, Sender
from fedprotip.methods.local import Local
from fedprotip.methods.site import Site
from fedprotip.methods.state import Form, Kept

STORED, RAW, SYNTHETIC = "stored", "raw", "synthetic"
KEPT = Kept(STORED, "server", {RAW: Form("", torch.int64)})
"""State of a method whose clients keep samples of their own."""
MANY = 2**40


class Stored(Exchange):
    """At the end of a task: the rows of a private group of tensors, as a sum over all clients."""

    name, who, combine, needed, needs_model = STORED, "everyone", "sum", False, False

    def __init__(self, group: str, most: int = MANY) -> None:
        """Args: group: of the client's private state, with `labels` of its samples; most: samples that it keeps."""
        self.group, self.most = group, most

    def answer(self, local: Local) -> Message:
        kept = local.own.get(self.group)
        return Message(self.name, {RAW: torch.tensor(len(kept["labels"]) if kept else 0)})

    def check(self, message: Message, site: Site) -> None:
        message.check(self.name, {RAW: Spec((), torch.int64)})
        message.check_meta()
        if not 0 <= message.tensors[RAW] <= MANY:
            raise BadMessage("nobody keeps so many samples")

    def check_sender(self, message: Message, site: Site, sender: Sender) -> None:
        if message.tensors[RAW] > self.most:
            raise BadMessage(f"it keeps {int(message.tensors[RAW])} samples, and may keep {self.most}")

    def digest(self, combined: Message, site: Site) -> None:
        site.known[f"{STORED}/{RAW}"] = combined.tensors[RAW].to(torch.int64)
