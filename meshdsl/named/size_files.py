"""Files of sizes: `.mdsl` files of nothing but dims, whose sizes `--set` gives to a program."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from meshdsl.diagnostics import Diagnostics, Span, fail
from meshdsl.named.declarations import declare
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.parse import parse, read_source

SUFFIX = ".mdsl"
"""How the name of such a file ends; a size does not end so."""


@dataclass(frozen=True, slots=True)
class SetSizes:
    """Sizes by dim, and where each is written in a file."""

    sizes: Mapping[str, int]
    places: Mapping[str, Span]


def read_size_file(path: str | Path) -> SetSizes:
    """The sizes that a file declares. Raises DiagnosticError, MD0601 where it has more than dims.

    Sizes may be computed from others of the same file.
    """
    source = read_source(path)
    tree, problems = parse(source)
    diagnostics = Diagnostics()
    diagnostics.add(*problems)
    diagnostics.raise_errors()
    for node in tree.declarations:
        if not isinstance(node, ast.DimDecl):
            message = "a file of sizes may contain only `dim` declarations"
            help = (
                "remove the others, or name another file: `--set sizes.mdsl`; "
                "the files of the command stand before `--set`"
            )
            fail("MD0601", message, node.span, help=help)
    declared = declare(tree, diagnostics)
    diagnostics.raise_errors()
    if not declared.dims:
        fail("MD0601", f"`{source.name}` has no dims", help="declare some: `dim batch = 64`")
    return SetSizes(declared.sizes, declared.dim_spans)
