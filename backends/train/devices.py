"""Training on every device of a mesh: a thread of this process each, or a process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from meshdsl.backends.engines.execution import read_checked
from meshdsl.backends.engines.in_process import Emitted, LoadedProgram, LocalSession
from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.engines.torchrun import Launcher
from meshdsl.backends.train.batches import Data
from meshdsl.backends.train.data import open_data
from meshdsl.backends.train.events import heard
from meshdsl.backends.train.exported_params import export_params
from meshdsl.backends.train.job import Ending, Job, Tell
from meshdsl.backends.train.trainer import Control, Trainer
from meshdsl.disk_cache import from_json


def train_local(emitted: Emitted, job: Job, tell: Tell, stopping: Callable[[], bool]) -> Ending:
    """Train on threads; returns the outcome.

    Raises LocalRunError and DiagnosticError; a KeyboardInterrupt passes through once all devices
    are released.
    """
    programs = emitted.load()
    session = LocalSession(programs)
    data = _opened(job, programs.program)
    trainers: dict[int, Trainer] = {}

    def train(ranks: Ranks) -> Ending:
        control = Control(tell, stopping, lambda: session.mark(ranks.rank))
        trainer = trainers[ranks.rank] = Trainer(ranks, programs, job, data, control)
        return trainer.run()

    ending = session.run(train)[0]
    if job.out is not None and ending.trouble is None:
        values = {rank: trainer.held.values() for rank, trainer in trainers.items()}
        specs = trainers[0].held.value_specs
        export_params(values, job.out, specs, programs.mesh, job.weights)
    return ending


def train_torchrun(emitted: Emitted, job: Job, tell: Tell, stopping: Callable[[], bool]) -> Ending:
    """Train on processes; returns the outcome.

    Raises TorchrunError and DiagnosticError; a KeyboardInterrupt passes through. In every case all
    processes are gone afterwards.
    """
    program = emitted.load().program
    _opened(job, program)  # refused here, it costs no start of processes
    with Launcher("train", emitted) as launcher:

        def look() -> None:
            if stopping():
                (launcher.folder / "stop").touch()

        threads = str(max(1, (os.cpu_count() or 1) // launcher.devices))
        launcher.run(
            job, lambda line: tell(heard(line, program.LOSS)), look, OMP_NUM_THREADS=threads
        )
        ending = ending_in(launcher.folder)
        if ending is None:
            raise launcher.error
        return ending


def ending_in(folder: Path) -> Ending | None:
    """The ending that device 0 has written; None where there is none, or only a part of it."""
    try:
        return from_json((folder / "ending.json").read_text("utf-8"), Ending)
    except (FileNotFoundError, ValueError):
        return None


def _opened(job: Job, program: LoadedProgram) -> Data:
    """The data of a job. Raises DiagnosticError, also for initial values that do not fit."""
    if job.params is not None:
        read_checked(job.params, program.PARAMS, "parameters")
    return open_data(job.data, program.INPUTS, job.seed)
