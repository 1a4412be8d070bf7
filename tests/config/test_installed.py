"""Two wheels of one version are two versions to Serve and ``paceline status``; a source tree has its version alone."""

import pytest

from paceline import __version__
from paceline.config import installed
from paceline.config.installed import installed_version, wheel_digest

RECORD = [
    "paceline/__init__.py,sha256=AAA,100",
    "paceline/app.py,sha256=BBB,200",
    "paceline/__pycache__/app.cpython-311.pyc,,",
    "../../../bin/paceline,sha256=CCC,300",
    "paceline-0.1.0.dist-info/METADATA,sha256=DDD,400",
]


class Installed:
    """A distribution whose RECORD is this."""

    def __init__(self, record: list[str]) -> None:
        self._record = record

    def read_text(self, name: str) -> str:
        assert name == "RECORD"
        return "\n".join(self._record)


@pytest.mark.parametrize(
    ("changed", "differs"),
    [
        (RECORD, False),
        (RECORD[::-1], False),
        ([line.replace("BBB", "EEE") for line in RECORD], True),
        (RECORD[:1] + RECORD[2:], True),
        ([line.replace("CCC", "EEE") for line in RECORD], False),  # the interpreter's path is in it
        ([line for line in RECORD if ".pyc" not in line], False),
    ],
)
def test_another_module_is_another_wheel(changed: list[str], differs: bool) -> None:
    assert (wheel_digest(changed) != wheel_digest(RECORD)) == differs
    assert wheel_digest(RECORD)


def test_the_version_holds_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    installed_version.cache_clear()
    monkeypatch.setattr(installed, "distribution", lambda name: Installed(RECORD))
    try:
        assert installed_version() == f"{__version__}+{wheel_digest(RECORD)}"
        monkeypatch.setattr(installed, "distribution", lambda name: Installed(["_paceline.pth,sha256=AAA,10"]))
        assert installed_version() != __version__, "what runs stays what it is when another wheel is installed"
        installed_version.cache_clear()
        assert installed_version() == __version__
    finally:
        installed_version.cache_clear()
