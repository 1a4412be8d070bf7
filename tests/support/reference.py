"""docs/python.md: the public Python API, from the sources: signatures, fields and docstrings as they stand there.

The sources are parsed and not imported, so that the page is the same with every Python and every version of a library.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "services" / "paceline"


@dataclass(frozen=True)
class Entry:
    """A class of the page."""

    name: str
    """The name by which it is imported."""
    file: str
    bases: tuple[tuple[str, str], ...] = ()
    """(file, class) of those whose public members are its own, too."""
    hidden: tuple[str, ...] = ()
    """Public members that only others of ours call."""
    made: bool = True
    """False: callers are given it."""

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]


def _types(*names: str) -> list[Entry]:
    return [Entry(f"paceline.types.{name}", "types.py", hidden=_OURS.get(name, ()), made=False) for name in names]


_OURS = {
    "SamplingParams": ("with_defaults", "bound", "check_seed", "fitted", "check_vocabulary", "check_choice"),
    "StructuredOutput": ("kind", "text"),
    "SpeculationStats": ("add",),
}
_CONNECTION = "client/connection.py"
_LOCAL = "local/pipeline.py"
_STREAM = ("wake",)
SECTIONS: list[tuple[str, str, list[Entry]]] = [
    (
        "Clients of a service",
        (
            "`pip install paceline` is enough for these. Both clients have the same methods; `AsyncClient`'s waiting "
            "methods are coroutines. [Serving](serving.md#the-python-client) shows them at work."
        ),
        [
            Entry("paceline.Client", "client/blocking.py", ((_CONNECTION, "ClientBase"),), ("connection", "leave")),
            Entry("paceline.AsyncClient", "client/aio.py", ((_CONNECTION, "ClientBase"),), ("connection", "leave")),
            Entry("paceline.client.Stream", "client/blocking.py", ((_CONNECTION, "StreamBase"),), _STREAM, made=False),
            Entry("paceline.client.AsyncStream", "client/aio.py", ((_CONNECTION, "StreamBase"),), _STREAM, made=False),
            Entry("paceline.client.Tls", _CONNECTION, hidden=("credentials",)),
        ],
    ),
    (
        "Engines on this machine",
        (
            "Without a service: `pip install 'paceline[embedded]'`. In addition to `path` the two models have the "
            "options of [`target_config.engine_kwargs`](configuration.md#target_configengine_kwargs) and of "
            "`draft_config.engine_kwargs`; drafters without a model are in `paceline.config` as well."
        ),
        [
            Entry("paceline.local.LocalPipeline", _LOCAL, hidden=("load", "info")),
            Entry("paceline.local.LocalGeneration", _LOCAL, hidden=("put", "close", "take", "session"), made=False),
            Entry("paceline.config.LocalConfig", "config/local.py", hidden=("target_setup", "draft_setup")),
            Entry("paceline.config.TargetModel", "config/local.py"),
            Entry("paceline.config.DraftModel", "config/local.py"),
        ],
    ),
    (
        "Parameters of a request",
        "Immutable, validated when they are made; a field that is wrong is named in the error.",
        _types(
            *("SamplingParams", "StructuredOutput", "SpeculationParams", "Mode", "Acceptance"),
            *("SeedScope", "LogprobsMode"),
        ),
    ),
    (
        "What comes back",
        "",
        _types(
            *("Chunk", "Result", "TokenLogprob", "PromptLogprobs"),
            *("Usage", "Timing", "SpeculationStats", "Round", "Cause", "FinishReason"),
            *("Trace", "TracedStep", "TracedNode"),
        ),
    ),
    (
        "The state of a service",
        "",
        _types("ModelInfo", "ServerInfo", "ReplicaStatus", "PoolScaling", "Startup"),
    ),
]


def python_page() -> str:
    """The whole page."""
    parts = [
        "# Python API",
        (
            "Written by `python -m tests.test_docs` from the sources. Everything else in the package may change "
            "without notice; [drafters of one's own](own-drafters.md) have an interface of their own."
        ),
    ]
    for title, intro, entries in SECTIONS:
        parts += [f"## {title}", *([intro] if intro else [])]
        for entry in entries:
            parts += _entry(entry)
    return "\n\n".join([*parts, *_errors()]) + "\n"


def _entry(entry: Entry) -> Iterator[str]:
    node = _class(entry.file, entry.short)
    classes = [(entry.file, node), *((file, _class(file, name)) for file, name in entry.bases)]
    yield f"### `{entry.name}`"
    making = next((found for found in _making(classes) if entry.made), None)
    if making is not None:
        yield _block(_signature(*making, entry.short))
    yield from _prose(ast.get_docstring(node))
    if making is not None:
        yield from _prose(ast.get_docstring(making[1]))
    if table := _fields(entry.file, node):
        yield table
    seen = set(entry.hidden)
    for file, owner in classes:
        for method in owner.body:
            if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name not in seen:
                if method.name.startswith("_") or _is(method, "field_validator", "model_validator"):
                    continue
                seen.add(method.name)
                yield from _method(file, owner, method, entry.short)


def _making(classes: Sequence[tuple[str, ast.ClassDef]]) -> Iterator[tuple[str, ast.FunctionDef]]:
    for file, owner in classes:
        yield from (
            (file, each) for each in owner.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"
        )


def _method(
    file: str, owner: ast.ClassDef, method: ast.FunctionDef | ast.AsyncFunctionDef, short: str
) -> Iterator[str]:
    yield f"#### `{short}.{method.name}`"
    same = [each for each in owner.body if getattr(each, "name", "") == method.name]
    overloads = [each for each in same if _is(each, "overload")]
    whole = next(each for each in same if not _is(each, "overload"))
    if _is(method, "property"):
        returns = _type(file, whole.returns)
        yield _block(f"{'await ' if isinstance(whole, ast.AsyncFunctionDef) else ''}{short}.{method.name}: {returns}")
    else:
        yield _block("\n".join(_signature(file, each, method.name, short) for each in overloads or [whole]))
    yield from _prose(ast.get_docstring(whole))


def _is(node: ast.AST, *decorators: str) -> bool:
    names = [
        ast.unparse(each.func if isinstance(each, ast.Call) else each) for each in getattr(node, "decorator_list", [])
    ]
    return any(name in decorators for name in names)


# -- parts of the sources -----------------------------------------------------------------------------------------


@cache
def _source(file: str) -> str:
    return (PACKAGE / file).read_text(encoding="utf-8")


@cache
def _class(file: str, name: str) -> ast.ClassDef:
    found = [node for node in ast.parse(_source(file)).body if isinstance(node, ast.ClassDef) and node.name == name]
    assert found, f"{file} has no class {name}"
    return found[0]


def _text(file: str, node: ast.AST | None) -> str:
    """The source of an expression, on one line."""
    segment = "" if node is None else ast.get_source_segment(_source(file), node)
    assert segment is not None
    return re.sub(r"\b[A-Z]\w+\b", lambda match: _spelled().get(match[0], match[0]), re.sub(r"\s+", " ", segment))


@cache
def _spelled() -> dict[str, str]:
    """Names at the top of the sources that stand for a number or for another type, and what they stand for."""
    found = {"TokenId": "int"}
    for file in ("types.py", _LOCAL, "client/connection.py"):
        for node in ast.parse(_source(file)).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name, value = node.targets[0].id, ast.get_source_segment(_source(file), node.value) or ""
                if name in _ALIASES or (name.isupper() and re.fullmatch(r"[\d.]+|2\*\*\d+( - 1)?", value)):
                    found[name] = value
    return found


_ALIASES = ("TopLogprobs", "Prompts")


def _type(file: str, node: ast.AST | None, short: str = "") -> str:
    """The source of an annotation, with what stands for types of this class in place."""
    stream = "AsyncStream" if short.startswith("Async") else "Stream"
    return re.sub(r"\bSelf\b", short or "Self", re.sub(r"\bStreamT\b", stream, _text(file, node)))


def _signature(file: str, node: ast.FunctionDef | ast.AsyncFunctionDef, name: str, short: str = "") -> str:
    """``name(argument: type = default, ...) -> type`` over as many lines as it needs."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [*[None] * (len(positional) - len(given.defaults)), *given.defaults]
    arguments = [_argument(file, *each) for each in zip(positional, defaults, strict=True) if each[0].arg != "self"]
    if given.vararg is not None:
        arguments.append(f"*{_argument(file, given.vararg, None)}")
    elif given.kwonlyargs:
        arguments.append("*")
    arguments += [_argument(file, *each) for each in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg is not None:
        arguments.append(f"**{_argument(file, given.kwarg, None)}")
    start = ("await " if isinstance(node, ast.AsyncFunctionDef) else "") + name
    end = f") -> {_type(file, node.returns, short)}" if node.name != "__init__" else ")"
    line = f"{start}({', '.join(arguments)}{end}"
    if len(line) <= 110:
        return line
    return "\n".join([f"{start}(", *(f"    {argument}," for argument in arguments), end])


def _argument(file: str, argument: ast.arg, default: ast.AST | None) -> str:
    annotation = f": {_text(file, argument.annotation)}" if argument.annotation is not None else ""
    return f"{argument.arg}{annotation}" + (f" = {_text(file, default)}" if default is not None else "")


def _fields(file: str, node: ast.ClassDef) -> str:
    """A table of the fields of a class, or of the values of an enumeration."""
    rows, is_enum = [], any("Enum" in ast.unparse(base) for base in node.bases)
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        meaning = _documentation(following)
        if is_enum and isinstance(statement, ast.Assign):
            assert isinstance(statement.targets[0], ast.Name)
            rows.append(f"| `{statement.targets[0].id}` | `{_text(file, statement.value)}` | {meaning} |")
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            kind, default = _text(file, statement.annotation), statement.value
            shown, bounds = _default(file, default)
            kind = " or ".join(f"`{part}`" for part in _alternatives(kind)) + bounds
            rows.append(f"| `{statement.target.id}` | {kind} | {shown} | {meaning} |")
    if not rows:
        return ""
    head = (
        ["| name | value | meaning |", "|---|---|---|"]
        if is_enum
        else ["| field | type | default | meaning |", "|---|---|---|---|"]
    )
    return "\n".join([*head, *rows])


def _alternatives(kind: str) -> list[str]:
    """The members of a union that is written with bars."""
    found, depth = [""], 0
    for char in kind:
        depth += {"[": 1, "]": -1}.get(char, 0)
        if char == "|" and not depth:
            found.append("")
        else:
            found[-1] += char
    return [part.strip().replace("|", "or") for part in found]


_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def _default(file: str, node: ast.AST | None) -> tuple[str, str]:
    """A default as it is shown, and the bounds of the field."""
    if node is None:
        return "required", ""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Field", "field")):
        return f"`{_text(file, node)}`", ""
    given = {each.arg: each.value for each in node.keywords}
    bounds = ", ".join(f"{word} `{_text(file, given[name])}`" for name, word in _BOUNDS.items() if name in given)
    if "default_factory" in given:
        return f"`{_text(file, given['default_factory'])}()`", f", {bounds}" if bounds else ""
    shown = f"`{_text(file, given['default'])}`" if "default" in given else "required"
    return shown, f", {bounds}" if bounds else ""


def _documentation(node: ast.AST | None) -> str:
    """The docstring of a field: the text that follows it."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return _inline(" ".join(inspect.cleandoc(node.value.value).split())).replace("|", "\\|")
    return ""


# -- docstrings ---------------------------------------------------------------------------------------------------


def _prose(text: str | None) -> Iterator[str]:
    """The paragraphs of a docstring; sections of arguments, results and errors as lists."""
    for paragraph in re.split(r"\n\s*\n", text or ""):
        title, _, rest = paragraph.partition("\n")
        if re.fullmatch(r"(Args|Returns|Raises|Yields):", title.strip()):
            items = re.split(r"\n(?=\S)", textwrap.dedent(rest))
            yield f"{title.strip()}\n\n" + "\n".join(f"- {_item(item)}" for item in items)
        elif paragraph:
            yield _block(textwrap.dedent(paragraph)) if paragraph.startswith("    ") else _inline(_joined(paragraph))


def _item(text: str) -> str:
    name, separator, meaning = _joined(text).partition(": ")
    return f"`{name}`: {_inline(meaning)}" if separator and re.fullmatch(r"\w+", name) else _inline(_joined(text))


def _joined(text: str) -> str:
    return " ".join(text.split())


def _inline(text: str) -> str:
    return text.replace("``", "`")


def _block(text: str) -> str:
    return f"```text\n{text}\n```"


def _errors() -> Iterator[str]:
    tree = ast.parse(_source("errors/__init__.py"))
    yield "## Errors"
    yield "All are in `paceline.errors`."
    yield from _prose(ast.get_docstring(tree, clean=False))
    rows = ["| error | meaning |", "|---|---|"]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            rows.append(f"| `{node.name}` | {_inline(_joined(ast.get_docstring(node) or ''))} |")
    yield "\n".join(rows)
