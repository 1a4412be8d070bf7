"""Every script of ``benchmarks/`` imports, so that a rename cannot break one silently."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATHS = (ROOT / "services", ROOT, ROOT / "benchmarks")  # a script finds its neighbors in its own folder
IMPORT_ALL = """
import ast, importlib, sys, traceback
from pathlib import Path

failed = []
for path in map(Path, sys.argv[1:]):
    try:
        if path.parent.name == "benchmarks":
            importlib.import_module(f"benchmarks.{path.stem}")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0].startswith("paceline"):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")
    except Exception:
        failed.append(f"{path}: {traceback.format_exc(limit=-1)}")
print("\\n".join(failed))
"""
"""Imports scripts of our own without running them, and resolves each name that they import from the packages, in
functions too."""


def import_all(paths: list[Path]) -> str:
    """Imports the scripts in a process of their own. Returns what failed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS))}
    command = [sys.executable, "-c", IMPORT_ALL, *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # libraries may warn there
    return done.stdout.strip()


def test_every_script_imports() -> None:
    scripts = sorted((ROOT / "benchmarks").rglob("*.py"))
    assert len(scripts) > 20
    assert import_all(scripts) == ""


def test_a_name_that_is_gone_is_found(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def main():\n    from paceline.errors import ConfigError, GoneError\n", encoding="utf-8")
    assert "GoneError" in import_all([script])
