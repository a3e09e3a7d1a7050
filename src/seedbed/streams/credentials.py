"""The secrets of a run that listens: its certificate, and what proves that an actor may enter.

The learner keeps them in its run's folder, so that actors find it again after a restart. `cryptography` is
needed only where they are made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import hmac
import os
import secrets
import shutil
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seedbed import strict_json
from seedbed.files import load_json
from seedbed.printable import printable
from seedbed.types import SeedbedError

NAME = "seedbed"
"""The name in every run's certificate. Actors trust this certificate only, so no name has to be looked up."""
FOLDER = "listen"
"""The folder, in a run's, of what actors need; `KEY` is the file to take to another machine."""
KEY, PRIVATE, ADDRESS = "actor.key", "private.pem", "address.json"
ELSEWHERE = ".from-elsewhere"
"""A file in a folder whose content has come from another machine: nobody else need be able to write it."""
ENDED = "ended"
"""The field of `ADDRESS` that says that the run has ended, and how."""
_YEARS = 20
_SECRET_BYTES = 32


@dataclasses.dataclass(frozen=True)
class ActorKey:
    """The secrets with which an actor trusts the learner and is let in."""

    certificate: str  # PEM
    secret: bytes

    @classmethod
    def read(cls, path: Path) -> ActorKey:
        """Reads the file `actor.key` of a run; raises SeedbedError if it is not one."""
        try:
            data = load_json(path)
            return cls(certificate=str(data["certificate"]), secret=bytes.fromhex(data["secret"]))
        except OSError as error:
            raise SeedbedError(
                f"the key {printable(path)} cannot be read: {error.strerror}"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise SeedbedError(
                f"{printable(path)} is not the key of a run: copy the file {FOLDER}/{KEY} of the run's folder"
            ) from error

    def is_replaced_in(self, path: Path) -> bool:
        """Returns whether a file holds another key now; False if it cannot be read."""
        try:
            return ActorKey.read(path) != self
        except SeedbedError:
            return False

    def proof(self, nonce: bytes, term: int, hello: dict[str, Any]) -> str:
        """Returns the proof, in hexadecimal, that a `HELLO` with these fields answers this nonce and term."""
        said = strict_json.dumps([term, hello], sort=True).encode()
        return self.sign(b"seedbed actor", nonce + said).hex()

    def sign(self, purpose: bytes, data: bytes) -> bytes:
        """Returns 32 bytes that only who knows the secret can make of some data; good for one purpose."""
        return hmac.digest(self.secret, purpose + b"\0" + data, hashlib.sha256)

    def context(self) -> ssl.SSLContext:
        """Returns a TLS context for actors, which trusts the run's certificate and no other."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            context.load_verify_locations(cadata=self.certificate)
        except (ssl.SSLError, ValueError) as error:
            raise SeedbedError(f"the key's certificate cannot be used: {error}") from error
        return context


def learner_context(folder: Path) -> ssl.SSLContext:
    """Returns the TLS context of the learner whose credentials are in a folder.

    Raises SeedbedError if they cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # No stream is long enough to repay a ticket.
    context.num_tickets = 0
    try:
        context.load_cert_chain(folder / PRIVATE)
    except OSError as error:
        raise SeedbedError(
            f"{printable(folder / PRIVATE)} cannot be used ({error.strerror or error}): put it back, or "
            f"remove it and {KEY}, and give the new key to the other machines"
        ) from error
    return context


def ensure_credentials(folder: Path) -> ActorKey:
    """Returns the key of the run with this folder `listen`; makes it, and the certificate, if there is none.

    Only the user can read the files. Call with the run's folder locked. Raises SeedbedError if the disk
    refuses, or if a file is damaged.
    """
    key = folder / KEY
    try:
        folder.mkdir(exist_ok=True)
        folder.chmod(0o700)
        private_is_there = (folder / PRIVATE).exists()
        if key.exists() and not private_is_there:
            # Other machines may have it already.
            raise SeedbedError(
                f"{printable(key)} is there without {PRIVATE}: put that beside it, or remove both, and give "
                "the new key to the other machines"
            )
        if not key.exists():
            certificate, private = _make_certificate()
            write_private(folder / PRIVATE, private + certificate)
            content = {"certificate": certificate, "secret": secrets.token_hex(_SECRET_BYTES)}
            write_private(key, strict_json.dumps(content))
    except OSError as error:
        raise SeedbedError(
            f"the run's key cannot be written to {printable(folder)} ({error.strerror}): name another "
            "folder with --run"
        ) from error
    return ActorKey.read(key)


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its user can read, whole or not at all."""
    temporary = path.with_name(f".{path.name}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


@contextlib.contextmanager
def own_folder(key: Path) -> Iterator[Path]:
    """Makes a temporary folder that takes the place of a run's, with its key; raises SeedbedError."""
    ActorKey.read(key)
    try:
        run = Path(tempfile.mkdtemp(prefix="seedbed-host-"))
    except OSError as error:
        raise SeedbedError(
            f"{tempfile.gettempdir()} cannot be written ({error.strerror}): name another folder with TMPDIR"
        ) from error
    try:
        put_key(run, key.read_text())
        yield run
    finally:
        shutil.rmtree(run, ignore_errors=True)


def put_key(run: Path, key: str) -> None:
    """Writes a run's key into a folder that takes the place of the run's; raises SeedbedError."""
    try:
        (run / FOLDER).mkdir(0o700, exist_ok=True)
        write_private(run / FOLDER / KEY, key)
        (run / ELSEWHERE).touch()
    except OSError as error:
        raise SeedbedError(
            f"{run} cannot be written ({error.strerror}): make room there, or name another folder with TMPDIR"
        ) from error


def _make_certificate() -> tuple[str, str]:
    """Makes a certificate for the name `NAME` and its private key; both are PEM.

    Whoever has the key has the certificate, which has no need to begin: the clock of a machine may be late.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(private, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
    return pem, private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()
