"""The run folder: a checkpoint is the old one or the new one, whatever breaks and whenever."""

import errno
import json
import os
import re
import shutil
import weakref

import pytest
import torch

from fedprotip.errors import RunError, UsageError
from fedprotip.store import folder as runs
from fedprotip.store import objects
from fedprotip.store.folder import RunFolder, explained, free_path, is_run
from fedprotip.store.objects import unsealed
from tests.store.test_files import crash_at

BUDGETS = [0, 256]


def groups(step):
    """The model changes with every step, the subspaces with every other, the references never."""
    return {
        "model": {"w": torch.full((4,), step), "n": torch.tensor(step)},
        "subspaces": {"u": torch.full((3, 2), float(step // 2))},
        "references": {"values": torch.ones(2)},
    }


def save(run, store, step):
    """Checkpoint number `step`, with its log lines and client state."""
    run.append("events.jsonl", [{"step": step}])
    run.append("ledger.jsonl", [{"step": step, "line": line} for line in range(2)])
    store.put(step % 2, "moment", {"m": torch.full((5,), step)})
    store.put(9, "constant", {"m": torch.ones(2)})
    run.checkpoint({"step": step}, groups(step), store)


def make(path, steps, budget=256):
    run = RunFolder.create(path, "")
    store = run.store(budget)
    for step in range(steps):
        save(run, store, step)
    return run, store


def records(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def found(path, warn=None):
    """The step of the restored checkpoint, after a check that everything in it belongs to that step."""
    warnings = []
    run = RunFolder.open(path)
    store = run.store(0)
    restored = run.restore(store, warn or warnings.append)
    if restored is None:
        assert (path / "events.jsonl").read_text() == ""
        return None, warnings
    state, tensors = restored
    step = state["step"]
    expected = groups(step)
    assert tensors.keys() == expected.keys()
    for name, group in expected.items():
        assert {key: t.tolist() for key, t in tensors[name].items()} == {key: t.tolist() for key, t in group.items()}
    assert [record["step"] for record in records(path / "events.jsonl")] == list(range(step + 1))
    assert [record["step"] for record in records(path / "ledger.jsonl")] == sorted([*range(step + 1)] * 2)
    lost = next((text for text in warnings if "without what is lost" in text), "")
    for client in {step % 2, (step - 1) % 2} if step else {0}:
        newest = step if client == step % 2 else step - 1
        kept = store.get(client, "moment")
        assert (kept is None) if f"{client}/moment" in lost else kept["m"].tolist() == [newest] * 5
    kept = store.get(9, "constant")
    assert (kept is None) if "9/constant" in lost else kept["m"].tolist() == [1, 1]
    return step, warnings


# Crashes


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("call", ["replace", "fsync", "unlink"])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_crash_at_any_write_leaves_the_old_or_the_new_checkpoint(tmp_path, monkeypatch, call, before, budget):
    """The n-th rename, fsync or removal fails, for every n there is; also half of the temporary file is there."""
    make(tmp_path / "start", before, budget)
    outcomes = []
    for number in range(100):
        path = tmp_path / f"crash-{number}"
        shutil.copytree(tmp_path / "start", path)
        run = RunFolder.open(path)
        store = run.store(budget)
        run.restore(store, warn=pytest.fail)
        with monkeypatch.context() as patch:
            crash_at(patch, call, number, KeyboardInterrupt())
            try:
                save(run, store, before)
                finished = True
            except KeyboardInterrupt:
                finished = False
        outcomes.append(found(path, warn=pytest.fail)[0])
        assert outcomes[-1] in ((before,) if finished else (before - 1 if before else None, before))
        if finished:
            break
    else:
        pytest.fail("the checkpoint never finished")
    if call != "unlink":
        assert len(outcomes) >= 5
        assert outcomes[0] == (before - 1 if before else None)
    assert outcomes == sorted(outcomes, key=lambda step: -1 if step is None else step)  # old until it is new


def test_a_run_goes_on_exactly_after_a_crash(tmp_path, monkeypatch):
    make(tmp_path / "whole", 5)
    run, store = make(tmp_path / "broken", 3)
    crash_at(monkeypatch, "replace", 1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        save(run, store, 3)
    monkeypatch.undo()
    run = RunFolder.open(tmp_path / "broken")
    store = run.store(0)
    state, _ = run.restore(store, warn=pytest.fail)
    for step in range(state["step"] + 1, 5):
        save(run, store, step)
    for name in ("events.jsonl", "ledger.jsonl"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert tree(tmp_path / "broken" / "checkpoint") == tree(tmp_path / "whole" / "checkpoint")


def tree(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_half_written_files_are_never_taken_for_good_ones(tmp_path):
    make(tmp_path / "run", 2)
    checkpoint = tmp_path / "run" / "checkpoint"
    (checkpoint / "00000003.json.tmp").write_bytes(b"half")
    (checkpoint / "objects" / "0123.tmp").write_bytes(b"half")
    (tmp_path / "run" / "summary.json.tmp").write_bytes(b"half")
    assert found(tmp_path / "run") == (1, [])
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_files_of_others_in_the_folder_are_left_alone(tmp_path):
    make(tmp_path / "run", 3)
    for name in ("notes.json", "._00000003.json", "99999999.json~"):
        (tmp_path / "run" / "checkpoint" / name).write_text("{}")
    assert found(tmp_path / "run") == (2, [])
    assert (tmp_path / "run" / "checkpoint" / "notes.json").read_text() == "{}"


def test_old_checkpoints_do_not_pile_up(tmp_path):
    make(tmp_path / "few", 4)
    make(tmp_path / "many", 12)
    count = [len(list((tmp_path / name).rglob("checkpoint/**/*"))) for name in ("few", "many")]
    assert count[0] == count[1]
    assert len(list((tmp_path / "many" / "checkpoint").glob("*.json"))) == 2


# Damage


def damaged(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [damaged, lambda path: path.write_bytes(b""), lambda path: path.unlink()])
@pytest.mark.parametrize("steps", [2, 3, 4])
@pytest.mark.parametrize("resumed", [False, True])
def test_damage_to_any_one_file_leaves_a_good_checkpoint(tmp_path, harm, steps, resumed):
    make(tmp_path / "good", steps)
    if resumed:
        assert found(tmp_path / "good") == (steps - 1, [])
    files = [path for path in (tmp_path / "good" / "checkpoint").rglob("*") if path.is_file() and path.name != "lock"]
    fallbacks = lost = 0
    for number, file in enumerate(files):
        path = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", path)
        harm(path / file.relative_to(tmp_path / "good"))
        step, warnings = found(path)
        assert step in (steps - 1, steps - 2)
        if step == steps - 2:
            fallbacks += 1
            gone = file.name == f"{steps:08d}.json" and not (path / file.relative_to(tmp_path / "good")).exists()
            assert warnings or gone
            assert all(f"{steps:08d}.json is damaged" in text and text.endswith("is used.") for text in warnings)
        elif warnings:
            lost += 1
            assert re.search(r"without what is lost: .* clients \([019]/(moment|constant)\)", warnings[-1])
    assert fallbacks >= 2  # the index, and the model that only the newest checkpoint names
    assert lost == 2  # what clients keep for themselves is kept once, and both checkpoints name it


def test_every_flipped_byte_of_an_index_is_recognised(tmp_path):
    """Also one that leaves the JSON valid: a digit of the state, of a log's size."""
    make(tmp_path / "run", 3)
    index = tmp_path / "run" / "checkpoint" / "00000003.json"
    good, digits = index.read_bytes(), 0
    for place in range(len(good)):
        flipped = bytes([good[place] ^ 1])
        digits += flipped.isdigit()
        with pytest.raises((RunError, ValueError)):
            unsealed(good[:place] + flipped + good[place + 1 :])
    assert digits > 10
    index.write_bytes(good.replace(b'"step": 2', b'"step": 7'))
    step, warnings = found(tmp_path / "run")
    assert step == 1
    assert "hash" in warnings[0]


def test_both_checkpoints_damaged_is_a_sentence(tmp_path):
    make(tmp_path / "run", 3)
    for path in (tmp_path / "run" / "checkpoint").glob("*.json"):
        damaged(path)
    before = tree(tmp_path / "run")
    warnings = []
    with pytest.raises(RunError, match=r"No checkpoint of .* can be read") as caught:
        found(tmp_path / "run", warnings.append)
    assert "fedprotip run" in str(caught.value)
    assert len(warnings) == 2
    assert tree(tmp_path / "run") == before  # nothing is thrown away that somebody could still save


def test_an_object_and_its_copy_damaged_is_a_sentence(tmp_path):
    make(tmp_path / "run", 3)
    for path in (tmp_path / "run" / "checkpoint").rglob("objects*/*"):
        damaged(path)
    with pytest.raises(RunError, match="No checkpoint"):
        found(tmp_path / "run", lambda text: None)


def test_after_a_fallback_the_run_goes_on(tmp_path):
    make(tmp_path / "run", 4)
    damaged(tmp_path / "run" / "checkpoint" / "00000004.json")
    run = RunFolder.open(tmp_path / "run")
    store = run.store(0)
    warnings = []
    state, _ = run.restore(store, warnings.append)
    assert (state["step"], len(warnings)) == (2, 1)
    for step in (3, 4):
        save(run, store, step)
    assert found(tmp_path / "run") == (4, [])


def test_a_log_that_is_too_short_is_damage(tmp_path):
    make(tmp_path / "run", 3)
    log = tmp_path / "run" / "ledger.jsonl"
    os.truncate(log, log.stat().st_size - 1)
    step, warnings = found(tmp_path / "run")
    assert step == 1
    assert "ledger.jsonl is shorter" in warnings[0]


def test_logs_are_cut_back_to_the_checkpoint(tmp_path):
    run, _ = make(tmp_path / "run", 2)
    run.append("events.jsonl", [{"step": 77}])
    with open(tmp_path / "run" / "ledger.jsonl", "a") as file:
        file.write('{"half a li')
    assert found(tmp_path / "run") == (1, [])


def test_without_a_checkpoint_a_run_starts_from_nothing(tmp_path):
    run = RunFolder.create(tmp_path / "run", "")
    run.append("events.jsonl", [{"step": 0}])
    run._checkpoints.objects.write({"left": torch.ones(3)})
    assert found(tmp_path / "run") == (None, [])
    assert not list((tmp_path / "run" / "checkpoint").rglob("objects*/*"))


# Disks


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "free some space, then: fedprotip resume"),
        (errno.EDQUOT, "free some space, then: fedprotip resume"),
        (errno.EROFS, "choose another folder with --out"),
        (errno.EACCES, "choose another folder with --out"),
    ],
)
def test_errors_of_the_disk_are_sentences(tmp_path, monkeypatch, code, advice):
    run, store = make(tmp_path / "run", 2)
    with monkeypatch.context() as patch:
        crash_at(patch, "fsync", 0, OSError(code, os.strerror(code)))
        with pytest.raises(RunError) as caught, explained(run.path):
            save(run, store, 2)
    assert str(caught.value) == f"Cannot write to {run.path}: {os.strerror(code)}; {advice}" + (
        f" {run.path}." if "space" in advice else "."
    )
    assert found(tmp_path / "run", warn=pytest.fail)[0] == 1


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_new_run_in_a_read_only_folder_is_a_sentence(tmp_path, monkeypatch, code):
    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(RunError, match=f"Cannot write to .*{os.strerror(code)}; choose another folder with --out"):
        RunFolder.create(tmp_path / "run", "")


def test_a_folder_below_a_file_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="Cannot write to"):
        RunFolder.create(tmp_path / "file" / "run", "")


def test_a_read_only_disk_does_not_make_a_checkpoint_damaged(tmp_path, monkeypatch):
    make(tmp_path / "run", 3)
    before = tree(tmp_path / "run")
    with monkeypatch.context() as patch:
        crash_at(patch, "truncate", 0, OSError(errno.EROFS, "Read-only file system"))
        with pytest.raises(RunError, match="Read-only"), explained(tmp_path / "run"):
            found(tmp_path / "run", warn=pytest.fail)
    assert tree(tmp_path / "run") == before
    assert found(tmp_path / "run") == (2, [])


# Folders


def test_a_new_folder_has_what_a_run_needs(tmp_path):
    run = RunFolder.create(tmp_path / "a" / "b", "[run]\n")
    manifest = run.manifest()
    assert (manifest.format, manifest.status) == (runs.FORMAT, "running")
    assert manifest.versions.keys() >= {"fedprotip", "torch", "numpy", "python"}
    assert (run.path / "settings.toml").read_text() == "[run]\n"
    assert is_run(run.path)
    (tmp_path / "empty").mkdir()
    RunFolder.create(tmp_path / "empty", "")


@pytest.mark.parametrize("call", ["fsync", "replace", "mkdir"])
def test_a_crash_while_a_run_is_created_does_not_block_its_folder(tmp_path, monkeypatch, call):
    """Whatever is left is either a run that can be opened or a folder that a new run may take."""
    for number in range(100):
        path = tmp_path / str(number) / "run"
        with monkeypatch.context() as patch:
            crash_at(patch, call, number, KeyboardInterrupt())
            try:
                RunFolder.create(path, "[run]\n")
                break
            except KeyboardInterrupt:
                pass
        run = RunFolder.open(path) if is_run(path) else RunFolder.create(path, "[run]\n")
        assert (path / "settings.toml").read_text() == "[run]\n"
        assert run.restore(run.store(0), warn=pytest.fail) is None
    assert 1 < number < 99


def test_a_folder_that_is_not_empty_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"not empty; choose another with --out\."):
        RunFolder.create(tmp_path, "")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    make(tmp_path / "run", 1)
    before = tree(tmp_path / "run")
    with pytest.raises(UsageError, match="not empty; continue it with: fedprotip resume"):
        RunFolder.create(tmp_path / "run", "")
    assert tree(tmp_path / "run") == before
    with pytest.raises(UsageError):
        RunFolder.create(tmp_path / "notes.txt", "")


@pytest.mark.parametrize("path", [".", "absent", "file"])
def test_a_folder_that_is_no_run_is_refused(tmp_path, path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is not a run folder"):
        RunFolder.open(tmp_path / path)


@pytest.mark.parametrize("number", [0, 99, None, "1"])
def test_a_folder_of_another_format_is_refused(tmp_path, number):
    run, _ = make(tmp_path / "run", 1)
    manifest = run.manifest().plain() | {"format": number}
    manifest["versions"]["fedprotip"] = "9.9"
    run.write_json("manifest.json", manifest)
    with pytest.raises(UsageError, match=rf"has format {number}, .* reads formats up to {runs.FORMAT}.*\(9\.9\)"):
        RunFolder.open(run.path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"3", b"\xff", b""])
def test_a_damaged_manifest_is_a_sentence(tmp_path, content):
    run, _ = make(tmp_path / "run", 1)
    (run.path / "manifest.json").write_bytes(content)
    with pytest.raises(RunError, match=r"manifest\.json is damaged"):
        RunFolder.open(run.path)


def test_a_missing_summary_is_a_sentence(tmp_path):
    run, _ = make(tmp_path / "run", 1)
    with pytest.raises(RunError, match=r"has no summary\.json yet; finish it with: fedprotip resume"):
        run.summary()


def test_the_manifest_tells_changed_files(tmp_path):
    run, _ = make(tmp_path / "run", 1)
    for name in ("model", "whatever a method keeps"):
        run.write_tensors(f"{name}.safetensors", {"w": torch.ones(2)})
    run.write_json("summary.json", {"accuracy": "é"})
    run.write_json("plan.json", {})
    run.write_manifest("finished", "", seed=3)
    assert run.manifest().seed == 3
    assert json.loads((run.path / "summary.json").read_text()) == {"accuracy": "é"}
    files = ("settings.toml", "summary.json", "plan.json", "model.safetensors", "whatever a method keeps.safetensors")
    logs = dict.fromkeys(("events.jsonl", "ledger.jsonl"), "intact")
    assert run.verify() == dict.fromkeys(files, "intact") | logs
    assert run.read_verified(files[-1]) == run.read_verified("model.safetensors")
    damaged(run.path / "model.safetensors")
    (run.path / files[-1]).write_bytes(b"")
    (run.path / "summary.json").unlink()
    changed = {"summary.json": "missing", "model.safetensors": "changed", files[-1]: "changed"}
    assert run.verify() == dict.fromkeys(files, "intact") | logs | changed
    with pytest.raises(RunError, match=r"whatever a method keeps\.safetensors was changed since the run ended"):
        run.read_verified(files[-1])
    with pytest.raises(RunError, match=r"summary\.json is missing"):
        run.read_verified("summary.json")


def test_settings_that_were_edited_behind_the_runs_back_are_refused(tmp_path):
    run = RunFolder.create(tmp_path / "run", "[run]\n")
    assert run.settings(warn=pytest.fail) == {"run": {}}
    (run.path / "settings.toml").unlink()
    assert RunFolder.open(run.path).settings() == {"run": {}}
    assert (run.path / "settings.toml").read_text() == "[run]\n"
    (run.path / "settings.toml").write_text("[run]\nseed = 3\n")
    with pytest.raises(UsageError, match=r"settings\.toml was changed since the run began"):
        RunFolder.open(run.path).settings()


@pytest.mark.parametrize("key", ["settings", "versions"])
def test_a_manifest_without_what_a_run_goes_by_is_told(tmp_path, key):
    run = RunFolder.create(tmp_path / "run", "[run]\n")
    manifest = run.manifest().plain()
    del manifest[key]
    run.write_json("manifest.json", manifest)
    with pytest.raises(RunError, match=r"manifest\.json is incomplete"):
        run.settings()


def test_a_run_of_another_version_goes_on_with_a_warning(tmp_path):
    run = RunFolder.create(tmp_path / "run", "")
    manifest = run.manifest().plain()
    manifest["versions"]["torch"] = "0.1"
    run.write_json("manifest.json", manifest)
    warnings = []
    run.settings(warnings.append)
    assert len(warnings) == 1
    assert "torch" in warnings[0]


def test_only_one_process_at_a_time(tmp_path):
    run, _ = make(tmp_path / "run", 1)
    with run.locked(), pytest.raises(RunError, match="in use by another"), RunFolder.open(run.path).locked():
        pytest.fail("two hold the lock")
    with RunFolder.open(run.path).locked():
        assert found(run.path) == (0, [])


def test_a_free_path_is_numbered(tmp_path):
    base = tmp_path / "digits-fedavg-s0"
    taken = []
    for _ in range(3):
        path = free_path(base)
        path.mkdir()
        taken.append(path.name)
    assert taken == ["digits-fedavg-s0", "digits-fedavg-s0-2", "digits-fedavg-s0-3"]


def test_the_same_steps_make_the_same_bytes(tmp_path):
    make(tmp_path / "one", 3, budget=0)
    make(tmp_path / "other", 3, budget=256)
    assert tree(tmp_path / "one" / "checkpoint") == tree(tmp_path / "other" / "checkpoint")


def test_private_state_of_clients_is_kept_once_and_what_the_server_has_twice(tmp_path):
    run, store = make(tmp_path / "run", 4)
    copies = run.path / "checkpoint" / "objects-copy"
    index = unsealed(sorted((run.path / "checkpoint").glob("*.json"))[-1].read_bytes())
    assert index["groups"]["references"] in os.listdir(copies)
    (copies / index["clients"]["9/constant"]).write_bytes(b"of an earlier version")
    save(run, store, 4)
    index = unsealed(sorted((run.path / "checkpoint").glob("*.json"))[-1].read_bytes())
    assert index["groups"]["references"] in os.listdir(copies)
    assert not set(os.listdir(copies)) & set(index["clients"].values())
    assert found(run.path) == (4, [])


def test_a_group_that_nobody_touched_is_not_read_again(tmp_path, monkeypatch):
    run = RunFolder.create(tmp_path / "r", "")
    store, read = run.store(256), []
    original = objects.serialise
    monkeypatch.setattr(objects, "serialise", lambda tensors: read.append(sorted(tensors)) or original(tensors))
    still, moving = {"s": torch.ones(3)}, {"m": torch.zeros(3)}

    def checkpoint(**more):
        read.clear()
        # other dictionaries and other views of the same memory, as a server makes them
        kept = {"still": {"s": still["s"].detach()}, "moving": {"m": moving["m"].detach()}}
        run.checkpoint({}, kept | more, store)
        return RunFolder.open(tmp_path / "r").restore(run.store(256), pytest.fail)[1]

    checkpoint()
    moving["m"].add_(1)
    assert checkpoint()["moving"]["m"].tolist() == [1, 1, 1]
    assert read == [["m"]]
    still["s"][1] = 5
    assert checkpoint()["still"]["s"].tolist() == [1, 5, 1]
    assert read == [["s"]]
    still["s"] = still["s"].clone()  # other memory: content decides, and it is the same object
    checkpoint()
    assert read == [["s"]]
    for path in run._checkpoints.objects.path.iterdir():
        path.unlink()
    assert checkpoint()["still"]["s"].tolist() == [1, 5, 1]
    assert read == [["s"], ["m"]]


def test_new_tensors_cannot_be_taken_for_old_ones(tmp_path):
    """Memory tells them apart, so what was saved last keeps its own, but no longer than that."""
    run = RunFolder.create(tmp_path / "r", "")
    store, alive = run.store(256), []
    for step in range(5):
        tensor = torch.full((1000,), float(step))
        alive.append(weakref.ref(tensor))
        run.checkpoint({}, {"group": {"t": tensor}}, store)
        del tensor
        assert [reference() is not None for reference in alive] == [False] * step + [True]
