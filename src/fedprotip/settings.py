"""Typed settings of a run: TOML file + `--set key=value`, checked before any work.

    fedprotip settings                     # every key with its documentation and default, as TOML
    fedprotip run my.toml --set train.rounds=5

Defaults are the paper's (section 6 and appendix E) wherever the paper states one.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, ValidationError, field_validator

from fedprotip import tomltext
from fedprotip.errors import UsageError, nearest


class Section(BaseModel):
    """A group of settings: immutable, an unknown key is an error, and so is true or "5" for a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False)


class DataSettings(Section):
    name: str = Field("digits", description="Dataset: digits ships with scikit-learn; fedprotip data list shows all.")
    root: str = Field("", description="Folder that holds datasets; empty: the environment variable FEDPROTIP_DATA.")
    source: str = Field(
        "",
        description="own: a folder per class (or train/ and test/ of them), a .csv or .parquet with the columns "
        "path, label and maybe task, client, split, or an .npz with x_train, y_train, x_test, y_test or x, y and "
        "maybe task, client, split. Without a split every fifth sample of a class is for testing.",
    )
    size: int = Field(
        0,
        ge=0,
        description="Side of the square images the model sees; 0: the dataset's own (imagenet_r, domainnet: 224; "
        "own: the shorter side of the first image, 224 at most).",
    )
    train_limit: int = Field(
        0,
        ge=0,
        description="Most training samples per domain (without domains: per class), by seeded choice; 0: all, "
        "except domainnet, where the paper takes 10,000.",
    )
    test_limit: int = Field(0, ge=0, description="The same for test samples; 0: all.")
    seed: int = Field(0, ge=0, description="Seed of that choice: runs with another run.seed see the same samples.")
    normalize: Literal["dataset", "half", "none"] = Field(
        "dataset",
        description="dataset: its mean and std (photographs: ImageNet's, as a pretrained resnet18 expects); "
        "half: mean and std 0.5, so pixels in −1…1, as augreg weights of vit_b16 expect; "
        "none: pixels stay in 0…1, as in the authors' code for imagenet_r and domainnet.",
    )
    workers: int = Field(4, ge=1, description="Threads that decode image files; results do not depend on it.")


class StreamSettings(Section):
    scenario: Literal["class", "domain"] = Field(
        "class", description="class: new labels with every task; domain: the same labels, new inputs."
    )
    tasks: int = Field(5, ge=1, description="Number of tasks T.")
    task_size: int | list[Annotated[int, Field(ge=1)]] = Field(
        0,
        description="Classes per task: a number, one number per task, or 0 to share all classes out evenly.",
    )
    order: Literal["natural", "seeded"] | list[str] = Field(
        "natural", description="Order of the classes (or domains): natural, seeded, or a list of their names."
    )
    overlap: int = Field(0, ge=0, description="Classes that neighbouring tasks share (appendix D.6).")
    source: Literal["settings", "columns"] = Field(
        "settings",
        description="columns: own data says in its columns which task and which client a sample belongs to; the other "
        "settings decide only what has no column (with a client column clients.partition and clients.alpha rest). "
        "Tasks come in natural order or that of stream.order, the first stream.tasks of them.",
    )
    domains: Literal["labelled", "rotate", "permute"] = Field(
        "labelled",
        description="Where domains come from: the dataset's own, or made by rotating images or permuting pixels.",
    )

    @field_validator("task_size")
    @classmethod
    def _size_is_positive(cls, value: int | list[int]) -> int | list[int]:
        if isinstance(value, int) and value < 0:
            raise ValueError("must be 0 (share evenly) or more")
        return value


class ClientsSettings(Section):
    count: int = Field(5, ge=1, description="Number of clients K.")
    fraction: float = Field(1.0, gt=0, le=1, description="Share of the clients that train in each round.")
    partition: Literal["iid", "dirichlet"] = Field(
        "dirichlet", description="How a task's samples are shared out among the clients."
    )
    alpha: float = Field(0.5, gt=0, description="Dirichlet concentration α: smaller is more uneven.")
    held_back: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of its samples of a task that a client does not train on but calibrates answers with.",
    )
    roster: dict[str, str] = Field(
        {},
        description='Clients that take part from a task on, for example {"4" = "0-2,7"}; counting from task 0.',
    )
    workers: int = Field(
        0,
        ge=0,
        description="Processes that train clients side by side, for small models; 0: none, all in this process.",
    )

    @field_validator("roster")
    @classmethod
    def _roster_is_readable(cls, value: dict[str, str]) -> dict[str, str]:
        for task, ids in value.items():
            if not task.isdecimal():
                raise ValueError(f"the task {task!r} must be a number counted from 0")
            parse_ids(ids)
        if len({int(task) for task in value}) < len(value):
            raise ValueError("a task is named twice")
        return value

    def active(self, task: int) -> list[int]:
        """Client ids that take part in `task`."""
        changes = {int(start): ids for start, ids in self.roster.items() if int(start) <= task}
        return parse_ids(changes[max(changes)]) if changes else list(range(self.count))


class ModelSettings(Section):
    name: str = Field(
        "mlp", description="Backbone: mlp, small_cnn, resnet18, vit, vit_b16, or one registered in Python."
    )
    width: int = Field(
        128,
        ge=1,
        description="mlp: units of a hidden layer; small_cnn: channels of the last stage; vit: size of a token.",
    )
    depth: int = Field(
        2, ge=1, description="mlp: hidden layers; small_cnn: stages of convolution and pooling; vit: blocks."
    )
    image_size: int = Field(
        0,
        ge=0,
        description="vit, vit_b16: side to which images are resized inside the model; 0: as they come (vit_b16: 224).",
    )
    weights: str = Field(
        "",
        description="Pretrained weights, .safetensors or .pth, under the names of torchvision (resnet18) or timm "
        "(vit); empty: random weights.",
    )
    stem: Literal["imagenet", "cifar", "stride1"] = Field(
        "cifar", description="resnet18: 7×7/2 and pooling; 3×3 without pooling; or 7×7 at stride 1 with pooling."
    )
    pool: Literal[1, 2] = Field(1, description="resnet18: average pooling to 1×1 (512 features) or 2×2 (2,048).")
    freeze: str = Field(
        "none",
        description="Part of the backbone that stops learning: none, or up to and including this stage (resnet18: "
        "stem, layer1 … layer4; vit: stem, block0 …; mlp, small_cnn: layer1 …; the paper: layer2, block5).",
    )
    freeze_from: Literal["first", "start"] = Field(
        "first", description="When it stops: after the first task, as the paper does, or before any training."
    )
    norm: Literal["frozen", "freeze_after_first", "track"] = Field(
        "freeze_after_first", description="When the running statistics of norm layers stop moving."
    )
    head: Literal["auto", "per_task", "shared"] = Field(
        "auto",
        description="Output heads: auto is one per task, except one shared head for domain tasks without routing.",
    )


class TrainSettings(Section):
    rounds: int = Field(50, ge=1, description="Global rounds E of a task.")
    epochs: int = Field(5, ge=1, description="Local epochs of a client in one round.")
    steps: int = Field(0, ge=0, description="Local steps S in one round; 0: as many as the epochs give.")
    batch: int = Field(64, ge=1, description="Local batch size.")
    lr: float = Field(0.01, gt=0, description="Learning rate η.")
    momentum: float = Field(0.0, ge=0, lt=1, description="Momentum, for optimisers that have one.")
    weight_decay: float = Field(5e-4, ge=0, description="Weight decay.")
    optimizer: str = Field("SGD", description="Any class of torch.optim whose step needs no closure.")
    optimizer_options: dict[str, bool | int | float | list[float]] = Field(
        {}, description="Further arguments of the optimiser, for example {nesterov = true}."
    )
    augment: Literal["none", "standard"] = Field(
        "none", description="standard: random crop, flip and brightness of every training image."
    )
    views: int = Field(
        0,
        ge=0,
        description="Fixed augmented views per image, drawn once; with them a frozen prefix runs once per view. "
        "0: a new view every time.",
    )
    head_start: Literal["random", "closed"] = Field(
        "random",
        description="closed: a new head begins as the linear discriminant of the clients' summed class statistics.",
    )
    autocast: Literal["none", "bf16"] = Field(
        "none", description="bf16: forward and backward pass in bfloat16 where torch thinks it safe; changes numbers."
    )
    channels_last: bool = Field(
        False, description="Images and maps with channels last in memory: faster convolutions on many machines."
    )
    average: Literal["weighted", "uniform"] = Field(
        "weighted", description="Average of Eq. 6: weighted by samples (the paper's p_k) or uniform."
    )
    wire: Literal["float32", "bf16"] = Field(
        "float32", description="What models and bases travel as; bf16: rounded, in half the bytes."
    )


class StatisticsSettings(Section):
    minimum: int = Field(
        5,
        ge=1,
        description="A client leaves classes with fewer samples out of its sums, which would be almost features.",
    )
    features: int = Field(
        0,
        ge=0,
        description="Width M of a seeded random ReLU map before class statistics (M²/2 numbers each); 0: none.",
    )
    rank: int = Field(
        0,
        ge=0,
        description="Directions of the scatter that a client sends instead of all its products; 0, or no saving: all.",
    )


class EvaluateSettings(Section):
    group: int = Field(64, ge=1, description="Test samples of one task per routing decision in mode batch64.")
    draws: int = Field(20, ge=1, description="Least number of such decisions per task; small tasks are redrawn.")
    batch: int = Field(512, ge=1, description="Images per forward pass.")


class RunSettings(Section):
    seed: int = Field(0, ge=0, description="Seed of every random choice.")
    out: str = Field("", description="Run folder; empty: runs/<data>-<method>-s<seed>, numbered when taken.")
    engine: Literal["local"] = Field("local", description="Where clients run: local is this process.")
    device: Literal["cpu", "cuda", "auto"] = Field("cpu", description="Device; auto takes a GPU when there is one.")
    threads: int = Field(0, ge=0, description="CPU threads of torch; 0: torch's own choice, 1 for small perceptrons.")
    checkpoint: int = Field(1, ge=1, description="Rounds between checkpoints; a finished task is always saved.")
    cache_mb: int = Field(
        256,
        ge=0,
        description="Outputs of a frozen prefix kept in memory (MiB), so that it runs once per image; more of them "
        "live on disk. 0: it runs every time.",
    )
    state_mb: int = Field(256, ge=0, description="Client state kept in memory (MiB); the rest lives on disk.")
    geometry: int = Field(
        0,
        ge=0,
        description="Measure ρ̂ and β̂ (Assumptions 4, 5) every this many rounds; 0: never. Simulation only.",
    )


class MethodSettings(Section):
    """Base of every method's own settings; each method adds its fields in its own file."""

    name: str = Field("fedprotip", description="Method; its own settings follow.")


class Settings(Section):
    """Everything that decides a run."""

    data: DataSettings = DataSettings()
    stream: StreamSettings = StreamSettings()
    clients: ClientsSettings = ClientsSettings()
    model: ModelSettings = ModelSettings()
    train: TrainSettings = TrainSettings()
    method: SerializeAsAny[MethodSettings] = Field(default_factory=lambda: _known["method.name"]["fedprotip"]())
    statistics: StatisticsSettings = StatisticsSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    run: RunSettings = RunSettings()

    @field_validator("method", mode="before")
    @classmethod
    def _method_has_its_own_settings(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return _method_class(str(value.get("name", "fedprotip"))).model_validate(dict(value))
        return value


# Names that other modules declare: method.name → its settings class; data.name, model.name → anything.
_known: dict[str, dict[str, Any]] = {"method.name": {}, "data.name": {}, "model.name": {}}


def declare(key: str, name: str, value: Any) -> None:
    """Make `name` a valid value of the setting `key` (used by the registries of methods, datasets, models)."""
    _known[key][name] = value


def parse_ids(text: str) -> list[int]:
    """Client ids of a list such as "0-2,7".

    >>> parse_ids("0-2,7")
    [0, 1, 2, 7]
    """
    ids: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal() or int(last) < int(first):
            raise ValueError(f"{text!r} is not a list of client ids such as '0-2,7'")
        ids.update(range(int(first), int(last) + 1))
    return sorted(ids)


def load(
    source: Settings | Mapping[str, Any] | str | Path | None = None,
    overrides: Iterable[str] = (),
    note: Callable[[str], None] = lambda text: None,
) -> Settings:
    """Settings from a TOML file, a mapping or defaults, with `key=value` overrides on top.

    Args:
        source: path of a TOML file, a nested mapping, ready Settings, or None for the defaults.
        overrides: assignments such as "train.rounds=5"; values are TOML, bare words are strings.
        note: told about settings of other methods that the chosen method does not have.
    """
    if isinstance(source, Settings):
        raw = source.model_dump(exclude_unset=True)  # defaults depend on the method: they are filled in again
    elif isinstance(source, Mapping):
        raw = {key: dict(value) if isinstance(value, Mapping) else value for key, value in source.items()}
    else:
        raw = tomltext.read(Path(source)) if source is not None else {}
    for assignment in overrides:
        _assign(raw, assignment)
    _set_aside_foreign_options(raw, note)
    try:
        settings = Settings.model_validate(raw)
    except ValidationError as error:
        raise UsageError(_sentence(error, raw)) from None
    _refuse_what_toml_cannot_hold(settings)
    for key in ("data.name", "model.name"):
        section, field = key.split(".")
        value = getattr(getattr(settings, section), field)
        if value not in _known[key]:
            raise UsageError(f"{key} = {value!r} is unknown; {nearest(value, _known[key])}.")
    return settings


def to_toml(settings: Settings, documented: bool = False) -> str:
    """The settings as TOML; with `documented`, each key stands below its documentation."""
    blocks = []
    for name in Settings.model_fields:
        section: Section = getattr(settings, name)
        lines = [f"[{name}]"]
        for key, field in type(section).model_fields.items():
            if documented:
                lines += ["", f"# {field.description}", *_constraint_comment(field)]
            lines.append(f"{key} = {tomltext.write(getattr(section, key))}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def documentation() -> list[dict[str, Any]]:
    """Every setting: key, default, documentation, and for which method it exists (empty: all)."""
    rows = []
    sections: list[tuple[str, type[Section], str]] = [
        (name, type(getattr(Settings(), name)), "") for name in Settings.model_fields if name != "method"
    ]
    sections += [("method", cls, method) for method, cls in sorted(_known["method.name"].items())]
    for name, cls, method in sections:
        for key, field in cls.model_fields.items():
            default = field.get_default(call_default_factory=True)
            rows.append({"key": f"{name}.{key}", "default": default, "doc": field.description, "method": method})
    return rows


def _method_class(name: str) -> type[MethodSettings]:
    if name not in _known["method.name"]:
        raise UsageError(f"method.name = {name!r} is unknown; {nearest(name, _known['method.name'])}.")
    return _known["method.name"][name]


def _refuse_what_toml_cannot_hold(settings: Settings) -> None:
    """Half a character (a file name that is not UTF-8) could not be saved with the run."""
    for section in Settings.model_fields:
        for key, value in getattr(settings, section):
            try:
                tomltext.write(value).encode()
            except UnicodeEncodeError:
                raise UsageError(f"{section}.{key} = {value!r} is not text in UTF-8; rename it.") from None


def _assign(raw: dict[str, Any], assignment: str) -> None:
    key, equals, text = assignment.partition("=")
    section, _, field = key.strip().partition(".")
    if not equals or not section or not field:
        raise UsageError(f"--set {assignment!r} is not of the form section.key=value, such as train.rounds=5.")
    value = tomltext.parse(text.strip())
    table = raw.setdefault(section, {})
    if not isinstance(table, dict):
        raise UsageError(f"{section} = {table!r} must be a table of settings.")
    table[field] = value


def _set_aside_foreign_options(raw: dict[str, Any], note: Callable[[str], None]) -> None:
    """Drop options that belong to other methods, so that one file can serve several methods."""
    method = raw.get("method")
    if not isinstance(method, dict):
        return
    name = str(method.get("name", "fedprotip"))
    mine = _method_class(name)
    others = {field for cls in _known["method.name"].values() for field in cls.model_fields}
    foreign = [key for key in method if key not in mine.model_fields and key in others]
    for key in foreign:
        del method[key]
    if foreign:
        note(f"{name!r} has no settings {', '.join(f'method.{key}' for key in foreign)}: left aside.")


def _sentence(error: ValidationError, raw: Mapping[str, Any]) -> str:
    """The first problem of a ValidationError as one sentence: key, value, what would be valid."""
    problems = error.errors()
    same_key = [problem for problem in problems if problem["loc"][:2] == problems[0]["loc"][:2]]
    problem = max(same_key, key=lambda problem: len(problem["loc"]))  # of several types the one that came furthest
    path = [str(part) for part in problem["loc"]]
    if error.title != "Settings":  # raised by a method's own class, which sees only its section
        path = ["method", *path]
    section, field = path[0], path[1] if len(path) > 1 else ""
    key = f"{section}.{field}" if field else section
    context = problem.get("ctx", {})
    if problem["type"] in ("extra_forbidden", "invalid_key"):
        table = not field and isinstance(problem["input"], Mapping)
        return f"{key} is not a setting; {nearest(key, Settings.model_fields if table else _all_keys(raw))}."
    if not field and problem["type"] == "value_error":  # several settings of a section do not fit together
        return f"{section}.{problem['msg'].removeprefix('Value error, ').rstrip('.')}."
    if not field:
        return f"{section} = {problem['input']!r} must be a table of settings."
    value = raw.get(section, {}).get(field)
    if problem["type"] == "literal_error":
        choices = [choice.strip("' ") for choice in context["expected"].replace(" or ", ", ").split(",")]
        return f"{key} = {value!r} is not a choice; {nearest(str(value), choices)}."
    reason = problem["msg"].removeprefix("Value error, ").replace("Input ", "it ", 1).rstrip(".")
    bound = next((context[name] for name in ("ge", "gt", "le", "lt") if name in context), None)
    edge = {"ge": bound, "le": bound, "gt": f"just above {bound}", "lt": f"just below {bound}"}
    limit = next((str(edge[name]) for name in edge if name in context), "")
    return f"{key} = {value!r}: {reason}" + (f"; the nearest valid value is {limit}." if limit else ".")


def _all_keys(raw: Mapping[str, Any]) -> list[str]:
    keys = []
    for name in Settings.model_fields:
        chosen = raw.get(name)
        cls = type(getattr(Settings(), name))
        if name == "method" and isinstance(chosen, Mapping):
            cls = _method_class(str(chosen.get("name", "fedprotip")))
        keys += [f"{name}.{key}" for key in cls.model_fields]
    return keys


def _constraint_comment(field: Any) -> list[str]:
    choices = getattr(field.annotation, "__args__", ())
    literal = [c for c in choices if isinstance(c, str)]
    return [f"# one of: {', '.join(literal)}"] if literal else []
