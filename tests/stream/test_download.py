"""Fetching an archive from a server on loopback: whole, broken, resumed, wrong, and hostile."""

import bz2
import hashlib
import io
import tarfile
from functools import partial

import numpy as np
import pytest

from fedprotip.errors import RunError, UsageError
from fedprotip.settings import DataSettings
from fedprotip.stream import archives, download
from fedprotip.stream.archives import File
from fedprotip.stream.datasets import load_dataset
from tests.stream.trees import cifar_binary, digit_files

CONTENT = np.random.default_rng(0).bytes(5000)
MD5 = "md5:" + hashlib.md5(CONTENT).hexdigest()
SHA = "sha256:" + hashlib.sha256(CONTENT).hexdigest()


@pytest.mark.parametrize("checksum", [MD5, SHA])
def test_a_file_arrives_whole_and_is_not_fetched_twice(server, tmp_path, checksum):
    server["files"]["/a.bin"] = CONTENT
    seen = []
    for _ in range(2):
        got = download.fetch(f"{server['url']}/a.bin", tmp_path / "new" / "a.bin", checksum, lambda *p: seen.append(p))
    assert got.read_bytes() == CONTENT
    assert len(server["asked"]) == 1
    assert seen[0] == (0, 5000)
    assert seen[-1] == (5000, 5000)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.bin"]


def test_a_broken_connection_is_continued_at_once(server, tmp_path):
    server["files"]["/a.bin"], server["breaks"] = CONTENT, 2
    download.fetch(f"{server['url']}/a.bin", tmp_path / "a.bin", SHA)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert server["asked"] == ["", "bytes=1000-", "bytes=2000-"]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_that_gave_up_is_continued_by_the_next_call(server, tmp_path, ranges):
    server["files"]["/a.bin"], server["breaks"], server["ranges"] = CONTENT, 3, ranges
    fetch = partial(download.fetch, f"{server['url']}/a.bin", tmp_path / "a.bin", SHA)
    with pytest.raises(RunError, match=r"broke off after \d,000 bytes .* run the same command again"):
        fetch()
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin.part"]
    server["asked"].clear()
    fetch()
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert server["asked"] == [f"bytes={3000 if ranges else 1000}-"]
    assert not (tmp_path / "a.bin.part").exists()


def test_another_piece_than_was_asked_for_is_not_appended(server, tmp_path):
    server["files"]["/a.bin"], server["skew"] = CONTENT, -100
    (tmp_path / "a.bin.part").write_bytes(CONTENT[:1000])
    download.fetch(f"{server['url']}/a.bin", tmp_path / "a.bin", SHA)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert server["asked"] == ["bytes=1000-", ""]


@pytest.mark.parametrize("left", [CONTENT, CONTENT + b"more", b"x" * 1000], ids=["whole", "too much", "another"])
def test_what_an_earlier_download_left(server, tmp_path, left):
    server["files"]["/a.bin"] = CONTENT
    (tmp_path / "a.bin.part").write_bytes(left)
    fetch = partial(download.fetch, f"{server['url']}/a.bin", tmp_path / "a.bin", SHA)
    if left.startswith(b"x"):
        with pytest.raises(RunError, match="checksum"):
            fetch()
        assert list(tmp_path.iterdir()) == []
    fetch()
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_wrong_checksum_keeps_nothing(server, tmp_path):
    server["files"]["/a.bin"] = CONTENT[:-1] + b"x"
    with pytest.raises(RunError, match=r"does not have the checksum .* not kept\.$"):
        download.fetch(f"{server['url']}/a.bin", tmp_path / "a.bin", SHA)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_refuses_or_is_not_there_is_one_sentence(server, tmp_path):
    with pytest.raises(RunError, match=r"the server answers 404 .*\.$"):
        download.fetch(f"{server['url']}/gone", tmp_path / "a", SHA)
    assert len(server["asked"]) == 1
    with pytest.raises(RunError, match=r"^http://127\.0\.0\.1:1/a broke off after 0 bytes .*\.$"):
        download.fetch("http://127.0.0.1:1/a", tmp_path / "a", SHA)


# Unpacking


def tar(path, *members):
    """A tar file of names with their content, or with their kind in a tuple."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            else:
                (info.type,), info.linkname = content, "/etc/passwd"
                archive.addfile(info)
    return path


def test_an_archive_is_unpacked_whole(tmp_path):
    archive = tar(tmp_path / "a.tar.gz", ("data", (tarfile.DIRTYPE,)), ("data/x/ü.txt", b"one"), ("data/y.txt", b"two"))
    assert download.unpack(archive, tmp_path, "data") == tmp_path / "data"
    assert (tmp_path / "data" / "x" / "ü.txt").read_bytes() == b"one"
    with pytest.raises(RunError, match="exists already"):
        download.unpack(archive, tmp_path, "data")


@pytest.mark.parametrize(
    "evil",
    [
        ("../outside.txt", b"x"),
        ("data/../../outside.txt", b"x"),
        ("/tmp/outside.txt", b"x"),
        ("other/x", b"x"),
        ("data", b"a file, not a folder"),
        ("data/link", (tarfile.SYMTYPE,)),
        ("data/hard", (tarfile.LNKTYPE,)),
        ("data/device", (tarfile.CHRTYPE,)),
        ("data/pipe", (tarfile.FIFOTYPE,)),
    ],
    ids=str,
)
def test_an_archive_that_reaches_outside_unpacks_nothing(tmp_path, evil):
    root = tmp_path / "root"
    root.mkdir()
    archive = tar(root / "a.tar.gz", ("data/fine.txt", b"fine"), evil)
    with pytest.raises(RunError, match="does not belong there; nothing is unpacked"):
        download.unpack(archive, root, "data")
    assert [path.name for path in root.iterdir()] == ["a.tar.gz"]
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_a_damaged_archive_is_one_sentence(tmp_path):
    whole = tar(tmp_path / "a.tar.gz", ("data/x", CONTENT)).read_bytes()
    for content in (whole[: len(whole) // 2], b"nothing", tar(tmp_path / "empty.tar.gz").read_bytes()):
        (tmp_path / "a.tar.gz").write_bytes(content)
        with pytest.raises(RunError, match=r"a\.tar\.gz (cannot be unpacked|holds no folder)"):
            download.unpack(tmp_path / "a.tar.gz", tmp_path, "data")
        assert not (tmp_path / "data").exists()


# Datasets


def test_cifar_from_the_server_to_a_dataset(server, tmp_path, monkeypatch):
    cifar_binary(tmp_path / "made")
    packed = tmp_path / "cifar-100-binary.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(tmp_path / "made" / "cifar-100-binary", "cifar-100-binary")
    server["files"]["/cifar-100-binary.tar.gz"] = packed.read_bytes()
    checksum = "md5:" + hashlib.md5(packed.read_bytes()).hexdigest()
    file = File(f"{server['url']}/cifar-100-binary.tar.gz", checksum, "cifar-100-binary")
    monkeypatch.setitem(archives.ARCHIVES, "cifar100", [file])
    root = tmp_path / "root"
    assert "data.root" in archives.get("cifar100", root)
    assert [path.name for path in root.iterdir()] == ["cifar-100-binary"]
    assert len(load_dataset(DataSettings(name="cifar100", root=str(root))).train_labels) == 300
    assert archives.get("cifar100", root) == f"cifar100 is in {root} already."
    assert len(server["asked"]) == 1


def test_digits_from_the_server_to_a_dataset(server, tmp_path, monkeypatch):
    digit_files(tmp_path)
    usps = np.load(tmp_path / "usps.npz")
    contents = {"mnist.npz": (tmp_path / "mnist.npz").read_bytes()}
    for part, name in (("train", "usps.bz2"), ("test", "usps.t.bz2")):
        lines = []
        for image, label in zip(usps[f"x_{part}"].reshape(-1, 256), usps[f"y_{part}"], strict=True):
            pairs = (f"{i}:{value / 255 * 2 - 1:.7g}" for i, value in enumerate(image, 1))
            lines.append(f"{label + 1} {' '.join(pairs)} ")
        contents[name] = bz2.compress("\n".join(lines).encode() + b"\n")
    files = []
    for name, content in contents.items():
        server["files"][f"/{name}"] = content
        files.append(File(f"{server['url']}/{name}", "sha256:" + hashlib.sha256(content).hexdigest()))
    monkeypatch.setitem(archives.ARCHIVES, "digit_domains", files)
    root = tmp_path / "root"
    archives.get("digit_domains", root)
    assert sorted(path.name for path in root.iterdir()) == ["mnist.npz", "usps.npz"]
    for name in ("x_train", "y_train", "x_test", "y_test"):
        assert np.array_equal(np.load(root / "usps.npz")[name], usps[name])
    assert len(load_dataset(DataSettings(name="digit_domains", root=str(root))).domains) == 3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("imagenet_r", "no published checksum.*https://github.com/hendrycks/imagenet-r"),
        ("domainnet", "no published checksum.*https://ai.bu.edu/M3SDA"),
        ("digits", "needs nothing"),
        ("own", "needs nothing"),
        ("cifar10", "not a dataset.*cifar100"),
    ],
)
def test_what_is_not_fetched_is_said_plainly(tmp_path, name, words):
    with pytest.raises(UsageError, match=words):
        archives.get(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_cannot_be_written_is_one_sentence(server, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setitem(archives.ARCHIVES, "cifar100", [File(f"{server['url']}/a", SHA)])
    with pytest.raises(RunError, match="cannot be written"):
        archives.get("cifar100", tmp_path / "file" / "root")
