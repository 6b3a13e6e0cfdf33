"""Training in this process: every device of the mesh is a thread of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from meshdsl.backends.engines.execution import read_checked
from meshdsl.backends.engines.failures import RunError
from meshdsl.backends.engines.in_process import MOST_DEVICES, LoadedProgram, load
from meshdsl.backends.engines.local_devices import DeviceThreads, LocalRunError
from meshdsl.backends.engines.local_dist import LocalDist
from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.torch.emitter import ProgramText
from meshdsl.backends.train.data import open_data
from meshdsl.backends.train.export import export_params
from meshdsl.backends.train.job import Ending, Job, Tell
from meshdsl.backends.train.trainer import Control, Texts, Trainer
from meshdsl.diagnostics import DiagnosticError


@dataclass(frozen=True, slots=True)
class Emitted:
    """The text that trains and the one that evaluates (None: not wanted).

    Their lines are numbered as if the second followed the first.
    """

    training: ProgramText
    evaluation: ProgramText | None = None

    @property
    def text(self) -> str:
        """Both texts."""
        return self.training.text + (self.evaluation.text if self.evaluation else "")

    @property
    def places(self) -> dict[int, str]:
        """The source places of the lines of both."""
        places = dict(self.training.places)
        if self.evaluation is not None:
            below = self.training.text.count("\n")
            places |= {line + below: place for line, place in self.evaluation.places.items()}
        return places

    def load(self) -> Texts:
        """Both texts as modules."""
        training, evaluation = load(self.training.text), None
        if self.evaluation is not None:
            evaluation = load(self.evaluation.text, self.training.text.count("\n"))
        return Texts(training, evaluation, self.training.text)


def groups_of(texts: Texts) -> tuple[tuple[str, ...], ...]:
    """The sets of axes that either program's collectives run over, and all axes."""
    programs = (texts.training, texts.evaluation)
    axis_sets = {axes for program in programs if program is not None for axes in program.GROUPS}
    return tuple(sorted(axis_sets | {tuple(texts.training.MESH)}))


def check_params(program: LoadedProgram, path: str | None) -> None:
    """Refuse a file of initial values that does not fit the program. Raises DiagnosticError."""
    if path is None:
        return
    read_checked(path, program.PARAMS, "parameters")


def train_local(emitted: Emitted, job: Job, tell: Tell, stopping: Callable[[], bool]) -> Ending:
    """Train on threads; returns the outcome.

    Raises LocalRunError and DiagnosticError; a KeyboardInterrupt passes through once all devices
    are released.
    """
    texts = emitted.load()
    program, mesh = texts.training, texts.training.MESH
    devices = math.prod(mesh.values())
    if devices > MOST_DEVICES:
        message = f"the local engine runs at most {MOST_DEVICES} devices, not {devices}"
        raise LocalRunError("MD0704", message, help="choose a smaller mesh with --mesh")
    check_params(program, job.params)
    data = open_data(job.data, program.INPUTS, job.seed)
    dist = LocalDist(mesh, groups_of(texts), emitted.places)
    for each in (texts.training, texts.evaluation):
        if each is not None:
            each.dist = dist
    trainers: dict[int, Trainer] = {}

    def call(rank: int) -> Ending:
        control = Control(tell, stopping, lambda: running.mark(rank))
        ranks = Ranks(mesh, rank, dist, dist.groups(rank))
        trainers[rank] = Trainer(ranks, texts, job, data, control)
        return trainers[rank].run()

    running = DeviceThreads(devices, dist, call, emitted.text)
    ending = _ending(running.run())
    if job.out is not None and ending.trouble is None:
        values = {rank: trainer.held.values() for rank, trainer in trainers.items()}
        export_params(values, job.out, trainers[0].held.value_specs, mesh)
    return ending


def _ending(found: DeviceThreads) -> Ending:
    """The outcome of a run whose devices have ended. Raises the error of a failed one."""
    for rank in sorted(found.errors):
        if isinstance(found.errors[rank], DiagnosticError | RunError):
            raise found.errors[rank]
    found.check()
    ending: Ending = found.outputs[0]
    return ending
