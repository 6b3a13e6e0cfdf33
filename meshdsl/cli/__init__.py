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
    from meshdsl.backends.runtime.output import keep_stdout

    keep_stdout()
    gc.set_threshold(COLLECTED)
    try:
        _run()
    finally:
        gc.freeze()  # the process ends: no last look for cycles among all that it has made


def _run() -> None:
    from meshdsl.cli.app import app
    from meshdsl.cli.options import run_words

    try:
        sys.exit(run_words(app, sys.argv[1:], "meshdsl"))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has closed it; a second complaint at exit would not help.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        code = _usage(error)
        if code is not None:
            sys.exit(code)
        if os.environ.get("MESHDSL_TRACEBACK"):
            raise
        sys.stderr.write(f"error[MD0799]: meshdsl itself failed: {type(error).__name__}: {error}\n")
        sys.stderr.write("help: this is our mistake; MESHDSL_TRACEBACK=1 shows where\n")
        sys.exit(3)


def _usage(error: Any) -> int | None:
    """Report a refused command line; returns the exit code, None for any other error."""
    from meshdsl.cli.common import show
    from meshdsl.cli.options import refusal
    from meshdsl.diagnostics import Diagnostic

    message = refusal(error)
    if message is None:
        return None
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return 2
    command = error.ctx.command_path if error.ctx else "meshdsl"
    help = f"`{command} --help` shows what there is"
    show([Diagnostic("MD0604", message, help=help)])
    return 2
