"""Every setting of a run: its type, its bounds, its default and what it is for.

    fedprotip settings                     # every key with its documentation and default, as TOML
    fedprotip run my.toml --set train.rounds=5

Defaults are what serves best on data that nobody has seen yet (docs/decisions.md says why); `--preset paper` has the
paper's own where it states others (section 6 and appendix E).
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SerializeAsAny, field_validator

from fedprotip.errors import shortened
from fedprotip.settings.names import known

MANY, HUGE = 10**9, 1e30
"""Largest whole number and largest number of a setting without a bound of its own: nobody has more rounds or samples,
and float32 ends at 3e38."""
ROUNDING = 1e-9
"""0.29 · 100 is a little less than 29 in floating point."""
TASKS, CLIENTS = 10**5, 10**6
"""Tasks and clients of a run, at most; ids of clients are below MANY."""
PATH = 4096
"""Bytes of a path that the system takes, and the end."""


def possible_path(text: str) -> str:
    """Refuse what no file system can name."""
    if "\0" in text:
        raise ValueError("a path cannot hold the character NUL; leave it out")
    if len(text.encode(errors="replace")) >= PATH:
        raise ValueError(f"a path has less than {PATH:,} bytes")
    return text


PathText = Annotated[str, AfterValidator(possible_path)]
Sides = Annotated[list[Annotated[int, Field(ge=1, le=2**16)]], Field(min_length=2, max_length=2)]
"""[height, width]"""


class Section(BaseModel):
    """A group of settings: immutable, an unknown key is an error, and so is true or "5" for a number."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False, defer_build=True
    )


class DataSettings(Section):
    name: str = Field(
        "digits",
        description="Dataset: digits ships with scikit-learn; fedprotip data list shows all. "
        "Left unsaid with data.source: own.",
    )
    root: PathText = Field(
        "",
        description="Folder that holds datasets; empty: the environment variable FEDPROTIP_DATA. A relative path is "
        "relative to the settings file it stands in, on the command line to the working directory.",
    )
    source: PathText = Field(
        "",
        description="own: a folder per class (or train/ and test/ of them), a .csv or .parquet with the columns "
        "path, label and maybe task, client, split, or an .npz with x_train, y_train, x_test, y_test or x, y and "
        "maybe task, client, split. Without a split every fifth sample of a class is for testing. A relative path: "
        "as data.root.",
    )
    folders: Literal["auto", "class", "task/class", "client/class", "task/client/class", "client/task/class"] = Field(
        "auto",
        description="own, a folder: what its folders are, from the outermost on. auto: a folder per class; where "
        "folders lie within folders, this has to be said.",
    )
    size: Annotated[int, Field(ge=0, le=2**16)] | Sides = Field(
        0,
        description="Side of the square images the model sees, or [height, width]; 0: the dataset's own (imagenet_r, "
        "domainnet: 224; own: the shape that most images have, the shorter side 224 at most; squares, if none has "
        "half of them).",
    )
    fit: Literal["crop", "pad", "stretch"] = Field(
        "crop",
        description="How an image of another shape gets there: its middle is cut out, it is padded with black, or it "
        "is stretched.",
    )
    train_limit: int = Field(
        0,
        ge=0,
        description="Most training samples per domain (without domains: per class), by seeded choice; 0: all, "
        "except domainnet, where the paper takes 10,000.",
    )
    test_limit: int = Field(0, ge=0, description="The same for test samples; 0: all.")
    seed: int = Field(
        0, ge=0, lt=2**128, description="Seed of that choice: runs with another run.seed see the same samples."
    )
    normalize: Literal["dataset", "half", "none"] = Field(
        "dataset",
        description="dataset: its mean and std (photographs: ImageNet's, as a pretrained resnet18 expects); "
        "half: mean and std 0.5, so pixels in −1…1, as augreg weights of vit_b16 expect; "
        "none: pixels stay in 0…1, as in the authors' code for imagenet_r and domainnet.",
    )
    workers: int = Field(4, ge=1, le=1024, description="Threads that decode image files; results do not depend on it.")

    @property
    def sides(self) -> tuple[int, int] | None:
        """(height, width) of the images that are asked for; None: those the dataset has."""
        height, width = self.size if isinstance(self.size, list) else (self.size, self.size)
        return (height, width) if height else None


class StreamSettings(Section):
    scenario: Literal["class", "domain"] = Field(
        "class", description="class: new labels with every task; domain: the same labels, new inputs."
    )
    tasks: int = Field(5, ge=1, le=TASKS, description="Number of tasks T.")
    task_size: int | list[Annotated[int, Field(ge=1)]] = Field(
        0,
        description="Classes per task: a number, one number per task, or 0 to share all classes out evenly (when a "
        "run is extended: those that are new).",
    )
    order: Literal["natural", "seeded"] | list[str] = Field(
        "natural", description="Order of the classes (or domains): natural, seeded, or a list of their names."
    )
    overlap: int = Field(0, ge=0, description="Classes that neighbouring tasks share (appendix D.6).")
    source: Literal["settings", "columns"] = Field(
        "settings",
        description="columns: own data says in its columns which task and which client a sample belongs to; the other "
        "settings decide only what has no column (with a client column clients.partition and clients.alpha rest). "
        "Tasks come in natural order or that of stream.order, the first stream.tasks of them. Left unsaid: columns, "
        "if own data has them.",
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
    count: int = Field(5, ge=1, le=CLIENTS, description="Number of clients K.")
    fraction: float = Field(1.0, gt=0, le=1, description="Share of the clients that train in each round.")
    partition: Literal["iid", "dirichlet"] = Field(
        "dirichlet", description="How a task's samples are shared out among the clients."
    )
    alpha: float = Field(0.5, gt=0, description="Dirichlet concentration α: smaller is more uneven.")
    held_back: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Share of its samples of a task that a client does not train on: with them it counts which way of "
        "answering is right most often, and how sure answers may be. Of few samples it holds one back, or none, by "
        "chance.",
    )
    roster: dict[str, str] = Field(
        {},
        description='Clients that take part from a task on, for example {"4" = "0-2,7"}; counting from task 0.',
    )

    @field_validator("roster")
    @classmethod
    def _roster_is_readable(cls, value: dict[str, str]) -> dict[str, str]:
        for task, ids in value.items():
            if not task.isdecimal() or len(task) > 9:
                raise ValueError(f"the task {shortened(task)!r} must be a number counted from 0")
            parse_ids(ids)
        if len({int(task) for task in value}) < len(value):
            raise ValueError("a task is named twice")
        return value

    def active(self, task: int) -> list[int]:
        """Client ids that take part in `task`."""
        changes = {int(start): ids for start, ids in self.roster.items() if int(start) <= task}
        return parse_ids(changes[max(changes)]) if changes else list(range(self.count))

    def drawn(self, active: int) -> int:
        """How many of so many active clients train in a round, where all have data."""
        return max(int(self.fraction * active + ROUNDING), 1)


class ModelSettings(Section):
    name: str = Field(
        "mlp", description="Backbone: mlp, small_cnn, resnet18, vit, vit_b16, or one registered in Python."
    )
    width: int = Field(
        128,
        ge=1,
        le=10**6,
        description="mlp: units of a hidden layer; small_cnn: channels of the last stage; vit: size of a token.",
    )
    depth: int = Field(
        2, ge=1, le=1000, description="mlp: hidden layers; small_cnn: stages of convolution and pooling; vit: blocks."
    )
    image_size: int = Field(
        0,
        ge=0,
        le=2**16,
        description="vit, vit_b16: side to which images are resized inside the model; 0: as they come (vit_b16: 224).",
    )
    weights: PathText = Field(
        "",
        description="Pretrained weights, .safetensors or .pth, under the names of torchvision (resnet18) or timm "
        "(vit); empty: random weights. A relative path: as data.root.",
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
    stages: Literal["auto"] | list[str] = Field(
        "auto",
        description="Stages (named as for freeze) whose pooled outputs class statistics see beside the final features; "
        "auto: two of those before the last; []: the final features alone.",
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
    fall: Literal["none", "cosine"] = Field(
        "cosine", description="How the learning rate falls within a task: not at all, or to 0 by half a cosine."
    )
    augment: Literal["none", "flip", "standard"] = Field(
        "none",
        description="flip: half of the training images are mirrored, left and right; behind a frozen prefix both views "
        "are kept. standard: random crop, flip and brightness of every one.",
    )
    views: int = Field(
        0,
        ge=0,
        le=10**6,
        description="standard: fixed views per image, drawn once; with them a frozen prefix runs once per view. "
        "0: a new view every time.",
    )
    head_start: Literal["random", "closed"] = Field(
        "closed",
        description="closed: a new head begins as the linear discriminant of the clients' summed class statistics, "
        "its outputs scaled to a spread that training can improve on.",
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
    heaviest: float = Field(
        4.0,
        ge=1,
        description="No client counts for more samples than this many times the most of any other, or of 100 where "
        "all others have fewer: how many it has, it says itself. Without effect with method.secure.",
    )
    aggregate: Literal["mean", "clipped", "trimmed", "median"] = Field(
        "mean",
        description="What the server makes of updates: their mean; the mean of updates no longer than the median one; "
        "of every number the mean without the extremes, or the median. The last two also hold for class statistics, "
        "calibration and bases: one client of many cannot spoil them; docs/threats.md says what they cost.",
    )
    trim: float = Field(
        0.2, gt=0, lt=0.5, description="Share of clients that `trimmed` leaves out at each end, at least one."
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
    root: bool = Field(
        True, description="The root of every feature, with its sign, goes into class statistics, not the feature."
    )
    directions: int = Field(
        16,
        ge=0,
        le=10**4,
        description="Own directions of every class, in which it may spread otherwise than all others do; clients send "
        "twice as many columns a class. 0: one covariance for all classes.",
    )
    features: int = Field(
        0,
        ge=0,
        le=10**6,
        description="Width M of a seeded random ReLU map before class statistics (M²/2 numbers each); 0: none.",
    )
    rank: int = Field(
        0,
        ge=0,
        le=10**6,
        description="Directions of the scatter that a client sends instead of all its products; 0, or no saving: all.",
    )


class EvaluateSettings(Section):
    group: int = Field(64, ge=1, le=10**6, description="Test samples of one task per routing decision in mode batch64.")
    draws: int = Field(
        20, ge=1, le=10**6, description="Least number of such decisions per task; small tasks are redrawn."
    )
    batch: int = Field(512, ge=1, description="Images per forward pass.")
    examples: int = Field(
        3, ge=0, le=3, description="Small test pictures of each confused pair in the report; 0: none leaves the data."
    )


class RunSettings(Section):
    seed: int = Field(0, ge=0, lt=2**128, description="Seed of every random choice.")
    out: PathText = Field("", description="Run folder; empty: runs/<data>-<method>-s<seed>, numbered when taken.")
    engine: Literal["local", "pool", "apart", "flower"] = Field(
        "local",
        description="Where clients run. local: in this process, one after another; pool: side by side in processes of "
        "this machine, for small models; apart: in this process, but each with its own model and folder, and only "
        "bytes between them; flower: Flower's simulation, or other machines (fedprotip flower; docs/deploy.md).",
    )
    workers: int = Field(2, ge=1, le=1024, description="Processes of engine pool, and of Flower's simulation.")
    timeout: float = Field(
        3600.0,
        gt=0,
        description="flower: seconds that a client may take for an answer; then it is left out of that exchange.",
    )
    patience: float = Field(
        60.0,
        ge=0,
        description="flower: seconds of an exchange in which a run waits for clients that are not connected, or have "
        "not said yet who they are (a site reads its data for that); then it goes on without, until they are there.",
    )
    device: Literal["cpu", "cuda", "auto"] = Field("cpu", description="Device; auto takes a GPU when there is one.")
    threads: int = Field(
        0, ge=0, le=1024, description="CPU threads of torch; 0: torch's own choice, 1 for small networks."
    )
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
    track: list[Literal["tensorboard", "mlflow"]] = Field(
        [],
        max_length=2,
        description="Curves for TensorBoard (in the run folder) or MLflow (mlflow.db in the working directory, or "
        "MLFLOW_TRACKING_URI); needs the extra track.",
    )


class MethodSettings(Section):
    """Base of every method's own settings; each method adds its fields in its own file."""

    name: str = Field("fedprotip", description="Method; its own settings follow.")
    secure: bool = Field(
        False, description="The server sees sums of all clients, and nothing of a single one but whether it has data."
    )
    secure_share: float = Field(
        0.5,
        ge=0.5,
        le=1,
        description="More than this share of the clients of a secure sum must stay to its end, or nothing is revealed.",
    )
    secure_noise: float = Field(
        0.0,
        ge=0,
        description="Gaussian noise on the sum of updates: its standard deviation by secure_clip; 0: none.",
    )
    secure_clip: float = Field(
        1.0, gt=0, description="Length that a client's update has at most, where there is noise."
    )


class Settings(Section):
    """Everything that decides a run."""

    data: DataSettings = Field(default_factory=DataSettings)
    stream: StreamSettings = Field(default_factory=StreamSettings)
    clients: ClientsSettings = Field(default_factory=ClientsSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    train: TrainSettings = Field(default_factory=TrainSettings)
    method: SerializeAsAny[MethodSettings] = Field(default_factory=lambda: known("method.name", "fedprotip")())
    statistics: StatisticsSettings = Field(default_factory=StatisticsSettings)
    evaluate: EvaluateSettings = Field(default_factory=EvaluateSettings)
    run: RunSettings = Field(default_factory=RunSettings)

    @field_validator("method", mode="before")
    @classmethod
    def _method_has_its_own_settings(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            return method_class(str(value.get("name", "fedprotip"))).model_validate(dict(value))
        return value


def parse_ids(text: str) -> list[int]:
    """Client ids of a list such as "0-2,7".

    >>> parse_ids("0-2,7")
    [0, 1, 2, 7]
    """
    ranges = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not first.isdecimal() or not last.isdecimal() or _id(last) < _id(first):
            raise ValueError(f"{shortened(text)!r} is not a list of client ids such as '0-2,7'")
        ranges.append(range(_id(first), _id(last) + 1))
    if sum(map(len, ranges)) > CLIENTS:
        raise ValueError(f"{shortened(text)!r} names more than {CLIENTS:,} clients")
    return sorted(set().union(*ranges))


def _id(digits: str) -> int:
    if len(digits) >= len(str(MANY)):
        raise ValueError(f"the client {shortened(digits)} is too large a number; ids are below {MANY:,}")
    return int(digits)


def method_class(name: str) -> type[MethodSettings]:
    return known("method.name", name)
