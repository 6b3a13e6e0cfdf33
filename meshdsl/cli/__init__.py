"""The command line, one file per command.

Exit codes: 0 fine, 1 the program is wrong, 2 the command is wrong, 3 it failed while running.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

COLLECTED = 100_000
"""Objects that are made between two looks for cycles of garbage: a compiler makes many, and few
cycles. A thousand of Python's own looks are a tenth of a long command."""


def main() -> None:
    """Run the command line, without tracebacks; the console script's entry."""
    from meshdsl.cli.streams import open_streams

    open_streams()
    gc.set_threshold(COLLECTED)
    try:
        _run()
    finally:
        gc.freeze()  # the process ends: no last look for cycles among all that it has made


def _run() -> None:
    from meshdsl.cli.streams import OutputFailed, ReaderGone

    try:
        try:
            code = _code()
        finally:
            sys.stdout.flush()  # what fails here has to be told as well
    except ReaderGone:
        code = 0  # a second complaint at exit would not help
        _drop_output()
    except OutputFailed as failed:
        code = 3
        _drop_output()
        _complain("MD0798", f"cannot write to the standard output: {failed}", OUTPUT_HELP)
    sys.exit(code)


OUTPUT_HELP = "free some space where it leads, or send it elsewhere"


def _drop_output() -> None:
    """Send what is left of the output nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _code() -> Any:
    """Run the command; the code to exit with."""
    from meshdsl.cli.streams import OutputFailed, ReaderGone

    try:
        from meshdsl.cli.app import app
        from meshdsl.cli.options import run_words

        return run_words(app, sys.argv[1:], "meshdsl")
    except SystemExit as end:
        return end.code
    except KeyboardInterrupt:
        return 130
    except (OutputFailed, ReaderGone):
        raise
    except Exception as error:
        missing = missing_library(error)
        if missing is not None:
            _complain("MD0797", *missing)
            return 3
        code = _usage(error)
        if code is not None:
            return code
        if os.environ.get("MESHDSL_TRACEBACK"):
            raise
        message = f"meshdsl itself failed: {type(error).__name__}: {error}"
        _complain("MD0799", message, "this is our mistake; MESHDSL_TRACEBACK=1 shows where")
        return 3


def missing_library(error: BaseException) -> tuple[str, str] | None:
    """The message and the way out, where a library that is needed is not installed."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    name = error.name.partition(".")[0]
    if name == "meshdsl":
        return None
    wanted = "'meshdsl[torch]'" if name == "torch" else name
    help = f"install it: `python -m pip install {wanted}`"
    return f"this command needs {name}, which is not installed", help


def _complain(code: str, message: str, help: str) -> None:
    """Show an error without a place, whatever else has failed."""
    from meshdsl.carets import safe

    sys.stderr.write(f"error[{code}]: {safe(message)}\nhelp: {help}\n")


def _usage(error: Any) -> int | None:
    """Report a refused command line; returns the exit code, None for any other error."""
    from meshdsl.cli.common import show
    from meshdsl.cli.corrected import running
    from meshdsl.cli.options import spread_settings
    from meshdsl.cli.usage import refused
    from meshdsl.diagnostics import Diagnostic, advice

    words = tuple(spread_settings(sys.argv[1:]))
    refusal = refused(error, words)
    if refusal is None:
        return None
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return 2
    command = error.ctx.command_path if error.ctx else "meshdsl"
    fixes = refusal.fixes
    help = advice(fixes) or f"`{command} --help` shows what there is"
    with running("meshdsl", error.ctx.find_root().command if error.ctx else None, words):
        show([Diagnostic("MD0604", refusal.message, help=help, fixes=fixes)])
    return 2
