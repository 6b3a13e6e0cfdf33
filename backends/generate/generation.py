"""Generating on an engine: every device a thread of this process, or a process under torchrun."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path

from meshdsl.backends.engines.execution import line_of, refuse_too_large
from meshdsl.backends.engines.failures import RunError
from meshdsl.backends.engines.reports import token_from_json
from meshdsl.backends.generate.task import Task, Tell
from meshdsl.backends.runtime.array_files import ArraysRefused, Refused, check_arrays, read_arrays
from meshdsl.backends.torch.emitter import ProgramText
from meshdsl.diagnostics import Diagnostic, DiagnosticError, fail
from meshdsl.pipeline import Compilation

ENGINES = ("local", "torchrun")
WORKER = ["-m", "meshdsl.backends.generate.decoder_process"]


def generate(made: Compilation, engine: str, task: Task, tell: Tell) -> None:
    """Run the one-step program; `tell` gets every new token. Raises DiagnosticError."""
    refuse_too_large(made, engine, None)
    try:
        _ENGINES[engine](made.emitted, task, tell)
    except RunError as error:
        diagnostic = replace(error.diagnostic, span=line_of(error.place, made.source))
        raise DiagnosticError(diagnostic) from error


def checked_params(made: Compilation, path: str, states: tuple[str, ...]) -> list[Diagnostic]:
    """Refuse parameters that do not fit (MD0504) or cannot be read (MD0505); notes on rounded ones.

    States begin anew, and what else the file has is of another program of the model.
    """
    from meshdsl.backends.draws import draws
    from meshdsl.backends.engines.reference import whole_specs

    specs = whole_specs(made.named, draws(made.named))[1]
    specs = {name: spec for name, spec in specs.items() if name not in states}
    try:
        arrays = {n: a for n, a in read_arrays(path).items() if n in specs}
        notes = check_arrays(arrays, specs, "parameters")
    except ArraysRefused as refused:
        help = "both programs call a parameter alike, and have it of one size: `--set`, as trained"
        fail("MD0504", str(refused), help=help)
    except Refused as refused:
        fail("MD0505", str(refused), help="name the folder of a checkpoint, or what `--out` wrote")
    return [Diagnostic("MD0506", note, severity="note") for note in notes]


def _local(emitted: ProgramText, task: Task, tell: Tell) -> None:
    import torch

    from meshdsl.backends.engines.in_process import load
    from meshdsl.backends.engines.local_devices import DeviceThreads
    from meshdsl.backends.engines.local_dist import LocalDist
    from meshdsl.backends.engines.ranks import Ranks
    from meshdsl.backends.generate.decoding import Speaker, groups_of

    program = load(emitted.text)
    mesh = program.MESH
    dist = program.dist = LocalDist(mesh, groups_of(program), emitted.places)

    def call(rank: int) -> list[int]:
        with torch.inference_mode():
            return Speaker(Ranks(mesh, rank, dist, dist.groups(rank)), program, task, tell).run()

    DeviceThreads(math.prod(mesh.values()), dist, call, emitted.text).run().check()


def _torchrun(emitted: ProgramText, task: Task, tell: Tell) -> None:
    from meshdsl.backends.engines.torchrun import devices_of, launch, reports_in, told
    from meshdsl.backends.engines.watchdog import Processes

    with tempfile.TemporaryDirectory(prefix="meshdsl-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "prog.py").write_text(emitted.text, encoding="utf-8")
        (folder / "job.json").write_text(task.to_json(), encoding="utf-8")
        (folder / "tokens").touch()
        processes = Processes(folder, devices_of(emitted.text), emitted.places)
        with open(folder / "tokens", encoding="utf-8") as tokens:

            def look() -> None:
                start = tokens.tell()
                while (line := tokens.readline()).endswith("\n"):
                    tell(token_from_json(line))
                    start = tokens.tell()
                tokens.seek(start)  # the last line is being written just now

            code = launch(processes, [*WORKER, str(folder)], look)
            look()
        if code != 0:
            log = (folder / "log").read_text("utf-8", errors="replace")
            raise told(emitted.text, reports_in(folder), log, emitted.places)


_ENGINES = {"local": _local, "torchrun": _torchrun}
