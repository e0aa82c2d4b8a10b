"""What a user points at is used as it is meant, or refused with the choice; `data check` shows the run that follows."""

import json
import shlex
import tomllib

import numpy as np
import pytest

from tests.stream.trees import class_folders, picture

QUICK = ("model.width=8", "train.rounds=1", "train.epochs=1", "run.threads=1")


def sets(*settings):
    return [word for setting in settings for word in ("--set", setting)]


def npz(path, count=60, **arrays):
    y = np.arange(count) % 4
    x = np.random.default_rng(0).integers(0, 256, (count, 8, 8), dtype=np.uint8)
    np.savez(path, **{"x": x, "y": y} | arrays)
    return path


def columns(path):
    """Four classes in two tasks, and three hospitals with names."""
    y = np.arange(60) % 4
    return npz(path, task=y // 2, client=np.array(["north", "south", "east"])[np.arange(60) % 3])


def domains(root, size=(12, 10)):
    for domain in ("art", "photo"):
        class_folders(root / domain, per_class=10, size=size)
    return root


@pytest.fixture
def run(command, tmp_path, monkeypatch):
    """A quick run: what it said, and the settings it wrote down."""
    monkeypatch.setattr("fedprotip.api.write_report", lambda path: None)

    def call(*settings):
        code, _, err = command("run", *sets(*QUICK, *settings), "--out", tmp_path / "run")
        assert code == 0, err
        return err, tomllib.loads((tmp_path / "run" / "settings.toml").read_text(encoding="utf-8"))

    return call


@pytest.fixture
def check(command):
    def call(*arguments):
        return json.loads(command("data", "check", *arguments, "--json")[1])

    return call


@pytest.fixture
def refused(command):
    def call(*settings):
        code, out, err = command("run", *sets(*QUICK, *settings))
        assert (code, out) == (2, "")
        *notes, sentence = err.strip().splitlines()
        assert not any(note.startswith("fedprotip:") for note in notes)
        return sentence

    return call


# A source without a name, and with another


def test_a_source_alone_is_own_data(run, tmp_path):
    said, written = run(f"data.source={class_folders(tmp_path / 'photos')}")
    assert "data.name is 'own'" in said
    assert written["data"]["name"] == "own"


def test_a_source_that_would_not_be_read_is_refused(refused, tmp_path):
    sentence = refused("data.name=digits", f"data.source={class_folders(tmp_path / 'photos')}")
    assert "would not be read: data.name = 'digits' is another dataset; leave data.name out" in sentence


@pytest.mark.parametrize("name", ["photos", "d.npz"])
def test_data_where_settings_belong_is_told(command, tmp_path, name):
    class_folders(tmp_path / "photos")
    npz(tmp_path / "d.npz")
    code, _, err = command("run", tmp_path / name)
    assert code == 2
    assert "is no settings file; to learn from images there: --set data.source=" in err


# Columns


def test_columns_are_used_and_the_folder_says_so(run, tmp_path):
    said, written = run(f"data.source={columns(tmp_path / 'd.npz')}")
    assert "says the task and client of every sample: stream.source = 'columns'" in said
    assert (written["stream"]["source"], written["stream"]["tasks"]) == ("columns", 2)
    assert written["clients"]["count"] == 3


def test_columns_that_settings_leave_aside_are_told(run, tmp_path):
    said, written = run(f"data.source={columns(tmp_path / 'd.npz')}", "stream.source=settings", "clients.count=2")
    assert "left aside: stream.source = 'settings'" in said
    assert (written["stream"]["source"], written["clients"]["count"]) == ("settings", 2)


def test_a_finished_run_is_found_again_by_compare(command, tmp_path, monkeypatch):
    monkeypatch.setattr("fedprotip.api.write_report", lambda path: None)
    source = columns(tmp_path / "d.npz")
    words = ["compare", *sets(*QUICK, f"data.source={source}"), "--methods", "fedavg", "--seeds", "0"]
    for _ in range(2):
        assert command(*words, "--out", tmp_path / "both")[0] == 0


def test_columns_and_arrays_that_mean_nothing_are_told(check, tmp_path):
    (note,) = check(npz(tmp_path / "d.npz", tasks=np.zeros(60)), *sets("stream.tasks=2", "clients.count=2"))["notes"]
    assert note.endswith("arrays that are not used: tasks.")
    class_folders(tmp_path / "pics", classes=("a", "b"), per_class=20)
    lines = [f"pics/{name}/{i:03d}.png,{name},x" for name in "ab" for i in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["path,label,hospital", *lines]))
    notes = check(tmp_path / "t.csv")["notes"]
    assert any(note.endswith("columns that are not used: hospital.") for note in notes)


def test_names_that_read_alike_are_warned_of(check, run, tmp_path):
    names = ("Bee", "bee", "wild bee", "caf\u00e9", "cafe\u0301", "01", "1", "ant")
    class_folders(tmp_path / "pics", classes=names, per_class=6)
    (warning,) = (text for text in check(tmp_path / "pics")["warnings"] if "read alike" in text)
    assert "Classes whose names read alike" in warning
    for pair in ("'01' and '1'", "'Bee' and 'bee'", "'cafe\\u0301' and 'caf\u00e9'"):
        assert pair in warning
    said, _ = run(f"data.source={tmp_path / 'pics'}", "stream.tasks=2", "clients.count=1")
    assert "read alike are different ones" in " ".join(said.split())


# Folders within folders


def test_domains_are_not_taken_for_classes(refused, tmp_path):
    sentence = refused(f"data.source={domains(tmp_path / 'tree')}")
    assert "has the same folders (cat, dog, økse) within its folders (art, photo)" in sentence
    assert "'task/class'" in sentence
    assert "'client/class'" in sentence


def test_folders_of_tasks_are_domains_when_their_classes_are_the_same(run, tmp_path):
    _, written = run(f"data.source={domains(tmp_path / 'tree')}", "data.folders=task/class")
    assert (written["stream"]["scenario"], written["stream"]["tasks"]) == ("domain", 2)


def test_folders_of_clients_are_sites(check, tmp_path):
    found = check(domains(tmp_path / "tree"), *sets("data.folders=client/class", "stream.tasks=1"))
    assert found["tasks"][0]["clients"] == {"art": 22, "photo": 22}
    assert found["tasks"][0]["clients_held_back"] == {"art": 2, "photo": 2}


def test_clients_that_the_data_does_not_name_are_spoken_of(command, tmp_path):
    tree = domains(tmp_path / "tree")
    for count, said in ((3, True), (2, False)):
        given = sets("data.folders=client/class", "stream.tasks=1", f"clients.count={count}")
        code, out, err = command("data", "check", tree, *given)
        assert code == 0
        assert ("but the data names 2: the others will have no samples" in " ".join((out + err).split())) == said


def test_both_levels_and_a_split(check, tmp_path):
    for part in ("train", "test"):
        for client in ("north", "south"):
            domains(tmp_path / "tree" / part / client)
    found = check(tmp_path / "tree", *sets("data.folders=client/task/class"))
    assert [task["name"] for task in found["tasks"]] == ["art", "photo"]
    assert found["tasks"][1]["clients"] == {"north": 27, "south": 27}
    assert found["problem"] == ""


def test_folders_that_are_classes_after_all(check, tmp_path):
    found = check(domains(tmp_path / "tree"), *sets("data.folders=class"))
    assert [row["name"] for row in found["classes"]] == ["art", "photo"]
    for name in ("cat", "dog"):
        class_folders(tmp_path / "tiny" / name, classes=("images",), per_class=12)
    assert [row["name"] for row in check(tmp_path / "tiny")["classes"]] == ["cat", "dog"]


def test_a_split_within_classes_and_loose_images_are_told(refused, check, tmp_path):
    for name in ("cat", "dog"):
        class_folders(tmp_path / "inside" / name, classes=("train", "test"))
    assert "put folders train and test first" in refused(f"data.source={tmp_path / 'inside'}")
    class_folders(tmp_path / "flat", classes=("a", "b"), per_class=20)
    picture(tmp_path / "flat" / "loose.png")
    assert any("1 images lie beside the folders" in note for note in check(tmp_path / "flat")["notes"])
    picture(domains(tmp_path / "tree") / "loose.png")
    assert "loose.png lies where" in refused(f"data.source={tmp_path / 'tree'}", "data.folders=task/class")
    assert "is for folders" in refused(f"data.source={npz(tmp_path / 'd.npz')}", "data.folders=class")


# The plan that `data check` shows


def test_check_shows_names_and_what_is_held_back(command, check, tmp_path):
    source = columns(tmp_path / "d.npz")
    found = check(source, *sets("clients.held_back=0.25"))
    first = found["tasks"][0]
    assert first["clients"] == {"east": 6, "north": 6, "south": 6}
    assert (first["train"], first["held_back"], first["unused"], first["test"]) == (18, 6, 0, 6)
    assert first["classes"] == ["0", "1"]
    _, out, _ = command("data", "check", source, *sets("clients.held_back=0.25"))
    assert "6 + 2" in out
    assert "north" in out


def test_the_command_that_check_shows_does_what_it_showed(command, check, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedprotip.api.write_report", lambda path: None)
    class_folders(tmp_path / "2024", classes=("a", "b", "c", "d"), per_class=12)  # a name that looks like a number
    found = check("2024", *sets(*QUICK))
    words = shlex.split(found["command"])
    assert words[:2] == ["fedprotip", "run"]
    assert command(*words[1:], "--out", tmp_path / "run")[0] == 0
    written = tomllib.loads((tmp_path / "run" / "settings.toml").read_text())
    assert written["stream"]["tasks"] == len(found["tasks"]) == 2
    assert written["clients"]["count"] == len(found["tasks"][0]["clients"])


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.freeze=layer9", "'layer9' is not a stage of 'mlp'"),
        ("method.secure=true", "not possible where clients.count = 1"),
        ("train.optimizer=sgd", "did you mean 'SGD'"),
    ],
)
def test_what_a_run_would_refuse_is_in_the_way(tmp_path, check, setting, words):
    found = check(npz(tmp_path / "d.npz", 32), *sets(setting))
    assert words in found["problem"]


def test_samples_of_clients_that_take_no_part_are_counted(check, tmp_path):
    found = check(columns(tmp_path / "d.npz"), *sets('clients.roster={"0" = "0,2"}'))
    assert [task["unused"] for task in found["tasks"]] == [8, 8]


@pytest.mark.parametrize("count", [8, 50, 60])
def test_advice_is_not_warned_of_afterwards(check, tmp_path, count):
    x = np.random.default_rng(0).integers(0, 256, (62, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(62) % 2)
    asked = check(tmp_path / "d.npz", *sets("stream.tasks=1", f"clients.count={count}"))
    said = " ".join([*asked["warnings"], asked["problem"]])
    advised = said.partition("clients.count = ")[2].partition(" ")[0]
    followed = check(tmp_path / "d.npz", *sets("stream.tasks=1", f"clients.count={advised}"))
    assert (followed["warnings"], followed["problem"]) == ([], "")


def test_what_is_left_unsaid_is_warned_of_by_nothing(check, tmp_path):
    found = check(class_folders(tmp_path, classes=("a", "b", "c", "d"), per_class=10))
    assert (found["warnings"], found["problem"]) == ([], "")
    assert [task["classes"] for task in found["tasks"]] == [["a", "b"], ["c", "d"]]


def test_very_few_images_still_run_and_are_warned_of(check, tmp_path):
    found = check(class_folders(tmp_path, per_class=2))
    assert found["problem"] == ""
    assert "more images per class would help" in found["warnings"][0]
    assert "clients.count = 3: a task has only 3 training samples." in found["notes"]


def test_clients_with_an_image_each_are_answered_by_heads(command, check, tmp_path):
    """Nobody can tell statistics of a class then, and nobody can hold a sample back."""
    places = np.arange(40)
    split = np.where(places < 20, "train", "test")
    source = npz(tmp_path / "d.npz", 40, y=places % 2, client=places % 20, split=split)
    said = check(source)
    assert (said["problem"], len(said["warnings"])) == ("", 1)
    assert "more images per client and class would help" in said["warnings"][0]
    given = sets(*QUICK, f"data.source={source}")
    code, out, err = command("run", *given, "--out", tmp_path / "run", "--json")
    assert (code, "No statistics of '0', '1': none of 20 clients has 5 samples" in err) == (0, True)
    summary = json.loads(out)
    assert summary["router"] == "cosine"
    assert summary["accuracy"]["single"] == summary["accuracy"]["agnostic"]


def test_one_class_has_nothing_to_be_told_apart_from(check, tmp_path):
    found = check(class_folders(tmp_path, classes=("cat",), per_class=20))
    assert "stream.tasks = 1: there is 1 class." in found["notes"]
    assert any("There is one class only" in warning for warning in found["warnings"])


def test_dark_whole_numbers_are_warned_of(check, tmp_path):
    found = check(npz(tmp_path / "d.npz", x=np.ones((60, 8, 8), np.uint8)))
    assert "No pixel is brighter than 1 of 255" in found["warnings"][0]
