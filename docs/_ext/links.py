"""Codes of diagnostics lead to their entries, wherever a page writes `MD0301`."""

from __future__ import annotations

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

from meshdsl.codes import CODES


def linked(app: Sphinx, tree: nodes.document) -> None:
    """Make every code that stands by itself, and is in no link or heading yet, a link."""
    page = app.env.current_document.docname
    for literal in list(tree.findall(nodes.literal)):
        code = literal.astext()
        inside = isinstance(literal.parent, nodes.reference | nodes.title | pending_xref)
        if code in CODES and not inside and not page.endswith(f"/{code}"):
            target = pending_xref(
                "",
                literal.deepcopy(),
                refdomain="std",
                reftype="ref",
                reftarget=code.lower(),
                refexplicit=True,
                refdoc=page,
                refwarn=True,
            )
            literal.replace_self(target)
