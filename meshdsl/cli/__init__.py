"""The command line, one file per command.

Exit codes: 0 fine, 1 the program is wrong, 2 the command is wrong, 3 it failed while running.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

SETTING = re.compile(r"[A-Za-z_]\w*=-?\d+")
"""One `dim=size`, as `--set` takes several of them in a row."""


def main() -> None:
    """Run the command line; the console script's entry. Nobody is shown a traceback."""
    from meshdsl.backends.runtime.output import keep_stdout

    keep_stdout()
    from meshdsl.cli.app import command

    sys.argv[1:] = spread_settings(sys.argv[1:])
    try:
        sys.exit(command()(prog_name="meshdsl", standalone_mode=False))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has seen enough; a second complaint at exit would not help.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "ctx"):
            sys.exit(_usage(error))
        if os.environ.get("MESHDSL_TRACEBACK"):
            raise
        sys.stderr.write(f"error[MD0799]: meshdsl itself failed: {type(error).__name__}: {error}\n")
        sys.stderr.write("help: this is our mistake; MESHDSL_TRACEBACK=1 shows where\n")
        sys.exit(3)


def _usage(error: Any) -> int:
    """Tell of a command line that the parser of arguments refused."""
    from meshdsl.cli.common import show
    from meshdsl.diagnostics import Diagnostic

    command = error.ctx.command_path if error.ctx else "meshdsl"
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return 2
    message = error.format_message().rstrip(".")
    help = f"`{command} --help` shows what there is"
    show([Diagnostic("MD0604", message[:1].lower() + message[1:], help=help)])
    return 2


def spread_settings(arguments: list[str]) -> list[str]:
    """`--set a=1 b=2` as `--set a=1 --set b=2`: an option of the parser takes one value."""
    found: list[str] = []
    setting = False
    for argument in arguments:
        if setting and SETTING.fullmatch(argument) and found[-1] != "--set":
            found.append("--set")
        elif not SETTING.fullmatch(argument):
            setting = argument == "--set"
        found.append(argument)
    return found
