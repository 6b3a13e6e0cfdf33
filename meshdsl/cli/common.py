"""What commands share: options, reading a file, and how diagnostics leave the house."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from meshdsl.diagnostics import (
    MAX_ERRORS,
    Diagnostic,
    DiagnosticError,
    Diagnostics,
    counted,
    did_you_mean,
    fail,
)
from meshdsl.ir.types import DTYPES
from meshdsl.pipeline import DEFAULT_POLICY, Compilation, Options, compile_source
from meshdsl.placed.reshard import MESSAGE_BYTES

File = Annotated[Path, typer.Argument(metavar="FILE", help="A .mdsl file.", show_default=False)]
Program = Annotated[
    str | None, typer.Option("--program", metavar="P", help="Which program (the only one).")
]
Mesh = Annotated[
    str | None,
    typer.Option("--mesh", metavar="M", help='A mesh by name, or "data:2,model:4" (the first).'),
]
Layout = Annotated[
    str | None,
    typer.Option(
        "--layout", metavar="L", help='A layout by name, or "batch:data,hidden:model" (the first).'
    ),
]
Sbp = Annotated[
    str | None,
    typer.Option("--sbp", metavar="S", help="An sbp block by name, instead of a layout."),
]
Reduce = Annotated[
    str,
    typer.Option(
        "--reduce", metavar="R", help="Partial values: immediate, mesh-tf, deferred or optimal."
    ),
]
MessageBytes = Annotated[
    int,
    typer.Option(
        "--message-bytes",
        metavar="N",
        min=0,
        help="What a collective counts beside its bytes under `optimal`; 0: only bytes count.",
    ),
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Keep and use no plans of before.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="DIM=N …", help="Other sizes for dims.", show_default=False),
]
DType = Annotated[str | None, typer.Option("--dtype", metavar="T", help="Another type of float.")]
Strict = Annotated[bool, typer.Option("--strict", help="Warnings are errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files.")]

POLICY = DEFAULT_POLICY
MESSAGE = MESSAGE_BYTES
COMMAND_CODES = ("MD0010", "MD05", "MD06")
RUN_CODES = ("MD07", "MD08")
REFUSED_CODES = ("MD0703", "MD0704", "MD0909")


def options(
    program: str | None,
    mesh: str | None,
    layout: str | None,
    sbp: str | None,
    reduce: str,
    settings: list[str] | None,
    dtype: str | None,
    strict: bool,
    message_bytes: int = MESSAGE_BYTES,
    no_cache: bool = False,
) -> Options:
    """The options of a command as the pipeline takes them. Raises MD06xx."""
    if dtype is not None and (dtype not in DTYPES or DTYPES[dtype].kind != "float"):
        floats = [n for n, d in DTYPES.items() if d.kind == "float"]
        help = did_you_mean(dtype, floats) or f"there are {', '.join(floats)}"
        fail("MD0602", f"`--dtype {dtype}`: no float type is called so", help=help)
    if layout is not None and sbp is not None:
        fail("MD0601", "`--layout` and `--sbp` are both given", help="choose one of them")
    return Options(
        program=program,
        mesh=mesh,
        layout=layout,
        sbp=sbp,
        reduce=reduce,
        message_bytes=message_bytes,
        cache=not no_cache,
        set_dims=sizes(settings or []),
        dtype=dtype,
        strict=strict,
    )


def sizes(settings: Iterable[str]) -> dict[str, int]:
    """`dim=N` texts as sizes."""
    found = {}
    for text in settings:
        name, equals, size = text.partition("=")
        if not equals or not size.strip().isascii() or not size.strip().isdigit():
            help = "for instance `--set batch=64 hidden=2048`"
            fail("MD0601", f"`--set {text[:40]}`: write `--set dim=N`, N a whole number", help=help)
        found[name.strip()] = int(size) if len(size) < 20 else 10**19
    return found


def compiled(path: Path, chosen: Options, diagnostics: Diagnostics, until: str) -> Compilation:
    """A file compiled as far as `until`."""
    from meshdsl.syntax.parse import read_source

    source = read_source(path)
    with patience(f"compiling {source.name}"):
        return compile_source(source, chosen, diagnostics, until)


PATIENCE = 1.0
"""Seconds after which somebody at a terminal is told what takes so long."""


@contextmanager
def patience(what: str) -> Iterator[None]:
    """Say on a terminal's standard error what is being done, where it takes more than a moment."""
    if not sys.stderr.isatty():
        yield
        return
    told = threading.Timer(PATIENCE, lambda: print(f"{what} …", file=sys.stderr, flush=True))
    told.daemon = True
    told.start()
    try:
        yield
    finally:
        told.cancel()


@contextmanager
def reporting(as_json: bool = False) -> Iterator[Diagnostics]:
    """Collect diagnostics, show them at the end, and turn errors into an exit code.

    With `as_json` they are left for the command to print, unless one ends it early.
    """
    diagnostics = Diagnostics()
    try:
        yield diagnostics
    except DiagnosticError as error:
        diagnostics.add(*error.diagnostics)
        if as_json:
            print_json({"version": 1, "diagnostics": as_dicts(diagnostics)})
        else:
            show(diagnostics)
        raise typer.Exit(exit_code(diagnostics.errors)) from None
    if not as_json:
        show(diagnostics)


def exit_code(errors: Iterable[Diagnostic]) -> int:
    """2 if the command is wrong, 3 if it failed while running, 1 if the program is wrong."""
    codes = []
    for error in errors:
        about_command = error.code.startswith(COMMAND_CODES) or error.code in REFUSED_CODES
        if about_command or (error.span and error.span.file.startswith("--")):
            codes.append(2)
        else:
            codes.append(3 if error.code.startswith(RUN_CODES) else 1)
    return max(codes, default=0)


def show(diagnostics: Iterable[Diagnostic]) -> None:
    """Print diagnostics on the standard error output."""
    from rich.console import Console

    from meshdsl.render import print_diagnostics

    items = capped(diagnostics)
    if items:
        print_diagnostics(items, Console(stderr=True, highlight=False))


def as_dicts(diagnostics: Iterable[Diagnostic]) -> list[dict[str, Any]]:
    """Diagnostics as `check --json` prints them."""
    from meshdsl.render import to_json

    return [to_json(d) for d in capped(diagnostics)]


def capped(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Diagnostics with not more than `MAX_ERRORS` errors of one file; the others are counted."""
    found: list[Diagnostic] = []
    errors: Counter[str] = Counter()
    last: dict[str, Diagnostic] = {}
    for diagnostic in diagnostics:
        file = diagnostic.span.file if diagnostic.span else ""
        errors[file] += diagnostic.severity == "error"
        if diagnostic.severity != "error" or errors[file] <= MAX_ERRORS:
            found.append(diagnostic)
            last[file] = diagnostic
    for file, count in errors.items():
        if count > MAX_ERRORS:
            are = "is" if count == MAX_ERRORS + 1 else "are"
            message = f"{counted(count - MAX_ERRORS, 'more error')} of this file {are} not shown"
            help = "mend these first, then check again"
            found.append(Diagnostic("MD0016", message, last[file].span, "note", help=help))
    return found


def print_json(value: object) -> None:
    """Print JSON on the standard output."""
    import json

    sys.stdout.write(json.dumps(value, indent=2) + "\n")
