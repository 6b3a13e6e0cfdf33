"""Below each whole program of the pages, a link that opens it in the browser (docs/browser.md)."""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx

from docs.browser.build import missing
from meshdsl.analysis import analyse
from meshdsl.diagnostics import Source
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
        if text and is_program(text):
            address = f"{to}{fragment(text)}"
            link = nodes.reference("", "open in the browser", refuri=address)
            below = nodes.paragraph("", "", link, classes=[CLASS])
            is_cell = "cell_input" in block.parent.get("classes", ())
            place = block.parent if is_cell else block
            place.parent.insert(place.parent.index(place) + 1, below)


def text_of(block: nodes.literal_block) -> str:
    """The text in the language that a block, or a cell of a notebook, has; empty without one."""
    text = str(block.astext())
    if block.get("language") == "mdsl":
        return text
    magic, _, cell = text.partition("\n")
    return cell if magic.split()[:1] == ["%%mdsl"] else ""


def is_program(text: str) -> bool:
    """Whether a text is a program of its own, without an error."""
    analysis = analyse(Source("", text), Options())
    errors = (d for d in analysis.diagnostics if d.severity == "error")
    return bool(analysis.declarations.programs) and next(errors, None) is None
