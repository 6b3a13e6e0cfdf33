"""The torchrun engine: the emitted text on real processes, under torch's own launcher.

Nothing outlives the parent: the launcher and the workers are tethered, each to the process that
started it (Linux kills them with it, even after SIGKILL), and share one temporary folder.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshdsl import diagnostics
from meshdsl.backends.engines import stack_sampler
from meshdsl.backends.engines.failures import (
    Failure,
    RunError,
    as_error,
    first_failure,
    position_of,
)
from meshdsl.backends.engines.reports import Report, report_from_json
from meshdsl.backends.engines.watchdog import Processes, Watchdog, is_gone
from meshdsl.backends.runtime.array_files import write_npz
from meshdsl.backends.runtime.values import Array

PROCESS = ["-m", "meshdsl.backends.engines.process"]

EVERY = 0.05
"""Seconds between two looks at the reports of the processes."""

OVER = "over"
"""The file that lets failed processes end."""

PATIENCE = 3.0
"""Seconds that a launcher gets to end its workers before all are killed."""

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


@dataclass(frozen=True, slots=True)
class RunJob:
    """What the processes of a run read: files of values, the seed, the folder of their times."""

    inputs: str | None
    params: str | None
    seed: int
    timed: str | None


@dataclass(frozen=True, slots=True)
class TorchrunRun:
    """The results of a run: whole outputs, the printed text, seconds to start and run.

    `updated` are parameters and states after a step that has new ones.
    """

    outputs: dict[str, Array]
    log: str
    seconds: float
    updated: dict[str, Array] = field(default_factory=dict)


def run_torchrun(
    text: str,
    inputs: Mapping[str, Any] | str | None = None,
    params: Mapping[str, Any] | str | None = None,
    seed: int = 0,
    lines: Mapping[int, str] | None = None,
    time_limit: float | None = None,
    timed: str | None = None,
) -> TorchrunRun:
    """Run an emitted text on one process per device and return its outputs as whole arrays.

    `inputs` and `params` are arrays or the name of a file; without, values are drawn from `seed`.
    In the folder `timed` every process writes how long its lines took (`follow.timed_in`).
    Raises TorchrunError, also after `time_limit` seconds; a KeyboardInterrupt passes through. In
    every case all processes are gone afterwards.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="meshdsl-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "prog.py").write_text(text, encoding="utf-8")
        arrays = {"inputs": inputs, "params": params}
        files = {what: _file(folder / f"{what}.npz", values) for what, values in arrays.items()}
        job = RunJob(**files, seed=seed, timed=timed)
        (folder / "job.json").write_text(json.dumps(asdict(job)), encoding="utf-8")
        processes = Processes(folder, devices_of(text), lines or {})
        code = _launch(folder, processes, time_limit)
        log = (folder / "log").read_text("utf-8", errors="replace")
        if code != 0:
            raise told(text, reports_in(folder), log, lines)
        outputs = _arrays(folder / "out.npz")
        updated = _arrays(folder / "updated.npz") if (folder / "updated.npz").exists() else {}
    return TorchrunRun(outputs, log, time.monotonic() - started, updated)


def devices_of(text: str) -> int:
    """The number of devices of an emitted text."""
    assigned = (node for node in ast.parse(text).body if isinstance(node, ast.Assign))
    mesh = next(node.value for node in assigned if ast.unparse(node.targets[0]) == "MESH")
    sizes: dict[str, int] = ast.literal_eval(mesh)
    return math.prod(sizes.values())


def _arrays(path: Path) -> dict[str, Array]:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _file(path: Path, values: Mapping[str, Any] | str | None) -> str | None:
    if values is None or isinstance(values, str):
        return values and os.path.abspath(values)
    write_npz(str(path), {name: np.asarray(array) for name, array in values.items()}, durable=False)
    return str(path)


def _launch(folder: Path, processes: Processes, limit: float | None) -> int:
    """Run the program in `folder` under torchrun; returns the exit code."""
    began = time.monotonic()

    def look() -> None:
        if limit is not None and time.monotonic() - began > limit:
            message = f"the program did not end within {limit:g} seconds"
            raise TorchrunError("MD0706", message)

    return launch(processes, [*PROCESS, str(folder)], look)


def launch(
    processes: Processes, arguments: list[str], look: Callable[[], None], **environment: str
) -> int:
    """`python ARGUMENTS…` under torchrun, a process per device, watched; returns the exit code.

    `look` is called often. Whatever happens, all processes are gone afterwards.
    """
    watch, aftermath = Watchdog(processes.doing), Aftermath(processes)
    with launched(processes.folder, processes.devices, arguments, **environment) as process:
        while (code := process.poll()) is None:
            look()
            watch.look()
            aftermath.look()
            time.sleep(EVERY)
    return code


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


def reports_in(folder: Path) -> list[Report]:
    """The reports of failed processes, in rank order."""
    reports = []
    for path in folder.glob("report.rank*"):
        with contextlib.suppress(ValueError):  # cut short when its process was ended
            reports.append(report_from_json(path.read_text("utf-8")))
    return sorted(reports, key=lambda report: report["rank"])


def told(
    text: str, reports: list[Report], log: str, lines: Mapping[int, str] | None
) -> TorchrunError:
    """The one error to report to the user."""
    for report in reports:
        if report["exit"] == 2:
            return TorchrunError(report["code"], report["message"])
    return earliest_of(text, reports, lines) if reports else unexplained(log)


def unexplained(log: str) -> TorchrunError:
    """The error where no process has left a report: the end of the log."""
    tail = "\n".join(log.strip().splitlines()[-20:])
    return TorchrunError("MD0705", f"torchrun failed and no process said why:\n{tail}")


def earliest_of(text: str, reports: list[Report], lines: Mapping[int, str] | None) -> TorchrunError:
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
