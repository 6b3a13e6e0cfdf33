"""Where spans are for an editor: in the document, or in a file of the prelude."""

from __future__ import annotations

from pathlib import Path

from lsprotocol import types as lsp

from meshdsl.diagnostics import Span
from meshdsl.editor.text import Text
from meshdsl.named.prelude import in_file, prelude


def location(span: Span, uri: str, text: Text) -> lsp.Location | None:
    """The location of a span in the document `uri`, or in the prelude; None for anything else."""
    if text.owns(span):
        return lsp.Location(uri, text.range(span))
    if span.source is not prelude().source:
        return None
    span_ = in_file(span)
    range = Text(span_.source, text.encoding).range(span_)
    return lsp.Location(Path(span_.source.name).as_uri(), range)
