"""FedProTIP (section 4): projected local training, merged subspaces, task identity from the same subspaces."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, field_validator, model_validator

from fedprotip.errors import UsageError
from fedprotip.inference.experts import BIRTH, HEADS, STATISTICS
from fedprotip.methods.base import About, Method, register
from fedprotip.methods.constraint import Constraint
from fedprotip.methods.exchange import Exchange
from fedprotip.methods.local import Local
from fedprotip.methods.parts import references, statistics
from fedprotip.methods.parts.bases import Bases
from fedprotip.methods.parts.calibration import CALIBRATION, Calibrating
from fedprotip.methods.parts.moments import MOMENTS
from fedprotip.methods.parts.private import SECRET
from fedprotip.methods.parts.projection import ProjectGradient, ProjectUpdate, linear_decay
from fedprotip.methods.parts.protection import SUBSPACES, Protection, protection, ranks
from fedprotip.methods.parts.robust import is_robust
from fedprotip.methods.parts.sketches import SketchedBases
from fedprotip.methods.parts.wear import LEFT
from fedprotip.methods.site import Site
from fedprotip.methods.state import Knowledge
from fedprotip.settings import MethodSettings, Settings
from fedprotip.stream.plan import Answering, Options, WayPlan

RouterName = Literal["auto", "cosine", "gaussian", "statistics", "shared", "statistics-heads", "fused", "birth"]
BOTH = ("statistics-heads", "fused")
"""Ways in which class statistics choose a head, or weigh all of them."""


class FedProTIPOptions(MethodSettings):
    name: str = Field("fedprotip", description="Method; its own settings follow.")
    threshold: float = Field(0.95, gt=0, le=1, description="ε: share of the activations that a basis must hold.")
    layer_thresholds: dict[str, float] = Field(
        {},
        description='ε of single layers by name pattern, for example {"5.*" = 0.95}; the first match counts.',
    )
    increment: float = Field(0.001, ge=0, lt=1, description="Added to ε with every task.")
    rank_rule: Literal["mass", "energy"] = Field(
        "energy",
        description="mass: singular values of the residual (Eq. 9); energy: squares, of the total (GPM).",
    )
    columns: int = Field(
        512, ge=1, description="m_s: sampled activation columns per layer and client, and images that U_L and ω are of."
    )
    per_image: int = Field(
        4,
        ge=1,
        description="Columns per image: no more images are used than give m_s columns of a layer at this rate.",
    )
    projection: Literal["local", "global", "none"] = Field(
        "local", description="local: every client step (the method); global: after averaging; none."
    )
    project_on: Literal["update", "gradient"] = Field(
        "update",
        description="update: the whole step, decay and momentum inside; gradient: as published code does.",
    )
    merge: Literal["union", "energy", "sketch"] = Field(
        "energy",
        description="union of the clients' spans (Eq. 10), or the dominant directions of all together: from every "
        "client's basis, or from a sum of random sketches of them (Eq. 41), which is the default with secure = true.",
    )
    sketch: int = Field(128, ge=0, description="Columns s of a sketch; 0: as many as the layer has inputs.")
    budget: Literal["tasks", "none"] = Field(
        "tasks",
        description="tasks: after t of the T tasks of stream.tasks no layer has more than t/(T + 1) of its directions "
        "taken, so that the last task can learn as well, and one more; none: as many as ε says. Not with a union.",
    )
    routing_rank: int = Field(0, ge=0, description="Directions of U_L per task; 0: by ε, as the paper does.")
    statistics: bool = Field(
        True, description="Clients send class statistics at the end of a task; all routers but the first two need them."
    )
    birth: bool = Field(
        True,
        description="With router = 'auto' and samples held back: class statistics of the network before any training "
        "too, which answer where training did not pay; that network is kept.",
    )
    router: RouterName = Field(
        "auto",
        description="How the task is found. auto: the way that is right most often about samples that clients held "
        "back; without any: birth if it is kept, else statistics; cosine where statistics lack half of the tasks, "
        "because no client has samples enough of their classes, or are not sent. cosine and vote "
        "(Eq. 12); gaussian likelihood of the relevance; class statistics, which answer themselves or choose a head; "
        "fused: p(task) by statistics, p(class) by heads; shared, for domains: statistics of a class in all domains "
        "together; birth: statistics of the network before any training.",
    )
    voters: int = Field(0, ge=0, description="Clients that vote on the task of a sample; 0: all.")

    @model_validator(mode="after")
    def _router_has_its_statistics(self) -> "FedProTIPOptions":
        if self.router not in ("auto", "cosine", "gaussian") and not self.statistics:
            raise ValueError(f"router = {self.router!r} needs statistics = true; without them: 'cosine' or 'gaussian'")
        return self

    @model_validator(mode="before")
    @classmethod
    def _a_union_has_no_budget(cls, raw: Any) -> Any:
        """Where nothing is said about it: a union cannot be cut, for it has no order."""
        if isinstance(raw, Mapping) and raw.get("merge") == "union" and "budget" not in raw:
            return {**raw, "budget": "none"}
        return raw

    @model_validator(mode="before")
    @classmethod
    def _sums_need_sketches(cls, raw: Any) -> Any:
        """Where nothing is said about it: bases cannot be summed."""
        possible = "sketch" in get_args(cls.model_fields["merge"].annotation)
        if possible and isinstance(raw, Mapping) and raw.get("secure") is True and "merge" not in raw:
            return {**raw, "merge": "sketch"}
        return raw

    @model_validator(mode="after")
    def _budget_is_kept(self) -> "FedProTIPOptions":
        if self.budget == "tasks" and self.merge == "union":
            raise ValueError("budget = 'tasks' needs merge = 'energy' or 'sketch'; with merge = 'union' it is 'none'")
        return self

    @field_validator("layer_thresholds")
    @classmethod
    def _within_bounds(cls, value: dict[str, float]) -> dict[str, float]:
        for pattern, threshold in value.items():
            if not 0 < threshold <= 1:
                raise ValueError(f"has ε = {threshold} for {pattern!r}, must be above 0 and at most 1")
        return value


@register
class FedProTIP(Method):
    name = "fedprotip"
    about = About(
        "steps projected away from the subspaces of earlier tasks; tasks found by the same subspaces",
        stores="second moments of features",
        sends="the model, every round; bases, references, sums and products of features, once a task",
    )
    routes = True
    protects = True
    Options: ClassVar[type[MethodSettings]] = FedProTIPOptions

    def __init__(self, settings: Settings) -> None:
        assert isinstance(settings.method, FedProTIPOptions)
        self.options = settings.method
        self.calibrates = self.options.statistics and settings.clients.held_back > 0
        evident = self.options.router == "auto" and self.calibrates  # else nobody would ever choose it
        self.remembers_birth = self.options.router == BIRTH or (evident and self.options.birth)
        self.state = (
            SUBSPACES,
            LEFT,
            statistics.kept(shared=self.calibrates),
            *([statistics.kept(self.calibrates, BIRTH)] if self.remembers_birth else []),
            MOMENTS,
            *references.STATE,
            CALIBRATION,
            SECRET,
        )
        super().__init__(settings)

    def check(self) -> None:
        super().check()
        if self.options.router == "shared" and self.settings.stream.scenario != "domain":
            raise UsageError(
                'method.router = "shared" is not possible with stream.scenario = "class": there it is "statistics".'
            )
        if self.options.merge == "sketch" and is_robust(self.settings.train.aggregate):
            raise UsageError(
                f"train.aggregate = {self.settings.train.aggregate!r} is not possible with method.merge = 'sketch', as "
                "sketches can only be summed; choose 'mean' or 'clipped'."
            )
        if self.options.secure and self.options.merge != "sketch":
            raise UsageError(
                f"method.merge = {self.options.merge!r} is not possible with method.secure = true, as bases cannot be "
                "summed; choose 'sketch', or leave it out."
            )

    def at_end(self) -> Sequence[Exchange]:
        """Statistics and calibration, while W^(t,0) is known; extract → merge → broadcast → refer (section 4.4)."""
        options, settings = self.options, self.settings
        told = [statistics.Statistics(settings, self.calibrates, born=born) for born in self._ages()]
        asked = [Calibrating(self._by_statistics(), settings.train, options.secure)]
        return (
            *told,
            *(asked if self.calibrates else []),
            SketchedBases(options, settings) if options.merge == "sketch" else Bases(options, settings),
            references.SharedReferences() if options.secure else references.References(),
        )

    # Training: Eq. 4–5

    def view(self, site: Site) -> Protection:
        options = self.options
        escapes = options.projection == "local" and options.project_on == "gradient"  # decay acts inside Φ too
        return Protection(site, travels=site.task > 0 and options.projection != "none" and not escapes)

    def trainable(self, site: Site) -> set[str]:
        """After the first task only weights with an input subspace move, and the current head.

        Where Φ spans all inputs and every step is projected, a weight cannot move: it needs no gradient either.
        """
        names, options = super().trainable(site), self.options
        if site.task == 0 or options.projection == "none":
            return names
        strict = options.projection == "local" and options.project_on == "update"
        made = site.view.projectors
        protected = {f"backbone.{layer.parameter}" for layer, outside in made if outside.room or not strict}
        return {name for name in names if name.startswith("heads.") or name in protected}

    def constraint(self, local: Local) -> Constraint | None:
        if local.task == 0 or self.options.projection != "local":
            return None
        view, backbone = protection(local.site), local.network.backbone
        if self.options.project_on == "gradient":
            return ProjectGradient(backbone, view.projectors)
        return ProjectUpdate(backbone, view.projectors, linear_decay(self.settings.train), view.anchors)

    # Answers

    def answering(self) -> Answering:
        """All routers; the paper's need references, the others class statistics."""
        statistical = self._by_statistics()
        vote: Options = {"voters": self.options.voters, "seed": self.settings.run.seed}
        ways = {
            "cosine": WayPlan(router="cosine", expert=HEADS, options=vote),
            "gaussian": WayPlan(router="gaussian", expert=HEADS),
        }
        chosen = (statistical.chosen or "cosine") if self.options.router == "auto" else self.options.router
        return statistical.model_copy(update={"ways": ways | statistical.ways, "chosen": chosen})

    def _by_statistics(self) -> Answering:
        """What a client can answer too, and calibrates: heads, class statistics and the two together."""
        own = super().answering()
        if not self.options.statistics:
            return own
        told = [statistics.answering(self.settings, born) for born in self._ages()]
        both = {name: WayPlan(router=STATISTICS, expert=HEADS, hard=name != "fused") for name in BOTH}
        experts = {name: options for one in told for name, options in one.experts.items()}
        ways = {name: way for one in told for name, way in one.ways.items()} | both
        chosen = self.options.router if self.options.router in ways else STATISTICS
        auto = self.options.router == "auto"
        return Answering(experts=own.experts | experts, ways=ways, chosen=chosen, tried=tuple(ways), auto=auto)

    def _ages(self) -> tuple[bool, ...]:
        """Networks that class statistics are of, that at birth (True) first: it is the simplest."""
        return ((True,) if self.remembers_birth else ()) + ((False,) if self.options.statistics else ())

    def ranks(self, known: Knowledge) -> tuple[dict[str, int], dict[str, int]]:
        return ranks(known)
