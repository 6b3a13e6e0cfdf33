"""The torchrun engine: emitted texts on real processes, under torch's own launcher.

Nothing outlives the parent: the launcher and the workers are tethered, each to the process that
started it (Linux kills them with it, even after SIGKILL), and share one temporary folder.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, TypedDict

from meshdsl import diagnostics
from meshdsl.backends.engines import stack_sampler
from meshdsl.backends.engines.failures import (
    Failure,
    RunError,
    as_error,
    first_failure,
    place_of,
    position_of,
)
from meshdsl.backends.engines.in_process import Emitted
from meshdsl.backends.engines.watchdog import Processes, Watchdog, is_gone
from meshdsl.diagnostics import Diagnostic, DiagnosticError
from meshdsl.disk_cache import from_json

WORKER = ["-m", "meshdsl.backends.worker"]

EVERY = 0.05
"""Seconds between two looks at the reports of the processes."""

JOB, TOLD, OVER = "job.json", "told", "over"
"""Files: the job, the lines that device 0 writes meanwhile, the permission for failed processes to
end."""

PATIENCE = 3.0
"""Seconds that a launcher gets to end its workers before all are killed."""

ROOT_CAUSE = "Root Cause (first observed failure)"

TETHER = """\
# Become the command in the arguments, and die with the process that started this one.
import ctypes, os, signal, sys
parent, command = int(os.environ["MESHDSL_PARENT"]), sys.argv[1:]
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it could be watched
        sys.exit(1)
os.environ["MESHDSL_PARENT"] = str(os.getpid())
os.execv(command[0], command)
"""


class TorchrunError(RunError):
    """A run under torchrun that failed."""


class Told(TypedDict):
    """A diagnostic, less its place."""

    code: str
    message: str
    help: str | None


class Report(TypedDict):
    """How a process failed: `code` is that of a diagnostic where it refused the run.

    `collective` is the one it was in, where it is known.
    """

    rank: int
    kind: str
    message: str
    code: str | None
    line: int | None
    loops: dict[str, int]
    position: Any
    in_collective: bool
    collective: str
    diagnostics: list[Told]


TERMINATED = "Terminated"
"""The kind of the failure of a process that torchrun has ended, since another one had failed."""


def devices_of(text: str) -> int:
    """The number of devices of an emitted text."""
    assigned = (node for node in ast.parse(text).body if isinstance(node, ast.Assign))
    mesh = next(node.value for node in assigned if ast.unparse(node.targets[0]) == "MESH")
    sizes: dict[str, int] = ast.literal_eval(mesh)
    return math.prod(sizes.values())


class Launcher:
    """A job on a process for each device of the emitted texts, all of which share `folder`.

    `kind` is the work that they do, of `worker.WORK`. It is a context: at its end the folder is
    gone.
    """

    def __init__(self, kind: str, emitted: Emitted) -> None:
        self.kind, self.emitted = kind, emitted
        self.devices, self.code = devices_of(emitted.program.text), 0

    def __enter__(self) -> Launcher:
        self._temporary = tempfile.TemporaryDirectory("", "meshdsl-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        self.emitted.write(self.folder)
        (self.folder / TOLD).touch()
        return self

    def __exit__(self, *error: object) -> None:
        self._temporary.cleanup()

    def run(
        self,
        job: Any,
        hear: Callable[[str], None] = lambda line: None,
        look: Callable[[], None] = lambda: None,
        **environment: str,
    ) -> int:
        """Do a job, a dataclass of plain data; returns the exit code, of which 0 is success.

        `hear` gets every line that device 0 tells, `look` is called often. Whatever happens, all
        processes are gone afterwards.
        """
        (self.folder / JOB).write_text(json.dumps(asdict(job)), encoding="utf-8")
        processes = Processes(self.folder, self.devices, self.emitted.places)
        watch, aftermath = Watchdog(processes.doing), Aftermath(processes)
        arguments = [*WORKER, self.kind, str(self.folder)]
        with (
            open(self.folder / TOLD, encoding="utf-8", errors="replace") as told,
            launched(self.folder, self.devices, arguments, **environment) as process,
        ):
            while (code := process.poll()) is None:
                relay(told, hear)
                look()
                watch.look()
                aftermath.look()
                time.sleep(EVERY)
            relay(told, hear)
        self.code = code
        return code

    @property
    def error(self) -> TorchrunError | DiagnosticError:
        """The one error to report to the user."""
        if self.code < 0:
            message = f"torchrun was killed by signal {-self.code}, its processes with it"
            return TorchrunError("MD0721", message)
        log = (self.folder / "log").read_text("utf-8", errors="replace")
        return error_of(self.emitted, self.devices, reports_in(self.folder), log)


def relay(told: IO[str], hear: Callable[[str], None]) -> None:
    """Pass on the lines that were written since the last time."""
    start = told.tell()
    while (line := told.readline()).endswith("\n"):
        hear(line)
        start = told.tell()
    told.seek(start)  # the last line is being written just now


class Aftermath:
    """Lets failed processes end once no other process can fail by itself.

    So the reported error does not depend on which process was faster.
    """

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self._waiting: dict[int, tuple[int, int]] = {}

    def look(self) -> None:
        """Call this often."""
        folder = self.processes.folder
        failed = {int(path.suffix.removeprefix(".rank")) for path in folder.glob("report.rank*")}
        if not failed or (folder / OVER).exists():
            return
        if all(rank in failed or self._is_past(rank) for rank in range(self.processes.devices)):
            (folder / OVER).touch()

    def _is_past(self, rank: int) -> bool:
        """Whether a process is gone, or has reported twice that it waits in the same call."""
        report = self.processes.report(rank)
        if report is None:
            return False
        if is_gone(report["pid"]):
            return True
        if not report["collective"]:
            return False
        mark, beat = self._waiting.get(rank, (None, 0))
        if mark != report["mark"]:
            self._waiting[rank] = report["mark"], report["beat"]
            return False
        return int(report["beat"]) > beat + 1


@contextlib.contextmanager
def launched(
    folder: Path, devices: int, arguments: list[str], **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A running `torchrun`: `python ARGUMENTS…` on `devices` processes, all gone at the end.

    They can import this package. Their output goes to `folder/log`, their activity to other files
    there.
    """
    (folder / "tether.py").write_text(TETHER, encoding="utf-8")
    tethered = [sys.executable, str(folder / "tether.py"), sys.executable]
    # What it keeps for itself would else lie beside the folder, and stay.
    log_options = ["--log-dir", str(folder / "torchrun")]
    launcher = ["-m", "torch.distributed.run", "--standalone", *log_options]
    launcher += ["--nproc-per-node", str(devices)]
    worker = ["--no-python", *tethered, "-P", stack_sampler.__file__, str(folder), *arguments]
    home = str(Path(diagnostics.__file__).parent.parent)
    paths = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
    with (
        open(folder / "log", "wb") as log,
        subprocess.Popen(
            [*tethered, *launcher, *worker],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables, "MESHDSL_PARENT": str(os.getpid())},
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher, which ends its workers; if it does not, kill it and them with it."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


# --- failures ------------------------------------------------------------------------------------


def reports_in(folder: Path) -> list[Report]:
    """The reports of failed processes, in rank order."""
    reports = []
    for path in folder.glob("report.rank*"):
        with contextlib.suppress(ValueError):  # cut short when its process was ended
            reports.append(from_json(path.read_text("utf-8"), Report))
    return sorted(reports, key=lambda report: report["rank"])


def error_of(
    emitted: Emitted, devices: int, reports: list[Report], log: str
) -> TorchrunError | DiagnosticError:
    """The one error to report to the user, from the processes' reports and torchrun's log."""
    reporting = {report["rank"] for report in reports}
    victim = _signalled(log)
    if victim is not None and victim not in reporting:
        return _killed(victim, reports, emitted.places)
    for report in reports:
        if told := report["diagnostics"]:
            return DiagnosticError(*(Diagnostic(**diagnostic) for diagnostic in told))
        if report["code"] is not None:
            return TorchrunError(report["code"], report["message"])
    causes = [report for report in reports if not report["in_collective"]]
    silent = sorted(set(range(devices)) - reporting)
    if reports and silent and not causes:
        return _killed(silent[0], reports, emitted.places)
    failed = causes or [report for report in reports if report["kind"] != TERMINATED]
    return earliest_of(emitted.text, failed, emitted.places) if failed else unexplained(log)


def _signalled(log: str) -> int | None:
    """The device whose process was the first to end, if a signal ended it, as torchrun logs it."""
    found = re.search(r"rank\s*:\s*(\d+).*?exitcode\s*:\s*-\d", log.partition(ROOT_CAUSE)[2], re.S)
    return int(found[1]) if found else None


def _killed(device: int, reports: list[Report], places: Mapping[int, str]) -> TorchrunError:
    """The error of a process that ended without a report, and where another waited for it."""
    message = f"the process of device {device} was killed"
    waiting = next((r for r in reports if r["line"] and r["collective"]), None)
    if waiting is None:
        return TorchrunError("MD0721", message, device=device)
    place, collective = places.get(waiting["line"] or 0), waiting["collective"]
    at = place_of(places, waiting["line"])
    message += f"; device {waiting['rank']} was waiting for it in {collective} at {at}"
    return TorchrunError("MD0721", message, device=device, place=place, collective=collective)


def unexplained(log: str) -> TorchrunError:
    """The error where no process has left a report: the end of the log."""
    tail = "\n".join(log.strip().splitlines()[-20:])
    return TorchrunError("MD0705", f"torchrun failed and no process said why:\n{tail}")


def earliest_of(text: str, reports: list[Report], lines: Mapping[int, str]) -> TorchrunError:
    """The first reported failure in program order."""
    first = first_failure(text, [_failure(report) for report in reports])
    code, message, details = as_error(first, lines)
    return TorchrunError(code, message, **details)


def _failure(report: Report) -> Failure:
    """The report of a failed process as a `Failure`."""
    return Failure(
        report["rank"],
        report["kind"],
        report["message"],
        report["line"],
        report["loops"],
        position_of(report["position"]),
        consequence=report["in_collective"],
    )
