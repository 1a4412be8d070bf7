"""Certificates with their keys, read from files that are renewed from outside.

A version is used only if it is whole: every file can be read, the key belongs to the certificate, and the certificate
is valid today. Otherwise the service does not start, or keeps the previous version.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.errors.files import read_bytes
from paceline.security.files import Signature, signature

if TYPE_CHECKING:  # loaded where a certificate is read: the command line looks at configurations without it
    from cryptography import x509

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Files of the parts, and the keys of the configuration that name them."""

    setting: str
    """Such as ``server.tls``."""
    certificate: Path
    key: Path
    ca: Path | None = None
    """Authorities that the other side's certificate is checked against. None: it needs none."""
    ca_setting: str = "ca"
    server_name: str = ""
    """The name that a server's certificate must carry. Empty: the name in its address."""

    @classmethod
    def at(
        cls, setting: str, certificate: str, key: str, ca: str | None = None, ca_setting: str = "ca"
    ) -> CertificateFiles:
        """Makes the object from the names of files in a configuration."""
        paths = [None if name is None else Path(name).expanduser() for name in (certificate, key, ca)]
        assert paths[0] is not None
        assert paths[1] is not None
        return cls(setting, paths[0], paths[1], paths[2], ca_setting)


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate chain with its key, and the authorities that the other side is checked against, PEM each."""

    chain: bytes
    key: bytes
    ca: bytes | None
    expires_at: float
    """Time at which the certificate expires, in Unix seconds."""


def read_identity(files: CertificateFiles, *, now: float | None = None) -> Identity:
    """Reads and checks the files. Raises ConfigError with the setting, the file and the problem."""
    chain = _read(files, "certificate", files.certificate)
    key = _read(files, "key", files.key)
    ca = None if files.ca is None else _read(files, files.ca_setting, files.ca)
    certificate = _certificates(files, "certificate", files.certificate, chain)[0]
    if ca is not None and files.ca is not None:
        _certificates(files, files.ca_setting, files.ca, ca)
    try:
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        private = load_pem_private_key(key, None)
    except (ValueError, TypeError) as error:  # TypeError: it has a passphrase
        raise _refused(files, "key", files.key, "it holds no private key in PEM without a passphrase") from error
    if _public(private.public_key()) != _public(certificate.public_key()):
        raise _refused(files, "key", files.key, f"it does not belong to the certificate in {str(files.certificate)!r}")
    today = datetime.fromtimestamp(time.time() if now is None else now, UTC)
    if today >= certificate.not_valid_after_utc:
        problem = f"it expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        raise _refused(files, "certificate", files.certificate, problem)
    if today < certificate.not_valid_before_utc:
        problem = f"it is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
        raise _refused(files, "certificate", files.certificate, problem)
    return Identity(chain, key, ca, certificate.not_valid_after_utc.timestamp())


class Certificates:
    """The newest sound version of some files. Any thread may use it."""

    def __init__(self, files: CertificateFiles, *, on_change: Callable[[Identity], None] | None = None) -> None:
        """Reads the files; ``on_change`` is called with every later version. Raises ConfigError."""
        self.files = files
        self._paths = [path for path in (files.certificate, files.key, files.ca) if path is not None]
        self._on_change = on_change
        self._lock = threading.Lock()
        self._seen: Signature = signature(self._paths)
        self._suspect: Signature | None = None
        self._current = read_identity(files)
        self.num_failures = 0
        """Versions of the files that could not be used."""

    @property
    def current(self) -> Identity:
        """The version in use."""
        return self._current

    def refresh(self) -> Identity:
        """Rereads the files if they have changed, and returns the version to use.

        An invalid version is logged and counted when it is found for the second time, because certificate and key are
        rarely replaced at the same moment.
        """
        with self._lock:
            now = signature(self._paths)
            if now == self._seen:
                return self._current
            try:
                self._current = read_identity(self.files)
            except ConfigError as error:
                if now != self._suspect:
                    self._suspect = now
                    return self._current
                self.num_failures += 1
                log.error("the certificate in use stays as it was: %s", error)
            else:
                expires = datetime.fromtimestamp(self._current.expires_at, UTC)
                log.info(
                    "%s: a new certificate is in use, until %s UTC", self.files.setting, f"{expires:%Y-%m-%d %H:%M}"
                )
                if self._on_change is not None:
                    self._on_change(self._current)
            self._seen, self._suspect = now, None
            return self._current


def _refused(files: CertificateFiles, name: str, path: Path, problem: str) -> ConfigError:
    return ConfigError(f"{files.setting}.{name} is {str(path)!r}: {problem}")


def _read(files: CertificateFiles, name: str, path: Path) -> bytes:
    return read_bytes(path, f"{files.setting}.{name} is {str(path)!r}")


def _certificates(files: CertificateFiles, name: str, path: Path, data: bytes) -> list[x509.Certificate]:
    try:
        from cryptography import x509

        return x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise _refused(files, name, path, "it holds no certificate in PEM") from error


def _public(key: object) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined, no-any-return]
