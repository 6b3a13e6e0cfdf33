"""`--tensorboard DIR`: the numbers of every step as an event file, which TensorBoard shows.

The files are written by the package `tensorboardX`, an extra (`meshdsl[tensorboard]`), one record a
step and from this thread: a disk that is full is an error of the step, not of a thread beside it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshdsl.backends.train.job import RESUME
from meshdsl.diagnostics import Fix, OptionEdit, fail
from meshdsl.option_edits import refuse

PACKAGE = "tensorboardX"
PREFIX = "events"
"""The beginning of the names of event files."""

FLUSHED = 2.0
"""Seconds between two times that records reach the disk."""


class EventLog:
    """The event file of one run, which begins after step `start`.

    It replaces those of an earlier run, or goes on with them: of what the earlier run wrote after
    `start` TensorBoard shows nothing. All of it raises MD0501 where the file cannot be written.
    """

    def __init__(self, folder: str, start: int) -> None:
        self._folder = folder
        package = _package()
        self._events = importlib.import_module(f"{PACKAGE}.proto.event_pb2")
        self._summary = importlib.import_module(f"{PACKAGE}.proto.summary_pb2")
        with self._written():
            os.makedirs(folder, exist_ok=True)
            for file in event_files(folder) if start == 0 else ():
                file.unlink()
            path = os.path.join(folder, PREFIX)
            self._writer = package.EventsWriter(path, f".step-{start}")
            begun = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer.write_event(
                self._events.Event(wall_time=time.time(), step=start + 1, session_log=begun)
            )
            self._writer.flush()
        self._flushed = time.monotonic()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append the numbers of one step, each under its name."""
        value = self._summary.Summary.Value
        shown = [value(tag=k, simple_value=float(v)) for k, v in record.items() if k != "step"]
        event = self._events.Event(
            wall_time=time.time(), step=record["step"], summary=self._summary.Summary(value=shown)
        )
        with self._written():
            self._writer.write_event(event)
            if time.monotonic() - self._flushed > FLUSHED:
                self._writer.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        """Write what is left, and close the file."""
        with self._written():
            self._writer.close()

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            help = f"free some space there, or name another folder; {RESUME}"
            why = error.strerror or error
            fail("MD0501", f"event files in {self._folder} cannot be written: {why}", help=help)


def _package() -> Any:
    """The module that writes event files. Raises MD0508 where the package is not installed."""
    try:
        return importlib.import_module(f"{PACKAGE}.event_file_writer")
    except ImportError:
        edits = (OptionEdit("--tensorboard"), OptionEdit("--log", "log.jsonl"))
        title = "write `--log log.jsonl` in place of `--tensorboard`"
        install = "install it: `pip install 'meshdsl[tensorboard]'`"
        message = f"`--tensorboard` needs the package `{PACKAGE}`"
        refuse("MD0508", message, Fix(title, safe=False, options=edits), install)


def event_files(folder: str) -> list[Path]:
    """The event files in a folder, the oldest first."""
    return sorted(Path(folder).glob(f"{PREFIX}.out.tfevents.*"))


def check_events(folder: str, resume: bool, force: bool) -> None:
    """Refuse, before any work, a folder that event files cannot be written to.

    With `force` those of another run are replaced. Raises MD0502, MD0503 and MD0508.
    """
    path = Path(folder)
    is_there = os.path.isdir(path)  # False for a name that the system does not look up
    if os.path.lexists(path) and not is_there:
        fail("MD0502", f"{path} is not a folder", help="name a folder: `--tensorboard runs/first`")
    _package()
    if not is_there:
        return
    if not os.access(path, os.W_OK):
        help = "choose another folder, or change its permissions"
        fail("MD0502", f"the folder {path} cannot be written to", help=help)
    if event_files(folder) and not resume and not force:
        help = "name another folder, or replace them with `--force`; `--resume` adds to them"
        fail("MD0503", f"{path} has event files of another run", help=help)
