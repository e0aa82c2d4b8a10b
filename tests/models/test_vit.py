"""Vision transformer: timm's names, any image size, and FedProTIP's whole protocol on a small one."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import fedprotip
from fedprotip import UsageError
from fedprotip.models.vit import VisionTransformer, vit, vit_b16
from fedprotip.settings import ModelSettings
from fedprotip.stream.datasets import register
from tests.small import small, tensors
from tests.stream.samples import made_dataset

MATRICES = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight")
TINY = {"name": "vit", "width": 16, "depth": 2}


def timm_shapes(width, depth, patch, tokens):
    """The state_dict of timm's VisionTransformer without head, with shapes."""
    shapes = {"cls_token": (1, 1, width), "pos_embed": (1, tokens, width)}
    shapes |= {"patch_embed.proj.weight": (width, 3, patch, patch), "patch_embed.proj.bias": (width,)}
    for block in range(depth):
        layers = {"attn.qkv": (3 * width, width), "attn.proj": (width, width)}
        layers |= {"mlp.fc1": (4 * width, width), "mlp.fc2": (width, 4 * width)}
        for name, (out, d) in layers.items():
            shapes |= {f"blocks.{block}.{name}.weight": (out, d), f"blocks.{block}.{name}.bias": (out,)}
        for norm in ("norm1", "norm2"):
            shapes |= {f"blocks.{block}.{norm}.{part}": (width,) for part in ("weight", "bias")}
    return shapes | {"norm.weight": (width,), "norm.bias": (width,)}


def shapes_of(module):
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def test_vit_b16_has_the_names_and_shapes_of_timm():
    with torch.device("meta"):
        backbone = vit_b16(ModelSettings(name="vit_b16"), (3, 32, 32))
        large = vit(ModelSettings(name="vit", width=768, depth=12), (3, 224, 224))
    expected = timm_shapes(768, 12, 16, 197)
    assert shapes_of(backbone) == shapes_of(large) == expected
    assert len(expected) == 150
    assert sum(parameter.numel() for parameter in backbone.parameters()) == 85_798_656
    assert {block.attn.heads for block in (*backbone.blocks, *large.blocks)} == {12}
    assert backbone.norm.eps == 1e-6


@given(st.integers(1, 40), st.integers(1, 3), st.sampled_from([4, 64, 128]))
def test_features_are_one_vector_per_image(size, channels, width):
    settings = ModelSettings(name="vit", width=width, depth=1)
    if (size >= 14 and size % 2) or (size >= 28 and size % 4):
        with pytest.raises(UsageError, match="do not divide into patches"):
            vit(settings, (channels, size, size))
        return
    backbone = vit(settings, (channels, size, size))
    assert backbone(torch.randn(2, channels, size, size)).shape == (2, width)
    assert backbone.grid[0] ** 2 + 1 == backbone.pos_embed.shape[1]


@pytest.mark.parametrize(
    ("size", "patch", "grid"),
    [
        ((8, 8), 1, (8, 8)),
        ((28, 28), 4, (7, 7)),
        ((32, 48), 4, (8, 12)),
        ((64, 64), 8, (8, 8)),
        ((224, 224), 16, (14, 14)),
    ],
)
def test_the_patch_follows_the_image(size, patch, grid):
    backbone = vit(ModelSettings(**TINY), (3, *size))
    assert backbone.patch_embed.proj.kernel_size == backbone.patch_embed.proj.stride == (patch, patch)
    assert backbone.grid == grid


def test_it_computes_what_a_transformer_is():
    """Against plain formulas: softmax attention per head, pre-norm, exact GELU, the normalised first token."""
    backbone = VisionTransformer(1, (4, 6), 2, width=128, depth=2).double()
    images = torch.randn(3, 1, 4, 6, dtype=torch.float64)
    state = backbone.state_dict()

    def norm(x, name):
        scaled = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
        return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]

    def linear(x, name):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    patches = F.unfold(images, 2, stride=2).transpose(1, 2)
    x = patches @ state["patch_embed.proj.weight"].flatten(1).T + state["patch_embed.proj.bias"]
    x = torch.cat([state["cls_token"].expand(3, 1, 128), x], dim=1) + state["pos_embed"]
    for block in ("blocks.0", "blocks.1"):
        q, k, v = linear(norm(x, f"{block}.norm1"), f"{block}.attn.qkv").split(128, dim=2)
        heads = [slice(0, 64), slice(64, 128)]
        seen = [(q[..., h] @ k[..., h].transpose(1, 2) / 8).softmax(-1) @ v[..., h] for h in heads]
        x = x + linear(torch.cat(seen, dim=2), f"{block}.attn.proj")
        inside = linear(norm(x, f"{block}.norm2"), f"{block}.mlp.fc1")
        x = x + linear(inside * (1 + torch.erf(inside / 2**0.5)) / 2, f"{block}.mlp.fc2")
    assert torch.allclose(backbone(images), norm(x, "norm")[:, 0])


def test_images_are_resized_inside_the_model_only_if_needed():
    backbone = vit(ModelSettings(**TINY, image_size=16), (1, 8, 8))
    assert backbone.grid == (8, 8)
    small_images, images = torch.randn(2, 1, 8, 8), torch.randn(2, 1, 16, 16)
    resized = F.interpolate(small_images, (16, 16), mode="bilinear", antialias=True)
    assert torch.equal(backbone(small_images), backbone(resized))
    seen = []
    backbone.patch_embed.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    backbone(images)
    assert seen[0] is images


@pytest.mark.parametrize(
    ("build", "model", "words"),
    [
        (vit, {"name": "vit", "width": 200}, "model.width = 200 does not divide among 3 heads; .* 192"),
        (vit, {"name": "vit", "image_size": 225}, "225×225 do not divide into patches of 16×16; .* is 224"),
        (vit_b16, {"name": "vit_b16", "image_size": 5}, "5×5 do not divide into patches of 16×16; .* is 16"),
    ],
)
def test_impossible_sizes_are_refused(build, model, words):
    with pytest.raises(UsageError, match=words):
        build(ModelSettings(**model), (1, 8, 8))


def tiny(**sections):
    base = {
        "model": TINY,
        "clients": {"count": 2},
        "train": {"rounds": 1, "steps": 3, "optimizer": "AdamW", "lr": 0.003, "weight_decay": 0.1},
        "method": {"columns": 24, "threshold": 0.8},
    }
    return small(**{name: {**base.get(name, {}), **sections.get(name, {})} for name in base | sections})


def test_the_full_protocol_on_a_tiny_vit(tmp_path, no_report):
    folder, models = tmp_path / "r", []
    fedprotip.run(tiny(stream={"tasks": 1}), out=folder)
    models.append(tensors(folder, "model"))
    for _ in range(2):
        summary = fedprotip.extend(folder, tasks=1)
        models.append(tensors(folder, "model"))
    subspaces = tensors(folder, "subspaces")
    assert len(summary["matrix"]["single"]) == 3
    assert subspaces["routing/0000"].shape[0] == 16  # the class token

    protected = {name.removeprefix("layers/") for name in subspaces if name.startswith("layers/")}
    assert protected == {f"blocks.{b}.{m}" for b in range(2) for m in MATRICES} | {"patch_embed.proj.weight"}
    for task in (1, 2):
        before, after = models[task - 1], models[task]
        for layer in protected:
            phi = subspaces[f"layers/{layer}"][:, : subspaces[f"ranks/{layer}"][:task].sum()].double()
            change = (after[f"backbone.{layer}"] - before[f"backbone.{layer}"]).flatten(1).double()
            if phi.shape[1] == len(phi):
                assert change.abs().max() == 0
            else:
                assert change.norm() > 0, layer
                assert (change @ phi).norm() / change.norm() <= 1e-5, layer
        for name in before:  # biases, norms, class token and positions have no input subspace
            if name.removeprefix("backbone.") not in protected:
                assert torch.equal(before[name], after[name]), name
    assert any(subspaces[f"layers/{layer}"].shape[1] < len(subspaces[f"layers/{layer}"]) for layer in protected)


@pytest.mark.slow
def test_vit_b16_learns_one_federated_task_at_224_pixels(tmp_path, registries):
    register("made")(lambda settings: made_dataset(train=(4, 4), test=(2, 2), shape=(3, 224, 224)))
    settings = tiny(
        data={"name": "made"},
        stream={"tasks": 1},
        clients={"partition": "iid"},
        model={"name": "vit_b16", "freeze": "block5"},
        train={"steps": 1, "batch": 4, "lr": 1e-3, "optimizer": "SGD"},
        method={"columns": 4},
        evaluate={"group": 4, "draws": 1, "batch": 4},
    )
    summary = fedprotip.run(settings, out=tmp_path / "r")
    subspaces = tensors(tmp_path / "r", "subspaces")
    layers = {name.removeprefix("layers/"): tensor for name, tensor in subspaces.items() if name.startswith("layers/")}
    assert layers.keys() == {f"blocks.{b}.{m}" for b in range(6, 12) for m in MATRICES}
    assert all(tensor.shape[0] == (3072 if "fc2" in name else 768) for name, tensor in layers.items())
    assert subspaces["routing/0000"].shape[0] == 768
    assert summary["bytes"]["up"]["model"] > 2 * 4 * 85_798_656
    assert summary["peak_rss_mb"] < 6000
