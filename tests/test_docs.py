"""The pages say what is true of the tree: links, names, commands, configurations, generated tables and words.

    python -m tests.test_docs      writes the generated pages and docs/configuration.schema.json

Each check is a function from a page to its faults, so that it can be shown to fail.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import io
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel
from tests.lossless.methods import methods_page
from tests.support.reference import python_page
from tests.support.vllm_metrics import ABSENT

from paceline.cli.main import build_parser, main
from paceline.config import ServiceConfig
from paceline.errors import ConfigError
from paceline.metrics import catalogue, engines
from paceline.metrics.declaration import CATALOGUE, Kind

assert catalogue, engines  # they declare the metrics

ROOT = Path(__file__).parents[1]
SERVICES = ROOT / "services"
LARGEST_README = 8192  # bytes
FOLDERS = (ROOT, SERVICES, SERVICES / "paceline", SERVICES / "paceline_bench", ROOT / "benchmarks", ROOT / "tests")
"""Folders that a path in a page may be relative to, besides the page's own."""

_WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
_WRITTEN += sorted(ROOT.glob("benchmarks/*.md"))
_CARDS = sorted(SERVICES.glob("paceline/**/*.md"))
_RECORDED = sorted(ROOT.glob("benchmarks/results/**/*.md"))

FORBIDDEN = {
    r"(un)?fore(seen|see|sees)": "predicted, unexpected",
    r"homeless": "orphaned",
    r"anew": "again",
    r"dear(er|est)?": "expensive",
    r"for ever": "indefinitely",
    r"nobody|somebody": "no caller, another client, ...",
    r"told to do without": "paused",
    r"heard of": "seen",
    r"worth it": "beneficial",
    r"shall|shalt": "should, must",
    r"on (its|their) way up": "starting",
    r"says of (it|them)sel(f|ves)": "reports",
    r"is no (file|directory|setting|number|model|baseline|flag|key|YAML|JSON)": "is not a ...",
    r"(internal|public) door": "servicer, API",
    r"(quanti|tokeni|summari|optimi|initiali|normali|seriali)s(e|ed|es|ing|ation)": "American spelling",
    r"colour(s|ed)?|behaviour(s)?|licence(s|d)?": "American spelling",
    r"day two": "operations",
    r"lock[- ]step": "sequential",
    r"beside (\d+|n|ten|so many|how many|others)( of them| sessions)?": "at concurrency n",
}
"""Words that the project does not use in prose -> what it says instead."""


@dataclass(frozen=True)
class Page:
    """A Markdown page."""

    path: Path
    text: str

    @classmethod
    def read(cls, path: Path) -> Page:
        return cls(path, path.read_text(encoding="utf-8"))

    @functools.cached_property
    def blocks(self) -> list[tuple[str, str]]:
        """(language, text) of every fenced block."""
        return [(match[2], match[3]) for match in _FENCE.finditer(self.text)]

    @functools.cached_property
    def unfenced(self) -> str:
        """The text without fenced blocks."""
        return _FENCE.sub("", self.text)

    @functools.cached_property
    def spans(self) -> list[str]:
        """Every inline code span, on one line."""
        return [" ".join(match[1].split()) for match in _SPAN.finditer(self.unfenced)]

    @functools.cached_property
    def prose(self) -> str:
        """The text without blocks, code spans and link targets."""
        return re.sub(r"\]\([^)]*\)", "]", _SPAN.sub("", self.unfenced))

    @functools.cached_property
    def commands(self) -> list[str]:
        """The command lines of its blocks: without prompts, comments and what follows a pipe."""
        found = []
        for language, text in self.blocks:
            if language not in ("", "sh", "bash", "console"):
                continue
            joined = text.replace("\\\n", " ")
            found += [line.strip().removeprefix("$ ") for line in joined.splitlines()]
        return found


_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = (re.sub(r"[`*]", "", heading).lower() for heading in _HEADING.findall(_FENCE.sub("", text)))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


# -- The checks: from a page to its faults ------------------------------------------------------------------------


def broken_links(page: Page) -> list[str]:
    """Relative links whose file or heading does not exist."""
    faults = []
    for link in _LINK.findall(_SPAN.sub("", page.unfenced)):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, anchor = link.partition("#")
        path = (page.path.parent / place).resolve() if place else page.path
        if not path.exists():
            faults.append(f"{link}: there is no such file")
        elif anchor and anchor not in anchors(page.text if path == page.path else path.read_text(encoding="utf-8")):
            faults.append(f"{link}: there is no such heading")
    return faults


def missing_files(page: Page) -> list[str]:
    """Paths and file names in code spans that nothing in the tree has."""
    faults = []
    for span in page.spans:
        name = re.sub(r"(::.*|:\d+|#.*)$", "", span)
        if not re.fullmatch(r"[\w.*/+-]+", name) or re.search(r"[A-Z]{4}", name.replace("README", "")):
            continue  # not a path, or one with a placeholder
        if not _SUFFIX.search(name) and not (name.endswith("/") and not name.startswith("/")):
            continue
        if name.startswith(("/", "~", ".", "dist/")) or name in keys():
            continue
        if not any(next(folder.glob(name.rstrip("/")), None) for folder in (page.path.parent, *FOLDERS)):
            faults += [] if name.rstrip("/") in _names() else [name]
    return faults


_SUFFIX = re.compile(r"\.(py|cpp|ya?ml|sh|md|json|jsonl|txt|proto|svg|toml)$")


@functools.cache
def _names() -> frozenset[str]:
    """The names of all files and folders, for those that a page names without their place."""
    tops = ("services", "tests", "benchmarks", "cluster", "k8s", "protos", "docs", "examples")
    return frozenset(path.name for top in tops for path in (ROOT / top).rglob("*"))


def missing_names(page: Page) -> list[str]:
    """Dotted names of our packages, in code spans, blocks and imports, that no module has."""
    code = "\n".join([*page.spans, *(text for _, text in page.blocks)])
    names = set(re.findall(r"\bpaceline(?:_bench)?(?:\.[A-Za-z_]\w*)+(?::\w+)?", code))
    for language, text in page.blocks:
        if language == "python" and not bad_python(page):
            imports = [node for node in ast.walk(ast.parse(textwrap.dedent(text))) if isinstance(node, ast.ImportFrom)]
            names |= {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    ours = {name.replace(":", ".") for name in names if name.startswith("paceline")}
    return sorted(name for name in ours if not exists(name))


def exists(name: str) -> bool:
    """True if a dotted name is a module of ours, something that a module defines or imports, in a .proto file, or an
    attribute of a span."""
    parts = name.split(".")
    metrics = SERVICES / "paceline" / "metrics"
    if any(f'"{name}"' in path.read_text(encoding="utf-8") for path in metrics.glob("*tracing.py")):
        return True
    if parts[:2] == ["paceline", "v1"]:
        protos = "".join(path.read_text() for path in (ROOT / "protos").rglob("*.proto"))
        return len(parts) == 2 or parts[2] in protos
    for end in range(len(parts), 0, -1):
        base = SERVICES.joinpath(*parts[:end])
        module = base.with_suffix(".py") if base.with_suffix(".py").exists() else base / "__init__.py"
        if module.exists():
            return end == len(parts) or parts[end] in defined(module)
    return False


def defined(module: Path) -> set[str]:
    """The names at the top of a module."""
    names: set[str] = {"__main__"} if (module.parent / "__main__.py").exists() else set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def bad_commands(page: Page) -> list[str]:
    """Commands that the command line, the Makefile or the tree does not have.

    Those of blocks are complete; those in the text may leave required arguments out.
    """
    faults = []
    lines = [(line, True) for line in page.commands] + [(span, False) for span in page.spans]
    for line, complete in lines:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue  # not a command
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        ends = [index for index, word in enumerate(words) if re.fullmatch(r"[|&;<>]+|2>|\.\.\.", word)]
        words = words[: ends[0]] if ends else words
        if words:
            fault = _fault(words, complete)
            faults += [f"{line}: {fault}"] if fault else []
    return faults


def _fault(words: list[str], complete: bool) -> str | None:
    program, arguments = words[0].rpartition("/")[2], [word.strip("[]") for word in words[1:]]
    if program == "paceline" and arguments and re.fullmatch(r"[a-z-]+", arguments[0]):
        return refusal(arguments, complete)
    if program == "make" and arguments:
        targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        unknown = {word for word in arguments if "=" not in word} - targets
        return f"the Makefile has no target {', '.join(sorted(unknown))}" if unknown else None
    if re.fullmatch(r"python[\d.]*", program) and arguments:
        return _python_fault(arguments)
    return None


def _python_fault(arguments: list[str]) -> str | None:
    if arguments[0] == "-m" and arguments[1].partition(".")[0] in ("paceline", "paceline_bench", "tests"):
        place = arguments[1].replace(".", "/")
        return None if any((root / f"{place}.py").exists() for root in (ROOT, SERVICES)) else "there is no such module"
    if not arguments[0].endswith(".py"):
        return None
    script = ROOT / arguments[0]
    if not script.exists():
        return "there is no such file"
    known = script.read_text() + _flag_sources()
    unknown = [word for word in arguments if word.startswith("--") and f'"{word.partition("=")[0]}"' not in known]
    return f"it has no flag {', '.join(unknown)}" if unknown else None


@functools.cache
def _flag_sources() -> str:
    return "".join(path.read_text() for path in (SERVICES / "paceline_bench").glob("*.py"))


def refusal(arguments: list[str], complete: bool) -> str | None:
    """The reason for which the real parser refuses the arguments of ``paceline``; None if it takes them."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            _parser().parse_args(arguments)
    except SystemExit as end:
        text = " ".join(errors.getvalue().split())
        missing = not complete and re.search(r"required|is given without a value", text)
        return text if end.code and not missing else None
    except (argparse.ArgumentError, ValueError) as error:
        return str(error)
    return None


@functools.cache
def _parser() -> argparse.ArgumentParser:
    return build_parser()


def bad_configurations(page: Page) -> list[str]:
    """YAML blocks that are a service's configuration and are refused, and dotted keys that it does not have."""
    faults = []
    for language, text in page.blocks:
        if language not in ("yaml", "yml"):
            continue
        tree = yaml.safe_load(text)
        if isinstance(tree, dict) and set(tree) & set(ServiceConfig.model_fields):
            try:
                ServiceConfig.parse(tree)
            except ConfigError as error:
                faults.append(str(error))
    for span in page.spans:
        key = span.partition(":")[0].partition("=")[0].strip()
        if re.fullmatch(r"(target_config|draft_config|router_config|server|log)(\.\w+)+", key) and key not in keys():
            faults.append(f"{key}: the configuration has no such key")
    return faults


@functools.cache
def keys() -> frozenset[str]:
    """Every dotted key of the configuration, by the names of the YAML."""

    def below(annotation: Any, prefix: str) -> Iterator[str]:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            for name, field in annotation.model_fields.items():
                key = f"{prefix}{field.alias or name}"
                yield key
                yield from below(field.annotation, f"{key}.")
        else:
            for part in get_args(annotation):
                yield from below(part, prefix)

    return frozenset(below(ServiceConfig, ""))


def bad_python(page: Page) -> list[str]:
    """Python blocks that do not compile."""
    faults = []
    for language, text in page.blocks:
        if language == "python":
            try:
                compile(textwrap.dedent(text), str(page.path), "exec", dont_inherit=True)
            except SyntaxError as error:
                faults.append(str(error))
    return faults


def missing_tests(page: Page) -> list[str]:
    """Tests, ``tests/FILE.py::NAME``, that there are not."""
    named = [match for span in page.spans for match in re.findall(r"\b(tests/[\w/]+\.py)::(\w+)", span)]
    return [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).is_file()
        or not re.search(rf"^def {name}\(", (ROOT / path).read_text("utf-8"), re.MULTILINE)
    ]


def bad_metrics(page: Page) -> list[str]:
    """Metrics in code spans that are not declared."""
    names = {name for span in page.spans for name in re.findall(r"\b(?:vllm:|paceline_)[a-z0-9_]+\w", span)}
    derived = {name + end for name in CATALOGUE for end in ("_sum", "_count", "_bucket")}
    packages = {"paceline_bench"}
    return sorted(
        name
        for name in names - set(CATALOGUE) - derived - packages
        if not any(known.startswith(name) for known in CATALOGUE)
    )


def bad_words(page: Page) -> list[str]:
    """Private words where the field has one of its own."""
    faults = []
    for pattern, better in FORBIDDEN.items():
        for match in re.finditer(rf"\b(?:{pattern})\b", page.prose, re.IGNORECASE):
            faults.append(f"{match[0]}: {better}")
    return faults


CHECKS: list[Callable[[Page], list[str]]] = [
    broken_links,
    missing_files,
    missing_names,
    bad_commands,
    bad_configurations,
    bad_python,
    missing_tests,
    bad_metrics,
    bad_words,
]


@pytest.mark.parametrize("path", _WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_is_true_of_the_tree(path: Path) -> None:
    page = Page.read(path)
    assert {check.__name__: faults for check in CHECKS if (faults := check(page))} == {}


@pytest.mark.parametrize("path", _CARDS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_model_card_is_true_of_the_tree(path: Path) -> None:
    page = Page.read(path)
    checks = [check for check in CHECKS if check is not bad_python]  # it shows what a model writes
    assert {check.__name__: faults for check in checks if (faults := check(page))} == {}


@pytest.mark.parametrize("path", _RECORDED, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_recorded_report_resolve(path: Path) -> None:
    assert broken_links(Page.read(path)) == []


def test_the_readme_is_short_and_shows_every_folder_of_the_package() -> None:
    page = Page.read(ROOT / "README.md")
    assert len(page.text.encode()) <= LARGEST_README
    layout = page.text.partition("## Layout")[2].partition("\n## ")[0]
    folders = {path.name for path in (SERVICES / "paceline").iterdir() if (path / "__init__.py").exists()} - {"v1"}
    assert {name for name in folders if not re.search(rf"\b{name}\b", layout)} == set()


def test_every_difference_to_other_servers_is_held_by_a_test() -> None:
    page = Page.read(ROOT / "docs" / "lossless.md")
    section = page.text.partition("## Where Paceline differs")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    assert [row for row in rows if not re.search(r"`tests/[\w/]+\.py::test_\w+` \|$", row)] == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        path = waiting.pop().resolve()
        if path in reached or path.suffix != ".md":
            continue
        reached.add(path)
        links = _LINK.findall(Page.read(path).unfenced)
        waiting += [path.parent / link.partition("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
    assert [path for path in _WRITTEN if path not in reached] == []


# -- Generated pages ----------------------------------------------------------------------------------------------


def metrics_page() -> str:
    """docs/metrics.md: every declared metric with its unit."""
    lines = [
        "# Metrics",
        "",
        "Written by `python -m tests.test_docs` from the declarations in `metrics/`.",
        "[Operations](operations.md#metrics) describes where they are served.",
    ]
    for title, prefix in (("By the names of vLLM", "vllm:"), ("Paceline's own", "paceline_")):
        lines += ["", f"## {title}", "", "| metric | kind | unit | labels | meaning |", "|---|---|---|---|---|"]
        for metric in CATALOGUE.values():
            if metric.name.startswith(prefix):
                names = (*metric.labels, *dict(metric.constants), *["replica_id"] * metric.per_replica)
                labels = ", ".join(f"`{label}`" for label in names)
                meaning = metric.help.replace("|", "\\|")
                lines.append(f"| `{metric.name}` | {Kind(metric.kind).value} | {metric.unit} | {labels} | {meaning} |")
        if prefix == "vllm:":
            engine = "`engine` is always 0: a service is one engine to its callers; `replica_id` tells targets apart."
            lines += ["", f"{engine} The other names of vLLM 0.33.0:", "", "| not exported | why |", "|---|---|"]
            for why, names in ABSENT.items():
                lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {why} |")
    return "\n".join(lines) + "\n"


def _config(flag: str) -> str:
    """What ``paceline config`` prints with a flag."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["config", flag]) == 0
    return printed.getvalue()


GENERATED = {
    "metrics.md": metrics_page,
    "configuration.md": functools.partial(_config, "--markdown"),
    "configuration.schema.json": functools.partial(_config, "--schema"),
    "methods.md": methods_page,
    "python.md": python_page,
}


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_page_is_fresh(name: str) -> None:
    page = ROOT / "docs" / name
    assert page.read_text(encoding="utf-8") == GENERATED[name](), "run python -m tests.test_docs"


def test_every_type_that_the_reference_names_is_described_there() -> None:
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    described = {name.rpartition(".")[2] for name in re.findall(r"^### `(.+)`$", text, re.MULTILINE)}
    described |= set(re.findall(r"^\| `(\w+Error)` \|", text, re.MULTILINE))
    page = Page.read(ROOT / "docs" / "python.md")
    code = "\n".join([*page.spans, *(block for _, block in page.blocks)])
    ours = defined(SERVICES / "paceline" / "types.py") | defined(SERVICES / "paceline" / "errors" / "__init__.py")
    named = set(re.findall(r"\b[A-Z][a-z]\w+\b", code)) & ours
    others = {"Sequence", "Mapping", "Any", "Literal", "Unpack"}
    assert named - described - others == {"SamplingFields"}, "tests/support/reference.py: SECTIONS"
    assert len(described) > 30


# -- The checks can fail ------------------------------------------------------------------------------------------

BROKEN = {
    broken_links: "[a](docs/nowhere.md) and [b](README.md#no-such-heading) and [c](#nor-this)",
    missing_files: "see `target/budget.py`, `docs/old/` and `nowhere.py`",
    missing_names: "`paceline.estimate`, `paceline.config.NoConfig`\n"
    "```python\nfrom paceline.types import Nothing\n```",
    bad_commands: "```\n.venv/bin/paceline generate --no-such-flag x | tail -2\nmake nothing\n"
    "python benchmarks/nowhere.py\npython benchmarks/soak.py --hours 2\npaceline bench report\n```\n`paceline serv`",
    bad_configurations: "```yaml\ntarget_config: {engine_kwarg: {}}\n```\n`router_config.timeout_s`",
    bad_python: "```python\nfor x in:\n    pass\n```",
    missing_tests: "`tests/test_docs.py::test_nothing` and `tests/nowhere.py::test_a_page_is_true_of_the_tree`",
    bad_metrics: "`paceline_nothing_total` and `vllm:nothing`",
    bad_words: "A dear draft is homeless; tokens are tokenised anew, nobody shall wait, and it was foreseen.",
}
NUM_FAULTS = {
    broken_links: 3,
    missing_files: 3,
    missing_names: 3,
    bad_commands: 6,
    bad_configurations: 2,
    bad_python: 1,
    missing_tests: 2,
    bad_metrics: 2,
    bad_words: 7,
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_broken_page_is_noticed(check: Callable[[Page], list[str]]) -> None:
    faults = check(Page(ROOT / "page.md", BROKEN[check]))
    assert len(faults) == NUM_FAULTS[check], faults


def test_what_is_right_is_no_fault() -> None:
    page = Page(
        ROOT / "page.md",
        "[a](docs/families.md#refused) `core/verification.py` `paceline.config.ServiceConfig` `make check` "
        "`paceline plan` `paceline status [--json]` `router_config.draft_timeout_s` `paceline_rounds_total` "
        "`paceline.v1.GenerationService` `anew`\n```\nRAY=1 paceline check --set a=b  # a comment\n```\n",
    )
    assert {check.__name__: faults for check in CHECKS if (faults := check(page))} == {}


def write() -> None:
    """Writes the generated pages."""
    for name, page in GENERATED.items():
        (ROOT / "docs" / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write()
