"""Who has data of a task: asked once at its beginning."""

from fedprotip.messages import SAMPLES, BadMessage, Message
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.local import Local
from fedprotip.methods.site import Site


class Presence(Exchange):
    name, when, who, needed, needs_model = "presence", "begin", "everyone", False, False

    def answer(self, local: Local) -> Message:
        return Message(self.name, meta={"samples": len(local.samples)})

    def check(self, message: Message, site: Site) -> None:
        message.check(self.name, {})
        message.check_numbers("samples")
        if not 0 <= message.meta["samples"] <= SAMPLES or not isinstance(message.meta["samples"], int):
            raise BadMessage(f"samples = {message.meta['samples']} is not a number of samples")
