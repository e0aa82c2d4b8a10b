"""A method of its own file: every client keeps a few of its samples and learns from them again (experience replay)."""

import torch
import torch.nn.functional as F
from pydantic import Field

from fedprotip.messages import Message
from fedprotip.methods import Exchange, Form, Kept, Method, register
from fedprotip.settings import MethodSettings

FORMS = {"images": Form("n c h w"), "labels": Form("n", torch.int64)}


class ReplayOptions(MethodSettings):
    name: str = Field("replay", description="Method; its own settings follow.")
    exemplars: int = Field(4, ge=1, description="Samples that a client keeps of a task.")


class Remember(Exchange):
    """Clients are asked to choose exemplars; what they say is only how many they have."""

    name = "remembered"

    def answer(self, local):
        images, labels = (torch.cat(parts) for parts in zip(*local.labelled(64), strict=True))
        chosen = torch.randperm(len(labels), generator=local.chance("exemplars"))
        chosen = chosen[: local.settings.method.exemplars]
        old = local.own.get("exemplars") or {"images": images[:0], "labels": labels[:0]}
        kept = {
            "images": torch.cat([old["images"], images[chosen]]),
            "labels": torch.cat([old["labels"], labels[chosen]]),
        }
        local.own.put("exemplars", kept)
        return Message(self.name, meta={"exemplars": len(kept["labels"])})

    def check(self, message, site):
        message.check(self.name, {})
        message.check_numbers("exemplars")


@register
class Replay(Method):
    name = "replay"
    sees_images = True
    state = (Kept("exemplars", "private", FORMS),)
    Options = ReplayOptions

    def at_end(self):
        return (Remember(),)

    def trainable(self, site):
        return super().trainable(site) | {n for n, _ in site.network.named_parameters() if n.startswith("heads.")}

    def batches(self, local, own):
        memory = local.own.get("exemplars")
        for images, labels in own:
            if memory:
                images = torch.cat([images, memory["images"]])
                labels = torch.cat([labels, memory["labels"]])
            yield images, labels

    def loss(self, local, inputs, labels):
        """Over all heads: a client knows which labels they have."""
        known = torch.tensor([label for head in local.network.labels for label in head], device=labels.device)
        return F.cross_entropy(local.network(inputs), (labels[:, None] == known).int().argmax(1))
