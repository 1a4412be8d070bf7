"""An authority of the tests, and files as an operator would mount them."""

import datetime
import hashlib
import os
from pathlib import Path

import pytest
import trustme
import yaml


class Mounted:
    """A folder with ``tls.crt``, ``tls.key`` and ``ca.crt``, which ``renew`` replaces."""

    def __init__(self, folder: Path, names=("internal.paceline", "127.0.0.1")):
        self.folder, self.names = folder, names
        self.authority = trustme.CA()
        self.certificate, self.key, self.ca = folder / "tls.crt", folder / "tls.key", folder / "ca.crt"
        self.ca.write_bytes(self.authority.cert_pem.bytes())
        self.renew()

    def renew(self, **options):
        """Issues another certificate into the files, and returns it."""
        issued = self.authority.issue_cert(*self.names, **options)
        write(self.certificate, b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        write(self.key, issued.private_key_pem.bytes())
        return issued


def write(path: Path, data: bytes) -> None:
    """Replaces a file in one step."""
    new = path.with_suffix(".new")
    new.write_bytes(data)
    os.replace(new, path)


def yesterday() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    return Mounted(tmp_path)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def write_keys(path: Path, *entries: dict) -> Path:
    """A file of keys that only its owner may read."""
    write(path, yaml.safe_dump({"keys": list(entries)}).encode())
    path.chmod(0o600)
    return path
