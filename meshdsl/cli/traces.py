"""Traces of runs: the folder where processes write what they timed, and the file made of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshdsl.cli import common
from meshdsl.option_edits import give, leave_out, refuse
from meshdsl.output_files import write_whole
from meshdsl.pipeline import Compilation


@contextmanager
def timed(out: Path | None, engine: str, force: bool) -> Iterator[str | None]:
    """A folder for what is timed, if a trace is to be written.

    Raises MD0633 for an engine whose devices are not processes, MD0502 and MD0503 for the file.
    """
    if out is None:
        yield None
        return
    if engine != "torchrun":
        message = f"`--trace` with `--engine {engine}`, whose devices share one process"
        fixes = [give("--engine", "torchrun", safe=False), leave_out("--trace", safe=False)]
        refuse("MD0633", message, fixes)
    common.check_output(out, force)
    with tempfile.TemporaryDirectory(prefix="meshdsl-timed-") as folder:
        yield folder


def write_measured(out: Path, made: Compilation, folder: str | None) -> bool:
    """Write the trace of what was timed in `folder`; whether anything was."""
    from meshdsl.backends.engines.line_profiler import timed_in
    from meshdsl.simulate.measured_trace import measured_trace
    from meshdsl.simulate.trace import trace_text

    assert folder is not None, "a trace is asked for"
    timed_lines = timed_in(folder)
    if timed_lines:
        options = made.options
        about = (options.evaluate, options.measured)
        trace = measured_trace(made.device, made.emitted.nodes, timed_lines, *about)
        write_whole(out, trace_text(trace))
    return bool(timed_lines)
