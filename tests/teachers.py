"""A site before its third task, whose network has learned the four digits of the first two, with norm statistics."""

import torch
import torch.nn.functional as F

from fedprotip.methods.parts.distillation import earlier
from fedprotip.methods.parts.text import directions, lengthened
from tests.sites import Ends
from tests.small import small

MAKING = {"synthesis_rounds": 4, "synthesis_batch": 64, "generator_steps": 20, "warmup": 1, "student_steps": 10}
SMALL = MAKING | {"width": 8, "noise": 32, "pool": 200, "batch": 16}


def learned_site(folder, name, *overrides, model="small_cnn", **options):
    """Of a method with a generator; its network answers 95 % of the digits 0 to 3."""
    chosen = {"name": model, "width": 24, "depth": 2}
    settings = small(*overrides, method={"name": name, **SMALL, **options}, model=chosen)
    ends = Ends(settings, folder)
    known = {}
    if name == "lander":
        for task in (0, 1):
            names = [str(label) for label in ends.stream.tasks[task].classes]
            known[f"text/{task}"] = lengthened(directions(names, settings.method.dim, settings.method.alike), 9.7)
    site = ends.site(known, task=2)
    images, labels = (torch.cat(parts) for parts in zip(*(whole(ends, task) for task in (0, 1)), strict=True))
    network = site.network
    network.train().requires_grad_(True)
    optimizer, chance = torch.optim.Adam(network.parameters(), 5e-3), torch.Generator().manual_seed(0)
    for _ in range(150):
        rows = torch.randint(len(labels), (64,), generator=chance)
        features = network.embed(images[rows])
        loss = F.cross_entropy(earlier(network, features, 2), labels[rows])
        if known:
            anchors = torch.cat([known["text/0"], known["text/1"]])[labels[rows]]
            loss = loss + F.mse_loss(network.extras["mapping"](features), anchors)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    network.eval()
    with torch.no_grad():
        assert (earlier(network, network.embed(images), 2).argmax(1) == labels).float().mean() > 0.95
    return site


def whole(ends, task):
    """All training samples of a task; its labels are outputs of the heads so far."""
    return ends.stream.train_batch(task, ends.stream.tasks[task].train)
