"""A client killed, robbed of its folder, sent back by its server or damaged: it goes on, or says that it cannot."""

import gc
import json
import shutil
import weakref

import pytest
import torch

import fedprotip
from fedprotip.federation.client import Client
from fedprotip.federation.engines.apart import ApartEngine
from fedprotip.federation.parcels import LOST, Ask
from fedprotip.federation.server import Server
from fedprotip.messages import Message
from fedprotip.store.objects import sealed, unsealed
from fedprotip.stream import build_stream
from fedprotip.stream.holdings import Holding
from tests.sites import Ends
from tests.small import quick, results, small, tensors
from tests.test_resume import checkpoints, stop_after

APART = "run.engine=apart"
ANSWER = ApartEngine._answer


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    quick(monkeypatch)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run in which nothing happens to anyone, by method."""
    folders = {}

    def run(method="fedprotip"):
        if method not in folders:
            folders[method] = tmp_path_factory.mktemp(method) / "r"
            with pytest.MonkeyPatch.context() as patch:
                quick(patch)
                patch.setattr(ApartEngine, "_answer", ANSWER)  # whatever the test does that asks first
                fedprotip.run(small(APART, method={"name": method}), out=folders[method])
        return folders[method]

    return run


@pytest.fixture
def before_each(monkeypatch):
    """Let something happen to a client before each question: act(engine, client, the question)."""

    def install(act):
        original = ApartEngine._answer

        def disturbed(self, request):
            act(self, request.client, Ask.of(request.parcel[0]))
            return original(self, request)

        monkeypatch.setattr(ApartEngine, "_answer", disturbed)

    return install


def kill(engine, client):
    """Its process ends; its folder stays."""
    engine._clients.pop(client, None)


def folder_of(engine, client):
    return engine._folder / str(client)


def rob(engine, client):
    kill(engine, client)
    shutil.rmtree(folder_of(engine, client), ignore_errors=True)


def lines(folder, kind, client=1):
    """What a client was sent of a kind: (task, round) of each message."""
    found = map(json.loads, (folder / "ledger.jsonl").read_text().splitlines())
    return [
        (line["task"], line["round"])
        for line in found
        if (line["direction"], line["kind"], line["client"]) == ("down", kind, client)
    ]


@pytest.mark.parametrize("method", ["fedprotip", "fedavg"])
@pytest.mark.parametrize("wire", ["float32", "bf16"])
def test_killed_between_any_two_questions_it_goes_on(tmp_path, before_each, undisturbed, method, wire):
    whole = undisturbed(method)
    if wire != "float32":
        whole = tmp_path / "whole"
        fedprotip.run(small(APART, method={"name": method}, train={"wire": wire}), out=whole)
    before_each(lambda engine, client, ask: kill(engine, client))
    fedprotip.run(small(APART, method={"name": method}, train={"wire": wire}), out=tmp_path / "r")
    assert results(tmp_path / "r") == results(whole)


@pytest.mark.slow
def test_a_resting_client_is_the_same_client(tmp_path, before_each, undisturbed):
    """It gives the memory of its model back between two questions."""

    def rest(engine, client, ask):
        if client in engine._clients:
            engine._clients[client].rest()

    before_each(rest)
    fedprotip.run(small(APART), out=tmp_path / "r")
    assert results(tmp_path / "r") == results(undisturbed())


@pytest.mark.slow
def test_a_resting_client_holds_nothing(tmp_path, monkeypatch):
    """Neither the model nor what its folder saved last or keeps at hand."""
    alive = []
    original = Client.handle

    def handle(self, parcel):
        reply = original(self, parcel)
        alive[:] = [weakref.ref(parameter) for parameter in self._site.network.parameters()]
        alive.extend(weakref.ref(t) for _, group, _ in self._folder._objects._saved.values() for t in group.values())
        assert alive
        assert self._folder.store.cached_bytes or parcel[0].meta["exchange"] != "basis"
        self.rest()
        gc.collect()
        assert not [ref for ref in alive if ref() is not None]
        assert self._folder.store.cached_bytes == 0
        return reply

    monkeypatch.setattr(Client, "handle", handle)
    assert fedprotip.run(small(APART, stream={"tasks": 1}), out=tmp_path / "r")["failures"]["count"] == 0


MOMENTS = {
    "between two rounds of the first task": ("model", 0, 1),
    "in the first round of a later task": ("model", 1, 0),
    "between two rounds of a later task": ("model", 1, 2),
    "before it is asked for statistics": ("statistics", 1, None),
    "before it is asked for references": ("reference", 1, None),
    "before it is asked for anything of a task": ("presence", 2, None),
}


@pytest.mark.parametrize(
    ("method", "moment"),
    [
        (method, moment)
        for method in ("fedprotip", "fedavg")
        for moment, (exchange, *_) in MOMENTS.items()
        if method == "fedprotip" or exchange in ("model", "presence")  # FedAvg asks nothing else
    ],
)
def test_without_its_folder_it_is_sent_everything_anew_and_takes_part(
    tmp_path, before_each, undisturbed, method, moment
):
    lost = []

    def once(engine, client, ask):
        if client == 1 and (ask.exchange, ask.task, ask.round) == MOMENTS[moment]:
            rob(engine, client)
            lost.append(ask)

    before_each(once)
    summary = fedprotip.run(small(APART, method={"name": method}), out=tmp_path / "r")
    assert len(lost) == 1
    assert summary["failures"]["count"] == 0
    whole = undisturbed(method)
    files = ("model", "subspaces") if method == "fedprotip" else ("model",)
    for name in files:  # what it sends is what it would have sent
        assert (tmp_path / "r" / f"{name}.safetensors").read_bytes() == (whole / f"{name}.safetensors").read_bytes()
    place = MOMENTS[moment][1:]
    assert lines(tmp_path / "r", "plan") == [(0, None), place]
    assert lines(tmp_path / "r", "plan", client=0) == [(0, None)]
    assert lines(tmp_path / "r", "ask").count(place) == lines(whole, "ask").count(place) + 1
    assert len(lines(tmp_path / "r", "model")) >= len(lines(whole, "model"))
    if method == "fedprotip":
        counts = tensors(tmp_path / "r", "references")["counts"]
        told = tensors(whole, "references")["counts"]
        forgotten = place[0] + (MOMENTS[moment][0] == "reference")  # moments of these tasks were only in its folder
        assert counts[1, :forgotten].tolist() == [0] * forgotten
        assert counts[1, forgotten:].tolist() == told[1, forgotten:].tolist()
        assert counts[[0, 2]].tolist() == told[[0, 2]].tolist()


@pytest.mark.parametrize(("verb", "calls"), [("train", 2), ("train", 14), ("summarise", 2), ("summarise", 14)])
@pytest.mark.parametrize("every", [1, pytest.param(50, marks=pytest.mark.slow)])
def test_it_goes_back_with_its_server(tmp_path, monkeypatch, verb, calls, every):
    """The server is interrupted and comes back with an earlier checkpoint, or with none: nobody lost anything."""
    settings = small(APART, f"run.checkpoint={every}")
    fedprotip.run(settings, out=tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, calls, verb)
        with pytest.raises(KeyboardInterrupt):
            fedprotip.run(settings, out=tmp_path / "r")
    fedprotip.resume(tmp_path / "r")
    assert results(tmp_path / "r") == results(tmp_path / "whole")


def test_it_goes_back_with_its_server_by_two_checkpoints(tmp_path, monkeypatch, undisturbed):
    """The newest checkpoint of the server is damaged."""
    with monkeypatch.context() as patch:
        stop_after(patch, 17)
        with pytest.raises(KeyboardInterrupt):
            fedprotip.run(small(APART), out=tmp_path / "r")
    newest = checkpoints(tmp_path / "r")[-1]
    newest.write_bytes(newest.read_bytes()[:-20])
    fedprotip.resume(tmp_path / "r")
    assert results(tmp_path / "r") == results(undisturbed())


@pytest.fixture
def living_on(monkeypatch):
    """Clients whose processes outlive their server, as those of sites do."""
    alive, original = {}, ApartEngine.__init__

    def begin(self, stream, folder):
        original(self, stream, folder)
        self._clients = alive

    monkeypatch.setattr(ApartEngine, "__init__", begin)
    return alive


@pytest.mark.parametrize("method", ["fedprotip", "fedavg"])
def test_its_memory_goes_back_with_its_server(tmp_path, monkeypatch, undisturbed, living_on, method):
    """By a task and more: what it heard since is not only gone from its disk."""
    settings = small(APART, "run.checkpoint=50", method={"name": method})
    with monkeypatch.context() as patch:
        stop_after(patch, 22)
        with pytest.raises(KeyboardInterrupt):
            fedprotip.run(settings, out=tmp_path / "r")
    newest = checkpoints(tmp_path / "r")[-1]
    newest.write_bytes(newest.read_bytes()[:-20])
    assert {client._site.task for client in living_on.values()} == {2}
    fedprotip.resume(tmp_path / "r")
    asks = ("ask",)  # they say how far back the server may go, which is further here
    assert results(tmp_path / "r", asks) == results(undisturbed(method), asks)


def test_a_question_of_a_life_that_the_server_went_back_behind_is_not_the_one_of_its_number(tmp_path):
    """It heard question 2 and the server, which went back, asked another question 2 that never arrived."""
    settings = small()
    ends = Ends(settings, tmp_path / "ends")
    server = Server(settings, ends.method, ends.network, ends.stream)
    client = Client(tmp_path / "client", Holding(ends.stream, 0))

    def asked(step, since, life, then="", beside=()):
        ask = Ask("presence", 0, None, step, since, keep=0, life=life, then=then)
        return client.handle([ask.message(), *beside]).kind

    assert asked(1, None, "a", beside=[server._plan()]) == "presence"
    assert asked(2, 1, "a", "a") == "presence"
    assert asked(3, 2, "b", "b") == LOST
    client.rest()
    assert asked(3, 2, "b", "b") == LOST
    assert asked(3, 1, "b", "a") == "presence"
    assert asked(4, 3, "b", "b") == "presence"


def test_what_it_could_not_take_in_is_forgotten(tmp_path):
    """A parcel that breaks off in the middle leaves nothing that its server does not know of."""
    settings = small()
    ends = Ends(settings, tmp_path / "ends")
    server = Server(settings, ends.method, ends.network, ends.stream)
    client = Client(tmp_path / "client", Holding(ends.stream, 0))
    client.handle([Ask("presence", 0, None, 1, None, keep=0).message(), server._plan()])
    heads = len(client._site.network.labels)
    model = Message("model", {"start/nothing of the kind": torch.zeros(3)})
    with pytest.raises(AttributeError):
        client.handle([Ask("model", 2, 0, 2, since=1, keep=0).message(), model])
    client.handle([Ask("presence", 0, None, 2, since=1, keep=0).message()])
    assert len(client._site.network.labels) == heads


@pytest.mark.parametrize("odd", ["private", "heads", "moving"])
def test_a_state_of_another_version_counts_as_lost(tmp_path, odd):
    """Its file is whole and lacks something that this version keeps there: no client fails on it for ever."""
    settings = small()
    ends = Ends(settings, tmp_path / "ends")
    server = Server(settings, ends.method, ends.network, ends.stream)
    client = Client(tmp_path / "client", Holding(ends.stream, 0))
    client.handle([Ask("presence", 0, None, 1, None, keep=0).message(), server._plan()])
    client.rest()
    path = tmp_path / "client" / "00000001.json"
    index = unsealed(path.read_bytes())
    for part in (index, index["state"], index["groups"]):
        part.pop(odd, None)
    path.write_text(sealed(index))
    assert client.handle([Ask("presence", 0, None, 2, since=1, keep=0).message()]).kind == LOST
    told = [Ask("presence", 0, None, 2, None, keep=0).message(), server._plan()]
    assert client.handle(told).kind == "presence"


def test_a_damaged_snapshot_counts_as_lost(tmp_path, before_each, undisturbed):
    """The newest one has a wrong byte: what the client was told is gone, what it keeps for itself is not."""
    damaged = []

    def once(engine, client, ask):
        if (client, ask.exchange, ask.task, ask.round) == (1, "model", 1, 1):
            kill(engine, client)
            newest = sorted(folder_of(engine, client).glob("*.json"))[-1]
            newest.write_bytes(newest.read_bytes()[:-1] + b" ")
            damaged.append(newest)

    before_each(once)
    fedprotip.run(small(APART), out=tmp_path / "r")
    assert len(damaged) == 1
    assert lines(tmp_path / "r", "plan") == [(0, None), (1, 1)]
    mine, theirs = results(tmp_path / "r"), results(undisturbed())
    for name in ("model.safetensors", "subspaces.safetensors", "references.safetensors"):
        assert mine[name] == theirs[name]


def test_a_client_that_never_heard_of_a_question_says_so(tmp_path):
    stream = build_stream(small())
    client = Client(tmp_path, Holding(stream, 0))
    reply = client.handle([Ask("model", 1, 0, step=9, since=8, keep=0).message()])
    assert reply.kind == LOST
    assert reply.meta == {"since": 8}


def test_what_fails_in_an_answer_leaves_the_client_where_it_was(tmp_path, monkeypatch, undisturbed):
    """It trained and then failed: the next round begins from the model it was sent, also in another process."""
    from tests.sites import through

    failed, plain = [], results(undisturbed())

    def fails_once(answer, local, name):
        message = answer()
        if (local.client, local.task, local.round) == (1, 1, 1):
            failed.append(local)
            raise ValueError("no power")
        return message

    through(monkeypatch, fails_once)
    for engine in ("local", "apart"):
        fedprotip.run(small(f"run.engine={engine}"), out=tmp_path / engine)
    assert len(failed) == 2
    assert results(tmp_path / "apart") == results(tmp_path / "local")
    assert results(tmp_path / "apart")["model.safetensors"] != plain["model.safetensors"]


def test_a_parcel_without_a_plan_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="brings the plan"):
        Client(tmp_path, Holding(build_stream(small()), 0)).handle(
            [Ask("presence", 0, None, step=1, since=None, keep=0).message(), Message("model")]
        )
