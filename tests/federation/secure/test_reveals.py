"""What a sum says all the same: an image from the class mean of few samples; and what noise promises and costs."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

import fedprotip
from fedprotip import UsageError
from fedprotip.api import check
from fedprotip.federation.secure.desk import blurred
from fedprotip.inference.statistics import FeatureMap
from fedprotip.messages import BadMessage, Message
from fedprotip.methods import create_method
from fedprotip.methods.parts.private import epsilon
from fedprotip.models import build_network
from fedprotip.stream.datasets import load_dataset
from tests.small import quick, small

pytest.importorskip("cryptography")
pytest.importorskip("Crypto")

DOCUMENT = Path(__file__).parents[3] / "docs" / "privacy.md"
MODES = {"plain": {}, "sketch": {"merge": "sketch"}, "secure": {"secure": True}}


def documented(mode):
    """Kinds of messages that the table of docs/privacy.md says a server sees in a mode, and how."""
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| (\w+) \| (\w+) \| (\w+) \|$", DOCUMENT.read_text(encoding="utf-8"), re.M)
    return {kind: seen[list(MODES).index(mode)] for kind, *seen in rows if seen[list(MODES).index(mode)] != "no"}


@pytest.mark.parametrize("mode", MODES)
def test_the_table_of_who_sees_what_is_the_ledger(tmp_path, monkeypatch, mode):
    quick(monkeypatch)
    raw = {"stream": {"tasks": 1}, "clients": {"count": 3, "held_back": 0.1}, "model": {"width": 16}}
    raw |= {"train": {"rounds": 1, "head_start": "closed"}, "method": {"name": "fedprotip", **MODES[mode]}}
    fedprotip.run({**raw, "run": {"threads": 1}}, out=tmp_path / "r")
    found = [json.loads(line) for line in (tmp_path / "r" / "ledger.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in found if line["direction"] == "up"} == documented(mode).keys()
    assert set(documented(mode).values()) == ({"each", "sum"} if mode == "secure" else {"each"})
    if mode == "secure":
        exchanges = create_method(fedprotip.load_settings(raw)).exchanges
        summed = {kind for kind, seen in documented(mode).items() if seen == "sum"}
        assert {one.name for one in exchanges if not one.in_clear} == summed


def image_from(mean, network, typical, steps=300):
    """An image with these mapped features, by descent from a typical one of the class; the map is squared back."""
    image = typical.reshape(1, 1, 8, 8).clone().requires_grad_()
    optimizer, wanted = torch.optim.Adam([image], lr=0.01), mean.sign() * mean.square()
    for _ in range(steps):
        loss = (network.embed(image) - wanted).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            image.clamp_(0, 1)
    return image.detach().flatten()


def likeness(one, other):
    return float(torch.corrcoef(torch.stack([one, other]))[0, 1])


def reconstructed(samples, classes=range(10), width=256):
    """Likeness of the image that a class mean of so many samples leads to, and of any image of that class: to the
    sample that is most like it, mean over classes."""
    settings = fedprotip.load_settings({"model": {"width": width}})
    network = build_network(settings, (1, 8, 8), True).eval().requires_grad_(False)
    data, change = load_dataset(settings.data), FeatureMap(network.features, root=True, final=True)
    images, labels = data.train_images.float() / 255, torch.as_tensor(data.train_labels)
    found, anyway = [], []
    for known in classes:
        own = images[labels == known][: samples + 50]
        some, others = own[:samples], own[samples:]
        typical = others.mean(0).flatten()
        image = image_from(change(network.embed(some)).mean(0), network, typical)
        found.append(max(likeness(image, one.flatten()) for one in some))
        anyway.append(max(likeness(typical, one.flatten()) for one in some))
    return sum(found) / len(found), sum(anyway) / len(anyway)


@pytest.mark.slow
def test_a_class_mean_of_one_sample_gives_it_away_and_one_of_many_does_not(capsys):
    found = {samples: reconstructed(samples) for samples in (1, 2, 5, 20)}
    with capsys.disabled():
        for samples, (by_mean, anyway) in found.items():
            print(f"\nreconstruction: {samples} samples: {by_mean:.2f}, by a typical image {anyway:.2f}")
    assert found[1][0] > 0.99 > found[1][1]
    gained = {samples: by_mean - anyway for samples, (by_mean, anyway) in found.items()}
    assert gained[20] < 0.05 < 0.1 < gained[1]


# Noise


def test_epsilon_is_that_of_the_gaussian_mechanism():
    """By the accountant; a bound of Rényi's divergence by hand lies close above it."""
    pytest.importorskip("dp_accounting")
    for noise, sums in ((1.0, 1), (2.0, 10), (5.0, 40)):
        by_hand = min(sums * a / (2 * noise**2) + math.log(1e5) / (a - 1) for a in (1 + x / 20 for x in range(1, 2000)))
        assert 0.6 * by_hand < epsilon(noise, sums) <= by_hand * 1.001


def test_an_update_is_cut_and_its_noise_is_shared():
    options = small(method={"name": "fedavg", "secure": True, "secure_noise": 2.0, "secure_clip": 0.5}).method
    stood = {"a": torch.zeros(40_000), "b": torch.ones(3)}
    message = Message(
        "model", {"a": torch.zeros(40_000), "b": torch.tensor([4.0, 5.0, 1.0])}, {"samples": 7, "loss": 2.5}
    )
    told = blurred(message, stood, options, least=4)
    deviation = 2.0 * 0.5 / 2
    assert abs(told.tensors["a"].std() / deviation - 1) < 0.03
    assert told.meta == {"samples": 1, "loss": 0.0}
    still = blurred(message, stood, options.model_copy(update={"secure_noise": 1e-9}), least=4)
    torch.testing.assert_close(still.tensors["b"] - 1, torch.tensor([0.3, 0.4, 0.0]))
    short = Message("model", {"a": torch.zeros(2), "b": stood["b"] + 0.1}, {})
    kept = blurred(short, {"a": None, "b": stood["b"]}, options.model_copy(update={"secure_noise": 1e-9}), least=4)
    torch.testing.assert_close(kept.tensors["b"], stood["b"] + 0.1)


@pytest.mark.parametrize(
    ("method", "overrides", "sentence"),
    [
        ("fedprotip", (), "'statistics' would be summed without noise; choose method.name = 'fedavg'"),
        ("fedavg", ("train.head_start=closed",), "choose train.head_start = 'random'"),
        ("fedavg", ("train.average=weighted",), "needs train.average = 'uniform'"),
        ("fedavg", ("method.secure=false",), "needs method.secure = true"),
        ("fedavg", ("train.wire=bf16",), "needs train.wire = 'float32'"),
        ("pec", (), "'students' would be summed without noise"),
    ],
)
def test_noise_is_promised_for_updates_alone(method, overrides, sentence):
    raw = {"name": method, "secure": True, "secure_noise": 1.0} | ({"merge": "sketch"} if method == "fedprotip" else {})
    with pytest.raises(UsageError, match=sentence):
        create_method(small("train.average=uniform", *overrides, method=raw))


def test_running_statistics_get_no_noise():
    """The run is refused before it begins; with statistics that stand still it is not."""
    pytest.importorskip("dp_accounting")
    raw = {"name": "fedavg", "secure": True, "secure_noise": 1.0}
    given = small("train.average=uniform", method=raw, model={"name": "small_cnn"})
    with pytest.raises(UsageError, match=r"running statistics of '\S+', .* choose model.norm = 'frozen'"):
        check(given)
    check(fedprotip.load_settings(given, ["model.norm=frozen"]))


def test_a_sum_that_is_refused_was_seen_and_is_counted(tmp_path, monkeypatch):
    pytest.importorskip("dp_accounting")
    quick(monkeypatch)

    def refuse(whole, server, exchange):
        if server.progress.round == 1:
            raise BadMessage("not like those before")

    monkeypatch.setattr("fedprotip.federation.secure.sums.check_whole", refuse)
    raw = {"name": "fedavg", "secure": True, "secure_noise": 5.0, "secure_clip": 0.5}
    summary = fedprotip.run(small("train.average=uniform", "stream.tasks=1", method=raw), out=tmp_path / "r")
    assert "no sum of 'model': not like those before" in (tmp_path / "r" / "events.jsonl").read_text(encoding="utf-8")
    assert summary["privacy"]["sums"] == 3


def test_a_run_says_what_its_noise_promises(tmp_path, monkeypatch):
    pytest.importorskip("dp_accounting")
    quick(monkeypatch)
    raw = {"name": "fedavg", "secure": True, "secure_noise": 5.0, "secure_clip": 0.5}
    summary = fedprotip.run(small("train.average=uniform", "stream.tasks=2", method=raw), out=tmp_path / "r")
    said = f"in 6 rounds with (ε, δ) = ({epsilon(5.0, 6):.3g}, 1e-05)"
    assert said in (tmp_path / "r" / "events.jsonl").read_text(encoding="utf-8")
    assert summary["privacy"] == {"epsilon": pytest.approx(epsilon(5.0, 6)), "delta": 1e-5, "sums": 6}
    summary = fedprotip.extend(tmp_path / "r", tasks=1)
    assert summary["privacy"] == {"epsilon": pytest.approx(epsilon(5.0, 9)), "delta": 1e-5, "sums": 9}
