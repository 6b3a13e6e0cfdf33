"""Files that a user names for output: each is written whole, or refused with a diagnostic."""

from __future__ import annotations

import os
from typing import NoReturn

from meshdsl.diagnostics import fail


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write a file atomically, as `replacing` says. Raises MD0501 where the system refuses."""
    from meshdsl.backends.runtime.user_files import write_file

    try:
        write_file(path, text)
    except OSError as error:
        refuse_writing(path, error)


def refuse_writing(path: str | os.PathLike[str], error: OSError) -> NoReturn:
    """Raise MD0501 for a file that the system refused to write."""
    help = "check that the folder exists, its permissions, and the space there"
    fail("MD0501", f"{os.fspath(path)} cannot be written: {error.strerror}", help=help)
