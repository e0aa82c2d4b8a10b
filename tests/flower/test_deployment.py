"""The file of a deployment: what it says, and what is wrong with it, in a sentence; keys, certificates, processes."""

import datetime
import socket
import ssl
import stat
import subprocess
import sys
import threading
import tomllib
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import pytest

import fedprotip
from fedprotip.errors import RunError, UsageError
from fedprotip.flower import keys, processes, submission
from fedprotip.flower.deployment import Place
from fedprotip.flower.processes import check_line
from tests.flower.loopback import free_port
from tests.small import small

GOOD = """
settings = "run.toml"
out = "runs/mine"
[[sites]]
client = 0
data = {source = "photos.npz"}
[[sites]]
client = 4
folder = "/somewhere/else"
"""


def place(tmp_path, text=GOOD):
    (tmp_path / "fed.toml").write_text(text)
    (tmp_path / "run.toml").write_text('[data]\nname = "digits"\ntrain_limit = 20\n')
    return Place(tmp_path / "fed.toml")


def test_paths_are_relative_to_the_file(tmp_path, monkeypatch):
    found = place(tmp_path)
    monkeypatch.chdir("/")
    assert found.needed("out") == tmp_path / "runs" / "mine"
    assert found.home == tmp_path / "fed"
    first, second = found.what.sites
    assert found.folder_of(first) == tmp_path / "fed" / "site-0"
    assert str(found.folder_of(second)) == "/somewhere/else"
    assert found.key_of(second) == tmp_path / "fed" / "site-4.key"


def test_data_of_a_site_is_its_own_and_that_of_the_settings_is_shared(tmp_path):
    found = place(tmp_path)
    first, second = (found.data_of(site) for site in found.what.sites)
    assert (first[0].name, first[1]) == ("own", True)
    assert first[0].source.endswith("photos.npz")
    assert (second[0].name, second[0].train_limit, second[1]) == ("digits", 20, False)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sites = 3", "sites"),
        ("[superlink]\nprot = 3", "prot"),
        ("[superlink]\nport = 70000", "port"),
        ("[superlink]\ntls = false\nkeys = true", "superlink.keys needs superlink.tls"),
        ("[[sites]]\nclient = 1\nroster = 'r'", "sites.roster needs superlink.keys"),
        ("[[sites]]\nclient = 1\nsecure_noise = 1", "need secure = true in the same entry"),
        ("[[sites]]\nclient = 1\n[[sites]]\nclient = 1", "client 1 is named twice"),
        ("[[sites]]\nclient = 1\ndata = {sauce = 'x'}", "sites.1.data.sauce is not a setting; did you mean 'source'"),
        ("[[sites]]\nclent = 1", "sites.1.clent is not a setting; did you mean 'client'"),
        ("[superlnk]\nport = 1", "superlnk is not a setting; did you mean 'superlink'"),
        ("[superlink]\nhost = 'sérver'", "superlink.host: 'sérver' is no address, and no name of a machine"),
        ("[superlink]\nhost = '127.0.0.1:9092'", "no name of a machine .*its port is superlink.port"),
        ("[superlink]\nhost = ''", "superlink.host: '' is no address"),
        ("[superlink]\nlisten = 'a \"b\"'", "superlink.listen: 'a \"b\"' is no address"),
    ],
)
def test_what_is_wrong_is_a_sentence(tmp_path, text, sentence):
    with pytest.raises(UsageError, match=sentence):
        place(tmp_path, text)


@pytest.mark.parametrize(
    ("host", "address"),
    [("::1", "[::1]:9092"), ("[0:0::1]", "[::1]:9092"), ("10.0.0.7", "10.0.0.7:9092"), ("a_b.c-d", "a_b.c-d:9092")],
)
def test_an_address_is_written_as_flower_reads_it(tmp_path, host, address):
    """A colon stands before the port, and in IPv6 elsewhere too."""
    assert place(tmp_path, f"[superlink]\nhost = '{host}'").address == address


def test_what_is_missing_is_named(tmp_path):
    found = place(tmp_path, "")
    with pytest.raises(UsageError, match="has no 'out'"):
        found.needed("out")
    with pytest.raises(UsageError, match="no site of client 3; it has: none"):
        found.site(3)


def test_switches_of_flower_are_set_and_its_home_is_ours(tmp_path):
    """Nothing is reported, looked up or installed."""
    found = place(tmp_path).environment(tmp_path / "home")
    off = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    assert off.items() <= found.items()
    told = tomllib.loads((submission._app(tmp_path) / "pyproject.toml").read_text())
    assert told["project"]["dependencies"] == []
    assert found["FLWR_HOME"] == str(tmp_path / "home")
    assert found["PATH"].startswith(str(sys.executable).rpartition("/")[0])


def test_nothing_that_this_environment_has_makes_flower_call_others(tmp_path, monkeypatch):
    """A key of a service would make its SuperLink call that; a proxy would stand between two processes of a site."""
    for name, value in {"FLWR_MODEL_API_KEY": "x", "FLWR_TELEMETRY_ENABLED": "1", "NO_PROXY": "here"}.items():
        monkeypatch.setenv(name, value)
    found = place(tmp_path, "[superlink]\nhost = 'server.example'").environment(tmp_path / "home")
    assert "FLWR_MODEL_API_KEY" not in found
    assert found["FLWR_TELEMETRY_ENABLED"] == "0"
    assert found["NO_PROXY"] == "here,127.0.0.1,localhost,::1,server.example"
    elsewhere = place(tmp_path, "[superlink]\nhost = 'server.example'\nhere = false")
    assert "server.example" not in elsewhere.environment(tmp_path / "home")["NO_PROXY"]


def test_certificates_are_made_once_and_private_ones_are_private(tmp_path):
    x509 = pytest.importorskip("cryptography.x509")
    found = keys.certificates(tmp_path, "server.example")
    before = found.certificate.read_bytes()
    assert keys.certificates(tmp_path, "server.example").certificate.read_bytes() == before
    assert stat.S_IMODE(found.key.stat().st_mode) == 0o600
    files = (found.certificate, found.authority)
    certificate, authority = (x509.load_pem_x509_certificate(path.read_bytes()) for path in files)
    certificate.verify_directly_issued_by(authority)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "server.example"]


def test_a_key_is_made_once_with_its_public_half(tmp_path):
    ssh = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    public = keys.site_key(tmp_path / "site.key")
    before = public.read_bytes()
    assert keys.site_key(tmp_path / "site.key").read_bytes() == before
    assert stat.S_IMODE((tmp_path / "site.key").stat().st_mode) == 0o600
    private = ssh.load_ssh_private_key((tmp_path / "site.key").read_bytes(), None)
    assert private.public_key() == ssh.load_ssh_public_key(before)


def test_a_key_is_never_replaced_where_one_half_is_missing(tmp_path):
    pytest.importorskip("cryptography")
    public = keys.site_key(tmp_path / "site.key")
    private, before = (tmp_path / "site.key").read_bytes(), public.read_bytes()
    public.unlink()
    assert keys.site_key(tmp_path / "site.key").read_bytes() == before
    assert (tmp_path / "site.key").read_bytes() == private
    (tmp_path / "site.key").unlink()
    with pytest.raises(UsageError, match=r"site.key is missing, and its public half is there: put it back"):
        keys.site_key(tmp_path / "site.key")
    (tmp_path / "odd.key").write_text("nothing of the kind")
    with pytest.raises(UsageError, match=r"odd.key is no private key"):
        keys.site_key(tmp_path / "odd.key")
    assert (tmp_path / "odd.key").read_text() == "nothing of the kind"


@pytest.mark.parametrize("lost", ["ca.crt", "server.crt", "server.key"])
def test_no_new_authority_is_made_where_sites_may_trust_the_former_one(tmp_path, lost):
    pytest.importorskip("cryptography")
    found = keys.certificates(tmp_path, "server.example")
    files = {path: path.read_bytes() for path in (found.authority, found.certificate, found.key)}
    (tmp_path / lost).unlink()
    with pytest.raises(UsageError, match=f"{lost} is missing, .*put it back, .* bring ca.crt to every site"):
        keys.certificates(tmp_path, "server.example")
    assert all(path.read_bytes() == data for path, data in files.items() if path.name != lost)


def test_a_certificate_of_another_host_is_refused(tmp_path):
    pytest.importorskip("cryptography")
    for host in ("10.0.0.7", "127.0.0.1", "localhost", "0.0.0.0", "::1", f"{'a' * 60}.{'b' * 60}.example"):
        for _ in range(2):
            keys.certificates(tmp_path / host, host)
    with pytest.raises(UsageError, match=r"is for localhost, 127.0.0.1, 10.0.0.7, not for server.example"):
        keys.certificates(tmp_path / "10.0.0.7", "server.example")


def lasting(path, begins, ends):
    """The same certificate with other dates, signed by a new authority, whose certificate replaces ca.crt."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding

    old = x509.load_pem_x509_certificate(path.read_bytes())
    key, now = ec.generate_private_key(ec.SECP384R1()), datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(x509.Name([]), old.subject, old.public_key())
    builder = builder.serial_number(5).not_valid_before(now + datetime.timedelta(begins))
    builder = builder.not_valid_after(now + datetime.timedelta(ends))
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    path.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))


@pytest.mark.parametrize(
    ("name", "days", "sentence"),
    [
        ("server.crt", (-9, -2), r"server.crt has expired on 20\d\d-\d\d-\d\d: put a new one there, or"),
        ("ca.crt", (-9, -2), r"ca.crt has expired on .* needs new certificates, and every site their ca.crt"),
        ("server.crt", (2, 9), r"server.crt is good from .* on, and here it is .*: set the clock"),
        ("server.crt", (-9, 9), r"server.crt is not signed by .*ca.crt: put them back, or"),
    ],
)
def test_certificates_that_sites_would_not_take_are_refused(tmp_path, name, days, sentence):
    pytest.importorskip("cryptography")
    keys.certificates(tmp_path, "here.example")
    lasting(tmp_path / name, *days)
    with pytest.raises(UsageError, match=sentence):
        keys.certificates(tmp_path, "here.example")


def test_keys_that_do_not_fit_or_are_not_private_are_refused(tmp_path):
    pytest.importorskip("cryptography")
    found, other = (keys.certificates(tmp_path / name, "here.example") for name in ("one", "other"))
    mine = found.key.read_bytes()
    for data, sentence in ((other.key.read_bytes(), "is not the key of"), (b"x", "is no private key"), (b"", "put it")):
        found.key.write_bytes(data)
        with pytest.raises(UsageError, match=sentence):
            keys.certificates(tmp_path / "one", "here.example")
    found.key.write_bytes(mine)
    keys.site_key(tmp_path / "site.key")
    for key in (found.key, tmp_path / "site.key"):
        key.chmod(0o640)
    for attempt in (lambda: keys.certificates(tmp_path / "one", "here.example"), lambda: keys.site_key(key)):
        with pytest.raises(UsageError, match=r"can be read by others than its owner; .* chmod 600"):
            attempt()


@pytest.mark.parametrize("done", range(7))
def test_killed_while_certificates_are_made_others_are_made_or_these_are_complete(tmp_path, monkeypatch, done):
    """After each of its six steps: three files are written, then they get their names."""
    pytest.importorskip("cryptography")
    steps, write, rename = iter(range(7)), keys._write, Path.replace

    def step(act):
        def stopping(*given):
            if next(steps) == done:
                raise KeyboardInterrupt
            return act(*given)

        return stopping

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(keys, "_write", step(write))
        patch.setattr(Path, "replace", step(rename))
        keys.certificates(tmp_path, "here.example")
    found = keys.certificates(tmp_path, "here.example")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ca.crt", "server.crt", "server.key"]
    assert stat.S_IMODE(found.key.stat().st_mode) == 0o600


def test_a_kill_leaves_no_half_of_a_key(tmp_path, monkeypatch):
    pytest.importorskip("cryptography")

    def kill(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedprotip.store.plain.os.replace", kill)
        with pytest.raises(KeyboardInterrupt):
            keys.site_key(tmp_path / "site.key")
    assert not (tmp_path / "site.key").exists()
    public = keys.site_key(tmp_path / "site.key")
    keys.bind(tmp_path, 0, public)
    with monkeypatch.context() as patch:
        patch.setattr("fedprotip.store.plain.os.replace", kill)
        with pytest.raises(KeyboardInterrupt):
            keys.bind(tmp_path, 1, keys.site_key(tmp_path / "other.key"))
    assert sorted(keys.bound(tmp_path)) == [0]


def test_a_key_belongs_to_one_client_and_a_client_has_one_key(tmp_path):
    ssh = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    one, other = (keys.site_key(tmp_path / name) for name in ("one.key", "other.key"))
    for _ in range(2):
        keys.bind(tmp_path, 3, one)
    with pytest.raises(UsageError, match=r"Client 3 has another key; .* remove its line"):
        keys.bind(tmp_path, 3, other)
    with pytest.raises(UsageError, match=r"one.key.pub is the key of client 3"):
        keys.bind(tmp_path, 4, one)
    with pytest.raises(UsageError, match="cannot be read as a public key"):
        keys.bind(tmp_path, 4, tmp_path / "one.key")
    keys.bind(tmp_path, 0, other)
    told = ssh.load_ssh_public_key(one.read_bytes())
    pem = told.public_bytes(ssh.Encoding.PEM, ssh.PublicFormat.SubjectPublicKeyInfo)
    assert keys.bound(tmp_path)[3] == pem.hex()
    assert sorted(keys.bound(tmp_path)) == [0, 3]
    assert keys.bound(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("line", ["x {key}", "7", "7 ssh-rsa AAAA", "3 {key}"])
def test_damaged_lines_of_admitted_keys_are_a_sentence(tmp_path, line):
    """It is a file that people edit: no number, no key, a key that is none, a client twice."""
    pytest.importorskip("cryptography")
    public = keys.site_key(tmp_path / "one.key")
    keys.bind(tmp_path, 3, public)
    with (tmp_path / "admitted").open("a") as file:
        file.write(line.format(key=public.read_text().strip()) + "\n")
    with pytest.raises(UsageError, match=r"admitted is damaged: .* a client, which comes once"):
        keys.bound(tmp_path)


def test_a_certificate_that_is_a_folder_is_a_sentence(tmp_path):
    pytest.importorskip("cryptography")
    with pytest.raises(UsageError, match="cannot be read as a certificate"):
        keys.check_authority(tmp_path)


def test_processes_are_found_and_ended_by_their_ids(tmp_path):
    found = place(tmp_path)
    found.home.mkdir()
    for name in ("superlink", "site-0"):
        processes._start(found, name, [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path)
    pid = processes.running(found, "site-0")
    assert pid
    assert processes.down(found) == ["site-0", "superlink"]
    assert processes._born(pid) is None
    assert processes.running(found, "site-0") is None
    assert processes.down(found) == []


@pytest.mark.parametrize("when", ["before", "before a boot"])
def test_another_process_with_the_id_of_one_that_ended_is_left_alone(tmp_path, when):
    """Also one that started as many moments after a boot as that one had after another boot."""
    found = place(tmp_path)
    found.home.mkdir()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        born = "1" if when == "before" else Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]
        (found.home / "processes.json").write_text(f'{{"site-0": {{"pid": {other.pid}, "born": "{born}"}}}}')
        assert processes.running(found, "site-0") is None
        assert processes.down(found) == []
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize("text", ["[]", "3", '{"superlink": 3}', '{"superlink": {"pid": 3}}', '{"superlink": {"pid"'])
def test_a_damaged_list_of_processes_is_a_sentence(tmp_path, text):
    found = place(tmp_path)
    found.home.mkdir()
    (found.home / "processes.json").write_text(text)
    for act in (processes.down, submission.status):
        with pytest.raises(RunError, match=r"processes.json is damaged; end the processes of the deployment"):
            act(found)


def test_the_state_of_a_home_that_is_none_is_a_sentence(tmp_path):
    found = place(tmp_path)
    found.home.write_text("in the way")
    with pytest.raises(RunError, match="Not a directory; what Flower and this deployment write is in"):
        submission.status(found)


@pytest.mark.parametrize("where", ["", "file/site.key"])
def test_a_key_that_can_be_none_is_a_sentence(tmp_path, where):
    """Its name is that of a folder, or below a file."""
    pytest.importorskip("cryptography")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="can be no key: "):
        keys.site_key(tmp_path / where)


def test_a_site_without_the_certificate_of_its_server_says_so(tmp_path):
    found = place(tmp_path)
    with pytest.raises(UsageError, match=r"ca.crt is missing; .* copy it here"):
        processes.SuperNode(found, found.site(0), tmp_path / "door", print)


@contextmanager
def answering(host, port, certificates=None):
    """Something that listens there, as a SuperLink does, with TLS or without."""
    with socket.create_server((host, port)) as door:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if certificates:
            context.load_cert_chain(certificates.certificate, certificates.key)

        def serve():
            with suppress(OSError):
                while True:
                    line, _ = door.accept()
                    with suppress(OSError), line:
                        if certificates:
                            context.wrap_socket(line, server_side=True).recv(1)
                        else:
                            line.recv(1000)
                            line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        yield
        door.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("host", "authority", "tls", "sentence"),
    [
        ("127.0.0.1", "one", "true", ""),
        ("127.0.0.1", "other", "true", r"does not fit .*ca.crt and this host .*: copy its ca.crt here anew"),
        ("127.0.0.2", "one", "true", r"127.0.0.2:\d+ shows a certificate .*: .* set superlink.host to a name"),
        ("127.0.0.1", "one", "false", "speaks TLS alone: superlink.tls has to be the same there and here"),
        ("127.0.0.1", "plain", "true", "does not speak TLS: superlink.tls has to be the same there and here"),
        ("127.0.0.1", "plain", "false", ""),
    ],
)
def test_a_site_that_does_not_fit_its_superlink_says_so(tmp_path, host, authority, tls, sentence):
    pytest.importorskip("cryptography")
    made = {name: keys.certificates(tmp_path / name, "here.example") for name in ("one", "other")}
    port = free_port()
    text = f"[superlink]\nhost = '{host}'\nport = {port}\ntls = {tls}\nhere = false\n"
    text += f"authority = '{authority.replace('plain', 'one')}/ca.crt'\n[[sites]]\nclient = 0\n"
    found = place(tmp_path, text)
    check_line(found)  # nobody is there yet
    refused = pytest.raises(UsageError, match=sentence) if sentence else nullcontext()
    with answering(host, port, None if authority == "plain" else made["one"]), refused:
        check_line(found)


@pytest.mark.parametrize("way", ["up", "submit", "admit"])
def test_a_home_that_cannot_be_written_is_a_sentence(tmp_path, way):
    """A file lies in the place of Flower's folder."""
    pytest.importorskip("flwr", reason="the extra flower")
    found = place(tmp_path)
    found.home.mkdir()
    (found.home / "flwr").write_text("in the way")
    (found.home / "superlink.log").mkdir()
    act = {
        "up": lambda: processes.up(found),
        "submit": lambda: submission.submit(found),
        "admit": lambda: processes.admit(found, keys.site_key(tmp_path / "some.key")),
    }[way]
    with pytest.raises(RunError, match=r"(flwr|superlink.log): .*; what Flower and this deployment write is in .*fed"):
        act()


def test_what_a_run_folder_cannot_be_is_said_before_anything_is_handed_in(tmp_path):
    """A run of one process would go on with the server's data, and ask no sites."""
    pytest.importorskip("flwr", reason="the extra flower")
    found, out = place(tmp_path), tmp_path / "runs" / "mine"
    out.mkdir(parents=True)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"mine is not empty; name another one in the file \(out\)"):
        submission.submit(found)
    (out / "notes.txt").unlink()
    fedprotip.run(small("stream.tasks=1", "train.rounds=1"), out=out)
    with pytest.raises(UsageError, match=r"mine is a run with run.engine = 'local', which asks no sites"):
        submission.submit(found, tasks=1)


def test_clients_of_further_tasks_are_said_with_their_number(tmp_path):
    pytest.importorskip("flwr", reason="the extra flower")
    with pytest.raises(UsageError, match="say with --tasks how many"):
        submission.submit(place(tmp_path), clients="0-1")
    with pytest.raises(UsageError, match="--clients: '1-' is not a list of client ids"):
        submission.submit(place(tmp_path), tasks=1, clients="1-")


def said_by_flower(tmp_path, monkeypatch, text):
    """Let Flower's command say this and end well, as it does where something has gone wrong."""
    (tmp_path / "flwr").write_text(f"#!/bin/sh\ncat <<'EOF'\n{text}\nEOF\n")
    (tmp_path / "flwr").chmod(0o755)
    monkeypatch.setattr(processes, "_program", lambda name: str(tmp_path / name))


def test_status_says_that_the_superlink_does_not_answer(tmp_path, monkeypatch):
    """And a run that is waited for is asked about again."""
    told = '{"success": false, "error-message": "Using SuperLink: ours\\n\\nConnection to it is unavailable."}'
    said_by_flower(tmp_path, monkeypatch, told)
    monkeypatch.setattr(submission, "running", lambda place, name: 7)
    found = place(tmp_path)
    reason = "The SuperLink at 127.0.0.1:9092 does not say what it runs: Connection to it is unavailable."
    assert submission.status(found)["runs"] == reason
    assert submission.state_of(found, "5") == ("unknown", "")


@pytest.mark.parametrize(
    ("state", "details", "sentence"),
    [
        ("finished:failed", "no room left.", r"has ended early \(finished:failed\): no room left. Hand it in again"),
        ("finished:stopped", "by hand", r"has ended early \(finished:stopped\): by hand. Hand it in again"),
        ("running", "", "has not ended within 0.3 seconds; fedprotip flower status shows"),
        ("finished:completed", "", None),
    ],
)
def test_a_run_that_has_failed_is_told_from_one_that_has_ended(tmp_path, monkeypatch, state, details, sentence):
    """Flower's commands end well either way."""
    runs = f'[{{"run-id": "5", "status": "{state}", "status-details": "{details}"}}]'
    said_by_flower(tmp_path, monkeypatch, f'{{"success": true, "runs": {runs}}}')
    monkeypatch.setattr(submission, "LOOK", (0.05, 0.0))
    found, told = place(tmp_path), []
    refused = pytest.raises(RunError, match=sentence) if sentence else nullcontext()
    with refused:
        assert submission.wait(found, "5", 0.3, told.append) == found.needed("out")
    assert told == [f"The run is {state}."]


@pytest.mark.parametrize(
    ("said", "word"),
    [("", "nothing"), ("one\n\n", "one"), ("╭─ Error ─╮\n│ No such key │\n╰────╯\n", "No such key")],
)
def test_the_last_word_of_flower_is_one(said, word):
    assert processes.last_word(said) == word


def test_a_superlink_that_cannot_listen_says_why(tmp_path, monkeypatch):
    """Flower's last word is not the one that counts."""
    pytest.importorskip("flwr", reason="the extra flower")
    said = "2026 ERROR [uvicorn.error] [Errno 99] cannot assign address\n2026 INFO [uvicorn.error] shutdown complete."
    monkeypatch.setattr(processes, "_superlink", lambda place: [sys.executable, "-c", f"print({said!r})"])
    found = place(tmp_path, f"[superlink]\nport = {free_port()}\n")
    with pytest.raises(RunError, match=r"does not start; .* says: 2026 ERROR .* cannot assign address$"):
        processes.up(found)
    assert processes.down(found) == []


def test_one_up_at_a_time(tmp_path):
    """Of two that start the same things one would be forgotten, and never be ended."""
    pytest.importorskip("flwr", reason="the extra flower")
    found = place(tmp_path)
    with (
        processes.alone(found.home, "up.lock", ""),
        pytest.raises(RunError, match=r"Another fedprotip flower up is at work in .*fed: wait for its end"),
    ):
        processes.up(found)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[trian]\nrounds = 3\n", "trian.* did you mean 'train'"),
        ("[train]\nrounds = 'many'\n", r"train.rounds"),
        ("[method]\nname = 'glfc'\nsecure = true\n", "not possible with method.name = 'glfc'"),
        ("rounds = [", r"run.toml"),
        (None, r"run.toml"),
    ],
)
def test_wrong_settings_are_said_before_anything_is_handed_in(tmp_path, text, sentence):
    """Nothing runs here that a run could be handed to."""
    pytest.importorskip("flwr", reason="the extra flower")
    found = place(tmp_path)
    (tmp_path / "run.toml").unlink() if text is None else (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UsageError, match=sentence):
        submission.submit(found)


def test_a_site_has_one_program_at_a_time(tmp_path):
    """The lock of one that was killed is free again."""
    script = f"""
import sys, time
from pathlib import Path
from fedprotip.flower.processes import held
with held(Path({str(tmp_path / "site-0")!r})):
    print("held", flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with (
            pytest.raises(RunError, match=r"Another program of this site is at work in .*site-0: end it first"),
            processes.held(tmp_path / "site-0"),
        ):
            pass
        other.kill()
    for _ in range(2):
        with processes.held(tmp_path / "site-0"):
            pass


def test_the_folder_of_a_site_is_for_its_owner_alone(tmp_path):
    """Samples and secrets of a client are in it; one that was there stays as it was made."""
    (tmp_path / "given").mkdir(mode=0o750)
    for name, mode in {"deep/site-0": 0o700, "given": 0o750}.items():
        with processes.held(tmp_path / name):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode


def test_a_site_without_its_data_says_so_when_it_is_started(tmp_path):
    """And not when the server asks for the first time."""
    pytest.importorskip("flwr", reason="the extra flower")
    found = place(tmp_path)
    with pytest.raises(UsageError, match=r"The data of client 0 is not there: /.*photos.npz does not exist"):
        processes.join(found, found.site(0), print)


def test_a_folder_for_temporary_files_with_too_long_a_name_is_a_sentence(tmp_path, monkeypatch):
    """A socket has room for a short name."""
    pytest.importorskip("flwr", reason="the extra flower")
    (tmp_path / ("x" * 100)).mkdir()
    (tmp_path / "photos.npz").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 100)))
    found = place(tmp_path)
    with pytest.raises(UsageError, match="is too long a name for a socket in it; set TMPDIR"):
        processes.join(found, found.site(0), print)


def test_nothing_is_started_where_a_key_cannot_be_used(tmp_path):
    """Not even what needs none: up starts all or says what is wrong."""
    pytest.importorskip("flwr", reason="the extra flower")
    text = f"[superlink]\nport = {free_port()}\nkeys = true\n[[sites]]\nclient = 0\n[[sites]]\nclient = 1\n"
    found = place(tmp_path, text)
    keys.site_key(found.home / "site-1.key")
    (found.home / "site-1.key").chmod(0o644)
    with pytest.raises(UsageError, match=r"site-1.key can be read by others"):
        processes.up(found)
    assert processes.down(found) == []


@pytest.mark.slow  # a process that imports torch
def test_up_says_which_site_has_ended_at_once_and_why(tmp_path):
    pytest.importorskip("flwr", reason="the extra flower")
    found = place(tmp_path, "settings = 'run.toml'\n[superlink]\nhere = false\n[[sites]]\nclient = 0\n")
    with pytest.raises(RunError, match=r"site-0 has ended at once; .*ca.crt is missing; .* copy it here"):
        processes.up(found)
    processes.down(found)


def test_a_command_of_flower_that_does_not_end_has_failed(tmp_path, monkeypatch):
    (tmp_path / "flwr").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "flwr").chmod(0o755)
    monkeypatch.setattr(processes, "_program", lambda name: str(tmp_path / name))
    monkeypatch.setattr(processes, "READY", 0.2)
    with pytest.raises(RunError, match=r"does not take the key .*: no answer within 0.2 seconds"):
        processes.admit(place(tmp_path), keys.site_key(tmp_path / "site.key"))


def test_other_systems_are_refused_in_a_sentence(tmp_path, monkeypatch):
    pytest.importorskip("flwr", reason="the extra flower")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UsageError, match="on Linux only"):
        processes.up(place(tmp_path))
