"""The engine around a grid of Flower: order, room, late, lost and failing clients. The grid is a list here."""

import json

import pytest
import torch

from fedprotip.envelopes import HELLO, Envelope
from fedprotip.errors import RunError
from fedprotip.federation.aggregate import Average
from fedprotip.federation.engines import flower
from fedprotip.federation.engines.flower import FlowerEngine, Reachable, Sites
from fedprotip.federation.parcels import LOST, Ask, Request
from fedprotip.messages import Message
from fedprotip.store.memory import status_mb, watched
from fedprotip.store.plain import PlainFolder

flwr = pytest.importorskip("flwr", reason="the extra flower")
pytestmark = pytest.mark.slow  # Flower is imported: seconds


class Node:
    def __init__(self, node_id, public_key=b""):
        self.node_id, self.public_key = node_id, public_key


class FakeGrid:
    """Answers come from `answer(node, type, envelope)`: an envelope, an error of Flower, or None for not yet.

    As Flower's own, it hands over all at once that has arrived.
    """

    def __init__(self, answer, nodes=(), backwards=False):
        self._answer, self.nodes, self._backwards = answer, list(nodes), backwards
        self.waiting, self.most, self.sent = {}, 0, []

    def get_nodes(self):
        return list(self.nodes)

    def push_messages(self, messages):
        for message in messages:
            name = f"m{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = name
            self.sent.append((message.metadata.dst_node_id, message.metadata.message_type))
            self.waiting[name] = message
            self.most = max(self.most, len(self.waiting))
            yield name

    def pull_messages(self, names):
        found = []
        for name in sorted(names, key=lambda name: int(name[1:]), reverse=self._backwards):
            message = self.waiting[name]
            envelope = Envelope.of(message.content)
            answer = self._answer(message.metadata.dst_node_id, message.metadata.message_type, envelope)
            if answer is not None:
                del self.waiting[name]
                content = answer.records() if isinstance(answer, Envelope) else answer
                found.append(flwr.app.Message(content, reply_to=message))
        return found


class AsNumbered:
    def of(self, client, began, meanwhile):
        return 100 + client


def request(client, since=None, anew=None):
    parcel = [Ask("train", 0, 0, 7, since, 0).message(), Message("model", meta={"to": client})]
    return Request(client, parcel, anew or (lambda lost: pytest.fail("nothing was lost")))


def reply(client, kind="train"):
    return Envelope({"kind": kind}, [Message(kind, meta={"from": client}).to_bytes()])


@pytest.fixture(autouse=True)
def _as_in_a_run(monkeypatch):
    from flwr.supercore.task_identity import TaskIdentity

    monkeypatch.setattr(flower, "PAUSE", 0.01)
    for part in ("task_id", "run_id", "node_id"):  # as in a process that Flower has started
        setattr(TaskIdentity, part, 1)


def test_replies_come_in_the_order_of_clients_and_few_are_under_way():
    grid = FakeGrid(lambda node, kind, envelope: reply(envelope.head["client"]), backwards=True)
    engine = FlowerEngine(grid, AsNumbered(), 60, room=3)
    replies = list(engine.ask(map(request, range(8))))
    assert [answer.client for answer in replies] == list(range(8))
    assert [answer.message.meta["from"] for answer in replies] == list(range(8))
    assert grid.most == 3
    assert [node for node, _ in grid.sent] == list(range(100, 108))


def test_a_client_that_is_late_fails_or_is_gone_is_left_out_and_named():
    error = flwr.app.Error(code=5, reason="gone")
    answers = {
        100: lambda: reply(0),
        101: lambda: None,
        102: lambda: error,
        103: lambda: Envelope({"failed": "the disk is full"}),
        104: lambda: Envelope({"kind": "train"}, [b"no message"]),
        105: lambda: Envelope({"kind": "train"}),
        106: lambda: reply(6),
    }
    engine = FlowerEngine(FakeGrid(lambda node, *_: answers[node]()), AsNumbered(), 0.3)
    replies = {answer.client: answer for answer in engine.ask(map(request, range(7)))}
    assert [client for client, answer in replies.items() if answer.message] == [0, 6]
    assert "no answer within 0.3 seconds" in replies[1].error
    assert "its machine is gone (Flower's error 5: gone)" in replies[2].error
    assert replies[3].error == "the disk is full"
    assert "not a readable message" in replies[4].error
    assert replies[5].error


def test_replies_that_come_twice_or_to_nothing_and_errors_nobody_knows_harm_no_other():
    """What no client should send, and no SuperLink pass on."""

    class Odd(FakeGrid):
        def pull_messages(self, names):
            stray = flwr.app.Message(reply(9).records(), dst_node_id=1, message_type="train")
            found = super().pull_messages(names)
            return [stray, *found, *found]

    deep = flwr.app.RecordDict({"head": flwr.app.ConfigRecord({"json": "[" * 100_000})})
    answers = [
        lambda: reply(0),
        lambda: flwr.app.Error(code=-7),
        lambda: flwr.app.Error(code=10**6, reason="x" * 10_000),
        lambda: flwr.app.RecordDict(),
        lambda: deep,
        lambda: Envelope({"failed": {"a": ["list"]}}),
        lambda: Envelope({"kind": LOST}, [b"no message"]),
        lambda: Envelope({"kind": ["train"]}, [reply(7).parts[0]] * 2),
        lambda: reply(8, LOST),
        lambda: reply(9),
    ]
    engine = FlowerEngine(Odd(lambda node, *_: answers[node - 100]()), AsNumbered(), 60)
    replies = list(engine.ask(request(client, since=5 if client == 6 else None) for client in range(len(answers))))
    assert [answer.client for answer in replies] == list(range(len(answers)))
    assert [answer.client for answer in replies if answer.message] == [0, 8, 9]
    assert all(0 < len(answer.error) < 600 for answer in replies[1:8])
    assert "Flower's error -7" in replies[1].error


def test_a_client_that_has_lost_its_place_is_told_everything_anew():
    lost = []

    def anew(message):
        lost.append(message)
        return [Ask("train", 0, 0, 7, None, 0).message(), Message("everything")]

    def answer(node, kind, envelope):
        kinds = [Message.from_bytes(part).kind for part in envelope.parts]
        return reply(1) if kinds[1] == "everything" else reply(1, LOST)

    engine = FlowerEngine(FakeGrid(answer), AsNumbered(), 60)
    (answered,) = engine.ask([request(1, since=5, anew=anew)])
    assert answered.message.kind == "train"
    assert [message.kind for message in lost] == [LOST]


def test_a_client_that_was_never_reached_was_told_nothing():
    class Away:
        def of(self, client, began, meanwhile):
            return "it is not connected"

    untold = []
    asked = Request(3, request(3).parcel, request(3).anew, lambda: untold.append(3))
    (answered,) = FlowerEngine(FakeGrid(lambda *_: None), Away(), 60).ask([asked])
    assert answered.error == "it is not connected"
    assert untold == [3]


def test_memory_does_not_grow_with_the_number_of_clients():
    """100 replies of 12 MB, all there at once, through the engine into an average: a few of them."""
    size = 12 * 2**18

    def arrived(*_):
        return Envelope({"kind": "train"}, [Message("train", {"w": torch.ones(size)}).to_bytes()])

    engine, mean = FlowerEngine(FakeGrid(arrived, backwards=True), AsNumbered(), 600), Average()
    started = status_mb("VmRSS")
    with watched() as peak:
        for answer in engine.ask(map(request, range(100))):
            mean.add(answer.message.tensors, 1.0)
    assert mean.result()["w"].sum() == size
    assert peak.mb - started < 25 * 12  # a hundred would be there at once


def test_a_client_whose_question_could_not_be_sent_anew_was_told_nothing():
    class Full(FakeGrid):
        def push_messages(self, messages):
            return super().push_messages(messages) if not self.sent else []

    untold = []
    parcel = request(3, since=5).parcel
    asked = Request(3, parcel, lambda lost: parcel, lambda: untold.append(3))
    engine = FlowerEngine(Full(lambda *_: reply(3, LOST)), AsNumbered(), 60)
    (answered,) = engine.ask([asked])
    assert answered.error == "the question could not be sent"
    assert untold == [3]


PLAN = {"kept": {"classes": ["a", "b"], "tasks": [{"name": "a, b", "labels": [0, 1]}]}}


class Clock:
    """Time goes by only where somebody sleeps."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(flower, "time", found)
    return found


def find(known, client, began=None):
    """The node of a client in an exchange that begins now; nobody else's answer is waited for meanwhile."""
    return known.of(client, flower.time.monotonic() if began is None else began, lambda: None)


def sites(tmp_path, answer, nodes, patience=0.0, keyed=False, bound=dict):
    tmp_path.mkdir(exist_ok=True)
    grid = FakeGrid(answer, nodes)
    return grid, Sites(Reachable(grid, keyed, bound), PLAN, PlainFolder(tmp_path), patience)


def test_sites_say_which_client_they_are_and_are_asked_once(tmp_path):
    said = {50: Envelope({"client": 3, "holds": {"a, b": {"a": 7}}}), 51: Envelope({"client": 1})}
    grid, known = sites(tmp_path, lambda node, *_: said[node], [Node(50), Node(51)])
    assert [find(known, 3), find(known, 1), find(known, 3)] == [50, 51, 50]
    assert grid.sent == [(50, HELLO), (51, HELLO)]
    assert json.loads((tmp_path / "sites.json").read_text())["3"]["holds"] == {"a, b": {"a": 7}}


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"x": {}}', '{"1": 5}', '{"1": {"key": 7}}', "[" * 10**5, '{"1": {"key": "\\ud800"}}']
)
def test_what_sites_are_said_to_have_said_may_be_a_strangers(tmp_path, text):
    (tmp_path / "sites.json").write_text(text)
    with pytest.raises(RunError, match=r"sites\.json is damaged"):
        sites(tmp_path, None, [])


@pytest.mark.parametrize(
    "holds",
    [
        "x" * 10**6,
        {"x" * 10**6: {"a": 1}, "a, b": {"x" * 10**6: 1, "a": 10**30, "b": "many"}},
        {"a, b": [1], "b": None},
        None,
    ],
)
def test_what_a_site_says_it_has_takes_no_more_room_than_the_plan(tmp_path, holds):
    said = {50: Envelope({"client": 3, "holds": holds}), 51: Envelope({"client": 10**30}), 52: Envelope({"client": -1})}
    _, known = sites(tmp_path, lambda node, *_: said[node], [Node(50), Node(51), Node(52)])
    assert find(known, 3) == 50
    assert len((tmp_path / "sites.json").read_text()) < 200
    assert list(json.loads((tmp_path / "sites.json").read_text())) == ["3"]


def test_a_client_that_is_not_there_is_waited_for_once_and_found_when_it_comes(tmp_path, clock):
    grid, known = sites(tmp_path, lambda *_: Envelope({"client": 0}), [], patience=100.0)
    assert find(known, 0) == "it is not connected"
    assert 1100 <= clock.now < 1110
    assert find(known, 0) == "it is not connected"
    assert clock.now < 1110
    grid.nodes = [Node(9)]
    assert find(known, 0) == 9
    grid.nodes = []
    assert find(known, 0) == "it is not connected"
    assert 1200 <= clock.now < 1220


def test_a_hundred_clients_that_are_not_there_are_waited_for_together(tmp_path, clock):
    _, known = sites(tmp_path, lambda *_: None, [], patience=60.0)
    engine = FlowerEngine(FakeGrid(lambda *_: None), known, 60)
    for _ in range(3):
        assert {answer.error for answer in engine.ask(map(request, range(100)))} == {"it is not connected"}
    assert 1060 <= clock.now < 1070


@pytest.mark.parametrize("patience", [0.0, 300.0])
def test_a_site_that_does_not_speak_holds_nobody_up_and_is_heard_when_it_does(tmp_path, clock, patience):
    """One thread answers at a site: while it trains for a run that was handed in before, it says nothing."""
    said = {50: None, 51: Envelope({"client": 1})}
    grid, known = sites(tmp_path, lambda node, *_: said[node], [Node(50), Node(51)], patience)
    assert find(known, 1) == 51
    assert clock.now == 1000
    for _ in range(20):  # exchanges
        began = clock.now
        assert find(known, 0, began) == "it is not connected; sites that have not said yet which client they are: 1"
        assert find(known, 2, began).startswith("it is not connected")
        assert find(known, 1, began) == 51
    waited = max(patience, flower.MEETING)
    assert waited <= clock.now - 1000 < waited + 2
    assert grid.sent == [(50, HELLO), (51, HELLO)]
    said[50] = Envelope({"client": 0})
    assert find(known, 0) == 50


def test_why_a_site_does_not_say_who_it_is_is_told(tmp_path, clock):
    failed = flwr.app.Error(code=8, reason="no such file: door")
    _, known = sites(tmp_path, lambda *_: failed, [Node(9)])
    why = "a site that is no client yet: its process ended (Flower's error 8: no such file: door)"
    assert find(known, 0) == f"it is not connected; {why}"


def test_a_site_whose_data_does_not_fit_is_refused_in_its_own_words(tmp_path, clock):
    said = {"failed": "its class 'zebra' is in no task", "client": 0}
    _, known = sites(tmp_path, lambda *_: Envelope(said), [Node(9)])
    assert find(known, 0) == "its class 'zebra' is in no task"
    clock.now += flower.AGAIN
    said.pop("failed")  # mended
    assert find(known, 0) == 9


def test_a_site_is_known_by_its_key(tmp_path):
    _, known = sites(tmp_path, lambda *_: Envelope({"client": 0}), [Node(9, b"key")], keyed=True)
    assert find(known, 0) == 9
    _, later = sites(tmp_path, lambda *_: Envelope({"client": 0}), [Node(10, b"other")], keyed=True)
    assert "another key than before" in find(later, 0)
    _, again = sites(tmp_path, lambda *_: Envelope({"client": 0}), [Node(11, b"key")], keyed=True)
    assert find(again, 0) == 11


def test_one_key_is_one_client(tmp_path, clock):
    """Else one site could be all clients, and whoever comes later in their place would be refused."""
    said = {9: Envelope({"client": 0}), 10: Envelope({"client": 1}), 11: Envelope({"client": 1})}
    grid, known = sites(tmp_path, lambda node, *_: said[node], [Node(9, b"key")], keyed=True)
    assert find(known, 0) == 9
    grid.nodes = [Node(9, b"key"), Node(10, b"key")]
    assert "it says it is client 1 and has the key of 0" in find(known, 1)
    grid.nodes = [*grid.nodes, Node(11, b"its own")]
    assert find(known, 1) == 11


def test_a_client_whose_key_was_admitted_for_it_is_nobody_else(tmp_path, clock):
    bound = {0: b"mine".hex()}
    said = {9: Envelope({"client": 0}), 10: Envelope({"client": 0}), 11: Envelope({"client": 1})}
    nodes = [Node(9, b"first come"), Node(11, b"mine")]
    grid, known = sites(tmp_path, lambda node, *_: said[node], nodes, keyed=True, bound=lambda: bound)
    assert "it says it is client 0 and does not have the key that was admitted for that one" in find(known, 0)
    assert "it says it is client 1 and has the key of 0" in find(known, 1)
    grid.nodes = [Node(9, b"first come"), Node(10, b"mine")]
    assert find(known, 0) == 10
    bound[0] = b"a new machine".hex()  # as whoever runs the server says
    _, later = sites(tmp_path, lambda *_: Envelope({"client": 0}), [Node(12, b"a new machine")], keyed=True)
    assert "another key than before" in find(later, 0)
    _, later = sites(
        tmp_path, lambda *_: Envelope({"client": 0}), [Node(12, b"a new machine")], keyed=True, bound=lambda: bound
    )
    assert find(later, 0) == 12
