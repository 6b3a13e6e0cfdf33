"""The library functions that are written in the language itself (`meshdsl/prelude/*.mdsl`).

One that is called like an operator is its definition (`ops/normalise.py`); any other is a `def`
that every program may call. The comment above a function is its documentation.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping
from dataclasses import replace

from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source, Span
from meshdsl.named.declarations import Declarations, declare
from meshdsl.named.prelude_files import files, function_names
from meshdsl.ops.opdef import load_all
from meshdsl.syntax import ast
from meshdsl.syntax.parse import parse

LIBRARY = "<prelude>"
"""The name of the source of library functions."""


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
    tree, problems = parse(Source(LIBRARY, text))
    diagnostics.add(*problems)
    declarations = declare(tree, diagnostics)
    if diagnostics.errors:
        raise AssertionError("the prelude is wrong") from DiagnosticError(*diagnostics.errors)
    return replace(declarations, is_library=True)


def definition(name: str) -> ast.FunctionDecl | None:
    """The `def` of the prelude of a name; nothing of the prelude is parsed where there is none."""
    return prelude().functions[name] if name in function_names() else None


@functools.cache
def library() -> Mapping[str, ast.FunctionDecl]:
    """The functions that programs call and that no operator is called like, by name, sorted."""
    known = prelude().functions
    return {name: known[name] for name in sorted(set(known) - set(load_all()))}


NUMBERS = {
    ("sample", "temperature"): (0, math.inf),
    ("batch_norm", "eps"): (0, sys.float_info.max),
    ("group_norm", "eps"): (0, sys.float_info.max),
}
"""The least and the greatest number that a parameter of a library function takes.

Other parameters take all. Those of operators are checked where their options are bound.
"""


def form(function: ast.FunctionDecl) -> str:
    """How a function is called: `top2_gating[token, experts, slot](logits, noise)`."""
    dims = f"[{', '.join(d.text for d in function.dims)}]" if function.dims else ""
    return f"{function.name.text}{dims}({', '.join(p.name.text for p in function.params)})"


def meaning(function: ast.FunctionDecl) -> str:
    """What a function of the prelude is, in Markdown: the comment above it, on one line."""
    above = function.span.source.text[: function.span.start].splitlines()
    lines: list[str] = []
    while above and above[-1].startswith("# "):
        lines.insert(0, above.pop()[2:])
    return " ".join(lines)
