"""The site: it builds from the files of the project without a warning, and every link leads on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import meshdsl as md
from docs._ext.generated import filled
from docs._ext.sections import LONG, height, parts
from meshdsl.api.signatures import RATES, names
from meshdsl.codes import CODES
from meshdsl.named.from_syntax import INITS
from meshdsl.named.prelude import library
from meshdsl.ops.opdef import load_all
from meshdsl.report.palette import DARK
from tests.once import made_once
from tests.project import ROOT, copy_tree, tracked

SOURCES = {".md", ".ipynb"}
FOLDERS = {"docs", "editors", "examples", "grammar"}
BUILD = """
import sys
sys.modules["torch"] = None  # building looks at programs and runs none
import gc
gc.set_threshold(500_000)
import json
from pathlib import Path
from docs._ext import contents
from sphinx.cmd.build import main

*arguments, kept = sys.argv[1:]
texts, to_pages = {}, contents.to_pages

def keep(env, page, text):
    texts[page] = text
    return to_pages(env, page, text)

contents.to_pages = keep
code = main(arguments)
Path(kept).write_text(json.dumps(texts), "utf-8")
sys.exit(code)
"""
"""Builds the site, and keeps the Markdown of each page: the parts that are made take seconds."""

TEXTS = "texts.json"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from a copy of what git tracks: once for all workers."""
    return made_once(tmp_path_factory, "site", _build) / "build" / "site"


def _build(clone: Path) -> None:
    copy_tree(clone)
    options = ["-q", "-n", "-W", "--keep-going", "-c", "docs", "-d", "build/pages"]
    done = subprocess.run(
        [sys.executable, "-c", BUILD, *options, ".", "build/site", f"build/{TEXTS}"],
        cwd=clone,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "", "MESHDSL_CACHE": os.environ["MESHDSL_CACHE"]},
    )
    assert (done.returncode, done.stderr) == (0, "")


@dataclass
class Page(HTMLParser):
    """What a page of the site has: places to lead to, and where it leads."""

    ids: set[str] = field(default_factory=set)
    links: set[str] = field(default_factory=set)
    loads: set[str] = field(default_factory=set)
    unsaid: list[str] = field(default_factory=list)
    colours: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self._drawn = False

    def handle_endtag(self, tag: str) -> None:
        self._drawn = self._drawn and tag != "svg"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        drawn = tag == "svg" and given.get("class") == "picture"
        if (tag == "img" and not given.get("alt")) or (drawn and not given.get("aria-label")):
            self.unsaid.append(str(given.get("src", tag))[:80])
        self._drawn = drawn or (self._drawn and tag != "svg")
        if self._drawn:
            self.colours |= {str(given[key]) for key in ("fill", "stroke") if key in given}
        self.ids |= {given[key] or "" for key in ("id", "name") if key in given}
        for key, found in (("href", self.links if tag == "a" else self.loads), ("src", self.loads)):
            if given.get(key):
                found.add(str(given[key]))


_SIDEBAR = re.compile(r'<aside class="sidebar-drawer">.*?</aside>', re.DOTALL)
_SIDEBARS: set[tuple[Path, str]] = set()
"""The sidebars that were read, with their folders: their links are relative."""


@cache
def read(path: Path) -> Page:
    """A page. A sidebar that another page of its folder has, too, is read once."""
    text = path.read_text(encoding="utf-8")
    sidebar = _SIDEBAR.search(text)
    if sidebar:
        if (path.parent, sidebar[0]) in _SIDEBARS:
            text = text.replace(sidebar[0], "")
        _SIDEBARS.add((path.parent, sidebar[0]))
    page = Page()
    page.feed(text)
    return page


def pages(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


def test_every_page_of_the_project_is_there(site: Path) -> None:
    wanted = [
        path
        for path in tracked()
        if path.suffix in SOURCES and (path.parts[0] in FOLDERS or len(path.parts) == 1)
    ]
    assert len(wanted) > 20
    assert [p for p in wanted if not (site / p).with_suffix(".html").is_file()] == []


def test_every_link_and_anchor_leads_somewhere(site: Path) -> None:
    broken = []
    for path in pages(site):
        page = read(path)
        for link in page.links | page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchored = parts.fragment and target.suffix == ".html" and target.is_file()
            if not target.exists() or (
                anchored and unquote(parts.fragment) not in read(target).ids
            ):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


def test_it_loads_nothing_from_elsewhere(site: Path) -> None:
    outside = {link for path in pages(site) for link in read(path).loads if "//" in link[:8]}
    assert outside == set()


def test_the_search_weighs_pages_that_are_there(site: Path) -> None:
    scorer = (site / "_static/scorer.js").read_text(encoding="utf-8")
    weighed = re.findall(r'^    "?([\w/]+)"?: [\d.]+,$', scorer, re.MULTILINE)
    names = [path.relative_to(site).as_posix() for path in pages(site)]
    assert len(weighed) > 5
    assert [w for w in weighed if not any(name.startswith(w) for name in names)] == []
    loaded = (site / "_static/language_data.js").read_text(encoding="utf-8")
    assert scorer in loaded, "Sphinx has its own order"


def test_every_picture_is_described(site: Path) -> None:
    assert {p.name: read(p).unsaid for p in pages(site) if read(p).unsaid} == {}


def test_pictures_have_dark_colours_on_dark_pages(site: Path) -> None:
    used = set().union(*(read(path).colours for path in pages(site)))
    style = (site / "_static/pictures.css").read_text(encoding="utf-8")
    known = {m[1].lower() for m in re.finditer(r"\[(?:fill|stroke)=\"(#\w+)\"\]", style)}
    assert known == set(DARK)
    assert len(used & known) > 8
    assert {c for c in used if c.startswith("#")} - known == set()
    home = (site / "docs/README.html").read_text(encoding="utf-8")
    assert home.count('class="only-dark"') == home.count('class="only-light"') == 1


def test_no_page_is_too_long_to_scroll_through(site: Path) -> None:
    """About 12,000 pixels in a window of 1,280; `height` is up to a tenth more."""
    heights = {path: height(text) for path, text in texts(site).items()}
    assert len(heights) > 400
    assert {path: n for path, n in heights.items() if n > 13_500} == {}


def texts(site: Path) -> dict[str, str]:
    """The Markdown of every page, as the site has it."""
    kept = json.loads((site.parent / TEXTS).read_text(encoding="utf-8"))
    return {name: text for name, text in kept.items() if (site / f"{name}.html").exists()}


# --- what is generated ---------------------------------------------------------------------------


def test_every_operator_code_and_public_name_has_its_entry(site: Path) -> None:
    api = set().union(*(read(path).ids for path in (site / "docs/api").iterdir()))
    assert {f"meshdsl.{name}" for name in md.__all__} <= api
    written = {*load_all(), *library()}
    for folder, of_registry in (("operators", written), ("codes", set(CODES))):
        index = read(site / f"docs/{folder}.html")
        assert {p.stem for p in (site / "docs" / folder).iterdir()} == of_registry
        assert {f"{folder}/{name}.html" for name in of_registry} <= index.links
        # What led into the page that had all of them leads to the line of the index.
        assert {name.lower().replace("_", "-") for name in of_registry} <= index.ids
    pages_of = (read(site / f"docs/operators/{name}.html").ids for name in written)
    known = api.union(*pages_of)
    assert {f"meshdsl.{name}" for name in (*names(), *INITS, *RATES)} <= known


def test_a_long_page_is_all_there_in_its_parts(site: Path) -> None:
    for page in LONG:
        index = read(site / f"{page}.html")
        below = [name for name in parts(page) if name != page]
        assert {p.stem for p in (site / page).iterdir()} == {
            name.rpartition("/")[2] for name in below
        }
        assert index.ids & {name.rpartition("/")[2] for name in below}
        whole = filled((ROOT / f"{page}.md").read_text(encoding="utf-8"))
        found = "\n".join(text for text, _ in parts(page).values())
        assert lines_without_headings(found) == lines_without_headings(whole)


def lines_without_headings(text: str) -> list[str]:
    return [line for line in text.split("\n") if line and not line.startswith("#")]
