"""Training under torchrun: a process per device, watched by this one. None outlives it."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from meshdsl.backends.engines.reports import Report, Told
from meshdsl.backends.engines.torchrun import (
    TorchrunError,
    earliest_of,
    launch,
    reports_in,
    unexplained,
)
from meshdsl.backends.engines.watchdog import Processes
from meshdsl.backends.train.data import open_data
from meshdsl.backends.train.events import damaged, event_from_line
from meshdsl.backends.train.job import RESUME, Ending, Job, Tell, ending_from_dict
from meshdsl.backends.train.local import Emitted, check_params
from meshdsl.diagnostics import Diagnostic, DiagnosticError

ROOT_CAUSE = "Root Cause (first observed failure)"
WORKER = ["-m", "meshdsl.backends.train.worker"]


def train_torchrun(emitted: Emitted, job: Job, tell: Tell, stopping: Callable[[], bool]) -> Ending:
    """Train on processes; returns the outcome.

    Raises TorchrunError and DiagnosticError; a KeyboardInterrupt passes through. In every case all
    processes are gone afterwards.
    """
    program = emitted.load().training
    check_params(program, job.params)
    open_data(job.data, program.INPUTS, job.seed)  # refused here, it costs no start of processes
    devices = math.prod(program.MESH.values())
    with tempfile.TemporaryDirectory(prefix="meshdsl-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        _write(folder, emitted, job)
        threads = str(max(1, (os.cpu_count() or 1) // devices))
        processes = Processes(folder, devices, emitted.places)
        with open(folder / "events", encoding="utf-8", errors="replace") as events:

            def look() -> None:
                _relay(events, program.LOSS, tell)
                if stopping():
                    (folder / "stop").touch()

            code = launch(processes, [*WORKER, str(folder)], look, OMP_NUM_THREADS=threads)
            _relay(events, program.LOSS, tell)
        if (ending := _ending(folder / "ending.json")) is not None:
            return ending
        log = (folder / "log").read_text("utf-8", errors="replace")
        if code < 0:
            message = f"torchrun was killed by signal {-code}, its processes with it"
            raise TorchrunError("MD0721", message, help=RESUME)
        raise _told(emitted, reports_in(folder), devices, log)


def _write(folder: Path, emitted: Emitted, job: Job) -> None:
    """Write the files that the processes read."""
    (folder / "train.py").write_text(emitted.training.text, encoding="utf-8")
    if emitted.evaluation is not None:
        (folder / "evaluate.py").write_text(emitted.evaluation.text, encoding="utf-8")
    (folder / "job.json").write_text(job.to_json(), encoding="utf-8")
    (folder / "events").touch()


def _ending(path: Path) -> Ending | None:
    """The ending that device 0 has written; None where there is none, or only a part of it."""
    try:
        return ending_from_dict(json.loads(path.read_text("utf-8")))
    except (FileNotFoundError, ValueError):
        return None


def _relay(events: IO[str], loss: str, tell: Tell) -> None:
    """Pass on the events that device 0 has written since the last time; tell of damaged lines."""
    start = events.tell()
    while (line := events.readline()).endswith("\n"):
        try:
            event = event_from_line(line, loss)
        except ValueError:
            event = damaged(line)
        tell(event)
        start = events.tell()
    events.seek(start)  # the last line is being written just now


def _told(
    emitted: Emitted, reports: list[Report], devices: int, log: str
) -> DiagnosticError | TorchrunError:
    """The one error to report to the user."""
    reporting = {report["rank"] for report in reports}
    victim = _signalled(log)
    if victim is not None and victim not in reporting:
        return _killed(victim, reports, emitted.places)
    for report in reports:
        if report.get("diagnostics"):
            return DiagnosticError(*(_diagnostic(d) for d in report["diagnostics"]))
    causes = [report for report in reports if not report["in_collective"]]
    if causes:
        return earliest_of(emitted.text, causes, emitted.places)
    silent = sorted(set(range(devices)) - reporting)
    if not silent or not reports:
        return unexplained(log)
    return _killed(silent[0], reports, emitted.places)


def _signalled(log: str) -> int | None:
    """The device whose process was the first to end, if a signal ended it, as torchrun logs it."""
    found = re.search(r"rank\s*:\s*(\d+).*?exitcode\s*:\s*-\d", log.partition(ROOT_CAUSE)[2], re.S)
    return int(found[1]) if found else None


def _diagnostic(found: Told) -> Diagnostic:
    return Diagnostic(found["code"], found["message"], help=found["help"])


def _killed(device: int, reports: list[Report], places: Mapping[int, str]) -> TorchrunError:
    """The error of a process that ended without a report, and where another waited for it."""
    message = f"the process of device {device} was killed"
    waiting = next((r for r in reports if r["line"] and r.get("collective")), None)
    if waiting is None:
        return TorchrunError("MD0721", message, device=device, help=RESUME)
    place, collective = places.get(waiting["line"] or 0), waiting["collective"]
    at = place or f"line {waiting['line']} of its program"
    message += f"; device {waiting['rank']} was waiting for it in {collective} at {at}"
    return TorchrunError(
        "MD0721", message, device=device, place=place, collective=collective, help=RESUME
    )
