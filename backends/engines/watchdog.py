"""Stalled runs: detected and reported, with the activity of every device. None is ended."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from meshdsl.backends.engines.failures import place_of
from meshdsl.backends.engines.stack_sampler import EVERY, report_of
from meshdsl.diagnostics import Diagnostic, fail
from meshdsl.disk_cache import from_json
from meshdsl.records import dataclass

SETTING = "MESHDSL_STALL_SECONDS"
DEFAULT = 60.0
"""Seconds without progress before the warning, unless the environment has another number."""

SILENT = 10 * EVERY
"""Seconds without a report of a process after which it counts as not answering."""

SHOWN = 8
"""Devices that are listed by number; the others are counted."""


@dataclass(frozen=True, slots=True)
class Doing:
    """The activity of a device: `mark` changes when it advances; it `waits` for other devices."""

    mark: Hashable
    text: str
    waits: bool = False


class Watchdog:
    """Polls devices, and warns when none of them has advanced for long.

    `doing` returns the activity of each one that still runs.
    """

    def __init__(self, doing: Callable[[], Mapping[int, Doing]]) -> None:
        self.doing, self.limit = doing, stall_seconds()
        self.every = self.limit / 8
        self._marks: dict[int, Hashable] = {}
        self._last = time.monotonic()
        self._still, self._told = 0.0, self.limit

    def look(self) -> None:
        """Call this often; a look that is due may print a warning."""
        passed = time.monotonic() - self._last
        if not self.limit or passed < self.every:
            return
        self._last += passed
        activities = self.doing()
        marks = {rank: doing.mark for rank, doing in activities.items()}
        if marks != self._marks:
            self._marks, self._still, self._told = marks, 0.0, self.limit
            return
        # After a long gap between looks the whole process was stopped: that is no stall.
        self._still += min(passed, 2 * self.every)
        if activities and self._still >= self._told:
            say(stalled(activities, self._told))
            self._told *= 2


def stall_seconds() -> float:
    """Seconds without progress before the warning; 0: there is never one."""
    setting = os.environ.get(SETTING, "")
    try:
        seconds = float(setting or DEFAULT)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        help = f"{SETTING}=120 for two minutes, 0 to be told nothing"
        fail("MD0602", f"{SETTING}={setting}: this is no number of seconds", help=help)
    return seconds


def stalled(found: Mapping[int, Doing], seconds: float) -> Diagnostic:
    """The warning, with the devices first that others may be waiting for."""
    alike: dict[tuple[bool, str], list[int]] = {}
    for rank, doing in sorted(found.items()):
        alike.setdefault((doing.waits, doing.text), []).append(rank)
    parts = [f"{_devices(ranks)} {text}" for (_, text), ranks in sorted(alike.items(), key=_first)]
    message = f"no progress for {seconds:.3g} s: {'; '.join(parts)}"
    help = f"nothing is ended by itself: Ctrl-C does; {SETTING}=N tells of N seconds, 0 never"
    return Diagnostic("MD0723", message, severity="warning", help=help)


def _first(entry: tuple[tuple[bool, str], list[int]]) -> tuple[bool, int]:
    (waits, _), ranks = entry
    return waits, ranks[0]


def _devices(ranks: list[int]) -> str:
    """`device 3 is`, `devices 0, 1 and 2 are`."""
    if len(ranks) == 1:
        return f"device {ranks[0]} is"
    shown = [str(rank) for rank in ranks[:SHOWN]]
    last = shown.pop() if len(ranks) <= SHOWN else f"{len(ranks) - SHOWN:,} more"
    return f"devices {', '.join(shown)} and {last} are"


def say(diagnostic: Diagnostic) -> None:
    """Print a diagnostic on the standard error output, now."""
    from rich.console import Console

    from meshdsl.carets import print_diagnostics

    print_diagnostics([diagnostic], Console(stderr=True, highlight=False))


# --- processes -----------------------------------------------------------------------------------


class Activity(TypedDict):
    """What a process is doing: its `mark` stays while it does the same, its `beat` counts."""

    pid: int
    beat: int
    mark: int
    line: int | None
    collective: str
    outside: str


@dataclass(frozen=True, slots=True)
class Processes:
    """The processes of a run, one per device, which report their activity in files of `folder`.

    `lines` maps lines of the emitted text to places of the source.
    """

    folder: Path
    devices: int
    lines: Mapping[int, str]

    def doing(self) -> dict[int, Doing]:
        """The activity of each process, by its last report."""
        return {rank: self._doing_of(rank) for rank in range(self.devices)}

    def _doing_of(self, rank: int) -> Doing:
        report = self.report(rank)
        if report is None:
            return Doing(None, "about to begin")
        where = self._where(report)
        if is_stopped(report["pid"]):
            return Doing(report["mark"], f"stopped (process {report['pid']}) {where}")
        if report["age"] > SILENT:
            return Doing(report["mark"], f"not answering (process {report['pid']}), last {where}")
        if report["collective"]:
            return Doing(report["mark"], f"waiting in {report['collective']} {where}", waits=True)
        return Doing(report["mark"], where)

    def report(self, rank: int) -> dict[str, Any] | None:
        """The last report of a process, and its age in seconds; None if there is none yet."""
        path = self.folder / report_of(rank)
        try:
            activity = from_json(path.read_text("utf-8"), Activity)
            return {**activity, "age": time.time() - path.stat().st_mtime}
        except (FileNotFoundError, ValueError):
            return None

    def _where(self, found: Mapping[str, Any]) -> str:
        line = found["line"]
        if line is None:
            return str(found["outside"])
        return f"at {place_of(self.lines, line)}"


def is_stopped(pid: int) -> bool:
    """Whether a process has been stopped by a signal, where the system shows it (Linux)."""
    return _state(pid) in ("T", "t")


def is_gone(pid: int) -> bool:
    """Whether a process has ended, or was killed, where the system shows it (Linux)."""
    return _state(pid) in ("X", "Z")


def _state(pid: int) -> str:
    """The state letter `ps` shows for a process: X if there is none, empty if unknown."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace")
    except OSError:
        return "X" if Path("/proc/self/stat").exists() else ""
    return status.rpartition(")")[2].split()[0]
