"""A program evaluated on all samples of some data: averages of its outputs over the batches.

The last batch may be short. It has a program of its own size, and weighs as many samples as it has.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshdsl.backends.data.wrong_data import rounded_note
from meshdsl.backends.engines.execution import errors_at, read_checked, refuse_too_large
from meshdsl.backends.engines.in_process import (
    Emitted,
    LoadedProgram,
    LocalSession,
    local_tensors,
    moved_away,
)
from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.engines.torchrun import Launcher
from meshdsl.backends.runtime.array_files import read_arrays
from meshdsl.backends.runtime.values import Spec
from meshdsl.backends.train.batches import Batches, Everything
from meshdsl.backends.train.data import open_everything
from meshdsl.backends.train.exported_params import checkpoint_at
from meshdsl.backends.train.feed import Feed
from meshdsl.backends.train.job import DataFiles
from meshdsl.backends.weights.model_files import is_model
from meshdsl.diagnostics import DiagnosticError, Diagnostics, counted
from meshdsl.disk_cache import from_json
from meshdsl.named.declarations import declare
from meshdsl.named.measures import CROSS_ENTROPY, with_measures
from meshdsl.pipeline import Compilation, Known
from meshdsl.records import dataclass

if TYPE_CHECKING:
    import torch

    from meshdsl.backends.engines.in_process import Programs


@dataclass(frozen=True, slots=True)
class EvaluationJob:
    """What is evaluated: samples, by parameters in a file.

    At most so many `batches`, where there is a limit. `measures`: the output `cross_entropy` is
    that of `with_measures`, so its exponential is the perplexity. A program's own is any number.
    """

    data: DataFiles
    params: str | None
    batches: int | None = None
    seed: int = 0
    measures: bool = False


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The averages of all outputs that are single numbers, over `samples` in `batches`.

    `amount` counts samples or tokens (`unit`), and `rest` the samples of a short last batch. The
    `notes` are about the data.
    """

    values: Mapping[str, float]
    samples: int
    batches: int
    rest: int
    amount: int
    unit: str
    seconds: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """The programs of whole batches and of the short one (None: there is none), and their texts."""

    made: Compilation
    short: Compilation | None
    emitted: Emitted


def measured(made: Compilation, rows: bool) -> Compilation:
    """The forward pass of a program, with what is measured of a classification.

    Of padded `rows` the program alone says which targets count.
    """
    written = made.written if rows else with_measures(made.written)
    known_stages = Known(made.known.tree, made.declarations, written)
    options = replace(made.options, evaluate=True, measured=False)
    return Compilation(made.source, options, made.diagnostics, known_stages)


def evaluate(
    made: Compilation, engine: str, job: EvaluationJob, diagnostics: Diagnostics
) -> Evaluation:
    """Evaluate the forward pass of `made` on an engine. Raises DiagnosticError.

    Notes about the data and the short batch go to `diagnostics`.
    """
    full_batch = on_engine(measured(made, job.data.rows), engine)
    own = {output.name for output in made.written.outputs}
    job = replace(job, measures=CROSS_ENTROPY not in own)
    refuse_too_large(full_batch, "local" if engine == "reference" else engine, None)
    program = Emitted(full_batch.emitted).load().program
    if job.params is not None:
        notes = read_checked(job.params, program.PARAMS, "parameters")[1]
        diagnostics.add(*map(rounded_note, notes))
    everything = open_everything(job.data, program.INPUTS, proven=False)
    diagnostics.add(*everything.notes)
    limited = job.batches is not None and job.batches * everything.size < everything.count
    short = None
    if everything.rest and not limited:
        short = of_size(made, engine, everything, job.data.rows)
    with errors_at(made.source):
        return _ENGINES[engine](plan_of(full_batch, short, engine), job, everything)


def known_vocabulary(params: str | None) -> str | None:
    """The characters that a checkpoint was trained on, where `params` is one and they are known."""
    if params is None or not os.path.isdir(params) or is_model(params):
        return None
    vocabulary: str | None = checkpoint_at(params).meta.get("vocabulary")
    return vocabulary


def on_engine(made: Compilation, engine: str) -> Compilation:
    """The program that an engine runs: the reference has one device."""
    if engine != "reference":
        return made
    options = replace(made.options, mesh="one:1", layout="", sbp=None, schedule=None)
    options = replace(options, cluster=None, objective=None)
    return made.under(options, Diagnostics())


def of_size(made: Compilation, engine: str, data: Everything, rows: bool) -> Compilation:
    """The program of the short last batch. Raises DiagnosticError where there is none."""
    dim = data.reader.batch
    try:
        short = on_engine(measured(resized(made, dim, data.rest), rows), engine)
        _ = short.emitted
    except DiagnosticError as error:
        message = f"the last batch has {counted(data.rest, 'sample')}, of {data.size}: "
        help = f"`--batches {data.count // data.size}` leaves it out"
        if data.count < data.size:
            help = "evaluate it under another layout, or without a schedule"
        first = error.diagnostics[0]
        raise DiagnosticError(replace(first, message=message + first.message, help=help)) from None
    return short


def resized(made: Compilation, dim: str, size: int) -> Compilation:
    """The same program with another size of a dim. Raises DiagnosticError."""
    sizes, problems = {**made.options.set_dims, dim: size}, Diagnostics()
    dims = declare(made.tree, problems, sizes)
    problems.raise_errors()
    declarations = replace(made.declarations, dims=dims.dims, unsized=dims.unsized)
    options = replace(made.options, set_dims=sizes)
    return Compilation(made.source, options, Diagnostics(), Known(made.known.tree, declarations))


def plan_of(made: Compilation, short: Compilation | None, engine: str) -> EvaluationPlan:
    """The plan of an engine."""
    if engine == "reference":
        from meshdsl.backends.train.reference_run import evaluated

        return EvaluationPlan(made, short, evaluated(made, short))
    emitted = Emitted(made.emitted, None if short is None else short.emitted)
    return EvaluationPlan(made, short, emitted)


# --- one device ----------------------------------------------------------------------------------


def sums_over(
    program: LoadedProgram,
    params: Mapping[str, torch.Tensor],
    batches: Batches,
    ranks: Ranks,
    seed: int,
    limit: int | None = None,
) -> Sums:
    """The sums of the scalar outputs over batches, or over so many of them, by their weights.

    All devices make this call. Raises DataRefused.
    """
    scalars = [name for name, spec in program.OUTPUTS.items() if not spec.dims]
    sums = Sums(dict.fromkeys(scalars, 0.0))
    feed, groups = Feed(program, batches, ranks, seed), ranks.groups(program.GROUPS)
    passes = batches.order.passes
    for batch in range(passes if limit is None else min(passes, limit)):
        outputs = program.device(ranks.rank, groups, feed.batch(batch), params)
        weight = batches.weight(batch)
        sums.add({n: float(outputs[n].item()) * weight for n in scalars}, weight)
    return sums


class Sums:
    """Sums of outputs over batches, of which each has a weight; `averages` are those divided."""

    def __init__(self, values: dict[str, float]) -> None:
        self.values, self.weight, self.batches = values, 0, 0

    def add(self, values: Mapping[str, float], weight: int, batches: int = 1) -> None:
        """Add those of another batch, or of others."""
        self.values = {n: self.values.get(n, 0.0) + value for n, value in values.items()}
        self.weight, self.batches = self.weight + weight, self.batches + batches

    @property
    def averages(self) -> dict[str, float]:
        """The averages by name."""
        return {name: value / self.weight for name, value in self.values.items()}


def evaluate_on(
    ranks: Ranks, programs: Programs, job: EvaluationJob, everything: Everything
) -> Evaluation:
    """One device's part of an evaluation; all return the same."""
    began = time.perf_counter()
    sums, samples = Sums({}), 0
    for program in programs.every:
        is_short = program is programs.evaluation
        params = _params(program.PARAMS, job, ranks)
        batches = everything.batches(is_short)
        added = sums_over(program, params, batches, ranks, job.seed, job.batches)
        samples += added.batches * (everything.rest if is_short else everything.size)
        sums.add(added.values, added.weight, added.batches)
    values = sums.averages
    if job.measures and CROSS_ENTROPY in values and "perplexity" not in values:
        values["perplexity"] = _exp(values[CROSS_ENTROPY])
    short = everything.rest if programs.evaluation is not None else 0
    seconds, amount = time.perf_counter() - began, samples * everything.amount
    return Evaluation(values, samples, sums.batches, short, amount, everything.unit, seconds)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _params(specs: Mapping[str, Spec], job: EvaluationJob, ranks: Ranks) -> dict[str, torch.Tensor]:
    arrays = {} if job.params is None else read_arrays(job.params, proven=True)
    blocks = local_tensors(ranks.mesh, specs, arrays, job.seed, [ranks.rank])[0]
    moved_away(specs, [blocks])
    return {name: block.to(ranks.where) for name, block in blocks.items()}


# --- engines -------------------------------------------------------------------------------------


def _local(plan: EvaluationPlan, job: EvaluationJob, everything: Everything) -> Evaluation:
    programs = plan.emitted.load()
    session = LocalSession(programs)
    return session.run(lambda ranks: evaluate_on(ranks, programs, job, everything))[0]


RESULT = "evaluation.json"
"""The file that device 0 writes the result to."""


def _torchrun(plan: EvaluationPlan, job: EvaluationJob, everything: Everything) -> Evaluation:
    with Launcher("evaluate", plan.emitted) as launcher:
        if launcher.run(job) != 0:
            raise launcher.error
        return from_json((launcher.folder / RESULT).read_text("utf-8"), Evaluation)


def evaluate_process(folder: Path, ranks: Ranks, programs: Programs, job: EvaluationJob) -> None:
    """The work of a process: its part of an evaluation, which the first one writes."""
    everything = open_everything(job.data, programs.program.INPUTS, proven=True)
    result = evaluate_on(ranks, programs, job, everything)
    if ranks.rank == 0:
        (folder / RESULT).write_text(json.dumps(asdict(result)), encoding="utf-8")


_ENGINES = {"local": _local, "torchrun": _torchrun, "reference": _local}
