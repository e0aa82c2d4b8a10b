"""The sum is the plain sum whoever is lost; too few learn nothing; what was changed is noticed; masks hide."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprotip.federation.secure.ring import Layout, decode, encode
from fedprotip.messages import BadMessage, Message
from fedprotip.methods.parts.training import UNIT

pytest.importorskip("cryptography")
pytest.importorskip("Crypto")

from fedprotip.federation.secure.masks import KEYS, LETTER, Member, check_keys, check_of, threshold, unmask

SHARE = 0.5


def vectors(clients, size=40, seed=0):
    chance = np.random.default_rng(seed)
    return {client: chance.integers(0, 2**64, size, dtype=np.uint64) for client in clients}


class Sum:
    """A sum in which clients are lost, or something is changed on its way."""

    def __init__(self, given, share=SHARE):
        self.given, self.share = given, share
        self.members = {client: Member(client, share) for client in given}

    def masked(self, no_keys=(), no_shares=(), no_vector=(), change=lambda sender, receiver, letter: letter):
        self.roster = {client: member.keys() for client, member in self.members.items() if client not in no_keys}
        told = [client for client in self.roster if client not in no_shares]
        sent = {client: self.members[client].share(self.roster) for client in told}
        self.commitments = {client: committed for client, (committed, _) in sent.items()}
        self.vectors = {}
        for client in told:
            post = {o: change(o, client, letters[client]) for o, (_, letters) in sent.items() if o != client}
            if client not in no_vector:
                self.vectors[client] = self.members[client].mask(self.given[client], post)
        return self

    def result(self, silent=(), arrived=None, change=lambda teller, told: told):
        arrived = list(self.vectors) if arrived is None else arrived
        revealed = {c: change(c, self.members[c].reveal(arrived)) for c in arrived if c not in silent}
        total = np.zeros(len(next(iter(self.vectors.values()))), dtype=np.uint64)
        for vector in self.vectors.values():
            total += vector
        return unmask(total, self.roster, self.commitments, arrived, revealed, self.share)


def plain(given, clients):
    return np.sum([given[client] for client in clients], axis=0, dtype=np.uint64)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_sum_is_that_of_all_whose_vector_arrived(data):
    """At every phase anybody may be lost, as long as enough stay."""
    clients = data.draw(st.lists(st.integers(0, 10**6), min_size=2, max_size=7, unique=True))
    given, left, lost = vectors(clients), list(clients), []
    least = threshold(len(clients), SHARE)
    for phase in range(4):
        gone = data.draw(st.lists(st.sampled_from(left), max_size=len(left) - least, unique=True))
        left = [client for client in left if client not in gone]
        lost.append(gone)
        least = max(least, threshold(len(left), SHARE)) if phase == 0 else least
    found = Sum(given).masked(*lost[:3]).result(silent=lost[3])
    assert (found == plain(given, [*left, *lost[3]])).all()


@pytest.mark.parametrize("phase", ["no_keys", "no_shares", "no_vector", "silent"])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_as_many_may_be_lost_as_the_threshold_allows(phase, lost):
    given = vectors(range(5))
    gone = list(range(lost))
    early = {} if phase == "silent" else {phase: gone}
    found = Sum(given).masked(**early).result(silent=gone if phase == "silent" else ())
    assert (found == plain(given, range(0 if phase == "silent" else lost, 5))).all()


@pytest.mark.parametrize("phase", ["no_keys", "no_shares", "no_vector", "silent"])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_mean_of_replies_is_the_plain_one_to_a_millionth_whoever_is_lost(phase, lost):
    """From replies to masked vectors, their sum, and back."""
    chance, gone = torch.Generator().manual_seed(0), list(range(lost))
    replies = {
        client: Message(
            "model",
            {"w": 0.05 * torch.randn(40, generator=chance), "running_var": 300 * torch.rand(9, generator=chance)},
            {"samples": 40 + 100 * client, "loss": 0.5 + client},
        )
        for client in range(5)
    }
    weights = {client: reply.meta["samples"] / UNIT for client, reply in replies.items()}
    there = 5 - lost if phase == "no_keys" else 5
    given = {client: encode(reply, weights[client], there, True) for client, reply in replies.items()}
    early = {} if phase == "silent" else {phase: gone}
    found = Sum(given).masked(**early).result(silent=gone if phase == "silent" else ())
    stayed = list(range(0 if phase == "silent" else lost, 5))
    whole, exact = decode(found, Layout.of(replies[0]), len(stayed), True)
    for name, tensor in exact.items():
        total = sum(weights[client] for client in stayed)
        plain = sum(weights[client] * replies[client].tensors[name].double() for client in stayed) / total
        assert (tensor - plain).norm() <= 1e-6 * plain.norm()
    assert whole.meta["samples"] == sum(replies[client].meta["samples"] for client in stayed)


@pytest.mark.parametrize("phase", ["no_shares", "no_vector", "silent"])
def test_below_the_threshold_nothing_is_revealed(phase):
    gone = [0, 1, 2]
    started = Sum(vectors(range(5)))
    with pytest.raises(BadMessage, match="a sum needs 3"):
        started.masked(**({} if phase == "silent" else {phase: gone})).result(silent=gone if phase == "silent" else ())


def test_a_client_is_never_alone_in_a_sum():
    alone = Sum(vectors([4]))
    with pytest.raises(BadMessage, match="no sum can be made of"):
        alone.masked()


def test_a_changed_letter_is_noticed_by_whom_it_reaches():
    def change(sender, receiver, letter):
        return bytes([letter[0], *letter[1:-1], letter[-1] ^ 1]) if (sender, receiver) == (1, 3) else letter

    with pytest.raises(BadMessage, match="letter of client 1 was changed"):
        Sum(vectors(range(5))).masked(change=change)


def test_a_letter_for_another_sum_is_noticed():
    kept = {}
    Sum(vectors(range(3))).masked(change=lambda s, r, letter: kept.setdefault((s, r), letter))
    with pytest.raises(BadMessage, match="changed"):
        Sum(vectors(range(3))).masked(change=lambda s, r, letter: kept[s, r])


def flipped(about, by):
    def change(teller, told):
        return {
            c: bytes([share[0] ^ 1, *share[1:]]) if teller in by and c == about else share for c, share in told.items()
        }

    return change


@pytest.mark.parametrize(("about", "what"), [(0, "key"), (2, "mask")])
def test_a_changed_share_is_noticed_and_one_is_made_up_for(about, what):
    """Client 0 was lost, so shares of its key are asked for; client 2 was not."""
    given = vectors(range(6))
    found = Sum(given).masked(no_vector=[0]).result(change=flipped(about, by=[3]))
    assert (found == plain(given, range(1, 6))).all()
    with pytest.raises(BadMessage, match=f"shares of the {what} of client {about} do not fit"):
        Sum(given).masked(no_vector=[0]).result(change=flipped(about, by=[3, 4, 5]))


@pytest.mark.parametrize("place", [0, 17, -1])
@pytest.mark.parametrize("bit", [0, 62, 63])
def test_a_changed_vector_is_noticed(place, bit):
    started = Sum(vectors(range(4))).masked()
    started.vectors[2][place] ^= np.uint64(2**bit)
    with pytest.raises(BadMessage, match="masks do not cancel out"):
        started.result()


def test_a_highest_bit_is_noticed_wherever_it_is():
    """With even factors it would be lost in every other place."""
    vector, session = np.zeros(200, dtype=np.uint64), bytes(32)
    for place in range(len(vector)):
        changed = vector.copy()
        changed[place] = 2**63
        assert check_of(changed, session) != check_of(vector, session)


@pytest.mark.parametrize("percent", [50, 55, 58, 90, 100])
def test_more_than_the_share_must_stay(percent):
    for clients in range(2, 120):
        least = threshold(clients, percent / 100)
        assert least == clients if percent == 100 else least * 100 > clients * percent
        assert least == 2 or (least - 1) * 100 <= clients * percent
        assert 2 * least > clients >= least


def shares_told(started, victim, lists):
    """Of a server that tells every client another list of those whose vectors arrived: shares of either secret."""
    own, key = {}, {}
    for place, (client, arrived) in enumerate(lists.items(), start=1):
        (own if victim in arrived else key)[place] = started.members[client].reveal(arrived)[victim]
    return own, key


@pytest.mark.parametrize("clients", [3, 4, 5])
def test_a_server_that_tells_clients_different_lists_gets_one_secret_of_a_client_at_most(clients):
    """Both would give its vector away; each takes more than half of the clients."""
    given, least = vectors(range(clients)), threshold(clients, SHARE)
    for lost in product([False, True], repeat=clients - 1):
        started = Sum(given).masked()
        lists = {c: [o for o in range(clients) if o or not (c and lost[c - 1])] for c in range(clients)}
        if clients - 1 < least and any(lost):
            continue
        own, key = shares_told(started, 0, lists)
        assert min(len(own), len(key)) < least


def test_a_client_takes_no_part_under_keys_that_are_not_its_own():
    member, other = Member(0, SHARE), Member(1, SHARE)
    member.keys()
    with pytest.raises(BadMessage, match="others for this client than it told"):
        member.share({0: Member(0, SHARE).keys(), 1: other.keys()})


@pytest.mark.parametrize("where", [0, 1])
def test_keys_with_which_nobody_can_agree_are_refused(where):
    keys = Member(0, SHARE).keys()
    check_keys(keys)
    half = KEYS // 2
    with pytest.raises(BadMessage, match="its keys are none"):
        check_keys(keys[:half] + bytes(half) if where else bytes(half) + keys[half:])


def test_a_client_tells_of_each_other_one_secret_and_once():
    """Both together would give its vector away."""
    started = Sum(vectors(range(5))).masked(no_vector=[0])
    first = started.members[3].reveal([1, 2, 3, 4])
    assert set(first) == {0, 1, 2, 3, 4}
    with pytest.raises(BadMessage, match="not the next one"):
        started.members[3].reveal([0, 1, 2, 3])


def test_no_step_is_made_twice():
    """Two vectors with the same masks would give their difference away."""
    started = Sum(vectors(range(3))).masked()
    with pytest.raises(BadMessage, match="not the next one"):
        started.members[0].mask(started.given[0], {})
    with pytest.raises(BadMessage, match="not the next one"):
        started.members[0].keys()


@pytest.mark.parametrize("arrived", [[1, 2], [0], [0, 1, 9]])
def test_a_client_reveals_nothing_about_a_sum_it_is_not_in(arrived):
    started = Sum(vectors(range(3))).masked()
    with pytest.raises(BadMessage):
        started.members[0].reveal(arrived)


def uniformity(words):
    """χ² of the bytes of a vector, by its standard deviations from what is expected."""
    counts = np.bincount(words.view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    return abs((((counts - expected) ** 2 / expected).sum() - 255) / (2 * 255) ** 0.5)


def test_masked_vectors_look_like_noise_and_differ_every_time():
    given = {client: np.full(4096, client, dtype=np.uint64) for client in range(4)}
    one, other = Sum(given).masked().vectors, Sum(given).masked().vectors
    assert uniformity(given[1]) > 1000
    for client in given:
        assert uniformity(one[client]) < 6
        assert not (one[client] == other[client]).any()
    pairs = [one[a] - one[b] for a in given for b in range(a)]
    assert all(uniformity(pair) < 6 for pair in pairs)


def test_the_sum_of_some_vectors_is_masked_still():
    """What the server holds before the last phase: masks between clients cancel out, their own do not."""
    given = vectors(range(5), size=4096)
    started = Sum(given).masked()
    total = plain(started.vectors, range(5))[:-1]
    assert uniformity(total - plain(given, range(5))) < 6
    assert not (total == plain(given, range(5))).any()


def test_letters_have_one_length():
    started = Sum(vectors(range(3)))
    roster = {client: member.keys() for client, member in started.members.items()}
    _, letters = started.members[0].share(roster)
    assert {len(letter) for letter in letters.values()} == {LETTER}


def test_a_member_goes_on_from_its_text():
    """In another process, after every step."""
    given = vectors(range(3))
    started = Sum(given)

    class Anew:
        def __init__(self, member):
            self.text = member.text()

        def __getattr__(self, name):
            def step(*arguments):
                member = Member.read(self.text)
                found = getattr(member, name)(*arguments)
                self.text = member.text()
                return found

            return step

    started.members = {client: Anew(member) for client, member in started.members.items()}
    assert (started.masked(no_vector=[1]).result() == plain(given, [0, 2])).all()
    with pytest.raises(BadMessage, match="not the next one"):
        started.members[0].reveal([0, 2])
