"""Without a compiler what needs one is skipped in one line; with one, what does not compile fails."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from tests.support import compilers

ROOT = Path(__file__).parents[2]

_WHOLE = """
import pytest
from pathlib import Path
from paceline.core import native

pytestmark = pytest.mark.compiler

@pytest.fixture(autouse=True)
def library(tmp_path):
    source = tmp_path / "broken.cpp"
    source.write_text("int broken(")
    return native.compiled(source, "digest", (), "a broken source")

def test_one(): pass
def test_two(): pass
"""
_PARTS = """
import pytest
from tests.support.compilers import needs_attention, needs_products

@pytest.fixture(params=[pytest.param("native", marks=pytest.mark.compiler), "python"])
def kind(request): return request.param

def test_fixture(kind): pass

@pytest.mark.parametrize("kind", [pytest.param("native", marks=[needs_attention, needs_products]), "python"])
def test_parameter(kind): pass

@pytest.mark.compiler
def test_marked(): pass

def test_unmarked(): pass
"""
_HEADERS = """
import sysconfig

path_of = sysconfig.get_path
sysconfig.get_path = lambda name, *more: {folder!r} if name == "include" else path_of(name, *more)
"""


def summary(tmp_path: Path, path: str) -> tuple[list[str], str]:
    """Lines of skipped tests, and the last line, of a run of both files with these folders of programs."""
    (tmp_path / "test_whole.py").write_text(_WHOLE, encoding="utf-8")
    (tmp_path / "test_parts.py").write_text(_PARTS, encoding="utf-8")
    command = (
        *(sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "-p", "tests.conftest"),
        *("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), str(tmp_path)),
    )
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("PYTEST")},
        "PATH": path,
        "PACELINE_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": f"{ROOT / 'services'}:{ROOT}",
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
    lines = done.stdout.splitlines()
    return [line for line in lines if line.startswith("SKIPPED")], lines[-1]


def test_without_a_compiler_what_needs_one_is_skipped_in_one_line(tmp_path: Path) -> None:
    """Before its fixtures are made, and whatever carries the mark: a module, a test, a parameter, a fixture's."""
    (line,), last = summary(tmp_path, str(tmp_path / "nothing"))
    assert line.startswith("SKIPPED [5] ")
    assert line.endswith(f": {compilers.NEEDED}")
    assert last.startswith("3 passed, 5 skipped in ")


def test_with_a_compiler_what_does_not_compile_fails(tmp_path: Path) -> None:
    """A compiler that refuses everything, and headers, wherever this runs."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "g++").write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    (programs / "g++").chmod(0o755)
    (programs / "Python.h").touch()
    (tmp_path / "conftest.py").write_text(_HEADERS.format(folder=str(programs)), encoding="utf-8")
    skipped, last = summary(tmp_path, str(programs))
    assert "2 errors" in last
    assert not any(compilers.NEEDED in line for line in skipped)


@pytest.mark.parametrize(("compiler", "headers"), [(True, True), (True, False), (False, True)])
def test_both_a_compiler_and_the_headers_are_needed(compiler, headers, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("paceline.core.native.shutil.which", lambda name: name if compiler else None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    if headers:
        (tmp_path / "Python.h").touch()
    assert compilers.has_compiler.__wrapped__() == (compiler and headers)
