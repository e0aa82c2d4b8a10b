"""LANDER: anchors, the radius around them, the weights of old and new, and images made of anchors."""

import math
import os
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, mse_loss

import fedprotip
from fedprotip.errors import UsageError
from fedprotip.methods.lander import Speaker, TextSynthesis, balance, beyond, class_counts
from fedprotip.methods.parts import text
from fedprotip.methods.parts.distillation import earlier
from fedprotip.models.state import full_state
from fedprotip.settings import placed, seen_from
from tests.methods.parts.test_generator import course
from tests.methods.test_target import same_gradients, settings
from tests.sites import Ends
from tests.small import quick, tensors
from tests.teachers import learned_site
from tests.watchdog import in_time


def lander(*overrides, **sections):
    return settings(*overrides, name="lander", **sections)


def anchors(ends, task=0):
    """What clients are told at the beginning of a task."""
    site = ends.site(task=task)
    return site.method.exchange("text").digest(None, site).tensors["vectors"]


def test_within_the_radius_nothing_pulls():
    centre = torch.randn(4, 8)
    inside = (centre + 0.1).requires_grad_()
    assert beyond(inside, centre, radius=0.015) == 0
    (pull,) = torch.autograd.grad(beyond(inside, centre, radius=0.015), inside)
    assert not pull.any()


def test_outside_the_radius_it_is_the_mean_square_less_the_radius():
    centre = torch.randn(4, 8)
    outside = (centre + 0.2).requires_grad_()
    loss = beyond(outside, centre, radius=0.015)
    assert loss.item() == pytest.approx(0.04 - 0.015, rel=1e-4)
    (pull,) = torch.autograd.grad(loss, outside)
    torch.testing.assert_close(pull, torch.full_like(pull, 2 * 0.2 / 32))


def test_the_batch_counts_as_one():
    """A sample far outside pulls with the others, which are inside."""
    centre = torch.zeros(2, 4)
    mapped = torch.tensor([[0.1] * 4, [1.0] * 4])
    assert beyond(mapped, centre, radius=0.1).item() == pytest.approx((0.01 + 1.0) / 2 - 0.1)


def test_anchors_have_the_length_to_which_the_radius_belongs(tmp_path):
    options = lander().method
    vectors = torch.cat([anchors(Ends(lander(), tmp_path / str(task)), task) for task in range(3)])
    torch.testing.assert_close(vectors.norm(dim=1), torch.full((6,), 9.7))
    apart = [mse_loss(a, b).item() for i, a in enumerate(vectors) for b in vectors[:i]]
    assert min(apart) > 2 * options.radius
    unit = [mse_loss(a, b).item() / 9.7**2 for i, a in enumerate(vectors) for b in vectors[:i]]
    assert max(unit) < options.radius  # the trap: vectors of length 1 are all within one radius


def test_random_anchors_are_as_far_apart_as_those_of_clip():
    """Mean squared distance of two of CIFAR-100's names under CLIP: 0.081."""
    options = lander().method
    for dim, length in ((512, 9.7), (384, 8.4)):
        vectors = text.lengthened(text.directions([f"class {i}" for i in range(30)], dim, options.alike), length)
        apart = [mse_loss(a, b).item() for i, a in enumerate(vectors) for b in vectors[:i]]
        assert sum(apart) / len(apart) == pytest.approx(0.081, abs=0.002)
        assert min(apart) > options.radius


def test_anchors_follow_the_order_of_classes(tmp_path):
    plain = torch.cat([anchors(Ends(lander(), tmp_path / f"a{task}"), task) for task in range(3)])
    by_name = dict(zip("012345", plain, strict=True))
    order = ["5", "3", "0", "1", "4", "2"]
    other = lander(stream={"order": order})
    found = torch.cat([anchors(Ends(other, tmp_path / f"b{task}"), task) for task in range(3)])
    assert torch.equal(found, torch.stack([by_name[name] for name in order]))


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_anchors_come_from_a_file(tmp_path, kind):
    vectors = {str(label): torch.randn(512, generator=torch.Generator().manual_seed(label)) for label in range(6)}
    path = tmp_path / f"text.{kind}"
    if kind == "npz":
        np.savez(path, **{name: vector.numpy() for name, vector in vectors.items()})
    else:
        save_file(vectors, path)
    found = anchors(Ends(lander(f"method.embeddings={path}", "method.scale=0"), tmp_path), task=1)
    assert torch.equal(found, torch.stack([vectors["2"], vectors["3"]]))
    longer = anchors(Ends(lander(f"method.embeddings={path}"), tmp_path), task=1)
    torch.testing.assert_close(longer, found / found.norm(dim=1, keepdim=True) * 9.7)


@pytest.mark.parametrize(
    ("vectors", "sentence"),
    [
        ({"0": torch.ones(512)}, "has no vector for class '1'"),
        ({str(label): torch.ones(384) for label in range(6)}, r"'0' has shape \(384,\)"),
        ({str(label): torch.full((512,), torch.nan) for label in range(6)}, "numbers that are none"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_a_sentence(tmp_path, vectors, sentence):
    save_file(vectors, tmp_path / "text.safetensors")
    with pytest.raises(UsageError, match=sentence):
        fedprotip.run(lander(f"method.embeddings={tmp_path / 'text.safetensors'}"), out=tmp_path / "r")


def test_a_run_folder_names_the_file_from_where_it_lies(tmp_path):
    saved = seen_from(lander("method.embeddings=text.npz"), tmp_path)
    assert placed(saved, tmp_path).method.embeddings == str(Path.cwd() / "text.npz")


def test_what_is_no_file_of_tensors_is_refused(tmp_path):
    (tmp_path / "text.npz").write_bytes(b"no archive")
    (tmp_path / "text.safetensors").write_bytes(b"none either")
    (tmp_path / "head.npz").write_bytes(b"PK\3\4" + bytes(50))
    (tmp_path / "zero.npz").symlink_to("/dev/zero")
    for name in ("pipe.npz", "pipe.safetensors"):
        os.mkfifo(tmp_path / name)
    names = ["text.npz", "head.npz", "text.safetensors", "absent.npz", "absent.safetensors"]
    for name in [*names, "zero.npz", "pipe.npz", "pipe.safetensors"]:
        with pytest.raises(UsageError, match=r"cannot be read|is not a file|is not an npz file"), in_time(20):
            text.from_file(str(tmp_path / name), ["0"], 4)


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_vectors_that_are_no_real_numbers_are_refused(tmp_path, kind):
    """Too large for what learns from them, complex, or text."""
    path = tmp_path / f"text.{kind}"
    for array in (np.full(4, 1e300), np.ones(4, np.complex64), *([np.array(list("abcd"))] if kind == "npz" else [])):
        np.savez(path, a=array) if kind == "npz" else save_numpy({"a": array}, path)
        with pytest.raises(UsageError, match=r"numbers that are none|has no vector"):
            text.from_file(str(path), ["a"], 4)


def test_the_sentence_encoder_is_asked_for_prompts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, text.ENCODER, None)
    with pytest.raises(UsageError, match=r"pip install 'fedprotip\[text\]'"):
        anchors(Ends(lander("method.surrogate=text"), tmp_path / "a"))
    asked = []

    def encode(prompts):
        asked.extend(prompts)
        return np.eye(len(prompts), 384, dtype=np.float32)

    loaded = SimpleNamespace(load_model=lambda device: SimpleNamespace(encode=encode))
    monkeypatch.setitem(sys.modules, text.ENCODER, loaded)
    with pytest.raises(UsageError, match=r"method.dim = 512: the sentence encoder gives 384"):
        anchors(Ends(lander("method.surrogate=text"), tmp_path / "b"))
    found = anchors(Ends(lander("method.surrogate=text", "method.dim=384"), tmp_path / "c"), task=2)
    assert asked[-2:] == ["A photo of a 4", "A photo of a 5"]
    torch.testing.assert_close(found, 9.7 * math.sqrt(384 / 512) * torch.eye(2, 384))


def test_the_weights_of_old_and_new():
    assert balance(10, 20) == (math.log2(11), math.sqrt(0.5))
    assert balance(345, 345)[1] == 1


def test_the_loss_is_the_published_sum(tmp_path):
    ends = Ends(lander(), tmp_path)
    known = {f"text/{task}": anchors(ends, task) for task in range(3)}
    made = torch.randint(256, (16, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    site = ends.site(known | {"pool/images": made}, task=2)
    local, network = ends.local(0, site), site.network
    before = site.before()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    images, labels = ends.stream.train_batch(2, ends.stream.tasks[2].train[:8])
    site.method.begin_round(local)
    found = site.method.loss(local, images, labels)

    def mapped(model, inputs):
        return model.extras["mapping"](model.embed(inputs))

    pulled = (mse_loss(mapped(network, images), known["text/2"][labels - 4]) - 0.015).relu()
    new = cross_entropy(network(images)[:, 4:], labels - 4) + 0.5 * pulled
    synthetic = site.look.batch(made)
    told, said = before(synthetic)[:, :4] / 2, network(synthetic)[:, :4] / 2
    kept = -(told.softmax(1) * said.log_softmax(1)).sum(1).mean()
    kept = kept + mse_loss(mapped(network, synthetic), mapped(before, synthetic))
    assert class_counts(network, 2) == (4, 6)
    alpha, beta = math.log2(4), math.sqrt(4 / 6)
    expected = 0.3 * (1 + 1 / alpha) / beta * new + 0.3 * alpha * beta * kept
    torch.testing.assert_close(found, expected)
    same_gradients(found, expected, network)


def test_in_the_first_task_it_is_cross_entropy_and_the_pull_as_they_are(tmp_path):
    ends = Ends(lander("train.augment=none"), tmp_path)
    site = ends.site({"text/0": anchors(ends)})
    local, network = ends.local(0, site), site.network
    images, labels = ends.stream.train_batch(0, ends.stream.tasks[0].train[:8])
    site.method.begin_round(local)
    mapped = network.extras["mapping"](network.embed(images))
    pulled = mse_loss(mapped, site.known["text/0"][labels]) - 0.015
    assert pulled > 0
    expected = cross_entropy(network(images), labels) + 0.5 * pulled
    torch.testing.assert_close(site.method.loss(local, images, labels), expected)


def test_ten_images_share_a_layer_of_noise_and_others_do_not():
    torch.manual_seed(0)
    speaker = Speaker(6, 4, (1, 8, 8), width=4)
    layers = speaker.layers(25, torch.Generator().manual_seed(0))
    assert [layer.shape for layer in layers] == [(3, 6, 4), (3, 1, 4)]
    rows = torch.randn(25, 6)
    seen = []
    speaker.decoder.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    assert speaker(rows, layers).shape == (25, 1, 8, 8)
    normed = speaker.norm(rows)
    expected = torch.stack([normed[i] @ layers[0][i // 10] + layers[1][i // 10, 0] for i in range(25)])
    torch.testing.assert_close(seen[0], expected)


def test_the_pool_is_even_and_the_teacher_sees_what_was_wanted(tmp_path):
    site = learned_site(tmp_path, "lander", pool=1000)
    before = {name: tensor.clone() for name, tensor in full_state(site.network).items()}
    synthesis = TextSynthesis(site, site.method.options)
    born = synthesis.student.extras["mapping"].weight.detach().clone()
    pool, targets = synthesis.run()
    assert torch.bincount(targets).tolist() == [64] * 4  # four rounds, after that of the warm-up
    with torch.no_grad():
        said = earlier(site.network, site.network.embed(site.look.batch(pool)), 2)
    assert (said.argmax(1) == targets).float().mean() > 0.9
    assert all(torch.equal(tensor, before[name]) for name, tensor in full_state(site.network).items())
    assert not torch.equal(born, synthesis.student.extras["mapping"].weight)


def test_rounds_of_the_warm_up_come_before_those_that_are_kept(tmp_path, monkeypatch):
    """And the student takes part two rounds after it began to learn."""
    ends = Ends(lander("method.warmup=2", "method.synthesis_rounds=4", "method.synthesis_batch=10"), tmp_path)
    known = {f"text/{task}": anchors(ends, task) for task in range(2)}
    against, lessons = course(TextSynthesis(ends.site(known, task=2), ends.method.options), monkeypatch)
    assert against == [False] * 4 + [True] * 2
    assert lessons == [10, 20, 30, 40]


def test_images_are_to_lie_near_their_anchors_and_the_student_where_the_teacher_does(tmp_path):
    ends = Ends(lander(), tmp_path)
    known = {f"text/{task}": anchors(ends, task) for task in range(2)}
    synthesis = TextSynthesis(ends.site(known, task=2), ends.method.options)
    features, other = torch.randn(2, 3, ends.network.features).unbind()
    mapped = ends.network.extras["mapping"](features)
    wanted = torch.stack([known["text/1"][1], known["text/0"][0], known["text/1"][0]])
    pulled = synthesis.aim(features, torch.tensor([3, 0, 2]))
    torch.testing.assert_close(pulled, 0.5 * (mse_loss(mapped, wanted) - 0.015).relu())
    learned = synthesis.lesson(other, features)
    torch.testing.assert_close(learned, 0.5 * mse_loss(synthesis.student.extras["mapping"](other), mapped))


def test_the_looks_of_images_go_on_learning_from_round_to_round(tmp_path):
    """Adam's first step in a round is as long as its rate: darker images need a larger mean."""
    ends = Ends(lander("method.generator_steps=1"), tmp_path)
    known = {f"text/{task}": anchors(ends, task) for task in range(2)}
    synthesis = TextSynthesis(ends.site(known, task=2), ends.method.options)
    for round_ in (1, 2):
        synthesis.make(synthesis.targets(), lambda images: images.sum())
        assert synthesis.looks[0].flatten().tolist() == pytest.approx([0.5 + 0.01 * round_], rel=1e-4)


def test_images_are_what_the_speaker_says_of_anchors_with_the_learned_looks(tmp_path):
    """Every round has new layers of noise, which learn as the generator does."""
    ends = Ends(lander("method.generator_steps=1"), tmp_path)
    known = {f"text/{task}": anchors(ends, task) for task in range(2)}
    synthesis = TextSynthesis(ends.site(known, task=2), ends.method.options)
    with torch.no_grad():
        for look, value in zip(synthesis.looks, (0.4, 0.3), strict=True):
            look.fill_(value)
    speaker, chance, drawn = deepcopy(synthesis.generator), torch.Generator(), []
    targets = synthesis.targets()
    chance.set_state(synthesis.chance.get_state())
    original = synthesis.generator.layers
    synthesis.generator.layers = lambda *given: drawn.append(original(*given)) or drawn[-1]
    found = synthesis.make(targets, lambda images: images.square().sum())
    layers = speaker.layers(len(targets), chance)
    with torch.no_grad():
        made = speaker(torch.cat([known["text/0"], known["text/1"]])[targets], layers)
    torch.testing.assert_close(found, ((made - 0.4) / 0.3 * 0.376 + 0.305).clamp(0, 1))
    assert not torch.equal(drawn[0][0], layers[0])
    before = [parameter.detach().clone() for parameter in synthesis.generator.parameters()]
    synthesis.make(targets, lambda images: images.square().sum())
    assert not torch.equal(drawn[1][0], drawn[0][0])
    assert any(not torch.equal(*pair) for pair in zip(before, synthesis.generator.parameters(), strict=True))


def test_every_class_is_wanted_as_often_but_for_a_remainder(tmp_path):
    ends = Ends(lander("method.synthesis_batch=11"), tmp_path)
    known = {f"text/{task}": anchors(ends, task) for task in range(2)}
    synthesis = TextSynthesis(ends.site(known, task=2), ends.method.options)
    for _ in range(5):
        counts = torch.bincount(synthesis.targets(), minlength=4)
        assert counts.sum() == 11
        assert counts.min() >= 2


@pytest.mark.parametrize(("side", "small_map"), [(32, 8), (64, 16), (65, 5), (224, 14)])
def test_large_images_are_made_in_four_doublings(side, small_map):
    assert Speaker(6, 4, (3, side, side), width=1).decoder.map[1:] == (small_map, small_map)


def test_a_run_says_that_its_embeddings_are_surrogates(tmp_path, monkeypatch):
    quick(monkeypatch)
    fedprotip.run(lander("stream.tasks=2"), out=tmp_path / "r")
    assert "surrogate text embeddings, random directions" in (tmp_path / "r" / "events.jsonl").read_text()
    assert tensors(tmp_path / "r", "text")["1"].shape == (2, 512)
    assert fedprotip.load(tmp_path / "r").predict(torch.zeros(1, 1, 8, 8))[0].label
