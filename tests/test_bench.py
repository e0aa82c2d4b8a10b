"""Every benchmark really runs, in a tiny size; its two sides agree, and it notices when they do not."""

import json
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from fedprotip.bench import BENCHMARKS
from fedprotip.bench.average import AverageSize
from fedprotip.bench.base import Agreement, Benchmark, Case, Measured, Size, Target, row
from fedprotip.bench.clients import ClientsSize
from fedprotip.bench.evaluate import EvaluateSize
from fedprotip.bench.extract import ExtractSize, angle, find_columns
from fedprotip.bench.federated import change
from fedprotip.bench.measure import alternate, this_machine
from fedprotip.bench.merge import MergeSize
from fedprotip.bench.probe import CLEAR, Probe, in_own_process, in_process
from fedprotip.bench.project import ProjectSize
from fedprotip.bench.resume import ResumeSize
from fedprotip.bench.round import RoundSize
from fedprotip.bench.runner import run_benchmark
from fedprotip.bench.task import TaskSize
from fedprotip.bench.tasks import TasksSize
from fedprotip.cli import app as cli
from fedprotip.cli import bench as bench_cli
from fedprotip.errors import RunError
from fedprotip.federation.aggregate import Average
from fedprotip.inference.routers import Vote
from fedprotip.models.prefix import Rows
from fedprotip.store.folder import RunFolder
from fedprotip.subspace.basis import core_basis

MODEL = ("model.name=small_cnn", "model.width=16", "model.depth=3", "model.norm=frozen")
MODEL = (*MODEL, "model.freeze=layer1", "model.freeze_from=start")
RUN = (*MODEL, "train.batch=16", "train.lr=0.1", "run.threads=1", "method.rank_rule=energy", "method.threshold=0.9")
TINY = {
    "extract": ExtractSize(repeats=1, images=40, side=8, columns=24, model=MODEL),
    "project": ProjectSize(repeats=1, shares=(0.1, 0.75), batch=4, side=8, model=MODEL),
    "merge": MergeSize(repeats=1, clients=(3,), d=48, rank=4, shared=16, earlier=8),
    "average": AverageSize(repeats=1, clients=(3,), model=MODEL),
    "round": RoundSize(repeats=1, train=4, overrides=RUN),
    "task": TaskSize(repeats=1, train=4, test=2, rounds=1, overrides=RUN),
    "evaluate": EvaluateSize(repeats=1, tasks=2, images=3, side=8, clients=3, directions=3, model=MODEL),
    "clients": ClientsSize(repeats=2, clients=(3, 6), width=16, samples=24),
    "tasks": TasksSize(repeats=2, tasks=4, rounds=2, epochs=2, window=2, width=16, train=6, test=3),
    "resume": ResumeSize(repeats=1, train=4, overrides=RUN),
}
KEYS = {"case", "ours_seconds", "textbook_seconds", "speedup", "ours_peak_mb", "textbook_peak_mb", "agreement"}
KEYS |= {"figure", "value", "better", "bar", "goal", "met", "goal_met"}
SMALL_MACHINE = this_machine(side=64)


@pytest.fixture(autouse=True)
def _no_reports(monkeypatch):
    """Pages and plots of the runs inside a benchmark are not what is tested here."""
    monkeypatch.setattr("fedprotip.api.write_report", lambda folder: folder)


def run(name):
    def probe(benchmark, size, case, side, folder):
        return in_process(benchmark, size, case, side, folder) if case.apart else Probe(0.0, 1.0)

    return run_benchmark(BENCHMARKS[name], SMALL_MACHINE, TINY[name], probe=probe)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_ours_and_the_textbook_agree(name):
    report = run(name)
    assert report.disagreements == []
    assert len(report.rows) == len({(line.case, line.figure) for line in report.rows})
    assert all(line.ours_seconds > 0 and line.textbook_seconds > 0 for line in report.rows)
    assert all(line.agreement["tolerance"] < 1 for line in report.rows)


def half_the_threshold(a, earlier, threshold, rule):
    return core_basis(a, earlier, threshold / 2, rule)


def too_large(self, result=Average.result):
    return {name: 1.1 * tensor for name, tensor in result(self).items()}


def other_rows(self, numbers, read=Rows.read):
    return 0.5 * read(self, numbers)


def other_tensors(self, store, warn, restore=RunFolder.restore):
    saved = restore(self, store, warn)
    if saved:
        next(iter(saved[1]["model"].values())).add_(1)
    return saved


def the_other_way_round(self, x, sizes, log_scores=Vote.log_scores):
    return log_scores(self, x, sizes).flip(1)


WRONG = {
    "extract": ("fedprotip.methods.fedprotip.core_basis", half_the_threshold),
    "project": ("fedprotip.subspace.project.Projector.__call__", lambda self, g: g),
    "merge": ("fedprotip.subspace.merge.UnionMerge.result", lambda self: torch.eye(48, 16)),
    "average": ("fedprotip.federation.aggregate.Average.result", too_large),
    "round": ("fedprotip.federation.aggregate.Average.result", too_large),
    "task": ("fedprotip.models.prefix.Rows.read", other_rows),
    "evaluate": ("fedprotip.inference.routers.Vote.log_scores", the_other_way_round),
    "clients": ("fedprotip.federation.aggregate.Average.result", too_large),
    "tasks": ("fedprotip.federation.aggregate.Average.result", too_large),
    "resume": ("fedprotip.store.folder.RunFolder.restore", other_tensors),
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_wrong_result_of_ours_is_noticed(name, monkeypatch):
    monkeypatch.setattr(*WRONG[name])
    assert run(name).disagreements


# The command


@pytest.fixture
def call(monkeypatch, capsys):
    """`fedprotip bench …` in this process, every benchmark in its tiny size: (exit code, stdout, stderr)."""
    for name, size in TINY.items():
        monkeypatch.setitem(BENCHMARKS, name, replace(BENCHMARKS[name], full=size, quick=size))
    monkeypatch.setattr(bench_cli, "this_machine", lambda: SMALL_MACHINE)
    monkeypatch.setattr(bench_cli, "run_benchmark", partial(run_benchmark, probe=in_process))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fedprotip", "bench", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_json_and_plot(call, tmp_path):
    code, out, err = call("average", "--quick", "--json", "--out", tmp_path / "bench")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert set(found) == {"name", "machine", "settings", "results"}
    assert set(found["machine"]) == {"cpu", "cores", "threads", "gflops", "torch"}
    assert found["settings"]["quick"] is True
    assert [set(line) for line in found["results"]] == [KEYS]
    assert found["results"][0]["textbook_peak_mb"] > 0 or not CLEAR.exists()
    assert json.loads((tmp_path / "bench" / "average.json").read_text()) == found
    assert (tmp_path / "bench" / "average.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_shows_bar_goal_and_verdict(call, monkeypatch):
    monkeypatch.setattr(bench_cli, "out", bench_cli.Console(width=200))
    code, out, _ = call("project")
    assert code == 0
    for text in ("alone, r/d 0.1", "≥ 8", "≤ 1.2", "≤ 25", "≤ 10", "yes (", "GFLOP/s", "met"):
        assert text in out


def test_a_disagreement_is_one_sentence_and_fails(call, monkeypatch):
    monkeypatch.setattr(*WRONG["project"])
    code, out, err = call("project", "--quick")
    assert code == 1
    assert "NO" in out
    assert "project, alone, r/d 0.1: ours and the textbook disagree" in err
    assert len(err.strip().splitlines()) == 1


def test_wrong_arguments_are_one_sentence(call):
    assert call("extrakt")[::2] == (
        2,
        "fedprotip: 'extrakt' is not a benchmark; did you mean 'extract'.\n",
    )
    code, _, err = call("merge", "--set", "train.lr=1")
    assert (code, err) == (2, "fedprotip: --data and --set do not concern 'merge'; they are for round, task, resume.\n")
    code, _, err = call("round", "--set", "train.rate=1")
    assert code == 2
    assert "train.rate is not a setting" in err
    code, _, err = call("task", "--data", "nowhere")
    assert (code, err) == (2, "fedprotip: data.root = 'nowhere' is not a folder.\n")


# The parts


def test_sides_take_turns_and_the_median_counts():
    order = []
    seconds = alternate({side: lambda side=side: order.append(side) for side in "ab"}, repeats=3, least=0.0)
    assert order == list("ababab")
    assert set(seconds) == {"a", "b"}


def test_bars_from_above_and_below():
    measured = Measured("c", {"ours": 1.0, "textbook": 10.0}, {}, {}, Agreement("", 0.0, 0.0))
    faster = row(measured, Target("times", "higher", 8, 20))
    assert (faster.value, faster.met, faster.goal_met) == (10.0, True, False)
    slower = row(measured, Target("share", "lower", 1.0), 1.1)
    assert (slower.met, slower.goal_met) == (False, None)
    assert not Agreement("", float("nan"), 1.0).holds


@pytest.mark.skipif(not CLEAR.exists(), reason="needs /proc")
def test_peak_memory_is_what_the_work_needs_on_top(tmp_path):
    held = torch.ones(16 * 2**20 // 4)
    sides = {"ours": lambda: held.sum(), "textbook": lambda: torch.cat([held, held]).sum()}
    case = Case("c", lambda folder: sides, lambda results: Agreement("", 0, 0))
    benchmark = Benchmark("b", "", Size(), Size(), lambda size: [case], lambda *_: [])
    peaks = {side: in_process(benchmark, Size(), case, side, tmp_path).peak_mb for side in sides}
    assert peaks["ours"] < 4
    assert 31 < peaks["textbook"] < 40


def test_a_side_in_a_process_of_its_own(tmp_path):
    (case,) = BENCHMARKS["average"].cases(TINY["average"])
    probe = in_own_process(BENCHMARKS["average"], TINY["average"], case, "textbook", tmp_path)
    assert probe.seconds > 0
    assert probe.peak_mb or not CLEAR.exists()


def test_a_failing_process_is_one_sentence(tmp_path, monkeypatch):
    (case,) = BENCHMARKS["average"].cases(TINY["average"])
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(RunError, match=r"^average, 3 clients: the process of 'ours' failed: no message$"):
        in_own_process(BENCHMARKS["average"], TINY["average"], case, "ours", tmp_path)


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
    assert change(*paths) == pytest.approx(0.5, rel=1e-4)
    assert change(paths[2], paths[2], paths[2]) == 0.0
