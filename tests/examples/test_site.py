"""The documentation as a site: built without a warning, every page in its navigation, every link and anchor there."""

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

ROOT = Path(__file__).parents[2]


class Links(HTMLParser):
    """What a page links to, and what can be linked to in it."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        self.links += [values[name] for name in ("href", "src") if values.get(name)]


def broken(site, pages):
    """Links of pages to files or anchors that the site does not have."""
    read = {page: Links(page.read_text(encoding="utf-8")) for page in site.rglob("*.html")}
    faults = []
    for page in pages:
        for link in read[page].links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            known = read[target].anchors if target in read else set()
            if not target.is_file() or (parts.fragment and target in read and unquote(parts.fragment) not in known):
                faults.append(f"{page.name}: {link}")
    return faults


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site").resolve()
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_on_the_site_and_in_its_navigation(site):
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {
        page for page in pages if not (site / page.replace("README.md", "index.md")).with_suffix(".html").is_file()
    } == set()
    listed = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]

    def files(entries):
        for entry in entries:
            (value,) = entry.values()
            yield from files(value) if isinstance(value, list) else (value,)

    named = list(files(listed))
    assert sorted(named) == sorted({*pages, "index.md"})


def test_links_of_our_pages_lead_somewhere(site):
    pages = [page for page in site.rglob("*.html") if page.name != "404.html" and "results" not in page.parts]
    assert len(pages) > 40
    assert broken(site, pages) == []
    assert "repository/examples/local.py" in (site / "quickstart.html").read_text(encoding="utf-8")


def test_a_broken_link_is_noticed(tmp_path):
    page, other = tmp_path / "a.html", tmp_path / "b.html"
    page.write_text('<a href="b.html#here">x</a> <a href="b.html#gone">x</a> <img src="c.svg"> <a href="https://d.e">')
    other.write_text('<h1 id="here">x</h1>')
    assert broken(tmp_path, [page]) == ["a.html: b.html#gone", "a.html: c.svg"]


def test_nothing_is_loaded_from_elsewhere(site):
    text = (site / "index.html").read_text(encoding="utf-8")
    loaded = [link for link in Links(text).links if link.startswith("http") and link.endswith((".js", ".css"))]
    assert loaded == []
