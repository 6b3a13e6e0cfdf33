"""Pages that are no files: of operators, of diagnostics (`docs/codes/MD0301.md`), of long pages.

Such a file has one line, which is filled like that of any other page. It is written before Sphinx
looks for pages, and git ignores it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from docs._ext import operators, sections
from meshdsl.codes import CODES

FOLDERS: Mapping[str, tuple[str, Callable[[], Collection[str]]]] = {
    "docs/operators": ("operator", operators.names),
    "docs/codes": ("code", CODES.keys),
}
"""By folder, what makes a page and the names of the pages. The index is the page beside it."""

_PAGE = "---\norphan: true\n---\n\n<!-- made: {maker} {name} -->\n"


def write(app: Sphinx) -> None:
    """Write the pages that are not there, and remove those of names that are gone."""
    for folder, (maker, names) in FOLDERS.items():
        texts = {f"{name}.md": _PAGE.format(maker=maker, name=name) for name in names()}
        _write(Path(app.srcdir) / folder, texts)
    for page in sections.LONG:
        below = (part.removeprefix(f"{page}/") for part in sections.parts(page) if part != page)
        _write(Path(app.srcdir) / page, {f"{name}.md": f"A part of {page}.\n" for name in below})


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    """Make these the pages of a folder."""
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.md"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def led(page: str, anchor: str) -> str | None:
    """Where a place of an index or a long page is: `docs/operators/softmax.md` for `softmax`."""
    if page in sections.LONG:
        part = sections.anchors(page).get(anchor)
        return f"{part}.md#{anchor}" if part else None
    if page not in FOLDERS:
        return None
    names = FOLDERS[page][1]()
    alike = (n for n in names if n.lower().replace("_", "-") == anchor.lower().replace("_", "-"))
    name = next(alike, None)
    return name and f"{page}/{name}.md"


def share_sidebar(
    shared: dict[str, Any],
    app: Sphinx,
    page: str,
    template: str,
    context: dict[str, Any],
    tree: object,
) -> None:
    """Give all pages of a folder the sidebar of its first: it has none of them, and takes time."""
    folder = page.rpartition("/")[0]
    if folder in FOLDERS and "toctree" in context:
        context["toctree"] = shared.setdefault(folder, cache(context["toctree"]))
