"""The command as a user meets it: verbs, exit codes, one-sentence errors, JSON."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib

import pytest

import fedprotip
from fedprotip import settings as settings_file
from fedprotip.cli import app as cli
from fedprotip.cli.progress import ProgressDisplay
from fedprotip.settings import load, to_toml
from fedprotip.store.events import Note, Started, Step
from tests.small import quick, small
from tests.stream.trees import class_folders, picture
from tests.test_resume import stop_after


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(to_toml(small()))
    return path


def test_run_report_info_resume_extend(tmp_path, call, settings):
    folder = tmp_path / "r"
    code, out, err = call("run", settings, "--set", "train.rounds=2", "--set", "stream.tasks=2", "--out", folder)
    assert (code, err.count("run: ")) == (0, 3), err  # the start and both tasks
    assert "aware" in out
    assert str(folder / "report.html") in out
    saved = tomllib.loads((folder / "settings.toml").read_text())
    assert saved["train"]["rounds"] == 2
    assert saved["train"]["weight_decay"] == 5e-4
    assert (folder / "report.html").stat().st_size > 10_000

    (folder / "report.html").unlink()
    assert call("report", folder)[:2] == (0, f"{folder / 'report.html'}\n")
    code, out, _ = call("info", folder, "--json")
    facts = json.loads(out)
    assert facts["status"] == "finished"
    assert set(facts["files"].values()) == {"intact"}
    assert "finished" in call("info", folder)[1]

    code, out, _ = call("resume", folder, "--json")
    assert json.loads(out)["tasks"] == 2
    code, out, _ = call("extend", folder, "--tasks", "1", "--clients", "0-2", "--json")
    assert code == 0
    assert json.loads(out)["tasks"] == 3
    assert json.loads((folder / "summary.json").read_text()) == json.loads(out)


def test_an_engine_is_named_in_short_and_an_unknown_one_is_a_sentence(tmp_path, call, settings):
    few = ("--set", "train.rounds=1", "--set", "stream.tasks=1")
    assert call("run", settings, *few, "--engine", "apart", "--out", tmp_path / "r")[0] == 0
    assert tomllib.loads((tmp_path / "r" / "settings.toml").read_text())["run"]["engine"] == "apart"
    code, _, err = call("run", settings, "--engine", "flowers", "--out", tmp_path / "no")
    assert code == 2
    assert "run.engine = 'flowers'" in err


def test_info_notices_a_changed_file(tmp_path, call, settings):
    call("run", settings, "--set", "train.rounds=1", "--out", tmp_path / "r")
    with open(tmp_path / "r" / "model.safetensors", "ab") as file:
        file.write(b"x")
    (tmp_path / "r" / "references.safetensors").unlink()
    facts = json.loads(call("info", tmp_path / "r", "--json")[1])["files"]
    assert facts["model.safetensors"] == "changed"
    assert facts["references.safetensors"] == "missing"
    assert facts["subspaces.safetensors"] == "intact"


def test_json_keys_are_the_contract(tmp_path, call, settings):
    _, out, _ = call("run", settings, "--set", "train.rounds=1", "--out", tmp_path / "r", "--json")
    summary = json.loads(out)
    modes = {"aware", "agnostic", "single", "batch64"}
    assert modes == set(summary["accuracy"]) == set(summary["forgetting"]) == set(summary["matrix"])
    assert set(summary["routing"]) == {"single", "batch64", "single_by_task", "batch64_by_task"}
    assert set(summary["routers"]["cosine"]) == {"single", "batch64", "routing_single", "routing_batch64"}
    assert {"method", "scenario", "tasks", "clients", "seed", "bytes", "seconds", "peak_rss_mb", "peak_gpu_mb"} <= set(
        summary
    )
    assert set(summary["seconds"]) == {"train", "task_end", "evaluate", "total"}
    assert set(summary["bytes"]) == {"up", "down"}
    assert [len(row) for row in summary["matrix"]["single"]] == [1, 2, 3]


def test_settings_is_a_valid_file_with_documentation(tmp_path, call):
    code, out, _ = call("settings")
    assert code == 0
    (tmp_path / "all.toml").write_text(out)
    assert load(tmp_path / "all.toml") == load()
    keys = [line for line in out.splitlines() if " = " in line and not line.startswith("#")]
    documented = [line for line in out.splitlines() if line.startswith("# ") and not line.startswith("# one of")]
    assert len(documented) == len(keys) > 40
    rows = json.loads(call("settings", "--json")[1])
    assert all(row["doc"] for row in rows)
    assert {"method.threshold", "train.rounds", "stream.overlap"} <= {row["key"] for row in rows}
    assert 'name = "fedavg"' in call("settings", "--method", "fedavg")[1]


def test_methods_tells_what_each_stores_sends_and_needs(call):
    code, out, _ = call("methods", "--json")
    known = json.loads(out)
    assert code == 0
    assert {"fedavg", "fedprotip", "lda"} <= known.keys()
    assert known["gpm"]["needs"] == "a single client"
    assert all("your own" not in facts["idea"] for facts in known.values())
    code, out, _ = call("methods")
    assert code == 0
    assert "fedprotip" in out


def test_compare_runs_cells_once_and_reads_folders(tmp_path, call, settings):
    arguments = ["compare", settings, "--set", "train.rounds=1", "--methods", "fedavg,fedprotip", "--seeds", "0,1"]
    code, out, err = call(*arguments, "--out", tmp_path / "c", "--json")
    assert code == 0
    rows = json.loads(out)["rows"]
    assert {(row["label"], row["n"]) for row in rows} == {("fedavg", 2), ("fedprotip", 2)}
    folders = sorted(path.name for path in (tmp_path / "c").iterdir() if (path / "manifest.json").exists())
    assert folders == ["fedavg-s0", "fedavg-s1", "fedprotip-s0", "fedprotip-s1"]
    stamp = (tmp_path / "c" / "fedavg-s0" / "summary.json").stat().st_mtime_ns
    code, out, _ = call(*arguments, "--out", tmp_path / "c")
    assert "±" in out
    assert (tmp_path / "c" / "fedavg-s0" / "summary.json").stat().st_mtime_ns == stamp
    folders = [tmp_path / "c" / name for name in folders]
    code, out, _ = call("compare", *folders, "--out", tmp_path / "again", "--json")
    assert json.loads(out)["rows"] == rows
    code, _, err = call(*arguments, "--set", "train.rounds=2", "--out", tmp_path / "c")
    assert code == 2
    assert "train.rounds = 1, not 2" in err


def test_compare_over_values_of_a_setting(tmp_path, call, settings):
    code, out, _ = call(
        "compare", settings, "--set", "train.rounds=2", "--set", "run.geometry=1", "--methods", "fedavg,fedprotip",
        "--vary", "method.threshold=0.5,0.9", "--seeds", "0", "--set", "stream.tasks=2", "--out", tmp_path / "c",
    )  # fmt: skip
    assert code == 2  # geometry has no meaning for fedavg
    code, out, _ = call(
        "compare", settings, "--set", "train.rounds=2", "--set", "run.geometry=1", "--vary", "method.threshold=0.5,0.9",
        "--seeds", "0", "--set", "stream.tasks=2", "--out", tmp_path / "c", "--json",
    )  # fmt: skip
    assert code == 0
    assert [row["label"] for row in json.loads(out)["rows"]] == ["fedprotip threshold=0.5", "fedprotip threshold=0.9"]
    assert any("geometry" in path.name for path in (tmp_path / "c" / "plots").iterdir())


def test_compare_says_what_it_reads_from_the_data(tmp_path, call):
    class_folders(tmp_path / "photos", per_class=20, size=(8, 8))
    source = ("--set", f"data.source={tmp_path / 'photos'}", "--set", "train.rounds=1", "--set", "model.width=8")
    code, _, err = call("compare", *source, "--methods", "fedavg, lda", "--seeds", "0", "--out", tmp_path / "c")
    assert (code, err.count("stream.tasks = 1: there are 3 classes.")) == (0, 1)
    assert (tmp_path / "c" / "lda").is_dir()


def test_values_of_every_kind_can_be_varied():
    from fedprotip.cells import plan_cells

    orders = [[f"{digit}" for digit in order] for order in (range(10), reversed(range(10)))]
    varied = ['clients.roster={"1" = "0"},{"0" = "0-1"}', f"stream.order={orders[0]},{orders[1]}"]
    cells = plan_cells(small(), [], ["fedavg"], [0], varied)
    assert [cell.settings.clients.roster for cell in cells[::2]] == [{"1": "0"}, {"0": "0-1"}]
    assert [cell.settings.stream.order for cell in cells[:2]] == orders
    assert len({cell.name for cell in cells}) == 4
    assert max(len(cell.name) for cell in cells) < 100


def test_values_that_a_method_does_not_have_make_one_run(tmp_path):
    from fedprotip.cells import plan_cells

    cells = plan_cells(small(), [], ["fedavg", "fedprotip"], [0, 1], ["method.threshold=0.5,0.9"])
    assert [cell.name for cell in cells] == [
        "fedavg-s0",
        "fedavg-s1",
        "fedprotip-threshold-0.5-s0",
        "fedprotip-threshold-0.9-s0",
        "fedprotip-threshold-0.5-s1",
        "fedprotip-threshold-0.9-s1",
    ]


BAD = {
    "unknown key": (["run", "--set", "train.round=5"], 2, ["train.round", "train.rounds"]),
    "unknown section": (["run", "--set", "trian.rounds=5"], 2, ["trian"]),
    "not an assignment": (["run", "--set", "rounds"], 2, ["section.key=value"]),
    "alpha": (["run", "--set", "clients.alpha=0"], 2, ["clients.alpha", "0", "just above 0"]),
    "negative alpha": (["run", "--set", "clients.alpha=-1"], 2, ["clients.alpha", "-1"]),
    "too many tasks": (["run", "--set", "stream.tasks=11", "--set", "stream.task_size=0"], 2, ["stream.tasks", "11"]),
    "overlap": (["run", "--set", "stream.overlap=2"], 2, ["stream.overlap", "2", "1"]),
    "method": (["run", "--set", "method.name=fedprotp"], 2, ["method.name", "fedprotp", "fedprotip"]),
    "dataset": (["run", "--set", "data.name=digit"], 2, ["data.name", "digit", "digits"]),
    "model": (["run", "--set", "model.name=mpl"], 2, ["model.name", "mpl", "mlp"]),
    "optimiser": (["run", "--set", "train.optimizer=sgd"], 2, ["train.optimizer", "sgd", "SGD"]),
    "missing file": (["run", "nowhere.toml"], 2, ["nowhere.toml"]),
    "not a run": (["resume", "nowhere"], 2, ["nowhere", "not a run folder"]),
    "not a run either": (["report", "nowhere"], 2, ["nowhere"]),
    "info of nothing": (["info", "nowhere"], 2, ["nowhere"]),
    "mixed": (["compare", "nowhere", "here"], 2, ["not a run folder"]),
    "seeds": (["compare", "--seeds", "a"], 2, ["--seeds", "'a'"]),
    "vary": (["compare", "--vary", "threshold"], 2, ["--vary"]),
    "vary nothing": (["compare", "--vary", "train.lr="], 2, ["--vary 'train.lr='"]),
    "a name too long": (["compare", "x" * 300], 1, ["xxx… cannot be used: File name too long."]),
    "unknown verb": (["rum"], 2, []),
    "gpu": (["run", "--set", "run.device=cuda"], 2, ["run.device", "cpu"]),
    "geometry": (["run", "--set", "run.geometry=-1"], 2, ["run.geometry", "-1", "0"]),
    "shared head": (["run", "--set", "model.head=shared"], 2, ["model.head", "per_task"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(case, call, tmp_path, monkeypatch, settings):
    arguments, expected, words = BAD[case]
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "run" and "nowhere.toml" not in arguments:
        arguments = [arguments[0], settings, *arguments[1:]]
    if case == "gpu":
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = call(*arguments)
    assert code == expected
    assert out == ""
    assert "Traceback" not in err
    for word in words:
        assert word in err
    if case != "unknown verb":
        assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_malformed_toml(tmp_path, call):
    (tmp_path / "bad.toml").write_text("[train\nrounds = 5")
    code, _, err = call("run", tmp_path / "bad.toml")
    assert code == 2
    assert "bad.toml is not valid TOML" in err


def test_a_folder_that_is_not_empty_is_not_touched(tmp_path, call, settings):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.txt").write_text("precious")
    code, _, err = call("run", settings, "--out", tmp_path / "r")
    assert code == 2
    assert "not empty" in err
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["thesis.txt"]


def test_a_folder_that_cannot_be_written(tmp_path, call, settings):
    (tmp_path / "file").write_text("")
    code, _, err = call("run", settings, "--out", tmp_path / "file" / "r")
    assert code == 1
    assert "Cannot write" in err
    assert "--out" in err


def test_the_default_folder_is_free_and_options_of_others_are_noted(tmp_path, call, settings, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for expected in ("digits-fedavg-s3", "digits-fedavg-s3-2"):
        code, _, err = call(
            "run", settings, "--set", "method.name=fedavg", "--set", "run.seed=3", "--set", "train.rounds=1"
        )
        assert code == 0
        assert (tmp_path / "runs" / expected / "summary.json").exists()
        assert err.count("run: ") == 4  # the start and three tasks
        assert "'fedavg' has no settings method.threshold" in err


def test_python_dash_m_and_version():
    for arguments in (["--version"], ["--help"], ["run", "--help"]):
        done = subprocess.run([sys.executable, "-m", "fedprotip", *arguments], capture_output=True, text=True)
        assert done.returncode == 0
        assert "fedprotip" in done.stdout


def test_changed_data_is_one_sentence_and_accepted_on_request(tmp_path, call, monkeypatch):
    class_folders(tmp_path / "photos", "bcde", size=(8, 8))
    data = {"name": "own", "source": str(tmp_path / "photos")}
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            fedprotip.run(small("train.rounds=1", "stream.tasks=2", data=data), out=tmp_path / "r")
    picture(tmp_path / "photos" / "e" / "000.png", size=(8, 8), seed=9)
    code, _, err = call("resume", tmp_path / "r")
    assert (code, err.count("\n")) == (2, 1)
    assert "training samples of 'e': 1 changed (e/000.png); put it back, or go on with it by --accept-data." in err
    assert call("resume", tmp_path / "r", "--accept-data")[0] == 0
    assert call("extend", tmp_path / "r", "--accept-data")[0] == 2


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGHUP])
def test_signals_end_a_command_like_ctrl_c_unless_they_are_ignored(stop):
    before = signal.signal(stop, signal.SIG_DFL)
    try:
        with cli.ended_like_ctrl_c():
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), stop)
            os.kill(os.getpid(), stop)  # the end is under way
        assert signal.getsignal(stop) is signal.SIG_DFL
        signal.signal(stop, signal.SIG_IGN)  # as nohup does
        with cli.ended_like_ctrl_c():
            os.kill(os.getpid(), stop)
        assert signal.getsignal(stop) is signal.SIG_IGN
    finally:
        signal.signal(stop, before)


NASTY = "a\x1b[31mred\x9b2J\x7f\u202e[bold]$\\frac{<b>&"
"""As a label: colours, an erased screen, turned writing, rich's and matplotlib's and HTML's own language."""
OBEYED = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e]")


@pytest.mark.filterwarnings("error")
def test_labels_command_neither_terminal_nor_page(tmp_path, call):
    """A class of a stranger's data, in everything that is shown; what is for programs still says it exactly."""
    class_folders(tmp_path / "photos", classes=(NASTY, "b\nb", "c", "d"), per_class=8, size=(8, 8))
    settings = ["--set", "data.name=own", "--set", f"data.source={tmp_path / 'photos'}", "--set", "stream.tasks=2"]
    settings += ["--set", "train.rounds=1", "--set", "clients.count=2", "--set", "model.width=8"]
    code, out, err = call("data", "check", tmp_path / "photos", *settings)
    assert (code, OBEYED.findall(out + err)) == (0, [])
    assert "a␛[31mred�2J␡�[bold]$" in out
    assert "b␊b" in out
    code, out, err = call("data", "check", tmp_path / "photos", *settings, "--json")
    assert (code, OBEYED.findall(out + err)) == (0, [])
    assert NASTY in [row["name"] for row in json.loads(out)["classes"]]
    code, out, err = call("run", *settings, "--out", tmp_path / "r\x1b[2J")
    assert (code, OBEYED.findall(out + err)) == (0, [])
    assert "r␛[2J/report.html" in out
    assert "<b>" not in (tmp_path / "r\x1b[2J" / "report.html").read_text()
    code, out, err = call("info", tmp_path / "r\x1b[2J")
    assert (code, OBEYED.findall(out + err)) == (0, [])


def test_bars_command_no_terminal():
    shown = io.StringIO()
    console = cli.Console(file=shown, force_terminal=True, width=200, highlight=False)
    with ProgressDisplay(console, runs=2) as progress:
        bar = progress.of("x\x1b[2J[/bold]\x9b")
        bar(Started(folder="r", tasks=1, rounds=1, done=0))
        bar(Note(text="note\x1b[2J[/dim]\nsecond line"))
        bar(Step(what="step", done=1, total=2))
    assert "x␛[2J[/bold]� (1/2)" in shown.getvalue()
    assert "note␛[2J[/dim]␊second line" in shown.getvalue()
    assert not re.search("\x1b\\[2J|\x9b", shown.getvalue())


def test_errors_command_no_terminal(tmp_path, call):
    for arguments in (
        ["run", "--set", "data.name=own", "--set", 'data.source="x\\u001b[2J"'],
        ["run", "--set", "train.\x1b[2J=3"],
        ["info", "\x1b[2J\n\n"],
        ["report", tmp_path / "[/bold]\x9b"],
        ["run", tmp_path / "\x1b]0;title\x07.toml"],
    ):
        code, out, err = call(*arguments)
        assert code == 2
        assert OBEYED.findall(out + err) == []
        assert err.startswith("fedprotip: ")
        assert err.count("\n") == 1


# The report as a person reads it

PHOTOS = (
    "data.name=own", "stream.source=columns", "stream.tasks=1", "model.name=small_cnn", "model.width=8",
    "clients.count=2", "train.rounds=1", "train.epochs=1", "run.threads=1",
)  # fmt: skip


@pytest.fixture
def photos(tmp_path):
    """A table of pictures of three classes at two sites, of which every fifth picture is for testing."""
    class_folders(tmp_path / "pics")
    rows = [
        f"pics/{name}/{number:03d}.png,{name},{('north', 'south')[number % 2]},{('train', 'test')[number > 5]}"
        for name in ("cat", "dog", "økse")
        for number in range(10)
    ]
    (tmp_path / "photos.csv").write_text("\n".join(["path,label,client,split", *rows, ""]), encoding="utf-8")
    return tmp_path / "photos.csv"


@pytest.mark.parametrize("examples", [3, 0])
def test_a_report_names_classes_and_sites_and_shows_what_was_confused(tmp_path, call, photos, examples):
    folder = tmp_path / "r"
    sets = [word for setting in (*PHOTOS, f"evaluate.examples={examples}") for word in ("--set", setting)]
    assert call("run", "--set", f"data.source={photos}", *sets, "--out", folder)[0] == 0
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert re.findall(r'<th scope="row">(north|south)</th>', html) == ["north", "south"]
    assert "Accuracy of the test samples that each site holds itself" in html
    assert {"cat", "dog", "økse"} <= set(re.findall(r'<th scope="row">(\w+)</th>', html))
    assert bool(
        re.findall(r'src="data:image/png;base64,[\w+/=]+" alt="Test picture of class \w+ that was', html)
    ) == bool(examples)
    shutil.rmtree(tmp_path / "pics")
    photos.unlink()  # the page needs the run folder alone
    assert call("report", folder)[0] == 0
    assert (folder / "report.html").read_text(encoding="utf-8") == html


def test_sites_without_test_samples_of_their_own_are_expected(tmp_path, call, settings):
    assert call("run", settings, "--set", "train.rounds=1", "--out", tmp_path / "r")[0] == 0
    html = (tmp_path / "r" / "report.html").read_text(encoding="utf-8")
    assert "what to expect at each site&#39;s mix of classes" in html
    assert re.findall(r'<th scope="row">(client \d)</th>', html) == ["client 0", "client 1", "client 2"]
    code, out, _ = call("info", tmp_path / "r", "--json")
    assert json.loads(out)["files"]["answers.json"] == "intact"
    (tmp_path / "r" / "answers.json").write_text("{}")
    code, _, err = call("report", tmp_path / "r")
    assert code
    assert "answers.json was changed since the run ended" in err


def test_the_demo_has_lda_as_a_row_and_single_of_every_method(tmp_path, call, monkeypatch):
    original = settings_file.load
    quick(monkeypatch)
    monkeypatch.setattr("fedprotip.report.page.write_report", lambda folder: None)
    few = ["train.rounds=1", "train.epochs=1", "model.width=8", "stream.tasks=2", "data.train_limit=200"]

    def load(source=None, overrides=(), note=lambda text: None, preset=""):
        return original(source, [*overrides, *few], note, preset)

    monkeypatch.setattr(settings_file, "load", load)
    code, out, _ = call("demo", "--out", tmp_path / "demo")
    assert code == 0
    cells = {line.split("│")[1].strip(): line.split("│")[3].strip() for line in out.splitlines() if "│" in line[:1]}
    assert list(cells) == ["fedavg", "lda", "fedprotip"]
    assert [cell.endswith("*") for cell in cells.values()] == [True, False, False]
    assert "* This method does not look for the task: it answers single samples agnostically." in out
    assert "lda, which trains nothing, has" in (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")
