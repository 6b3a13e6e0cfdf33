"""Frames of the Language Server Protocol on the way in: a header, an empty line, so many bytes."""

from __future__ import annotations

import io
import logging
import re
from typing import BinaryIO

MOST_BYTES = 1 << 27
"""The longest message that is read; room for it is made before its first byte comes."""

MOST_HEADER = 1 << 16
"""The most bytes of a line in a header that are read at once."""

_LENGTH = re.compile(rb"content-length:\s*(.*?)\s*$", re.IGNORECASE)

logger = logging.getLogger(__name__)


class Frames(io.BufferedIOBase):
    """An input whose headers are sound: a length that is none, or too long, is left out.

    Then the reader skips what follows until the next header, also where that begins in the middle
    of a line. Each frame that is skipped is logged; the server goes on.
    """

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self._stream = stream
        self._has_length = self._skipping = False

    def readline(self, size: int | None = -1, /) -> bytes:
        """The next line; that of the length in the form that every reader knows."""
        line = self._stream.readline(MOST_HEADER)
        if match := _LENGTH.search(line):
            return self._length(match[1])
        if line and not line.strip():
            if not self._has_length and not self._skipping:
                self._skip("a message has no Content-Length")
            self._has_length = False
        return line

    def read(self, size: int | None = -1, /) -> bytes:
        """The bytes of a message."""
        return self._stream.read(-1 if size is None else size)

    def _length(self, written: bytes) -> bytes:
        """The line of a length, or an empty one where it cannot be believed."""
        if not written.isdigit() or len(written) > 18:
            return self._skip(f"a message of {written[:40].decode('ascii', 'replace')!r} bytes")
        if int(written) > MOST_BYTES:
            return self._skip(f"a message of {int(written):,} bytes, more than {MOST_BYTES:,},")
        self._has_length, self._skipping = True, False
        return b"Content-Length: %d\r\n" % int(written)

    def _skip(self, what: str) -> bytes:
        logger.error("%s is skipped", what)
        self._has_length, self._skipping = False, True
        return b"\r\n"
