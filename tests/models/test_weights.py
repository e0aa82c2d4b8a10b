"""Pretrained weights: what is read, what is adapted, and one sentence for every file that does not fit."""

import os
import pickle
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fedprotip
from fedprotip import UsageError
from fedprotip.models.resnet import ResNet18
from fedprotip.models.vit import VisionTransformer
from fedprotip.models.weights import load_weights
from tests.small import small, tensors

DATA = Path(os.environ.get("FEDPROTIP_DATA", Path(__file__).parents[3] / "shared" / "data"))
REBUILT = DATA / "resnet18-rebuilt.safetensors"


def module():
    """The backbone that `small` builds: an mlp on 8×8 digits."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU())


def equal(one, other):
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def saved(path, content):
    save_file(content, path) if path.suffix == ".safetensors" else torch.save(content, path)
    return path


# What is read


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt"])
@pytest.mark.parametrize("prefix", ["", "module.", "backbone.", "module.backbone."])
def test_formats_and_wrappers(tmp_path, suffix, prefix):
    there, here = module().state_dict(), module()
    content = {f"{prefix}{name}": tensor for name, tensor in there.items()}
    content |= {"fc.weight": torch.zeros(3, 24), "module.heads.0.bias": torch.zeros(3)}  # a classifier is left out
    load_weights(here, saved(tmp_path / f"w{suffix}", content))
    assert equal(there, here.state_dict())


def test_a_training_checkpoint_with_a_nested_state_dict(tmp_path):
    there, here = module().half().state_dict(), module()
    load_weights(here, saved(tmp_path / "w.pth", {"state_dict": there, "epoch": 3, "arch": "mlp"}))
    assert equal({name: tensor.float() for name, tensor in there.items()}, here.state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn])
def test_other_floating_point_numbers_are_read_as_they_are(tmp_path, dtype):
    there, here = {name: tensor.to(dtype) for name, tensor in module().state_dict().items()}, module()
    load_weights(here, saved(tmp_path / "w.pth", there))
    assert equal({name: tensor.float() for name, tensor in there.items()}, here.state_dict())


def test_a_path_that_is_too_long_for_the_system_is_one_sentence(tmp_path):
    with pytest.raises(UsageError, match="cannot be read: File name too long"):
        load_weights(module(), tmp_path / ("x" * 5000))


def test_counters_of_norm_layers_may_be_missing(tmp_path):
    there, here = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    there(torch.randn(5, 3))
    state = {name: tensor for name, tensor in there.state_dict().items() if name != "num_batches_tracked"}
    load_weights(here, saved(tmp_path / "w.safetensors", state))
    assert equal(state, here.state_dict())


def test_an_own_layer_called_like_a_classifier_is_loaded(tmp_path):
    there, here = (nn.ModuleDict({"fc": nn.Linear(2, 2), "module": nn.Linear(2, 1)}) for _ in range(2))
    load_weights(here, saved(tmp_path / "w.pth", there.state_dict()))
    assert equal(there.state_dict(), here.state_dict())


def test_a_run_starts_from_the_weights_of_another(tmp_path, no_report):
    fedprotip.run(small("train.rounds=1", stream={"tasks": 1}), out=tmp_path / "a")
    weights = tmp_path / "a" / "model.safetensors"
    settings = small("train.rounds=1", "train.lr=1e-30", "train.weight_decay=0", stream={"tasks": 1})
    settings = fedprotip.load_settings(settings, [f"model.weights={str(weights)!r}"])
    fedprotip.run(settings, out=tmp_path / "b")
    first, second = tensors(tmp_path / "a", "model"), tensors(tmp_path / "b", "model")
    assert all(torch.equal(first[name], second[name]) for name in first if name.startswith("backbone."))


# What is adapted


def test_the_cifar_stem_keeps_its_random_kernel(tmp_path):
    there = ResNet18("imagenet", 1, 3).state_dict()
    path = saved(tmp_path / "w.safetensors", there)
    for stem in ("imagenet", "stride1"):
        here = ResNet18(stem, 1, 3)
        load_weights(here, path)
        assert equal(there, here.state_dict())
    here = ResNet18("cifar", 1, 3)
    random = here.conv1.weight.clone()
    load_weights(here, path)
    assert torch.equal(here.conv1.weight, random)
    del there["conv1.weight"]
    assert equal(there, here.state_dict())
    load_weights(ResNet18("cifar", 1, 3), saved(tmp_path / "w3.safetensors", here.state_dict()))


def test_a_7x7_kernel_for_other_channels_is_refused(tmp_path):
    path = saved(tmp_path / "w.safetensors", ResNet18("imagenet", 1, 3).state_dict())
    with pytest.raises(UsageError, match=r"conv1.weight has shape \(64, 3, 7, 7\), the model needs \(64, 1, 7, 7\)"):
        load_weights(ResNet18("stride1", 1, 1), path)


def tiny_vit(size=(16, 16), width=8):
    return VisionTransformer(1, size, 4, width, depth=1)


def test_position_embeddings_are_resampled(tmp_path):
    there = tiny_vit((32, 32))
    with torch.no_grad():  # a plane over the grid: resampling keeps its values away from the borders
        rows = torch.arange(8.0).repeat_interleave(8)
        there.pos_embed[0, 1:] = rows[:, None]
    path = saved(tmp_path / "w.safetensors", there.state_dict())
    for size, grid in (((16, 16), (4, 4)), ((64, 32), (16, 8))):
        here = tiny_vit(size)
        load_weights(here, path)
        assert torch.equal(here.pos_embed[0, 0], there.pos_embed[0, 0])
        plane = here.pos_embed[0, 1:].view(*grid, -1)
        assert (plane - plane[:, :1, :1]).abs().max() < 1e-5  # no change along a row
        middle = plane[grid[0] // 4 : -grid[0] // 4, 0, 0]
        expected = (torch.arange(grid[0]) + 0.5) * 8 / grid[0] - 0.5
        assert torch.allclose(middle, expected[grid[0] // 4 : -grid[0] // 4], atol=0.05)
        assert here(torch.randn(2, 1, *size)).shape == (2, 8)
    same = tiny_vit((32, 32))
    load_weights(same, path)
    assert torch.equal(same.pos_embed, there.pos_embed)


@pytest.mark.parametrize("shape", [(1, 6, 8), (1, 1, 8), (1, 26, 9), (17, 8)])
def test_position_embeddings_of_no_square_or_other_width_are_refused(tmp_path, shape):
    state = tiny_vit().state_dict() | {"pos_embed": torch.zeros(shape)}
    with pytest.raises(UsageError, match="pos_embed has shape"):
        load_weights(tiny_vit(), saved(tmp_path / "w.safetensors", state))


@pytest.mark.skipif(not REBUILT.is_file(), reason=f"{REBUILT} is not there; set FEDPROTIP_DATA to its folder")
@pytest.mark.parametrize("stem", ["imagenet", "cifar", "stride1"])
def test_the_rebuilt_resnet18_loads_into_every_stem(stem):
    backbone = ResNet18(stem, 1, 3)
    random = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    load_weights(backbone, REBUILT)
    kept = {name for name, tensor in backbone.state_dict().items() if torch.equal(tensor, random[name])}
    assert {name for name in kept if "num_batches" not in name} == ({"conv1.weight"} if stem == "cifar" else set())
    assert backbone.eval()(torch.randn(2, 3, 32, 32)).isfinite().all()


# What does not fit: one sentence, and nothing is written


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def _bytes(content):
    return lambda path: path.write_bytes(content)


def _truncated(path):
    saved(path, module().state_dict())
    path.write_bytes(path.read_bytes()[:-2000])


def _state(change):
    return lambda path: saved(path, change(module().state_dict()))


def _shape(state):
    return state | {"1.weight": torch.zeros(24, 63)}


def _renamed(state):
    return {name.replace("1.", "one."): tensor for name, tensor in state.items()}


def _weight(change):
    """The first weight is something else than plain numbers."""
    return _state(lambda state: state | {"1.weight": change(state["1.weight"])})


def _quantised(weight):
    with warnings.catch_warnings(action="ignore"):
        return torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8)


def _nested(weight):
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([weight, weight[:3]])


def _bomb(path):
    saved(path, {"1.weight": torch.zeros(2500, 2500)})
    with zipfile.ZipFile(path) as file:
        entries = {entry.filename: file.read(entry) for entry in file.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in entries.items():
            file.writestr(name, content)


BAD = {
    "missing.pth": (lambda path: None, "is not a file"),
    "folder.safetensors": (lambda path: path.mkdir(), "is not a file"),
    "folder.pth": (lambda path: path.mkdir(), "is not a file"),
    "empty.safetensors": (_bytes(b""), "is damaged: .*header"),
    "empty.pth": (_bytes(b""), "is damaged or"),
    "garbage.safetensors": (_bytes(b"hello, world " * 9), "is damaged: .*header"),
    "garbage.pth": (_bytes(b"hello, world " * 9), "damaged or holds more than tensors"),
    "truncated.safetensors": (_truncated, "is damaged: "),
    "truncated.pth": (_truncated, "is damaged or"),
    "evil.pth": (lambda path: path.write_bytes(pickle.dumps({"1.weight": Evil()}, 2)), "holds more than tensors"),
    "evil-zip.pth": (lambda path: torch.save({"1.weight": Evil()}, path), "holds more than tensors"),
    "module.pth": (lambda path: torch.save(module(), path), "holds more than tensors"),
    "list.pth": (lambda path: torch.save([torch.zeros(1)], path), "holds no dictionary of tensors"),
    "numbers.pth": (lambda path: torch.save({"1.weight": 3}, path), "holds no dictionary of tensors"),
    "numbered.pth": (lambda path: torch.save({1: torch.zeros(1)}, path), "holds no dictionary of tensors"),
    "nothing.safetensors": (_state(lambda state: {}), "another architecture: it lacks 1.weight, 1.bias and 2 more."),
    "renamed.pth": (_state(_renamed), "lacks 1.weight, 1.bias, and it has one.bias, one.weight."),
    "resnet.safetensors": (
        lambda path: saved(path, ResNet18("cifar", 1, 3).state_dict()),
        "another architecture: it lacks .*, and it has bn1.bias, bn1.num_batches_tracked and 118 more.",
    ),
    "shape.safetensors": (_state(_shape), r"1.weight has shape \(24, 63\), the model needs \(24, 64\)."),
    "quantised.pth": (_weight(_quantised), "1.weight is quantised; the model needs plain"),
    "sparse.pth": (_weight(torch.Tensor.to_sparse), "1.weight is sparse"),
    "nested.pth": (_weight(_nested), "1.weight is nested"),
    "meta.pth": (_weight(lambda weight: weight.to("meta")), "1.weight is without values"),
    "complex.pth": (_weight(lambda weight: weight.to(torch.complex64)), "1.weight is complex"),
    "complex.safetensors": (_weight(lambda weight: weight.to(torch.complex64)), "1.weight is complex"),
    "int8.safetensors": (_weight(lambda weight: weight.to(torch.int8)), "1.weight is of int8"),
    "bool.pth": (_weight(lambda weight: weight > 0), "1.weight is of bool"),
    "overflow.pth": (_weight(lambda weight: weight.double() * 1e300), "1.weight .* not finite"),
    "infinite8.pth": (_weight(lambda weight: (weight * torch.inf).to(torch.float8_e5m2)), "1.weight .* not finite"),
    "huge.pth": (_weight(lambda weight: torch.zeros(1).expand(10**13)), r"1.weight has shape \(10000000000000,\)"),
    "bomb.pth": (_bomb, "would unpack to 2[0-9,]+ bytes"),
    "nested-dict.pth": (
        lambda path: torch.save({"state_dict": {"a": {"b": 1}}}, path),
        "holds no dictionary of tensors",
    ),
    "long-name.pth": (_state(lambda state: state | {"x" * 9999: torch.zeros(1)}), "it has xxx"),
    "nan.pth": (_state(lambda state: state | {"3.bias": torch.full((24,), torch.nan)}), "3.bias .* not finite"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_does_not_fit_is_one_sentence_and_nothing_is_written(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write, words = BAD[name]
    write(tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=words) as error:
        fedprotip.run(small(model={"weights": name}), out=tmp_path / "run")
    text = str(error.value)
    assert text.startswith(f"model.weights = {name!r}")
    assert text.endswith(".")
    assert "\n" not in text
    assert len(text) < 250
    assert sorted(tmp_path.rglob("*")) == before  # no run folder, and the evil pickle has made none either
