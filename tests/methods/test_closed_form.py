"""lda and ridge: sums only, in any order the same answers, and good ones."""

import json

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

import fedprotip
from fedprotip.models import build_network
from fedprotip.stream import build_stream
from fedprotip.stream.stream import Stream
from tests.sites import through
from tests.small import quick, results, small, tensors


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    quick(monkeypatch)


def run(folder, method="lda", options=(), **sections):
    sections = {"model": {"width": 32}, "train": {"rounds": 2}} | sections
    return fedprotip.run(small(method={"name": method, **dict(options)}, **sections), out=folder)


def matrices(folder):
    return json.loads((folder / "summary.json").read_text())["matrix"]


@pytest.mark.parametrize("method", ["lda", "ridge"])
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"options": {"adapt": True}},
        {"statistics": {"features": 64}},
        {"stream": {"tasks": 3, "task_size": 4, "overlap": 1}},
        {"stream": {"scenario": "domain", "tasks": 2, "domains": "rotate", "task_size": 0}},
        {"stream": {"scenario": "domain", "tasks": 2, "domains": "permute", "task_size": 0}},
        {"clients": {"count": 4, "roster": {"1": "0-1", "2": "2-3"}}},
    ],
    ids=["plain", "adapt", "features", "overlap", "rotate", "permute", "clients miss tasks"],
)
def test_closed_forms_answer_well_whatever_the_stream(tmp_path, method, sections):
    summary = run(tmp_path / "r", method, **sections)
    assert summary["failures"]["count"] == 0
    for mode in ("aware", "agnostic", "single", "batch64"):
        assert summary["accuracy"][mode] > 60, mode
    assert all(np.isfinite(row).all() for rows in summary["matrix"].values() for row in rows)


def test_without_adapting_no_model_travels_up_and_nothing_moves(tmp_path):
    run(tmp_path / "r")
    settings = small(method={"name": "lda"}, model={"width": 32})
    network = build_network(settings, build_stream(settings).dataset.image_shape, True)
    found = tensors(tmp_path / "r", "model")
    assert all(torch.equal(found[f"backbone.{name}"], value) for name, value in network.backbone.state_dict().items())
    lines = [json.loads(line) for line in (tmp_path / "r" / "ledger.jsonl").read_text().splitlines()]
    up = [line["kind"] for line in lines if line["direction"] == "up"]
    assert set(up) == {"presence", "statistics"}
    assert up.count("statistics") == 3 * 3


def test_adapting_trains_in_the_first_task_only(tmp_path):
    run(tmp_path / "r", options={"adapt": True})
    events = [json.loads(line) for line in (tmp_path / "r" / "events.jsonl").read_text().splitlines()]
    assert [(event["task"], event["round"]) for event in events if event["event"] == "round"] == [(0, 0), (0, 1)]


def test_lda_is_lda_of_all_features_together(tmp_path):
    """All clients, all tasks, one discriminant: as scikit-learn makes it of all samples with the same shrinkage.

    Features of all stages by their roots, each brought to variance 1 within classes.
    """
    from fedprotip.inference.statistics import Gaussians, recall

    run(tmp_path / "r", statistics={"minimum": 1, "directions": 0})
    settings = small(method={"name": "lda"}, model={"width": 32})
    stream = build_stream(settings)
    network = build_network(settings, stream.dataset.image_shape, True).eval()
    kept = {f"statistics/{name}": value for name, value in tensors(tmp_path / "r", "statistics").items()}
    sums = recall(kept)
    with torch.no_grad():
        train = [stream.train_batch(task.index, task.train) for task in stream.tasks]
        test = [stream.test_batch(task.index, task.test) for task in stream.tasks]
        (x, y), (asked, truth) = ((torch.cat(part) for part in zip(*batches, strict=True)) for batches in (train, test))
        x, asked = (network.look(images).stacked.sqrt() for images in (x, asked))
    assert sums.counts.tolist() == torch.bincount(y).tolist()
    gaussians = Gaussians.of(sums)
    own = x.double() - torch.stack([x[y == label].double().mean(0) for label in range(6)])[y]
    scales = (own.square().sum(0) / (len(x) - 6)).sqrt().clamp_min(1e-6).float()
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=gaussians.shrinkage, priors=np.full(6, 1 / 6))
    # equal classes for the priors of its covariance: digits are nearly balanced
    expected = theirs.fit((x / scales).numpy(), y.numpy()).predict((asked / scales).numpy())
    found = gaussians.log_densities(asked).argmax(1).numpy()
    assert (found == expected).mean() > 0.99
    own = json.loads((tmp_path / "r" / "summary.json").read_text())["matrix"]["single"][-1]
    sizes = [len(task.test) for task in stream.tasks]
    correct = (found == truth.numpy()).mean()
    assert np.average(own, weights=sizes) == pytest.approx(100 * correct, abs=0.3)


@pytest.mark.parametrize("method", ["lda", "ridge"])
def test_whoever_holds_which_share_the_answers_are_the_same(tmp_path, method, monkeypatch):
    """Shares change hands: clients 0 1 2 hold what 2 0 1 held. Nothing is below the minimum, so nothing is withheld."""
    sections = {"statistics": {"minimum": 1}}
    run(tmp_path / "one", method, **sections)
    original = Stream.client_samples
    monkeypatch.setattr(Stream, "client_samples", lambda self, task, client: original(self, task, (client + 2) % 3))
    run(tmp_path / "other", method, **sections)
    one, other = tensors(tmp_path / "one", "statistics"), tensors(tmp_path / "other", "statistics")
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-12, atol=1e-9)
    assert matrices(tmp_path / "one") == matrices(tmp_path / "other")


def test_one_client_or_many_answer_alike(tmp_path):
    for count in (1, 7):
        run(tmp_path / str(count), clients={"count": count}, statistics={"minimum": 1})
    one, many = matrices(tmp_path / "1"), matrices(tmp_path / "7")
    for mode in one:
        for left, right in zip(one[mode], many[mode], strict=True):
            assert left == pytest.approx(right, abs=1.5)  # a sample at a border, of 70 to 90


@pytest.mark.parametrize("method", ["lda", "ridge"])
def test_clients_with_too_few_of_every_class_leave_a_run_that_ends(tmp_path, method):
    """Nobody tells anything: the answers are worth nothing, but every number is a number."""
    summary = run(tmp_path / "r", method, statistics={"minimum": 10**6})
    text = (tmp_path / "r" / "summary.json").read_text()
    assert "NaN" not in text
    assert summary["tasks"] == 3


def test_damaged_statistics_are_left_out_and_counted(tmp_path, monkeypatch):
    def broken(answer, local, name):
        message = answer()
        if local.client == 1:
            message.tensors["moment"][0] = -1.0
        return message

    through(monkeypatch, broken, "summarise")
    summary = run(tmp_path / "r")
    reason = "its second moment is none, or does not fit its sums and counts"
    assert summary["failures"] == {"count": 3, "by_reason": {reason: 3}}


def test_interrupted_it_ends_with_the_same_bytes(tmp_path, monkeypatch):
    from tests.test_resume import stop_after

    run(tmp_path / "whole", options={"adapt": True})
    with monkeypatch.context() as patch:
        stop_after(patch, 5, "summarise")
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "r", options={"adapt": True})
    fedprotip.resume(tmp_path / "r")
    assert results(tmp_path / "r") == results(tmp_path / "whole")
    one, other = tensors(tmp_path / "whole", "statistics"), tensors(tmp_path / "r", "statistics")
    assert all(torch.equal(one[name], other[name]) for name in one)
