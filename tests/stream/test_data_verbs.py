"""`fedprotip data`: list, check, get."""

import hashlib
import io
import json
import tarfile

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedprotip.cli import data as data_cli
from fedprotip.cli.data import app
from fedprotip.errors import UsageError
from fedprotip.stream import archives
from fedprotip.stream.archives import File
from tests.stream.trees import cifar_binary, class_folders


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("FEDPROTIP_DATA", raising=False)


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=True)


def facts(*arguments):
    return json.loads(call("check", *arguments, "--json").stdout)


def test_list_tells_what_is_there(tmp_path):
    cifar_binary(tmp_path)
    rows = {row["name"]: row for row in json.loads(call("list", "--root", tmp_path, "--json").stdout)}
    assert set(rows) >= {"cifar100", "imagenet_r", "domainnet", "digit_domains", "digits", "own"}
    assert rows["cifar100"]["state"] == rows["digits"]["state"] == "ready"
    assert rows["domainnet"]["state"] == rows["imagenet_r"]["state"] == "missing"
    assert "cifar-100-python" in rows["cifar100"]["needs"]
    assert rows["digit_domains"]["needs"] == "mnist.npz and usps.npz"
    shown = call("list")
    assert shown.exit_code == 0
    assert "FEDPROTIP_DATA" in shown.stdout


def test_check_counts_classes_tasks_and_clients(tmp_path):
    class_folders(tmp_path, per_class=20)
    found = facts(tmp_path, "--set", "stream.tasks=3", "--set", "clients.count=2")
    assert (found["train"], found["test"], found["image_shape"]) == (48, 12, [3, 10, 12])
    assert found["classes"][2] == {"name": "økse", "train": 16, "test": 4}
    assert [task["train"] + task["held_back"] for task in found["tasks"]] == [16] * 3
    assert any(task["held_back"] for task in found["tasks"])
    for key in ("train", "held_back"):
        clients = "clients" if key == "train" else "clients_held_back"
        assert all(sum(task[clients].values()) == task[key] for task in found["tasks"])
    assert found["problem"] == ""
    assert "3 tasks" in found["plan"]
    assert "2 clients" in found["plan"]
    shown = call("check", tmp_path, "--set", "stream.tasks=3")
    assert shown.exit_code == 0
    assert "økse" in shown.stdout
    assert "Nothing is in the way." in shown.stdout


def test_check_finds_every_unreadable_file_and_says_what_stops_a_run(tmp_path):
    class_folders(tmp_path, per_class=20)
    broken = [tmp_path / "cat" / "000.png", tmp_path / "dog" / "019.png"]
    for path in broken:
        path.write_bytes(b"broken")
    found = facts(tmp_path, "--set", "stream.tasks=3")
    assert sorted(row["path"] for row in found["unreadable"]) == sorted(map(str, broken))
    assert "Unreadable files: 2" in found["problem"]
    shown = call("check", tmp_path, "--set", "stream.tasks=3")
    assert shown.exit_code == 1
    assert "In the way: Unreadable files: 2" in shown.stdout
    assert f"unreadable: {broken[0]}: unknown or damaged format" in shown.stdout.replace("\n", "")
    assert "900 clients" in facts("digits", "--set", "clients.count=900")["problem"]
    assert "stream.tasks = 11" in facts("digits", "--set", "stream.tasks=11")["problem"]


def test_check_shows_how_far_it_is(tmp_path, monkeypatch):
    class_folders(tmp_path, per_class=4)
    seen = []
    monkeypatch.setattr(data_cli, "_watch", lambda faults, files: seen.append(files) or faults)
    assert call("check", tmp_path, "--set", "stream.tasks=3", "--set", "clients.count=2").exit_code == 0
    assert seen == [12]
    monkeypatch.undo()
    terminal = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(data_cli, "err", terminal)
    assert call("check", tmp_path, "--set", "stream.tasks=3", "--set", "clients.count=2").exit_code == 0
    assert "Reading images" in terminal.file.getvalue()


def test_check_takes_a_name_and_many_classes(tmp_path):
    cifar_binary(tmp_path)
    shown = call("check", "cifar100", "--set", f"data.root={tmp_path}", "--set", "stream.tasks=10")
    assert shown.exit_code == 0
    assert "80 further classes" in shown.stdout


def test_check_tells_where_tasks_and_clients_come_from(tmp_path):
    y, owner = np.arange(40) % 4, np.arange(40) % 3
    np.savez(tmp_path / "d.npz", x=np.zeros((40, 6, 6), np.uint8), y=y, task=y // 2, client=owner)
    columns = ["--set", "stream.source=columns", "--set", "stream.tasks=2", "--set", "clients.count=3"]
    found = facts(tmp_path / "d.npz", *columns)
    assert "2 tasks from the data, 3 clients, each sample with the client its column names" in found["plan"]
    assert [task["classes"] for task in found["tasks"]] == [["0", "1"], ["2", "3"]]
    assert "evenly" in facts("digits", "--set", "clients.partition=iid")["plan"]
    class_folders(tmp_path / "large", per_class=2, size=(90, 80))
    assert facts(tmp_path / "large", "--set", "stream.tasks=3")["kept"] == "decoded from files when needed"


def test_check_of_nothing_is_one_sentence(tmp_path):
    result = call("check", tmp_path / "gone")
    assert isinstance(result.exception, UsageError)
    assert "does not exist" in str(result.exception)


def test_get_fetches_and_shows_where(server, tmp_path, monkeypatch):
    cifar_binary(tmp_path / "made")
    packed = tmp_path / "c.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(tmp_path / "made" / "cifar-100-binary", "cifar-100-binary")
    server["files"]["/c.tar.gz"] = packed.read_bytes()
    file = File(f"{server['url']}/c.tar.gz", "md5:" + hashlib.md5(packed.read_bytes()).hexdigest(), "cifar-100-binary")
    monkeypatch.setitem(archives.ARCHIVES, "cifar100", [file])
    result = call("get", "cifar100", "--root", tmp_path / "root")
    assert result.exit_code == 0
    assert "cifar100 is in" in result.stdout
    assert (tmp_path / "root" / "cifar-100-binary" / "train.bin").exists()


def test_get_asks_where_to():
    result = call("get", "cifar100")
    assert isinstance(result.exception, UsageError)
    assert "FEDPROTIP_DATA" in str(result.exception)
