"""The library functions that are written in the language itself (`meshdsl/prelude/*.mdsl`)."""

from __future__ import annotations

import functools
from importlib import resources

from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.named.declarations import Declarations, declare
from meshdsl.syntax.parse import parse


@functools.cache
def prelude() -> Declarations:
    """Every `def` of the prelude. An error in it is ours, and raised as such."""
    folder = resources.files("meshdsl.prelude")
    names = sorted(f.name for f in folder.iterdir() if f.name.endswith(".mdsl"))
    text = "\n".join(folder.joinpath(n).read_text(encoding="utf-8") for n in names)
    diagnostics = Diagnostics()
    tree, problems = parse(Source("<prelude>", text))
    diagnostics.add(*problems)
    declarations = declare(tree, diagnostics)
    if diagnostics.errors:
        raise AssertionError("the prelude is wrong") from DiagnosticError(*diagnostics.errors)
    return declarations
