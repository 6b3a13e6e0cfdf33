"""Steps that commands share: reading a file, writing one, showing diagnostics."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshdsl.diagnostics import (
    MAX_ERRORS,
    Diagnostic,
    DiagnosticError,
    Diagnostics,
    Source,
    counted,
    fail,
)
from meshdsl.option_edits import give, refuse, replace_argument
from meshdsl.pipeline import Compilation, Options, compile_source

if TYPE_CHECKING:
    from meshdsl.carets import DiagnosticFacts

COMMAND_CODES = ("MD0010", "MD05", "MD06")
PROGRAM_CODES = (
    *("MD0641", "MD0642", "MD0664"),
    *(f"MD052{n}" for n in range(7)),
    *(f"MD053{n}" for n in range(3, 9)),
)
"""Reports of commands that are about the program: for what is asked of it there is no layout, or
the schedule of a pipeline is wrong."""
SCHEDULE_CODES = ("MD0528", "MD0529")
"""Reports about a schedule, of a command that has no place, or of a program."""
RUN_CODES = ("MD07", "MD08")
REFUSED_CODES = ("MD0703", "MD0704")


def compiled(path: Path, chosen: Options, diagnostics: Diagnostics, until: str) -> Compilation:
    """The compilation of a file as far as `until`."""
    from meshdsl.syntax.parse import read_source

    source = read_source(path)
    with patience(f"compiling {source.name}"):
        return compile_source(source, chosen, diagnostics, until)


PATIENCE = 1.0
"""Seconds before a terminal shows what takes so long."""


@contextmanager
def patience(what: str) -> Iterator[None]:
    """Print `what` to a terminal's standard error if it takes longer than `PATIENCE`."""
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
    """Collect diagnostics, show them at the end, and exit with the code of the errors.

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
    code = exit_code(diagnostics.errors)
    if code:
        raise typer.Exit(code)


def exit_code(errors: Iterable[Diagnostic]) -> int:
    """The code: 2 for a wrong command, 3 for a run that failed, 1 for a wrong program."""
    codes = []
    for error in errors:
        about_command = error.code.startswith(COMMAND_CODES) or error.code in REFUSED_CODES
        about_program = error.code in SCHEDULE_CODES and error.span is not None
        about_command &= error.code not in PROGRAM_CODES and not about_program
        if about_command or (error.span and error.span.is_in_option):
            codes.append(2)
        else:
            codes.append(3 if error.code.startswith(RUN_CODES) else 1)
    return max(codes, default=0)


def show(diagnostics: Iterable[Diagnostic]) -> None:
    """Print diagnostics on the standard error output."""
    items = capped(diagnostics)
    if not items:
        return
    from rich.console import Console

    from meshdsl.carets import print_diagnostics
    from meshdsl.cli.corrected import corrected

    print_diagnostics(items, Console(stderr=True, highlight=False), corrected)


def as_dicts(diagnostics: Iterable[Diagnostic]) -> list[DiagnosticFacts]:
    """Diagnostics as `check --json` prints them."""
    from meshdsl.carets import to_json

    return [to_json(d) for d in capped(diagnostics)]


def capped(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Diagnostics with not more than `MAX_ERRORS` errors of one file; the others are counted."""
    shown: list[Diagnostic] = []
    errors: Counter[str] = Counter()
    last: dict[str, Diagnostic] = {}
    for diagnostic in diagnostics:
        file = diagnostic.span.file if diagnostic.span else ""
        errors[file] += diagnostic.severity == "error"
        if diagnostic.severity != "error" or errors[file] <= MAX_ERRORS:
            shown.append(diagnostic)
            last[file] = diagnostic
    for file, count in errors.items():
        if count > MAX_ERRORS:
            are = "is" if count == MAX_ERRORS + 1 else "are"
            message = f"{counted(count - MAX_ERRORS, 'more error')} of this file {are} not shown"
            help = "mend these first, then check again"
            shown.append(Diagnostic("MD0016", message, last[file].span, "note", help=help))
    return shown


def say(line: str, to_errors: bool = False) -> None:
    """Print one line, whatever names are in it: what could steer a terminal is escaped."""
    from meshdsl.carets import safe

    typer.echo(safe(line), err=to_errors)


def say_text(text: str) -> None:
    """Write a text as it is, at once; for a terminal, what could steer it is escaped."""
    if _on_terminal():
        from meshdsl.carets import safe

        text = re.sub(r"[^\n\t]+", lambda found: safe(found[0]), text)
    sys.stdout.write(text)
    sys.stdout.flush()


def print_json(value: object) -> None:
    """Print JSON on the standard output."""
    import json

    sys.stdout.write(json.dumps(value, indent=2) + "\n")


COLOURS = {"+": "green", "-": "red", "@": "cyan"}
"""The colours of lines of a difference, by their first sign."""


def print_difference(source: Source, text: str) -> None:
    """Print what leads from a source to `text`, as `patch` reads it; on a terminal in colour."""
    import difflib
    import io

    from meshdsl.carets import safe

    # Lines end at line feeds alone: a comment may hold other signs that Python splits at.
    before, after = (list(io.StringIO(of, newline="\n")) for of in (source.text, text))
    name = safe(source.name)
    lines = list(difflib.unified_diff(before, after, name, name))
    if not lines:
        say(f"{source.name}: only ends of lines, or the mark at its beginning")
    if not _on_terminal():
        sys.stdout.writelines(map(_ended, lines))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for number, line in enumerate("".join(map(_ended, lines)).split("\n")[:-1]):
        style = "bold" if number < 2 else COLOURS.get(line[:1], "")
        console.print(Text("\t".join(map(safe, line.split("\t"))), style), soft_wrap=True)


def _on_terminal() -> bool:
    return sys.stdout.isatty()


def _ended(line: str) -> str:
    """A line of a difference with its end; one that has none in the file is marked."""
    return line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


# --- files -----------------------------------------------------------------------------------


def check_output(path: Path, force: bool, source: Path | None = None) -> None:
    """Refuse, before any work, a file that cannot be written or would be overwritten.

    Nothing overwrites the program it is made of, its `source`.
    """
    _check_name(path)
    if source is not None and path.is_file() and source.is_file() and path.samefile(source):
        fail("MD0502", f"{path} is the program itself", help="name another file")
    if str(path) == "-":
        fail("MD0502", "`-` names no file to write", help="name a file")
    if path.is_dir():
        fix = replace_argument(str(path), str(path / "prog.py"), safe=False)
        refuse("MD0502", f"{path} is a folder", fix, "name another file in it")
    if os.path.exists(path) and not os.path.isfile(path):
        fail("MD0502", f"{path} is no regular file", help="name a file, or leave the option out")
    if not path.parent.is_dir():
        fail("MD0502", f"there is no folder {path.parent}", help=f"make it: mkdir -p {path.parent}")
    if os.path.lexists(path) and not force:  # also a link to a file that is not there yet
        refuse("MD0503", f"{path} exists already", give("--force", safe=False), OTHER_NAME)
    if not os.access(path.parent, os.W_OK):
        help = "choose another folder, or change its permissions"
        fail("MD0502", f"the folder {path.parent} cannot be written to", help=help)


WRITTEN = (".npz", ".safetensors")


def check_params_output(out: Path, weights: str | None, force: bool) -> None:
    """Refuse, before any work, a place for parameters: a file, or a model by a `weights` block."""
    if weights is not None:
        from meshdsl.backends.weights.writing import check_model

        check_model(str(out), force)
        return
    if out.suffix not in WRITTEN:
        fix = give("--out", str(with_suffix(out, ".npz", "params")))
        message = f"`--out {out}`: parameters are written as .npz or .safetensors"
        refuse("MD0602", message, fix, "name a `weights` block: `--as NAME` writes a model")
    check_output(out, force)


OTHER_NAME = "choose another name"
"""The way out besides `--force`."""


def _check_name(path: Path) -> None:
    """Raise MD0502 for a name that the system does not look up: too long, or in a closed folder."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        help = "choose another name or folder, or change the permissions"
        fail("MD0502", f"{path} cannot be written: {error.strerror}", help=help)


def with_suffix(out: Path, suffix: str, name: str) -> Path:
    """What may have been meant by an output of another suffix: in a folder a file, `name`."""
    return out / f"{name}{suffix}" if os.path.isdir(out) else out.with_suffix(suffix)
