"""A run folder answers alone, as its own evaluation did."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

import fedprotip
from fedprotip.evaluation.portions import draw_groups
from fedprotip.inference.soundness import check_model
from fedprotip.methods import base
from fedprotip.settings import KNOWN, load
from fedprotip.stream import build_stream
from fedprotip.stream import stream as streams
from tests.damage import vouched
from tests.small import REDUCED, forged, quick, small

SETTINGS = {
    "stream": {"tasks": 3, "task_size": 2},
    "clients": {"count": 3, "held_back": 0.15},
    "model": {"name": "mlp", "width": 64, "depth": 2},
    "train": {"rounds": 4, "epochs": 3, "lr": 0.1, "batch": 16},
    "method": {"rank_rule": "energy", "threshold": 0.98},
}
SCENARIOS = {
    "classes": {"stream": {"tasks": 3, "task_size": 2}},
    "overlap": {"stream": {"tasks": 3, "task_size": 3, "overlap": 1}, "data": {"size": 9}},
    "domains": {"stream": {"scenario": "domain", "tasks": 2, "domains": "permute", "task_size": 0}},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("asked") / "run"
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        return path, fedprotip.run(SETTINGS, out=path)


@pytest.fixture(scope="module")
def predictor(run):
    return fedprotip.load(run[0])


@pytest.fixture(scope="module")
def stream():
    return build_stream(load(SETTINGS | {"stream": {"tasks": 5, "task_size": 2}}))


@pytest.fixture
def copied(run, tmp_path):
    """The folder somewhere else, to be spoiled."""
    return shutil.copytree(run[0], tmp_path / "copied")


def images_of(stream, task, count=60):
    """Test images of a task as they are before any normalisation, and the names of their classes."""
    chosen = torch.from_numpy(stream.tasks[task].test[:count])
    labels = [stream.dataset.classes[int(label)] for label in stream.dataset.test_labels[chosen]]
    return stream._shift(stream.dataset.test_images[chosen], task), labels


def share(answers, labels):
    return sum(answer.label == label for answer, label in zip(answers, labels, strict=True)) / len(labels)


def possible(method, **sections):
    """Small settings that a method accepts: with several clients, or else with one."""
    for count in (3, 1):
        settings = small(method={"name": method, **REDUCED.get(method, {})}, clients={"count": count}, **sections)
        try:
            base.create_method(settings)
        except fedprotip.UsageError:
            continue
        return settings
    pytest.skip(f"{method} does not run in this scenario")


def unreachable(*args, **kwargs):
    raise AssertionError("training data or a method was asked for")


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("method", sorted(KNOWN["method.name"]))
def test_a_copied_folder_without_the_data_answers_as_the_evaluation_did(tmp_path, monkeypatch, method, scenario):
    quick(monkeypatch)
    settings = possible(method, **SCENARIOS[scenario])
    accuracy = fedprotip.run(settings, out=tmp_path / "run")["accuracy"]
    stream = build_stream(settings)
    asked = [images_of(stream, task, 10_000) for task in range(len(stream.tasks))]
    for name in ("manifest.json", "plan.json", *(path.name for path in (tmp_path / "run").glob("*.safetensors"))):
        (tmp_path / "copied").mkdir(exist_ok=True)
        shutil.move(tmp_path / "run" / name, tmp_path / "copied" / name)
    shutil.rmtree(tmp_path / "run")
    monkeypatch.setattr(streams, "load_dataset", unreachable)
    monkeypatch.setattr(base, "_methods", {})

    predictor = fedprotip.load(tmp_path / "copied")
    inference, found = predictor.inference, {mode: [] for mode in accuracy}
    for task, (images, labels) in enumerate(asked):
        numbers = torch.tensor([predictor.plan.classes.index(label) for label in labels])
        heard = predictor.hear(images)
        found["aware"].append(share(predictor.predict(images, task=task), labels))
        found["agnostic"].append((inference.agnostic(heard) == numbers).double().mean().item())
        if inference.ways:
            found["single"].append(share(predictor.predict(images), labels))
            routed = inference.route(heard, inference.chosen, draw_groups(task, len(images), settings))
            found["batch64"].append((routed.labels == numbers[routed.samples]).double().mean().item())
        else:
            assert share(predictor.predict(images), labels) == found["agnostic"][-1]
    assert {mode: sum(100 * value for value in values) / len(asked) for mode, values in found.items()} == accuracy


@pytest.mark.parametrize("place", ["router", "expert", "chosen", "name"])
def test_names_without_end_make_no_sentence_without_end(copied, place):
    path = copied
    plan = json.loads((path / "plan.json").read_text())
    way = plan["answering"]["ways"][plan["answering"]["chosen"]]
    {"chosen": plan["answering"], "name": plan["model"]}.get(place, way)[place] = "x" * 10**4
    vouched(path, "plan.json", json.dumps(plan).encode())
    with pytest.raises(fedprotip.FedprotipError) as refused:
        fedprotip.load(path)
    assert len(str(refused.value).replace(str(path), "")) < 600


def test_every_answer_says_how_sure_it_is(predictor, stream):
    answers = predictor.predict(images_of(stream, 1)[0])
    assert all(0 < answer.probability <= 1.001 for answer in answers)
    assert all(answer.probability <= answer.task_probability + 1e-4 for answer in answers)
    assert len({answer.probability for answer in answers}) > 10


@pytest.mark.slow
def test_pictures_of_nothing_are_flagged(tmp_path):
    """By default, at 5 % false alarms: noise, pictures of one shade, and digits whose pixels have been shuffled."""
    fedprotip.run({"train": {"rounds": 3}}, out=tmp_path / "r")
    predictor, chance = fedprotip.load(tmp_path / "r"), torch.Generator().manual_seed(0)
    digits = torch.cat([images_of(build_stream(load({})), task)[0] for task in range(5)])
    shade = torch.randint(0, 256, (100, 1, 1, 1), generator=chance, dtype=torch.uint8)
    odd = {
        "noise": torch.randint(0, 256, (100, 1, 8, 8), generator=chance, dtype=torch.uint8),
        "one shade": shade.expand(-1, 1, 8, 8),
        "shuffled": digits.flatten(2)[..., torch.randperm(64, generator=chance)].view_as(digits),
    }

    def flagged(images):
        return sum(answer.unusual > 0.95 for answer in predictor.predict(images)) / len(images)

    assert flagged(digits) < 0.1
    for what, images in odd.items():
        assert flagged(images) >= 0.95, what


def test_digits_that_were_never_learned_look_unusual(predictor, stream):
    known = torch.tensor([answer.unusual for answer in predictor.predict(images_of(stream, 0)[0])])
    unknown = torch.tensor([answer.unusual for answer in predictor.predict(images_of(stream, 4)[0])])
    assert known.min() >= 0
    assert unknown.max() <= 1
    assert unknown.mean() > known.mean() + 0.2


@pytest.mark.parametrize("router", ["fused", "cosine"])
def test_images_that_come_together_help_each_other(predictor, stream, router, tmp_path, monkeypatch):
    if router == "cosine":
        quick(monkeypatch)
        fedprotip.run(SETTINGS, ["method.router=cosine"], out=tmp_path / "cosine")
        predictor = fedprotip.load(tmp_path / "cosine")
    images, labels = images_of(stream, 1)
    together = predictor.predict(images, group=True)
    assert share(together, labels) >= share(predictor.predict(images), labels)
    assert {answer.task for answer in together} == {1}


def test_whoever_knows_the_task_gets_answers_of_it(predictor, stream):
    images, _ = images_of(stream, 0)
    answers = predictor.predict(images, task=2)
    assert {answer.label for answer in answers} <= {"4", "5"}
    assert {answer.task for answer in answers} == {2}
    assert all(answer.task_probability == pytest.approx(1.0) for answer in answers)
    with pytest.raises(
        fedprotip.UsageError, match=r"task = 3: tasks count from 0, and this run has learned 3 of them\."
    ):
        predictor.predict(images, task=3)


@pytest.mark.parametrize("method", ["fedprotip", "pec", "scr"])
def test_a_process_that_answers_never_imports_what_trains(run, stream, tmp_path, monkeypatch, method):
    images, _ = images_of(stream, 0, 3)
    folder = run[0]
    if method != "fedprotip":
        quick(monkeypatch)
        folder = tmp_path / "run"
        fedprotip.run(possible(method), out=folder)
    np.save(tmp_path / "images.npy", images.numpy())
    code = (
        "import sys, numpy, fedprotip;"
        f"found = fedprotip.load({str(folder)!r}).predict(numpy.load({str(tmp_path / 'images.npy')!r}));"
        "bad = ('fedprotip.' + n for n in ('methods', 'federation', 'evaluation', 'report', 'api', 'stream.datasets'));"
        "print(len(found), [n for n in (*bad, 'matplotlib', 'sklearn', 'rich', 'typer') if n in sys.modules],"
        "fedprotip.Settings.__pydantic_complete__)"  # settings of training have their checks made when they are read
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "3 [] False"


def test_weights_as_large_as_numbers_go_are_numbers():
    weights = {"heads.0.bias": torch.full((4,), 3e38)}
    check_model(weights, weights)


def test_asking_once_is_loading_and_predicting(run, predictor, stream):
    images, _ = images_of(stream, 1, 5)
    assert fedprotip.ask(run[0], images) == predictor.predict(images) == predictor.predict(images.float())


def test_many_images_pass_in_parts(predictor, stream, monkeypatch):
    images, _ = images_of(stream, 1)
    whole = predictor.predict(images)
    monkeypatch.setattr("fedprotip.inference.predictor.TOGETHER", 7)
    assert [answer.label for answer in predictor.predict(images)] == [answer.label for answer in whole]


@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (2, 8, 8), (2, 1, 9, 8), (2, 40, 30, 3)])
def test_images_of_another_shape_are_brought_to_that_of_training(predictor, shape):
    assert len(predictor.predict(torch.zeros(shape))) == 2
    assert len(predictor.predict(torch.zeros(8, 8))) == 1


@pytest.mark.parametrize("shape", [(0, 1, 8, 8), (8,), (1, 1, 1, 8, 8)])
def test_what_cannot_be_images_is_refused(predictor, shape):
    with pytest.raises(fedprotip.UsageError, match=r"[Ii]mages"):
        predictor.predict(torch.zeros(shape))


# Loading


@pytest.mark.parametrize("name", ["plan.json", "model", "subspaces", "references", "statistics", "calibration"])
@pytest.mark.parametrize("how", ["changed", "missing"])
def test_a_file_that_is_not_the_one_of_the_run_is_named_and_not_used(copied, name, how):
    path = copied / (name if "." in name else f"{name}.safetensors")
    if how == "missing":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1  # also within the numbers of a tensor, where nothing else would notice
        path.write_bytes(data)
    words = {"changed": "was changed since the run ended", "missing": "is missing"}[how]
    with pytest.raises(fedprotip.RunError, match=rf"{path.name} {words}") as error:
        fedprotip.load(copied)
    assert "\n" not in str(error.value)


def test_a_run_that_is_not_finished_says_so(copied):
    folder = fedprotip.api.RunFolder.open(copied)
    folder.write_manifest("running", folder.manifest().settings)
    with pytest.raises(fedprotip.UsageError, match="not finished; finish it first with: fedprotip resume"):
        fedprotip.load(copied)


def test_a_run_of_an_early_version_says_so(copied):
    folder = fedprotip.api.RunFolder.open(copied)
    (copied / "plan.json").unlink()
    folder.write_manifest("finished", folder.manifest().settings)
    with pytest.raises(fedprotip.UsageError, match=r"has no plan\.json: it is of an early version"):
        fedprotip.load(copied)


def test_a_plan_of_another_version_says_what_it_does_not_know(copied):
    folder = fedprotip.api.RunFolder.open(copied)
    plan = json.loads((copied / "plan.json").read_text())
    folder.write_json("plan.json", plan | {"model": plan["model"] | {"wings": 2}})
    folder.write_manifest("finished", folder.manifest().settings)
    with pytest.raises(fedprotip.RunError, match=r"plan\.json is of another version: model\.wings: .*\.$"):
        fedprotip.load(copied)


def test_a_backbone_that_is_not_registered_here_or_is_another_one_is_a_sentence(tmp_path, monkeypatch):
    from fedprotip.models import heads, register

    quick(monkeypatch)
    monkeypatch.setitem(KNOWN, "model.name", dict(KNOWN["model.name"]))
    monkeypatch.setattr(heads, "_builders", dict(heads._builders))
    register("mine")(lambda settings, shape: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 12)))
    fedprotip.run(small("train.rounds=1", model={"name": "mine"}), out=tmp_path / "r")
    assert fedprotip.load(tmp_path / "r").network.features == 12
    register("mine")(lambda settings, shape: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 13)))
    with pytest.raises(fedprotip.UsageError, match=r"'mine' as it is registered .* is not the backbone of the run"):
        fedprotip.load(tmp_path / "r")
    del heads._builders["mine"]
    with pytest.raises(fedprotip.UsageError, match=r"'mine' is not registered .* first import what calls"):
        fedprotip.load(tmp_path / "r")


@pytest.mark.parametrize("name", ["../model.safetensors", "/model.safetensors", "a/b.safetensors"])
def test_a_manifest_that_names_files_elsewhere_is_refused(copied, name):
    with forged(copied) as manifest:
        manifest["files"][name] = manifest["files"]["model.safetensors"]
    with pytest.raises(fedprotip.RunError, match="not the name of a file of the folder"):
        fedprotip.load(copied)


def test_a_manifest_without_a_model_is_a_sentence(copied):
    with forged(copied) as manifest:
        del manifest["files"]["model.safetensors"]
    with pytest.raises(fedprotip.RunError, match=r"names no model\.safetensors"):
        fedprotip.load(copied)


def test_tensors_that_do_not_fit_the_plan_are_a_sentence(copied):
    """Hashes prove that files are those of the manifest, not that somebody made them well."""
    with forged(copied) as manifest:
        del manifest["files"]["statistics.safetensors"]
    with pytest.raises(fedprotip.RunError, match=r"plan\.json and the tensors do not fit together \(KeyError"):
        fedprotip.load(copied)


def tensor(name, change):
    """Replace a tensor of FILE/NAME by another, with a hash that fits."""
    file, _, key = name.partition("/")

    def forge(folder):
        path = folder / f"{file}.safetensors"
        found = load_tensors(path.read_bytes())
        found[key] = change(found[key]).contiguous()
        vouched(folder, path.name, save_tensors(found))

    return forge


def plan(*keys, value):
    """Replace an entry of the plan, with a hash that fits."""

    def forge(folder):
        whole = part = json.loads((folder / "plan.json").read_text())
        for key in keys[:-1]:
            part = part[key]
        part[keys[-1]] = value
        vouched(folder, "plan.json", json.dumps(whole).encode())

    return forge


FORGED = {
    "weights that are no numbers": (tensor("model/heads.0.bias", lambda t: t * torch.nan), "not finite"),
    "weights of another kind": (tensor("model/heads.0.bias", torch.Tensor.half), "float16, and should be"),
    "weights of another shape": (tensor("model/heads.0.bias", lambda t: t[:1]), "heads.0.bias differs"),
    "a moment that is too short": (tensor("statistics/moment", lambda t: t[:-1]), "statistics/moment has shape"),
    "statistics that are no numbers": (tensor("statistics/sums", lambda t: t / 0), "not finite"),
    "negative counts": (tensor("statistics/counts", lambda t: t - 1e9), "are negative"),
    "statistics of another kind": (tensor("statistics/counts", torch.Tensor.float), "not float64"),
    "a class too many": (tensor("statistics/counts", lambda t: torch.cat([t, t])), "statistics/counts has shape"),
    "another grid": (tensor("calibration/loss", lambda t: t[:, :3]), "calibration/loss has shape"),
    "an endless reference": (tensor("references/values", lambda t: t * torch.inf), "not finite"),
    "fewer clients": (tensor("references/clients", lambda t: t[:1]), "references/counts has shape"),
    "a basis of other features": (tensor("subspaces/routing/0001", lambda t: t[:-1]), "routing/0001 has shape"),
    "a map to very many features": (
        plan("answering", "experts", "statistics", "features", value=10**12),
        "needs sketches",
    ),
    "a seed that is none": (plan("answering", "experts", "statistics", "seed", value="x"), "do not fit"),
    "a very wide network": (plan("model", "width", value=10**12), "differs|do not fit|model.width"),
    "a very deep network": (plan("model", "depth", value=10**12), "model.depth|differs"),
    "an image without end": (plan("pixels", "shape", value=[1, 10**6, 10**6]), "no image, or has more than"),
    "files without end": (plan("pixels", "resize", value=[10**6, 10**6]), "no image, or has more than"),
    "no spread of colours": (plan("pixels", "std", value=[0.0]), "not above 0"),
    "classes without a name": (plan("tasks", 0, "classes", value=[0, 99]), "a class without a name"),
    "a task without classes": (plan("tasks", 0, "classes", value=[]), "has no classes"),
    "another number of tasks": (plan("tasks", value=[{"name": "one", "classes": [0, 1]}]), "differs|heads"),
    "an expert nobody knows": (plan("answering", "experts", "mine", value={}), "'mine' is not registered"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_folder_that_somebody_made_badly_is_a_sentence(copied, what):
    """The hashes fit, and still no answer is made of it, no memory is taken for it, and there is no traceback."""
    forge, words = FORGED[what]
    forge(copied)
    with pytest.raises(fedprotip.FedprotipError, match=words) as error:
        fedprotip.load(copied)
    assert "\n" not in str(error.value)


def test_groups_are_named_one_by_one(predictor, stream):
    images, _ = images_of(stream, 1, 6)
    others, _ = images_of(stream, 2, 6)
    mixed = torch.stack([images, others], 1).flatten(0, 1)
    named = predictor.predict(mixed, group=["a", "b"] * 6)
    apart = [predictor.predict(part, group=True) for part in (images, others)]
    for place, answer in enumerate(named):
        expected = apart[place % 2][place // 2]
        assert (answer.label, answer.task) == (expected.label, expected.task)
        assert answer.probability == pytest.approx(expected.probability, abs=1e-4)
    with pytest.raises(fedprotip.UsageError, match="group names 2 images, and there are 12"):
        predictor.predict(mixed, group=["a", "b"])


def test_probabilities_of_all_classes_go_with_the_answers(predictor, stream):
    images, _ = images_of(stream, 1, 20)
    found = predictor.predict_proba(images)
    assert found.shape == (20, len(predictor.classes_))
    assert found.sum(1) == pytest.approx(1, abs=1e-4)
    for row, answer in zip(found, predictor.predict(images), strict=True):
        assert predictor.classes_[row.argmax()] == answer.label
        assert row.max() == pytest.approx(answer.probability, abs=1e-4)


def test_relevance_is_the_share_of_features_in_every_subspace(predictor, stream):
    images = images_of(stream, 1)[0]
    found = predictor.relevance(predictor.hear(images))
    bases = predictor.inference.ways["cosine"].router.cosine.bases
    pixels = predictor.plan.pixels.normalised(images.float() / 255)
    features = predictor.look(pixels).final
    expected = torch.stack([(features @ basis).norm(dim=1) for basis in bases], 1)
    assert torch.allclose(found, expected / expected.amax(1, keepdim=True), atol=1e-4)


def test_names_of_groups_may_be_a_tensor_or_an_array(predictor, stream):
    images = stream.dataset.test_images[:4]
    expected = predictor.predict(images, group=[0, 0, 1, 1])
    assert predictor.predict(images, group=torch.tensor([0, 0, 1, 1])) == expected
    assert predictor.predict(images, group=np.array([0, 0, 1, 1])) == expected


@pytest.mark.parametrize("asked", [{"group": 5}, {"group": "ab"}, {"group": [[1], [2]]}, {"task": "1"}, {"task": 0.5}])
def test_what_is_no_group_or_task_is_a_sentence(predictor, asked):
    ((name, value),) = asked.items()
    with pytest.raises(fedprotip.UsageError, match=re.escape(f"{name} = {value!r}")):
        predictor.predict(torch.zeros(2, 1, 8, 8), **asked)


def test_similarity_is_largest_for_the_task_of_an_image(predictor, stream):
    """Which relevance is not: the subspace of the first task holds most of every image."""
    cosine = predictor.inference.ways["cosine"].router.cosine
    for task in range(3):
        heard = predictor.hear(images_of(stream, task)[0])
        found, query = predictor.similarity(heard), heard.evidence["cosine"].sqrt()
        plain = [torch.cosine_similarity(query[:, None], each.float()[None], dim=2) for each in cosine.references]
        assert torch.allclose(found, torch.stack(plain).mean(0), atol=1e-5)
        assert (found.argmax(1) == task).float().mean() > 0.6


def test_without_subspaces_there_is_no_relevance(tmp_path, monkeypatch):
    quick(monkeypatch)
    fedprotip.run(SETTINGS | {"method": {"name": "fedavg"}}, out=tmp_path / "run")
    predictor = fedprotip.load(tmp_path / "run")
    heard = predictor.hear(torch.zeros(2, 1, 8, 8))
    assert predictor.relevance(heard) is None
    assert predictor.similarity(heard) is None
