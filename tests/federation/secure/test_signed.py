"""Sites with keys sign what they say in a sum: a server that puts itself between them is noticed, at once and later."""

import pytest

from fedprotip.errors import UsageError
from fedprotip.messages import BadMessage
from fedprotip.store.plain import PlainFolder

pytest.importorskip("cryptography")
pytest.importorskip("Crypto")

from fedprotip.federation.secure.masks import AESGCM, KEY, KEYS, NONCE, Member, _derive, _public, session_of
from fedprotip.federation.secure.signed import KNOWN, SIGNED, UNSIGNED, Signer
from fedprotip.flower.keys import site_key

ABOUT = "model, task 0, round 1, question 7"
PEOPLE = range(4)


@pytest.fixture
def people(tmp_path):
    """Sites with keys, and the roster of all of them."""
    lines = [f"{client} {site_key(tmp_path / f'{client}.key').read_text()}" for client in PEOPLE]
    (tmp_path / "roster").write_text("# whose keys are whose\n" + "".join(lines))
    return tmp_path


def signer(place, client, roster=True, key=None):
    folder = PlainFolder(place / f"site-{client}").make()
    return Signer(client, key or place / f"{client}.key", folder, place / "roster" if roster else None)


class Round:
    """The first two questions of a sum; `server` may change what it passes on: (receiver, entries) → entries."""

    def __init__(self, place, roster=True, server=lambda receiver, entries: entries):
        self.signers = {client: signer(place, client, roster) for client in PEOPLE}
        self.members = {client: Member(client, 0.5, ABOUT) for client in PEOPLE}
        keys = {client: member.keys() for client, member in self.members.items()}
        self.entries = {client: keys[client] + self.signers[client].sign(ABOUT, keys[client]) for client in PEOPLE}
        self.server = server

    def heard(self, client, checked=True):
        """The letters of a client, to what it was told are the keys of all."""
        told = self.server(client, dict(self.entries))
        if checked:
            self.signers[client].check(ABOUT, told)
        return self.members[client].share({other: entry[:KEYS] for other, entry in told.items()})


def between(victim, other, sign=lambda keys: None):
    """A server that gives a client a key of its own as that of another; `sign` makes what follows."""
    mine = Member(other, 0.5)
    keys = mine.keys()

    def swap(receiver, entries):
        if receiver == victim:
            entries[other] = keys + (sign(keys) or entries[other][KEYS:])
        return entries

    return mine, swap


@pytest.mark.parametrize("roster", [True, False])
def test_honest_sites_take_part(people, roster):
    honest = Round(people, roster)
    assert {len(honest.heard(client)[1]) for client in PEOPLE} == {3}
    again = Round(people, roster)
    assert all(len(again.heard(client)[1]) == 3 for client in PEOPLE)
    assert {len(entry) for entry in again.entries.values()} == {KEYS + SIGNED}


def test_without_signatures_a_server_in_the_middle_reads_letters(people):
    """What the signatures are for: the attack works where nobody looks at them."""
    mine, swap = between(victim=0, other=2)
    attacked = Round(people, server=swap)
    _, letters = attacked.heard(0, checked=False)
    told = {other: entry[:KEYS] for other, entry in swap(0, dict(attacked.entries)).items()}
    session = session_of(told)
    key = _derive(mine._letters.exchange(_public(told[0][:KEY])), session, "letter 0 2")
    assert AESGCM(key).decrypt(letters[2][:NONCE], letters[2][NONCE:], session)


@pytest.mark.parametrize("roster", [True, False])
def test_a_server_in_the_middle_is_noticed(people, roster):
    """Whether it leaves the signature, leaves it out, or signs with a key of its own; others are not misled."""
    site_key(people / "server.key")
    for client in PEOPLE:  # without a roster the keys of all are known by now
        Round(people, roster).heard(client)
    own = signer(people, 2, roster=False, key=people / "server.key")
    ways = {
        "are not signed by its key": lambda keys: None,
        "are not signed, so": lambda keys: UNSIGNED,
        "not signed by its key, so this site takes no part": lambda keys: own.sign(ABOUT, keys),
    }
    for sentence, sign in ways.items():
        attacked = Round(people, roster, between(0, 2, sign)[1])
        with pytest.raises(BadMessage, match=f"the keys of client 2 .*{sentence}"):
            attacked.heard(0)
        assert len(attacked.heard(1)[1]) == 3


def test_a_signature_is_good_for_one_question_and_one_client(people):
    earlier = Round(people)
    moved = {**earlier.entries, 3: earlier.entries[2]}
    with pytest.raises(BadMessage, match="client 3"):
        earlier.signers[0].check(ABOUT, moved)
    with pytest.raises(BadMessage, match="client 0"):
        earlier.signers[0].check(ABOUT.replace("7", "8"), earlier.entries)


def test_a_client_that_the_roster_does_not_have_is_not_taken(people):
    """A server cannot invent clients."""
    site_key(people / "9.key")
    stranger, keys = signer(people, 9, roster=False), Member(9, 0.5).keys()
    honest = Round(people)
    with pytest.raises(BadMessage, match="client 9 is not in the roster of this site"):
        honest.signers[0].check(ABOUT, {**honest.entries, 9: keys + stranger.sign(ABOUT, keys)})


def test_the_first_key_is_believed_and_kept_and_can_be_removed(people):
    first = Round(people, roster=False)
    first.heard(0)
    kept = people / "site-0" / KNOWN
    assert kept.read_text() == (people / "roster").read_text().partition("\n")[2]
    for half in ("2.key", "2.key.pub"):
        (people / half).unlink()
    site_key(people / "2.key")  # another machine
    with pytest.raises(BadMessage, match="the keys of client 2"):
        Round(people, roster=False).heard(0)
    kept.write_text("".join(line for line in kept.read_text().splitlines(True) if not line.startswith("2 ")))
    assert Round(people, roster=False).heard(0)


def test_what_is_wrong_with_files_is_a_sentence(people):
    with pytest.raises(UsageError, match=r"roster does not have the public half of .*1\.key as the key of client 0\."):
        signer(people, 0, key=people / "1.key")
    with pytest.raises(UsageError, match="is no key of a site; fedprotip flower key makes one"):
        signer(people, 0, key=people / "roster")
    public = (people / "1.key.pub").read_text()
    for line in ("7 ssh-rsa AAAA", f"x {public}", f"1 {public}"):
        with (people / "roster").open("a") as file:
            file.write(line)
        with pytest.raises(UsageError, match=r"Line 6 of .*roster is not the number of a client"):
            signer(people, 0)
        (people / "roster").write_text("".join((people / "roster").read_text().splitlines(True)[:5]))
    (people / "roster").unlink()
    with pytest.raises(UsageError, match="roster cannot be read"):
        signer(people, 0)
