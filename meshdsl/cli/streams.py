"""The standard streams of a command: open, its own, and told apart from files where they fail."""

from __future__ import annotations

import errno
import io
import os
import sys

from meshdsl.backends.runtime.output import keep_stdout


class OutputFailed(Exception):
    """The standard output cannot be written; the message is the system's reason."""


class ReaderGone(Exception):
    """Nobody reads the standard output any more: what follows is not wanted."""


class _Output(io.FileIO):
    """The standard output. Its failures are no OSError, which commands have of files."""

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            raise ReaderGone from None
        except OSError as error:
            full = error.errno == errno.ENOSPC
            reason = "no space left" if full else str(error.strerror or error)
            raise OutputFailed(reason) from None


class _Messages(io.FileIO):
    """The standard error. What it cannot take is lost: there is no other place to say it."""

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError:
            return memoryview(data).nbytes  # type: ignore[arg-type]


def open_streams() -> None:
    """Make the standard streams usable, whatever the process was given.

    Those that are closed lead nowhere, so that no file gets their numbers. A width of the terminal
    of 0, or that is no number, is as if it were not said: else nothing would be shown at all.
    """
    closed = [number for number in range(3) if _is_closed(number)]
    for number in closed:
        nowhere = os.open(os.devnull, os.O_RDWR)  # the least free number
        if nowhere != number:
            os.dup2(nowhere, number)
            os.close(nowhere)
    # What would be read of a closed standard input is said where it is read.
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))
    keep_stdout()
    for name, kind in (("stdout", _Output), ("stderr", _Messages)):
        before = getattr(sys, name)
        stream = _through(before, kind)
        if stream is not before:
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)  # what asks how wide a terminal is
    columns = os.environ.get("COLUMNS", "1")
    if not (columns.isascii() and columns.isdigit() and 0 < int(columns[:9])):
        del os.environ["COLUMNS"]


def _is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return True
    return False


def _through(stream: object, kind: type[io.FileIO]) -> object:
    """The stream, written by another kind of file; as it is where it is no plain one."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        stream.flush()
        number = stream.fileno()
    except OSError:
        return stream
    raw = kind(number, "wb", closefd=False)
    raw.name = getattr(stream, "name", number)
    _KEPT.append(stream)  # it would close the descriptor
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering or kind is _Messages,
        write_through=stream.write_through,
    )


_KEPT: list[object] = []
"""The streams that were there before."""
