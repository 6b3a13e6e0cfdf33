"""Slow work is announced, to people only, and only on the error output."""

from __future__ import annotations

import io
import threading

import pytest

from meshdsl.cli import common


class Stream(io.StringIO):
    """A stream that may be a terminal, and tells when it is written to."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal, self.written = terminal, threading.Event()

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


def test_a_terminal_is_told_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(terminal=True)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(common, "PATIENCE", 0.0)
    with common.patience("compiling mlp.mdsl"):
        stream.written.wait()
    assert stream.getvalue().startswith("compiling mlp.mdsl …")


@pytest.mark.parametrize(("terminal", "moment"), [(True, 3600.0), (False, 0.0)])
def test_otherwise_nothing_is_said(monkeypatch, terminal: bool, moment: float) -> None:
    stream = Stream(terminal)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(common, "PATIENCE", moment)
    with common.patience("compiling mlp.mdsl"):
        pass
    assert stream.getvalue() == ""
