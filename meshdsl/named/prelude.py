"""The library functions that are written in the language itself (`meshdsl/prelude/*.mdsl`)."""

from __future__ import annotations

import functools
from importlib import resources

from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source, Span
from meshdsl.named.declarations import Declarations, declare
from meshdsl.syntax.parse import parse


@functools.cache
def files() -> tuple[Source, ...]:
    """The files of the prelude, named by their paths, in order."""
    folder = resources.files("meshdsl.prelude")
    paths = sorted((f for f in folder.iterdir() if f.name.endswith(".mdsl")), key=lambda f: f.name)
    return tuple(Source(str(path), path.read_text(encoding="utf-8")) for path in paths)


def in_file(span: Span) -> Span:
    """A span of the prelude, in the file that it comes from."""
    start = 0
    for part in files():
        if span.start <= start + len(part.text):
            break
        start += len(part.text) + 1
    return Span(part, span.start - start, span.end - start)


@functools.cache
def prelude() -> Declarations:
    """Every `def` of the prelude. An error in it is ours, and raised as such."""
    text = "\n".join(part.text for part in files())
    diagnostics = Diagnostics()
    tree, problems = parse(Source("<prelude>", text))
    diagnostics.add(*problems)
    declarations = declare(tree, diagnostics)
    if diagnostics.errors:
        raise AssertionError("the prelude is wrong") from DiagnosticError(*diagnostics.errors)
    return declarations
