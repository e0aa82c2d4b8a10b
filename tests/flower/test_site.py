"""Sites with data of their own over a grid in this process: the bytes of a local run, refusals, faults, own state."""

import json
import shutil
import time

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("flwr", reason="the extra flower")
pytestmark = pytest.mark.slow  # Flower is imported: seconds

import flwr.app  # noqa: E402

import fedprotip  # noqa: E402
from fedprotip.envelopes import Envelope  # noqa: E402
from fedprotip.errors import RunError, UsageError  # noqa: E402
from fedprotip.federation.engines.flower import Reachable, across, plan_of  # noqa: E402
from fedprotip.federation.secure.demands import NONE, Demands  # noqa: E402
from fedprotip.flower.run import go  # noqa: E402
from fedprotip.flower.site import SiteProgram, run_name  # noqa: E402
from fedprotip.messages import Message  # noqa: E402
from fedprotip.settings import DataSettings, to_toml  # noqa: E402
from fedprotip.stream import build_stream  # noqa: E402
from tests.flower.loop import LoopGrid  # noqa: E402
from tests.small import quick, results, small  # noqa: E402

NAMES = ["ant", "bee", "cat", "dog"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    quick(monkeypatch)


def digits(labels, seed, count=24):
    """Images of these classes that are easy to tell apart, and their names."""
    rng = np.random.default_rng(seed)
    y = np.repeat(labels, count)
    x = rng.integers(0, 60, (len(y), 1, 8, 8)).astype(np.uint8)
    for image, label in zip(x, y, strict=True):
        image[0, 2 * label : 2 * label + 2] += 150
    return np.repeat(x, 3, axis=1), np.array([NAMES[label] for label in y])


HELD = {0: [0, 1, 2], 1: [0, 1, 2, 3], 2: [1, 3]}
"""Client → its classes: they differ."""


@pytest.fixture
def data(tmp_path):
    """site-0.npz … for sites, server.npz for the server, and all.npz, which says what belongs to whom."""
    parts = {client: digits(labels, client) for client, labels in HELD.items()}
    x, y = digits([0, 1, 2, 3], 9, 10)
    for client, (images, labels) in parts.items():
        np.savez(tmp_path / f"site-{client}.npz", x_train=images, y_train=labels, x_test=images[:1], y_test=labels[:1])
    np.savez(tmp_path / "server.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    images = np.concatenate([*(part[0] for part in parts.values()), x])
    labels = np.concatenate([*(part[1] for part in parts.values()), y])
    owners = np.concatenate([*(np.full(len(part[1]), client) for client, part in parts.items()), np.zeros(len(y), int)])
    split = np.array(["train"] * (len(labels) - len(y)) + ["test"] * len(y))
    np.savez(tmp_path / "all.npz", x=images, y=labels, client=owners, split=split)
    return tmp_path


def settings(source, *overrides, **sections):
    given = {"data": {"name": "own", "source": str(source)}, "stream": {"tasks": 2, "task_size": 2}, **sections}
    learns = ("train.rounds=2", "train.epochs=5", "train.lr=0.1")
    return small(*learns, "run.patience=0", *overrides, **given)


def program(data, client, said=None, source=None, demands=NONE):
    said = [] if said is None else said
    own = DataSettings(name="own", source=str(source or data / f"site-{client}.npz"))
    return SiteProgram(client, data / f"folder-{client}", own, own=True, tell=said.append, demands=demands)


def over(grid, given, out, **options):
    with across(Reachable(grid)):
        return fedprotip.run(given, ["run.engine=flower"], out=out, **options)


def events(folder, kind):
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def as_folder(data, client):
    """The same images as files, a folder per class."""
    arrays, folder = np.load(data / f"site-{client}.npz"), data / f"site-{client}"
    for split in ("train", "test"):
        for n, (image, name) in enumerate(zip(arrays[f"x_{split}"], arrays[f"y_{split}"], strict=True)):
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.transpose(1, 2, 0)).save(folder / split / name / f"{n:03d}.png")
    return folder


def as_table(data, client):
    """The same images as files that a table names."""
    lines = [f"{path},{path.parent.name},{path.parts[-3]}" for path in sorted(as_folder(data, client).rglob("*.png"))]
    (data / f"site-{client}.csv").write_text("\n".join(["path,label,split", *lines]) + "\n")
    return data / f"site-{client}.csv"


@pytest.mark.parametrize("sections", [{}, {"train": {"head_start": "closed"}, "clients": {"held_back": 0.1}}])
def test_sites_with_own_data_give_the_numbers_of_one_process_that_has_all_of_it(data, sections):
    """Arrays at one site, a folder per class at the next, a table at the third."""
    grid = LoopGrid()
    for client, source in enumerate([data / "site-0.npz", as_folder(data, 1), as_table(data, 2)]):
        grid.join(program(data, client, source=source))
    over(grid, settings(data / "server.npz", **sections), data / "flower")
    columns = "stream.source=columns"
    fedprotip.run(settings(data / "all.npz", columns, **sections), out=data / "local")
    far, near = (results(data / name, without=("plan",)) for name in ("flower", "local"))  # it says: columns
    for name in ("model.safetensors", "subspaces.safetensors", "references.safetensors", "ledger", "events"):
        assert far[name] == near[name]
    assert far["summary"]["accuracy"] == near["summary"]["accuracy"]
    assert near["summary"]["accuracy"]["aware"] > 90
    told = json.loads((data / "flower" / "sites.json").read_text())
    assert told["2"]["holds"] == {"ant, bee": {"bee": 24}, "cat, dog": {"dog": 24}}
    assert not (data / "flower" / "clients").exists()  # what clients keep is at their sites


def test_in_private_a_site_does_not_say_what_it_has(data):
    pytest.importorskip("cryptography")
    pytest.importorskip("Crypto")
    grid = LoopGrid()
    for client in HELD:
        grid.join(program(data, client, demands=Demands(secure=True)))
    given = settings(data / "server.npz", "train.rounds=1", method={"name": "fedavg", "secure": True})
    over(grid, given, data / "r")
    told = json.loads((data / "r" / "sites.json").read_text())
    assert [site["holds"] for site in told.values()] == [{}, {}, {}]
    assert not events(data / "r", "failure")


def test_a_site_that_asks_for_secure_sums_says_nothing_to_others(data):
    """Neither what it has nor anything later; the run goes on without it."""
    grid, said = LoopGrid(), []
    grid.join(program(data, 0))
    grid.join(program(data, 1))
    grid.join(program(data, 2, said, demands=Demands(secure=True)))
    over(grid, settings(data / "server.npz", "train.rounds=1", method={"name": "fedavg"}), data / "r")
    assert json.loads((data / "r" / "sites.json").read_text())["2"]["holds"] == {}
    failures = events(data / "r", "failure")
    assert {event["client"] for event in failures} == {2}
    assert "the plan has method.secure = false, this site has true" in failures[0]["reason"]
    assert any("this site has true, so this client takes no part" in line for line in said)


def test_labels_that_do_not_fit_are_refused_at_both_ends(data):
    x, y = digits([0, 1], 5)
    y = np.where(y == "bee", "wasp", y)
    np.savez(data / "odd.npz", x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])
    grid, said = LoopGrid(), []
    for client in (0, 1):
        grid.join(program(data, client))
    grid.join(program(data, 2, said, data / "odd.npz"))
    summary = over(grid, settings(data / "server.npz"), data / "r")
    assert summary["tasks"] == 2
    assert any("has the class 'wasp', which is in no task of the plan" in line for line in said)
    failures = events(data / "r", "failure")
    assert {event["client"] for event in failures} == {2}
    assert "has the class 'wasp'" in failures[0]["reason"]


def test_images_of_another_kind_are_refused(data):
    x = np.zeros((8, 1, 8, 8), np.uint8)
    np.savez(data / "odd.npz", x_train=x, y_train=np.array(["ant"] * 8), x_test=x[:1], y_test=np.array(["ant"]))
    grid, said = LoopGrid(), []
    grid.join(program(data, 0))
    grid.join(program(data, 1))
    grid.join(program(data, 2, said, data / "odd.npz"))
    over(grid, settings(data / "server.npz"), data / "r")
    assert "The images of client 2 are (1, 8, 8)" in events(data / "r", "failure")[0]["reason"]
    assert any("(1, 8, 8)" in line for line in said)


def test_a_site_joins_at_a_later_task(data):
    grid = LoopGrid()
    grid.join(program(data, 0))
    grid.join(program(data, 1))

    def later(event):
        if event["event"] == "task" and event["task"] == 0:
            grid.join(program(data, 2))

    over(grid, settings(data / "server.npz"), data / "r", observers=[later])
    failures = events(data / "r", "failure")
    assert {(event["client"], event["task"]) for event in failures} == {(2, 0)}
    assert {event["reason"] for event in failures} == {"it is not connected"}
    assert [event["clients"] for event in events(data / "r", "round")] == [2, 2, 3, 3]
    assert not events(data / "r", "lost")  # it never had anything
    ledger = map(json.loads, (data / "r" / "ledger.jsonl").read_text().splitlines())
    assert not [line for line in ledger if line["client"] == 2 and line["task"] == 0]  # and was sent nothing then


def test_what_is_handed_in_begins_goes_on_and_adds_tasks_for_the_clients_that_it_names(data):
    """As `flower submit` does, and again with the same words after a kill."""
    grid, file = LoopGrid(), data / "run.toml"
    for client in HELD:
        grid.join(program(data, client))
    file.write_text(to_toml(settings(data / "server.npz", "stream.tasks=1", "train.rounds=1")))
    for tasks, clients in ((0, ""), (0, ""), (1, "0-1")):
        summary = go(Reachable(grid), data / "r", file, tasks, clients)
    assert summary["tasks"] == 2
    assert [event["clients"] for event in events(data / "r", "round")] == [3, 2]


def test_answers_of_others_are_taken_while_a_client_is_waited_for(data):
    """The run is more patient with a client that is not there than with an answer."""
    grid = LoopGrid()
    grid.join(program(data, 0))
    grid.join(program(data, 1))
    over(grid, settings(data / "server.npz", "run.patience=4", "run.timeout=2", "stream.tasks=1"), data / "r")
    assert {(event["client"], event["reason"]) for event in events(data / "r", "failure")} == {
        (2, "it is not connected")
    }


def test_answers_that_came_while_flower_waited_for_one_are_not_late(data):
    """Its grid waits minutes for an answer whose site died while it sent it, and nobody else's is taken then."""

    class Busy(LoopGrid):
        waited = 0

        def pull_messages(self, names):
            if self._count == 9:  # the questions of the first round are under way
                self.waited += 1
                if self.waited == 1:
                    time.sleep(3)
                    return [flwr.app.Message(flwr.app.Error(code=3, reason=""), reply_to=self._waiting.pop("m7")[0])]
            return super().pull_messages(names)

    grid = Busy()
    for client in HELD:
        grid.join(program(data, client))
    given = settings(data / "server.npz", "run.timeout=2", "stream.tasks=1", method={"name": "fedavg"})
    over(grid, given, data / "r")
    assert grid.waited > 1
    assert {(event["client"], event["round"]) for event in events(data / "r", "failure")} == {(0, 0)}


def test_a_site_that_is_gone_in_a_round_is_left_out_and_comes_back_with_a_new_id(data):
    grid = LoopGrid()
    for client in (0, 1):
        grid.join(program(data, client))
    third = grid.join(program(data, 2))
    seen = []

    def fail(event):
        seen.append(event["event"])
        if seen.count("round") == 1:
            third.gone = True
        if seen.count("task") == 1 and len(grid.nodes) == 3:
            grid.join(program(data, 2))  # the same folder, another process

    summary = over(grid, settings(data / "server.npz"), data / "r", observers=[fail])
    assert summary["tasks"] == 2
    assert {event["client"] for event in events(data / "r", "failure")} == {2}
    assert [event["clients"] for event in events(data / "r", "round")] == [3, 2, 3, 3]
    assert not events(data / "r", "lost")  # what it had is on its disk, and the server knows how far it got


def test_a_site_that_lost_its_folder_takes_part_again_and_the_log_says_what_that_costs(data):
    grid = LoopGrid()
    for client in HELD:
        grid.join(program(data, client))

    def lose(event):
        if event["event"] == "task" and event["task"] == 0:
            shutil.rmtree(data / "folder-2")
            grid.nodes[2].program = program(data, 2)

    over(grid, settings(data / "server.npz"), data / "r", observers=[lose])
    (remark,) = events(data / "r", "lost")
    assert remark["client"] == 2
    assert "what it kept for itself may be gone" in remark["text"]
    assert [event["clients"] for event in events(data / "r", "round")][2:] == [3, 3]


def test_the_server_dies_and_the_run_goes_on_from_its_folder(data):
    class Killed(BaseException):
        pass

    grid, seen = LoopGrid(), []
    for client in HELD:
        grid.join(program(data, client))

    def die(event):
        seen.append(event["event"])
        if seen.count("round") == 3:
            raise Killed

    given = settings(data / "server.npz")
    over(grid, given, data / "whole")
    with pytest.raises(Killed):
        over(grid, given, data / "r", observers=[die])
    with across(Reachable(grid)):
        fedprotip.resume(data / "r")
        assert results(data / "r") == results(data / "whole")


def test_a_run_over_sites_goes_on_over_sites_alone(data):
    """Not in a simulation, which would have the server's data only; nor does one of these go on over sites."""

    class Killed(BaseException):
        pass

    def die(event):
        if event["event"] == "round":
            raise Killed

    grid = LoopGrid()
    for client in HELD:
        grid.join(program(data, client))
    given = settings(data / "server.npz", "stream.tasks=1")
    with pytest.raises(Killed):
        over(grid, given, data / "r", observers=[die])
    sentence = r"is a run over sites, .* continue it with: fedprotip flower submit"
    with pytest.raises(UsageError, match=sentence):
        fedprotip.resume(data / "r")
    with across(Reachable(grid)):
        fedprotip.resume(data / "r")
    before = (data / "r" / "settings.toml").read_text()
    with pytest.raises(UsageError, match=sentence):
        fedprotip.extend(data / "r", tasks=1)
    assert (data / "r" / "settings.toml").read_text() == before
    (data / "r" / "sites.json").unlink()
    (data / "r" / "clients").mkdir()  # as if it had been one of those
    with across(Reachable(grid)), pytest.raises(UsageError, match="is a run of Flower's simulation"):
        fedprotip.extend(data / "r", tasks=1)


def test_two_runs_over_the_same_sites_keep_their_own_and_the_first_goes_on(data):
    """Both have asked as many questions; what sites keep for one is not what they keep for the other."""
    grid, columns = LoopGrid(), "stream.source=columns"
    for client in HELD:
        grid.join(program(data, client))
    for seed in (0, 1):
        over(grid, settings(data / "server.npz", "stream.tasks=1", f"run.seed={seed}"), data / f"r{seed}")
    with across(Reachable(grid)):
        fedprotip.extend(data / "r0", tasks=1)
    local = settings(data / "all.npz", columns, "stream.tasks=1")
    fedprotip.run(local, out=data / "local")
    fedprotip.extend(data / "local", tasks=1)
    far, near = (results(data / name, without=("plan",)) for name in ("r0", "local"))
    assert not events(data / "r0", "lost")
    for name in ("model.safetensors", "subspaces.safetensors", "references.safetensors", "events"):
        assert far[name] == near[name]


@pytest.mark.parametrize("away", ["sites", "data"])
@pytest.mark.parametrize("rounds", [2, 4])
def test_a_task_for_which_nobody_is_there_or_has_data_waits_until_somebody_is(data, away, rounds):
    """Months later the run is handed in before the sites are up, or before they have put their images there."""
    grid = LoopGrid()
    programs = [program(data, client) for client in HELD]
    known = {client: (data / f"site-{client}.npz").read_bytes() for client in HELD}
    for client in HELD:
        grid.join(programs[client])
    given = settings(data / "server.npz", "stream.tasks=1", f"train.rounds={rounds}", method={"name": "fedavg"})
    over(grid, given, data / "r")
    if away == "sites":
        grid.nodes = []
    else:
        for client in HELD:
            arrays = dict(np.load(data / f"site-{client}.npz"))
            old = np.isin(arrays["y_train"], NAMES[:2])
            kept = {"x_train": arrays["x_train"][old], "y_train": arrays["y_train"][old]}
            first = {"x_test": arrays["x_test"], "y_test": arrays["y_test"]}
            np.savez(data / f"site-{client}.npz", **kept, **first)
    with across(Reachable(grid)):
        for extended in (False, True):
            with pytest.raises(RunError, match="task 2"):
                fedprotip.resume(data / "r") if extended else fedprotip.extend(data / "r", tasks=1)
        for client in HELD:
            (data / f"site-{client}.npz").write_bytes(known[client])
        grid.nodes = []
        for client in HELD:
            grid.join(program(data, client))
        summary = fedprotip.resume(data / "r")
    assert summary["tasks"] == 2
    assert [event["clients"] for event in events(data / "r", "round") if event["task"] == 1] == [3] * rounds


@pytest.mark.parametrize("run", ["../elsewhere", "", "a" * 31, 7, None])
def test_the_name_of_a_run_is_no_path(run):
    with pytest.raises(UsageError, match="names no run"):
        run_name(run)


def nan(message):
    return {name: torch.full_like(t, torch.nan) if t.is_floating_point() else t for name, t in message.tensors.items()}


def shapes(message):
    return {name: torch.cat([t.reshape(-1), t.reshape(-1)[:1]]) for name, t in message.tensors.items()}


def oversized(message):
    """Bases with more columns than a layer has inputs; everything else as it is."""
    wide = {n: torch.eye(len(t), dtype=t.dtype).repeat(1, 2) if t.dim() == 2 else t for n, t in message.tensors.items()}
    return wide if message.kind == "basis" else message.tensors


def skewed(message):
    return {n: t * 2 for n, t in message.tensors.items()} if message.kind == "basis" else message.tensors


def another_task(message):
    return message.tensors, {**message.meta, "step": message.meta["step"] - 1}


def stated(count, message):
    return {**message.meta, **({"samples": count} if "samples" in message.meta else {})}


@pytest.mark.parametrize("fault", [nan, shapes, oversized, skewed, another_task])
def test_a_client_that_sends_nonsense_is_named_and_left_out(data, fault):
    seen = []

    def change(node, envelope):
        if node.node_id != 1001 or not envelope.parts:
            return envelope
        message = Message.from_bytes(envelope.parts[0])
        if message.kind == "presence":
            return envelope
        changed = fault(message)
        tensors, meta = changed if isinstance(changed, tuple) else (changed, message.meta)
        seen.append(message.kind)
        return Envelope({"kind": message.kind}, [Message(message.kind, tensors, meta).to_bytes()])

    honest, grid = LoopGrid(), LoopGrid(change)
    for client in HELD:
        grid.join(program(data, client))
    summary = over(grid, settings(data / "server.npz"), data / "r")
    for client in HELD:
        shutil.rmtree(data / f"folder-{client}")
        if client != 1:
            honest.join(program(data, client))
    without = over(honest, settings(data / "server.npz"), data / "without")
    failures = events(data / "r", "failure")
    assert {event["client"] for event in failures} == {1}
    assert summary["tasks"] == 2
    assert seen
    assert without["accuracy"]["aware"] > 90  # two points below chance are nothing
    assert summary["accuracy"]["aware"] >= without["accuracy"]["aware"] - 2


@pytest.mark.parametrize(("count", "kind"), [(10**4, "bounded"), (10**9, "failure")])
def test_a_lie_about_samples_is_bounded_or_refused_and_named(data, count, kind):
    def change(node, envelope):
        if node.node_id != 1001 or not envelope.parts:
            return envelope
        message = Message.from_bytes(envelope.parts[0])
        lie = Message(message.kind, message.tensors, stated(count, message))
        return Envelope({"kind": message.kind}, [lie.to_bytes()])

    grid = LoopGrid(change)
    for client in HELD:
        grid.join(program(data, client))
    summary = over(grid, settings(data / "server.npz"), data / "r")
    assert summary["tasks"] == 2
    assert {event["client"] for event in events(data / "r", kind)} == {1}


def test_a_secure_run_finishes_although_a_site_is_gone_in_the_middle_of_a_sum(data):
    """It answers the first two phases of a sum and is never there again; the others' sum is made without it."""
    grid = LoopGrid()
    for client in (0, 1, 2, 3):
        grid.join(program(data, client, source=data / f"site-{min(client, 1)}.npz"))

    def change(node, envelope):
        if node.node_id == 1002 and node.answered == 4:  # who it is, its presence, its keys, its shares
            node.gone = True
        return envelope

    grid._change = change
    given = settings(data / "server.npz", clients={"count": 4}, method={"name": "fedavg", "secure": True})
    summary = over(grid, given, data / "r")
    assert grid.nodes[2].gone
    assert summary["tasks"] == 2
    failures = events(data / "r", "failure")
    assert {event["client"] for event in failures} == {2}
    assert not events(data / "r", "unsummed")


def test_secrets_of_a_sum_in_whose_middle_a_site_was_killed_go_with_its_next_run(data):
    """If the former run went on without it to its end, nothing is asked any more by which they would go."""
    killed, grid = data / "folder-0" / ("a" * 32), LoopGrid()
    killed.mkdir(parents=True)
    for name in ("sum.json", "sum.json.tmp", "00000001.json"):
        (killed / name).write_text("{}")
    grid.join(program(data, 0))
    over(grid, settings(data / "server.npz", "stream.tasks=1", "train.rounds=1", method={"name": "fedavg"}), data / "r")
    assert [path.name for path in killed.iterdir()] == ["00000001.json"]


def test_a_plan_that_is_refused_leaves_the_run_that_is_on_as_it_is(data):
    """Secrets of a sum that is under way too."""
    site, given = program(data, 0), settings(data / "server.npz", method={"name": "fedavg"})
    plan = plan_of(given, build_stream(given), 0, "a" * 32)
    assert "holds" in site.answer(Envelope({"plan": plan, "type": "query.hello"})).head
    (data / "folder-0" / plan["run"] / "sum.json").write_text("{}")
    assert "names no run" in site.answer(Envelope({"plan": plan | {"run": "../b"}})).head["failed"]
    assert (data / "folder-0" / plan["run"] / "sum.json").exists()


def test_a_message_for_another_client_or_without_sense_does_not_end_the_program(data):
    site, said = program(data, 0), []
    assert "failed" in site.answer(Envelope({"client": 0})).head
    site = program(data, 0, said)
    other = site.answer(Envelope({"plan": {"version": "0.0.0", "settings": "not = [toml"}})).head
    assert "the server has 0.0.0; install the same" in other["failed"]
    assert len(said) == 1
