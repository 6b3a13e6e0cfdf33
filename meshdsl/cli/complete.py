"""Completion in the shell: the names that an option can take, read from the file on the line.

Each function takes what typer passes and returns the names that continue the word under the
cursor. A file that is broken completes what can be read of it, one that is not there nothing.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer

from meshdsl.diagnostics import DiagnosticError, Source, Span
from meshdsl.syntax import ast

Complete = Callable[[typer.Context, str], list[str]]
Named = ast.NamedDeclaration
NAMES_TENSORS = (ast.TensorParam, ast.Target)
NOTHING = ast.SourceFile((), Span(Source("", ""), 0, 0))


def declared(kind: type[Named], many: bool = False) -> Complete:
    """Completes the names of declarations of a kind.

    With `many`, the last of several that are separated by commas.
    """

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        return _continued(_names(ctx, kind), incomplete, many)

    return complete


def policies(many: bool = False) -> Complete:
    """Completes policies of reduction."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        from meshdsl.placed.place import POLICIES

        return _continued(POLICIES, incomplete, many)

    return complete


def floats(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes types of float."""
    from meshdsl.ir.types import DTYPES

    return _continued((n for n, d in DTYPES.items() if d.kind == "float"), incomplete)


def sizes(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes `dim=` for every dim of the file."""
    return _continued((f"{name}=" for name in _names(ctx, ast.DimDecl)), incomplete)


def tensors(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes names of inputs, parameters and assigned tensors."""
    found = (node for node in ast.walk(_tree(ctx)) if isinstance(node, NAMES_TENSORS))
    return _continued(dict.fromkeys(node.name.text for node in found), incomplete)


def codes(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes codes of diagnostics; the shell completes files."""
    from meshdsl.codes import CODES

    return _continued(CODES, incomplete.upper()) if incomplete else []


def clusters(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes names of clusters that are built in."""
    from meshdsl.cluster.profile import names

    return _continued(names(), incomplete)


def objectives(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes what a plan may minimise."""
    from meshdsl.pipeline import OBJECTIVES

    return _continued(OBJECTIVES, incomplete)


def schedules(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes names of pipeline schedules; the shell completes files."""
    from meshdsl.schedule.registry import schedules as known

    return _continued(known(), incomplete)


def schedules_of(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes pipeline schedules: those of the file, and those that there are by name."""
    from meshdsl.schedule.registry import schedules as known

    return _continued([*_names(ctx, ast.ScheduleDecl), *known()], incomplete)


def operators(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes names of operators."""
    from meshdsl.ops.opdef import load_all

    return _continued(sorted(load_all()), incomplete)


def packages(ctx: typer.Context, incomplete: str) -> list[str]:
    """Completes names of installed packages of operators."""
    from meshdsl.named.packages import names

    return _continued(names(), incomplete)


def _continued(names: Iterable[str], incomplete: str, many: bool = False) -> list[str]:
    before, comma, last = incomplete.rpartition(",") if many else ("", "", incomplete)
    return [f"{before}{comma}{name}" for name in names if name.startswith(last)]


def _names(ctx: typer.Context, kind: type[Named]) -> list[str]:
    """The names of declarations of a kind, in order."""
    return [d.name.text for d in _tree(ctx).declarations if isinstance(d, kind)]


def _tree(ctx: typer.Context) -> ast.SourceFile:
    """The tree of the file; what cannot be read of it is left out."""
    from meshdsl.syntax.parse import parse, read_source

    path = _file(ctx)
    try:
        return parse(read_source(path))[0] if path else NOTHING
    except DiagnosticError:
        return NOTHING


def _file(ctx: typer.Context) -> Path | None:
    """The file of the command: one before the cursor, else the first on the line."""
    argument: Any = ctx.params.get("file") or next(iter(ctx.params.get("files") or ()), None)
    words = [str(argument)] if argument else _line()
    paths = (Path(word) for word in words if word.endswith(".mdsl"))
    return next((path for path in paths if os.path.isfile(path)), None)


def _line() -> list[str]:
    """The words of the whole line, as far as the shell tells them."""
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    try:
        return shlex.split(line)
    except ValueError:
        return []
