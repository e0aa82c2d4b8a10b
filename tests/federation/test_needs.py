"""Runs that this machine cannot hold are refused before any work, with an estimate; honest ones never are."""

import pytest
import torch
from torch import nn

import fedprotip
from fedprotip.api import check
from fedprotip.federation import needs as module
from fedprotip.federation.needs import needs, products
from fedprotip.methods import create_method
from fedprotip.models import build_network
from fedprotip.store import memory
from fedprotip.stream import build_stream
from tests.small import small

ABSURD = {
    "model.width=900000": "the model 'mlp'",
    "model.width=60000 model.depth=1": "products of 60,000 features",
    "model.name=vit model.width=131072": "the model 'vit'",
    "data.size=60000": "images of 60000×60000",
    "data.size=60000 model.name=small_cnn": "images of 60000×60000",
    "evaluate.group=1000000 evaluate.draws=1000000": "the groups of mode batch64",
    "statistics.features=500000": "products of 500,000 features",
    "train.views=1000000 train.augment=standard": "the chance behind all views",
    "run.engine=pool run.workers=1024 clients.count=270": "270 worker processes",
}


@pytest.mark.parametrize("overrides", ABSURD)
def test_what_cannot_fit_is_refused_in_one_sentence(tmp_path, monkeypatch, overrides):
    monkeypatch.setattr(module, "machine_bytes", lambda: 20 * 2**30)
    with pytest.raises(fedprotip.UsageError, match=r"needs at least [\d,.]+ GiB of memory for ") as error:
        fedprotip.run(small(*overrides.split()), out=tmp_path / "r")
    assert ABSURD[overrides] in str(error.value)
    assert "this machine has 20.0; choose a smaller " in str(error.value)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("overrides", ["clients.count=1000000", "stream.overlap=1000000000", "stream.tasks=100000"])
def test_more_than_the_data_has_is_refused_at_once(overrides):
    with pytest.raises(fedprotip.UsageError, match=r"nearest valid value|clients.count = \d+ shares"):
        check(small(overrides))


@pytest.mark.parametrize("name", ["mlp", "small_cnn", "resnet18", "vit"])
def test_the_estimate_of_a_model_is_its_size(name):
    settings = small(f"model.name={name}", "model.width=64")
    stream, method = build_stream(settings), create_method(settings)
    network = build_network(settings, stream.dataset.image_shape, method.routes)
    (found,) = (need for need in needs(settings, method, stream) if need.what == f"the model {name!r}")
    assert found.nbytes == 2 * sum(t.numel() * t.element_size() for t in network.backbone.state_dict().values())
    assert products(settings, method, network.features).nbytes == 8 * network.features**2


def test_an_estimate_leaves_chance_and_ready_models_alone(monkeypatch):
    """A ready module is counted as it is; a builder that needs real tensors is tried as it is."""
    from fedprotip.models import heads

    ready, made = nn.Sequential(nn.Flatten(), nn.Linear(64, 8)), []

    def fussy(settings, image_shape):
        made.append(torch.ones(3).tolist())  # without memory there are no values
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8))

    for builder in (lambda settings, image_shape: ready, fussy):
        monkeypatch.setitem(heads._builders, "mlp", builder)
        torch.manual_seed(3)
        expected = torch.random.get_rng_state()
        check(small())
        assert torch.equal(torch.random.get_rng_state(), expected)
    assert made == [[1.0] * 3]
    assert ready.training


def test_the_memory_of_this_machine(tmp_path, monkeypatch):
    assert memory.machine_bytes() > 2**27
    monkeypatch.setattr(memory, "MACHINE", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal:  2000 kB\nMemFree: 1 kB\nSwapTotal:  48 kB\n")
    monkeypatch.setattr(memory, "LIMITS", (tmp_path / "absent", tmp_path / "limit"))
    assert memory.machine_bytes() == 2**21
    (tmp_path / "limit").write_text("max\n")
    assert memory.machine_bytes() == 2**21
    (tmp_path / "limit").write_text("1000\n")
    assert memory.machine_bytes() == 1000


def test_options_of_an_optimiser_that_fail_at_the_first_step_are_refused():
    with pytest.raises(fedprotip.UsageError, match=r"train.optimizer = 'Rprop' cannot make a step"):
        check(small("train.optimizer=Rprop", "train.weight_decay=0", "train.optimizer_options={etas = [0.5]}"))
    with pytest.raises(fedprotip.UsageError, match=r"learning rate is train\.lr"):
        check(small("train.optimizer_options={lr = 5.0}"))


def test_no_folder_is_called_what_no_folder_can_be():
    for name, words in (("a\0b", "NUL"), ("a\udc80", "UTF-8")):
        with pytest.raises(fedprotip.UsageError, match=words):
            fedprotip.run(small(), out=name)


def test_an_extension_by_too_many_tasks_is_refused(tmp_path, monkeypatch):
    fedprotip.run(small(stream={"tasks": 1, "task_size": [2]}, train={"rounds": 1}), out=tmp_path / "r")
    with pytest.raises(fedprotip.UsageError, match=r"--tasks .* 99999 can be added"):
        fedprotip.extend(tmp_path / "r", tasks=10**30)
    with pytest.raises(fedprotip.UsageError, match=r"--clients: .*more than 1,000,000 clients"):
        fedprotip.extend(tmp_path / "r", clients="0-9999999")
