"""Below each whole program of the pages, a link that opens it in the browser (docs/browser.md)."""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx

from docs._ext.codes import WRONG
from docs.browser.build import missing
from meshdsl.analysis import analyse
from meshdsl.diagnostics import Source
from meshdsl.named.declarations import Declarations
from meshdsl.pipeline import Options
from meshdsl.play.page import fragment

CLASS = "in-browser"
"""The class of the line below a program; `edit_here.js` adds a button there."""


def linked(app: Sphinx, tree: nodes.document) -> None:
    """Add the links, unless the page that they lead to cannot be built here."""
    if app.builder.format != "html" or missing():
        return
    to = app.builder.get_relative_uri(app.env.current_document.docname, "play")
    for block in list(tree.findall(nodes.literal_block)):
        text = text_of(block)
        declarations = program_of(text) if text else None
        if declarations is not None:
            address = f"{to}{fragment(text, only_sbp(declarations))}"
            link = nodes.reference("", "open in the browser", refuri=address)
            below = nodes.paragraph("", "", link, classes=[CLASS])
            is_cell = "cell_input" in block.parent.get("classes", ())
            place = block.parent if is_cell else block
            place.parent.insert(place.parent.index(place) + 1, below)


def is_linked(tree: nodes.document) -> bool:
    """Whether a page has a program with such a link."""
    return any(CLASS in below["classes"] for below in tree.findall(nodes.paragraph))


def text_of(block: nodes.literal_block) -> str:
    """The text in the language that a block, or a cell of a notebook, has.

    Empty if there is none, or if its maker knows that it has an error.
    """
    text = str(block.astext())
    if WRONG in block["classes"]:
        return ""
    if block.get("language") == "mdsl":
        return text
    magic, _, cell = text.partition("\n")
    return cell if magic.split()[:1] == ["%%mdsl"] else ""


def program_of(text: str) -> Declarations | None:
    """What a text declares, if it is a program of its own, without an error."""
    analysis = analyse(Source("", text), Options())
    errors = (d for d in analysis.diagnostics if d.severity == "error")
    is_program = bool(analysis.declarations.programs) and next(errors, None) is None
    return analysis.declarations if is_program else None


def only_sbp(declarations: Declarations) -> str | None:
    """The `sbp` block by which a text without layouts is to be placed, if it has one."""
    return None if declarations.layouts else next(iter(declarations.sbps), None)
