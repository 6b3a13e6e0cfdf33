"""`plan.train`: a plan's program trained under its mesh and layout, in this process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdsl.api.dims import check_seed
from meshdsl.diagnostics import Diagnostic, DiagnosticError, Diagnostics, counted, fail
from meshdsl.records import dataclass
from meshdsl.report.curves import curve_picture
from meshdsl.report.document import Document, Picture, line
from meshdsl.report.running import headline
from meshdsl.report.training_progress import progress
from meshdsl.report.views.parts import View

if TYPE_CHECKING:
    from meshdsl.api.plan import Plan
    from meshdsl.backends.train.evaluation import Evaluation
    from meshdsl.backends.train.job import DataFiles, Job
    from meshdsl.backends.train.tokenized import Texts
    from meshdsl.pipeline import Compilation

_FILES = {"data": "data.npz", "eval_data": "eval.npz"}
"""The files that arrays are written to, by the arguments that gave them; `.npy` for tokens."""


@dataclass(frozen=True, slots=True, repr=False)
class Training(View):
    """The result of a training run; a notebook draws its curve.

    `losses` has one number per step of this run, and `grad_norms` the norm of the whole gradient
    in each, before clipping (none where stages update on the way); `values` are the last scalars
    the program returned, `evaluated` their last averages over held-out batches. `seconds` is the
    time of all steps, `amount` how many samples or tokens (`unit`) they took. `how` is `finished`
    or `interrupted`.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    values: Mapping[str, Any]
    evaluated: Mapping[str, float]
    steps: int
    seconds: float
    amount: int
    unit: str
    how: str
    checkpoint: str | None
    notes: tuple[Diagnostic, ...]

    @property
    def document(self) -> Document:
        """One line, and the curve of the loss over the steps."""
        said = line(self._line())
        if len(self.losses) < 2:
            return (said,)
        first = self.steps - len(self.losses) + 1
        return (said, Picture(lambda: curve_picture("loss", self.losses, first), ""))

    def __str__(self) -> str:
        return self._line()

    def _line(self) -> str:
        last = f": loss {self.losses[0]:.4g} to {self.losses[-1]:.4g}" if self.losses else ""
        rate = self.amount / self.seconds if self.seconds else 0.0
        speed = f", {rate:,.0f} {self.unit}/s" if self.losses else ""
        stopped = "" if self.how == "finished" else f", {self.how}"
        return f"trained {counted(len(self.losses), 'step')}{last}{speed}{stopped}"


def train(plan: Plan, made: Compilation, data: Any, asked: Mapping[str, Any]) -> Training:
    """Train the step `made` of a plan, and set the plan's parameters to the trained ones."""
    from meshdsl.backends.train.training_run import check_trainable, own_folder

    check_trainable(made)
    _check_arguments(asked)
    with (
        own_folder(asked["checkpoint"], asked["resume"], asked["force"]),
        tempfile.TemporaryDirectory(prefix="meshdsl-") as folder,
    ):
        with _by_arguments(folder):
            return _train(plan, made, data, asked, Path(folder))


def evaluate(plan: Plan, made: Compilation, data: Any, asked: Mapping[str, Any]) -> Evaluation:
    """The averages of a plan's outputs over all samples of the data."""
    from meshdsl.backends.train.evaluation import EvaluationJob
    from meshdsl.backends.train.evaluation import evaluate as averages
    from meshdsl.backends.train.tokenized import tokenized

    _check_arguments(asked)
    with (
        tempfile.TemporaryDirectory(prefix="meshdsl-") as folder,
        _by_arguments(folder),
        tokenized(_files(data, asked, Path(folder)), _texts(asked), all_of_it=True) as files,
    ):
        params = _stored(plan.params, Path(folder, "params.npz"))
        job = EvaluationJob(files, params, asked["batches"], asked["seed"])
        notes = Diagnostics()
        evaluation = averages(made, asked["engine"], job, notes)
        return replace(evaluation, notes=tuple(note.message for note in notes))


_LEAST = {"steps": 0, "eval_every": 0, "checkpoint_every": 0, "batches": 1}
"""The least that arguments may be which are whole numbers."""


def _check_arguments(asked: Mapping[str, Any]) -> None:
    """Refuse values that the command line refuses as well. Raises MD0602 and MD0604."""
    from meshdsl.backends.train.training_run import ENGINES

    if asked["engine"] not in ENGINES:
        message = f"`engine={asked['engine']!r}`: not one of those there are"
        fail("MD0602", message, help=f"there are {', '.join(ENGINES)}")
    for name, least in _LEAST.items():
        value = asked.get(name)
        if value is not None and not (isinstance(value, int | np.integer) and value >= least):
            help = f"for instance `{name}={least + 1}`"
            message = f"`{name}={value!r}`: a whole number from {least} on is needed"
            fail("MD0604", message, help=help)
    fraction = asked.get("eval_fraction", 0)
    if not (isinstance(fraction, int | float | np.number) and 0 <= fraction <= 1):
        message = f"`eval_fraction={fraction!r}`: a number from 0 to 1 is needed"
        fail("MD0604", message, help="for instance `eval_fraction=0.1`")
    for name in ("end_token", "characters", "tensorboard"):
        value = asked.get(name)
        if not isinstance(value, str | None):
            fail(
                "MD0604", f"`{name}={value!r}`: a string is needed", help=f"`{name}={str(value)!r}`"
            )


@contextmanager
def _by_arguments(folder: str) -> Iterator[None]:
    """Raise diagnostics that call arrays by their argument, not by the file they are in."""
    try:
        yield
    except DiagnosticError as error:
        said = (replace(d, message=_by_argument(d.message, folder)) for d in error.diagnostics)
        raise DiagnosticError(*said) from error


def _files(data: Any, asked: Mapping[str, Any], folder: Path) -> DataFiles:
    """The files of samples; arrays are written into the folder."""
    from meshdsl.backends.train.job import DOCUMENTS, DataFiles

    path = _stored(data, folder / _FILES["data"])
    files = DataFiles(
        path, batch=asked["batch"], tokens=asked["tokens"], vocabulary=asked.get("characters")
    )
    if asked["documents"] not in DOCUMENTS:
        message = f"`documents={asked['documents']!r}`: not one of those there are"
        fail("MD0602", message, help=f"there are {', '.join(DOCUMENTS)}")
    return replace(files, rows=asked["documents"] == "rows")


def _texts(asked: Mapping[str, Any]) -> Texts:
    from meshdsl.backends.train.tokenized import Texts

    return Texts(asked["tokenizer"], asked["end_token"], asked["text_field"])


def _job(
    plan: Plan, made: Compilation, data: Any, asked: Mapping[str, Any], folder: Path, out: str
) -> Job:
    """The training job, with its seed not yet chosen; it writes the parameters to `out`."""
    from meshdsl.backends.train.described import sources_of
    from meshdsl.backends.train.event_log import check_events
    from meshdsl.backends.train.job import Job
    from meshdsl.backends.train.training_run import accumulate_dim, check_together

    files, held = _files(data, asked, folder), None
    if asked["eval_data"] is not None:
        held = _stored(asked["eval_data"], folder / _FILES["eval_data"])
    fraction = asked["eval_fraction"] if asked["eval_every"] and held is None else 0.0
    files = replace(files, held_out=held, fraction=fraction, order=asked["order"])
    files = replace(files, accumulate=accumulate_dim(made))
    begin = None if asked["resume"] else _stored(plan.params, folder / "begin.npz")
    job = Job(
        files,
        asked["steps"],
        eval_every=asked["eval_every"],
        params=begin,
        out=out,
        tensorboard=asked["tensorboard"],
        checkpoint=asked["checkpoint"],
        described=sources_of(None, asked["tokenizer"]),
        checkpoint_every=asked["checkpoint_every"],
        resume=asked["resume"],
    )
    check_together(job)
    if job.tensorboard is not None:
        check_events(job.tensorboard, job.resume, asked["force"])
    return job


class _Heard:
    """What a run has told: the losses and norms of its steps, and its notes."""

    def __init__(self, loss: str, folder: Path, show: Callable[[Mapping[str, Any]], None]) -> None:
        self.loss, self.folder, self.show = loss, str(folder), show
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.notes = Diagnostics()

    def hear(self, event: Mapping[str, Any]) -> None:
        """Keep what an event says, and show it."""
        if event["kind"] == "step":
            self.losses.append(float(event["values"][self.loss]))
            if "grad_norm" in event["measured"]:
                self.norms.append(float(event["measured"]["grad_norm"]))
        elif event["kind"] == "note":
            event = {**event, "text": _by_argument(event["text"], self.folder)}
            parts = {"severity": event["severity"], "help": event["help"]}
            self.notes.add(Diagnostic(event["code"], event["text"], **parts))
        self.show(event)


@contextmanager
def _learning(plan: Plan, out: str) -> Iterator[None]:
    """Afterwards the plan has the parameters written: of a run that fails, those so far."""
    try:
        yield
    finally:
        if os.path.exists(out):
            with np.load(out) as learned:
                plan.params = dict(learned)


def _train(
    plan: Plan, made: Compilation, data: Any, asked: Mapping[str, Any], folder: Path
) -> Training:
    from meshdsl.backends.train.tokenized import tokenized
    from meshdsl.backends.train.training_run import planned, prepared, train

    out, engine, seed = str(folder / "params.npz"), asked["engine"], asked["seed"]
    job, loss = _job(plan, made, data, asked, folder, out), plan.loss
    chosen = planned(made, engine, evaluated=asked["eval_every"] > 0)
    job = prepared(chosen, job, None if seed is None else check_seed(seed))
    title = headline(chosen.made, engine)
    with (
        tokenized(job.data, _texts(asked)) as stored,
        progress(title, quiet=not asked["progress"], stderr=True) as show,
        _learning(plan, out),
    ):
        heard = _Heard(loss, folder, show)
        job = replace(job, data=stored)
        ending = train(chosen.emitted, engine, job, heard.hear, made.source)
    said = (ending.values, ending.evaluated, ending.step, ending.seconds, ending.amount)
    about = (ending.unit, ending.how, ending.checkpoint, tuple(heard.notes))
    return Training(tuple(heard.losses), tuple(heard.norms), *said, *about)


def _by_argument(message: str, folder: str) -> str:
    """The message with arrays called by their argument, not by the file they were written to."""
    for argument, name in _FILES.items():
        for file in (name, Path(name).with_suffix(".npy")):
            message = message.replace(os.path.join(folder, file), f"`{argument}`")
    return message


def _flat(data: Any, path: Path) -> str:
    """The path of a file of tokens, with an array of them."""
    from meshdsl.backends.engines.persistent import as_numpy
    from meshdsl.backends.runtime.array_files import ArraysRefused

    try:
        np.save(path, as_numpy(data, "data"))
    except ArraysRefused as refused:
        fail("MD0504", str(refused), help="give arrays by the names of inputs, or one of tokens")
    return str(path)


def _stored(data: Any, path: Path) -> str:
    """The path of a data file: the one given, or `path` with the arrays written to it."""
    if isinstance(data, str | Path):
        return str(data)
    from meshdsl.backends.engines.persistent import as_numpy
    from meshdsl.backends.runtime.array_files import ArraysRefused, write_npz

    if not isinstance(data, Mapping):
        return _flat(data, path.with_suffix(".npy"))
    try:
        arrays = {name: as_numpy(array, name) for name, array in data.items()}
    except ArraysRefused as refused:
        fail("MD0504", str(refused), help="give whole arrays of numbers")
    write_npz(str(path), arrays, durable=False)
    return str(path)
