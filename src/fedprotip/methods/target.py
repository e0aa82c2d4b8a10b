"""TARGET (Zhang et al. 2023): before a task the server makes images of all earlier classes out of the global model.

A generator makes them (`parts/generator.py`); clients distil the model of the last task on them while they learn the
new one. No sample of the past is kept. The generator is meta-learned: each round a copy of it ("fast") makes one
batch, and the generator itself follows to where the next copy will need fewer steps.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from fedprotip.methods.base import About, Method, register
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.local import Local
from fedprotip.methods.parts import pool
from fedprotip.methods.parts.distillation import earlier, soft_cross_entropy
from fedprotip.methods.parts.generator import BETAS, Decoder, Score, Synthesis, SynthesisOptions, unheard
from fedprotip.methods.site import Site
from fedprotip.methods.state import Form, Kept, Knowledge
from fedprotip.models.steps import Inputs
from fedprotip.seeds import ambient_stream
from fedprotip.settings import Settings

GENERATOR = Kept("generator", "server", {"state": Form("p")})
REPTILE = 67.0
"""Pull of the generator towards its copy, before Adam's scaling."""


class TargetOptions(SynthesisOptions):
    name: str = Field("target", description="Method; its own settings follow.")
    strength: float = Field(25.0, ge=0, description="Weight of the distillation on synthetic images.")
    temperature: float = Field(2.0, gt=0, description="Temperature of that distillation.")
    batch: int = Field(256, ge=1, description="Synthetic images beside every batch of a client's own.")
    noise: int = Field(256, ge=1, description="Size of the noise that images are made of.")
    noise_lr: float = Field(0.01, gt=0, description="Adam's learning rate of the noise itself.")
    meta: Literal["fomaml", "reptile"] = Field(
        "fomaml", description="How the generator follows its copies: by the sum of their gradients, or towards them."
    )
    reuse: bool = Field(False, description="The generator goes on from the task before instead of starting anew.")


class MetaSynthesis(Synthesis):
    """A generator that is a good start for the next round's copy."""

    def __init__(self, site: Site, options: TargetOptions) -> None:
        super().__init__(site, options)
        self._own = options
        with ambient_stream(site.settings.run.seed, "generator", site.task):
            generator = Decoder(options.noise, self.shape, options.width)
        self.generator = generator.to(self.device)
        if options.reuse and "generator/state" in site.known:
            torch.nn.utils.vector_to_parameters(site.known["generator/state"].to(self.device), generator.parameters())
        rate = options.generator_lr * options.generator_steps
        self._meta = torch.optim.Adam(generator.parameters(), rate, betas=BETAS)

    def make(self, targets: Tensor, score: Score) -> Tensor:
        options, fast = self._own, deepcopy(self.generator)
        noise = torch.randn(len(targets), options.noise, generator=self.chance).to(self.device).requires_grad_()
        groups: list[dict[str, Any]] = [
            {"params": list(fast.parameters())},
            {"params": [noise], "lr": options.noise_lr},
        ]
        optimizer = torch.optim.Adam(groups, options.generator_lr, betas=BETAS)
        best, lowest = torch.empty(0), torch.inf
        self._meta.zero_grad()
        for _ in range(options.generator_steps):
            images = fast(noise)
            loss = score(images)
            if loss.item() < lowest or not len(best):
                best, lowest = images.detach(), loss.item()
            optimizer.zero_grad()
            loss.backward()
            if options.meta == "fomaml":
                for own, copied in zip(self.generator.parameters(), fast.parameters(), strict=True):
                    assert copied.grad is not None
                    own.grad = copied.grad.clone() if own.grad is None else own.grad + copied.grad
            optimizer.step()
        if options.meta == "reptile":
            for own, copied in zip(self.generator.parameters(), fast.parameters(), strict=True):
                own.grad = REPTILE * (own - copied).detach()
        self._meta.step()
        return best

    def run(self) -> tuple[Tensor, Tensor]:
        found = super().run()
        if self._own.reuse:
            self.site.known["generator/state"] = torch.nn.utils.parameters_to_vector(self.generator.parameters()).cpu()
        return found


@register
class Target(Method):
    name = "target"
    about = About(
        "distils the last model on images that a generator makes out of it",
        stores="the last model and a pool of synthetic images",
        sends="the model, every round; a pool of synthetic images to clients, once a task",
        needs="a generator trained by the server; norm statistics make it better",
    )
    remembers = True
    state = (pool.KEPT, GENERATOR)
    Options = TargetOptions

    def __init__(self, settings: Settings) -> None:
        assert isinstance(settings.method, TargetOptions)
        self.options = settings.method
        super().__init__(settings)

    def check_known(self, site: Site) -> None:
        state = site.known.get("generator/state")
        with torch.device("meta"):
            generator = Decoder(self.options.noise, site.image_shape, self.options.width)
        wanted = sum(p.numel() for p in generator.parameters())
        if state is not None and len(state) != wanted:
            raise ValueError(f"generator/state has {len(state)} numbers, not {wanted}")

    def cautions(self) -> Sequence[str]:
        return unheard(self.options, self.options.warmup, self.options.synthesis_rounds)

    def at_begin(self) -> Sequence[Exchange]:
        return (pool.Pool(lambda site: MetaSynthesis(site, self.options)),)

    def begin_round(self, local: Local) -> None:
        if local.task:
            local.scratch[pool.POOL] = pool.synthetic(local, self.options.batch)

    def loss(self, local: Local, inputs: Inputs, labels: Tensor) -> Tensor:
        """The new classes on the client's own samples; on synthetic ones the old outputs stay what they were."""
        loss = self.learning(local, local.network.embed(inputs), labels)
        return loss + self.options.strength * self.keeping(local) if local.task else loss

    def learning(self, local: Local, features: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy over the classes of the current task."""
        return F.cross_entropy(local.network.logits(features, local.task), local.network.targets(labels, local.task))

    def keeping(self, local: Local) -> Tensor:
        """Distillation of all earlier outputs on the next synthetic batch."""
        images = next(local.scratch[pool.POOL])
        with torch.no_grad():
            told = earlier(local.before, local.before.embed(images), local.task)
        said = earlier(local.network, local.network.embed(images), local.task)
        return soft_cross_entropy(said, told, self.options.temperature)

    def samples(self, known: Knowledge) -> dict[str, int]:
        return pool.samples(known)
