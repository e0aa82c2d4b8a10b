"""What a task costs earlier ones: noticed without their data."""

import pytest
import torch

import fedprotip
from fedprotip.methods.parts.wear import LEFT, WAYS, as_earlier_tasks_see_it
from fedprotip.seeds import torch_stream
from fedprotip.subspace.basis import core_basis
from fedprotip.subspace.merge import EnergyMerge, UnionMerge
from tests.sites import Ends
from tests.small import quick, small

LAYER = "0.weight"


@pytest.fixture
def ends(tmp_path):
    return Ends(small(clients={"held_back": 0.1}), tmp_path)


def moved(ends, left):
    """A site in its second task, whose layers have moved by as much as Φ lets them."""
    site = ends.site()
    layers = {name: parameter for name, parameter in site.network.backbone.named_parameters() if parameter.dim() > 1}
    known = {}
    for name, parameter in layers.items():
        d = parameter[0].numel()
        basis = torch.linalg.qr(torch.randn(d, d // 3, generator=torch_stream(0, "basis")))[0]
        known |= {f"subspaces/layers/{name}": basis, f"subspaces/ranks/{name}": torch.tensor([d // 3])}
        known[f"{LEFT.name}/{name}"] = torch.tensor([left])
    known["subspaces/routing/0000"] = torch.eye(site.network.features, 2)
    site = ends.site(known, task=1)
    with torch.no_grad():
        for layer, projector in site.view.projectors:
            step = projector(torch.randn(layers[layer.parameter].flatten(1).shape, generator=torch_stream(0, "step")))
            layers[layer.parameter].add_(0.1 * step.view_as(layers[layer.parameter]))
    return site


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("left", "share"), [(0.0, 0.0), (1.0, 1.0), (0.02, None)])
def test_the_network_goes_by_as_much_as_earlier_tasks_saw_of_its_move(ends, left, share, way):
    site = moved(ends, left)
    now = {name: tensor.clone() for name, tensor in site.network.named_parameters()}
    with torch.no_grad(), as_earlier_tasks_see_it(ends.local(0, site), way) as worn:
        assert worn
        for name, start in site.start.items():
            seen, whole = dict(site.network.named_parameters())[name] - now[name], way * (now[name] - start)
            found = (seen.norm() / whole.norm()).item()
            torch.testing.assert_close(seen, found * whole, atol=1e-5, rtol=1e-4)
            assert found == pytest.approx(share, abs=1e-5) if share is not None else 0 < found < 1
    assert all(torch.equal(tensor, now[name]) for name, tensor in site.network.named_parameters())


def test_in_the_first_task_nothing_is_earlier(ends):
    with as_earlier_tasks_see_it(ends.local(0), 1) as worn:
        assert not worn


@pytest.mark.parametrize("most", [1, 3, 64])
def test_what_no_basis_holds_is_known_after_merging(most):
    """Against all columns of all clients at once; what clients cut off themselves counts too."""
    earlier = torch.linalg.qr(torch.randn(12, 2, generator=torch_stream(0, "earlier")))[0]
    columns = [torch.randn(12, 40, generator=torch_stream(0, "a", k)) for k in range(3)]
    merge = EnergyMerge(earlier, 0.8, "energy", most=most)
    for a in columns:
        merge.add(core_basis(a, earlier, 0.9, "energy"))
    phi, together = torch.cat([earlier, merge.result()], 1).double(), torch.cat(columns, 1).double()
    outside = (together - phi @ (phi.T @ together)).square().sum() / together.square().sum()
    assert merge.left == pytest.approx(outside.item(), abs=0.05)
    assert merge.left >= outside.item() - 1e-6  # of what clients cut off, some lies in what others ask for
    assert UnionMerge(earlier).left == 1


def test_statistics_that_rot_do_not_answer(tmp_path, monkeypatch):
    """Held-back samples are of the newest task, whose statistics are fresh: they alone would choose these."""
    quick(monkeypatch)
    violent = {"model.name": "small_cnn", "model.width": 32, "model.depth": 2, "train.rounds": 5, "train.epochs": 3}
    changes = [f"{name}={value}" for name, value in (violent | {"train.lr": 0.1, "run.threads": 1}).items()]
    summary = fedprotip.run({}, changes, out=tmp_path / "r")
    ways = summary["routers"]
    assert ways["statistics"]["single"] < ways["birth"]["single"] - 3
    assert summary["accuracy"]["single"] == pytest.approx(ways["birth"]["single"])
