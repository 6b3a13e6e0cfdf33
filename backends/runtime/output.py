"""The standard output of a program, kept from the libraries it uses."""

import io
import os
import sys


def keep_stdout() -> None:
    """Let `sys.stdout` alone reach the standard output; what C code writes there goes to stderr.

    From now on `sys.stdout` has a descriptor of its own, and descriptor 1 is standard error, for
    child processes too. Nothing changes where `sys.stdout` has been replaced, as in a notebook.
    """
    shared = sys.stdout
    if not isinstance(shared, io.TextIOWrapper) or shared is not sys.__stdout__:
        return
    shared.flush()
    try:
        os.fstat(2)
    except OSError:  # there is no standard error, and the number must not be given to another
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stdout = io.TextIOWrapper(
        open(os.dup(shared.fileno()), "wb", 0 if shared.write_through else -1),
        shared.encoding,
        shared.errors,
        line_buffering=shared.line_buffering,
        write_through=shared.write_through,
    )
    sys.__stdout__ = sys.stdout  # type: ignore[misc]  # what asks how wide a terminal is
    os.dup2(2, 1)
