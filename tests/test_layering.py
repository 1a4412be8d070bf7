"""The layout, as a test: which package may import which, and which third-party library lives where.

The tables are the picture of docs/architecture.md. An import that they do not allow is a change of the design: change
the picture first.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVICES = Path(__file__).parents[1] / "services"

VALUES = {"types", "errors"}
MAY = {
    # What everything rests on.
    "errors": set(),
    "embedded": set(),
    "v1": set(),
    "types": {"errors"},
    "messages": {"types"},
    "config": {"types", "errors", "embedded"},
    "logs": {"config"},
    "checkpoint": {"config", "embedded", *VALUES},
    # Keys, certificates, and who may call what.
    "security": {*VALUES},
    # What must be right: tensors and data.
    "core": {"messages", "config", *VALUES},
    "model": {"core", "checkpoint", "config", *VALUES},
    "preflight": {"security", "model", "core", "checkpoint", "config", *VALUES},
    # The boxes: they do not know how they are run, and never import each other.
    "drafters": {"core", "model", "checkpoint", "messages", "config", *VALUES},
    "draft": {"drafters", "core", "model", "preflight", "checkpoint", "messages", "config", *VALUES},
    "target": {"drafters", "core", "model", "preflight", "checkpoint", "messages", "config", *VALUES},
    # It takes RouterConfig, its slice of the configuration, as the engines take theirs.
    "router": {"logs", "rpc", "security", "checkpoint", "metrics", "messages", "config", "v1", *VALUES},
    # What connects them.
    "rpc": {"messages", "security", "v1", *VALUES},
    "metrics": {"messages", *VALUES},
    "runtime": {"target", "draft", "rpc", "security", "messages", "config", "logs", "v1", *VALUES},
    "local": {"router", "rpc", "runtime", "metrics", "checkpoint", "messages", "config", "logs", *VALUES},
    "plan": {"target", "draft", "core", *VALUES},
    "fleet": {"plan", "metrics", "config", *VALUES},
    "cluster": {
        *(
            "router",
            "runtime",
            "fleet",
            "web",
            "preflight",
            "metrics",
            "rpc",
            "security",
            "checkpoint",
            "config",
            "logs",
            "v1",
        ),
        *VALUES,
    },
    "app": {"cluster"},
    # Who uses them.
    "client": {"rpc", "v1", *VALUES},
    "cli": {
        "cluster",
        "router",
        "rpc",
        "security",
        "local",
        "web",
        "metrics",
        "client",
        "preflight",
        "plan",
        "drafters",
        "checkpoint",
        "config",
        "logs",
        *VALUES,
    },
    # HTTP beside gRPC: neither Ray nor engines.
    "web": {"router", "security", "checkpoint", "logs", *VALUES},
}
"""Package or module -> what of ours it may import, inside functions and for type checking included."""

ONLY = {
    "ray": {"cluster", "metrics", "paceline_bench"},
    "grpc": {"rpc", "client", "router", "runtime", "paceline_bench"},
    "google.protobuf": {"rpc", "client"},
    "transformers": {"model", "drafters", "checkpoint", "paceline_bench"},
    "argparse": {"cli", "cluster", "paceline_bench"},
    "rich": {"cli"},
    "fastapi": {"web"},
    "starlette": {"web"},
    "uvicorn": {"cli"},
    "httpx2": {"web", "cli"},
}
"""Library -> the only packages that may import it."""

TOP = {"__init__", "__main__", "app", "logs", "messages", "types"}
"""The modules at the top of the package; everything else is in a folder."""

FILES = [path for path in sorted(SERVICES.glob("paceline*/**/*.py")) if "v1" not in path.parts]


def room(path: Path) -> str:
    """The package or top module of ``paceline`` that a file belongs to; for the benchmark its own package."""
    package, first, *_ = path.relative_to(SERVICES).parts
    return first.removesuffix(".py") if package == "paceline" else package


def is_entry(package: str, path: Path) -> bool:
    """True for a drafting method's own file in the configuration, which may also hold the functions that build it."""
    return package == "config" and path.parent.name == "methods"


@functools.cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def imports(path: Path, *, late: bool = True) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a file imports, wherever in it; ``late``: inside functions, too."""
    waiting: deque[ast.AST] = deque([_parsed(path.read_text(encoding="utf-8"))])
    while waiting:
        node = waiting.popleft()
        if late or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: imports are absolute"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def violations(package: str, path: Path) -> list[str]:
    """The imports of a file of a package that the tables do not allow."""
    found, named = [], [*imports(path)]
    now = set(imports(path, late=False) if is_entry(package, path) else named)
    for line, name in named:
        first, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        where = f"{package}/{path.name}:{line}"
        allowed = MAY.get(package, set()) | {package, "__version__"}
        if (line, name) not in now:  # what builds a drafter is a drafter's, wherever it stands
            allowed |= MAY["drafters"] | {"drafters"}
        if first == "paceline" and package in MAY and other not in allowed:
            found.append(f"{where}: {package} -> {other}")
        if first == "paceline_bench" and package != first:
            found.append(f"{where}: nothing of the service imports its benchmark")
        for library, homes in ONLY.items():
            if (name == library or name.startswith(library + ".")) and package not in homes:
                found.append(f"{where}: {library} is only for {', '.join(sorted(homes))}")
    return found


def test_nothing_else_stands_at_the_top() -> None:
    top = SERVICES / "paceline"
    assert {path.stem for path in top.glob("*.py")} == TOP
    assert {path.name for path in top.iterdir() if path.is_dir() and path.name != "__pycache__"} <= set(MAY)
    assert len([path for path in top.iterdir() if path.name != "__pycache__"]) <= 30


def test_the_picture_has_no_cycle() -> None:
    tuple(graphlib.TopologicalSorter(MAY).static_order())  # raises CycleError


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SERVICES)))
def test_every_import_is_an_arrow_of_the_picture(path: Path) -> None:
    package = room(path)
    if package not in {"__init__", "__main__"}:  # they name what a user imports and runs
        assert violations(package, path) == []


def test_no_module_imports_itself_in_a_circle() -> None:
    modules = {
        ".".join(path.relative_to(SERVICES).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES
    }
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = (name for _, name in imports(path, late=not is_entry(room(path), path)))
        graph[module] = {name if name in modules else name.rpartition(".")[0] for name in names} & set(modules) - {
            module
        }
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


def test_a_wrong_import_is_found(tmp_path: Path) -> None:
    path = tmp_path / "engine.py"
    path.write_text("def f():\n    from paceline.target.engine import TargetEngine\n    import grpc.aio\n")
    assert violations("draft", path) == [
        "draft/engine.py:2: draft -> target",
        "draft/engine.py:3: grpc is only for client, paceline_bench, router, rpc, runtime",
    ]


def test_a_method_in_one_file_imports_engines_only_where_it_is_built(tmp_path: Path) -> None:
    toy = (Path(__file__).parent / "support" / "repeat.py").read_text(encoding="utf-8")
    path = tmp_path / "methods" / "repeat.py"
    path.parent.mkdir()
    path.write_text(toy, encoding="utf-8")
    assert violations("config", path) == []
    path.write_text("from paceline.drafters.protocol import Leaf\ndef f():\n    import paceline.target\n" + toy)
    assert violations("config", path) == [
        "config/repeat.py:1: config -> drafters",
        "config/repeat.py:3: config -> target",
    ]


PRIVATE = r"(_(?!replace\b|fields\b|exit\b)[a-zA-Z]\w*)"
ASSIGNED = r"\bself\.(?=\w+(?:, self\.\w+|: [^=\n]+)* = )|^ *(?=\w+(?:: | = ))"
DEFINED = re.compile(rf"(?:\bdef |\bclass |{ASSIGNED}){PRIVATE}", re.MULTILINE)
"""The private names that a file defines: functions, classes, attributes, variables."""
READ = re.compile(rf"\.{PRIVATE}")
REPLACED = re.compile(rf"""(?:\([\w.()\s]+,\s*["']|["']paceline[\w.]*\.){PRIVATE}["']""")
"""The private names that a test reads, and those that it replaces or makes a mutant of."""


def private_uses(path: Path, uses: re.Pattern[str]) -> list[str]:
    """Private names that a test uses; what its own file defines is its own."""
    text = path.read_text(encoding="utf-8")
    own = set(DEFINED.findall(text))
    return [name for name in uses.findall(text) if name not in own]


@pytest.mark.parametrize(("uses", "most"), [(REPLACED, 0), (READ, 247)], ids=["replaced", "read"])
def test_tests_use_what_is_public(uses: re.Pattern[str], most: int) -> None:
    """The bounds only fall: what a test replaces or reads is a public part of its module, with a docstring."""
    privates = {name for path in FILES for name in DEFINED.findall(path.read_text(encoding="utf-8"))}
    tests = sorted(Path(__file__).parent.rglob("*.py"))
    found = [f"{path}: {name}" for path in tests for name in private_uses(path, uses) if name in privates]
    assert len(found) <= most, "\n".join(found)


def test_a_private_name_that_a_test_uses_is_found(tmp_path: Path) -> None:
    path = tmp_path / "test_engine.py"
    path.write_text('@mutant(Engine, "_ham")\npatch.setattr("paceline.core.noise._eggs", 0)\nassert engine._spam\n')
    assert private_uses(path, REPLACED) == ["_ham", "_eggs"]
    assert private_uses(path, READ) == ["_eggs", "_spam"]
    path.write_text("class Own:\n    def __init__(self):\n        self._eggs, self._spam = 0, 1\nassert own._spam\n")
    assert private_uses(path, READ) == []
