"""Replies that are out of line with the others': which are left out, in which order, and what is remembered."""

from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

from fedprotip.federation.line import Judged, in_agreement, in_line
from fedprotip.federation.parcels import Reply
from fedprotip.messages import Message


def measured(client, size, effort=1.0, refused="", least=0.0):
    message = Message("model", {"w": tensor([float(client)])}, {"n": client})
    return Judged(Reply(client, message), refused, message.nbytes, {"update": size}, {"update": least}, effort)


def judged(sizes, slack=4.0, known=None, efforts=None):
    """Which clients are refused."""
    efforts = efforts or [1.0] * len(sizes)
    replies = [measured(client, size, effort) for client, (size, effort) in enumerate(zip(sizes, efforts, strict=True))]
    found = list(in_line(iter(replies), slack, {} if known is None else known))
    assert [each.reply.client for each in found] == list(range(len(sizes)))
    for client, each in enumerate(found):  # those that waited on disk are what they were
        assert each.reply.message is not None
        assert each.reply.message.tensors["w"].tolist() == [client]
        assert each.reply.message.meta == {"n": client}
    return [each.reply.client for each in found if each.refused]


def test_one_many_times_as_large_as_all_others_is_left_out_wherever_it_stands():
    for place in range(5):
        sizes = [1.0, 1.2, 0.9, 1.1, 1.0]
        sizes[place] = 100.0
        assert judged(sizes) == [place]
        sizes[place] = 4.0
        assert judged(sizes) == []


def test_what_any_reply_may_have_is_not_told_apart_and_excuses_nobody():
    """One that did next to nothing in a single step is no reason for another to move twenty times as far in twenty."""
    for size, refused in ((4.0, []), (4.1, [2])):
        sizes, efforts = (0.01, 0.02, size), (1.0, 1.0, 20.0)
        replies = [measured(k, sizes[k], efforts[k], least=1.0) for k in range(3)]
        known = {}
        assert [each.reply.client for each in in_line(iter(replies), 4.0, known) if each.refused] == refused
        assert known["update"][1] == max(0.02, 0.0 if refused else size / 20)


def test_the_reason_names_what_is_out_of_line():
    found = list(in_line(iter([measured(0, 1.0), measured(1, 50.0), measured(2, 2.0)]), 4.0, {}))
    assert found[1].refused == "its update is 50, out of line with all others: at most 4 times 2"


def test_a_client_with_more_steps_may_move_farther():
    assert judged([1.0, 1.0, 30.0]) == [2]
    assert judged([1.0, 1.0, 30.0], efforts=[1, 1, 10]) == []
    assert judged([1.0, 1.0, 50.0], efforts=[1, 1, 10]) == [2]
    assert judged([30.0, 30.0, 1.0], efforts=[10, 10, 1]) == []


def test_of_two_either_may_be_the_odd_one():
    assert judged([1.0, 1000.0]) == []
    assert judged([1000.0]) == []


def test_with_nobody_to_compare_with_a_reply_may_not_be_out_of_all_proportion():
    """3,000 times slack times what any reply may have; where nothing is known of that, anything passes."""
    for size, refused in ((12_000.0, []), (13_000.0, [1]), (3e38, [1])):
        known = {}
        found = list(in_line((measured(k, each, least=1.0) for k, each in enumerate([1.0, size])), 4.0, known))
        assert [each.reply.client for each in found if each.refused] == refused
        assert known["update"][0] == (1.0 if refused else size)
    assert found[1].refused == "its update is 3e+38, out of all proportion: at most 1.2e+04"


def test_earlier_rounds_count_and_are_remembered():
    known = {}
    assert judged([1.0, 2.0, 1000.0], known=known) == [2]
    assert known == {"update": [2.0, 2.0]}
    assert judged([0.1, 9.0], known=known) == [1]
    assert judged([7.0], known=known) == []
    assert known == {"update": [7.0, 7.0]}


def test_a_reply_that_is_refused_already_says_nothing_about_others():
    replies = [measured(0, 1.0), measured(1, 1000.0, refused="bad"), measured(2, 100.0), measured(3, 1.0)]
    found = list(in_line(iter(replies), 4.0, {}))
    assert [bool(each.refused) for each in found] == [False, True, True, False]
    assert found[1].refused == "bad"


def test_nothing_waits_longer_than_it_must():
    """As soon as two others have come, a reply that is in line goes on."""
    seen = []

    def replies():
        for client in range(5):
            seen.append(client)
            yield measured(client, 1.0)

    ahead = [(each.reply.client, len(seen)) for each in in_line(replies(), 4.0, {})]
    assert ahead == [(0, 3), (1, 3), (2, 3), (3, 4), (4, 5)]


@given(st.lists(st.floats(0, 1e6), min_size=3, max_size=8), st.floats(1, 10))
def test_the_verdict_is_that_of_the_whole_round(sizes, slack):
    expected = [
        place
        for place, size in enumerate(sizes)
        if size > slack * max(other for at, other in enumerate(sizes) if at != place)
    ]
    assert judged(sizes, slack) == expected


def test_what_few_clients_tell_is_not_compared():
    """One of five tells something of its features; the others have too few samples."""

    def replies():
        for client in range(5):
            message = Message("statistics", {})
            yield Judged(Reply(client, message), "", 0, {"length": 2.0} if client == 1 else {})

    assert not any(each.refused for each in in_line(replies(), 3.0, {}))


class Numbers:
    """Agrees on the largest number that it has heard."""

    def __init__(self):
        self.heard = []

    def add(self, message):
        self.heard.append(message.meta["n"])

    def objection(self, message):
        return "" if message.meta["n"] == max(self.heard) else "another number"


def test_replies_that_contradict_the_others_are_refused_once_all_have_come():
    """Those that are refused already, or never came, are not heard; all wait on disk, and are what they were."""
    bad, gone = measured(7, 1.0, refused="no reply to use"), Judged(Reply(3, None), "it failed")
    replies = [measured(0, 1.0), measured(2, 1.0), gone, measured(4, 1.0), bad]
    found = list(in_agreement(iter(replies), Numbers()))
    assert [(each.reply.client, each.refused) for each in found] == [
        *((0, "another number"), (2, "another number"), (3, "it failed"), (4, ""), (7, "no reply to use")),
    ]
    assert [each.nbytes for each in found] == [each.nbytes for each in replies]
    assert found[3].reply.message.tensors["w"].tolist() == [4]
    assert found[2].reply.message is None
    assert list(in_agreement(iter(replies), None)) == replies
