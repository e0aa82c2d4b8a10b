"""A method of its own file: between tasks the server trains a small generator, whose samples join clients' batches."""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from fedprotip.messages import Message
from fedprotip.methods import Exchange, Form, Kept, Method, register
from fedprotip.models.state import full_state
from fedprotip.seeds import ambient_stream
from fedprotip.settings import MethodSettings

NOISE = 8
FORMS = {"*.weight": Form("out in"), "*.bias": Form("out"), "shape": Form("3", torch.int64)}


class DreamOptions(MethodSettings):
    name: str = Field("dream", description="Method; its own settings follow.")
    steps: int = Field(5, ge=1, description="Steps of the generator at the end of a task.")
    samples: int = Field(6, ge=1, description="Synthetic samples in every batch.")


def generator(labels, shape):
    return nn.Sequential(nn.Linear(NOISE + labels, 16), nn.ReLU(), nn.Linear(16, shape.numel()))


def inputs_of(made, labels, known, chance):
    """Noise and a label → images."""
    one_hot = F.one_hot(labels, known).float()
    return made(torch.cat([torch.randn(len(labels), NOISE, generator=chance), one_hot], dim=1))


class Dreaming(Exchange):
    """A step of the server alone: images that the global model takes for its classes."""

    name, who = "generator", "nobody"

    def digest(self, combined, site):
        known = [label for head in site.network.labels for label in head]
        shape = torch.Size(site.image_shape)
        seed, steps = site.settings.run.seed, site.settings.method.steps
        with ambient_stream(seed, "generator", site.task):
            made = generator(len(known), shape)
        chance, optimizer = site.chance("dreams"), torch.optim.SGD(made.parameters(), 0.1)
        site.network.eval()
        for step in range(steps):
            labels = torch.randint(len(known), (16,), generator=chance)
            loss = F.cross_entropy(site.network(inputs_of(made, labels, len(known), chance).view(-1, *shape)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            site.on_progress("generator", step + 1, steps)
        site.network.zero_grad()
        return Message(self.name, full_state(made) | {"shape": torch.tensor(shape)})

    def receive(self, message, site):
        site.known.update({f"generator/{name}": tensor for name, tensor in message.tensors.items()})


@register
class Dream(Method):
    name = "dream"
    sees_images = True
    state = (Kept("generator", "shared", FORMS, artefact=True),)
    Options = DreamOptions

    def at_end(self):
        return (Dreaming(),)

    def trainable(self, site):
        return super().trainable(site) | {n for n, _ in site.network.named_parameters() if n.startswith("heads.")}

    def batches(self, local, own):
        dreams = {n.removeprefix("generator/"): t for n, t in local.known.items()}
        shape = torch.Size(dreams.pop("shape").tolist()) if dreams else None
        known = torch.tensor([label for labels in local.network.labels[:-1] for label in labels])
        if shape:
            made = generator(len(known), shape)
            made.load_state_dict(dreams)
        chance = local.chance("dreams")
        for images, labels in own:
            if shape:
                chosen = torch.randint(len(known), (local.settings.method.samples,), generator=chance)
                with torch.no_grad():
                    synthetic = inputs_of(made, chosen, len(known), chance).view(-1, *shape)
                images, labels = torch.cat([images, synthetic]), torch.cat([labels, known[chosen]])
            yield images, labels

    def loss(self, local, inputs, labels):
        known = torch.tensor([label for head in local.network.labels for label in head], device=labels.device)
        return F.cross_entropy(local.network(inputs), (labels[:, None] == known).int().argmax(1))
