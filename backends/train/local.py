"""Training in this process: every device of the mesh is a thread of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from meshdsl.backends.engines.in_process import (
    MOST_DEVICES,
    LocalRunError,
    Program,
    load,
    told,
)
from meshdsl.backends.engines.local_devices import Devices
from meshdsl.backends.engines.local_dist import LocalDist
from meshdsl.backends.runtime.files import ArraysRefused, Refused, check_arrays, read_arrays
from meshdsl.backends.torch.text import ProgramText
from meshdsl.backends.train.checkpoint import Sharing
from meshdsl.backends.train.checkpoint_export import export_params
from meshdsl.backends.train.data import Data, open_data
from meshdsl.backends.train.job import Ending, Job, Tell
from meshdsl.backends.train.loop import Control, Texts, Trainer
from meshdsl.backends.train.state import Held
from meshdsl.backends.train.team import Team
from meshdsl.diagnostics import Diagnostic, DiagnosticError, fail


@dataclass(frozen=True, slots=True)
class Emitted:
    """The text that trains and the one that evaluates (None: it is not asked for).

    Their lines are numbered as if the second stood below the first.
    """

    training: ProgramText
    evaluation: ProgramText | None = None

    @property
    def text(self) -> str:
        """Both texts."""
        return self.training.text + (self.evaluation.text if self.evaluation else "")

    @property
    def places(self) -> dict[int, str]:
        """The source places behind the lines of both."""
        found = dict(self.training.places)
        if self.evaluation is not None:
            below = self.training.text.count("\n")
            found |= {line + below: place for line, place in self.evaluation.places.items()}
        return found

    def load(self) -> Texts:
        """Both texts as modules."""
        training, evaluation = load(self.training.text), None
        if self.evaluation is not None:
            evaluation = load(self.evaluation.text, self.training.text.count("\n"))
        return Texts(training, evaluation, self.training.text)


def groups_of(texts: Texts) -> tuple[tuple[str, ...], ...]:
    """The sets of axes that either program's collectives run over, and all axes."""
    programs = (texts.training, texts.evaluation)
    found = {axes for program in programs if program is not None for axes in program.GROUPS}
    return tuple(sorted(found | {tuple(texts.training.MESH)}))


def check_params(program: Program, path: str | None) -> None:
    """Refuse a file of initial values that does not fit the program. Raises DiagnosticError."""
    if path is None:
        return
    try:
        check_arrays(read_arrays(path), program.PARAMS, "parameters")
    except ArraysRefused as refused:
        help = "give every parameter under its name, with these shapes and dtypes"
        fail("MD0504", str(refused), help=help)
    except Refused as refused:
        fail(
            "MD0505",
            str(refused),
            help="numpy.savez(path, name=array, …) writes a file that is read",
        )


def train_local(emitted: Emitted, job: Job, tell: Tell, stopping: Callable[[], bool]) -> Ending:
    """Train on threads, and say how it ended.

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
    held = Held(program, job, data, Sharing(tuple(range(devices)), mesh))
    tell_all((*data.notes, *held.begin()), tell)
    dist = LocalDist(mesh, groups_of(texts), emitted.places)
    for each in (texts.training, texts.evaluation):
        if each is not None:
            each.dist = dist
    ending = _run(emitted, _Run(texts, job, data, held, dist), tell, stopping)
    if job.out is not None and ending.trouble is None:
        values = {rank: held.values(rank) for rank in held.ranks}
        export_params(values, job.out, held.value_specs, mesh)
    return ending


@dataclass(frozen=True, slots=True)
class _Run:
    """What the threads of one run share."""

    texts: Texts
    job: Job
    data: Data
    held: Held
    dist: LocalDist


def _run(emitted: Emitted, run: _Run, tell: Tell, stopping: Callable[[], bool]) -> Ending:
    mesh = run.texts.training.MESH
    world = "+".join(mesh)

    def call(rank: int) -> Ending:
        groups = run.dist.groups(rank)
        team = Team(rank, mesh, run.dist, groups, groups[world], leads=rank == 0)
        control = Control(tell, stopping, lambda: devices.mark(rank))
        return Trainer(team, run.texts, run.job, run.data, run.held, control).run()

    devices = Devices(len(run.held.ranks), run.dist, call, emitted.text)
    found = devices.run()
    for error in found.errors.values():
        if isinstance(error, DiagnosticError):
            raise error
    if found.failures:
        raise told(emitted.text, found.failures, found.errors, emitted.places)
    ending: Ending = found.outputs[0]
    return ending


def tell_all(notes: tuple[Diagnostic, ...], tell: Tell) -> None:
    """Tell of warnings and notes."""
    for note in notes:
        known = {"code": note.code, "severity": note.severity, "help": note.help}
        tell({"kind": "note", "text": note.message, **known})
