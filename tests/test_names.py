"""A class is its name; old data may go, data and run folders may move: as a user meets it."""

import json
import shutil

import numpy as np
import pytest
import torch

import fedprotip
from fedprotip.settings import to_toml
from fedprotip.stream.images import open_rgb
from tests.small import forged, quick, results, small, tensors
from tests.stream.trees import class_folders
from tests.test_resume import stop_after

TINY = ["clients.count=2", "train.rounds=1", "stream.tasks=2"]


@pytest.fixture
def say(call):
    """Run the command in this process: (exit code, what it says on either stream)."""

    def run(*arguments):
        code, out, err = call(*arguments)
        return code, out + err

    return run


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with photographs of four classes, in which the user stands."""
    quick(monkeypatch)
    class_folders(tmp_path / "photos", "bcde", size=(8, 8))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings_file(path, *overrides, source="photos", **sections):
    own = small(*TINY, *overrides, data={"name": "own", "source": source}, **sections)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_toml(own))
    return path


def plan(folder):
    """Names of the classes of every task, as the folder answers them."""
    found = json.loads((folder / "plan.json").read_text())
    return [[found["classes"][label] for label in task["classes"]] for task in found["tasks"]]


def interrupted(settings, folder, monkeypatch, after):
    with monkeypatch.context() as patch:
        stop_after(patch, after)
        with pytest.raises(KeyboardInterrupt):
            fedprotip.run(settings, out=folder)


def answers(folder, photos):
    pixels = np.stack([np.asarray(open_rgb(str(path)).resize((8, 8))) for path in sorted(photos.rglob("*.png"))])
    return [answer.label for answer in fedprotip.load(folder).predict(torch.from_numpy(pixels).permute(0, 3, 1, 2))]


@pytest.mark.parametrize("size", [2, 0], ids=["a number", "shared out evenly"])
def test_new_classes_are_found_by_name_wherever_they_sort(here, say, size):
    settings = settings_file(here / "s.toml", f"stream.task_size={size}")
    assert say("run", settings, "--out", "r")[0] == 0
    assert plan(here / "r") == [["b", "c"], ["d", "e"]]
    class_folders(here / "photos", ["a", "cc"], size=(8, 8))
    code, said = say("extend", "r", "--json")
    assert code == 0, said
    assert plan(here / "r") == [["b", "c"], ["d", "e"], ["a", "cc"]]
    code, said = say("extend", "r")
    assert (code, "class(es) that no task has yet, and the data has none left" in said) == (2, True)


@pytest.mark.parametrize("order", ["seeded", ["e", "b", "c", "d"]], ids=str)
def test_an_order_of_classes_holds_and_new_ones_follow(here, order):
    fedprotip.run(settings_file(here / "s.toml", stream={"order": order}), out=here / "r")
    before = plan(here / "r")
    for name in ("a", "f"):  # the second waits for the second extension
        class_folders(here / "photos", [name, name * 2], size=(8, 8))
    for _ in range(2):
        fedprotip.extend(here / "r")
    assert plan(here / "r")[:2] == before
    assert sorted(name for task in plan(here / "r")[2:] for name in task) == ["a", "aa", "f", "ff"]


def test_a_class_that_sorts_first_changes_nothing_for_a_run_under_way(here, monkeypatch):
    """Nor do its shares: with Dirichlet's they depend on the samples of the task alone, and a limit on the class."""
    settings = small(
        *TINY, "train.rounds=2", "data.train_limit=5", "stream.tasks=2", data={"name": "own", "source": "photos"}
    )
    fedprotip.run(settings, out=here / "whole")
    interrupted(settings, here / "r", monkeypatch, 6)
    class_folders(here / "photos", ["a", "bb", "z"], size=(8, 8))
    fedprotip.resume(here / "r")
    assert results(here / "r") == results(here / "whole")


def test_rows_sorted_anew_change_no_answer(here, monkeypatch):
    lines = [f"photos/{name}/{k:03d}.png,{name}" for name in "bcde" for k in range(10)]
    (here / "t.csv").write_text("path,label\n" + "\n".join(lines) + "\n")
    fedprotip.run(small(*TINY, data={"name": "own", "source": "t.csv"}), out=here / "r")
    before = answers(here / "r", here / "photos")
    class_folders(here / "photos", ["a", "x"], size=(8, 8))
    new = [f"photos/{name}/{k:03d}.png,{name}" for name in "xa" for k in range(10)]
    (here / "t.csv").write_text("path,label\n" + "\n".join([*new, *lines[::-1]]) + "\n")
    fedprotip.extend(here / "r")
    assert plan(here / "r") == [["b", "c"], ["d", "e"], ["a", "x"]]
    assert set(before) <= set("bcde")


@pytest.mark.slow
def test_old_data_may_be_gone(here, say, monkeypatch):
    """All of it: only the task that comes is there. What cannot be measured is null, and the report says so."""
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert say("run", settings_file(here / "s.toml"), "--out", "r")[0] == 0
    shutil.rmtree(here / "photos")
    assert say("resume", "r")[0] == 0
    class_folders(here / "photos", ["a", "x"], size=(20, 13))
    code, said = say("extend", "r", "--json")
    assert code == 0, said
    summary = json.loads((here / "r" / "summary.json").read_text())
    for mode in summary["matrix"]:
        assert summary["matrix"][mode][-1][:2] == [None, None]
        assert summary["accuracy"][mode] == summary["matrix"][mode][-1][2]
        assert None not in summary["matrix"][mode][1]
    assert summary["routing"]["single_by_task"][:2] == [None, None]
    page = (here / "r" / "report.html").read_text()
    assert "Tasks 1–2 were not evaluated at the end: no test data was left" in page
    assert set(answers(here / "r", here / "photos")) <= set("axbcde")


def test_old_test_data_without_training_data_is_enough_to_measure(here, say):
    for part in ("train", "test"):
        class_folders(here / "split" / part, "bcde", 5, size=(8, 8))
    assert say("run", settings_file(here / "s.toml", source="split"), "--out", "r")[0] == 0
    for name in "bcde":
        shutil.rmtree(here / "split" / "train" / name)
    for part in ("train", "test"):
        class_folders(here / "split" / part, "ax", 5, size=(8, 8))
    code, said = say("extend", "r", "--json")
    assert code == 0, said
    summary = json.loads((here / "r" / "summary.json").read_text())
    assert None not in summary["matrix"]["aware"][-1]


def test_a_run_under_way_needs_only_what_is_still_to_come(here, monkeypatch):
    settings = small(*TINY, data={"name": "own", "source": "photos"})
    interrupted(settings, here / "r", monkeypatch, 4)
    for name in "bc":
        shutil.rmtree(here / "photos" / name)
    found = fedprotip.resume(here / "r")
    assert found["matrix"]["aware"][1][0] is None
    fedprotip.run(small(*TINY, data={"name": "own", "source": str(class_folders(here / "p", "bcde", size=(8, 8)))}),
                  out=here / "whole")  # fmt: skip
    for name in ("model.safetensors", "subspaces.safetensors"):
        assert (here / "r" / name).read_bytes() == (here / "whole" / name).read_bytes()


def test_other_old_test_data_is_said(here, say):
    say("run", settings_file(here / "s.toml"), "--out", "r")
    (here / "photos" / "b" / "009.png").unlink()  # every fifth is a test sample, the tenth too
    class_folders(here / "photos", ["a", "x"], size=(8, 8))
    code, said = say("extend", "r")
    assert code == 0, said
    told = "test samples of 'b': 1 removed (b/009.png); accuracies on task 1 from before and from now on cannot"
    assert told in said.replace("\n", "")
    (accepted,) = fedprotip.api.RunFolder.open(here / "r").manifest().data.accepted
    assert told.startswith(accepted.changes[0])


def test_domains_and_tasks_of_columns_are_names_too(here):
    rows = [f"photos/{name}/{k:03d}.png,{name},{task}" for task, names in (("m", "bc"), ("n", "de"))
            for name in names for k in range(10)]  # fmt: skip
    (here / "t.csv").write_text("path,label,task\n" + "\n".join(rows) + "\n")
    fedprotip.run(
        small(
            *TINY,
            "data.train_limit=12",
            stream={"task_size": 0, "source": "columns"},
            data={"name": "own", "source": "t.csv"},
        ),
        out=here / "r",
    )
    class_folders(here / "photos", ["a", "x"], size=(8, 8))
    new = [f"photos/{name}/{k:03d}.png,{name},early" for name in "ax" for k in range(10)]
    (here / "t.csv").write_text("path,label,task\n" + "\n".join([*new, *rows[20:]]) + "\n")  # the first task is gone
    found = fedprotip.extend(here / "r")
    assert plan(here / "r") == [["b", "c"], ["d", "e"], ["a", "x"]]
    assert [value is None for value in found["matrix"]["aware"][-1]] == [True, False, False]


def test_clients_are_names_too(here):
    def rows(names, sites):
        return [f"photos/{name}/{k:03d}.png,{name},{sites[k % len(sites)]}" for name in names for k in range(10)]

    old = rows("bcde", ["Oslo", "Rome"])
    (here / "t.csv").write_text("path,label,client\n" + "\n".join(old) + "\n")
    own = {"name": "own", "source": "t.csv"}
    fedprotip.run(small(*TINY, stream={"source": "columns"}, data=own), out=here / "r")
    class_folders(here / "photos", "ax", size=(8, 8))
    (here / "t.csv").write_text("path,label,client\n" + "\n".join(old + rows("ax", ["Bern", "Rome"])) + "\n")
    fedprotip.extend(here / "r", clients="0-2")
    assert fedprotip.api.RunFolder.open(here / "r").manifest().data.clients == ["Oslo", "Rome", "Bern"]
    kept = tensors(here / "r", "references")
    assert (kept["counts"][:, 2] > 0).tolist() == [False, True, True]  # Oslo has no samples of the new task


@pytest.mark.slow
def test_with_worker_processes_too(here, monkeypatch):
    data = {"name": "own", "source": "photos"}
    for name in ("local", "pool"):
        fedprotip.run(small(*TINY, f"run.engine={name}", "run.workers=2", data=data), out=here / name)
    for name in "bcde":
        shutil.rmtree(here / "photos" / name)
    class_folders(here / "photos", ["a", "x"], size=(8, 8))
    found = {name: fedprotip.extend(here / name) and results(here / name) for name in ("local", "pool")}
    assert found["local"] == found["pool"]


def test_a_folder_from_before_names_were_kept_goes_on_with_its_own_classes_alone(here):
    fedprotip.run(settings_file(here / "s.toml", "stream.tasks=1"), out=here / "r")
    with forged(here / "r") as manifest:
        for key in ("classes", "domains", "clients"):
            del manifest["data"][key]
        for task in manifest["data"]["tasks"]:
            del task["name"], task["labels"]
    class_folders(here / "photos", "a", size=(8, 8))
    with pytest.raises(fedprotip.UsageError, match="did not keep the names of classes"):
        fedprotip.extend(here / "r")
    shutil.rmtree(here / "photos" / "a")
    fedprotip.extend(here / "r")
    class_folders(here / "photos", "ax", size=(8, 8))
    fedprotip.extend(here / "r")
    assert plan(here / "r") == [["b", "c"], ["d", "e"], ["a", "x"]]


# Where things are


def test_a_run_folder_moves_with_its_data(here, say, monkeypatch):
    project = here / "project"
    shutil.move(here / "photos", project / "photos")
    settings = settings_file(project / "s.toml")
    whole = small(*TINY, data={"name": "own", "source": str(project / "photos")})
    fedprotip.run(whole, out=here / "whole")
    interrupted(fedprotip.load_settings(settings), project / "runs" / "r", monkeypatch, 4)
    shutil.move(project, here / "moved" / "project")
    monkeypatch.chdir("/")
    code, said = say("resume", here / "moved" / "project" / "runs" / "r")
    assert code == 0, said
    assert results(here / "moved" / "project" / "runs" / "r") == results(here / "whole")


def test_paths_in_a_file_are_relative_to_it_and_on_the_command_line_to_the_user(here, say):
    settings = settings_file(here / "elsewhere" / "s.toml", source="../photos")
    assert say("run", settings, "--out", "a")[0] == 0
    assert say("run", settings, "--set", "data.source=photos", "--out", "deep/b")[0] == 0
    for folder, source in (("a", "../photos"), ("deep/b", "../../photos")):
        assert f'source = "{source}"' in (here / folder / "settings.toml").read_text()
    code, said = say("run", settings_file(here / "elsewhere" / "t.toml"), "--out", "c")
    assert code == 2
    assert f"'elsewhere/photos' does not exist (it was looked for in {here})" in said.replace("\n", "")


def test_a_comparison_given_again_finds_its_runs(here, say):
    settings = settings_file(here / "s.toml")
    for _ in range(2):
        code, said = say("compare", settings, "--methods", "fedavg", "--seeds", "0", "--out", "c")
        assert code == 0, said


def test_data_elsewhere_is_the_same_data_or_refused(here, say, monkeypatch):
    settings = small(*TINY, data={"name": "own", "source": "photos"})
    fedprotip.run(settings, out=here / "whole")
    interrupted(settings, here / "r", monkeypatch, 4)
    shutil.move(here / "photos", here / "disk")
    code, said = say("resume", "r")
    assert (code, "is not there; if it has moved, say where it is now by --set data.source=" in said) == (2, True)
    class_folders(here / "other", "bcdf", size=(8, 8))
    code, said = say("resume", "r", "--set", "data.source=other")
    assert (code, "Class 'e' of task 2 has no training samples" in said) == (2, True)
    shutil.copytree(here / "disk", here / "changed")
    (here / "changed" / "e" / "003.png").unlink()
    code, said = say("resume", "r", "--set", "data.source=changed")
    assert (code, "samples of 'e'" in said) == (2, True)
    code, said = say("resume", "r", "--set", "data.source=disk")
    assert code == 0, said
    assert results(here / "r") == results(here / "whole")
    assert 'source = "../disk"' in (here / "r" / "settings.toml").read_text()
    assert set(fedprotip.api.RunFolder.open(here / "r").verify().values()) == {"intact"}


def test_an_extension_can_say_where_the_data_is(here, say):
    say("run", settings_file(here / "s.toml"), "--out", "r")
    class_folders(here / "new", "ax", size=(8, 8))
    code, said = say("extend", "r", "--set", "data.source=new")
    assert code == 0, said
    assert plan(here / "r")[2] == ["a", "x"]


def test_nothing_but_places_can_change(here, say):
    say("run", settings_file(here / "s.toml"), "--out", "r")
    before = {path: path.read_bytes() for path in (here / "r").rglob("*") if path.is_file()}
    for verb in ("resume", "extend"):
        code, said = say(verb, "r", "--set", "train.rounds=5")
        assert (code, "can only be told where its data is now" in said.replace("\n", " ")) == (2, True)
    code, said = say("resume", "r", "--set", "data.source=elsewhere")
    assert (code, "say where it is when you extend the run" in said.replace("\n", " ")) == (2, True)
    assert before == {path: path.read_bytes() for path in (here / "r").rglob("*") if path.is_file()}
