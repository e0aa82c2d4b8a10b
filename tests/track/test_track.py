"""Curves of a run in TensorBoard and MLflow, read back from what was written; and trackers that fail."""

import json

import pytest

import fedprotip
from fedprotip import track
from fedprotip.store.events import Warned
from tests.small import quick, small
from tests.test_resume import stop_after

TASKS, ROUNDS = 3, 3


@pytest.fixture(autouse=True)
def _quick(monkeypatch, tmp_path):
    quick(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def run_in_two(monkeypatch, tmp_path, name):
    """A run with a tracker that is stopped in the second task and resumed; its lines of rounds and tasks."""
    with monkeypatch.context() as patch:
        stop_after(patch, 14)
        with pytest.raises(KeyboardInterrupt):
            fedprotip.run(small(run={"track": [name]}), out=tmp_path / "r")
    fedprotip.resume(tmp_path / "r")
    lines = [json.loads(line) for line in (tmp_path / "r" / "events.jsonl").read_text().splitlines()]
    rounds = {(line["task"] * ROUNDS + line["round"] + 1): line for line in lines if line["event"] == "round"}
    return rounds, [line for line in lines if line["event"] == "task"]


@pytest.mark.slow
def test_tensorboard_has_the_curves_of_a_resumed_run(tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    rounds, tasks = run_in_two(monkeypatch, tmp_path, "tensorboard")
    files = list((tmp_path / "r" / "tensorboard").iterdir())
    assert len(files) == 2  # before and after
    read = accumulator.EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    read.Reload()
    loss = {event.step: event.value for event in read.Scalars("train/loss")}
    assert loss == {step: pytest.approx(line["loss"], rel=1e-5) for step, line in rounds.items()}
    assert len(read.Scalars("train/loss")) == len(loss) == TASKS * ROUNDS  # no step twice
    for mode in ("single", "aware"):
        means = [(event.step, event.value) for event in read.Scalars(f"accuracy/{mode}")]
        assert means == [
            ((line["task"] + 1) * ROUNDS, pytest.approx(line["accuracy"][mode], rel=1e-5)) for line in tasks
        ]
    assert len(read.Scalars("accuracy_aware/task_2")) == 2
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert read.Scalars("bytes/up")[-1].value == pytest.approx(sum(summary["bytes"]["up"].values()), rel=1e-5)
    fedprotip.resume(tmp_path / "r")  # a finished run has nothing to add
    assert len(list((tmp_path / "r" / "tensorboard").iterdir())) == 2


@pytest.mark.slow
def test_mlflow_has_one_run_with_the_curves_of_a_resumed_one(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    rounds, tasks = run_in_two(monkeypatch, tmp_path, "mlflow")
    assert (tmp_path / "mlflow.db").exists()
    client = mlflow.MlflowClient("sqlite:///mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'fedprotip'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["train.rounds"] == "3"
    assert json.loads((tmp_path / "r" / "mlflow.json").read_text()) == {"run_id": run.info.run_id}
    loss = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "train/loss")}
    assert loss == {step: pytest.approx(line["loss"]) for step, line in rounds.items()}
    means = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "accuracy/aware")}
    assert means == {(line["task"] + 1) * ROUNDS: pytest.approx(line["accuracy"]["aware"]) for line in tasks}


class Broken:
    """A backend that fails at a step of its life."""

    where = ""

    def __init__(self, folder, settings, first):
        self._fail("made")

    def add(self, step, values):
        self._fail("added")

    def close(self, finished):
        self._fail("closed")

    def _fail(self, place):
        if self.where == place:
            raise OSError("the disk is full\nand more")


@pytest.mark.parametrize("where", ["made", "added", "closed"])
def test_a_tracker_that_fails_never_ends_a_run(tmp_path, monkeypatch, where):
    monkeypatch.setattr(Broken, "where", where)
    monkeypatch.setitem(track.TRACKERS, "tensorboard", (Broken, "json"))
    told = []
    settings = small("train.rounds=1", "stream.tasks=2", run={"track": ["tensorboard"]})
    summary = fedprotip.run(settings, out=tmp_path / "r", observers=[told.append])
    assert summary["tasks"] == 2
    said = [event.text for event in told if isinstance(event, Warned) and "Tracking" in event.text]
    assert said == ["Tracking by tensorboard has failed (OSError: the disk is full); the run goes on without it."]


class Kept(list):
    """A backend that keeps what it is told."""

    made: list = []  # noqa: RUF012

    def __init__(self, folder, settings, first):
        super().__init__()
        self.first, self.ended = first, None
        self.made.append(self)

    def add(self, step, values):
        self.append((step, dict(values)))

    def close(self, finished):
        self.ended = finished


def test_a_resumed_run_continues_where_its_checkpoint_was(tmp_path, monkeypatch):
    monkeypatch.setattr(Kept, "made", [])
    monkeypatch.setitem(track.TRACKERS, "tensorboard", (Kept, "json"))
    run_in_two(monkeypatch, tmp_path, "tensorboard")
    before, after = Kept.made
    assert (before.first, before.ended, after.ended) == (1, False, True)
    steps = [step for step, values in before + after if "train/loss" in values]
    assert steps == list(range(1, TASKS * ROUNDS + 1))
    assert after.first == before[-1][0] + 1
    assert "forgetting/aware" in after[-1][1]


def test_results_do_not_depend_on_tracking(tmp_path, monkeypatch):
    monkeypatch.setitem(track.TRACKERS, "mlflow", (Kept, "json"))
    few = ("train.rounds=1", "stream.tasks=2")
    for name, names in (("plain", []), ("tracked", ["mlflow"])):
        fedprotip.run(small(*few, run={"track": names}), out=tmp_path / name)
    plain, tracked = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "tracked"))
    assert plain == tracked


def test_a_tracker_that_is_not_installed_is_named_before_the_run(tmp_path, monkeypatch, call):
    monkeypatch.setitem(track.TRACKERS, "mlflow", (Kept, "no_such_package"))
    code, _, err = call("run", "--track", "mlflow", "--out", tmp_path / "r")
    assert (code, err) == (
        2,
        "fedprotip: run.track has 'mlflow', whose package is missing; install it with: "
        "pip install 'fedprotip[track]'.\n",
    )
    assert not (tmp_path / "r").exists()
    code, _, err = call("run", "--track", "wandb", "--out", tmp_path / "r")
    assert code == 2
    assert "run.track = ['wandb']" in err


def test_the_name_of_a_run_in_mlflow_is_a_name_or_nothing(tmp_path):
    """A folder may be a stranger's: what stands in its record is neither a path nor anything else."""
    fedprotip.run(small("train.rounds=1", "stream.tasks=1"), out=tmp_path / "r")
    for text, name in (
        (json.dumps({"run_id": "0" * 32}), "0" * 32),
        (json.dumps({"run_id": "../" * 10 + "ab"}), ""),
        (json.dumps({"run_id": 7}), ""),
        ("[", ""),
    ):
        (tmp_path / "r" / "mlflow.json").write_text(text)
        assert track.mlflow._known(tmp_path / "r") == name
