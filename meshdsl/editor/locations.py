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
    file_span = in_file(span)
    range = Text(file_span.source, text.encoding).range(file_span)
    return lsp.Location(Path(file_span.source.name).as_uri(), range)
