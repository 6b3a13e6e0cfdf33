"""Generating on an engine: every device a thread of this process, or a process under torchrun."""

from __future__ import annotations

from dataclasses import replace

from meshdsl.backends.engines.execution import line_of, refuse_too_large
from meshdsl.backends.engines.failures import RunError
from meshdsl.backends.engines.in_process import Emitted, LocalSession
from meshdsl.backends.engines.torchrun import Launcher
from meshdsl.backends.generate.task import Task, Tell
from meshdsl.backends.runtime.array_files import ArraysRefused, Refused, check_arrays, read_arrays
from meshdsl.diagnostics import Diagnostic, DiagnosticError, fail
from meshdsl.disk_cache import from_json
from meshdsl.pipeline import Compilation

ENGINES = ("local", "torchrun")


def generate(made: Compilation, engine: str, task: Task, tell: Tell) -> None:
    """Run the one-step program; `tell` gets every new token. Raises DiagnosticError."""
    refuse_too_large(made, engine, None)
    try:
        _ENGINES[engine](Emitted(made.emitted), task, tell)
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


def _local(emitted: Emitted, task: Task, tell: Tell) -> None:
    from meshdsl.backends.generate.decoding import Speaker

    programs = emitted.load()
    LocalSession(programs).run(lambda ranks: Speaker(ranks, programs.program, task, tell).run())


def _torchrun(emitted: Emitted, task: Task, tell: Tell) -> None:
    with Launcher("generate", emitted) as launcher:
        if launcher.run(task, lambda line: tell(from_json(line, int))) != 0:
            raise launcher.error


_ENGINES = {"local": _local, "torchrun": _torchrun}
