"""A training run from a compilation to its outcome: checks, resuming, engines, errors."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from meshdsl.backends.engines.execution import errors_at, line_of, refuse_too_large
from meshdsl.backends.engines.in_process import Emitted
from meshdsl.backends.train.job import RESUME, Ending, Job, Tell, Trouble
from meshdsl.diagnostics import (
    Diagnostic,
    DiagnosticError,
    OptionEdit,
    Source,
    advice,
    counted,
    fail,
)
from meshdsl.option_edits import give, leave_out, refuse
from meshdsl.records import dataclass

if TYPE_CHECKING:
    from meshdsl.pipeline import Compilation

ENGINES = ("local", "torchrun", "reference")


def check_together(job: Job) -> None:
    """Refuse options whose required companions are missing. Raises MD0516."""
    folder, often = "name the folder: `--checkpoint DIR`", "say how often: `--eval-every 100`"
    needs = {
        "--resume": (job.resume, "--checkpoint", job.checkpoint, folder),
        "--checkpoint-every": (job.checkpoint_every, "--checkpoint", job.checkpoint, folder),
        "--eval-data": (job.data.held_out, "--eval-every", job.eval_every, often),
    }
    for name, (is_given, needed, there, other) in needs.items():
        if is_given and not there:
            fix = leave_out(name, safe=False)
            refuse("MD0516", f"`{name}` does nothing without `{needed}`", fix, other)


def check_trainable(made: Compilation) -> None:
    """Refuse a program that has nothing to train. Raises MD0510."""
    program = made.named
    if program.goal is not None:
        return
    help = "add a line to it: `minimize loss with adam(lr=0.001)`, where `loss` is one number"
    message = f"program `{program.name}` does not say what to minimize"
    fail("MD0510", message, program.span, help=help)


def accumulate_dim(made: Compilation) -> str | None:
    """The dim that inputs gain for the batches of one step, where there are several."""
    goal = made.named.goal
    assert goal is not None, "the program is trainable"
    if goal.optimizer.options["accumulate"] == 1:
        return None
    from meshdsl.named.accumulate import DIM

    firsts = {value.type.names[0] for value in made.named.inputs}
    (dim,) = firsts
    assert isinstance(dim, str)
    assert dim.startswith(DIM), f"{dim} is no dim for several batches"
    return dim


def check_folder(
    folder: str | None, resume: bool, force: bool, written: Sequence[str] = ()
) -> None:
    """Refuse a folder of checkpoints of another run, or one without any to resume from.

    `written` are the other files that a run writes as it goes. Where there is one, the run was
    stopped before its first checkpoint, and would not be begun again without `--force`.
    """
    if folder is None:
        return
    from meshdsl.backends.train.checkpoint import POINTER, names

    try:
        there = names(Path(folder))
    except OSError as error:
        message = f"{folder} cannot be used for checkpoints: {error.strerror}"
        fail("MD0502", message, help="name another folder; it is made where there is none")
    latest = Path(folder, POINTER)
    if latest.is_dir():
        held = f": {folder} holds {', '.join(there)}" if there else ""
        message = f"{latest} is a folder, and checkpoints are listed in a file of that name{held}"
        help = f"move it elsewhere: `mv {latest} {latest}.old`; the newest checkpoint is found "
        fail("MD0502", message, help=f"{help}without the list")
    if resume and not there:
        left = [] if force else [path for path in written if os.path.lexists(path)]
        anew = leave_out("--resume", safe=False)
        if left:
            anew = replace(
                anew,
                title=f"begin anew: `--force` in place of `--resume` replaces {' and '.join(left)}",
                options=(*anew.options, OptionEdit("--force", True)),
            )
        other = "name the folder that holds the checkpoints"
        refuse("MD0514", f"there is no checkpoint in {folder}", anew, other)
    if there and not resume and not force:
        fixes = [give("--resume", safe=False), give("--force", safe=False)]
        message = f"{folder} holds checkpoints of a run already: {there[0]}"
        why = "the first continues that run, the second begins anew and replaces its checkpoints"
        help = f"{advice(fixes)}: {why}"
        raise DiagnosticError(Diagnostic("MD0515", message, help=help, fixes=tuple(fixes)))


@contextmanager
def own_folder(
    folder: str | None, resume: bool, force: bool, written: Sequence[str] = ()
) -> Iterator[None]:
    """Lock the folder of checkpoints, if it is one for this run: see `check_folder`."""
    from meshdsl.backends.train.lock import locked

    check_folder(folder, resume, force, written)
    with terminated_in_order(), locked(folder):
        check_folder(folder, resume, force, written)  # another run may have ended meanwhile
        yield


@dataclass(frozen=True)
class TrainingPlan:
    """What an engine trains: the texts, and `made`, the compilation that they are the texts of.

    The reference engine has one device, whatever is `asked` for.
    """

    asked: Compilation
    made: Compilation
    emitted: Emitted


def _check_alone() -> None:
    """Refuse to be one of the processes of a torchrun, each of which would train by itself."""
    count = os.environ.get("WORLD_SIZE", "")
    if "TORCHELASTIC_RUN_ID" in os.environ and count.isdigit() and int(count) > 1:
        help = (
            "start it without torchrun: on one machine `--engine torchrun` starts the processes; "
            "on several, use `md.module` in a loop, as examples/train_module.py does"
        )
        message = f"this is one of {count} processes of torchrun; each would train alone"
        fail("MD0725", message, help=help)


def planned(asked: Compilation, engine: str, evaluated: bool) -> TrainingPlan:
    """What an engine trains, and evaluates if wanted.

    Raises MD0335, MD0337, MD0703, MD0704 and MD0725.
    """
    _check_alone()
    if engine != "reference":
        refuse_too_large(asked, engine, None)
        evaluation = asked.evaluation.emitted if evaluated else None
        warmup = None if asked.warmup is None else asked.warmup.emitted
        assert asked.warmup is None or _stored_alike(asked, asked.warmup), "states differ"
        return TrainingPlan(asked, asked, Emitted(asked.emitted, evaluation, warmup))
    from meshdsl.backends.train.reference_run import on_one_device, referred

    one = on_one_device(asked)
    return TrainingPlan(asked, one, referred(asked, one, evaluated))


def _stored_alike(made: Compilation, warmup: Compilation) -> bool:
    """Whether what the step of the warm-up stores is placed as the later steps read it."""
    later, first = (
        {t.value.label: t.placement for t in (*(p.tensor for p in placed.params), *placed.states)}
        for placed in (made.placed, warmup.placed)
    )
    return first.items() <= later.items()


def prepared(plan: TrainingPlan, job: Job, seed: int | None) -> Job:
    """The job with the program's description for checkpoints, resumed where it is to be.

    Raises MD0511 if there are to be evaluations and nothing is held out.
    """
    from meshdsl.device.memory import memory

    if job.eval_every and not job.data.fraction and job.data.held_out is None:
        part = give("--eval-fraction", "0.1", safe=False)
        other = "name other data: `--val F`"
        refuse("MD0511", "nothing is held out to evaluate", part, other)

    compilation = plan.made
    goal = compilation.named.goal
    assert goal is not None, "the program is trainable"
    # The reference engine holds all values of a step at once.
    predicted = 0
    if plan.asked is compilation:
        steps = (step for step in (compilation, compilation.warmup) if step is not None)
        predicted = max(memory(step.device)["peak"] for step in steps)
    compress = goal.optimizer.compress
    warmup = 0 if compress is None else compress.warmup
    about, rate, updates = _about(plan), goal.optimizer.lr, compilation.updates
    resumed = _resumed(job, seed)
    resumed = replace(resumed, about=about, rate=rate, updates=updates)
    return replace(resumed, warmup=warmup, predicted=predicted)


def _about(plan: TrainingPlan) -> dict[str, Any]:
    """A checkpoint's description of its program, and of the plan that devices follow."""
    from meshdsl.device.printer import fingerprint
    from meshdsl.placed.printer import mesh_text
    from meshdsl.version import __version__

    placed, device = plan.asked.placed, plan.made.device
    said = {"layout": placed.layout, "mesh": mesh_text(placed.mesh), "meshdsl": __version__}
    rule = {"plan": fingerprint(device), "rule": _rule(plan)}
    return {"program": placed.named.name, **said, **rule}


def _rule(plan: TrainingPlan) -> str:
    """What the numbers of a step depend on beside the program, up to rounding.

    Of a table that the file declares it has a hash: another one may have the same name.
    """
    from meshdsl.placed.worker_parts import workers

    rule, placed = "one update a step", plan.asked.placed
    if plan.asked.asynchronous and placed.pipe is not None and placed.pipe.use is not None:
        use, stages = placed.pipe.use, placed.pipe.stages(placed.mesh)
        rule = f"updates on the way by {use} in {counted(stages, 'stage')}"
        if use.table is not None:
            rows = use.table.schedule.text.encode()
            rule += f", of the rows {sha256(rows).hexdigest()[:8]}"
    if number := workers(plan.made.placed):
        goal = plan.made.named.goal
        assert goal is not None, "what is compressed is a gradient or its momentum"
        compress = goal.optimizer.compress
        of_momentum = compress is not None and compress.is_of_momentum
        compressed = "the momentum" if of_momentum else "gradients"
        rule += f", {compressed} compressed by {counted(number, 'worker')}"
    return rule


def _resumed(job: Job, seed: int | None) -> Job:
    """The job with the seed and the vocabulary of the checkpoint it resumes from."""
    if not job.resume:
        return replace(job, seed=seed or 0)
    from meshdsl.backends.train.checkpoint import Checkpoints

    assert job.checkpoint is not None
    checkpoint = Checkpoints(job.checkpoint).latest()
    assert checkpoint is not None, "the folder was looked into"
    begun = checkpoint.meta.get("seed", 0)
    if seed is not None and seed != begun:
        message = f"`--seed {seed}`: the run was begun with seed {begun}, and goes on with it"
        refuse("MD0516", message, leave_out("--seed"))
    data = replace(job.data, vocabulary=checkpoint.meta.get("vocabulary"))
    return replace(job, seed=begun, data=data)


def train(
    emitted: Emitted, engine: str, job: Job, tell: Tell, source: Source | None = None
) -> Ending:
    """Train; returns the outcome. Raises DiagnosticError, also when the loss is not finite.

    The first Ctrl-C ends the run after a step, with a checkpoint; the second at once, with a
    KeyboardInterrupt. SIGTERM ends it at once, in order, with SystemExit.
    """
    from meshdsl.backends.train.devices import train_local, train_torchrun

    on_devices = train_torchrun if engine == "torchrun" else train_local
    with errors_at(source, RESUME), interruptible() as stopping:
        ending = on_devices(emitted, job, tell, stopping)
    if ending.trouble is not None:
        raise DiagnosticError(troubled(ending, ending.trouble, emitted.places, source))
    if ending.refused:
        raise DiagnosticError(refused(ending, job))
    return ending


def refused(ending: Ending, job: Job) -> Diagnostic:
    """The diagnostic of data that a run came upon, with what is kept of it."""
    places = " and ".join(path for path in (ending.checkpoint, job.out) if path)
    where = f"in {places}" if places else "not kept: `--checkpoint DIR` would have them"
    help = f"{ending.refused['help']}. The parameters of step {ending.step} are {where}"
    return Diagnostic(ending.refused["code"], ending.refused["text"], help=help)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C has been pressed; a second one raises KeyboardInterrupt.

    SIGTERM raises SystemExit. A signal that is ignored stays so: a shell starts background jobs of
    a script with Ctrl-C ignored, for it is meant for the foreground.
    """
    asked = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    is_main = threading.current_thread() is threading.main_thread()
    is_heard = is_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    before = signal.signal(signal.SIGINT, interrupt) if is_heard else None
    try:
        with terminated_in_order():
            yield asked.is_set
    finally:
        if is_heard:
            signal.signal(signal.SIGINT, before)


@contextmanager
def terminated_in_order() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, with 143: whoever holds something gives it back.

    A handler of somebody else stays, and so does what a thread beside the main one would change.
    """

    def terminate(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    is_free = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if is_free:
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        if is_free:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def troubled(
    ending: Ending, trouble: Trouble, places: Mapping[int, str], source: Source | None
) -> Diagnostic:
    """The diagnostic of a loss or a parameter that is not finite."""
    what = f"the loss is {trouble.loss}" if trouble.loss else "a parameter is not finite"
    message = f"{what} in step {trouble.seen}"
    span = None
    if trouble.line is not None:
        place = places.get(trouble.line, "")
        span = line_of(place, source)
        at = f" at {place}" if place else ""
        origin = f"`{trouble.name}` became {trouble.value} first, in step {trouble.step}{at}"
        of_data = f"the data of step {trouble.step} hold {trouble.value} in `{trouble.name}`"
        message += f"; {of_data if trouble.given else f'{origin} on device {trouble.device}'}"
    elif trouble.step is not None:
        message += f"; it began in step {trouble.step}"
    elif not trouble.stopped:
        message += "; it did not happen again when the steps were run again"
    last = f"the last checkpoint is {ending.checkpoint}; " if ending.checkpoint else ""
    help = f"{last}a lower learning rate, `clip=1.0` in the optimizer or cleaner data may help"
    return Diagnostic("MD0720", message, span, help=help)
