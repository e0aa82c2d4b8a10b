"""Certificates and keys for a network of one's own: made here, kept in files that only their owner reads."""

import datetime
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedprotip.errors import UsageError
from fedprotip.store.plain import UNFINISHED, PlainFolder

if TYPE_CHECKING:
    from cryptography import x509

YEARS = 10
"""How long certificates are good for."""
ADMITTED = "admitted"
"""File of the SuperLink's home: a line CLIENT PUBLIC-KEY for every client whose key was admitted as its own."""


@dataclass(frozen=True)
class Certificates:
    """Files of the SuperLink; sites get `authority` alone."""

    authority: Path
    certificate: Path
    key: Path


def certificates(folder: Path, host: str) -> Certificates:
    """Those of a folder, made where there are none: an authority, and a certificate of it for this host.

    UsageError where some of them are missing, or cannot be used: sites trust the authority that they were given, and no
    other one is made in its place.
    """
    found = Certificates(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    files = (found.key, found.certificate, found.authority)
    anew = f"or, for new ones, remove all of {', '.join(path.name for path in files)} and bring ca.crt to every site"
    missing = [path for path in files if not path.exists()]
    if missing and len(missing) < len(files) and all(_unfinished(path).exists() for path in missing):
        for path in missing:  # a kill came between two names
            _unfinished(path).replace(path)
        missing = []
    if len(missing) == len(files):
        _make(found, host)
    elif missing:
        raise UsageError(f"{missing[0]} is missing, and others of its kind are there: put it back, {anew}.")
    else:
        _check_usable(found, host, anew)
    return found


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + UNFINISHED)


def _check_usable(files: Certificates, host: str, anew: str) -> None:
    """UsageError where sites would not take these certificates, or others can read the key."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    certificate, authority = _read(files.certificate), check_authority(files.authority)
    names = _names(certificate)
    if host not in names and f"*.{host.partition('.')[2]}" not in names:
        raise UsageError(
            f"{files.certificate} is for {', '.join(names)}, not for {host}: set superlink.host back, {anew}."
        )
    _check_date(certificate, files.certificate, f"put a new one there, {anew}")
    try:
        if all(path.read_bytes().count(b"-BEGIN CERTIFICATE-") == 1 for path in (files.certificate, files.authority)):
            certificate.verify_directly_issued_by(authority)  # of chains, sites see what comes of it
    except (ValueError, TypeError, InvalidSignature):
        raise UsageError(f"{files.certificate} is not signed by {files.authority}: put them back, {anew}.") from None
    check_private(files.key)
    try:
        key = load_pem_private_key(files.key.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise UsageError(f"{files.key} is no private key, or needs a password: put it back, {anew}.") from None
    if key.public_key() != certificate.public_key():
        raise UsageError(f"{files.key} is not the key of {files.certificate}: put it back, {anew}.")


def check_authority(path: Path) -> "x509.Certificate":
    """The certificate of the SuperLink's authority, for a site too; UsageError where it is none, or out of date."""
    authority = _read(path)
    _check_date(authority, path, "the SuperLink needs new certificates, and every site their ca.crt")
    return authority


def check_private(path: Path) -> None:
    """UsageError where others on this machine can read a key."""
    if path.stat().st_mode & 0o077:
        raise UsageError(f"{path} can be read by others than its owner; keep it private with: chmod 600 {path}.")


def _check_date(certificate: "x509.Certificate", path: Path, remedy: str) -> None:
    now = datetime.datetime.now(datetime.UTC)
    if now > (end := certificate.not_valid_after_utc):
        raise UsageError(f"{path} has expired on {end:%Y-%m-%d}: {remedy}.")
    if now < (begin := certificate.not_valid_before_utc):
        raise UsageError(f"{path} is good from {begin:%Y-%m-%d} on, and here it is {now:%Y-%m-%d}: set the clock.")


def _read(path: Path) -> "x509.Certificate":
    _require()
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        raise UsageError(f"{path} cannot be read as a certificate.") from None


def _names(certificate: "x509.Certificate") -> list[str]:
    """Hosts and addresses that a certificate is for."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return ["no host"]
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return [*names.get_values_for_type(x509.DNSName), *addresses]


def _make(files: Certificates, host: str) -> None:
    _require()
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    now = datetime.datetime.now(datetime.UTC)
    span = (now - datetime.timedelta(days=1), now + datetime.timedelta(days=365 * YEARS))
    signing, serving = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
    )
    authority = (
        x509.CertificateBuilder(named("fedprotip"), named("fedprotip"), signing.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(span[0])
        .not_valid_after(span[1])
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, decipher_only=False, **usage),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(signing.public_key()), critical=False)
        .sign(signing, hashes.SHA256())
    )
    names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    try:
        address = ipaddress.ip_address(host)
        names += [x509.IPAddress(address)] if x509.IPAddress(address) not in names else []
    except ValueError:
        names += [x509.DNSName(host)] if x509.DNSName(host) not in names else []
    certificate = (
        x509.CertificateBuilder(named("fedprotip"), named(host[:64]), serving.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(span[0])
        .not_valid_after(span[1])
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(serving.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
        .sign(signing, hashes.SHA256())
    )
    from cryptography.hazmat.primitives.serialization import Encoding

    pem, open_to_all = Encoding.PEM, 0o644
    _write(_unfinished(files.key), _private(serving))
    _write(_unfinished(files.certificate), certificate.public_bytes(pem), open_to_all)
    _write(_unfinished(files.authority), authority.public_bytes(pem), open_to_all)
    for path in (files.key, files.certificate, files.authority):  # from the first name on all of them are complete
        _unfinished(path).replace(path)


def site_key(path: Path) -> Path:
    """The private key of a site, made where there is none, with its public half beside it (.pub); that one.

    A key that is there is never replaced: its public half is derived from it where that is missing.
    """
    try:
        return _site_key(path)
    except OSError as error:
        raise UsageError(f"{error.filename or path} can be no key: {error.strerror}.") from None


def _site_key(path: Path) -> Path:
    _require()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
        load_ssh_private_key,
    )

    public = path.with_name(path.name + ".pub")
    if path.exists() and public.exists():
        check_private(path)
        return public
    if path.exists():
        try:
            key = load_ssh_private_key(path.read_bytes(), None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise UsageError(f"{path} is no private key, or needs a password; the SuperNode cannot use it.") from None
        check_private(path)
    elif public.exists():
        raise UsageError(
            f"{path} is missing, and its public half is there: put it back, or remove {public} for a new key, which "
            "the SuperLink has to admit."
        )
    else:
        key = ec.generate_private_key(ec.SECP384R1())
        _write(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    _write(public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n", 0o644)
    return public


def bind(folder: Path, client: int, public: Path) -> None:
    """From now on this client is known by this key alone; UsageError where either has another one already."""
    key, path = plain_key(public), folder / ADMITTED
    before = _lines(path)
    if before.get(client, key) != key:
        raise UsageError(f"Client {client} has another key; if this is to replace it, remove its line from {path}.")
    if other := [one for one, known in before.items() if known == key and one != client]:
        raise UsageError(f"{public} is the key of client {other[0]}; {path} says so.")
    lines = {**before, client: key}
    _write(path, "".join(f"{one} {lines[one]}\n" for one in sorted(lines)).encode(), 0o644)


def bound(folder: Path) -> Mapping[int, str]:
    """Client → its key in hexadecimal digits as Flower tells it, of those that have one of their own."""
    if not (lines := _lines(folder / ADMITTED)):
        return {}
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    form = (Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    try:
        return {one: load_ssh_public_key(key.encode()).public_bytes(*form).hex() for one, key in lines.items()}
    except (ValueError, UnsupportedAlgorithm):
        raise _damaged(folder / ADMITTED) from None


def _lines(path: Path) -> dict[int, str]:
    if not path.exists():
        return {}
    try:
        parts = [line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        found = {int(client): " ".join(key.split()[:2]) for client, key in parts}
    except ValueError:
        raise _damaged(path) from None
    if len(found) < len(parts):
        raise _damaged(path)
    return found


def _damaged(path: Path) -> UsageError:
    return UsageError(f"{path} is damaged: every line is the number of a client, which comes once, and its public key.")


def plain_key(public: Path) -> str:
    """A public key without its comment; UsageError where it is none."""
    _require()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        data = public.read_bytes()
        load_ssh_public_key(data)
    except (OSError, ValueError, UnsupportedAlgorithm):
        raise UsageError(f"{public} cannot be read as a public key.") from None
    return " ".join(data.decode().split()[:2])


def _private(key: object) -> bytes:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """All of it or nothing: what a kill left half-written would be in the way for good."""
    PlainFolder(path.parent).make().write(path.name, data, mode)


def _require() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise UsageError('Certificates need the package cryptography: pip install "fedprotip[secure]".') from None
