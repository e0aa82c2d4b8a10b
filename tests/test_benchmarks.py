"""Every benchmark really runs, in a tiny size; its two sides agree, and it notices when they do not."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import benchmarks.__main__ as command
from benchmarks import apart, engines, fleet, harness, runs, second_task, unseen
from benchmarks.extract import find_columns
from benchmarks.harness import CLEAR, Bench, Case, Figure, alternate, on_top_mb, this_machine
from benchmarks.inputs import angle, same_models
from benchmarks.load import started
from benchmarks.second_task import Size
from fedprotip import RunError, UsageError, run
from fedprotip.federation.aggregate import Average
from fedprotip.inference.routers import Vote
from fedprotip.models.prefix import Rows
from fedprotip.settings import load
from fedprotip.store.folder import RunFolder
from fedprotip.stream import build_stream
from fedprotip.subspace.basis import core_basis

pytestmark = pytest.mark.slow

MODEL = ("model.name=small_cnn", "model.width=16", "model.depth=3", "model.norm=frozen")
MODEL = (*MODEL, "model.freeze=layer1", "model.freeze_from=start")
RUN = (*MODEL, "train.batch=16", "train.lr=0.1", "run.threads=1", "method.rank_rule=energy", "method.threshold=0.9")
TINY = {
    "extract": {"images": 40, "side": 8, "columns": 24, "model": MODEL},
    "project": {"shares": (0.1, 0.75), "batch": 4, "side": 8, "model": MODEL},
    "merge": {"clients": (3,), "d": 48, "rank": 4, "shared": 16, "earlier": 8},
    "average": {"clients": (3,), "model": MODEL},
    "round": {"size": Size(4, 2, 2, RUN)},
    "task": {"size": Size(4, 2, 1, RUN)},
    "evaluate": {"tasks": 2, "images": 3, "side": 8, "clients": 3, "directions": 3, "model": MODEL},
    "clients": {"clients": (3, 6), "width": 16, "samples": 24},
    "tasks": {"tasks": 4, "rounds": 2, "epochs": 2, "window": 2, "width": 16, "train": 6, "test": 3},
    "resume": {"size": Size(4, 5, 3, RUN)},
    "secure": {"megabytes": (0.01,), "clients": (3,)},
    "masks": {"overrides": (*MODEL, "train.rounds=1", "run.threads=1"), "images": (12, 4)},
    "load": {"side": 8, "classes": 4, "images": 2, "model": MODEL},
    "serve": {"requests": 16, "clients": 2, "side": 8, "classes": 20, "images": 2, "model": MODEL},
}
SMALL_MACHINE = this_machine(side=64)


def in_this_process(function, *arguments, source=apart.SOURCE):
    """What a process of its own would do, arguments and result as JSON."""
    return json.loads(json.dumps(function(*json.loads(json.dumps(arguments))))), 1.0


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs a benchmark in its tiny size, in this process, once."""
    monkeypatch.setattr("fedprotip.api.write_report", lambda folder: folder)  # pages and plots are not tested here
    for module in (harness, second_task):
        monkeypatch.setattr(module, "run_apart", in_this_process)

    def run(name, repeats=1):
        bench = Bench(name, tmp_path, repeats, SMALL_MACHINE)
        (command.BENCHMARKS | command.CAMPAIGNS)[name](bench, **TINY[name])
        return bench

    return run


@pytest.mark.parametrize("name", command.BENCHMARKS)
def test_ours_and_the_textbook_agree(bench, name):
    found = bench(name)
    found.refuse_disagreement()
    assert found.figures
    assert len(found.figures) == len({(figure.case, figure.name) for figure in found.figures})
    assert all(case.seconds["ours"] > 0 and case.seconds["textbook"] > 0 for case in found.cases)
    assert all(case.agreement[2] < 1 for case in found.cases)


def half_the_threshold(a, earlier, threshold, rule):
    return core_basis(a, earlier, threshold / 2, rule)


def too_large(self, result=Average.result):
    return {name: 1.1 * tensor for name, tensor in result(self).items()}


def other_rows(self, numbers, read=Rows.read):
    rows = read(self, numbers)
    return replace(rows, values=0.5 * rows.values)


def other_tensors(self, store, warn, restore=RunFolder.restore):
    saved = restore(self, store, warn)
    if saved:
        next(iter(saved[1]["model"].values())).add_(1)
    return saved


def the_other_way_round(self, x, sizes, log_scores=Vote.log_scores):
    return log_scores(self, x, sizes).flip(1)


WRONG = {
    "extract": ("fedprotip.methods.parts.bases.core_basis", half_the_threshold),
    "project": ("fedprotip.subspace.project.Projector.__call__", lambda self, g: g),
    "merge": ("fedprotip.subspace.merge.UnionMerge.result", lambda self: torch.eye(48, 16)),
    "average": ("fedprotip.federation.aggregate.Average.result", too_large),
    "round": ("fedprotip.federation.aggregate.Average.result", too_large),
    "task": ("fedprotip.models.prefix.Rows.read", other_rows),
    "evaluate": ("fedprotip.inference.routers.Vote.log_scores", the_other_way_round),
    "clients": ("fedprotip.federation.aggregate.Average.result", too_large),
    "tasks": ("fedprotip.federation.aggregate.Average.result", too_large),
    "resume": ("fedprotip.store.folder.RunFolder.restore", other_tensors),
    "secure": ("fedprotip.federation.secure.masks.unmask", lambda total, *rest: total[:-1]),
    "load": ("benchmarks.load.OURS", "print('not yet')"),
    "serve": ("benchmarks.serve.HEADERS", {"Content-Type": "text/plain"}),
}


@pytest.mark.parametrize("name", command.BENCHMARKS)
def test_a_wrong_result_of_ours_is_noticed(bench, name, monkeypatch):
    monkeypatch.setattr(*WRONG[name])
    with pytest.raises(RunError, match=f"^{name}, .*: the sides disagree"):
        bench(name).refuse_disagreement()


def test_a_task_is_compared_with_fedavg_as_it_is(bench):
    found = bench("task")
    compared = [figure for figure in found.figures if "same products and cache" in figure.name]
    assert [figure.name.partition(", ")[2] for figure in compared] == ["", "by CPU seconds"]
    assert {(figure.better, figure.bar, figure.goal) for figure in compared} == {("≤", 1.3, 1.1)}
    (case,) = found.cases
    assert compared[1].value == case.cpu["ours"] / case.cpu["fedavg"] > 0


def test_default_settings_have_rows_of_their_own(tmp_path):
    size = TINY["task"]["size"]._replace(overrides=(), protocol=second_task.DEFAULTS)
    assert second_task.cpu_scale("fedprotip", tmp_path, size)["stream"] == {"tasks": 10}
    assert load(second_task.cpu_scale("fedprotip", tmp_path, size)).method.budget == "tasks"
    with pytest.raises(UsageError, match="measure the defaults with: task"):
        second_task.round(Bench("round", tmp_path, 1, SMALL_MACHINE), size)


def test_medians_of_sides_that_take_turns(bench, monkeypatch, tmp_path):
    order, times = [], iter([1.0, 9.0, 5.0, 2.0, 3.0, 4.0])

    def fake(side, source):
        order.append((side, source))
        return {"seconds": next(times)}, 10.0 * len(order)

    monkeypatch.setattr(harness, "run_apart", fake)
    sides, other = {"a": ("a",), "b": ("b",)}, tmp_path / "src"
    case = Bench("x", tmp_path, 3, {}).measure_apart("c", sides, lambda _: ("", 0.0, 0.0), {"b": other})
    assert order == [("a", apart.SOURCE), ("b", other)] * 3
    assert case.seconds == {"a": 3.0, "b": 4.0}
    assert case.peaks == {"a": 30.0, "b": 40.0}


# Two checkouts


@pytest.fixture
def other(tmp_path):
    """A checkout whose package can do next to nothing."""
    package = tmp_path / "other" / "src" / "fedprotip"
    (package / "paper").mkdir(parents=True)
    (package / "__init__.py").write_text("class RunError(Exception): ...\n\n\ndef run(*arguments): ...\n")
    protocols = "class protocol:\n    __init__ = lambda *names: None\n    row = at = lambda self, name: self\n"
    (package / "paper" / "protocols.py").write_text(protocols + "\n\nlayered = protocol\n")
    return tmp_path / "other"


def test_the_present_code_beside_another_checkout(bench, other, tmp_path, monkeypatch):
    def fake(function, *arguments, source=apart.SOURCE):
        result, peak = in_this_process(function, *arguments)
        return str(source / "fedprotip" / "__init__.py") if function is runs.first_task else result, peak

    for module in (harness, second_task):
        monkeypatch.setattr(module, "run_apart", fake)
    found = Bench("round", tmp_path, 1, SMALL_MACHINE)
    second_task.compare(found, other, **TINY["round"])
    (case,) = found.cases
    assert list(case.seconds) == ["fedprotip", "fedprotip before", "fedavg", "fedavg before"]
    assert case.agreement[1] == 0.0
    assert [(figure.value, figure.bar) for figure in found.figures if "peak" in figure.name] == [(1.0, 1.03)] * 2
    assert len(found.figures) == 6


def test_a_folder_without_the_package_is_refused(bench, tmp_path):
    with pytest.raises(UsageError, match="empty is not a checkout: it has no src/fedprotip"):
        second_task.compare(Bench("round", tmp_path, 1, SMALL_MACHINE), tmp_path / "empty", **TINY["round"])


def test_a_function_in_a_process_of_its_own(other, tmp_path):
    """With the package of another checkout, which is there without torch."""
    used, peak = apart.run_apart(runs.first_task, ["table", "row"], {}, [], str(tmp_path), source=other / "src")
    assert used == str(other / "src" / "fedprotip" / "__init__.py")
    assert peak or not CLEAR.exists()
    with pytest.raises(RunError, match=r"^The process of benchmarks.runs records failed: FileNotFoundError"):
        apart.run_apart(runs.records, str(tmp_path), "ledger.jsonl", source=other / "src")


# The command


@pytest.fixture
def call(bench, monkeypatch, capsys):
    """`python -m benchmarks …` in this process, every benchmark in its tiny size: (exit code, stdout, stderr)."""
    monkeypatch.setattr(command, "QUICK", TINY)
    monkeypatch.setattr(command, "this_machine", lambda: SMALL_MACHINE)

    def run(*arguments):
        code = 0
        try:
            command.main([*map(str, arguments), "--quick", "--repeats", "1"])
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_tables_and_json(call, tmp_path):
    code, out, err = call("average", "project", "--json", tmp_path / "results.json")
    assert code == 0
    assert "project, step, r/d 0.1" in err
    for text in ("gflops", "alone, r/d 0.1: largest", "(≥ 8: ", "(≤ 1.2: ", "(≤ 25, ≤ 10: ", ", agree\n"):
        assert text in out
    found = json.loads((tmp_path / "results.json").read_text())
    assert (found["machine"], found["quick"]) == (SMALL_MACHINE, True)
    assert [one["name"] for one in found["results"]] == ["average", "project"]
    (case,), (figure,) = found["results"][0]["cases"], found["results"][0]["figures"]
    assert set(case) == {"name", "agreement", "agrees", "seconds", "peaks", "cpu"}
    assert case["peaks"].get("textbook", 0) > 0 or not CLEAR.exists()
    assert set(figure) == {"case", "name", "value", "better", "bar", "goal", "verdict"}


def test_a_disagreement_is_one_sentence_and_fails(call, monkeypatch):
    monkeypatch.setattr(*WRONG["project"])
    code, out, _ = call("project")
    assert "DISAGREE" in out
    assert code.startswith("benchmarks: project, alone, r/d 0.1: the sides disagree")
    assert len(code.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["extrakt"], "'extrakt' is not a benchmark; did you mean 'extract' (known: "),
        (["merge", "--set", "train.lr=1"], "--data and --set are for round, task, resume"),
        (["merge", "--against", "."], "--against is for round and task"),
    ],
)
def test_wrong_arguments_are_one_sentence(call, arguments, said):
    code, _, err = call(*arguments)
    assert code == 2
    assert said in err


def test_settings_of_the_runs_can_be_changed(call):
    code, _, _ = call("round", "--set", "train.rate=1")
    assert "train.rate is not a setting" in code
    code, _, _ = call("task", "--data", "nowhere")
    assert code == f"benchmarks: data.root = 'nowhere' is not a folder (it was looked for in {Path.cwd()})."


# The parts


def test_sides_take_turns_and_the_median_counts():
    order = []
    seconds = alternate({side: lambda side=side: order.append(side) for side in "ab"}, repeats=3, least=0.0)
    assert order == list("ababab")
    assert set(seconds) == {"a", "b"}


def test_bars_from_above_and_below():
    assert Figure("", "", 10.0, "≥", 8, 20).verdict == "met"
    assert Figure("", "", 20.0, "≥", 8, 20).verdict == "goal"
    assert Figure("", "", 1.1, "≤", 1.0).verdict == "not met"
    assert Figure("", "", 1.1, "≤", None, 1.0).verdict == "not the goal"
    assert Figure("", "", 1.1).verdict == ""
    assert not Case("", ("", float("nan"), 1.0), {}, {}, {}).agrees


@pytest.mark.skipif(not CLEAR.exists(), reason="needs /proc")
def test_peak_memory_is_what_the_work_needs_on_top():
    held = torch.ones(16 * 2**20 // 4)
    assert on_top_mb(lambda: held.sum()) < 4
    assert 31 < on_top_mb(lambda: torch.cat([held, held]).sum()) < 40


def test_sampled_columns_are_found_among_all():
    every = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    chosen = torch.tensor([3, 44, 7])
    assert torch.equal(find_columns(every[:, chosen], every), chosen)
    with pytest.raises(ValueError, match="not an input of its layer"):
        find_columns(every[:, chosen] + 0.01, every)


def test_angles():
    axes = torch.eye(3)
    tilted = torch.tensor([[1.0], [0.01], [0.0]])
    assert angle(axes[:, :2], axes[:, [1, 0]]) == 0.0
    assert angle(axes[:, :1], tilted / tilted.norm()) == pytest.approx(0.01, rel=1e-3)
    assert angle(axes[:, :1], axes[:, :2]) == pytest.approx(torch.pi / 2)


def test_models_are_compared_by_how_far_they_moved(tmp_path):
    paths = [tmp_path / name for name in "abc"]
    for path, value in zip(paths, (1.3, 1.2, 1.0), strict=True):
        save_file({"w": torch.tensor([value])}, path)
    assert same_models(*paths)[1] == pytest.approx(0.5, rel=1e-4)
    assert same_models(paths[2], paths[2], paths[2])[1] == 0.0


def test_a_sketch_with_and_without_masks(bench):
    """Runs that differ by nothing but method.secure: the same answers, and twice the bytes of what is summed."""
    pytest.importorskip("cryptography")
    pytest.importorskip("Crypto")
    (case,) = bench("masks").cases
    assert case.agrees
    plain, secure = case.results["plain"], case.results["secure"]
    assert 1.7 < secure["sent"] / plain["sent"] < 2.3
    assert secure["received"] / plain["received"] < 1.5


def test_a_new_process_keeps_what_python_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert started("import sys; print(sys.dont_write_bytecode)", tmp_path)[0] == "False"


def test_the_fleet_is_simulated_and_tasks_are_measured(tmp_path, capsys):
    fleet.main(["--megabytes", "0.1", "--clients", "10", "1000", "--seeds", "3"])
    ten, thousand = capsys.readouterr().out.splitlines()[-2:]
    assert thousand.startswith("| 1,000 | ")
    crowd, costs = fleet.Crowd(), fleet.Costs(10**6, 0.01, 0.01)
    rounds = [fleet.simulate(10, costs, crowd, seed).seconds for seed in range(3)]
    assert fleet.middle(lambda seed: fleet.simulate(10, costs, crowd, seed), 3).seconds == sorted(rounds)[1]
    assert len(ten.split("|")) == len(thousand.split("|")) == 12
    rows = fleet.over_tasks(2, tmp_path)
    assert [row[0] for row in rows] == [1, 2]
    assert all(size > 0 for row in rows for size in row)


def test_engines_are_compared_by_the_bytes_of_their_models(tmp_path, monkeypatch):
    """Flower itself is left out, tests/flower has it: all three are local, and the third is spoiled at the end."""

    def locally(settings, overrides, out):
        return run(settings, ["run.engine=local"], out=out)

    def elsewhere(folder, clients, most):
        shutil.copytree(folder / "local", folder / "superlink", dirs_exist_ok=True)
        if spoiled:
            (folder / "superlink" / "model.safetensors").write_bytes(b"another model")

    monkeypatch.setattr(engines, "run", locally)
    monkeypatch.setattr(engines, "_over_superlink", elsewhere)
    for spoiled in (False, True):
        (folder := tmp_path / str(spoiled)).mkdir()
        bench = Bench("engines", folder, 1, SMALL_MACHINE)
        engines.engines(bench, width=16, rounds=2)
        assert {figure.name.rpartition(" ")[2] for figure in bench.figures} == {"simulation", "superlink"}
        if not spoiled:
            bench.refuse_disagreement()
    with pytest.raises(RunError, match="the sides disagree"):
        bench.refuse_disagreement()


def test_made_up_images_are_data_of_ones_own(tmp_path):
    """The same every time, whatever the machine has installed, and as a run reads them."""
    for folder in ("one", "other"):
        unseen.write(tmp_path / folder, (5, 2), (5, 2))
    assert len(unseen.fonts()) == 20
    for name, shape, classes in (("letters", [1, 28, 28], 20), ("textures", [3, 32, 32], 12)):
        one, other = (np.load(tmp_path / folder / f"{name}.npz") for folder in ("one", "other"))
        assert all(np.array_equal(one[part], other[part]) for part in ("x_train", "y_train", "x_test", "y_test"))
        settings = load({"data": {"source": str(tmp_path / f"one/{name}.npz")}, "stream": {"tasks": 2}})
        stream = build_stream(settings)
        assert (list(stream.dataset.image_shape), len(stream.dataset.classes)) == (shape, classes)
