"""What secure sums cost in answers, on the digits: masks nothing, one reference for all next to nothing."""

import pytest
import torch

import fedprotip
from benchmarks.attacks import SETTINGS
from fedprotip.seeds import torch_stream

pytest.importorskip("cryptography")
pytest.importorskip("Crypto")

pytestmark = pytest.mark.slow

SEEDS, MODES = (0, 1, 2), ("aware", "single", "batch64")


def seeded(local, purpose, name, rows, columns):
    """Gaussians as they are without `secure`, so that both runs have the same sketch."""
    chance = torch_stream(local.settings.run.seed, purpose, local.task, local.client, name)
    return torch.randn(rows, columns, generator=chance)


def run(folder, seed, secure, sketch):
    """The run of docs/threats.md; the smallest class sums travel either way."""
    given = (f"run.seed={seed}", f"method.secure={str(secure).lower()}", "method.merge=sketch", "statistics.minimum=1")
    return fedprotip.run(fedprotip.load_settings(SETTINGS, (*given, f"method.sketch={sketch}")), out=folder)


@pytest.mark.parametrize("sketch", [0, 64])
def test_the_same_sketch_answers_the_same_with_and_without_masks(tmp_path, monkeypatch, capsys, sketch):
    """By every way of answering; which one a run chooses may differ, as no single client's counts can be bounded.

    And the vote of one reference finds as many tasks as that of five, but for two in a hundred.
    """
    monkeypatch.setattr("fedprotip.methods.parts.sketches.gaussian", seeded)
    for seed in SEEDS:
        plain, secure = (run(tmp_path / f"{seed}-{masked}", seed, masked, sketch) for masked in (False, True))
        with capsys.disabled():
            for name, summary in (("plain", plain), ("secure", secure)):
                told = {mode: round(summary["accuracy"][mode], 2) for mode in MODES}
                told |= {way: summary["routers"][way]["routing_single"] for way in ("cosine", "gaussian")}
                told |= {"cosine, 64": summary["routers"]["cosine"]["routing_batch64"]}
                print(f"\nsketch {sketch or 'd'}, seed {seed}, {name}: {told}", end="")
        assert abs(plain["accuracy"]["aware"] - secure["accuracy"]["aware"]) <= 0.2
        for way, figures in plain["routers"].items():
            for mode in ("single", "batch64"):
                allowed = 2.0 if way == "cosine" else 0.2
                assert abs(figures[mode] - secure["routers"][way][mode]) <= allowed, (way, mode)
