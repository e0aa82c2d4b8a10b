"""FedProTIP with every router on small runs: what they report, what they need, and clients that come and go."""

import numpy as np
import pytest

import fedprotip
from tests.small import quick, small, tensors

WAYS = ("cosine", "gaussian", "statistics", "statistics-heads", "fused")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    quick(monkeypatch)


def run(folder, **sections):
    sections = {"model": {"width": 32}, "train": {"rounds": 3}} | sections
    return fedprotip.run(small(**sections), out=folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("routers")
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        return {way: run(folder / way, method={"router": way}) for way in WAYS}


@pytest.mark.parametrize("way", WAYS)
def test_the_chosen_router_decides_and_the_others_are_told_beside_it(runs, way):
    summary = runs[way]
    assert summary["failures"]["count"] == 0
    assert set(summary["routers"]) == set(WAYS)
    for mode in ("single", "batch64"):
        assert summary["accuracy"][mode] == pytest.approx(summary["routers"][way][mode])
        assert summary["routing"][mode] == pytest.approx(summary["routers"][way][f"routing_{mode}"])


def test_the_router_changes_nothing_but_the_answers(runs):
    """Once the task is known, the expert of the way answers: statistics for their own way, heads for the others."""
    for way in WAYS:
        like = way if way == "statistics" else "cosine"
        assert runs[way]["matrix"]["aware"] == runs[like]["matrix"]["aware"]
        assert runs[way]["matrix"]["agnostic"] == runs["cosine"]["matrix"]["agnostic"]
        assert runs[way]["routers"] == runs["cosine"]["routers"]
    assert len({runs[way]["accuracy"]["single"] for way in WAYS}) > 2


def test_every_router_is_far_better_than_chance(runs):
    for way, found in runs["cosine"]["routers"].items():
        assert found["routing_batch64"] > 0.6, way  # of three tasks


def test_drift_confidence_and_the_unknown_are_reported(runs):
    summary = runs["statistics"]
    assert [len(row) for row in summary["drift"]] == [1, 2, 3]
    assert all(0 <= value < 3 for row in summary["drift"] for value in row)
    assert 0 <= summary["confidence"]["ece"] <= 1
    assert set(summary["unknown"]) == {"odd", "new", "energy"}
    assert summary["unknown"]["odd"] > 0.6


def test_classes_that_were_not_learned_look_new_beside_many_that_were(tmp_path):
    """The bulk of all samples is worth comparing with once it has several classes: eight here."""
    found = run(tmp_path / "r", stream={"tasks": 5})["unknown"]
    assert found["new"] > 0.6
    assert found["odd"] > 0.6


def test_without_statistics_two_routers_are_left_and_less_travels(tmp_path):
    summary = run(tmp_path / "r", method={"statistics": False, "router": "cosine"})
    assert set(summary["routers"]) == {"cosine", "gaussian"}
    assert "statistics" not in summary["bytes"]["up"]
    assert not (tmp_path / "r" / "statistics.safetensors").exists()


@pytest.mark.parametrize("router", ["statistics", "statistics-heads", "fused"])
def test_a_router_that_needs_statistics_says_so_in_a_sentence(router):
    with pytest.raises(fedprotip.UsageError, match="statistics = true"):
        fedprotip.load_settings({"method": {"router": router, "statistics": False}})


def test_random_features_are_used_by_statistics_alone(tmp_path):
    summary = run(tmp_path / "r", method={"router": "fused"}, statistics={"features": 64})
    kept = tensors(tmp_path / "r", "statistics")
    assert kept["sums"].shape == (6, 64)
    assert kept["moment"].shape == (64 * 65 // 2,)
    assert tensors(tmp_path / "r", "subspaces")["routing/0000"].shape[0] == 32
    assert summary["accuracy"]["single"] > 50


@pytest.mark.parametrize(
    "stream",
    [
        {"tasks": 3, "task_size": 4, "overlap": 1},
        {"scenario": "domain", "tasks": 2, "domains": "permute", "task_size": 0},
        {"scenario": "domain", "tasks": 2, "domains": "rotate", "task_size": 0},
    ],
    ids=["overlap", "permute", "rotate"],
)
def test_statistics_route_overlap_and_domains(tmp_path, stream):
    summary = run(tmp_path / "r", method={"router": "fused"}, stream=stream)
    assert summary["routers"]["statistics"]["routing_batch64"] > 0.7
    rows = tensors(tmp_path / "r", "statistics")["counts"]
    assert len(rows) == (12 if "overlap" in stream else 20)


@pytest.mark.parametrize("method", ["fedprotip", "lda"])
def test_domains_have_answers_by_domain_and_by_all_domains_together(tmp_path, method):
    stream = {"scenario": "domain", "tasks": 2, "domains": "rotate", "task_size": 0}
    summary = run(tmp_path / "r", method={"name": method}, stream=stream)
    found = summary["routers"]
    assert {"statistics", "shared"} <= set(found)
    assert found["shared"]["single"] > 60
    assert found["shared"]["single"] != found["statistics"]["single"]
    assert "shared" not in run(tmp_path / "classes", method={"name": method})["routers"]


def test_statistics_of_all_domains_may_be_the_answer(tmp_path):
    stream = {"scenario": "domain", "tasks": 2, "domains": "rotate", "task_size": 0}
    summary = run(tmp_path / "r", method={"router": "shared"}, stream=stream)
    assert summary["accuracy"]["single"] == pytest.approx(summary["routers"]["shared"]["single"])
    with pytest.raises(fedprotip.UsageError, match="there it is"):
        run(tmp_path / "classes", method={"router": "shared"})


def test_clients_that_miss_a_task_and_that_leave(tmp_path):
    """All clients of task 0 leave: what they told stays, and task 0 is still found by statistics."""
    roster = {"1": "2-3", "2": "1-3"}
    summary = run(tmp_path / "r", clients={"count": 2, "roster": roster}, method={"router": "fused"})
    assert summary["tasks"] == 3
    assert summary["routing"]["batch64_by_task"][0] > 0.6
    assert (tensors(tmp_path / "r", "statistics")["counts"] > 0).all()
    for found in summary["routers"].values():
        assert np.isfinite(list(found.values())).all()


def test_the_gaussian_router_still_finds_a_task_whose_clients_left(tmp_path):
    """Nobody knows the energy of task 0 in later bases: what is unknown must not count as zero for certain."""
    summary = run(tmp_path / "r", clients={"count": 2, "roster": {"1": "2-3"}}, method={"router": "gaussian"})
    assert summary["routing"]["batch64_by_task"][0] > 0.5


def test_clients_with_no_class_above_the_minimum_leave_a_run_that_ends(tmp_path):
    summary = run(tmp_path / "r", statistics={"minimum": 10**6}, method={"router": "fused"})
    assert summary["tasks"] == 3
    assert "NaN" not in (tmp_path / "r" / "summary.json").read_text()
