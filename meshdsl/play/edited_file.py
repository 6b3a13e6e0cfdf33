"""The file that is played with: read when the page asks, written only as the page last saw it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import field
from pathlib import Path

from meshdsl.backends.runtime.user_files import read_regular
from meshdsl.diagnostics import Source, fail
from meshdsl.project import project
from meshdsl.records import dataclass
from meshdsl.syntax.parse import read_source

EXAMPLE = "example"
"""The name of the program that is shown where no file is given."""


@dataclass(frozen=True, slots=True)
class EditedFile:
    """A file, or a text of no file, which cannot be saved. `write` writes a file whole."""

    path: Path | None
    writable: bool
    write: Callable[[Path, str], None]
    _turn: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)
    """One save at a time: of several that know the same text, only the first may write."""

    @property
    def name(self) -> str:
        """The name in the page and in diagnostics."""
        return f"{EXAMPLE}.mdsl" if self.path is None else str(self.path)

    def read(self) -> tuple[Source, str]:
        """The text, and the digest of the file. Raises DiagnosticError."""
        if self.path is None:
            return Source(self.name, project(EXAMPLE)[0].text), ""
        if str(self.path) == "-":
            help = "save the program in a file; without one, an example is shown"
            fail("MD0010", "the standard input cannot be read anew by a page", help=help)
        digest = self._digest(self.path)  # before the text: what changes in between is no match
        return read_source(self.path), digest

    def save(self, text: str, digest: str) -> str | None:
        """Write the text if the file is as its digest says; the new digest, None if it is not."""
        if self.path is None or not self.writable:
            fail("MD0623", "this page writes nothing", help="copy the text into a file of your own")
        with self._turn:
            if self._digest(self.path) != digest:
                return None
            self.write(self.path.resolve(), text)
            return self._digest(self.path)

    @staticmethod
    def _digest(path: Path) -> str:
        """The digest of what is there; empty where nothing can be read."""
        try:
            return hashlib.sha256(read_regular(path)).hexdigest() if path.is_file() else ""
        except OSError:
            return ""
