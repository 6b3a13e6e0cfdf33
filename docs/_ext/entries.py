"""A page of its own for each operator and each diagnostic: `docs/operators/softmax.md`.

Such a file has one line, which is filled like that of any other page. It is written before Sphinx
looks for pages, and git ignores it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from sphinx.application import Sphinx

from docs._ext import operators
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
        at = Path(app.srcdir) / folder
        at.mkdir(exist_ok=True)
        texts = {f"{name}.md": _PAGE.format(maker=maker, name=name) for name in names()}
        for path in at.glob("*.md"):
            if path.name not in texts:
                path.unlink()
        for name, text in texts.items():
            path = at / name
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")


def led(page: str, anchor: str) -> str | None:
    """The page of an entry, `docs/operators/softmax` of the index and `softmax`."""
    if page not in FOLDERS:
        return None
    names = FOLDERS[page][1]()
    alike = (n for n in names if n.lower().replace("_", "-") == anchor.lower().replace("_", "-"))
    name = next(alike, None)
    return name and f"{page}/{name}"
