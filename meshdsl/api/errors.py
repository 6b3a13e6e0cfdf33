"""Diagnostics on their way to a Python user: an exception that shows the line with carets."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from meshdsl.api.argument_types import check_arguments
from meshdsl.diagnostics import Diagnostic, DiagnosticError
from meshdsl.option_edits import in_python as as_argument
from meshdsl.option_edits import shown as as_option

if TYPE_CHECKING:
    from rich.text import Text

P = ParamSpec("P")
R = TypeVar("R")

WIDTH = 100


class ProgramError(DiagnosticError):
    """An error in a program, a layout or a call of a plan.

    `diagnostics` has the code, the span and the help of each; the text of the exception is what
    the command line prints.
    """

    def __str__(self) -> str:
        return "\n" + "\n".join(map(shown, self.diagnostics))

    def _render_traceback_(self) -> list[str]:
        """The traceback in IPython, reduced to the diagnostics: they have the spans."""
        from meshdsl.carets import render

        return [in_bold(render(d, WIDTH)) for d in self.diagnostics]


class ProgramWarning(UserWarning):
    """A report of the compiler that is no error: a rule that matches nothing, for instance."""


def shown(diagnostic: Diagnostic) -> str:
    """The text of a diagnostic as the command line prints it, without colours."""
    from meshdsl.carets import render

    return render(diagnostic, WIDTH).plain


def in_bold(text: Text) -> str:
    """The text with bold parts as escape codes of a terminal; notebooks give those a background."""
    import io

    from rich.console import Console

    page = io.StringIO()
    options: dict[str, Any] = {"force_terminal": True, "color_system": "standard", "no_color": True}
    console = Console(file=page, width=WIDTH, force_jupyter=False, highlight=False, **options)
    console.print(text, soft_wrap=True, end="")
    return page.getvalue()


def told(function: Callable[P, R]) -> Callable[P, R]:
    """Make a public function raise its diagnostics as `ProgramError`."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            try:
                return function(*args, **kwargs)
            except (AttributeError, LookupError, TypeError, ValueError):
                check_arguments(function, args, kwargs)
                raise
        except ProgramError as error:
            raise error.with_traceback(of_users(error.__traceback__)) from None
        except DiagnosticError as error:
            raise ProgramError(*map(in_python, placed(error.diagnostics))) from None

    return wrapper


def placed(diagnostics: Iterable[Diagnostic]) -> Iterator[Diagnostic]:
    """The diagnostics, those of no place at the user's call: a notebook shows no traceback."""
    from meshdsl.api.source_location import calling

    span = calling()
    for diagnostic in diagnostics:
        yield replace(diagnostic, span=span) if diagnostic.span is None else diagnostic


def of_users(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this package, but where there are no others."""
    from meshdsl.api.source_location import is_users

    users = [step for step in _steps(traceback) if is_users(step.tb_frame)]
    rebuilt: TracebackType | None = None
    for step in reversed(users):
        rebuilt = TracebackType(rebuilt, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return rebuilt


def _steps(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


_OPTION = re.compile(r"`--(mesh|layout|reduce|sbp|dtype) ([^`]+)`")
_UNIT = re.compile(r"`--unit (\d+)`")
_CSV = re.compile(r"`--csv FILE`")
_BLOCK = re.compile(r"`--as (\w+)`")
_SETTING = re.compile(r"`--set (\w+=\d+(?: \w+=\d+)*)`")
_SIZES = re.compile(r"`--set (\w+\.mdsl)`")
_ARROW = re.compile(r"(\w+\[[^]`=]*)->([^]`=]*\](?=[`(]))")
_BRACKETS = re.compile(r"`\[([^]`=]*)->([^]`=]*)\]`")
_OUT = re.compile(r"`(?:(\w+\([^`()]*) )?-> (\[[^]`]*\])(\)?)`")


def in_python(diagnostic: Diagnostic) -> Diagnostic:
    """The diagnostic with its help written in Python, not as a command or a file.

    A change of a line of a `.mdsl` file stays in the language. Fixes that write the language into a
    text of Python are left out; one that writes Python comes with a `ProgramError` of its own.
    """
    from meshdsl.named.size_files import SUFFIX

    if diagnostic.help is None:
        return diagnostic
    fixes = diagnostic.fixes
    help = diagnostic.help if _AS_COMMAND.get() else _options_in_python(diagnostic)
    if diagnostic.span is None or not diagnostic.span.file.endswith(SUFFIX):
        help = _ARROW.sub(r"\1>>\2", help)
        help = _BRACKETS.sub(r"`[\1>>\2]`", help)
        help = _OUT.sub(lambda m: f"`{f'{m[1]}, ' if m[1] else ''}out={m[2]}{m[3]}`", help)
        fixes = tuple(fix for fix in fixes if not fix.edits)
    return replace(diagnostic, help=help, fixes=fixes)


def _options_in_python(diagnostic: Diagnostic) -> str:
    """The help with options as arguments of a call."""
    help = diagnostic.help or ""
    for edit in (edit for fix in diagnostic.fixes for edit in fix.options):
        help = help.replace(f"`{as_option(edit)}`", f"`{as_argument(edit)}`")
    help = _OPTION.sub(r'`\1="\2"`', help)
    help = _SETTING.sub(lambda match: f"`{match[1].replace(' ', ', ')}`", help)
    help = _SIZES.sub(r'`dims=md.sizes("\1")`', help)
    help = _UNIT.sub(r"`unit=\1`", help)
    help = _CSV.sub('`.csv("FILE")`', help)
    return _BLOCK.sub(r'`weights="\1"`', help)


_AS_COMMAND: ContextVar[bool] = ContextVar("_AS_COMMAND", default=False)
"""Whether the user wrote the options of a command, in the line of a magic."""


@contextmanager
def as_command() -> Iterator[None]:
    """What is raised meanwhile names options as on the command line."""
    token = _AS_COMMAND.set(True)
    try:
        yield
    finally:
        _AS_COMMAND.reset(token)


def warn(diagnostics: Iterable[Diagnostic], file: str, line: int) -> None:
    """Issue the warnings among `diagnostics` as Python warnings at `file:line`."""
    for diagnostic in diagnostics:
        if diagnostic.severity == "warning":
            text = f"\n{shown(diagnostic)}"
            warnings.warn_explicit(text, ProgramWarning, file, line)
