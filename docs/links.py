"""Hooks of mkdocs: the README is the first page, and links that leave docs/ are followed, so that no page of the
repository has to be written twice. A linked Markdown page becomes a page, any other linked file a file below
``repository/``; a linked folder without a README becomes plain text. Headings have the anchors that GitHub gives them.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

DOCS = Path(__file__).parent
ROOT = DOCS.parent
_FENCES = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Sets the form of anchors."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def slug(heading: str, separator: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_files(files: Files, config: Any) -> Files:
    """Adds the README and everything outside docs/ that a page leads to."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=readme))
    waiting, seen = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], {ROOT / "README.md"}
    while waiting:
        source = waiting.pop()
        for place in (match[3] for match in _LINK.finditer(_FENCES.sub("", source.read_text(encoding="utf-8")))):
            target = _target(source, place)
            if target is None or target in seen or target.is_relative_to(DOCS) or not target.is_file():
                continue
            seen.add(target)
            kind = InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, _uri(target), content=target.read_bytes(), inclusion=kind))
            if target.suffix == ".md":
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites the links of a page to where their targets are on the site."""
    uri = page.file.src_uri
    if uri == "index.md":
        source = ROOT / "README.md"
    elif uri.startswith("repository/"):
        source = ROOT / uri.removeprefix("repository/")
    else:
        source = DOCS / uri

    def moved(match: re.Match[str]) -> str:
        mark, text, place, anchor = match[1], match[2], match[3], match[4] or ""
        target = _target(source, place)
        if target is None:
            return match[0]
        if target.is_dir():
            return text
        return f"{mark}[{text}]({posixpath.relpath(_uri(target), posixpath.dirname(uri) or '.')}{anchor})"

    parts = _FENCES.split(markdown)
    return "".join(part if i % 2 else _LINK.sub(moved, part) for i, part in enumerate(parts))


def _target(source: Path, place: str) -> Path | None:
    """The file or folder that a relative link names; a folder's README if it has one. None: an address elsewhere."""
    if re.match(r"[a-z]+:", place):
        return None
    found = (source.parent / place).resolve()
    return found / "README.md" if (found / "README.md").is_file() else found


def _uri(target: Path) -> str:
    """The place of a file on the site, before Markdown becomes HTML."""
    if target == ROOT / "README.md":
        return "index.md"
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    return f"repository/{target.relative_to(ROOT).as_posix()}"
