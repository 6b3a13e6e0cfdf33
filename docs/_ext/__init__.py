"""The Sphinx extension of the site: its contents, and the pages that are made of the program."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexers.shell import BashSessionLexer
from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

from docs._ext import api, contents, entries, generated, in_browser, links, sections, themes
from meshdsl.lexer import MdslLexer
from meshdsl.version import __version__

_ENTRY = '<!doctype html><meta charset="utf-8"><title>meshdsl</title>' + (
    '<meta http-equiv="refresh" content="0; url={to}"><a href="{to}">meshdsl</a>\n'
)


def setup(app: Sphinx) -> ExtensionMetadata:
    """Connect the extension."""
    app.add_lexer("mdsl", MdslLexer)
    app.add_lexer("shellsession", BashSessionLexer)
    app.connect("builder-inited", entries.write)
    app.connect("builder-inited", themes.write)
    app.connect("source-read", _read)
    app.connect("doctree-read", api.unlinked)
    app.connect("doctree-read", links.linked)
    app.connect("doctree-read", in_browser.linked)
    app.connect("missing-reference", api.resolved)
    app.connect("html-page-context", partial(entries.share_sidebar, {}), priority=400)
    app.connect("html-page-context", themes.themed)
    app.connect("html-page-context", _follow)
    app.connect("build-finished", _enter)
    return {"version": __version__, "parallel_read_safe": True, "parallel_write_safe": True}


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    """The text of a page as the site has it."""
    if not str(app.env.doc2path(page)).endswith(".md"):
        return
    text = sections.text_of(page) or generated.filled(source[0])
    source[0] = contents.listed(app.env, page, contents.to_pages(app.env, page, text))


def _follow(
    app: Sphinx,
    page: str,
    template: str,
    context: dict[str, Any],
    tree: nodes.document | None,
) -> None:
    """Give a page the scripts that it needs.

    An index of entries leads from the places that were in it to the entries. Programs are edited
    where they are.
    """
    if page in entries.FOLDERS or page in sections.LONG:
        app.add_js_file("entries.js", loading_method="defer")
    if tree is not None and in_browser.is_linked(tree):
        app.add_js_file("edit_here.js", loading_method="defer")


def _enter(app: Sphinx, error: Exception | None) -> None:
    """Lead from `index.html`, which servers look for, to the first page."""
    if error is None and app.builder.format == "html":
        to = app.builder.get_target_uri(app.config.root_doc)
        (Path(app.outdir) / "index.html").write_text(_ENTRY.format(to=to), encoding="utf-8")
